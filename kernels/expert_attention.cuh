// Attention of the chunk to prefix and chunk. A cluster has some of the queries, each of its blocks an eighth of the keys.
#pragma once
#include "expert_products.cuh"

// Where 16 bytes of one value row lie in shared memory.
__device__ __forceinline__ int value_offset(int key, int piece) { return key * kValueStride + piece * 16; }

constexpr int kKeyGroups = kHeadDim / 32;

// What a thread loads: its part of the eight keys of its warp as B operand, queries, and values of the chunk. Keys behind
// the block's last repeat an existing one: their scores are not used.
struct Loads {
  static constexpr int kQueriesEach = ceil_div(kMostQueries, kWarps);
  uint4 keys[kKeyGroups], rest[kQueriesEach + kRowsEach];
};

// Loads everything that this block attends with, and waits for what the phase before writes. The prefix's keys come first,
// since nobody waits for them.
__device__ __forceinline__ void load_attention(Consumer& c, const Position& at, const Work& work, Loads& loads,
                                               unsigned char* queries) {
  const int copy = c.layer_copy(at), key = min(work.start + c.warp * 8 + c.row, work.prefix + ROWS - 1);
  const bool chunk = key >= work.prefix;
  if (!chunk) {
    const bf16* from =
        c.plan.prefix_key + (static_cast<u64>(at.layer) * c.plan.capacity + key) * kHeadDim + c.quad * 8;
#pragma unroll
    for (int g = 0; g < kKeyGroups; ++g) loads.keys[g] = load_shared_by_grid(from + g * 32);
  }
  c.begin();
  c.block_barrier();  // nobody reads the operands of the phase before
  const bf16* query_rows = c.rows(kQuery, kInner, copy) + work.first * kHeadDim + c.lane * 8;
  const int first_value = max(0, work.prefix - work.start);  // of the chunk, among this block's keys
  const bf16* value_rows = c.rows(kValue, kHeadDim, copy) + (work.start - work.prefix) * kHeadDim + c.lane * 8;
  poll(loads.rest, [&](int i) -> const void* {
    if (i < Loads::kQueriesEach) {
      const int query = c.warp + i * kWarps;
      return query < work.queries ? query_rows + query * kHeadDim : nullptr;
    }
    const int value = first_value + c.warp + (i - Loads::kQueriesEach) * kWarps;
    return value < work.count ? value_rows + value * kHeadDim : nullptr;
  });
#pragma unroll
  for (int i = 0; i < Loads::kQueriesEach; ++i) {
    const int query = c.warp + i * kWarps;
    if (query < work.queries) store16(queries + query * kQueryStride + c.lane * 16, loads.rest[i]);
  }
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const int value = first_value + c.warp + i * kWarps;
    if (value < work.count)
      store16(reinterpret_cast<unsigned char*>(c.shared.values) + value_offset(value, c.lane),
              loads.rest[Loads::kQueriesEach + i]);
  }
  for (int key = work.count + c.warp; key < ceil_div(work.count, 16) * 16; key += kWarps)  // they weigh nothing
    store16(reinterpret_cast<unsigned char*>(c.shared.values) + value_offset(key, c.lane), make_uint4(0, 0, 0, 0));
  if (chunk) {
    const bf16* from = c.rows(kKey, kHeadDim, copy) + (key - work.prefix) * kHeadDim + c.quad * 8;
    poll(loads.keys, [&](int g) { return from + g * 32; });
  }
}

// Scores of this warp's eight keys, in units of log2.
__device__ __forceinline__ void score(const Consumer& c, const Loads& loads, const unsigned char* queries, float* scores) {
  constexpr float kScale = 0.0625f * 1.4426950408889634f;  // 1 / sqrt(kHeadDim), and from e to 2
  if (c.warp * 8 >= KEYS) return;
#pragma unroll
  for (int m = 0; m < kQueryTiles; ++m) {
    const unsigned char* a = queries + (m * 16 + c.row) * kQueryStride + c.quad * 16;
    const bool has_high = m * 16 + 8 + c.row < kMostQueries;
    uint4 high = make_uint4(0, 0, 0, 0);
    float s[4][4] = {};
#pragma unroll
    for (int g = 0; g < kKeyGroups; ++g) {
      const uint4 low = load16(a + g * 64), &k = loads.keys[g];
      if (has_high) high = load16(a + 8 * kQueryStride + g * 64);
      mma_16x8x16(s[2 * g % 4], low.x, high.x, low.y, high.y, k.x, k.y);
      mma_16x8x16(s[(2 * g + 1) % 4], low.z, high.z, low.w, high.w, k.z, k.w);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float d[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int e = half * 2 + j;
        d[j] = ((s[0][e] + s[1][e]) + (s[2][e] + s[3][e])) * kScale;
      }
      *reinterpret_cast<float2*>(scores + (m * 16 + half * 8 + c.row) * kScoreStride + c.warp * 8 + c.quad * 2) =
          make_float2(d[0], d[1]);
    }
  }
}

// weights = exp2(score - maximum of the row), one warp a row. Maximum and sum of each row go to all blocks of the cluster.
__device__ __forceinline__ void soften(const Consumer& c, const Work& work, const float* scores, bf16* weights,
                                       float* extremes, u64* barrier) {
  for (int query = c.warp; query < work.queries; query += kWarps) {
    const int key = c.lane * 4;
    float s[4], p[4], maximum = negative_infinity(), sum = 0.0f;
    if (key < KEYS) {
      const float4 v = load_float4(scores + query * kScoreStride + key);
      s[0] = v.x, s[1] = v.y, s[2] = v.z, s[3] = v.w;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (key + j >= work.count) s[j] = negative_infinity();
      maximum = fmaxf(maximum, s[j]);
    }
    maximum = warp_max(maximum);
    const float base = work.count > 0 ? maximum : 0.0f;  // a block without keys
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      p[j] = exp2_fast(s[j] - base);
      sum += p[j];
    }
    sum = warp_sum(sum);
    if (key < KEYS)
      *reinterpret_cast<uint2*>(weights + query * kScoreStride + key) =
          make_uint2(pack_bf16(p[0], p[1]), pack_bf16(p[2], p[3]));
    if (c.lane < kRanks)
      send(remote(shared_address(extremes + (c.rank * kMostQueries + query) * 2), c.lane), maximum, sum,
           remote(shared_address(barrier), c.lane));
  }
}

// Weighted values of this warp's sixteen dimensions, sent to the block that joins them: parts[rank][query][kDims].
__device__ __forceinline__ void mix_values(const Consumer& c, const Work& work, const bf16* weights, float* parts,
                                           u64* barrier) {
  static_assert(kHeadDim / kWarps == 16 && kDims == 32, "a warp has half of the dimensions of an owner");
  const u32 values = shared_address(c.shared.values), from = shared_address(weights);
  const int owner = c.warp / 2;
  const u32 to = remote(shared_address(parts + c.rank * kMostQueries * kDims + c.warp % 2 * 16 + c.quad * 2), owner);
  const u32 counted = remote(shared_address(barrier), owner);
#pragma unroll
  for (int m = 0; m < kQueryTiles; ++m) {
    float o[2][4] = {};
#pragma unroll
    for (int s = 0; s < KEYS / 16; ++s) {
      if (s * 16 >= work.count) break;
      const uint4 b = load_matrices_transposed(values + value_offset(s * 16 + c.lane % 16, c.warp * 2 + c.lane / 16));
      const uint4 a = load_matrices(from + ((m * 16 + c.lane % 16) * kScoreStride + s * 16 + c.lane / 16 * 8) * 2);
      mma_16x8x16(o[0], a.x, a.y, a.z, a.w, b.x, b.y);
      mma_16x8x16(o[1], a.x, a.y, a.z, a.w, b.z, b.w);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = m * 16 + half * 8 + c.row;
      if (query >= work.queries) continue;
#pragma unroll
      for (int n = 0; n < 2; ++n)
        send(to + (query * kDims + n * 8) * 4, o[n][half * 2], o[n][half * 2 + 1], counted);
    }
  }
}

// attended = the eight blocks' parts of each query, joined; this block has kDims of the dimensions.
__device__ __forceinline__ void join(const Consumer& c, const Position& at, const Work& work, const float* parts,
                                     const float* extremes) {
  const int copy = c.layer_copy(at);
  for (int i = c.thread; i < work.queries * (kDims / 2); i += kConsumers) {
    const int query = i / (kDims / 2), pair = i % (kDims / 2), all = work.first + query;
    float2 e[kRanks];
    float maximum = negative_infinity(), total = 0.0f;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      e[r] = *reinterpret_cast<const float2*>(extremes + (r * kMostQueries + query) * 2);
      maximum = fmaxf(maximum, e[r].x);
    }
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      const float weight = exp2_fast(e[r].x - maximum);
      const float2 part = *reinterpret_cast<const float2*>(parts + (r * kMostQueries + query) * kDims + pair * 2);
      total = fmaf(weight, e[r].y, total);
      sum.x = fmaf(weight, part.x, sum.x);
      sum.y = fmaf(weight, part.y, sum.y);
    }
    const int offset = all * kHeadDim + c.rank * kDims + pair * 2;
    exchange(c.rows(kAttended, kInner, copy) + offset, c.rows(kAttended, kInner, copy ^ 1) + offset,
             pack_bf16(__fdividef(sum.x, total), __fdividef(sum.y, total)));
  }
}

__device__ __forceinline__ void attend(Consumer& c, const Position& at) {
  const Work work(c.cluster, c.rank, c.prefix);
  unsigned char* queries = c.shared.operands;
  float* scores = reinterpret_cast<float*>(queries + kQueriesHeld * kQueryStride);
  bf16* weights = reinterpret_cast<bf16*>(scores + kQueriesHeld * kScoreStride);
  const Place place = c.place(at);
  float *extremes = place.parts, *parts = extremes + kRanks * kMostQueries * 2;
  u64* barrier = c.shared.parts + place.barrier;
  c.expect(place, work.queries * kRanks * (kDims + 2) * 4);
  Loads loads;
  load_attention(c, at, work, loads, queries);
  c.phase_barrier();
  score(c, loads, queries, scores);
  c.block_barrier();
  soften(c, work, scores, weights, extremes, barrier);
  c.block_barrier();
  mbarrier_wait(&c.shared.values_full, c.single() ? 0 : c.layers(at) & 1);
  mix_values(c, work, weights, parts, barrier);
  c.await(place);
  join(c, at, work, parts, extremes);
  c.end();
}
