// Products of the expert's few rows with streamed weights: operands, multiplication, exchange of the parts.
#pragma once
#include "expert_multiply.cuh"
#include "expert_residual.cuh"

// -- operands ------------------------------------------------------------------------------------------------------------

// Where eight inputs of an operand row lie in shared memory; `group` counts them.
__device__ __forceinline__ unsigned char* operand(const Consumer& c, int row, int group) {
  return c.shared.operands + group / 8 * kOperandBytesOfChunk + row * 128 + (group % 8 ^ row % 8) * 16;
}

// Behind writes to the operands, in front of a barrier: products of four warps read shared memory in a way of their own.
__device__ __forceinline__ void publish_operands() {
  if (WARPGROUPS) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Writes this lane's four inputs of one row.
__device__ __forceinline__ void store_inputs(const Consumer& c, int row, const float4& v) {
  *reinterpret_cast<uint2*>(operand(c, row, c.lane / 2) + c.lane % 2 * 8) =
      make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
}

// The residual times 1 + scale, as bfloat16 operands of P.
template <typename P>
__device__ __forceinline__ void load_residual(Consumer& c, const Position& at) {
  update_residual(c, at);
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const float4 v = scaled(c, c.residual[i]);
    if (c.row_of_warp(i) < ROWS)
      store_inputs(c, c.row_of_warp(i), make_float4(lifted<P>(v.x), lifted<P>(v.y), lifted<P>(v.z), lifted<P>(v.w)));
  }
  publish_operands();
  c.block_barrier();
}

// PIECES times 256 columns of every row of bfloat16.
template <int PIECES>
__device__ __forceinline__ void load_rows(const Consumer& c, const bf16* rows, int width) {
  constexpr int kCount = kRowsEach * PIECES;
  uint4 v[kCount];
  poll(v, [&](int i) -> const void* {
    const int row = c.row_of_warp(i / PIECES);
    return row < ROWS ? rows + row * width + i % PIECES * 256 + c.lane * 8 : nullptr;
  });
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = c.row_of_warp(i / PIECES);
    if (row < ROWS) store16(operand(c, row, i % PIECES * 32 + c.lane), v[i]);
  }
}

// -- parts of outputs ------------------------------------------------------------------------------------------------------

// A part of one output tile lies with its owner as parts[slot][rank][row][kTile].
struct Sender {
  u32 to, counted;  // addresses with the owner: this lane's place in slot 0, and what counts arrivals

  __device__ __forceinline__ Sender(const Consumer& c, const Place& place, int owner) {
    to = remote(shared_address(place.parts) + (c.rank * ROWS + c.row) * kTile * 2 + c.quad * 4, owner);
    counted = remote(shared_address(c.shared.parts + place.barrier), owner);
  }

  __device__ __forceinline__ void send_tile(const Consumer& c, const u32 (&words)[kRowBlocks], int slot) const {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b)
      if (8 * b + c.row < ROWS) send_word(to + slot * kPartFloats * 4 + b * 8 * kTile * 2, words[b], counted);
  }
};

// Multiplies the tiles of this cluster and sends each to its owner: units of tiles go round the ranks.
template <typename P>
__device__ __forceinline__ void multiply_for_owners(Consumer& c, const Place& place) {
  multiply_tiles<P>(c, [&](int tile, const u32 (&words)[kRowBlocks]) {
    const Sender sender(c, place, tile / P::kUnit % kRanks);
    sender.send_tile(c, words, tile / (P::kUnit * kRanks) * P::kUnit + tile % P::kUnit);
  });
}

// The eight parts of two neighbouring outputs, added.
__device__ __forceinline__ float2 collect(const Consumer& c, const float* parts, int slot, int row) {
  const u32* from = reinterpret_cast<const u32*>(parts) + (slot * kRanks * ROWS + row) * kTile / 2 + c.quad;
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int r = 0; r < kRanks; ++r) {
    const u32 part = from[r * ROWS * kTile / 2];
    sum.x += low_float(part);
    sum.y += high_float(part);
  }
  return sum;
}

// What the sums of two neighbouring outputs of narrow weights are multiplied by.
template <typename P>
__device__ __forceinline__ float2 factor_of(const Consumer& c, const Position& at, const float* table, int tile) {
  if constexpr (P::kBits == 16) return make_float2(1.0f, 1.0f);
  return __ldg(reinterpret_cast<const float2*>(table + (at.layer * P::kTiles + tile) * kTile) + c.quad);
}

template <typename P>
__device__ __forceinline__ float2 scaled_sum(const float2& sum, const float2& factor) {
  if constexpr (P::kBits == 16) return sum;
  return make_float2(sum.x * factor.x, sum.y * factor.y);
}

// Calls visit(unit, row) for every row of the units that this block owns, a lane for each two outputs of a tile. Lanes whose row
// does not exist come too. Warps begin from the first one, or from the last one.
template <bool FROM_LAST, typename Visit>
__device__ __forceinline__ void visit_owned(const Consumer& c, int units, const Visit& visit) {
#pragma unroll 1
  for (int i = FROM_LAST ? kWarps - 1 - c.warp : c.warp; i < units * kRowBlocks; i += kWarps)
    visit(i / kRowBlocks, i % kRowBlocks * 8 + c.row);
}

// -- a product behind an adaptive norm -------------------------------------------------------------------------------------

// What has come for the tiles of this owner, and the squares of all rows.
struct Arrived {
  const float *parts, *squares;

  __device__ __forceinline__ float inverse_rms(int row) const {
    float total = 0.0f;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) total += squares[r * ROWS + row];
    return rsqrtf(total / kWidth + kEps);
  }

  // Two neighbouring outputs of norm(x) @ W: the row's factor is applied to the sum, and the rest is in tables.
  template <typename P>
  __device__ __forceinline__ float2 value(const Consumer& c, int slot, int row, float inverse, const float2& factor,
                                          const float2& shift) const {
    const float2 y = scaled_sum<P>(collect(c, parts, slot, row), factor);
    return make_float2(fmaf(y.x, inverse, shift.x), fmaf(y.y, inverse, shift.y));
  }
};

// The shift's part of two neighbouring outputs.
template <typename P>
__device__ __forceinline__ float2 shift_of(const Consumer& c, const Position& at, const float* table, int tile) {
  return __ldg(reinterpret_cast<const float2*>(table + (c.layers(at) * P::kTiles + tile) * kTile) + c.quad);
}

// The squares of this warp's rows, to all blocks of the cluster: squares[rank][row].
__device__ __forceinline__ void send_squares(const Consumer& c, const float* squares, u64* barrier) {
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const float sum = squares_of(c.residual[i]);
    if (c.row_of_warp(i) < ROWS && c.lane < kRanks)
      send(remote(shared_address(squares + c.rank * ROWS + c.row_of_warp(i)), c.lane), sum,
           remote(shared_address(barrier), c.lane));
  }
}

// This block's word of sums `number`: those of this lane's first output of a tile that it owns, in row 0.
__device__ __forceinline__ u32* owned_sums(const Consumer& c, int number, int slot) {
  return c.sum_words(number) + (c.first<Output>() + slot * kRanks + c.rank) * kTile + c.quad * 2;
}

// Resets this block's words of the sums that were made before those that this phase has added. The parts of the latter came
// from every block, and each had read the former by then. There are four copies, so these words are written again after the
// fence of this layer, and read after sums that were made behind that fence. The last warps begin, as the first ones store what
// has arrived.
__device__ __forceinline__ void reset_sums(const Consumer& c, const Position& at) {
  visit_owned<true>(c, c.owned<Output>(), [&](int slot, int row) {
    if (row < ROWS) store_relaxed(owned_sums(c, c.sums(at) - 1, slot) + row * kWidth, kUnwritten, kUnwritten);
  });
}

// norm(x) @ W for the tiles of this cluster; `store(arrived, early, unit, row)` stores what this block owns (see visit_owned).
// `early` is what `fetch()` gives, which is called when there is nothing left to multiply, and before the wait.
template <typename P, typename Fetch, typename Store>
__device__ __forceinline__ void multiply_normalised(Consumer& c, const Position& at, const Fetch& fetch, const Store& store) {
  const Place place = c.place(at), sums{place.parts + kSquares, place.barrier, place.parity};
  const int slots = c.owned<P>();
  c.expect(place, (slots * kPartFloats + kSquares) * 4);
  load_residual<P>(c, at);
  multiply_for_owners<P>(c, sums);
  send_squares(c, place.parts, c.shared.parts + place.barrier);
  c.stages += P::stages(c.count<P>());
  const auto early = fetch();
  c.await(place);
  const Arrived arrived{sums.parts, place.parts};
  visit_owned<false>(c, slots / P::kUnit, [&](int unit, int row) { store(arrived, early, unit, row); });
  reset_sums(c, at);
}

// -- a product that is added to the residual -------------------------------------------------------------------------------

// y = rows @ W, whose inputs are bfloat16 rows of the buffer at word `buffer`; `factors` are those of narrow weights.
template <typename P>
__device__ __forceinline__ void multiply_added(Consumer& c, const Position& at, int buffer, const float* factors) {
  constexpr int kInputs = P::kSlice * kRanks;
  const auto factor = [&](int slot) {
    return factor_of<P>(c, at, factors, min(c.first<P>() + slot * kRanks + c.rank, P::kTiles - 1));
  };
  const Place place = c.place(at);
  c.expect(place, c.owned<P>() * kPartFloats * 4);
  c.begin();
  c.block_barrier();  // warps that poll early would slow down those that still store
  load_rows<P::kSlice / 256>(c, c.rows(buffer, kInputs, c.layer_copy(at)) + c.rank * P::kSlice, kInputs);
  publish_operands();
  if (at.phase == kDown) {
    c.fence_barrier();
  } else {
    c.block_barrier();
  }
  multiply_for_owners<P>(c, place);
  c.stages += P::stages(c.count<P>());
  const int early_slot = c.warp / kRowBlocks;
  const float2 early = factor(early_slot);  // fetched before the wait
  c.await(place);
  visit_owned<false>(c, c.owned<P>(), [&](int slot, int row) {
    if (row >= ROWS) return;
    const float2 sum = scaled_sum<P>(collect(c, place.parts, slot, row), slot == early_slot ? early : factor(slot));
    store_relaxed(owned_sums(c, c.sums(at), slot) + row * kWidth, __float_as_uint(sum.x), __float_as_uint(sum.y));
  });
}
