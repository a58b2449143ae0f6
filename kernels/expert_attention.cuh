// Attention of the chunk to prefix and chunk. A cluster has some of the queries, each of its blocks an eighth of the keys.
#pragma once
#include "expert_products.cuh"

// Where 16 bytes of one value or query lie in shared memory, from where they begin.
__device__ __forceinline__ int value_offset(int row, int piece) { return row * kValueStride + piece * 16; }
__device__ __forceinline__ int query_offset(int row, int piece) { return row * kQueryStride + piece * 16; }

// Scores of sixteen queries and eight keys, of which `s` holds four parts.
__device__ __forceinline__ void store_scores(const Consumer& c, const float (&s)[4][4], float* scores) {
  constexpr float kScale = 0.0625f * 1.4426950408889634f;  // 1 / sqrt(kHeadDim), and from e to 2
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float d[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int e = half * 2 + j;
      d[j] = ((s[0][e] + s[1][e]) + (s[2][e] + s[3][e])) * kScale;
    }
    *reinterpret_cast<float2*>(scores + (half * 8 + c.row) * kScoreStride + c.quad * 2) = make_float2(d[0], d[1]);
  }
}

// Loads what the phase before wrote: queries to `queries`, the chunk's values behind the prefix's.
__device__ __forceinline__ void load_attention(Consumer& c, const Position& at, const Work& work, unsigned char* queries) {
  constexpr int kQueriesEach = ceil_div(kMostQueries, kWarps);
  const int copy = c.layer_copy(at), first = max(0, work.prefix - work.start) + c.warp;  // of the chunk's values here
  const bf16 *query_rows = c.rows(kQuery, kInner, copy) + work.first * kHeadDim + c.lane * 8,
             *value_rows = c.rows(kValue, kHeadDim, copy) + (work.start - work.prefix) * kHeadDim + c.lane * 8;
  unsigned char* values = reinterpret_cast<unsigned char*>(c.shared.values);
  c.block_barrier();  // nobody reads the operands of the phase before
  uint4 v[kQueriesEach + kRowsEach];
  poll(v, [&](int i) -> const void* {
    const int query = c.warp + i * kWarps, row = first + (i - kQueriesEach) * kWarps;
    if (i < kQueriesEach) return query < work.queries ? query_rows + query * kHeadDim : nullptr;
    return row < work.count ? value_rows + row * kHeadDim : nullptr;
  });
#pragma unroll
  for (int i = 0; i < kQueriesEach; ++i) {
    const int query = c.warp + i * kWarps;
    if (query < work.queries) store16(queries + query_offset(query, c.lane), v[i]);
  }
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const int row = first + i * kWarps;
    if (row < work.count) store16(values + value_offset(row, c.lane), v[kQueriesEach + i]);
  }
  for (int row = work.count + c.warp; row < ceil_div(work.count, 16) * 16; row += kWarps)  // they weigh nothing
    store16(values + value_offset(row, c.lane), make_uint4(0u, 0u, 0u, 0u));
}

constexpr int kKeyGroups = kHeadDim / 32;

// This lane's key in a tile of eight. Those behind the block's last repeat an existing one: their scores are not used.
__device__ __forceinline__ int key_of(const Consumer& c, const Work& work, int tile) {
  return min(work.start + tile * 8 + c.row, work.prefix + ROWS - 1);
}

// Begins to load the prefix's keys of a tile, for which nobody has to wait.
__device__ __forceinline__ void load_prefix_keys(const Consumer& c, const Position& at, const Work& work, int tile,
                                                 uint4 (&keys)[kKeyGroups]) {
  const int key = min(key_of(c, work, tile), work.prefix - 1);  // another one in the place of the chunk's own
  const bf16* from = c.plan.prefix_key + (static_cast<u64>(at.layer) * c.plan.capacity + key) * kHeadDim + c.quad * 8;
#pragma unroll
  for (int g = 0; g < kKeyGroups; ++g) keys[g] = load_shared_by_grid(from + g * 32);
}

// Scores of this warp's keys, in units of log2: tiles of eight, every kWarps-th; `keys` are those of the first. A lane
// reads 16 bytes of every 64 of a key, and of queries likewise, which permutes the inputs of the sum.
__device__ __forceinline__ void score(const Consumer& c, const Position& at, const Work& work,
                                      uint4 (&keys)[kKeyGroups], const unsigned char* queries, float* scores) {
  for (int tile = c.warp; tile * 8 < work.count; tile += kWarps) {
    if (tile != c.warp) load_prefix_keys(c, at, work, tile, keys);
    const int own = key_of(c, work, tile) - work.prefix;
    if (own >= 0) {
      const bf16* from = c.rows(kKey, kHeadDim, c.layer_copy(at)) + own * kHeadDim + c.quad * 8;
      poll(keys, [&](int g) { return from + g * 32; });
    }
    __syncwarp();
#pragma unroll
    for (int m = 0; m < kQueryTiles; ++m) {
      const unsigned char* a = queries + query_offset(m * 16 + c.row, c.quad);
      const bool has_high = m * 16 + 8 + c.row < kMostQueries;  // few queries are worth a condition: bandwidth is scarce
      float s[4][4] = {};
#pragma unroll
      for (int g = 0; g < kKeyGroups; ++g) {
        const uint4 low = load16(a + g * 64);
        const uint4 high = has_high ? load16(a + query_offset(8, 0) + g * 64) : make_uint4(0u, 0u, 0u, 0u);
        mma_16x8x16(s[2 * g % 4], low.x, high.x, low.y, high.y, keys[g].x, keys[g].y);
        mma_16x8x16(s[(2 * g + 1) % 4], low.z, high.z, low.w, high.w, keys[g].z, keys[g].w);
      }
      store_scores(c, s, scores + m * 16 * kScoreStride + tile * 8);
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

// Weighted values of this warp's dimensions, sent to the block that joins them: parts[rank][query][kDims].
__device__ __forceinline__ void mix_values(const Consumer& c, const Work& work, const bf16* weights, float* parts,
                                           u64* barrier) {
  constexpr int kEach = kWarps < 16 ? 32 : 16, kPairs = kEach / 16;
  static_assert(kDims % kEach == 0 && kEach % 16 == 0, "a warp has dimensions of one owner");
  const u32 values = shared_address(c.shared.values), from = shared_address(weights);
  const int first = c.warp * kEach, owner = first / kDims;
  if (first >= kHeadDim) return;
  const u32 to = remote(shared_address(parts + c.rank * kMostQueries * kDims + first % kDims + c.quad * 2), owner);
  const u32 counted = remote(shared_address(barrier), owner);
#pragma unroll
  for (int m = 0; m < kQueryTiles; ++m) {
    float o[2 * kPairs][4] = {};
#pragma unroll
    for (int s = 0; s < KEYS / 16; ++s) {
      if (s * 16 >= work.count) break;
      const uint4 a = load_matrices(from + ((m * 16 + c.lane % 16) * kScoreStride + s * 16 + c.lane / 16 * 8) * 2);
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        const uint4 b =
            load_matrices_transposed(values + value_offset(s * 16 + c.lane % 16, first / 8 + 2 * p + c.lane / 16));
        mma_16x8x16(o[2 * p], a.x, a.y, a.z, a.w, b.x, b.y);
        mma_16x8x16(o[2 * p + 1], a.x, a.y, a.z, a.w, b.z, b.w);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = m * 16 + half * 8 + c.row;
      if (query >= work.queries) continue;
#pragma unroll
      for (int n = 0; n < 2 * kPairs; ++n)
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
             pack_bf16(lifted<Output>(__fdividef(sum.x, total)), lifted<Output>(__fdividef(sum.y, total))));
  }
}

__device__ __forceinline__ void attend(Consumer& c, const Position& at) {
  const Work work = c.work();
  unsigned char* queries = c.shared.operands;
  float* scores = reinterpret_cast<float*>(queries + kQueriesHeld * kQueryStride);
  bf16* weights = reinterpret_cast<bf16*>(scores + kQueriesHeld * kScoreStride);
  const Place place = c.place(at);
  float *extremes = place.parts, *parts = extremes + kRanks * kMostQueries * 2;
  u64* barrier = c.shared.parts + place.barrier;
  c.expect(place, work.queries * kRanks * (kDims + 2) * 4);
  c.begin();
  uint4 keys[kKeyGroups];
  load_attention(c, at, work, queries);
  load_prefix_keys(c, at, work, c.warp, keys);
  c.block_barrier();
  score(c, at, work, keys, queries, scores);
  c.block_barrier();
  soften(c, work, scores, weights, extremes, barrier);
  c.block_barrier();
  mbarrier_wait(&c.shared.values_full, kResident ? c.layers(at) & 1 : 0);
  mix_values(c, work, weights, parts, barrier);
  c.await(place);
  join(c, at, work, parts, extremes);
}
