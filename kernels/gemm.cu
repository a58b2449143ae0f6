// Matrix product on Hopper's warpgroup instructions (sm_90a), with the step behind it in its epilogue:
//   out = epilogue(x @ weights^T),  x [rows, K], weights [outputs, K], out [rows, ...]; sums in float32.
//
// A tile is kColumns rows of `weights` (the instruction's M, 64 for each consumer warpgroup) by TILE_ROWS rows of x (its
// N, any multiple of 8): a count of rows that is no multiple of 128 wastes little. One thread of another warpgroup
// streams both through a ring of stages. The grid is resident: each block works on tile after tile, the row
// tiles of one column tile at the same time, so that a weight is fetched from memory once. Where there are few tiles,
// several blocks share one, each with a part of K, and write parts that the next kernel adds.
//
// TILE_ROWS, STAGES, CONSUMERS (two or three warpgroups). FP8: x and weights are E4M3 instead of bfloat16. GEGLU, GELU,
// OUT8, ROW_SCALE: see gemm_epilogue.cuh. ROTARY: see gemm_rotary.cuh.
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "gemm.cu is written for sm_90a: no other architecture has its matrix instructions"
#endif
#include "tma.cuh"
#include "wgmma.cuh"

#ifndef GEGLU
#define GEGLU 0
#endif
#ifndef OUT8
#define OUT8 0
#endif
#ifndef ROTARY
#define ROTARY 0
#endif
#ifndef CONSUMERS
#define CONSUMERS 2
#endif

constexpr int kGroupThreads = 128, kConsumers = CONSUMERS, kThreads = kGroupThreads * (1 + kConsumers);
constexpr int kConsumerWarps = kConsumers * kGroupThreads / kWarpSize;
constexpr int kColumns = 64 * kConsumers;
constexpr bool kPairs = GEGLU || ROTARY;  // each thread has both weight rows of a pair: gate and up, or halves of a head
constexpr int kHeadDim = 256, kHeadTiles = kHeadDim / kColumns;  // with ROTARY: weight rows of a head, and its tiles
constexpr int kStepBytes = 128;  // of K in a stage: the width of the swizzle
constexpr int kStep = FP8 ? kStepBytes : kStepBytes / 2;
constexpr int kWeightBytes = kColumns * kStepBytes, kRowBytes = TILE_ROWS * kStepBytes;
constexpr int kStageBytes = kWeightBytes + kRowBytes;
constexpr int kOutColumns = kPairs ? 32 : 64;  // of out, in a consumer's part of a tile; with ROTARY of both halves each
constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32, kConsumerRegisters = kConsumers == 2 ? 232 : 160;
static_assert(kConsumers == 2 || kConsumers == 3 && TILE_ROWS <= 192, "registers for the sums of each consumer");
static_assert(TILE_ROWS % 8 == 0 && TILE_ROWS <= 256, "rows of a tile");
static_assert(kStageBytes % 1024 == 0, "swizzle atoms");
static_assert(STAGES >= 2, "one stage is fetched while another is read");

struct Tile {
  int row, column, part;  // row and column counted in tiles; part of K
  int first, last;        // steps of this part

  // The first weight row; with pairs the first one of their first rows.
  __device__ __forceinline__ int output() const {
    if (ROTARY) return column / kHeadTiles * kHeadDim + column % kHeadTiles * (kColumns / 2);
    return column * (GEGLU ? kColumns / 2 : kColumns);
  }
};

#include "gemm_rotary.cuh"

// Shared memory: stages, then out of each consumer, then the scales of each consumer, then the barriers.
constexpr int kOutAt = STAGES * kStageBytes;
constexpr int kScalesAt = kOutAt + kConsumers * kOutBytes;
constexpr int kBarriersAt = kScalesAt + kConsumers * TILE_ROWS * 4;

// The tiles of this block, one after the other.
struct Schedule {
  int row_tiles, steps, parts, total, next;

  __device__ Schedule(int row_tiles, int column_tiles, int steps, int parts)
      : row_tiles(row_tiles),
        steps(steps),
        parts(parts),
        total(row_tiles * column_tiles * parts),
        next(blockIdx.x) {}

  __device__ bool take(Tile& tile) {
    if (next >= total) return false;
    const int weights = next / row_tiles;
    tile.row = next % row_tiles;
    tile.column = weights / parts;
    tile.part = weights % parts;
    tile.first = tile.part * steps / parts;
    tile.last = (tile.part + 1) * steps / parts;
    next += gridDim.x;
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

// What one thread streams into the ring.
struct Feed {
  u32 shared;
  const TensorMap &weights, &x;
  const Rotary& rotary;
  u64 once, usual;

  // Stages of a block's first tile that are free from the beginning.
  __device__ static int early(const Tile& tile) { return min(STAGES, tile.last - tile.first); }

  __device__ void expect(int slot) const { barrier_expect(full_barrier(shared, slot), kStageBytes); }

  // Groups of 8 weight rows; with pairs of 8 rows and those 8 that form pairs with them.
  __device__ void fetch_weights(int slot, int step, const Tile& tile) const {
    load_groups(shared + slot * kStageBytes, weights, step * kStep, tile.output() / 8, full_barrier(shared, slot), once);
  }

  __device__ void fetch_x(int slot, int step, const Tile& tile) const {
    load_box(shared + slot * kStageBytes + kWeightBytes, x, step * kStep, tile.row * TILE_ROWS,
             full_barrier(shared, slot), usual);
  }

#if ROTARY
  // Cosines (half 0) or sines (1) of the tile's rows and pairs, as many bytes as x has in a step.
  __device__ void fetch_table(int slot, int half, const Tile& tile) const {
    barrier_expect(full_barrier(shared, slot), kRowBytes);
    load_box(shared + slot * kStageBytes, rotary.rope, half * (kHeadDim / 2) + tile.output() % kHeadDim,
             tile.row * TILE_ROWS, full_barrier(shared, slot), usual);
  }
#endif
};

// One thread: the weights of the first stages, which come while the kernel in front may still be making x.
__device__ __forceinline__ void produce_early(const Feed& feed, Schedule schedule) {
  Tile tile;
  if (!schedule.take(tile)) return;
  for (int i = 0; i < Feed::early(tile); ++i) {
    feed.expect(i);
    feed.fetch_weights(i, tile.first + i, tile);
  }
}

// The same thread: all else, of all tiles.
__device__ __forceinline__ void produce(const Feed& feed, Schedule schedule) {
  Place at;
  Tile tile;
  if (!schedule.take(tile)) return;
  if (!ROW_SCALE) overlap_wait();
  const int early = Feed::early(tile);
  for (int i = 0; i < early; ++i) {
    feed.fetch_x(i, tile.first + i, tile);
    at.advance();
  }
  tile.first += early;
  do {
    for (int step = tile.first; step < tile.last; ++step) {
      barrier_wait(empty_barrier(feed.shared, at.slot), at.parity ^ 1);
      feed.expect(at.slot);
      feed.fetch_weights(at.slot, step, tile);
      feed.fetch_x(at.slot, step, tile);
      at.advance();
    }
#if ROTARY
    for (int half = 0; half < 2 && feed.rotary.rotates(tile); ++half, at.advance()) {
      barrier_wait(empty_barrier(feed.shared, at.slot), at.parity ^ 1);
      feed.fetch_table(at.slot, half, tile);
    }
#endif
  } while (schedule.take(tile));
}

// One warp of a consumer: it has read the stage.
__device__ __forceinline__ void release(u32 shared, int slot) {
  if (threadIdx.x % kWarpSize == 0) barrier_arrive(empty_barrier(shared, slot));
}

// sums = this consumer's 64 rows of the weight tile times the tile of x. `meanwhile` is called while the last products
// run.
template <class Call>
__device__ __forceinline__ void accumulate(float (&sums)[TILE_ROWS / 2], u32 shared, int consumer, int steps,
                                           Place& at, Call meanwhile) {
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
  meanwhile();
  products_finish(sums);
  release(shared, before);
}

#if ROTARY
// Behind the products of a tile: takes its cosines and sines out of the ring, rotates and stores.
__device__ __forceinline__ void rotate_and_store(const float (&sums)[TILE_ROWS / 2], const Outputs& outputs, u32 shared,
                                                 const TensorMap& map, const Rotary& rotary, const Tile& tile,
                                                 int consumer, Place& at) {
  u32 tables[2] = {};
  int slots[2] = {};
  const bool rotates = rotary.rotates(tile);
  for (int half = 0; half < 2 && rotates; ++half, at.advance()) {
    barrier_wait(full_barrier(shared, at.slot), at.parity);
    slots[half] = at.slot;
    tables[half] = shared + at.slot * kStageBytes;
  }
  rotary_epilogue(sums, outputs, rotates, tables, shared + kOutAt + consumer * kOutBytes, map, rotary, tile, consumer);
  for (int half = 0; half < 2 && rotates; ++half) release(shared, slots[half]);  // behind a barrier of the epilogue
}
#endif

__device__ __forceinline__ void consume(u32 shared, float* scales, const TensorMap& map, const Rotary& rotary,
                                        const Operands& operands, Schedule schedule, int rows, int consumer) {
  const int thread = threadIdx.x % kGroupThreads;
  float sums[TILE_ROWS / 2];
  Place at;
  Tile tile, next;
  const float inverse = OUT8 ? inverse_of(operands.out_scale) : 1.0f;
  int scales_of = -1;
  bool first = true, more = schedule.take(tile);
  while (more) {
    const Outputs outputs(operands, tile, consumer, inverse);
    accumulate(sums, shared, consumer, tile.last - tile.first, at, [&] { more = schedule.take(next); });
    if (ROW_SCALE && first) overlap_wait();
    first = false;
#if ROTARY
    rotate_and_store(sums, outputs, shared, map, rotary, tile, consumer, at);
#else
    if (ROW_SCALE && tile.row != scales_of) {
      consumer_barrier(consumer);
      for (int i = thread; i < TILE_ROWS; i += kGroupThreads) {
        const int row = tile.row * TILE_ROWS + i;
        scales[i] = operands.scale == nullptr ? 1.0f : row < rows ? operands.scale[row] : 0.0f;
      }
      scales_of = tile.row;  // the epilogue's first barrier stands between these writes and their use
    }
    epilogue(sums, scales, outputs, shared + kOutAt + consumer * kOutBytes, map, operands, tile, rows, consumer);
#endif
    tile = next;
  }
  if (!OUT8 && is_storer(thread)) stores_done();
}

// The arguments of the epilogue: see Operands. With OVERLAP, no kernel that may still run makes what is read before the
// wait: weights, factor, bias, out_scale, and with ROW_SCALE x. So the kernel in front makes x, or with ROW_SCALE `scale`
// alone, and then lets this one begin only behind a wait of its own. K is covered by `steps` stages, each part has at
// least one. Boxes of the maps: weights kStep x 8 x (pairs: 2) x kColumns / 8 (pairs: / 16), x TILE_ROWS x kStep, both
// swizzled over 128 bytes; out kBoxMatrices * 8 x kOutColumns, over all of their bytes; key, value as out; rope as x. The
// grid has at most as many blocks as there are tiles times parts. With ROTARY parts is 1.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    gemm(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap x,
         const __grid_constant__ TensorMap out,
#if ROTARY
         const __grid_constant__ TensorMap key, const __grid_constant__ TensorMap value,
         const __grid_constant__ TensorMap rope,
#endif
         const float* scale, const float* factor, const bf16* bias, const float* out_scale, unsigned char* codes,
         int rows, int outputs, int column_tiles, int steps, int parts, int part_rows) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const Schedule schedule((rows + TILE_ROWS - 1) / TILE_ROWS, column_tiles, steps, parts);
#if ROTARY
  const Rotary rotary{key, value, rope, column_tiles};
#else
  const Rotary rotary;
#endif
  const Feed feed{shared, weights, x, rotary, streaming_policy(), usual_policy()};
  if (threadIdx.x == 0) {
    if (shared % 1024 != 0) __trap();  // or swizzle and descriptors disagree
    prefetch_map(weights);
    prefetch_map(x);
    prefetch_map(out);
    for (int slot = 0; slot < STAGES; ++slot) {
      barrier_init(full_barrier(shared, slot), 1);
      barrier_init(empty_barrier(shared, slot), kConsumerWarps);
    }
    barriers_publish();
    produce_early(feed, schedule);
  }
  __syncthreads();
  overlap_trigger();
  const int group = __shfl_sync(kAllLanes, threadIdx.x / kGroupThreads, 0);  // known to be one for a warp
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    if (threadIdx.x == 0) produce(feed, schedule);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    float* scales = reinterpret_cast<float*>(memory + kScalesAt) + (group - 1) * TILE_ROWS;
    consume(shared, scales, out, rotary, Operands{scale, factor, bias, out_scale, codes, outputs, part_rows}, schedule,
            rows, group - 1);
  }
}
