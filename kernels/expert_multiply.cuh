// Products of streamed weights with the operand rows, in the registers of teams of four warps. A team takes up to eight
// tiles at once, each warp two of them.
#pragma once
#include "expert_plan.cuh"

// Sums of a warp: sums[4 * j + i] is output lane / 4 of its tile i / 2, and operand row 8 * j + 2 * (lane % 4) + i % 2.
constexpr int kSums = kOperandRows / 2, kRowBlocks = kOperandRows / 8;
constexpr int kSteps = kChunk / 16;  // of sixteen inputs, in a chunk

// With few rows every product is short: its operands stay in registers, or the teams share the inputs of each tile. With
// many rows there is enough to do for one team.
constexpr bool kFewRows = kRowBlocks <= 2;

template <typename P>
constexpr bool kSplit = kFewRows && P::kChunks > 2;  // teams share the inputs
template <typename P>
constexpr int kOwnChunks = kSplit<P> ? ceil_div(P::kChunks, kTeams) : P::kChunks;  // chunks that a team takes, at most

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

// One step for all rows.
__device__ __forceinline__ void multiply_step(float (&sums)[kSums], const uint4& weights, const uint4& rows, int block) {
#pragma unroll
  for (int b = 0; b < 2 && block + b < kRowBlocks; ++b) {
    float(&d)[4] = *reinterpret_cast<float(*)[4]>(sums + 4 * (block + b));
    mma_16x8x16(d, weights.x, weights.y, weights.z, weights.w, b == 0 ? rows.x : rows.z, b == 0 ? rows.y : rows.w);
  }
}

// Operands that a warp keeps for all of its tiles.
template <typename P>
struct Kept {
  static constexpr bool kKeep = kFewRows && !kSplit<P>;
  uint4 rows[kKeep ? P::kChunks : 1][kKeep ? kSteps : 1];

  __device__ __forceinline__ explicit Kept(const OperandAddress& operands) {
    if (!kKeep) return;
#pragma unroll
    for (int chunk = 0; chunk < P::kChunks; ++chunk)
#pragma unroll
      for (int s = 0; s < kSteps; ++s) rows[kKeep ? chunk : 0][kKeep ? s : 0] = operands.load(chunk, s, 0);
  }
};

// sums = what this team adds up for this warp's two of `tiles` tiles, of which it has at least one. Their weights begin
// with stage `stage` of the ring.
template <typename P>
__device__ __forceinline__ void multiply_team(const Consumer& c, float (&sums)[kSums], const OperandAddress& operands,
                                              const Kept<P>& kept, u32 stage, int tiles) {
  constexpr int kEach = kOwnChunks<P>, kStride = kSplit<P> ? kTeams : 1;
  const int first = kSplit<P> ? c.warp / kTeamWarps : 0, member = c.warp % kTeamWarps;
  const int in_stage = P::chunks_in_stage(tiles), shift = P::log2_chunks_in_stage(tiles);
  // Matrices of a warp's weights: both tiles of eight inputs, both tiles of the next eight.
  const u32 lane_offset = (2 * member + c.lane / 8 % 2) * kChunkBytes + c.lane / 16 * 128 + c.lane % 8 * 16;
#pragma unroll
  for (int s = 0; s < kSums; ++s) sums[s] = 0.0f;
  constexpr int kTogether = kFewRows ? kEach : 1;  // chunks for which to wait at once
#pragma unroll
  for (int start = 0; start < kEach; start += kTogether) {
    u32 weights[kTogether], loaded[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int chunk = first + (start + i) * kStride;
      if (chunk >= P::kChunks) break;
      const u32 number = stage + (chunk >> shift);
      c.ring.wait(number);
      weights[i] =
          shared_address(c.ring.stage(number)) + (chunk & in_stage - 1) * tiles * kChunkBytes + lane_offset;
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int chunk = first + (start + i) * kStride;
      if (chunk >= P::kChunks) break;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint4 a = load_matrices(weights[i] + s * 256);
        loaded[i] = a.w;
#pragma unroll
        for (int block = 0; block < kRowBlocks; block += 2)
          multiply_step(sums, a,
                        Kept<P>::kKeep ? kept.rows[Kept<P>::kKeep ? start + i : 0][Kept<P>::kKeep ? s : 0]
                                       : operands.load(chunk, s, block),
                        block);
      }
    }
    __syncwarp();
    // Every stage gets kArrivals arrivals: the first that there must be counts for those that there are not.
    const int missing = kArrivals - min(in_stage, P::kChunks) * ((tiles + 1) / 2);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int chunk = first + (start + i) * kStride;
      if (chunk >= P::kChunks) break;
      const bool leads = member == 0 && (chunk & in_stage - 1) == 0;
      if (c.lane == 0) c.ring.release(stage + (chunk >> shift), loaded[i], leads ? 1 + missing : 1);
    }
  }
}
