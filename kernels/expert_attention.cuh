// Attention of the chunk to prefix and chunk. A cluster has some of the queries, each of its blocks an eighth of the
// keys.
//
// A block weighs its keys against maxima of its own, and sends weighted values, with the maximum and the sum of the
// weights, to the blocks that join them, each for some of the dimensions. Two barriers count what comes: one for maxima
// and sums, so that a warp that joins can work out factors while weighted values are on their way, and one for those.
// Whoever reads what they count waits itself, so no barrier of the block stands between mixing and joining, and warps
// that neither mix nor join are done.
//
// What is read here is overwritten late enough: `output` puts its operands where queries and weights are behind a
// barrier of the block; parts of `down`, which many rows have, come to the memory of these parts when there are hidden
// values of all clusters, hence behind all attended values; parts of `gate_up` come to the memory of the values behind
// attended values too, which need those of all mixing warps.
#pragma once
#include "expert_products.cuh"

// Where 16 bytes of a row of values, or of one query, lie in shared memory, from where they begin.
__device__ __forceinline__ int value_offset(int row, int piece) { return row * kValueStride + piece * 16; }
__device__ __forceinline__ int query_offset(int row, int piece) { return row * kQueryStride + piece * 16; }

// In the place of a maximum of nothing: minus infinity minus that is minus infinity.
constexpr float kLowest = -3.0e38f;

// What attention keeps in shared memory behind the queries.
struct Scores {
  float* weights;  // [kQueriesHeld][kScoreStride], relative to the maximum of the tile
  float* maxima;   // [kQueriesHeld][kKeyTiles]
};

// -- queries, keys, values --------------------------------------------------------------------------------------------

// This lane's key in a tile of eight. Those behind the block's last repeat an existing one: their scores are not used.
__device__ __forceinline__ int key_of(const Consumer& c, const Work& work, int tile) {
  return min(work.start + tile * 8 + c.row, work.prefix + ROWS - 1);
}

// Begins to load the prefix's keys of a tile, for which nobody has to wait.
__device__ __forceinline__ void load_prefix_keys(const Consumer& c, const Position& at, const Work& work, int tile,
                                                 uint4 (&keys)[kKeyPieces]) {
  const int key = max(0, min(key_of(c, work, tile), work.prefix - 1));  // another one in the place of the chunk's own
  const bf16* from = c.plan.prefix_key + (static_cast<u64>(at.layer) * c.plan.capacity + key) * kHeadDim + c.quad * 8;
#pragma unroll
  for (int g = 0; g < kKeyPieces; ++g) keys[g] = load_shared_by_grid(from + g * 32);
}

// Puts the chunk's own keys of a tile in their place, as soon as they have been written.
__device__ __forceinline__ void load_own_keys(const Consumer& c, const Position& at, const Work& work, int tile,
                                              uint4 (&keys)[kKeyPieces]) {
  const int own = key_of(c, work, tile) - work.prefix;
  if (own < 0 || tile * 8 >= work.count) return;
  const bf16* from = c.rows(kKey, kHeadDim, c.layer_copy(at)) + own * kHeadDim + c.quad * 8;
  poll(keys, [](int) { return true; }, [&](int g) { return from + g * 32; });
}

// Loads what the phase before wrote: queries to `queries`, the chunk's values behind the prefix's.
__device__ __forceinline__ void load_attention(const Consumer& c, const Position& at, const Work& work,
                                               unsigned char* queries) {
  constexpr int kQueriesEach = ceil_div(kMostQueries, kWarps), kCount = kQueriesEach + kRowsEach;
  const int copy = c.layer_copy(at), first = max(0, work.prefix - work.start) + c.warp;  // of the chunk's values here
  const bf16 *query_rows = c.rows(kQuery, kInner, copy) + work.first * kHeadDim + c.lane * 8,
             *value_rows = c.rows(kValue, kHeadDim, copy) + (work.start - work.prefix) * kHeadDim + c.lane * 8;
  unsigned char* values = reinterpret_cast<unsigned char*>(c.shared.values);
  const bf16* from[kCount];
  bool has[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int query = c.warp + i * kWarps, row = first + (i - kQueriesEach) * kWarps;
    has[i] = i < kQueriesEach ? query < work.queries : row < work.count;
    from[i] = i < kQueriesEach ? query_rows + query * kHeadDim : value_rows + row * kHeadDim;
  }
  c.block_barrier();  // nobody reads the operands of the phase before
  for (int row = work.count + c.warp; row < KEYS; row += kWarps)  // they weigh nothing
    store16(values + value_offset(value_row(row), c.lane), make_uint4(0u, 0u, 0u, 0u));
  uint4 v[kCount];
  poll(v, [&](int i) { return has[i]; }, [&](int i) { return from[i]; });
#pragma unroll
  for (int i = 0; i < kQueriesEach; ++i) {
    const int query = c.warp + i * kWarps;
    if (query < work.queries) store16(queries + query_offset(query, c.lane), v[i]);
  }
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const int row = first + i * kWarps;
    if (row < work.count) store16(values + value_offset(value_row(row), c.lane), v[kQueriesEach + i]);
  }
}

// -- weights ----------------------------------------------------------------------------------------------------------

// The largest that the four lanes of a row have.
__device__ __forceinline__ float largest_of_quad(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

// The weights of eight queries and of a tile's keys, relative to the tile's maximum, from the four parts of the
// products that `s` holds at HALF. Products are never fused, here and below: every grid gives the same bits.
template <int HALF>
__device__ __forceinline__ void store_weights(const Consumer& c, const Work& work, const float (&s)[4][4],
                                              const Scores& scores, int query, int tile) {
  constexpr float kScale = 0.0625f * 1.4426950408889634f;  // 1 / sqrt(kHeadDim), and from e to 2
  float d[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int e = HALF * 2 + j;
    d[j] = __fmul_rn((s[0][e] + s[1][e]) + (s[2][e] + s[3][e]), kScale);
    if (tile * 8 + c.quad * 2 + j >= work.count) d[j] = negative_infinity();
  }
  const float maximum = largest_of_quad(fmaxf(d[0], d[1])), base = fmaxf(maximum, kLowest);
  *reinterpret_cast<float2*>(scores.weights + query * kScoreStride + tile * 8 + c.quad * 2) =
      make_float2(exp2_fast(d[0] - base), exp2_fast(d[1] - base));
  if (c.quad == 0) scores.maxima[query * kKeyTiles + tile] = maximum;
}

// Weights of this warp's keys: tiles of eight, every kWarps-th; `keys` are the prefix's of the first. A lane has 16
// bytes of every 64 of a key, and of queries likewise, which permutes the inputs of the sum.
__device__ __forceinline__ void score(const Consumer& c, const Position& at, const Work& work,
                                      uint4 (&keys)[kKeyPieces], const unsigned char* queries, const Scores& scores) {
#pragma unroll
  for (int i = 0; i < ceil_div(kKeyTiles, kWarps); ++i) {
    const int tile = c.warp + i * kWarps;
    if (tile >= kKeyTiles) break;
    if (i > 0) load_prefix_keys(c, at, work, tile, keys);
    load_own_keys(c, at, work, tile, keys);
    __syncwarp();
#pragma unroll
    for (int m = 0; m < kQueryTiles; ++m) {
      const unsigned char* a = queries + query_offset(m * 16 + c.row, c.quad);
      // Few queries are worth conditions: bandwidth is scarce.
      const bool has_low = m * 16 + c.row < kMostQueries, has_high = m * 16 + 8 + c.row < kMostQueries;
      float s[4][4] = {};
#pragma unroll
      for (int g = 0; g < kKeyPieces; ++g) {
        const uint4 none = make_uint4(0u, 0u, 0u, 0u), low = has_low ? load16(a + g * 64) : none,
                    high = has_high ? load16(a + query_offset(8, 0) + g * 64) : none;
        mma_16x8x16(s[2 * g % 4], low.x, high.x, low.y, high.y, keys[g].x, keys[g].y);
        mma_16x8x16(s[(2 * g + 1) % 4], low.z, high.z, low.w, high.w, keys[g].z, keys[g].w);
      }
      store_weights<0>(c, work, s, scores, m * 16 + c.row, tile);
      if (m * 16 + 8 < kMostQueries) store_weights<1>(c, work, s, scores, m * 16 + 8 + c.row, tile);
    }
  }
}

// The block's weights of one query, a lane of a quad those of every fourth tile; returns their maximum's logarithm.
__device__ __forceinline__ float weigh(const Consumer& c, const Scores& scores, int query,
                                       float (&weights)[kKeyGroups][8]) {
  const float* from = scores.weights + query * kScoreStride + c.quad * 8;
  const float* maxima = scores.maxima + query * kKeyTiles + c.quad;
  float of_tile[kKeyGroups], maximum = negative_infinity();
#pragma unroll
  for (int g = 0; g < kKeyGroups; ++g) {
    of_tile[g] = maxima[g * 4];
    maximum = fmaxf(maximum, of_tile[g]);
    const float4 low = load_float4(from + g * 32), high = load_float4(from + g * 32 + 4);
    weights[g][0] = low.x, weights[g][1] = low.y, weights[g][2] = low.z, weights[g][3] = low.w;
    weights[g][4] = high.x, weights[g][5] = high.y, weights[g][6] = high.z, weights[g][7] = high.w;
  }
  maximum = largest_of_quad(maximum);
  const float base = fmaxf(maximum, kLowest);
#pragma unroll
  for (int g = 0; g < kKeyGroups; ++g) {
    const float factor = exp2_fast(of_tile[g] - base);
#pragma unroll
    for (int j = 0; j < 8; ++j) weights[g][j] = __fmul_rn(weights[g][j], factor);
  }
  return maximum;
}

constexpr int kQueryEights = ceil_div(kMostQueries, 8);

// Maximum and sum of the weights of each query, to all blocks of the cluster; the last warps have eight queries each.
__device__ __forceinline__ void send_extremes(const Consumer& c, const Work& work, const Scores& scores,
                                              float* extremes, u32 barrier) {
#pragma unroll 1
  for (int first = (kWarps - 1 - c.warp) * 8; first < work.queries; first += kWarps * 8) {
    const int query = first + c.row;
    float weights[kKeyGroups][8], sum = 0.0f;
    const float maximum = weigh(c, scores, query, weights);
#pragma unroll
    for (int g = 0; g < kKeyGroups; ++g) {
      const float(&w)[8] = weights[g];
      sum += ((w[0] + w[1]) + (w[2] + w[3])) + ((w[4] + w[5]) + (w[6] + w[7]));
    }
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    const u32 to = shared_address(extremes + (c.rank * kMostQueries + query) * 2);
#pragma unroll
    for (int r = 0; r < kRanks; r += 4)
      if (query < work.queries) send(remote(to, r + c.quad), maximum, sum, remote(barrier, r + c.quad));
  }
}

// -- weighted values --------------------------------------------------------------------------------------------------

constexpr int kMixedDims = kWarps < 16 ? 32 : 16, kMixers = kHeadDim / kMixedDims;  // of a warp; warps that have some
constexpr int kWordsEach = kMixedDims / 8;  // of a query and lane: two dimensions each
static_assert(kDims % kMixedDims == 0 && kMixedDims % 16 == 0, "a warp has dimensions of one owner");

constexpr int kDimTiles = kMixedDims / 16, kKeySteps = KEYS / 16;  // of sixteen dimensions, of sixteen keys
// Of so many steps a warp loads values in front of the barrier behind which there are weights, for which it has
// registers where some warps do not mix.
constexpr int kEarlySteps = kMixers < kWarps ? min_of(3, kKeySteps) : 0;
using EarlyValues = uint4[kDimTiles][max_of(kEarlySteps, 1)];

// Values of sixteen keys and sixteen of this warp's dimensions.
__device__ __forceinline__ uint4 load_values(const Consumer& c, int step, int tile) {
  return load_matrices_transposed(shared_address(c.shared.values) +
                                  value_offset(c.lane % 16, c.warp * (kMixedDims / 8) + c.lane / 16) +
                                  value_offset(step * 16, 2 * tile));
}

// The prefix's values are in shared memory; the chunk's are behind the barrier in front of the scores.
__device__ __forceinline__ void await_values(const Consumer& c, const Position& at) {
  mbarrier_wait(shared_address(&c.shared.values_full), kResident ? c.layers(at) & 1 : 0);
}

__device__ __forceinline__ void load_early(const Consumer& c, const Position& at, EarlyValues& early) {
#pragma unroll
  for (int m = 0; m < kDimTiles; ++m)
#pragma unroll
    for (int s = 0; s < kEarlySteps; ++s) early[m][s] = make_uint4(0u, 0u, 0u, 0u);
  if (kEarlySteps == 0 || c.warp >= kMixers) return;
  await_values(c, at);
#pragma unroll
  for (int s = 0; s < kEarlySteps; ++s)
#pragma unroll
    for (int m = 0; m < kDimTiles; ++m) early[m][s] = load_values(c, s, m);
}

__device__ __forceinline__ void send_words(u32 to, const u32 (&w)[kWordsEach], u32 barrier) {
  if constexpr (kWordsEach == 4) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(barrier)
                 : "memory");
  } else {
    send(to, __uint_as_float(w[0]), __uint_as_float(w[1]), barrier);
  }
}

// Weighted values of this warp's dimensions, sent to the block that joins them. Dimensions are the rows of the product,
// and eight queries its columns. Parts are words[rank][query][kDims / 2] of two dimensions, in the order of first_dim.
__device__ __forceinline__ void mix_values(const Consumer& c, const Position& at, const Work& work,
                                           const Scores& scores, const EarlyValues& early, float* parts, u32 barrier) {
  constexpr int kTogether = kWarps < 16 ? min_of(2, kQueryEights) : 1, kChains = 2;
  const int first = c.warp * kMixedDims, owner = first / kDims;
  if (first >= kHeadDim) return;
  const u32 counted = remote(barrier, owner), to = remote(shared_address(parts), owner);
#pragma unroll (kQueryEights <= 2 ? 2 : 1)
  for (int e = 0; e < kQueryEights; e += kTogether) {
    u32 b[kTogether][kKeySteps][2];
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      float w[kKeyGroups][8];
      weigh(c, scores, min((e + t) * 8, kQueriesHeld - 8) + c.row, w);
#pragma unroll
      for (int s = 0; s < kKeySteps; ++s)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          b[t][s][i] = pack_bf16(w[s / 2][s % 2 * 4 + 2 * i], w[s / 2][s % 2 * 4 + 2 * i + 1]);
    }
    if (kEarlySteps == 0 && e == 0) await_values(c, at);
    float o[kTogether][kDimTiles][kChains][4] = {};
#pragma unroll
    for (int s = 0; s < kKeySteps; ++s)
#pragma unroll
      for (int m = 0; m < kDimTiles; ++m) {
        const uint4 a = s < kEarlySteps ? early[m][min_of(s, kEarlySteps - 1)] : load_values(c, s, m);
#pragma unroll
        for (int t = 0; t < kTogether; ++t)
          mma_16x8x16(o[t][m][s % kChains], a.x, a.z, a.y, a.w, b[t][s][0], b[t][s][1]);
      }
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      if (e + t >= kQueryEights) break;
      u32 words[kWordsEach];
#pragma unroll
      for (int g = 0; g < kWordsEach; ++g) {
        const float(&x)[kChains][4] = o[t][g / 2];
        const int low = g % 2 * 2, high = low + 1;
        words[g] = transposed_matrix(pack_bf16(x[0][low] + x[1][low], x[0][high] + x[1][high]));
      }
      const int query = (e + t) * 8 + c.row, word = first % kDims / 2 + c.quad * kWordsEach;
      if (query < work.queries)
        send_words(to + ((c.rank * kMostQueries + query) * kDims / 2 + word) * 4, words, counted);
    }
  }
}

// -- joined values ----------------------------------------------------------------------------------------------------

// The first of the two dimensions of a word.
__device__ __forceinline__ int first_dim(int word) {
  constexpr int kWords = kMixedDims / 2;
  return word / kWords * kMixedDims + word % kWordsEach * 8 + word % kWords / kWordsEach * 2;
}

// attended = the eight blocks' parts of each query, joined; this block has kDims of the dimensions. Warps that mix
// nothing begin.
__device__ __forceinline__ void join(const Consumer& c, const Position& at, const Work& work, const Place& of_extremes,
                                     const Place& of_parts) {
  const int copy = c.layer_copy(at), thread = (c.thread + kConsumers - kMixers * kWarpSize) % kConsumers;
  for (int i = thread; i < work.queries * (kDims / 2); i += kConsumers) {
    const int query = i / (kDims / 2), word = i % (kDims / 2);
    mbarrier_wait(c.parts_barrier(of_extremes), of_extremes.parity);
    float2 e[kRanks];
    float maximum = negative_infinity(), total = 0.0f;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      e[r] = *reinterpret_cast<const float2*>(of_extremes.parts + (r * kMostQueries + query) * 2);
      maximum = fmaxf(maximum, e[r].x);
    }
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      e[r].x = exp2_fast(e[r].x - maximum);
      total = fmaf(e[r].x, e[r].y, total);
    }
    const float inverse = __fdividef(1.0f, total);
    const int offset = (work.first + query) * kHeadDim + c.rank * kDims + first_dim(word);
    bf16 *to = c.rows(kAttended, kInner, copy) + offset, *other = c.rows(kAttended, kInner, copy ^ 1) + offset;
    mbarrier_wait(c.parts_barrier(of_parts), of_parts.parity);
    const u32* parts = reinterpret_cast<const u32*>(of_parts.parts) + query * (kDims / 2) + word;
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      const u32 part = parts[r * kMostQueries * (kDims / 2)];
      sum.x = fmaf(e[r].x, low_float(part), sum.x);
      sum.y = fmaf(e[r].x, high_float(part), sum.y);
    }
    exchange(to, other, pack_bf16(lifted<Output>(sum.x * inverse), lifted<Output>(sum.y * inverse)));
  }
}

__device__ __forceinline__ void attend(Consumer& c, const Position& at) {
  const Work work = c.work();
  unsigned char* queries = c.shared.operands;
  float* behind = reinterpret_cast<float*>(queries + kQueriesHeld * kQueryStride);
  const Scores scores{behind, behind + kQueriesHeld * kScoreStride};
  const Place place = c.place(at), of_parts{place.parts + kExtremeFloats, place.barrier, place.parity},
              of_extremes{place.parts, kExtremes, kResident ? c.layers(at) & 1u : 0u};  // one turn a layer
  c.expect(of_parts, work.queries * kRanks * kDims * 2);
  c.expect(of_extremes, work.queries * kRanks * 8);
  c.begin();
  uint4 keys[kKeyPieces];
  load_attention(c, at, work, queries);
  load_prefix_keys(c, at, work, c.warp, keys);
  c.block_barrier();
  score(c, at, work, keys, queries, scores);
  EarlyValues early;
  load_early(c, at, early);
  c.block_barrier();
  const auto mix = [&] { mix_values(c, at, work, scores, early, of_parts.parts, c.parts_barrier(of_parts)); };
  if (kMixers == kWarps) mix();
  send_extremes(c, work, scores, of_extremes.parts, c.parts_barrier(of_extremes));
  if (kMixers < kWarps) mix();
  join(c, at, work, of_extremes, of_parts);
}
