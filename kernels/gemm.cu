// Matrix product on Hopper's warpgroup instructions (sm_90a), with the step behind it in its epilogue:
//   out = epilogue(x @ weights^T),  x [rows, K], weights [columns, K], out [rows, ...]; sums in float32.
//
// A tile is kColumns rows of `weights` (the instruction's M, 64 for each of two consumer warpgroups) by TILE_ROWS rows of
// x (its N, any multiple of 8): a count of rows that is no multiple of 128 wastes little. One thread of a third
// warpgroup streams both through a ring of stages. The grid is resident: each block works on tile after tile, the row
// tiles of one column tile at the same time, so that a weight is fetched from memory once. The second consumer starts
// later than the first, so that one computes its epilogue while the other keeps the tensor cores busy.
//
// TILE_ROWS, STAGES. FP8: x and weights are E4M3 instead of bfloat16. GEGLU: weights hold 8 gate rows, then the 8 up
// rows of the same outputs, and so on; out bf16[rows, columns / 2] = gelu_tanh(gate) * up. Otherwise out
// bf16[rows, columns].
// CLUSTER 2: two blocks share the x they fetch. STAGGER 0: both consumers start at once.
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "gemm.cu is written for sm_90a: no other architecture has its matrix instructions"
#endif
#include "tma.cuh"
#include "wgmma.cuh"

#ifndef CLUSTER
#define CLUSTER 1
#endif
#if CLUSTER > 1
#define CLUSTER_SIZE __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_SIZE
#endif
#ifndef STAGGER
#define STAGGER 1
#endif
#ifndef GEGLU
#define GEGLU 0
#endif

constexpr int kGroupThreads = 128, kConsumers = 2, kThreads = kGroupThreads * (1 + kConsumers);
constexpr int kConsumerWarps = kConsumers * kGroupThreads / kWarpSize;
constexpr int kColumns = 64 * kConsumers;
constexpr int kStepBytes = 128;  // of K in a stage: the width of the swizzle
constexpr int kStep = FP8 ? kStepBytes : kStepBytes / 2;
constexpr int kWeightBytes = kColumns * kStepBytes, kRowBytes = TILE_ROWS * kStepBytes;
constexpr int kStageBytes = kWeightBytes + kRowBytes;
constexpr int kOutColumns = 32;  // that a consumer stores at once
constexpr int kOutBytes = TILE_ROWS * kOutColumns * 2;
constexpr int kMatrices = TILE_ROWS / 8;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(TILE_ROWS % (8 * CLUSTER) == 0 && TILE_ROWS <= 256, "rows of a tile");
static_assert(kStageBytes % 1024 == 0 && kOutBytes % 512 == 0, "swizzle atoms");

// Shared memory: stages, then out of each consumer, then the scales of each consumer, then the barriers.
constexpr int kOutAt = STAGES * kStageBytes;
constexpr int kScalesAt = kOutAt + kConsumers * kOutBytes;
constexpr int kBarriersAt = kScalesAt + kConsumers * TILE_ROWS * 4;

struct Tile {
  int row, column;  // counted in tiles
};

// The tiles of this block, one after the other. Blocks of a cluster have the same row tile, and neighbouring column
// tiles.
struct Schedule {
  int row_tiles, total, next;

  __device__ Schedule(int row_tiles, int column_tiles)
      : row_tiles(row_tiles), total(row_tiles * (column_tiles / CLUSTER)), next(blockIdx.x / CLUSTER) {}

  __device__ bool take(Tile& tile) {
    if (next >= total) return false;
    tile.row = next % row_tiles;
    tile.column = next / row_tiles * CLUSTER + (CLUSTER > 1 ? static_cast<int>(block_in_cluster()) : 0);
    next += gridDim.x / CLUSTER;
    return true;
  }
};

// Where one side stands in the ring; full and empty barriers are u64 in shared memory.
struct Place {
  int slot = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == STAGES) {
      slot = 0;
      parity ^= 1;
    }
  }
};

__device__ __forceinline__ u32 full_barrier(u32 shared, int slot) { return shared + kBarriersAt + slot * 8; }
__device__ __forceinline__ u32 empty_barrier(u32 shared, int slot) { return full_barrier(shared, STAGES + slot); }

// One thread: all stages of all tiles.
__device__ __forceinline__ void produce(u32 shared, const TensorMap& weights, const TensorMap& x, Schedule schedule,
                                        int steps) {
  const u64 once = streaming_policy(), usual = usual_policy();
  Place at;
  Tile tile;
  while (schedule.take(tile)) {
    for (int step = 0; step < steps; ++step) {
      const u32 stage = shared + at.slot * kStageBytes, full = full_barrier(shared, at.slot);
      barrier_wait(empty_barrier(shared, at.slot), at.parity ^ 1);
      barrier_expect(full, kStageBytes);
      load_box(stage, weights, step * kStep, tile.column * kColumns, full, once);
      if (CLUSTER == 1) {
        load_box(stage + kWeightBytes, x, step * kStep, tile.row * TILE_ROWS, full, usual);
      } else {  // each block of the cluster fetches its part for all
        const int part = block_in_cluster();
        load_box_for((1 << CLUSTER) - 1, stage + kWeightBytes + part * (kRowBytes / CLUSTER), x, step * kStep,
                     tile.row * TILE_ROWS + part * (TILE_ROWS / CLUSTER), full, usual);
      }
      at.advance();
    }
  }
}

// One warp of a consumer: it has read the stage, for every producer that writes to it.
__device__ __forceinline__ void release(u32 shared, int slot) {
  const u32 lane = threadIdx.x % kWarpSize;
  if (CLUSTER == 1) {
    if (lane == 0) barrier_arrive(empty_barrier(shared, slot));
  } else {
    if (lane < CLUSTER) barrier_arrive_at(empty_barrier(shared, slot), lane);
  }
}

// sums = this consumer's 64 rows of the weight tile times the tile of x.
__device__ __forceinline__ void accumulate(float (&sums)[TILE_ROWS / 2], u32 shared, int consumer, int steps,
                                           Place& at) {
  const u32 weights = tile_start(shared + consumer * 64 * kStepBytes), x = tile_start(shared + kWeightBytes);
  int before = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const u32 stage = at.slot * kStageBytes;
    barrier_wait(full_barrier(shared, at.slot), at.parity);
    products_begin();
#pragma unroll
    for (u32 bytes = 0; bytes < kStepBytes; bytes += 32)
      multiply(sums, further(weights, stage + bytes), further(x, stage + bytes), step > 0 || bytes > 0);
    products_commit();
    if (step > 0) {
      products_wait<1>();
      release(shared, before);
    }
    before = at.slot;
    at.advance();
  }
  products_finish(sums);
  release(shared, before);
}

__device__ __forceinline__ void consumer_barrier(int consumer) {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(1 + consumer), "n"(kGroupThreads) : "memory");
}

// Four 8x8 matrices, transposed, to shared memory; lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices_transposed(u32 shared, const u32 (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(v[0]),
               "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

__device__ __forceinline__ void store_matrix_transposed(u32 shared, u32 v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(shared), "r"(v) : "memory");
}

// Where 8 columns of a row stand in the staged output: rows of 64 bytes, 16-byte groups swizzled as the engine expects.
__device__ __forceinline__ u32 staged(u32 out, int row, int group) {
  return out + row * (kOutColumns * 2) + ((group ^ (row / 2 % 4)) << 4);
}

// Each warp writes 8 columns, group `group`, of all rows of the tile; value(m) are its two rows of matrix m.
template <class Value>
__device__ __forceinline__ void stage_columns(u32 out, int group, Value value) {
  const int lane = threadIdx.x % kWarpSize;
  constexpr int kFours = kMatrices / 4 * 4;
#pragma unroll
  for (int m = 0; m < kFours; m += 4) {
    const u32 four[4] = {value(m), value(m + 1), value(m + 2), value(m + 3)};
    store_matrices_transposed(staged(out, 8 * m + lane, group), four);
  }
#pragma unroll
  for (int m = kFours; m < kMatrices; ++m) store_matrix_transposed(staged(out, 8 * m + lane % 8, group), value(m));
}

// Stores what one pass has staged; the next pass may stage again behind it.
__device__ __forceinline__ void send(u32 out, const TensorMap& map, int column, int row, int consumer) {
  publish_to_engine();
  consumer_barrier(consumer);
  if (threadIdx.x % kGroupThreads == 0) store_box(map, column, row, out);
}

__device__ __forceinline__ void await_staging(int consumer) {
  if (threadIdx.x % kGroupThreads == 0) stores_read();
  consumer_barrier(consumer);
}

#if GEGLU
__device__ __forceinline__ void epilogue(float (&sums)[TILE_ROWS / 2], const float* scales, u32 out,
                                         const TensorMap& map, Tile tile, int consumer) {
  const int thread = threadIdx.x % kGroupThreads, warp = thread / kWarpSize, lane = thread % kWarpSize;
  await_staging(consumer);
  stage_columns(out, warp, [&](int m) {
    const float2 scale = *reinterpret_cast<const float2*>(scales + 8 * m + 2 * (lane % 4));
    const float* s = sums + 4 * m;  // gate of two rows, then up of both
    return pack_bf16(gelu_tanh(s[0] * scale.x) * (s[2] * scale.x), gelu_tanh(s[1] * scale.y) * (s[3] * scale.y));
  });
  send(out, map, tile.column * (kColumns / 2) + consumer * kOutColumns, tile.row * TILE_ROWS, consumer);
}
#else
// In two passes, as the staged output holds half of a consumer's columns: first those of warps 0 and 1.
__device__ __forceinline__ void epilogue(float (&sums)[TILE_ROWS / 2], const float* scales, u32 out,
                                         const TensorMap& map, Tile tile, int consumer) {
  const int thread = threadIdx.x % kGroupThreads, warp = thread / kWarpSize, lane = thread % kWarpSize;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    await_staging(consumer);
    if (warp / 2 == pass) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        stage_columns(out, warp % 2 * 2 + half, [&](int m) {
          const float2 scale = *reinterpret_cast<const float2*>(scales + 8 * m + 2 * (lane % 4));
          const float* s = sums + 4 * m + 2 * half;
          return pack_bf16(s[0] * scale.x, s[1] * scale.y);
        });
    }
    send(out, map, tile.column * kColumns + consumer * 64 + pass * kOutColumns, tile.row * TILE_ROWS, consumer);
  }
}
#endif

__device__ __forceinline__ void consume(u32 shared, float* scales, const TensorMap& map, const float* scale,
                                        Schedule schedule, int rows, int steps, int consumer) {
  const int thread = threadIdx.x % kGroupThreads;
  float sums[TILE_ROWS / 2];
  Place at;
  Tile tile;
  int scales_of = -1;
  while (schedule.take(tile)) {
    if (STAGGER && consumer == 1 && scales_of < 0) barrier_wait(full_barrier(shared, min(STAGES, steps) - 1), 0);
    accumulate(sums, shared, consumer, steps, at);
    if (scales_of < 0) overlap_wait();
    if (tile.row != scales_of) {
      consumer_barrier(consumer);
      for (int i = thread; i < TILE_ROWS; i += kGroupThreads) {
        const int row = tile.row * TILE_ROWS + i;
        scales[i] = scale == nullptr ? 1.0f : row < rows ? scale[row] : 0.0f;
      }
      scales_of = tile.row;  // the epilogue's first barrier stands between these writes and their use
    }
    epilogue(sums, scales, shared + kOutAt + consumer * kOutBytes, map, tile, consumer);
  }
  if (thread == 0) stores_done();
}

// scale float32[rows] multiplies the sums of each row (null: 1). With OVERLAP, the kernel in front of this one may still
// be making `scale`; it must not be making anything else that is read here. Boxes of the maps: weights kColumns x kStep, x
// TILE_ROWS / CLUSTER x kStep, swizzled over 128 bytes; out TILE_ROWS x 32, over 64 bytes. K is steps * kStep. The grid
// has at most as many blocks as there are tiles.
extern "C" __global__ void CLUSTER_SIZE __launch_bounds__(kThreads, 1)
    gemm(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap x,
         const __grid_constant__ TensorMap out, const float* scale, int rows, int column_tiles, int steps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const Schedule schedule((rows + TILE_ROWS - 1) / TILE_ROWS, column_tiles);
  if (threadIdx.x == 0) {
    if (shared % 1024 != 0) __trap();  // or swizzle and descriptors disagree
    prefetch_map(weights);
    prefetch_map(x);
    prefetch_map(out);
    for (int slot = 0; slot < STAGES; ++slot) {
      barrier_init(full_barrier(shared, slot), 1);
      barrier_init(empty_barrier(shared, slot), kConsumerWarps * CLUSTER);
    }
    barriers_publish();
  }
  __syncthreads();
  if (CLUSTER > 1) cluster_barrier();
  const int group = __shfl_sync(kAllLanes, threadIdx.x / kGroupThreads, 0);  // known to be one for a warp
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    if (threadIdx.x == 0) produce(shared, weights, x, schedule, steps);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    float* scales = reinterpret_cast<float*>(memory + kScalesAt) + (group - 1) * TILE_ROWS;
    consume(shared, scales, out, scale, schedule, rows, steps, group - 1);
  }
  __syncwarp();
  if (CLUSTER > 1) cluster_barrier();  // no block ends while another may still write to it
}
