// Products of the expert's few rows with streamed weights: operands, multiplication, exchange of the parts.
#pragma once
#include "expert_plan.cuh"

// -- operands ------------------------------------------------------------------------------------------------------------

constexpr int kRowsEach = ceil_div(ROWS, kWarps);  // rows that one warp loads

__device__ __forceinline__ float4 load_float4(const float* p) { return *reinterpret_cast<const float4*>(p); }

// This block's eighth of the residual times 1 + scale, as bfloat16, and of the shift as the row behind the last one. The
// squares of this warp's rows are left in `squares`.
__device__ __forceinline__ void load_residual(Consumer& c, const Position& at, const float* table,
                                              float (&squares)[kRowsEach]) {
  constexpr int kStride = Project::kStride;
  const int column = c.rank * Project::kSlice + c.lane * 4;
  const float4 scale = load_float4(table + column), shift = load_float4(table + kWidth + column);
  c.begin();
  c.block_barrier();  // nobody reads the operands of the phase before
  const float* rows = c.residual_rows(c.residual_copy(at)) + column;
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
    squares[i] = warp_sum((x * x + y * y) + (z * z + w * w));
    if (row < ROWS)
      *reinterpret_cast<uint2*>(c.shared.operands + row * kStride + c.lane * 8) =
          make_uint2(pack_bf16(fmaf(x, scale.x, x), fmaf(y, scale.y, y)),
                     pack_bf16(fmaf(z, scale.z, z), fmaf(w, scale.w, w)));
  }
  if (c.warp == kWarps - 1)
    *reinterpret_cast<uint2*>(c.shared.operands + ROWS * kStride + c.lane * 8) =
        make_uint2(pack_bf16(shift.x, shift.y), pack_bf16(shift.z, shift.w));
  c.phase_barrier();
}

// PIECES times 256 columns of every row of bfloat16; each piece becomes an operand of its own.
template <int PIECES>
__device__ __forceinline__ void load_rows(const Consumer& c, const bf16* rows, int width) {
  constexpr int kCount = kRowsEach * PIECES, kStride = Output::kStride;
  static_assert(kStride == Down::kStride && Output::kSlice == 256, "one layout for both");
  uint4 v[kCount];
  poll(v, [&](int i) -> const void* {
    const int row = c.warp + i / PIECES * kWarps;
    return row < ROWS ? rows + row * width + i % PIECES * 256 + c.lane * 8 : nullptr;
  });
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = c.warp + i / PIECES * kWarps;
    if (row < ROWS) store16(c.shared.operands + i % PIECES * kHalfBytes + row * kStride + c.lane * 16, v[i]);
  }
}

// -- multiplication ------------------------------------------------------------------------------------------------------

// A warp multiplies up to kMostAtOnce tiles at once, so that it reads its operands once for all of them: memory bandwidth
// inside the block is what limits a product. The tiles of one turn of all warps must fit into the ring.
constexpr int kTileWarps = kWarps / kRowGroups;  // warps that share a group of rows
constexpr int kMostAtOnce = kTilesAtOnce > 1 ? 1 : min_of(3, (STAGES - 1) * Project::kShared / kTileWarps);
static_assert(kMostAtOnce >= 1, "a turn of all warps fits into the ring");

// The same number of chains for any count of tiles: the order of a sum must not depend on the size of the grid.
struct Sums {
  float part[2][kTilesAtOnce][4];

  __device__ __forceinline__ float value(int m, int i) const { return part[0][m][i] + part[1][m][i]; }
};

__device__ __forceinline__ void clear(Sums& s) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int m = 0; m < kTilesAtOnce; ++m)
#pragma unroll
      for (int j = 0; j < 4; ++j) s.part[i][m][j] = 0.0f;
}

// s[n] += operand rows of one group @ GROUPS groups of 32 inputs of weight tile n, for n < COUNT.
template <int GROUPS, int STRIDE, int COUNT, int SIZE>
__device__ __forceinline__ void multiply(const Consumer& c, Sums (&s)[SIZE], const unsigned char* operands, int group,
                                         const unsigned char* const (&weights)[SIZE]) {
  const int row = group * kTilesAtOnce * 16 + c.row;
  const unsigned char* a = operands + row * STRIDE + c.quad * 16;
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    uint4 low[kTilesAtOnce], high[kTilesAtOnce];
#pragma unroll
    for (int m = 0; m < kTilesAtOnce; ++m) {
      low[m] = load16(a + m * 16 * STRIDE + g * 64);
      // Few rows are worth a condition: bandwidth is scarce. With more rows it costs more than it saves.
      high[m] = make_uint4(0, 0, 0, 0);
      if (kTilesAtOnce > 1 || row + 8 <= ROWS) high[m] = load16(a + (m * 16 + 8) * STRIDE + g * 64);
    }
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      const uint4 b = load16(weights[n] + g * 512);
#pragma unroll
      for (int m = 0; m < kTilesAtOnce; ++m) {
        float (&d)[4] = s[n].part[g % 2][m];
        mma_16x8x16(d, low[m].x, high[m].x, low[m].y, high[m].y, b.x, b.y);
        mma_16x8x16(d, low[m].z, high[m].z, low[m].w, high[m].w, b.z, b.w);
      }
    }
  }
}

// Sends this block's part of one output tile to its owner. ROWS_SENT: rows that the owner wants.
template <int ROWS_SENT>
__device__ __forceinline__ void send_part(const Consumer& c, const Sums& s, int group, const Place& place, int slot,
                                          int owner) {
  const u32 to = remote(shared_address(place.parts + (slot * kRanks + c.rank) * ROWS_SENT * kTile + c.quad * 2), owner);
  const u32 counted = remote(shared_address(c.shared.parts + place.barrier), owner);
#pragma unroll
  for (int m = 0; m < kTilesAtOnce; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (group * kTilesAtOnce + m) * 16 + half * 8 + c.row;
      if (row < ROWS_SENT) send(to + row * kTile * 4, s.value(m, 2 * half), s.value(m, 2 * half + 1), counted);
    }
}

// Gives back this warp's share of the stage that holds `tile`, and the shares that a last stage has too few tiles for.
template <typename P>
__device__ __forceinline__ void release_tile(const Consumer& c, int tile, int tiles) {
  constexpr int kShare = kArrivals / (P::kShared * kRowGroups);
  const int missing = tile + 1 == tiles ? P::kShared - 1 - tile % P::kShared : 0;
  __syncwarp();
  if (c.lane == 0) c.ring.release(c.stages + tile / P::kShared, kShare * (1 + missing));
}

// This lane's part of one tile, once it has come.
template <typename P>
__device__ __forceinline__ const unsigned char* await_tile(const Consumer& c, int tile) {
  const u32 stage = c.stages + tile / P::kShared;
  c.ring.wait(stage);
  return c.ring.stage(stage) + tile % P::kShared * P::kTileBytes + c.lane * 16;
}

template <typename P>
__device__ __forceinline__ int owner_of(int tile) {
  return tile / P::kUnit % kRanks;
}

// Multiplies COUNT tiles, `start` and every kTileWarps-th behind it, and sends each to its owner.
template <typename P, int ROWS_SENT, int COUNT>
__device__ __forceinline__ void multiply_turn(const Consumer& c, int start, int first_unit, const Place& place) {
  const int tiles = P::count(c.cluster), group = c.warp % kRowGroups;
  const unsigned char* weights[COUNT];
  Sums sums[COUNT];
#pragma unroll
  for (int n = 0; n < COUNT; ++n) {
    weights[n] = await_tile<P>(c, start + n * kTileWarps);
    clear(sums[n]);
  }
  multiply<P::kGroups, P::kStride, COUNT>(c, sums, c.shared.operands, group, weights);
#pragma unroll
  for (int n = 0; n < COUNT; ++n) {
    const int tile = start + n * kTileWarps;
    const int slot = (tile / P::kUnit / kRanks - first_unit) * P::kUnit + tile % P::kUnit;
    send_part<ROWS_SENT>(c, sums[n], group, place, slot, owner_of<P>(tile));
    release_tile<P>(c, tile, tiles);
  }
}

// Multiplies the tiles first to last - 1 of this cluster and sends each to its owner.
template <typename P, int ROWS_SENT>
__device__ __forceinline__ void multiply_tiles(const Consumer& c, int first, int last, const Place& place) {
  constexpr int kMost = min_of(ceil_div(P::kMost, kTileWarps), kMostAtOnce);
  const int unit = first / P::kUnit / kRanks;
  int start = first + c.warp / kRowGroups;
  if (kMost >= 3)
    for (; start + 2 * kTileWarps < last; start += 3 * kTileWarps)
      multiply_turn<P, ROWS_SENT, 3>(c, start, unit, place);
  if (kMost >= 2)
    for (; start + kTileWarps < last; start += 2 * kTileWarps)
      multiply_turn<P, ROWS_SENT, 2>(c, start, unit, place);
  for (; start < last; start += kTileWarps) multiply_turn<P, ROWS_SENT, 1>(c, start, unit, place);
}

// The eight parts of two neighbouring outputs, added.
template <int ROWS_SENT>
__device__ __forceinline__ float2 collect(const float* parts, int slot, int row, int pair) {
  const float* from = parts + (slot * kRanks * ROWS_SENT + row) * kTile + pair * 2;
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int r = 0; r < kRanks; ++r) {
    const float2 part = *reinterpret_cast<const float2*>(from + r * ROWS_SENT * kTile);
    sum.x += part.x;
    sum.y += part.y;
  }
  return sum;
}

// -- a product behind an adaptive norm -------------------------------------------------------------------------------------

// What a round brought: its parts, and the squares of all rows.
struct Round {
  const float *parts, *squares;
  int first, slots;  // first tile of the cluster, tiles of this owner

  __device__ __forceinline__ float inverse_rms(int row) const {
    float total = 0.0f;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) total += squares[r * ROWS + row];
    return rsqrtf(total / kWidth + kEps);
  }

  // Two neighbouring outputs of norm(x) @ W: the row's factor is applied to the sum, and the shift is a row of its own.
  __device__ __forceinline__ float2 value(int slot, int row, int pair, float inverse) const {
    const float2 y = collect<kPartRows>(parts, slot, row, pair), shift = collect<kPartRows>(parts, slot, ROWS, pair);
    return make_float2(fmaf(y.x, inverse, shift.x), fmaf(y.y, inverse, shift.y));
  }
};

// How many of the tiles first to last - 1 this block owns.
template <typename P>
__device__ __forceinline__ int owned(const Consumer& c, int first, int last) {
  const int units = (last - first) / P::kUnit;
  return units > c.rank ? ((units - 1 - c.rank) / kRanks + 1) * P::kUnit : 0;
}

// norm(x) @ W for the tiles of this cluster; `store(round)` stores what this block owns. Every round waits for all blocks
// of the cluster, so that none gets ahead by two.
template <typename P, typename Store>
__device__ __forceinline__ void multiply_normalised(Consumer& c, const Position& at, const float* table,
                                                    const Store& store) {
  constexpr int kRounds = kRoundsOf<P>, kEach = kSlotsOf<P> * kRanks;
  float squares[kRowsEach];
  load_residual(c, at, table, squares);
  const int tiles = P::count(c.cluster);
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    const Place place = c.place(at, round);
    const int first = round * kEach, last = min(tiles, first + kEach), slots = owned<P>(c, first, max(first, last));
    const Place sums{place.parts + kSquares, place.barrier, place.parity};
    if (round > 0) c.block_barrier();  // no thread still reads the parts of two rounds ago
    c.expect(place, slots * kPartFloats * 4 + kSquares * 4);
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const int row = c.warp + i * kWarps;
      if (row < ROWS && c.lane < kRanks)
        send(remote(shared_address(place.parts + c.rank * ROWS + row), c.lane), squares[i],
             remote(shared_address(c.shared.parts + place.barrier), c.lane));
    }
    multiply_tiles<P, kPartRows>(c, first, last, sums);
    c.await(place);
    store(Round{sums.parts, place.parts, first, slots});
  }
  c.stages += P::stages(c.cluster);
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
    const float2 y = collect<ROWS>(place.parts, c.owned_slot(), c.owned_row(), c.thread % 4);
    c.residual.x = fmaf(addition.gate.x, y.x, c.residual.x);
    c.residual.y = fmaf(addition.gate.y, y.y, c.residual.y);
    publish_residual(c, at, addition.column);
  }
  c.end();
}

// One thread: how much the owner of outputs of width kWidth is going to be sent.
__device__ __forceinline__ void expect_sums(Consumer& c, const Place& place) {
  c.expect(place, owned<Output>(c, 0, Output::count(c.cluster)) * kRanks * ROWS * kTile * 4);
}
