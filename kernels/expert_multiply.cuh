// Products of streamed weights with the operand rows, in registers. A unit is two tiles of outputs, which a warp multiplies
// at once; a stage of the ring holds one chunk of the inputs of four units (see Product). OPERAND_ROWS: kOperandRows, as text.
#pragma once
#include "expert_weights.cuh"

// Many rows on Hopper: its own instructions read operands from shared memory for four warps at once. With few rows they are no
// faster than the others (docs/performance.md).
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && OPERAND_ROWS > 16
#define WARPGROUPS 1
#define TILE_ROWS OPERAND_ROWS
#include "wgmma.cuh"
#else
#define WARPGROUPS 0
#endif
static_assert(OPERAND_ROWS == kOperandRows, "the host computes the same");

// Sums of a warp: sums[4 * block + i] is output lane / 4 of tile i / 2 of a unit, and operand row
// 8 * block + 2 * (lane % 4) + i % 2.
constexpr int kSums = 4 * kRowBlocks;
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
  u32 first, lane_offset;    // stage of the first chunk; where a chunk has what this lane loads

  __device__ __forceinline__ Unit(const Consumer& c, int unit) {
    const int group = unit / kStageUnits;
    member = unit % kStageUnits;
    tiles = min(kStageTiles, c.count<P>() - group * kStageTiles);
    shift = P::log2_chunks_in_stage(tiles);
    first = c.stages + group * P::kChunks;
    lane_offset = Weights<P::kBits>::offset(member, c.lane);
  }

  __device__ __forceinline__ int inside(int chunk) const { return chunk & (1 << shift) - 1; }
  __device__ __forceinline__ u32 stage(int chunk) const { return first + (chunk >> shift); }

  // Waits for the weights of a chunk, and says where they are: those of the stage, or what this lane loads of them.
  __device__ __forceinline__ u32 await_all(const Consumer& c, int chunk, const Spot& spot) const {
    c.ring.wait(stage(chunk), spot);
    return shared_address(c.ring.stage(spot)) + inside(chunk) * tiles * P::kChunkBytes;
  }
  __device__ __forceinline__ u32 await(const Consumer& c, int chunk, const Spot& spot) const {
    return await_all(c, chunk, spot) + lane_offset;
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
  Weights<P::kBits> weights[2] = {{c.lane, unit.await(c, chunk, spot)}, {c.lane, unit.await(c, chunk + 1, next)}};
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int i = 0; i < 2; ++i) multiply_step(sums[i], weights[i].step(s), rows(i, s), 0);
  }
  __syncwarp();
  unit.release(c, chunk, spot, weights[0].loaded);
  unit.release(c, chunk + 1, next, weights[1].loaded);
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
    Weights<P::kBits> weights(c.lane, unit.await(c, chunk, spot));
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint4 of_step = weights.step(s);
#pragma unroll
      for (int block = 0; block < kRowBlocks; block += 2)
        multiply_step(sums, of_step, operands.load(chunk, s, block), block);
    }
    __syncwarp();
    unit.release(c, chunk, spot, weights.loaded);
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

// -- many rows on Hopper: four warps multiply a stage ---------------------------------------------------------------------

#if WARPGROUPS
constexpr int kGroups = kWarps / 4;
static_assert(kStageUnits == 4, "a warp's sixteen rows of the product are a unit");

// The matrices of a stage of bfloat16, eight outputs by eight inputs, lie one behind the other without a swizzle: 128 bytes to
// the next eight inputs (in the low word of a descriptor), a tile's chunk to the next eight outputs (in the high one).
constexpr u32 kNextInputs = 128 >> 4 << 16, kNextOutputs = chunk_bytes(16) >> 4;
__device__ __forceinline__ u32 matrices_start(u32 shared) { return tile_start(shared) | kNextInputs; }

// Starts d += weights * rows^T for sixteen inputs, with this warp's weights in registers, two words each; `d` must have begun.
// `multiply` of wgmma.cuh says how it is laid out: as the sums of a unit. The weights must stay as they are until the product
// has ended, and are outputs only because the lists count from the operand behind them.
__device__ __forceinline__ void multiply_held(float (&d)[kSums], u64& first, u64& second, u32 rows) {
  u64 of_rows = joined(rows, kTileHigh);
  asm volatile(
      "{\n.reg .pred p;\n.reg .b32 a0, a1, a2, a3;\nsetp.eq.b32 p, 0, 0;\n"
      "mov.b64 {a0, a1}, %1;\nmov.b64 {a2, a3}, %2;\n"
      "wgmma.mma_async.sync.aligned.m64n" WG_STRING(TILE_ROWS) WG_SHAPE
      "{" WG_OF(WG_NAMES_, TILE_ROWS) "}, {a0, a1, a2, a3}, %0, p, 1, 1, 0;\n}"
      : "+l"(of_rows), "+l"(first), "+l"(second), WG_OF(WG_SUMS_, TILE_ROWS)::"memory");
}

// All of these words are in registers here.
__device__ __forceinline__ void hold(u64 (&first)[kSteps], u64 (&second)[kSteps]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) asm volatile("" : "+l"(first[s]), "+l"(second[s])::"memory");
}

// What a group of four warps does with the stages of its units.
template <typename P>
struct Group {
  const Consumer& c;
  Unit<P> unit;  // this warp's
  u32 operands = tile_start(shared_address(c.shared.operands));

  __device__ __forceinline__ u32 rows(int chunk, int s) const {
    return further(operands, chunk * kOperandBytesOfChunk + s * 32);
  }

  // Behind the last chunk of a stage. Every stage gets kArrivals arrivals.
  __device__ __forceinline__ void release(int chunk, u32 loaded) const {
    if (unit.inside(chunk + 1) == 0 && c.lane == 0)
      c.ring.release(c.ring.spot(unit.stage(chunk)), loaded, c.warp % 4 == 0 ? kArrivals - 3 : 1);
  }

  // Weights as they lie in the ring. One chunk is on its way while the one before it ends.
  __device__ __forceinline__ void multiply_bf16(float (&sums)[kSums]) const {
#pragma unroll
    for (int chunk = 0; chunk < P::kChunks; ++chunk) {
      const u32 from = matrices_start(unit.await_all(c, chunk, c.ring.spot(unit.stage(chunk))));
      __syncwarp();
      products_begin();
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
        multiply<kNextOutputs>(sums, further(from, s * 256), rows(chunk, s), chunk + s > 0);
      products_commit();
      if (chunk > 0) {
        products_wait<1>();
        release(chunk - 1, 0u);
      }
    }
    products_finish(sums);
    release(P::kChunks - 1, 0u);
  }

  // Codes, decoded by the warp that they are for.
  __device__ __forceinline__ void multiply_codes(float (&sums)[kSums]) const {
#pragma unroll
    for (int chunk = 0; chunk < P::kChunks; ++chunk) {
      Weights<P::kBits> weights(c.lane, unit.await(c, chunk, c.ring.spot(unit.stage(chunk))));
      u64 first[kSteps], second[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint4 decoded = weights.step(s);
        first[s] = joined(decoded.x, decoded.y);
        second[s] = joined(decoded.z, decoded.w);
      }
      __syncwarp();
      release(chunk, weights.loaded);
      hold(first, second);  // all decoded, so that no product waits for the next one's weights
      products_begin();
#pragma unroll
      for (int s = 0; s < kSteps; ++s) multiply_held(sums, first[s], second[s], rows(chunk, s));
      products_commit();
      products_finish(sums);
      hold(first, second);
    }
  }
};

template <typename P, typename Finish>
__device__ __forceinline__ void multiply_in_groups(const Consumer& c, const Finish& finish) {
#pragma unroll 1
  for (int group = c.warp / 4; group * kStageTiles < c.count<P>(); group += kGroups) {
    const int unit = group * kStageUnits + c.warp % 4;
    const Group<P> all{c, Unit<P>(c, unit)};
    float sums[kSums] = {};
    if constexpr (P::kBits == 16) {
      all.multiply_bf16(sums);
    } else {
      all.multiply_codes(sums);
    }
    if (2 * unit < c.count<P>()) finish_unit<P>(c, sums, unit, finish);
  }
}
#else
template <typename P, typename Finish>
__device__ __forceinline__ void multiply_in_groups(const Consumer&, const Finish&) {}
#endif

// -- either ------------------------------------------------------------------------------------------------------------------

// Multiplies the tiles of this cluster; finish(tile, words) takes each of this warp's (see transpose_tile).
template <typename P, typename Finish>
__device__ __forceinline__ void multiply_tiles(const Consumer& c, const Finish& finish) {
  if constexpr (WARPGROUPS) {
    multiply_in_groups<P>(c, finish);
  } else if constexpr (!kFewRows) {
    multiply_in_teams<P>(c, finish);
  } else if constexpr (kPairs<P>) {
    multiply_halves<P>(c, finish);
  } else {
    multiply_whole<P>(c, finish);
  }
}
