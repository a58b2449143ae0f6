// Products of streamed weights with the operand rows, in registers. A unit is two tiles of outputs, which a warp multiplies
// at once; a stage of the ring holds one chunk of the inputs of four units (see Product).
#pragma once
#include "expert_plan.cuh"

// Sums of a warp: sums[4 * block + i] is output lane / 4 of tile i / 2 of a unit, and operand row
// 8 * block + 2 * (lane % 4) + i % 2.
constexpr int kSums = 4 * kRowBlocks;
constexpr int kSteps = kChunk / 16;  // of sixteen inputs, in a chunk
constexpr int kStageUnits = kStageTiles / 2;

// Where this lane's row of the matrices of each step lies, in the first chunk: for two blocks of eight rows, both groups
// of eight inputs.
struct OperandAddress {
  u32 step[kSteps];

  __device__ __forceinline__ explicit OperandAddress(const Consumer& c) {
    const int row = c.lane % 8, half = c.lane / 8 % 2, block = kRowBlocks > 1 ? c.lane / 16 : 0;
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      step[s] = shared_address(c.shared.operands) + (block * 8 + row) * 128 + ((2 * s + half) ^ row) * 16;
  }

  // Operands of two neighbouring blocks of rows; of one if there is no more.
  __device__ __forceinline__ uint4 load(int chunk, int s, int block) const {
    const u32 from = step[s] + chunk * kOperandBytesOfChunk + block * 1024;
    if (block + 1 < kRowBlocks) return load_matrices(from);
    const uint2 one = load_two_matrices(from);
    return make_uint4(one.x, one.y, 0u, 0u);
  }
};

// One step for two blocks of rows.
__device__ __forceinline__ void multiply_step(float (&sums)[kSums], const uint4& weights, const uint4& rows, int block) {
#pragma unroll
  for (int b = 0; b < 2 && block + b < kRowBlocks; ++b) {
    float(&d)[4] = *reinterpret_cast<float(*)[4]>(sums + 4 * (block + b));
    mma_16x8x16(d, weights.x, weights.y, weights.z, weights.w, b == 0 ? rows.x : rows.z, b == 0 ? rows.y : rows.w);
  }
}

// Where the weights of one unit of a product lie in the ring.
template <typename P>
struct Unit {
  int tiles, shift, member;  // tiles of its stage, log2 of the chunks in it, and which of its units this is
  u32 first, lane_offset;    // stage of the first chunk; this lane's row in both tiles of eight inputs, then of the next eight

  __device__ __forceinline__ Unit(const Consumer& c, int unit) {
    const int group = unit / kStageUnits;
    member = unit % kStageUnits;
    tiles = min(kStageTiles, c.count<P>() - group * kStageTiles);
    shift = P::log2_chunks_in_stage(tiles);
    first = c.stages + group * P::kChunks;
    lane_offset = (2 * member + c.lane / 8 % 2) * kChunkBytes + c.lane / 16 * 128 + c.lane % 8 * 16;
  }

  __device__ __forceinline__ int inside(int chunk) const { return chunk & (1 << shift) - 1; }
  __device__ __forceinline__ u32 stage(int chunk) const { return first + (chunk >> shift); }

  // Waits for the weights of a chunk, and says where they are.
  __device__ __forceinline__ u32 await(const Consumer& c, int chunk, const Spot& spot) const {
    c.ring.wait(stage(chunk), spot);
    return shared_address(c.ring.stage(spot)) + inside(chunk) * tiles * kChunkBytes + lane_offset;
  }

  // Every stage gets kArrivals arrivals: the first that there must be counts for those that there are not.
  __device__ __forceinline__ void release(const Consumer& c, int chunk, const Spot& spot, u32 loaded) const {
    const int missing = kArrivals - min(1 << shift, P::kChunks) * ((tiles + 1) / 2);
    if (c.lane == 0) c.ring.release(spot, loaded, member == 0 && inside(chunk) == 0 ? 1 + missing : 1);
  }
};

// sums[i] += chunk + i of a unit times rows(i, step), for two chunks side by side: their chains of sums overlap.
template <typename P, typename Rows>
__device__ __forceinline__ void multiply_two_chunks(const Consumer& c, float (&sums)[2][kSums], const Unit<P>& unit, int chunk,
                                                    const Rows& rows) {
  const Spot spot = c.ring.spot(unit.stage(chunk)), next = unit.shift > 0 ? spot : c.ring.behind(spot);
  const u32 from[2] = {unit.await(c, chunk, spot), unit.await(c, chunk + 1, next)};
  u32 loaded[2];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 weights = load_matrices(from[i] + s * 256);
      loaded[i] = weights.w;
      multiply_step(sums[i], weights, rows(i, s), 0);
    }
  }
  __syncwarp();
  unit.release(c, chunk, spot, loaded[0]);
  unit.release(c, chunk + 1, next, loaded[1]);
}

// -- few rows: a warp multiplies whole units, or half of the inputs of one where there are many ------------------------------

template <typename P>
constexpr bool kPairs = P::kChunks > 2;  // two warps share a unit
template <typename P>
constexpr int kUnitsAtOnce = kPairs<P> ? kWarps / 2 : kWarps;

// All inputs of a unit; `kept` are the operands of each chunk and step.
template <typename P>
__device__ __forceinline__ void multiply_unit(const Consumer& c, float (&sums)[kSums], int unit,
                                              const uint4 (&kept)[2][kSteps]) {
  float both[2][kSums] = {};
  multiply_two_chunks(c, both, Unit<P>(c, unit), 0, [&](int i, int s) { return kept[i][s]; });
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = both[0][i] + both[1][i];
}

// The sums of eight outputs as the exchange wants them: words[block] is outputs 2 * (lane % 4) and the next, of row
// 8 * block + lane / 4.
__device__ __forceinline__ void transpose_tile(u32 (&words)[kRowBlocks], const float (&sums)[kSums], int tile) {
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b)
    words[b] = transposed_matrix(pack_bf16(sums[4 * b + 2 * tile], sums[4 * b + 2 * tile + 1]));
}

template <typename P, typename Finish>
__device__ __forceinline__ void finish_unit(const Consumer& c, const float (&sums)[kSums], int unit, const Finish& finish) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int tile = 2 * unit + half;
    if (tile >= c.count<P>()) break;
    u32 words[kRowBlocks];
    transpose_tile(words, sums, half);
    finish(tile, words);
  }
}

// Whole units. What one leaves is finished behind the instructions of the next.
template <typename P, typename Finish>
__device__ __forceinline__ void multiply_whole(const Consumer& c, const Finish& finish) {
  constexpr int kPasses = ceil_div(ceil_div(P::kMost, 2), kUnitsAtOnce<P>), kTogether = min_of(3, kPasses);
  const int units = (c.count<P>() + 1) / 2;
  const OperandAddress operands(c);
  uint4 kept[2][kSteps];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int s = 0; s < kSteps; ++s) kept[i][s] = operands.load(i, s, 0);
#pragma unroll 1
  for (int first = c.warp; first < units; first += kTogether * kUnitsAtOnce<P>) {
    float sums[2][kSums] = {};  // what is written in one condition and read in another would be kept through all phases
#pragma unroll
    for (int i = 0; i <= kTogether; ++i) {
      const int unit = first + i * kUnitsAtOnce<P>, before = unit - kUnitsAtOnce<P>;
      if (i < kTogether && unit < units) multiply_unit<P>(c, sums[i % 2], unit, kept);
      if (i > 0 && before < units) finish_unit<P>(c, sums[(i + 1) % 2], before, finish);
    }
  }
}

// Halves of units: the two warps of a pair trade sums, and each finishes one tile.
template <typename P, typename Finish>
__device__ __forceinline__ void multiply_halves(const Consumer& c, const Finish& finish) {
  constexpr int kHalf = P::kChunks / 2;
  const int count = c.count<P>(), half = c.warp % 2;
  const OperandAddress operands(c);
  float4* traded = reinterpret_cast<float4*>(c.shared.traded) + c.lane;
#pragma unroll 1
  for (int unit = c.warp / 2; 2 * unit < count; unit += kUnitsAtOnce<P>) {
    float both[2][kSums] = {};
    const Unit<P> place(c, unit);
#pragma unroll
    for (int start = 0; start < kHalf; start += 2) {
      const int chunk = half * kHalf + start;
      multiply_two_chunks(c, both, place, chunk, [&](int i, int s) { return operands.load(chunk + i, s, 0); });
    }
    float mine[4] = {}, given[4] = {};
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int low = i / 2 * 4 + i % 2;
      const float first = both[0][low] + both[1][low], second = both[0][low + 2] + both[1][low + 2];
      mine[i] = half == 0 ? first : second;
      given[i] = half == 0 ? second : first;
    }
    traded[c.warp * kWarpSize] = make_float4(given[0], given[1], given[2], given[3]);
    pair_barrier(c.warp / 2);
    const float4 more = traded[(c.warp ^ 1) * kWarpSize];
    const float sums[4] = {mine[0] + more.x, mine[1] + more.y, mine[2] + more.z, mine[3] + more.w};
    if (2 * unit + half < count) {
      u32 words[kRowBlocks];
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) words[b] = transposed_matrix(pack_bf16(sums[2 * b], sums[2 * b + 1]));
      finish(2 * unit + half, words);
    }
    if (ceil_div(P::kMost, 2) > kUnitsAtOnce<P>) pair_barrier(c.warp / 2);
  }
}

// -- many rows: there is enough to do for a team of four warps, which takes up to eight tiles -------------------------------

// sums = this warp's unit of the group that its team has.
template <typename P>
__device__ __forceinline__ void multiply_many_rows(const Consumer& c, float (&sums)[kSums], const Unit<P>& unit,
                                                   const OperandAddress& operands) {
#pragma unroll
  for (int s = 0; s < kSums; ++s) sums[s] = 0.0f;
#pragma unroll
  for (int chunk = 0; chunk < P::kChunks; ++chunk) {
    const Spot spot = c.ring.spot(unit.stage(chunk));
    const u32 from = unit.await(c, chunk, spot);
    u32 loaded;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint4 weights = load_matrices(from + s * 256);
      loaded = weights.w;
#pragma unroll
      for (int block = 0; block < kRowBlocks; block += 2)
        multiply_step(sums, weights, operands.load(chunk, s, block), block);
    }
    __syncwarp();
    unit.release(c, chunk, spot, loaded);
  }
}

template <typename P, typename Finish>
__device__ __forceinline__ void multiply_in_teams(const Consumer& c, const Finish& finish) {
  const OperandAddress operands(c);
#pragma unroll 1
  for (int unit = c.warp; 2 * unit < c.count<P>(); unit += kWarps) {
    float sums[kSums];
    multiply_many_rows<P>(c, sums, Unit<P>(c, unit), operands);
    finish_unit<P>(c, sums, unit, finish);
  }
}

// -- either ------------------------------------------------------------------------------------------------------------------

// Multiplies the tiles of this cluster; finish(tile, words) takes each of this warp's (see transpose_tile).
template <typename P, typename Finish>
__device__ __forceinline__ void multiply_tiles(const Consumer& c, const Finish& finish) {
  if constexpr (!kFewRows) {
    multiply_in_teams<P>(c, finish);
  } else if constexpr (kPairs<P>) {
    multiply_halves<P>(c, finish);
  } else {
    multiply_whole<P>(c, finish);
  }
}
