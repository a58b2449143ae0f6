// Products of the expert's few rows with streamed weights: operands, multiplication, exchange of the parts.
#pragma once
#include "expert_multiply.cuh"

// -- operands ------------------------------------------------------------------------------------------------------------

constexpr int kRowsEach = ceil_div(ROWS, kWarps);  // rows that one warp loads

__device__ __forceinline__ float4 load_float4(const float* p) { return *reinterpret_cast<const float4*>(p); }

// Where eight inputs of an operand row lie in shared memory; `group` counts them.
__device__ __forceinline__ unsigned char* operand(const Consumer& c, int row, int group) {
  return c.shared.operands + group / 8 * kOperandBytesOfChunk + row * 128 + (group % 8 ^ row % 8) * 16;
}

// Writes this lane's four inputs of one row.
__device__ __forceinline__ void store_inputs(const Consumer& c, int row, float x, float y, float z, float w) {
  *reinterpret_cast<uint2*>(operand(c, row, c.lane / 2) + c.lane % 2 * 8) =
      make_uint2(pack_bf16(x, y), pack_bf16(z, w));
}

// This block's eighth of the residual times 1 + scale, as bfloat16, and of the shift as the row behind the last one. The
// squares of this warp's rows are left in `squares`.
__device__ __forceinline__ void load_residual(Consumer& c, const Position& at, int norm, float (&squares)[kRowsEach]) {
  if (!kResident) c.fetch_norm(at.step, norm);
  c.begin();
  c.block_barrier();  // nobody reads the operands of the phase before
  const float* rows = c.residual_rows(c.residual_copy(at)) + c.rank * Project::kSlice + c.lane * 4;
  uint4 v[kRowsEach];
  poll(v, [&](int i) -> const void* {
    const int row = c.warp + i * kWarps;
    return row < ROWS ? rows + row * kWidth : nullptr;
  });
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const int row = c.warp + i * kWarps;
    const float x = __uint_as_float(v[i].x), y = __uint_as_float(v[i].y), z = __uint_as_float(v[i].z),
                w = __uint_as_float(v[i].w);
    squares[i] = warp_sum(fmaf(x, x, fmaf(y, y, fmaf(z, z, w * w))));
    if (row < ROWS)
      store_inputs(c, row, fmaf(x, c.scale.x, x), fmaf(y, c.scale.y, y), fmaf(z, c.scale.z, z), fmaf(w, c.scale.w, w));
  }
  if (c.warp == kWarps - 1) store_inputs(c, ROWS, c.shift.x, c.shift.y, c.shift.z, c.shift.w);
  c.phase_barrier();
}

// PIECES times 256 columns of every row of bfloat16.
template <int PIECES>
__device__ __forceinline__ void load_rows(const Consumer& c, const bf16* rows, int width) {
  constexpr int kCount = kRowsEach * PIECES;
  uint4 v[kCount];
  poll(v, [&](int i) -> const void* {
    const int row = c.warp + i / PIECES * kWarps;
    return row < ROWS ? rows + row * width + i % PIECES * 256 + c.lane * 8 : nullptr;
  });
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = c.warp + i / PIECES * kWarps;
    if (row < ROWS) store16(operand(c, row, i % PIECES * 32 + c.lane), v[i]);
  }
}

// -- exchange of parts -----------------------------------------------------------------------------------------------------

// A part of one output tile lies with its owner as parts[slot][rank][row][kTile], float, or bfloat16 if NARROW_PARTS.
// ROWS_SENT: rows that the owner wants.
template <int ROWS_SENT, bool NARROW_PARTS>
struct Sender {
  static constexpr int kPartBytes = ROWS_SENT * kTile * (NARROW_PARTS ? 2 : 4);
  u32 to, counted;  // addresses with the owner: this lane's place in slot 0, and what counts arrivals

  __device__ __forceinline__ Sender(const Consumer& c, const Place& place, int owner) {
    const int odd = c.row & 1, pair = c.row / 2, row = 2 * c.quad + odd;
    const int offset = NARROW_PARTS ? ((row + 8 * (pair & 1)) * kTile + pair / 2 * 4) * 2 : (row * kTile + pair * 2) * 4;
    to = remote(shared_address(place.parts) + c.rank * kPartBytes + offset, owner);
    counted = remote(shared_address(c.shared.parts + place.barrier), owner);
  }

  // Sends this warp's tile `half`.
  __device__ __forceinline__ void send_tile(const Consumer& c, const float (&sums)[kSums], int half, int slot) const {
    const int odd = c.row & 1, second = c.row / 2 & 1, row = 2 * c.quad + odd;
    const u32 address = to + slot * kRanks * kPartBytes;
    // Lanes of two neighbouring outputs trade, so that each has both outputs of one row.
    float2 v[kOperandRows / 8];
#pragma unroll
    for (int j = 0; j < kOperandRows / 8; ++j) {
      const float x = sums[4 * j + 2 * half], y = sums[4 * j + 2 * half + 1];
      const float traded = __shfl_xor_sync(kAllLanes, odd ? x : y, 4);
      v[j] = odd ? make_float2(traded, y) : make_float2(x, traded);
    }
    if (!NARROW_PARTS) {
#pragma unroll
      for (int j = 0; j < kOperandRows / 8; ++j)
        if (8 * j + row < ROWS_SENT) send(address + j * 8 * kTile * 4, v[j].x, v[j].y, counted);
      return;
    }
    // Then lanes of two neighbouring pairs trade, so that each has four outputs of one row.
#pragma unroll
    for (int j = 0; j < kOperandRows / 8; j += 2) {
      constexpr int kLast = kOperandRows / 8 - 1;
      const u32 here = pack_bf16(v[j].x, v[j].y), there = pack_bf16(v[min(j + 1, kLast)].x, v[min(j + 1, kLast)].y);
      const u32 traded = __shfl_xor_sync(kAllLanes, second ? here : there, 8);
      if (8 * (j + second) + row < ROWS_SENT)
        send_words(address + j * 8 * kTile * 2, second ? traded : here, second ? there : traded, counted);
    }
  }
};

// Writes this team's sums of tile `half` of this warp to partial[team][tile][row][kTile].
__device__ __forceinline__ void keep_partial(const Consumer& c, const float (&sums)[kSums], int half, int tile) {
  float* to = c.shared.partial + (c.warp / kTeamWarps * Down::kMost + tile) * ROWS * kTile + c.row;
#pragma unroll
  for (int i = 0; i < kSums / 2; ++i) {
    const int row = i / 2 * 8 + 2 * c.quad + i % 2;
    if (row < ROWS) to[row * kTile] = sums[i / 2 * 4 + 2 * half + i % 2];
  }
}

// Adds the teams' sums and sends them to their owners.
__device__ __forceinline__ void send_partials(const Consumer& c, const Place& place, int count) {
  for (int i = c.thread; i < count * ROWS * 4; i += kConsumers) {
    const int tile = i / (ROWS * 4), rest = i % (ROWS * 4), owner = tile % kRanks;
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int team = 0; team < kTeams; ++team) {
      const float2 part =
          reinterpret_cast<const float2*>(c.shared.partial)[(team * Down::kMost + tile) * ROWS * 4 + rest];
      sum.x += part.x;
      sum.y += part.y;
    }
    const u32 to = shared_address(place.parts) + ((tile / kRanks * kRanks + c.rank) * ROWS * 4 + rest) * 8;
    send(remote(to, owner), sum.x, sum.y, remote(shared_address(c.shared.parts + place.barrier), owner));
  }
}

// Multiplies the tiles of this cluster and sends each to its owner: units of tiles go round the ranks.
template <typename P, int ROWS_SENT, bool NARROW_PARTS>
__device__ __forceinline__ void multiply_tiles(const Consumer& c, const Place& place) {
  const int count = P::count(c.cluster), member = c.warp % kTeamWarps;
  const OperandAddress operands(c);
  const Kept<P> kept(operands);
  int start = kSplit<P> ? 0 : c.warp / kTeamWarps * kTeamTiles;
#pragma unroll 1
  for (; start + member * 2 < count; start += kSplit<P> ? kTeamTiles : kTeams * kTeamTiles) {
    float sums[kSums];
    multiply_team<P>(c, sums, operands, kept, c.stages + start / kTeamTiles * P::kChunks,
                     min(kTeamTiles, count - start));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tile = start + member * 2 + half;
      if (tile >= count) break;
      if (kSplit<P>) {
        keep_partial(c, sums, half, tile);
      } else {
        const Sender<ROWS_SENT, NARROW_PARTS> sender(c, place, tile / P::kUnit % kRanks);
        sender.send_tile(c, sums, half, tile / (P::kUnit * kRanks) * P::kUnit + tile % P::kUnit);
      }
    }
  }
  if (kSplit<P>) {
    c.block_barrier();
    send_partials(c, place, count);
  }
}

// The eight parts of two neighbouring outputs, added.
template <int ROWS_SENT, bool NARROW_PARTS>
__device__ __forceinline__ float2 collect(const float* parts, int slot, int row, int pair) {
  const int from = ((slot * kRanks * ROWS_SENT + row) * kTile) / 2 + pair;
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int r = 0; r < kRanks; ++r) {
    const int at = from + r * ROWS_SENT * kTile / 2;
    if (NARROW_PARTS) {
      const u32 part = reinterpret_cast<const u32*>(parts)[at];
      sum.x += low_float(part);
      sum.y += high_float(part);
    } else {
      const float2 part = reinterpret_cast<const float2*>(parts)[at];
      sum.x += part.x;
      sum.y += part.y;
    }
  }
  return sum;
}

// -- a product behind an adaptive norm -------------------------------------------------------------------------------------

// What has come for the tiles of this owner, and the squares of all rows.
struct Arrived {
  const float *parts, *squares;
  int slots;

  __device__ __forceinline__ float inverse_rms(int row) const {
    float total = 0.0f;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) total += squares[r * ROWS + row];
    return rsqrtf(total / kWidth + kEps);
  }

  // Two neighbouring outputs of norm(x) @ W: the row's factor is applied to the sum, and the shift is a row of its own.
  __device__ __forceinline__ float2 value(int slot, int row, int pair, float inverse) const {
    const float2 y = collect<kPartRows, true>(parts, slot, row, pair),
                 shift = collect<kPartRows, true>(parts, slot, ROWS, pair);
    return make_float2(fmaf(y.x, inverse, shift.x), fmaf(y.y, inverse, shift.y));
  }
};

// How many of its cluster's tiles this block owns.
template <typename P>
__device__ __forceinline__ int owned(const Consumer& c) {
  const int units = P::count(c.cluster) / P::kUnit;
  return units > c.rank ? ((units - 1 - c.rank) / kRanks + 1) * P::kUnit : 0;
}

// norm(x) @ W for the tiles of this cluster; `store(arrived)` stores what this block owns.
template <typename P, typename Store>
__device__ __forceinline__ void multiply_normalised(Consumer& c, const Position& at, int norm, const Store& store) {
  const Place place = c.place(at), sums{place.parts + kSquares, place.barrier, place.parity};
  const int slots = owned<P>(c);
  c.expect(place, (slots * kPartFloats + kSquares) * 4);
  float squares[kRowsEach];
  load_residual(c, at, norm, squares);
  multiply_tiles<P, kPartRows, true>(c, sums);
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const int row = c.warp + i * kWarps;
    if (row < ROWS && c.lane < kRanks)
      send(remote(shared_address(place.parts + c.rank * ROWS + row), c.lane), squares[i],
           remote(shared_address(c.shared.parts + place.barrier), c.lane));
  }
  c.stages += P::stages(c.cluster);
  c.await(place);
  store(Arrived{sums.parts, place.parts, slots});
  if (at.phase == kGateUp) named_barrier_arrive<kValueBarrier, kConsumers + kWarpSize>();
  c.end();
}

// -- a product added to the residual -----------------------------------------------------------------------------------------

// What this thread needs to add to the residual, fetched before the wait.
struct Addition {
  int column;
  float2 gate;

  __device__ __forceinline__ Addition(const Consumer& c, const float* gates) : column(c.owned_column()) {
    gate = column < 0 ? make_float2(0.0f, 0.0f) : *reinterpret_cast<const float2*>(gates + column);
  }
};

__device__ __forceinline__ void publish_residual(Consumer& c, const Position& at, int column) {
  const int copy = c.residual_copy(at), offset = c.owned_row() * kWidth + column;
  exchange(c.residual_rows(copy) + offset, c.residual_rows(copy ^ 1) + offset, c.residual);
}

// x += gate * y, where the parts of y have been sent to their owners.
__device__ __forceinline__ void add_to_residual(Consumer& c, const Position& at, const Place& place,
                                                const Addition& addition) {
  c.await(place);
  if (addition.column >= 0) {
    const float2 y = collect<ROWS, false>(place.parts, c.owned_slot(), c.owned_row(), c.thread % 4);
    c.residual.x = fmaf(addition.gate.x, y.x, c.residual.x);
    c.residual.y = fmaf(addition.gate.y, y.y, c.residual.y);
    publish_residual(c, at, addition.column);
  }
  c.end();
}

// One thread: how much the owner of outputs of width kWidth is going to be sent.
__device__ __forceinline__ void expect_sums(Consumer& c, const Place& place) {
  c.expect(place, owned<Output>(c) * kRanks * ROWS * kTile * 4);
}
