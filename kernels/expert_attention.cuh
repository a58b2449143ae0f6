// Attention of the chunk to prefix and chunk: every head's keys are split into ranges, a block each, and joined.
#pragma once
#include "expert_plan.cuh"

struct KeyRange {
  int head, split, start, count, prefix;  // `prefix`: rows before the chunk's own

  __device__ KeyRange(int item, int prefix_) : prefix(prefix_) {
    head = item / kSplits;
    split = item % kSplits;
    const int total = prefix + ROWS, each = ((total + kSplits - 1) / kSplits + 7) / 8 * 8;
    start = split * each;
    count = max(0, min(each, total - start));
  }
};

// Issues the copy of those value rows of `range` that are (`chunk`) or are not in the chunk; others become zero.
__device__ __forceinline__ void copy_values(Consumer& c, const KeyRange& range, const bf16* prefix_value, bool chunk) {
  const u32 base = shared_address(c.shared.scratch);
  for (int i = c.thread; i < kKeys * kHeadDim / 8; i += kConsumers) {
    const int local = i / 32, piece = i % 32, key = range.start + local;
    const bool is_chunk = local < range.count && key >= range.prefix;
    if (is_chunk != chunk) continue;
    const bf16* from = is_chunk ? c.plan.value + (key - range.prefix) * kHeadDim
                                : prefix_value + static_cast<u64>(local < range.count ? key : 0) * kHeadDim;
    copy_async16(base + local * kHeadDim * 2 + ((piece ^ (local & 7)) * 16), from + piece * 8, local < range.count);
  }
}

constexpr int kKeyTiles = kKeys / 8, kDimParts = kWarps / kKeyTiles, kKeyGroups = kHeadDim / 32 / kDimParts;
static_assert(kDimParts == 2, "two warps share eight keys, each takes half of the dimensions");

// This lane's part of the eight keys of its warp, those in the prefix or those in the chunk: [group of 32 dimensions].
// Keys behind the range repeat an existing one: their scores are not used.
__device__ __forceinline__ void load_keys(const Consumer& c, const KeyRange& range, const bf16* prefix_key, bool chunk,
                                          uint4 (&k)[kKeyGroups]) {
  const int key = min(range.start + c.warp % kKeyTiles * 8 + c.row, range.prefix + ROWS - 1);
  if ((key >= range.prefix) != chunk) return;
  const bf16* from =
      chunk ? c.plan.key + (key - range.prefix) * kHeadDim : prefix_key + static_cast<u64>(key) * kHeadDim;
  from += c.warp / kKeyTiles * kKeyGroups * 32 + c.quad * 8;
#pragma unroll
  for (int g = 0; g < kKeyGroups; ++g) k[g] = load_shared_by_grid(from + g * 32);
}

// Half of the scores of this warp's eight keys, in units of log2, to shared memory.
__device__ __forceinline__ void score(Consumer& c, const KeyRange& range, const uint4 (&k)[kKeyGroups], float* scores) {
  constexpr float kScale = 0.0625f * 1.4426950408889634f;  // 1 / sqrt(kHeadDim), and from e to 2
  const int part = c.warp / kKeyTiles, column = c.warp % kKeyTiles * 8 + c.quad * 2;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    uint4 q[kKeyGroups][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bf16* from =
          c.plan.query + c.real_row(m, half) * kInner + range.head * kHeadDim + part * kKeyGroups * 32 + c.quad * 8;
#pragma unroll
      for (int g = 0; g < kKeyGroups; ++g) q[g][half] = load_shared_by_grid(from + g * 32);
    }
    float s[2][4] = {};
#pragma unroll
    for (int g = 0; g < kKeyGroups; ++g) {
      mma_16x8x16(s[0], q[g][0].x, q[g][1].x, q[g][0].y, q[g][1].y, k[g].x, k[g].y);
      mma_16x8x16(s[1], q[g][0].z, q[g][1].z, q[g][0].w, q[g][1].w, k[g].z, k[g].w);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(scores + part * kScores + (m * 16 + half * 8 + c.row) * kScoreStride + column) =
          make_float2((s[0][half * 2] + s[1][half * 2]) * kScale, (s[0][half * 2 + 1] + s[1][half * 2 + 1]) * kScale);
  }
}

// weights = exp2(score - maximum of the row), one warp a row; the maximum and the sum go to global memory.
__device__ __forceinline__ void soften(Consumer& c, const KeyRange& range, const float* scores, bf16* weights) {
  const int item = range.head * kSplits + range.split, column = c.lane * 2;
  for (int row = c.warp; row < ROWS; row += kWarps) {
    const float* from = scores + row * kScoreStride + column;
    const float2 a = *reinterpret_cast<const float2*>(from), b = *reinterpret_cast<const float2*>(from + kScores);
    const float first = column < range.count ? a.x + b.x : negative_infinity();
    const float second = column + 1 < range.count ? a.y + b.y : negative_infinity();
    const float maximum = warp_max(fmaxf(first, second));
    const float base = range.count > 0 ? maximum : 0.0f;  // a range without keys
    const float p = exp2_fast(first - base), q = exp2_fast(second - base), sum = warp_sum(p + q);
    *reinterpret_cast<u32*>(weights + row * kScoreStride + column) = pack_bf16(p, q);
    if (c.lane == 0) *reinterpret_cast<float2*>(c.plan.extremes + (item * ROWS + row) * 2) = make_float2(maximum, sum);
  }
}

// Weighted values of this warp's sixteen dimensions to global memory.
__device__ __forceinline__ void mix_values(Consumer& c, const KeyRange& range, const bf16* weights) {
  static_assert(kHeadDim / kWarps == 16, "two tiles of eight dimensions a warp");
  const u32 values = shared_address(c.shared.scratch), from = shared_address(weights);
  const int item = range.head * kSplits + range.split;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    float o[2][4] = {};
#pragma unroll
    for (int s = 0; s < kKeys / 16; ++s) {
      if (s * 16 >= range.count) break;
      const int key = s * 16 + c.lane % 16, piece = c.warp * 2 + c.lane / 16;
      const uint4 b = load_matrices_transposed(values + key * kHeadDim * 2 + ((piece ^ (key & 7)) * 16));
      const uint4 a = load_matrices(from + ((m * 16 + c.lane % 16) * kScoreStride + s * 16 + c.lane / 16 * 8) * 2);
      mma_16x8x16(o[0], a.x, a.y, a.z, a.w, b.x, b.y);
      mma_16x8x16(o[1], a.x, a.y, a.z, a.w, b.z, b.w);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * 16 + half * 8 + c.row;
      float* to = c.plan.partial + (item * ROWS + row) * kHeadDim + c.warp * 16 + c.quad * 2;
#pragma unroll
      for (int n = 0; n < 2; ++n)
        if (row < ROWS) *reinterpret_cast<float2*>(to + n * 8) = make_float2(o[n][half * 2], o[n][half * 2 + 1]);
    }
  }
}

// Attention of every row of one head to one range of keys.
__device__ void attend(Consumer& c, const Position& at) {
  const u64 layer = static_cast<u64>(at.layer) * c.plan.capacity * kHeadDim;
  float* scores = reinterpret_cast<float*>(c.shared.scratch + kValueBytes);
  bf16* weights = reinterpret_cast<bf16*>(scores + 2 * kScores);
  for (int item = c.block; item < kHeads * kSplits || item == c.block; item += kBlocks) {
    const KeyRange range(min(item, kHeads * kSplits - 1), c.prefix);
    const bool mine = item < kHeads * kSplits;
    uint4 k[kKeyGroups];
    if (item != c.block) c.block_barrier();
    if (mine) {
      load_keys(c, range, c.plan.prefix_key + layer, false, k);
      copy_values(c, range, c.plan.prefix_value + layer, false);
    }
    if (item == c.block) c.begin(0);
    if (!mine) break;
    load_keys(c, range, c.plan.prefix_key + layer, true, k);
    copy_values(c, range, c.plan.prefix_value + layer, true);
    score(c, range, k, scores);
    copy_async_wait();
    c.block_barrier();
    soften(c, range, scores, weights);
    c.block_barrier();
    mix_values(c, range, weights);
    c.block_barrier();
    if (c.thread == 0 && c.index + 1 < c.plan.last)
      add_release(c.plan.sync + (kHeadCounter + range.head) * kSyncStride, 1);
  }
  ++c.attentions;
}

__device__ __forceinline__ void load_parts(const Consumer& c, int head, int row, int dim, float (&part)[kSplits]) {
  const float* from = c.plan.partial + (head * kSplits * ROWS + row) * kHeadDim + dim;
#pragma unroll
  for (int s = 0; s < kSplits; ++s) part[s] = __ldcg(from + s * ROWS * kHeadDim);
}

// attended = the ranges of one head, joined; a block takes 1 / kSplits of the head's dimensions.
__device__ void combine(Consumer& c, const Position&) {
  constexpr int kDims = kHeadDim / kSplits;
  static_assert(kDims == kSplits, "one index serves both loops");
  float* weights = reinterpret_cast<float*>(c.shared.scratch + kValueBytes);
  for (int item = c.block; item < kHeads * kSplits; item += kBlocks) {
    const int head = item / kSplits, slice = item % kSplits;
    if (c.index == c.plan.first) {
      overlap_wait();
    } else if (c.thread == 0) {
      wait_until(c.plan.sync + (kHeadCounter + head) * kSyncStride, c.attentions * kSplits);
    }
    c.block_barrier();
    constexpr int kEach = (ROWS * kDims + kConsumers - 1) / kConsumers;  // values a thread
    constexpr bool kEarly = kEach == 1;                                  // fetch them while the weights are computed
    float part[kSplits];
    if (kEarly && c.thread < ROWS * kDims)
      load_parts(c, head, c.thread / kDims, slice * kDims + c.thread % kDims, part);
#pragma unroll 1
    for (int i = c.thread; i < (ROWS * kSplits + 31) / 32 * 32; i += kConsumers) {
      const int row = min(i / kSplits, ROWS - 1), split = i % kSplits;
      const float2 e = __ldcg(reinterpret_cast<const float2*>(c.plan.extremes) + (head * kSplits + split) * ROWS + row);
      const float weight = exp2_fast(e.x - warp_max<kSplits>(e.x));
      const float total = warp_sum<kSplits>(weight * e.y);
      if (i < ROWS * kSplits) weights[i] = __fdividef(weight, total);
    }
    c.block_barrier();
    for (int i = c.thread; i < ROWS * kDims; i += kConsumers) {
      const int row = i / kDims, dim = slice * kDims + i % kDims;
      if (!kEarly) load_parts(c, head, row, dim, part);
      float sum = 0.0f;
#pragma unroll
      for (int s = 0; s < kSplits; ++s) sum = fmaf(weights[row * kSplits + s], part[s], sum);
      c.plan.attended[row * kInner + head * kHeadDim + dim] = to_bf16(sum);
    }
  }
  c.end(0);
}
