// Products of the expert's few rows with streamed weights: operands, multiplication, exchange of the parts.
#pragma once
#include "expert_multiply.cuh"
#include "expert_residual.cuh"

// -- operands ---------------------------------------------------------------------------------------------------------

// Where eight inputs of an operand row lie in shared memory; `group` counts them.
__device__ __forceinline__ unsigned char* operand(const Consumer& c, int row, int group) {
  return c.shared.operands + group / 8 * kOperandBytesOfChunk + row * 128 + (group % 8 ^ row % 8) * 16;
}

// The same of few rows, as an address in shared memory. Of a row behind the first eight it is that of its first two
// inputs; two further ones lie at the address with 1, 2 or 3 added modulo 2 to bits 4 and 5 (see kMoreRowsOffset).
__device__ __forceinline__ u32 operand_address(const Consumer& c, int row, int group) {
  if (!kFewRows || row < 8) return shared_address(operand(c, row, group));
  const int chunk = group / 8, pair = group % 8 / 4;
  return shared_address(c.shared.operands) + chunk * kOperandBytesOfChunk + kMoreRowsOffset + pair * kMoreRowsPair +
         (row - 8) * 64 + more_rows_swizzle(chunk, pair) + group % 4 * 4;
}

__device__ __forceinline__ void store_shared4(u32 shared, u32 word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(word) : "memory");
}

// Writes eight inputs of a row. OFFSET: bytes to another chunk, an even number of chunks further on.
template <int OFFSET>
__device__ __forceinline__ void store_operand(u32 to, int row, const uint4& v) {
  if (kFewRows && row >= 8) {
    store_shared4(to + OFFSET, v.x);
    store_shared4((to ^ 16) + OFFSET, v.y);
    store_shared4((to ^ 32) + OFFSET, v.z);
    store_shared4((to ^ 48) + OFFSET, v.w);
  } else {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to + OFFSET), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
  }
}

// Behind writes to the operands, in front of a barrier: products of four warps read shared memory in a way of their
// own.
__device__ __forceinline__ void publish_operands() {
  if (WARPGROUPS) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Where this lane's four inputs of a row lie, and what writes them there.
__device__ __forceinline__ u32 inputs_address(const Consumer& c, int row) {
  const u32 to = operand_address(c, row, c.inner_column() / 8), half = c.inner_column() / 4 % 2;
  return kFewRows && row >= 8 ? to ^ half * 32 : to + half * 8;
}
__device__ __forceinline__ void store_inputs(u32 to, int row, const float4& v) {
  const u32 low = pack_bf16(v.x, v.y), high = pack_bf16(v.z, v.w);
  if (kFewRows && row >= 8) {
    store_shared4(to, low);
    store_shared4(to ^ 16, high);
  } else {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(low), "r"(high) : "memory");
  }
}

// The sums of four squares that each lane has of a row, for the warp that adds them (see send_stored_squares). They lie
// in the memory of traded sums: those are last read in front of the barrier at the end of output or down, and squares
// are written and read behind that, in front of the one at the end of project or gate_up.
constexpr int kSquareStride = kWarpSize + 4;  // free of bank conflicts
static_assert(!kFewRows || ROWS * kSquareStride <= kTradedFloats, "squares of all rows");

__device__ __forceinline__ void store_squares(const Consumer& c) {
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i)
    if (c.row_of_warp(i) < ROWS) c.shared.traded[c.row_of_warp(i) * kSquareStride + c.lane] = square_of(c.residual[i]);
}

// The residual times 1 + scale, as bfloat16 operands of P. `meanwhile`: see poll.
template <typename P, typename Meanwhile>
__device__ __forceinline__ void load_residual(Consumer& c, const Position& at, const Meanwhile& meanwhile) {
  u32 to[kRowsEach];  // made before there is a value to wait for
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    to[i] = inputs_address(c, c.row_of_warp(i));
    if (kFewRows) asm volatile("" : "+r"(to[i]));
  }
  update_residual(c, at, meanwhile);
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const int row = c.row_of_warp(i);
    const float4 v = scaled(c, c.residual[i]);
    if (row < ROWS)
      store_inputs(to[i], row, make_float4(lifted<P>(v.x), lifted<P>(v.y), lifted<P>(v.z), lifted<P>(v.w)));
  }
  if (kFewRows) store_squares(c);
  publish_operands();
  c.block_barrier();
}

// PIECES times 256 columns of every row of bfloat16. `meanwhile`: see poll.
template <int PIECES, typename Meanwhile>
__device__ __forceinline__ void load_rows(const Consumer& c, const bf16* rows, int width, const Meanwhile& meanwhile) {
  constexpr int kCount = kRowsEach * PIECES;
  u32 to[kRowsEach];  // made before there is a value to wait for
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    to[i] = operand_address(c, c.row_of_warp(i), c.lane);
    if (kFewRows) asm volatile("" : "+r"(to[i]));
  }
  uint4 v[kCount];
  poll(v, [&](int i) { return c.row_of_warp(i / PIECES) < ROWS; },
       [&](int i) { return rows + c.row_of_warp(i / PIECES) * width + i % PIECES * 256 + c.lane * 8; }, meanwhile);
  constexpr int kPiece = 256 / kChunk * kOperandBytesOfChunk;
  static_assert(PIECES <= 2, "pieces of a row");
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const int row = c.row_of_warp(i);
    if (row >= ROWS) break;
    store_operand<0>(to[i], row, v[i * PIECES]);
    if (PIECES > 1) store_operand<kPiece>(to[i], row, v[i * PIECES + PIECES - 1]);
  }
}

// -- parts of outputs -------------------------------------------------------------------------------------------------

// A part of one output tile lies with its owner as parts[slot][rank][row][kTile].
struct Sender {
  u32 to, counted;  // addresses with the owner: this lane's place in slot 0, and what counts arrivals

  __device__ __forceinline__ Sender(const Consumer& c, const Place& place, int owner) {
    to = remote(shared_address(place.parts) + (c.rank * ROWS + c.row) * kTile * 2 + c.quad * 4, owner);
    counted = remote(c.parts_barrier(place), owner);
  }

  __device__ __forceinline__ void send_tile(const Consumer& c, const u32 (&words)[kRowBlocks], int slot) const {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b)
      if (8 * b + c.row < ROWS) send_word(to + slot * kPartFloats * 4 + b * 8 * kTile * 2, words[b], counted);
  }
};

// Sends parts of tiles to their owners: units of tiles go round the ranks.
template <typename P>
struct ToOwners {
  const Consumer& c;
  const Place& place;

  static __device__ __forceinline__ int owner(int tile) { return tile / P::kUnit % kRanks; }
  static __device__ __forceinline__ int slot(int tile) {
    return tile / (P::kUnit * kRanks) * P::kUnit + tile % P::kUnit;
  }

  // A tile in a warp (see transpose_tile).
  __device__ __forceinline__ void operator()(int tile, const u32 (&words)[kRowBlocks]) const {
    Sender(c, place, owner(tile)).send_tile(c, words, slot(tile));
  }
  // The eight outputs of one row of a tile.
  __device__ __forceinline__ void operator()(int tile, int row, const uint4& outputs) const {
    const u32 to = shared_address(place.parts) + (c.rank * ROWS + row) * kTile * 2 + slot(tile) * kPartFloats * 4;
    send(remote(to, owner(tile)), outputs, remote(c.parts_barrier(place), owner(tile)));
  }
};

// Multiplies the tiles of this cluster and sends each to its owner.
template <typename P>
__device__ __forceinline__ void multiply_for_owners(Consumer& c, TileMultiplier<P>& m, const Place& place) {
  multiply_tiles<P>(c, m, ToOwners<P>{c, place});
}

// Where the first part of two neighbouring outputs lies, as an address in shared memory, and the eight parts, added.
__device__ __forceinline__ u32 parts_of(const Consumer& c, const float* parts, int slot, int row) {
  return shared_address(parts) + ((slot * kRanks * ROWS + row) * kTile / 2 + c.quad) * 4;
}
__device__ __forceinline__ float2 collect(u32 from) {
  u32 part[kRanks];
#pragma unroll
  for (int r = 0; r < kRanks; ++r) part[r] = load_shared4(from + r * ROWS * kTile * 2);
  float2 sum = make_float2(low_float(part[0]), high_float(part[0]));
#pragma unroll
  for (int r = 1; r < kRanks; ++r) {
    sum.x += low_float(part[r]);
    sum.y += high_float(part[r]);
  }
  return sum;
}

// Whether a warp has at most one block of rows of one unit that its block owns. Then all addresses are made before the
// wait.
template <typename P>
constexpr bool kOnce = kFewRows && P::kSlots / P::kUnit * kRowBlocks <= kWarps;

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

// Calls visit(unit, row) for every row of the units that this block owns, a lane for each two outputs of a tile. Lanes
// whose row does not exist come too. Warps begin from the first one, or from the last one. IS_ONCE: none comes twice.
template <bool FROM_LAST, bool IS_ONCE, typename Visit>
__device__ __forceinline__ void visit_owned(const Consumer& c, int units, const Visit& visit) {
  const int first = FROM_LAST ? kWarps - 1 - c.warp : c.warp;
  if constexpr (IS_ONCE) {
    if (first < units * kRowBlocks) visit(first / kRowBlocks, first % kRowBlocks * 8 + c.row);
  } else {
#pragma unroll 1
    for (int i = first; i < units * kRowBlocks; i += kWarps) visit(i / kRowBlocks, i % kRowBlocks * 8 + c.row);
  }
}

// -- a product behind an adaptive norm --------------------------------------------------------------------------------

// What comes for one row of a unit of this owner: addresses of the parts of its first tile, and of the row's squares.
struct Arrived {
  u32 parts, squares;

  __device__ __forceinline__ void pin() { asm volatile("" : "+r"(parts), "+r"(squares)); }
  __device__ __forceinline__ float inverse_rms() const {
    float square[kRanks], total = 0.0f;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) square[r] = __uint_as_float(load_shared4(squares + r * ROWS * 4));
#pragma unroll
    for (int r = 0; r < kRanks; ++r) total += square[r];
    return rsqrtf(total / kWidth + kEps);
  }

  // Two neighbouring outputs of norm(x) @ W, of tile number `tile` of the unit: the row's factor is applied to the sum,
  // and the rest is in tables.
  template <typename P>
  __device__ __forceinline__ float2 value(int tile, float inverse, const float2& factor, const float2& shift) const {
    const float2 y = scaled_sum<P>(collect(parts + tile * kPartFloats * 4), factor);
    return make_float2(fmaf(y.x, inverse, shift.x), fmaf(y.y, inverse, shift.y));
  }
};

// The shift's part of two neighbouring outputs.
template <typename P>
__device__ __forceinline__ float2 shift_of(const Consumer& c, const Position& at, const float* table, int tile) {
  return __ldg(reinterpret_cast<const float2*>(table + (c.layers(at) * P::kTiles + tile) * kTile) + c.quad);
}

// The squares of this warp's rows, to all blocks of the cluster: squares[rank][row].
__device__ __forceinline__ void send_squares(const Consumer& c, const float* squares, u32 barrier) {
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const float sum = squares_of(c.residual[i]);
    if (c.row_of_warp(i) < ROWS && c.lane < kRanks)
      send(remote(shared_address(squares + c.rank * ROWS + c.row_of_warp(i)), c.lane), sum, remote(barrier, c.lane));
  }
}

// The same of few rows by the last warp, which has the fewest units, from what all have stored: two lanes a row.
__device__ __forceinline__ void send_stored_squares(const Consumer& c, const float* squares, u32 barrier) {
  if (c.warp < kWarps - 1) return;
  const int row = c.lane / 2, half = c.lane % 2, existing = min(row, ROWS - 1);
  const float* from = c.shared.traded + existing * kSquareStride + half * 16;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 v = load_float4(from + 4 * i);
    sum += (v.x + v.y) + (v.z + v.w);
  }
  sum += __shfl_xor_sync(kAllLanes, sum, 1);
  if (row >= ROWS) return;
  const u32 to = shared_address(squares + c.rank * ROWS + row);
#pragma unroll
  for (int r = 0; r < kRanks / 2; ++r) {
    const int block = half * (kRanks / 2) + r;
    send(remote(to, block), sum, remote(barrier, block));
  }
}

// This block's word of sums `number`: those of this lane's first output of a tile that it owns, in row 0.
__device__ __forceinline__ u32* owned_sums(const Consumer& c, int number, int slot) {
  return c.sum_words(number) + (c.first<Output>() + slot * kRanks + c.rank) * kTile + c.quad * 2;
}

// Resets this block's words of the sums that were made before those that this phase has added. The parts of the latter
// came from every block, and each had read the former by then. There are four copies, so these words are written again
// after the fence of this layer, and read after sums that were made behind that fence. The last warps begin, as the
// first ones store what has arrived. With few rows the warp that fences does it (see reset_published).
__device__ __forceinline__ void reset_sums(const Consumer& c, const Position& at) {
  visit_owned<true, false>(c, c.owned<Output>(), [&](int slot, int row) {
    if (row < ROWS) store_relaxed(owned_sums(c, c.sums(at) - 1, slot) + row * kWidth, kUnwritten, kUnwritten);
  });
}

// norm(x) @ W for the tiles of this cluster; `store(arrived, early, unit, row)` stores what this block owns (see
// visit_owned). `early` is what `fetch()` gives, which is called when there is nothing left to multiply, and before the
// wait.
template <typename P, typename Fetch, typename Store>
__device__ __forceinline__ void multiply_normalised(Consumer& c, const Position& at, const Fetch& fetch,
                                                    const Store& store) {
  const Place place = c.place(at), sums{place.parts + kSquares, place.barrier, place.parity};
  const int slots = c.owned<P>();
  c.expect(place, (slots * kPartFloats + kSquares) * 4);
  TileMultiplier<P> multiplier(c);
  multiplier.prepare(c);  // the rows come from other blocks, later
  while_asking(c, multiplier, [&](const auto& meanwhile) { load_residual<P>(c, at, meanwhile); });
  if (kFewRows && at.phase == kGateUp) c.resets_done();  // all sums of output have been read
  if (kFewRows) send_stored_squares(c, place.parts, c.parts_barrier(place));
  multiply_for_owners<P>(c, multiplier, sums);
  if (!kFewRows) send_squares(c, place.parts, c.parts_barrier(place));
  c.stages += P::stages(c.count<P>());
  const auto early = fetch();
  const auto arrived_at = [&](int unit, int row) {
    const int existing = min(row, ROWS - 1);
    return Arrived{parts_of(c, sums.parts, unit * P::kUnit, existing), shared_address(place.parts + existing)};
  };
  Arrived first = arrived_at(c.warp / kRowBlocks, c.warp % kRowBlocks * 8 + c.row);
  if (kOnce<P>) first.pin();
  c.await(place);
  visit_owned<false, kOnce<P>>(c, slots / P::kUnit, [&](int unit, int row) {
    store(kOnce<P> ? first : arrived_at(unit, row), early, unit, row);
  });
  if (!kFewRows) reset_sums(c, at);
}

// -- a product that is added to the residual --------------------------------------------------------------------------

// y = rows @ W, whose inputs are bfloat16 rows of the buffer at word `buffer`; `factors` are those of narrow weights.
template <typename P>
__device__ __forceinline__ void multiply_added(Consumer& c, const Position& at, int buffer, const float* factors) {
  constexpr int kInputs = P::kSlice * kRanks;
  const auto factor = [&](int slot) {
    return factor_of<P>(c, at, factors, min(c.first<P>() + slot * kRanks + c.rank, P::kTiles - 1));
  };
  const Place place = c.place(at);
  c.expect(place, c.owned<P>() * kPartFloats * 4);
  TileMultiplier<P> multiplier(c);
  multiplier.prepare(c);  // the rows come from other blocks, later
  c.begin();
  c.block_barrier();  // warps that poll early would slow down those that still store
  const bf16* rows = c.rows(buffer, kInputs, c.layer_copy(at)) + c.rank * P::kSlice;
  while_asking(c, multiplier, [&](const auto& meanwhile) { load_rows<P::kSlice / 256>(c, rows, kInputs, meanwhile); });
  publish_operands();
  c.block_barrier();
  multiply_for_owners<P>(c, multiplier, place);
  c.stages += P::stages(c.count<P>());
  const int early_slot = c.warp / kRowBlocks;
  const float2 early = factor(early_slot);  // fetched before the wait
  const int early_row = c.warp % kRowBlocks * 8 + c.row;
  u32 early_from = parts_of(c, place.parts, early_slot, early_row);
  u32* early_to = owned_sums(c, c.sums(at), early_slot) + early_row * kWidth;
  if (kOnce<P>) asm volatile("" : "+r"(early_from), "+l"(early_to));
  c.await_parts(place);
  if (at.phase == kDown) {
    c.fence_barrier();  // who reads what this block publishes next may rely on its resets (see fence_resets)
  } else {
    c.block_barrier();
  }
  visit_owned<false, kOnce<P>>(c, c.owned<P>(), [&](int slot, int row) {
    if (row >= ROWS) return;
    const bool is_early = kOnce<P> || slot == early_slot;
    const float2 sum = scaled_sum<P>(collect(kOnce<P> ? early_from : parts_of(c, place.parts, slot, row)),
                                     is_early ? early : factor(slot));
    u32* to = kOnce<P> ? early_to : owned_sums(c, c.sums(at), slot) + row * kWidth;
    store_relaxed(to, __float_as_uint(sum.x), __float_as_uint(sum.y));
  });
}
