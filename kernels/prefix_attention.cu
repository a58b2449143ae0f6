// Attention of the prefix on Hopper's warpgroup instructions (sm_90a): eight query heads of 256 share one key head.
//   out = softmax(query @ key[:valid]^T / 16) @ value[:valid]
//
// As all heads read the same keys, 8 rows times 8 heads are the 64 rows of one product: a block owns 8 rows of the
// prefix. Its two consumers take the tiles of 128 keys in turn, each with a maximum, sums and a result of its own, so
// that one computes exponentials while the other keeps the tensor cores busy; both results meet in shared memory at the
// end. One thread of a third warpgroup streams keys and values through a ring of slots of 16 KB: 64 columns of a tile
// of keys, or 32 rows of values. Where the consumers are in it follows from the number of tiles alone.
//
// CLUSTER: blocks that fetch keys and values together, each a part for all; 1, 2 or 4. OUT8: E4M3 codes of the bfloat16
// that would have been stored.
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "prefix_attention.cu is written for sm_90a: no other architecture has its matrix instructions"
#endif
#define TILE_ROWS 128  // keys of a tile, the N of its product
#include "tma.cuh"
#include "wgmma.cuh"
#include "quantise.cuh"

#ifndef CLUSTER
#define CLUSTER 1
#endif
#if CLUSTER > 1
#define CLUSTER_SIZE __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_SIZE
#endif
#ifndef OUT8
#define OUT8 0
#endif

constexpr int kGroupThreads = 128, kConsumers = 2, kThreads = kGroupThreads * (1 + kConsumers);
constexpr int kGroupWarps = kGroupThreads / kWarpSize;
constexpr int kHeads = 8, kHeadDim = 256, kRowValues = kHeads * kHeadDim, kBlockRows = 8;
constexpr int kTileKeys = TILE_ROWS, kPieces = 4;               // slots that hold the keys, or the values, of a tile
constexpr int kColumns = 64, kColumnBlocks = kHeadDim / kColumns;  // of 128 bytes, the width of the swizzle
constexpr int kPieceKeys = kTileKeys / kPieces;                 // rows of values in a slot
constexpr int kSlotBytes = kTileKeys * kColumns * 2;
constexpr int kPhases = 3, kSlots = kPhases * kPieces;  // a phase is one tile's keys or one tile's values
constexpr int kQueryBlockBytes = kHeads * kBlockRows * kColumns * 2, kQueryBytes = kColumnBlocks * kQueryBlockBytes;
constexpr int kAtomBytes = kBlockRows * kColumns * 2;  // one head's 8 rows: one atom of the swizzle
constexpr int kValueBlockBytes = kPieceKeys * kColumns * 2;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr float kScoreScale = 1.4426950408889634f / 16.0f;  // log2(e) / sqrt(256)
static_assert(kColumnBlocks == kPieces && kPieces % CLUSTER == 0, "a slot is cut into a part for each block");
static_assert(kSlotBytes == kPieceKeys * kHeadDim * 2 && kAtomBytes == 1024, "slots of keys and of values");

// Shared memory: queries, ring, maximum and sum of each row and consumer, barriers. Behind the last tile the ring
// holds what the consumers give each other, and the place of the queries what is to be stored.
constexpr int kRingAt = kQueryBytes;
constexpr int kStatisticsAt = kRingAt + kSlots * kSlotBytes;
constexpr int kStatisticsBytes = kHeads * kBlockRows * 8;  // of one consumer
constexpr int kBarriersAt = kStatisticsAt + kConsumers * kStatisticsBytes;
constexpr int kGivenBytes = kGroupThreads * kHeadDim / 4 * 4;  // half of the 128 sums that a thread has
constexpr int kStagedColumns = kHeadDim / kConsumers, kStagedBytes = 16 * kStagedColumns * 2;  // of a warp
static_assert(kConsumers * kGivenBytes <= kSlots * kSlotBytes, "what is given fits the ring");
static_assert(kConsumers * kGroupWarps * kStagedBytes <= kQueryBytes, "what is staged fits the queries");

__device__ __forceinline__ u32 full_barrier(u32 shared, int slot) { return shared + kBarriersAt + slot * 8; }
__device__ __forceinline__ u32 empty_barrier(u32 shared, int slot) { return full_barrier(shared, kSlots + slot); }
__device__ __forceinline__ u32 query_barrier(u32 shared) { return full_barrier(shared, 2 * kSlots); }

// Where phase number `index` stands in the ring.
struct Phase {
  int slot;  // its first
  u32 parity;

  __device__ __forceinline__ explicit Phase(int index) : slot(index % kPhases * kPieces), parity(index / kPhases & 1) {}
};

// The order of the ring: keys of tile 0, keys of 1, values of 0, values of 1, keys of 2 and so on; tiles that are not
// there leave no gap. Of the last tile's values only the pieces with valid rows are there.
struct Tiles {
  int valid, count;

  __device__ __forceinline__ explicit Tiles(int valid) : valid(valid), count((valid + kTileKeys - 1) / kTileKeys) {}

  __device__ __forceinline__ Phase keys(int tile) const { return Phase(tile / 2 * 4 + tile % 2); }
  __device__ __forceinline__ Phase values(int tile) const {
    const bool alone = tile % 2 == 0 && tile + 1 == count;
    return Phase(tile / 2 * 4 + tile % 2 + (alone ? 1 : 2));
  }
  __device__ __forceinline__ int pieces(int tile) const {
    return min(kPieces, (valid - tile * kTileKeys + kPieceKeys - 1) / kPieceKeys);
  }
};

// -- producer ---------------------------------------------------------------------------------------------------------

// What one thread streams into the ring. Each block of the cluster fetches its part of every slot, for all of them; a
// slot is full when all parts have come, and empty when the consumer of it in every block has read it.
struct Feed {
  u32 shared;
  const TensorMap &key, &value;
  u64 policy;
  int part;  // this block's

  __device__ __forceinline__ void fetch(const TensorMap& map, u32 at, int column, int row, int slot) const {
    const u32 full = full_barrier(shared, slot);
    if (CLUSTER == 1)
      load_box(at, map, column, row, full, policy);
    else
      load_box_for((1 << CLUSTER) - 1, at, map, column, row, full, policy);
  }

  // The place of a slot, once it is empty.
  __device__ __forceinline__ u32 claim(int slot, u32 parity) const {
    barrier_wait(empty_barrier(shared, slot), parity ^ 1);
    barrier_expect(full_barrier(shared, slot), kSlotBytes);
    return shared + kRingAt + slot * kSlotBytes;
  }

  __device__ __forceinline__ void keys(const Phase& phase, int tile) const {
    for (int piece = 0; piece < kPieces; ++piece) {
      const int slot = phase.slot + piece;
      const u32 at = claim(slot, phase.parity) + part * (kSlotBytes / CLUSTER);
      fetch(key, at, piece * kColumns, tile * kTileKeys + part * (kTileKeys / CLUSTER), slot);
    }
  }

  __device__ __forceinline__ void values(const Phase& phase, int tile, int pieces) const {
    for (int piece = 0; piece < pieces; ++piece) {
      const int slot = phase.slot + piece;
      const u32 at = claim(slot, phase.parity);
      for (int block = part; block < kColumnBlocks; block += CLUSTER)
        fetch(value, at + block * kValueBlockBytes, block * kColumns, tile * kTileKeys + piece * kPieceKeys, slot);
    }
  }
};

// One thread. The first tile is there whatever `valid` says.
__device__ __forceinline__ void produce(const Feed& feed, const int* valid, int rows) {
  const int found = *valid;
  feed.keys(Phase(0), 0);
  const Tiles tiles(min(max(found, 1), rows));
  for (int tile = 0; tile < tiles.count; tile += 2) {
    const bool both = tile + 1 < tiles.count;
    if (tile > 0) feed.keys(tiles.keys(tile), tile);
    if (both) feed.keys(tiles.keys(tile + 1), tile + 1);
    feed.values(tiles.values(tile), tile, tiles.pieces(tile));
    if (both) feed.values(tiles.values(tile + 1), tile + 1, tiles.pieces(tile + 1));
  }
}

// One warp: each lane fetches 64 columns of one head's rows. Rows of the product are head * 8 + row.
__device__ __forceinline__ void fetch_queries(u32 shared, const TensorMap& query, u64 policy) {
  const int lane = threadIdx.x % kWarpSize, block = lane / kHeads, head = lane % kHeads;
  const u32 barrier = query_barrier(shared);
  if (lane == 0) barrier_expect(barrier, kQueryBytes);
  __syncwarp();
  load_box(shared + block * kQueryBlockBytes + head * kAtomBytes, query, head * kHeadDim + block * kColumns,
           blockIdx.x * kBlockRows, barrier, policy);
}

// -- consumer ---------------------------------------------------------------------------------------------------------

// The threads of one consumer (barriers 1 and 2 of the block), or of both (3).
__device__ __forceinline__ void consumer_barrier(int consumer) {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(1 + consumer), "n"(kGroupThreads) : "memory");
}
__device__ __forceinline__ void consumers_barrier() {
  __syncwarp();
  asm volatile("bar.sync 3, %0;" ::"n"(kConsumers * kGroupThreads) : "memory");
}

// One warp has read the slot, for every producer that writes to it.
__device__ __forceinline__ void release(u32 shared, int slot) {
  const u32 lane = threadIdx.x % kWarpSize;
  if (CLUSTER == 1) {
    if (lane == 0) barrier_arrive(empty_barrier(shared, slot));
  } else {
    if (lane < CLUSTER) barrier_arrive_at(empty_barrier(shared, slot), lane);
  }
}

// s = queries times the keys of one tile.
__device__ __forceinline__ void multiply_keys(float (&s)[kTileKeys / 2], u32 shared, const Phase& phase) {
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int slot = phase.slot + piece;
    const u32 queries = tile_start(shared + piece * kQueryBlockBytes);
    const u32 keys = tile_start(shared + kRingAt + slot * kSlotBytes);
    barrier_wait(full_barrier(shared, slot), phase.parity);
    products_begin();
#pragma unroll
    for (u32 bytes = 0; bytes < kColumns * 2; bytes += 32)
      multiply(s, further(queries, bytes), further(keys, bytes), piece > 0 || bytes > 0);
    products_commit();
    if (piece > 0) {
      products_wait<1>();
      release(shared, slot - 1);
    }
  }
  products_finish(s);
  release(shared, phase.slot + kPieces - 1);
}

// Rows of values behind the last valid one may hold anything, even NaN, which a weight of zero would not remove.
__device__ __forceinline__ void clear_rows(u32 values, int first, int consumer) {
  constexpr int kChunks = kColumns * 2 / 16;
  for (int i = threadIdx.x % kGroupThreads; i < kColumnBlocks * kPieceKeys * kChunks; i += kGroupThreads)
    if (i / kChunks % kPieceKeys >= first)
      asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(values + i * 16), "r"(0) : "memory");
  publish_to_engine();
  consumer_barrier(consumer);
}

// o += weights times the values of one tile.
__device__ __forceinline__ void multiply_values(float (&o)[kHeadDim / 2], u32 (&weights)[kTileKeys / 4], u32 shared,
                                                const Phase& phase, int live, int consumer) {
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    if (piece * kPieceKeys < live) {
      const int slot = phase.slot + piece;
      const u32 at = shared + kRingAt + slot * kSlotBytes;
      barrier_wait(full_barrier(shared, slot), phase.parity);
      if (live < (piece + 1) * kPieceKeys) clear_rows(at, live - piece * kPieceKeys, consumer);
      products_begin();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32* a = weights + piece * 8 + half * 4;
        multiply_wide(o, a[0], a[1], a[2], a[3], wide_start(at + half * 16 * kColumns * 2, kValueBlockBytes));
      }
      products_commit();
      if (piece > 0) {
        products_wait<1>();
        release(shared, slot - 1);
      }
    }
  }
  wide_finish(o, weights);
  release(shared, phase.slot + (live - 1) / kPieceKeys);
}

// What a consumer knows of this thread's two rows: lane / 4 of its warp's 16 and 8 further. `top` is the greatest
// score of all of its keys, `sum` that of the weights under it, over this thread's keys only.
struct Statistics {
  float top[2], sum[2];
};

// A top to subtract: that of a row without any finite score would make NaN.
__device__ __forceinline__ float reference_of(float top) { return top == negative_infinity() ? 0.0f : top; }

// The difference is scaled, not each score: so the greatest has weight 1 however great it is.
__device__ __forceinline__ float weight_of(float score, float reference) {
  return exp2_fast((score - reference) * kScoreScale);
}

// Scores of one tile → weights under the new top; `o` and the sums follow it. Keys from `live` on have no weight.
__device__ __forceinline__ void weigh(float (&s)[kTileKeys / 2], u32 (&weights)[kTileKeys / 4],
                                      float (&o)[kHeadDim / 2], Statistics& row, int live) {
  if (live < kTileKeys) {
    const int first = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < kTileKeys / 2; ++i)
      if (8 * (i / 4) + first + i % 2 >= live) s[i] = negative_infinity();
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = negative_infinity();
#pragma unroll
    for (int i = 2 * half; i < kTileKeys / 2; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
    top = fmaxf(row.top[half], warp_max<4>(top));
    const float reference = reference_of(top), shrink = weight_of(row.top[half], reference);
    row.top[half] = top;
    float sum = 0.0f;
#pragma unroll
    for (int i = 2 * half; i < kTileKeys / 2; i += 4) {
      s[i] = weight_of(s[i], reference);
      s[i + 1] = weight_of(s[i + 1], reference);
      sum += s[i] + s[i + 1];
      weights[i / 2] = pack_bf16(s[i], s[i + 1]);
    }
    row.sum[half] = fmaf(row.sum[half], shrink, sum);
#pragma unroll
    for (int i = 2 * half; i < kHeadDim / 2; i += 4) {
      o[i] *= shrink;
      o[i + 1] *= shrink;
    }
  }
}

// What each of this thread's two rows of `o` is multiplied by, so that the sum over both consumers is the result.
__device__ __forceinline__ void agree(const Statistics& mine, float (&factor)[2], float2* statistics, int consumer) {
  const int warp = threadIdx.x % kGroupThreads / kWarpSize, lane = threadIdx.x % kWarpSize;
  float sum[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp * 16 + 8 * half + lane / 4;
    sum[half] = warp_sum<4>(mine.sum[half]);
    if (lane % 4 == 0) statistics[consumer * kHeads * kBlockRows + row] = make_float2(mine.top[half], sum[half]);
  }
  consumers_barrier();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp * 16 + 8 * half + lane / 4;
    const float2 other = statistics[(1 - consumer) * kHeads * kBlockRows + row];
    const float reference = reference_of(fmaxf(mine.top[half], other.x));
    const float weight = weight_of(mine.top[half], reference);
    factor[half] = weight / fmaf(sum[half], weight, other.y * weight_of(other.x, reference));
  }
}

__device__ __forceinline__ uint4 load_words(u32 shared) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared)
               : "memory");
  return v;
}

// Gives the other consumer this one's part of half of the columns and adds the other's part to the half KEPT. The same
// threads of both hold the same places, so that each word goes from thread to thread.
template <int KEPT>
__device__ __forceinline__ void join(float (&o)[kHeadDim / 2], const float (&factor)[2], u32 shared) {
  constexpr int kHalf = kHeadDim / 4, kGiven = (1 - KEPT) * kHalf, kMine = KEPT * kHalf;
  const u32 place = shared + kRingAt + threadIdx.x % kGroupThreads * 16;
#pragma unroll
  for (int i = 0; i < kHalf; i += 4)
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(place + KEPT * kGivenBytes + i * kGroupThreads * 4),
                 "f"(o[kGiven + i] * factor[0]), "f"(o[kGiven + i + 1] * factor[0]), "f"(o[kGiven + i + 2] * factor[1]),
                 "f"(o[kGiven + i + 3] * factor[1])
                 : "memory");
  consumers_barrier();
#pragma unroll
  for (int i = 0; i < kHalf; i += 4) {
    const uint4 other = load_words(place + (1 - KEPT) * kGivenBytes + i * kGroupThreads * 4);
    o[kMine + i] = fmaf(o[kMine + i], factor[0], __uint_as_float(other.x));
    o[kMine + i + 1] = fmaf(o[kMine + i + 1], factor[0], __uint_as_float(other.y));
    o[kMine + i + 2] = fmaf(o[kMine + i + 2], factor[1], __uint_as_float(other.z));
    o[kMine + i + 3] = fmaf(o[kMine + i + 3], factor[1], __uint_as_float(other.w));
  }
}

// Four 8x8 matrices to shared memory; lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(u32 shared, u32 v0, u32 v1, u32 v2, u32 v3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(v0), "r"(v1),
               "r"(v2), "r"(v3)
               : "memory");
}

// 16 bytes, number `chunk`, of one of a warp's 16 staged rows.
__device__ __forceinline__ u32 staged(u32 at, int row, int chunk) {
  return at + row * (kStagedColumns * 2) + ((chunk ^ (row % 8)) << 4);
}

// Rounds the half KEPT, turns it in shared memory so that a lane holds whole groups of columns, and stores it: as
// bf16, or as codes under `scale`. A warp's rows are two heads of the block's eight rows.
template <int KEPT>
__device__ __forceinline__ void store(const float (&o)[kHeadDim / 2], u32 shared, void* out, const float* scale,
                                      int rows) {
  constexpr int kMine = KEPT * kHeadDim / 4, kChunks = kStagedColumns / 8, kTaken = OUT8 ? 2 : 1;
  constexpr int kLanes = kChunks / kTaken, kAtOnce = kWarpSize / kLanes;  // lanes to a row; rows
  const int warp = threadIdx.x % kGroupThreads / kWarpSize, lane = threadIdx.x % kWarpSize;
  const u32 at = shared + (KEPT * kGroupWarps + warp) * kStagedBytes;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; chunk += 2) {
    const float* v = o + kMine + 4 * chunk;
    store_matrices(staged(at, lane % 16, chunk + lane / 16), pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                   pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
  }
  __syncwarp();
  const float inverse = OUT8 ? inverse_of(scale) : 1.0f;
#pragma unroll
  for (int i = 0; i < 16; i += kAtOnce) {
    const int row = i + lane / kLanes, chunk = lane % kLanes * kTaken;
    const int global_row = blockIdx.x * kBlockRows + row % 8, head = 2 * warp + row / 8;
    const u64 column = head * kHeadDim + KEPT * kStagedColumns + chunk * 8;
    const u64 index = static_cast<u64>(global_row) * kRowValues + column;
    const uint4 first = load_words(staged(at, row, chunk));
    if (OUT8) {
      const uint4 second = load_words(staged(at, row, chunk + 1));
      if (global_row < rows) store16(static_cast<unsigned char*>(out) + index, e4m3_sixteen(first, second, inverse));
    } else {
      if (global_row < rows) store16(static_cast<bf16*>(out) + index, first);
    }
  }
}

template <int CONSUMER>
__device__ __forceinline__ void finish(float (&o)[kHeadDim / 2], const float (&factor)[2], u32 shared, void* out,
                                       const float* scale, int rows) {
  join<CONSUMER>(o, factor, shared);
  store<CONSUMER>(o, shared, out, scale, rows);
}

__device__ __forceinline__ void consume(u32 shared, float2* statistics, const Tiles& tiles, void* out,
                                        const float* scale, int rows, int consumer) {
  float o[kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) o[i] = 0.0f;
  Statistics row = {{negative_infinity(), negative_infinity()}, {0.0f, 0.0f}};
  barrier_wait(query_barrier(shared), 0);
#pragma unroll 1
  for (int tile = consumer; tile < tiles.count; tile += kConsumers) {
    const int live = min(kTileKeys, tiles.valid - tile * kTileKeys);
    u32 weights[kTileKeys / 4];
    float s[kTileKeys / 2];
    multiply_keys(s, shared, tiles.keys(tile));
    weigh(s, weights, o, row, live);
    multiply_values(o, weights, shared, tiles.values(tile), live, consumer);
  }
  float factor[2];
  agree(row, factor, statistics, consumer);  // behind it both have read queries and ring for the last time
  if (consumer == 0)
    finish<0>(o, factor, shared, out, scale, rows);
  else
    finish<1>(o, factor, shared, out, scale, rows);
}

// query bf16[rows, 8 * 256] in boxes of 8 x 64; key and value bf16[rows, 256] in boxes of 128 / CLUSTER x 64 and of 32
// x 64; all swizzled over 128 bytes. valid int32[1], from 1 to `rows`. out bf16[rows, 8 * 256], or with OUT8 codes
// under scale float32[1]. The grid has a block for each 8 rows, rounded up to whole clusters: a block without rows
// works on zeros, because the others of its cluster need its part of keys and values.
extern "C" __global__ void CLUSTER_SIZE __launch_bounds__(kThreads, 1)
    prefix_attention(const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key,
                     const __grid_constant__ TensorMap value, const int* valid, void* out, const float* scale,
                     int rows) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  if (threadIdx.x == 0) {
    if (shared % 1024 != 0) __trap();  // or swizzle and descriptors disagree
    prefetch_map(query);
    prefetch_map(key);
    prefetch_map(value);
    for (int slot = 0; slot < kSlots; ++slot) {
      barrier_init(full_barrier(shared, slot), 1);
      barrier_init(empty_barrier(shared, slot), kGroupWarps * CLUSTER);
    }
    barrier_init(query_barrier(shared), 1);
    barriers_publish();
  }
  __syncthreads();
  if (CLUSTER > 1) cluster_barrier();
  overlap_trigger();
  overlap_wait();
  const int group = __shfl_sync(kAllLanes, threadIdx.x / kGroupThreads, 0);  // known to be one for a warp
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpSize, 0);
    if (threadIdx.x == 0)
      produce(Feed{shared, key, value, usual_policy(), CLUSTER > 1 ? static_cast<int>(block_in_cluster()) : 0}, valid,
              rows);
    else if (warp == 1)
      fetch_queries(shared, query, usual_policy());
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    float2* statistics = reinterpret_cast<float2*>(memory + kStatisticsAt);
    consume(shared, statistics, Tiles(min(max(*valid, 1), rows)), out, scale, rows, group - 1);
  }
  __syncwarp();
  if (CLUSTER > 1) cluster_barrier();  // no block ends while another may still write to it
}
