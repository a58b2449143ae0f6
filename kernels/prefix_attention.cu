// Attention of the prefix on Hopper's warpgroup instructions (sm_90a): eight query heads of 256 share one key head.
//   out = softmax(query @ key[:valid]^T / 16) @ value[:valid]
//
// As all heads read the same keys, 8 rows times 8 heads are the 64 rows of one product. Two blocks, a cluster, own 16
// rows of the prefix: each has two consumers with 64 rows of a product each, which read the same tiles of keys and
// values, so that a tile is fetched once for 128 rows; and each takes about half of the tiles. Where a block's tiles
// end, its first consumer, the giver, sends what it has to the other block, whose second consumer, the keeper, has the
// same rows: it joins both parts and stores the result. Unless there are two tiles in all, a
// giver has one or two less than a keeper, so that what it sends travels while the keeper still works.
//
// A consumer lets the tensor cores multiply the next tile's keys and this tile's values while it computes exponentials.
// One thread of a third warpgroup streams keys and values, each through buffers of their own.
//
// TILE_ROWS: keys of a tile. KEY_BUFFERS, VALUE_BUFFERS: tiles that are under way at once. OUT8: E4M3 codes of the
// bfloat16 that would have been stored. FP8: queries, keys and values are E4M3 codes instead of bfloat16, and so are the
// weights of values; what is given is bfloat16 then instead of float. Both operands of such a product must have their
// inner dimension along the rows, so that values come as rows of dimensions; and keys come in an order in which a
// thread's scores are neighbours where it has to give them, as codes, to the second product (see key_of, and
// flashrt_ros/ops/cuda/head_codes.py).
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "prefix_attention.cu is written for sm_90a: no other architecture has its matrix instructions"
#endif
#ifndef TILE_ROWS
#define TILE_ROWS 80
#endif
#include "tma.cuh"
#include "wgmma.cuh"
#include "quantise.cuh"

#ifndef KEY_BUFFERS
#define KEY_BUFFERS 2
#endif
#ifndef VALUE_BUFFERS
#define VALUE_BUFFERS 2
#endif
#ifndef OUT8
#define OUT8 0
#endif

constexpr int kGroupThreads = 128, kConsumers = 2, kThreads = kGroupThreads * (1 + kConsumers);
constexpr int kGroupWarps = kGroupThreads / kWarpSize, kGiver = 0, kKeeper = 1;
constexpr int kHeads = 8, kHeadDim = 256, kRowValues = kHeads * kHeadDim, kBlockRows = 8;  // rows of a consumer
constexpr int kTileKeys = TILE_ROWS, kStepKeys = FP8 ? 32 : 16, kSteps = kTileKeys / kStepKeys;  // of an instruction
constexpr int kLineBytes = 128, kColumns = FP8 ? kLineBytes : kLineBytes / 2;  // the width of the swizzle
constexpr int kColumnBlocks = kHeadDim / kColumns;
constexpr int kAtomBytes = 8 * kLineBytes;  // eight rows: one atom of the swizzle
constexpr int kPieceBytes = kTileKeys * kLineBytes, kTileBytes = kColumnBlocks * kPieceBytes;
constexpr int kQueryPieceBytes = kHeads * kBlockRows * kLineBytes, kQueryBytes = kColumnBlocks * kQueryPieceBytes;
constexpr int kKeyBuffers = KEY_BUFFERS, kValueBuffers = VALUE_BUFFERS;
constexpr int kWeightWords = 4 * kSteps;  // of a thread, for a tile
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr float kScoreScale = 1.4426950408889634f / 16.0f;  // log2(e) / sqrt(256)
constexpr float kWeightBits = 8.0f;                         // codes of weights are those of a weight times 256
static_assert(kTileKeys % kStepKeys == 0 && kPieceBytes % kAtomBytes == 0, "a tile is whole steps and atoms");
static_assert(kKeyBuffers >= 2 && kValueBuffers >= 2, "the next tile is fetched while this one is read");

// With FP8: values of so many keys are a piece, a row of each dimension, swizzled over 64 bytes.
constexpr int kValueKeys = 64, kValuePieces = kTileKeys / kValueKeys, kValuePieceBytes = kHeadDim * kValueKeys;
static_assert(!FP8 || kValuePieces * kValuePieceBytes == kTileBytes, "a tile is whole pieces of values");

// Shared memory: queries of both consumers, buffers of keys, of values, maximum and sum of each row that are given,
// barriers. What is given to this block lies in the place of its giver's queries and, as that does not suffice, of the
// keys that its keeper has read before the last ones; what is to be stored lies where queries end.
constexpr int kKeysAt = kConsumers * kQueryBytes;
constexpr int kValuesAt = kKeysAt + kKeyBuffers * kTileBytes;
constexpr int kStatisticsAt = kValuesAt + kValueBuffers * kTileBytes;
constexpr int kStatisticsBytes = kHeads * kBlockRows * 8;
constexpr int kBarriersAt = kStatisticsAt + kStatisticsBytes;
constexpr int kGivenChunk = FP8 ? 8 : 4;                         // sums in the 16 bytes that a thread sends at once
constexpr int kChunkBytes = kGroupThreads * 16;                  // of all threads
constexpr int kQueryChunks = kQueryBytes / kChunkBytes;          // that the place of the queries holds
constexpr int kTileChunks = kTileBytes / kChunkBytes;            // that a buffer of keys holds
constexpr int kGivenChunks = kHeadDim / 2 / kGivenChunk;
constexpr int kGivenBytes = kGivenChunks * kChunkBytes + kStatisticsBytes;
constexpr int kStagedBytes = 16 * kHeadDim * 2;                  // of a warp
constexpr int kResultAt = kKeysAt - kGroupWarps * kStagedBytes;  // with FP8 in the place of what was given, too
static_assert(kGivenChunks - kQueryChunks <= (kKeyBuffers - 1) * kTileChunks, "what is given fits");
static_assert(kResultAt >= 0, "what is staged fits the queries");

constexpr int kKeyFull = 0, kValueFull = kKeyFull + kKeyBuffers * kColumnBlocks;
constexpr int kKeyEmpty = kValueFull + kValueBuffers, kValueEmpty = kKeyEmpty + kKeyBuffers * kConsumers;
constexpr int kQueryFull = kValueEmpty + kValueBuffers * kConsumers;
constexpr int kReady = kQueryFull + kConsumers * kColumnBlocks, kGiven = kReady + 1;

__device__ __forceinline__ u32 barrier_at(u32 shared, int index) { return shared + kBarriersAt + index * 8; }
__device__ __forceinline__ u32 key_full(u32 shared, int buffer, int piece) {
  return barrier_at(shared, kKeyFull + buffer * kColumnBlocks + piece);
}
__device__ __forceinline__ u32 value_full(u32 shared, int buffer) { return barrier_at(shared, kValueFull + buffer); }
__device__ __forceinline__ u32 key_empty(u32 shared, int buffer, int consumer) {
  return barrier_at(shared, kKeyEmpty + buffer * kConsumers + consumer);
}
__device__ __forceinline__ u32 value_empty(u32 shared, int buffer, int consumer) {
  return barrier_at(shared, kValueEmpty + buffer * kConsumers + consumer);
}
__device__ __forceinline__ u32 query_full(u32 shared, int consumer, int piece) {
  return barrier_at(shared, kQueryFull + consumer * kColumnBlocks + piece);
}
__device__ __forceinline__ u32 keys_of(u32 shared, int buffer) { return shared + kKeysAt + buffer * kTileBytes; }
__device__ __forceinline__ u32 values_of(u32 shared, int buffer) { return shared + kValuesAt + buffer * kTileBytes; }

// Which of BUFFERS tile number `turn` of a block lies in.
template <int BUFFERS>
struct Place {
  int buffer;
  u32 parity;

  __device__ __forceinline__ explicit Place(int turn) : buffer(turn % BUFFERS), parity(turn / BUFFERS & 1) {}
};

// The tiles that the blocks of a cluster share. Both givers take `given` of them by turns, each its own; the keeper of
// the same block takes these and all those that are left over. There are always two, the second perhaps without any
// valid key, so that a block knows its first tile before it knows `valid`. Only the last tile that
// somebody takes may have less than kTileKeys valid keys, or none.
struct Tiles {
  int valid, given, kept, rank;

  __device__ __forceinline__ Tiles(int valid, int rank) : valid(valid), rank(rank) {
    const int count = max(2, (valid + kTileKeys - 1) / kTileKeys);
    given = max(1, (count - 1) / 2);
    kept = count - given;
  }

  __device__ __forceinline__ int of(int consumer) const { return consumer == kGiver ? given : kept; }
  __device__ __forceinline__ int tile(int turn) const { return turn < given ? 2 * turn + rank : given + turn; }
  __device__ __forceinline__ int live(int turn) const {
    return min(kTileKeys, max(0, valid - tile(turn) * kTileKeys));
  }
};

// -- producer ---------------------------------------------------------------------------------------------------------

// Rows of eight heads: box of 64 columns, 8 rows and all heads, a head's rows together; rows that are not there become
// zero.
__device__ __forceinline__ void load_heads(u32 shared, const TensorMap& map, int column, int row, u32 barrier,
                                           u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %6}], [%4], %5;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy), "r"(0)
      : "memory");
}

// What one thread streams. A buffer is empty when every consumer that had a use for it has read it.
struct Feed {
  u32 shared;
  const TensorMap &query, &key, &value;
  u64 policy;

  __device__ __forceinline__ void queries(int consumer, int piece, int row) const {
    const u32 full = query_full(shared, consumer, piece);
    barrier_expect(full, kQueryPieceBytes);
    load_heads(shared + consumer * kQueryBytes + piece * kQueryPieceBytes, query, piece * kColumns, row, full, policy);
  }

  __device__ __forceinline__ void keys(int buffer, int piece, int tile) const {
    const u32 full = key_full(shared, buffer, piece);
    barrier_expect(full, kPieceBytes);
    load_box(keys_of(shared, buffer) + piece * kPieceBytes, key, piece * kColumns, tile * kTileKeys, full, policy);
  }

  __device__ __forceinline__ void values(int buffer, int tile) const {
    const u32 full = value_full(shared, buffer);
    barrier_expect(full, kTileBytes);
    const u32 at = values_of(shared, buffer);
#if FP8
    for (int piece = 0; piece < kValuePieces; ++piece)
      load_box(at + piece * kValuePieceBytes, value, 0, (tile * kValuePieces + piece) * kHeadDim, full, policy);
#else
    for (int block = 0; block < kColumnBlocks; ++block)
      load_box(at + block * kPieceBytes, value, block * kColumns, tile * kTileKeys, full, policy);
#endif
  }
};

// One thread, before anything is known of `valid`: the giver's queries and the first keys, then the keeper's queries.
__device__ __forceinline__ void begin(const Feed& feed, int rank) {
  const int row = blockIdx.x / 2 * (2 * kBlockRows);
  for (int piece = 0; piece < kColumnBlocks; ++piece) {
    feed.queries(kGiver, piece, row + (1 - rank) * kBlockRows);
    feed.keys(0, piece, rank);
  }
  for (int piece = 0; piece < kColumnBlocks; ++piece) feed.queries(kKeeper, piece, row + rank * kBlockRows);
}

// The same thread: all the rest, in the order in which it is used.
__device__ __forceinline__ void produce(const Feed& feed, const Tiles& tiles) {
  for (int turn = 0; turn < tiles.kept; ++turn) {
    const int next = turn + 1;
    if (next < tiles.kept) {
      const Place<kKeyBuffers> place(next);
      if (next >= kKeyBuffers) {
        if (next - kKeyBuffers < tiles.given)
          barrier_wait(key_empty(feed.shared, place.buffer, kGiver), place.parity ^ 1);
        barrier_wait(key_empty(feed.shared, place.buffer, kKeeper), place.parity ^ 1);
      }
      for (int piece = 0; piece < kColumnBlocks; ++piece) feed.keys(place.buffer, piece, tiles.tile(next));
    }
    const Place<kValueBuffers> place(turn);
    if (turn >= kValueBuffers) {
      if (turn - kValueBuffers < tiles.given)
        barrier_wait(value_empty(feed.shared, place.buffer, kGiver), place.parity ^ 1);
      barrier_wait(value_empty(feed.shared, place.buffer, kKeeper), place.parity ^ 1);
    }
    feed.values(place.buffer, tiles.tile(turn));
  }
}

// -- consumer ---------------------------------------------------------------------------------------------------------

// The threads of one consumer (barriers 1 and 2 of the block).
__device__ __forceinline__ void consumer_barrier(int consumer) {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(1 + consumer), "n"(kGroupThreads) : "memory");
}

// Every thread of the cluster arrives once and waits once.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Arrives at the barrier at the same place of another block, and says that something has been read. It publishes
// nothing that was written: for that it would have to wait. Relaxed is enough behind the wait for products only: what
// was read, products have read. An ordinary load could still be under way.
__device__ __forceinline__ void tell(u32 barrier, u32 block) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(block)
      : "memory");
}

// One warp has read what the barrier guards.
__device__ __forceinline__ void release(u32 barrier) {
  if (threadIdx.x % kWarpSize == 0) barrier_arrive(barrier);
}

// Starts s = queries times the keys of one tile. FIRST: the queries may not be there yet.
template <bool FIRST>
__device__ __forceinline__ void multiply_keys(float (&s)[kTileKeys / 2], u32 shared, int turn, int consumer) {
  const Place<kKeyBuffers> place(turn);
  const u32 queries = tile_start(shared + consumer * kQueryBytes), keys = tile_start(keys_of(shared, place.buffer));
#pragma unroll
  for (int piece = 0; piece < kColumnBlocks; ++piece) {
    if (FIRST) barrier_wait(query_full(shared, consumer, piece), 0);
    barrier_wait(key_full(shared, place.buffer, piece), place.parity);
    products_begin();
#pragma unroll
    for (u32 bytes = 0; bytes < kLineBytes; bytes += 32)
      multiply(s, further(queries, piece * kQueryPieceBytes + bytes), further(keys, piece * kPieceBytes + bytes),
               piece > 0 || bytes > 0);
  }
  products_commit();
}

// What is computed from scores stays on its side of this line: products may be under way on one side only.
__device__ __forceinline__ void settle(float (&d)[kTileKeys / 2]) {
  u32 unused = 0;
  asm volatile("" : "+r"(unused), WG_OF(WG_SUMS_, TILE_ROWS)::"memory");
}

// The same for weights that are packed while the last ones are still read.
__device__ __forceinline__ void settle(u32 (&words)[kWeightWords]) {
#pragma unroll
  for (int i = 0; i < kWeightWords; ++i) asm volatile("" : "+r"(words[i])::"memory");
}

// Behind the wait for the products that read `weights`. Were the words moved where the compiler likes, it would have one
// product wait for another.
__device__ __forceinline__ void take_over(u32 (&weights)[kWeightWords], const u32 (&next)[kWeightWords]) {
#pragma unroll
  for (int i = 0; i < kWeightWords; ++i) asm volatile("mov.b32 %0, %1;" : "=r"(weights[i]) : "r"(next[i]) : "memory");
}

// Waits for the scores, but not for PENDING products that were started behind them.
template <int PENDING>
__device__ __forceinline__ void finish_keys(float (&s)[kTileKeys / 2]) {
  products_wait<PENDING>();
  settle(s);
}

// Starts o += weights times the values of one step.
__device__ __forceinline__ void multiply_step(float (&o)[kHeadDim / 2], const u32* weights, u32 at, int step) {
#if FP8
  const u32 bytes = step * kStepKeys / kValueKeys * kValuePieceBytes + step * kStepKeys % kValueKeys;
  multiply_wide<kHalfTileHigh>(o, weights[0], weights[1], weights[2], weights[3], tile_start(at + bytes));
#else
  multiply_wide(o, weights[0], weights[1], weights[2], weights[3],
                wide_start(at + step * kStepKeys * kLineBytes, kPieceBytes));
#endif
}

// Starts o += weights times the values of one tile, of which `steps` have valid keys.
template <bool WHOLE>
__device__ __forceinline__ void multiply_values(float (&o)[kHeadDim / 2], const u32 (&weights)[kWeightWords], u32 at,
                                                int steps) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (WHOLE || step < steps) {
      if (!WHOLE || step == 0) products_begin();
      multiply_step(o, weights + step * 4, at, step);
    }
  }
  products_commit();
}

#if FP8
// The first `count` bytes of a word; all if there are more, none if it is negative.
__device__ __forceinline__ u32 first_bytes(int count) {
  return count >= 4 ? 0xffffffffu : (1u << 8 * max(count, 0)) - 1;
}

// Values of keys behind the last valid one may be anything, even NaN, which a weight of zero would not remove: in the
// step that has both, they become zero. Both consumers of a block write the same words.
__device__ __forceinline__ void clear_keys(u32 values, int live, int consumer) {
  constexpr int kChunkKeys = 16;
  const int step = live / kStepKeys * kStepKeys;
  const u32 piece = values + step / kValueKeys * kValuePieceBytes;
#pragma unroll
  for (int i = 0; i < kStepKeys / kChunkKeys; ++i) {
    const int left = live - step - i * kChunkKeys, chunk = step % kValueKeys / kChunkKeys + i;
    const u32 masks[4] = {first_bytes(left), first_bytes(left - 4), first_bytes(left - 8), first_bytes(left - 12)};
    for (int row = threadIdx.x % kGroupThreads; row < kHeadDim; row += kGroupThreads) {
      const u32 at = piece + row * kValueKeys + ((chunk ^ row / 2 % 4) << 4);
      const uint4 v = load_shared16(at);
      asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x & masks[0]), "r"(v.y & masks[1]),
                   "r"(v.z & masks[2]), "r"(v.w & masks[3])
                   : "memory");
    }
  }
  publish_to_engine();
  consumer_barrier(consumer);
}
#else
// Rows of values behind the last valid one may hold anything, even NaN, which a weight of zero would not remove. Both
// consumers of a block write the same zeros.
__device__ __forceinline__ void clear_keys(u32 values, int live, int consumer) {
  constexpr int kChunks = kLineBytes / 16;
  const int rows = (live + kStepKeys - 1) / kStepKeys * kStepKeys - live;
  for (int i = threadIdx.x % kGroupThreads; i < kColumnBlocks * rows * kChunks; i += kGroupThreads) {
    const int block = i / (rows * kChunks), chunk = i % (rows * kChunks);
    asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(values + block * kPieceBytes +
                                                               live * kLineBytes + chunk * 16),
                 "r"(0)
                 : "memory");
  }
  publish_to_engine();
  consumer_barrier(consumer);
}
#endif

// What a consumer knows of this thread's two rows: lane / 4 of its warp's 16 and 8 further. `top` is what is subtracted
// from scores, their maximum over the tiles so far. `sum` is that of the weights under it, over this thread's keys only.
struct Statistics {
  float top[2], sum[2];
};

// A top to subtract: that of a row without any finite score would make NaN.
__device__ __forceinline__ float reference_of(float top) { return top == negative_infinity() ? 0.0f : top; }

// How scores become weights and sums become results. A top, and a reference, is a score; with FP8 it is a score's
// exponent of two, which its codes' scales go into.
struct Scale {
  float score, value;  // of the exponent; of the result

  // code_scales: of queries, of keys, of values.
  __device__ __forceinline__ static Scale of(const float (&code_scales)[3]) {
    if (!FP8) return {kScoreScale, 1.0f};
    return {code_scales[0] * code_scales[1] * kScoreScale, code_scales[2]};
  }

  __device__ __forceinline__ float top(float greatest) const { return FP8 ? greatest * score : greatest; }

  // In bfloat16 the difference is scaled, not each score: so the weight of a great score is as exact as that of a small
  // one. Codes are too coarse to tell, and it takes one instruction more.
  __device__ __forceinline__ float weight(float from, float reference) const {
    return exp2_fast(FP8 ? fmaf(from, score, kWeightBits - reference) : (from - reference) * score);
  }

  // What sums under `top` are multiplied by to stand under `reference`.
  __device__ __forceinline__ float shrink(float top, float reference) const {
    return exp2_fast(FP8 ? top - reference : (top - reference) * score);
  }
};

// The key, of a tile, that this thread's score number i belongs to. With FP8, of 16 keys, four that follow each other
// are a thread's two scores of one matrix and its two of the next.
__device__ __forceinline__ int key_of(int i) {
  const int pair = threadIdx.x % 4;
  return FP8 ? 16 * (i / 8) + 4 * pair + 2 * (i / 4 % 2) + i % 2 : 8 * (i / 4) + 2 * pair + i % 2;
}

// Scores of one tile → weights under the top, which may rise: then `o` has to shrink, by a factor for each row, and
// the result is true for the whole warp. Keys from `live` on have no weight.
__device__ __forceinline__ bool weigh(float (&s)[kTileKeys / 2], Statistics& row, float (&shrink)[2], int live,
                                      const Scale& scale) {
  if (live < kTileKeys) {
#pragma unroll
    for (int i = 0; i < kTileKeys / 2; ++i)
      if (key_of(i) >= live) s[i] = negative_infinity();
  }
  float top[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float greatest = negative_infinity();
#pragma unroll
    for (int i = 2 * half; i < kTileKeys / 2; i += 4) greatest = fmaxf(greatest, fmaxf(s[i], s[i + 1]));
    top[half] = scale.top(warp_max<4>(greatest));
    shrink[half] = 1.0f;
  }
  const bool rises = __any_sync(kAllLanes, top[0] > row.top[0] || top[1] > row.top[1]);
  if (rises) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = fmaxf(row.top[half], top[half]);
      shrink[half] = scale.shrink(row.top[half], reference_of(top[half]));
      row.top[half] = top[half];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float reference = reference_of(row.top[half]);
    float sum = 0.0f;
#pragma unroll
    for (int i = 2 * half; i < kTileKeys / 2; i += 4) {
      s[i] = scale.weight(s[i], reference);
      s[i + 1] = scale.weight(s[i + 1], reference);
      sum += s[i] + s[i + 1];
    }
    row.sum[half] = fmaf(row.sum[half], shrink[half], sum);
  }
  return rises;
}

// Weights as the second product takes them.
__device__ __forceinline__ void pack(u32 (&weights)[kWeightWords], const float (&s)[kTileKeys / 2]) {
#pragma unroll
  for (int i = 0; i < kWeightWords; ++i) {
#if FP8
    const float* v = s + i / 2 * 8 + i % 2 * 2;  // of 16 keys, in the first row (i even) or the second
    weights[i] = e4m3_pair(v[0], v[1]) | e4m3_pair(v[4], v[5]) << 16;
#else
    weights[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
#endif
  }
}

__device__ __forceinline__ void scale_rows(float (&o)[kHeadDim / 2], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) o[i] *= factor[i / 2 % 2];
}

// All tiles of one consumer. The other block is told when this one has no more use for the memory that is given into:
// when its giver has read its queries and its last keys, and its keeper all keys but the last.
__device__ __forceinline__ void attend(float (&o)[kHeadDim / 2], Statistics& row, u32 shared, const Tiles& tiles,
                                       const Scale& scale, int consumer) {
  const int turns = tiles.of(consumer), last_use = consumer == kGiver ? turns - 1 : max(0, turns - 2);
  const int other = 1 - tiles.rank;
  const bool leader = threadIdx.x % kWarpSize == 0;
  u32 weights[kWeightWords], next_weights[kWeightWords];
  float s[kTileKeys / 2], shrink[2];
  multiply_keys<true>(s, shared, 0, consumer);
  finish_keys<0>(s);
  release(key_empty(shared, 0, consumer));
  cluster_wait();  // the other block has begun: its barriers are there
  if (last_use == 0 && leader) tell(barrier_at(shared, kReady), other);
  weigh(s, row, shrink, tiles.live(0), scale);
  pack(weights, s);
#pragma unroll 1
  for (int turn = 1; turn < turns; ++turn) {
    const Place<kValueBuffers> place(turn - 1);
    multiply_keys<false>(s, shared, turn, consumer);
    barrier_wait(value_full(shared, place.buffer), place.parity);
    multiply_values<true>(o, weights, values_of(shared, place.buffer), kSteps);
    finish_keys<1>(s);
    release(key_empty(shared, turn % kKeyBuffers, consumer));
    if (turn == last_use && leader) tell(barrier_at(shared, kReady), other);
    const bool rises = weigh(s, row, shrink, tiles.live(turn), scale);
    if (FP8) {  // leaves registers for it
      pack(next_weights, s);
      settle(next_weights);
    } else {
      settle(s);
    }
    // The assembler would move the wait for products in front of the exponentials, were there no other wait between.
    const Place<kKeyBuffers> next(turn + 1);
    if (turn + 1 < turns) barrier_wait(key_full(shared, next.buffer, 0), next.parity);
    wide_finish(o, weights);
    release(value_empty(shared, place.buffer, consumer));
    if (rises) scale_rows(o, shrink);
    if (FP8) take_over(weights, next_weights);
    else pack(weights, s);
  }
  const Place<kValueBuffers> place(turns - 1);
  const int live = tiles.live(turns - 1);
  const u32 values = values_of(shared, place.buffer);
  barrier_wait(value_full(shared, place.buffer), place.parity);
  if (live % kStepKeys != 0) clear_keys(values, live, consumer);
  multiply_values<false>(o, weights, values, (live + kStepKeys - 1) / kStepKeys);
  wide_finish(o, weights);
  release(value_empty(shared, place.buffer, consumer));
}

// -- what is given ----------------------------------------------------------------------------------------------------

// The same place in the shared memory of another block of the cluster.
__device__ __forceinline__ u32 place_in(u32 shared, int block) {
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(block));
  return remote;
}

// 16 bytes, or 8, into the shared memory of another block, counted by a barrier of it.
__device__ __forceinline__ void send(u32 to, u32 v0, u32 v1, u32 v2, u32 v3, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to),
               "r"(v0), "r"(v1), "r"(v2), "r"(v3), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void send(u32 to, float first, float second, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1,%2}, [%3];" ::"r"(to),
               "r"(__float_as_uint(first)), "r"(__float_as_uint(second)), "r"(barrier)
               : "memory");
}

// Where this thread's 16 bytes number `chunk` lie in the block that gets them: in the place of the giver's queries, or
// of keys that nobody reads any more.
__device__ __forceinline__ u32 given_at(u32 shared, int chunk, int kept) {
  const u32 mine = threadIdx.x % kGroupThreads * 16;
  if (chunk < kQueryChunks) return shared + kGiver * kQueryBytes + chunk * kChunkBytes + mine;
  const int behind = chunk - kQueryChunks;  // the keeper's last keys lie in the buffer in front of kept % kKeyBuffers
  return keys_of(shared, (kept + behind / kTileChunks) % kKeyBuffers) + behind % kTileChunks * kChunkBytes + mine;
}

// Row of the consumer's 64 that is this thread's first (0) or second (1).
__device__ __forceinline__ int row_of(int half) {
  return threadIdx.x % kGroupThreads / kWarpSize * 16 + 8 * half + threadIdx.x % kWarpSize / 4;
}

// The giver's end: sums, top and sum of the weights, as they are, to the same threads of the other block's keeper.
__device__ __forceinline__ void give(const float (&o)[kHeadDim / 2], const Statistics& row, u32 shared,
                                     const Tiles& tiles) {
  const int block = 1 - tiles.rank;
  const u32 there = place_in(shared, block), barrier = barrier_at(there, kGiven);
  float sum[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) sum[half] = warp_sum<4>(row.sum[half]);
  barrier_wait(barrier_at(shared, kReady), 0);
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (threadIdx.x % 4 == 0) send(there + kStatisticsAt + row_of(half) * 8, row.top[half], sum[half], barrier);
#pragma unroll
  for (int chunk = 0; chunk < kGivenChunks; ++chunk) {
    const float* v = o + chunk * kGivenChunk;
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = FP8 ? pack_bf16(v[2 * i], v[2 * i + 1]) : __float_as_uint(v[i]);
    send(given_at(there, chunk, tiles.kept), words[0], words[1], words[2], words[3], barrier);
  }
}

// The keeper's end: what it has and what it gets become the result.
__device__ __forceinline__ void join(float (&o)[kHeadDim / 2], const Statistics& row, u32 shared, const Tiles& tiles,
                                     const Scale& scale) {
  float mine[2], theirs[2], sum[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) sum[half] = warp_sum<4>(row.sum[half]);
  barrier_wait(barrier_at(shared, kGiven), 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top, given;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                 : "=f"(top), "=f"(given)
                 : "r"(shared + kStatisticsAt + row_of(half) * 8)
                 : "memory");
    const float reference = reference_of(fmaxf(row.top[half], top));
    mine[half] = scale.shrink(row.top[half], reference);
    theirs[half] = scale.shrink(top, reference);
    const float inverse = scale.value / fmaf(sum[half], mine[half], given * theirs[half]);
    mine[half] *= inverse;
    theirs[half] *= inverse;
  }
#pragma unroll
  for (int chunk = 0; chunk < kGivenChunks; ++chunk) {
    const uint4 found = load_shared16(given_at(shared, chunk, tiles.kept));
    const u32 words[4] = {found.x, found.y, found.z, found.w};
    float* v = o + chunk * kGivenChunk;
#pragma unroll
    for (int i = 0; i < kGivenChunk; ++i) {
      const u32 word = words[FP8 ? i / 2 : i];
      const float given = !FP8 ? __uint_as_float(word) : i % 2 == 0 ? low_float(word) : high_float(word);
      v[i] = fmaf(v[i], mine[i / 2 % 2], given * theirs[i / 2 % 2]);
    }
  }
}

// -- result -----------------------------------------------------------------------------------------------------------

// Four 8x8 matrices to shared memory; lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(u32 shared, u32 v0, u32 v1, u32 v2, u32 v3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(v0), "r"(v1),
               "r"(v2), "r"(v3)
               : "memory");
}

// 16 bytes, number `chunk`, of one of a warp's 16 staged rows.
__device__ __forceinline__ u32 staged(u32 at, int row, int chunk) {
  return at + row * (kHeadDim * 2) + ((chunk ^ (row % 8)) << 4);
}

// Rounds, turns the result in shared memory so that a lane holds whole groups of columns, and stores it: as bf16, or as
// codes under `scale`. A warp's rows are two heads of the eight rows from `first_row` on.
__device__ __forceinline__ void store(const float (&o)[kHeadDim / 2], u32 staging, int first_row, void* out,
                                      float scale, int rows) {
  constexpr int kChunks = kHeadDim / 8, kTaken = OUT8 ? 2 : 1;
  constexpr int kLanes = kChunks / kTaken, kAtOnce = kWarpSize / kLanes;  // lanes to a row; rows
  const int warp = threadIdx.x % kGroupThreads / kWarpSize, lane = threadIdx.x % kWarpSize;
  const u32 at = staging + warp * kStagedBytes;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; chunk += 2) {
    const float* v = o + 4 * chunk;
    store_matrices(staged(at, lane % 16, chunk + lane / 16), pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                   pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
  }
  __syncwarp();
  const float inverse = OUT8 ? inverse_of(scale) : 1.0f;
#pragma unroll
  for (int i = 0; i < 16; i += kAtOnce) {
    const int row = i + lane / kLanes, chunk = lane % kLanes * kTaken;
    const int global_row = first_row + row % 8, head = 2 * warp + row / 8;
    const u64 index = static_cast<u64>(global_row) * kRowValues + head * kHeadDim + chunk * 8;
    const uint4 first = load_shared16(staged(at, row, chunk));
    if (OUT8) {
      const uint4 second = load_shared16(staged(at, row, chunk + 1));
      if (global_row < rows) store16(static_cast<unsigned char*>(out) + index, e4m3_sixteen(first, second, inverse));
    } else {
      if (global_row < rows) store16(static_cast<bf16*>(out) + index, first);
    }
  }
}

__device__ __forceinline__ void consume(u32 shared, const Tiles& tiles, const Scale& scale, void* out,
                                        const float* out_scale, int rows, int consumer) {
  float o[kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) o[i] = 0.0f;
  Statistics row = {{negative_infinity(), negative_infinity()}, {0.0f, 0.0f}};
  attend(o, row, shared, tiles, scale, consumer);
  if (consumer == kGiver) {
    give(o, row, shared, tiles);
  } else {
    const float scale_of_codes = OUT8 ? *out_scale : 1.0f;
    join(o, row, shared, tiles, scale);
    consumer_barrier(consumer);  // all of its warps have read queries and what was given for the last time
    store(o, shared + kResultAt, (blockIdx.x / 2 * 2 + tiles.rank) * kBlockRows, out, scale_of_codes, rows);
  }
}

__device__ __forceinline__ void prepare_barriers(u32 shared) {
  for (int i = kKeyFull; i < kKeyEmpty; ++i) barrier_init(barrier_at(shared, i), 1);
  for (int i = kKeyEmpty; i < kQueryFull; ++i) barrier_init(barrier_at(shared, i), kGroupWarps);
  for (int i = kQueryFull; i < kReady; ++i) barrier_init(barrier_at(shared, i), 1);
  barrier_init(barrier_at(shared, kReady), kConsumers * kGroupWarps);
  barrier_init(barrier_at(shared, kGiven), 1);
  barriers_publish();
  barrier_expect(barrier_at(shared, kGiven), kGivenBytes);
}

// query bf16[rows, 8, 256] in boxes of 64 columns, 8 rows and 8 heads; key and value bf16[rows, 256] in boxes of
// TILE_ROWS x 64; all swizzled over 128 bytes. With FP8 codes: query in boxes of 128 columns; key [rows in multiples of
// 16, 256], in the order of key_of, in boxes of TILE_ROWS x 128; value [rows in multiples of 64 / 64, 256, 64] in boxes
// of 256 x 64, swizzled over 64 bytes; code_scales float32[3] of queries, keys and values, which no kernel that may still
// run makes. valid int32[1], from 1 to `rows`. out bf16[rows, 8 * 256], or with OUT8 codes under scale float32[1]. The
// grid has two blocks for each 16 rows. No block ends before what others send it has come: its giver waits for all that
// arrives at kReady, its keeper for all that is given.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    prefix_attention(const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key,
                     const __grid_constant__ TensorMap value,
#if FP8
                     const float* code_scales,
#endif
                     const int* valid, void* out, const float* scale, int rows) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const int rank = static_cast<int>(block_in_cluster());
  if (threadIdx.x == 0) {
    if (shared % 1024 != 0) __trap();  // or swizzle and descriptors disagree
    prefetch_map(query);
    prefetch_map(key);
    prefetch_map(value);
    prepare_barriers(shared);
  }
  // Scales were used a decision ago and come from memory: they are asked for here, and used behind the first copies.
  float of_codes[3] = {};
#if FP8
#pragma unroll
  for (int i = 0; i < 3; ++i) of_codes[i] = code_scales[i];
#endif
  if (OUT8 && threadIdx.x == 0) prefetch_line(scale);
  overlap_trigger();
  overlap_wait();
  const Feed feed{shared, query, key, value, usual_policy()};
  if (threadIdx.x == 0) begin(feed, rank);
  __syncthreads();
  cluster_arrive();
  const Scale factors = Scale::of(of_codes);
  const int group = __shfl_sync(kAllLanes, threadIdx.x / kGroupThreads, 0);  // known to be one for a warp
  switch (group) {  // not `if`: the assembler heeds setmaxnreg only where the producer's code stands in front
    case 0:
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
      if (threadIdx.x == 0) produce(feed, Tiles(min(max(*valid, 1), rows), rank));
      __syncwarp();
      cluster_wait();
      break;
    case 1:
    case 2:
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
      consume(shared, Tiles(min(max(*valid, 1), rows), rank), factors, out, scale, rows, group - 1);
      break;
  }
}
