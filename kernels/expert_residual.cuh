// The residual of the expert: a float for each row of the chunk and each column, from the actions on, sum by sum.
#pragma once
#include "expert_plan.cuh"

__device__ __forceinline__ float4 load_float4(const float* p) { return *reinterpret_cast<const float4*>(p); }

// -- where a step begins ----------------------------------------------------------------------------------------------

// The actions that this warp's rows have in front of this step, if it does not hold them yet.
__device__ __forceinline__ void recall_actions(Consumer& c, const Position& at) {
  if (kResident && at.step > 0) return;
  const float* from = (at.step == 0 ? c.plan.noise : c.plan.actions) + c.lane;
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i)
    if (c.row_of_warp(i) < ROWS) *c.action(c.row_of_warp(i)) = __ldcg(from + c.row_of_warp(i) * kActions);
  __syncwarp();
}

// x = actions @ enter_weight + enter_bias, in float.
__device__ __forceinline__ void enter(Consumer& c, const Position& at) {
  recall_actions(c, at);
  const float* weight = c.plan.enter_weight + c.column();
  const float4 bias = load_float4(c.plan.enter_bias + c.column());
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) c.residual[i] = bias;
#pragma unroll 16
  for (int a = 0; a < kActions; ++a) {
    const float4 w = load_float4(weight + a * kWidth);
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      float4& x = c.residual[i];
      const float action = c.shared.actions[min(c.row_of_warp(i), ROWS - 1) * kActions + a];
      x = make_float4(fmaf(action, w.x, x.x), fmaf(action, w.y, x.y), fmaf(action, w.z, x.z), fmaf(action, w.w, x.w));
    }
  }
}

// -- what products add to it ------------------------------------------------------------------------------------------

// x += gate * (the sum that was made last), for this warp's rows. `meanwhile`: see poll.
template <typename Meanwhile>
__device__ __forceinline__ void add_sums(Consumer& c, const Position& at, const Meanwhile& meanwhile) {
  const int number = c.sums(at);
  const u32* from = c.sum_words(number) + c.column();
  float* kept = reinterpret_cast<float*>(c.plan.words + kResidual) + c.column();
  uint4 v[kRowsEach];
  poll(v, [&](int i) { return c.row_of_warp(i) < ROWS; }, [&](int i) { return from + c.row_of_warp(i) * kWidth; },
       meanwhile);
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const int row = c.row_of_warp(i);
    float4& x = c.residual[i];
    if (!kResident && row < ROWS) x = load_float4(kept + ((number & 1) * ROWS + row) * kWidth);
    x = make_float4(fmaf(c.gate.x, __uint_as_float(v[i].x), x.x), fmaf(c.gate.y, __uint_as_float(v[i].y), x.y),
                    fmaf(c.gate.z, __uint_as_float(v[i].z), x.z), fmaf(c.gate.w, __uint_as_float(v[i].w), x.w));
  }
}

// The same with the sum of what the clusters' shares of `down` give in the layer before, of few rows.
template <typename Meanwhile>
__device__ __forceinline__ void add_shares(Consumer& c, const Position& at, const Meanwhile& meanwhile) {
  constexpr int kPairs = 2;  // of words of a lane and row
  const int number = c.sums(at);
  const u32* shares = c.plan.words + kShares + (c.layer_copy(at) ^ 1) * ROWS * kShareRow +
                      c.rank * kOutputsOfRank * 2 + c.lane * 4;
  const float* kept = reinterpret_cast<const float*>(c.plan.words + kResidual) + c.column();
  const u32* from[kRowsEach];
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    from[i] = shares + c.row_of_warp(i) * kShareRow;
    asm volatile("" : "+l"(from[i]));
  }
  uint4 v[kRowsEach * kPairs];
  poll_sums<kClusters>(v, [&](int i) { return c.row_of_warp(i / kPairs) < ROWS; },
                       [&](int i) { return from[i / kPairs] + i % kPairs * kOutputsOfRank; }, meanwhile);
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const int row = c.row_of_warp(i);
    const uint4 &low = v[i * kPairs], &high = v[i * kPairs + 1];
    float4& x = c.residual[i];
    if (!kResident && row < ROWS) x = load_float4(kept + ((number & 1) * ROWS + row) * kWidth);
    x = make_float4(fmaf(c.gate.x, ShareSum::value(low.x, low.y), x.x),
                    fmaf(c.gate.y, ShareSum::value(low.z, low.w), x.y),
                    fmaf(c.gate.z, ShareSum::value(high.x, high.y), x.z),
                    fmaf(c.gate.w, ShareSum::value(high.z, high.w), x.w));
  }
}

// Between the launches of single phases the residual lies in memory.
__device__ __forceinline__ void keep_residual(const Consumer& c, const Position& at) {
  if (kResident || c.cluster > 0) return;
  float* to = reinterpret_cast<float*>(c.plan.words + kResidual) + (c.sums(at) + 1 & 1) * ROWS * kWidth + c.column();
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i)
    if (c.row_of_warp(i) < ROWS) *reinterpret_cast<float4*>(to + c.row_of_warp(i) * kWidth) = c.residual[i];
}

// Brings this block's eighth of the residual up to date. `meanwhile()` is done while it waits for what is added.
template <typename Meanwhile = Nothing>
__device__ __forceinline__ void update_residual(Consumer& c, const Position& at, const Meanwhile& meanwhile = {}) {
  if (!kResident) c.fetch_norm(at.step, at.phase == kGateUp ? 2 * at.layer + 1 : 2 * at.layer);
  c.begin();
  c.block_barrier();  // nobody reads the operands of the phase before
  if (at.phase == kProject && at.layer == 0) {
    enter(c, at);
    meanwhile();
  } else if (kFewRows && at.phase != kGateUp) {
    add_shares(c, at, meanwhile);
  } else {
    add_sums(c, at, meanwhile);
  }
  keep_residual(c, at);
}

__device__ __forceinline__ float square_of(const float4& v) {
  return fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, v.w * v.w)));
}
__device__ __forceinline__ float squares_of(const float4& v) { return warp_sum(square_of(v)); }

__device__ __forceinline__ float4 scaled(const Consumer& c, const float4& v) {
  return make_float4(fmaf(v.x, c.scale.x, v.x), fmaf(v.y, c.scale.y, v.y), fmaf(v.z, c.scale.z, v.z),
                     fmaf(v.w, c.scale.w, v.w));
}
