// Matrix product on Hopper's warpgroup instructions (sm_90a), with the step behind it in its epilogue:
//   out = epilogue(x @ weights^T),  x [rows, K], weights [outputs, K], out [rows, ...]; sums in float32.
//
// A tile is kColumns rows of `weights` (the instruction's M, 64 for each consumer warpgroup) by TILE_ROWS rows of x
// (its N, any multiple of 8): a count of rows that is no multiple of 128 wastes little. Both are streamed through a
// ring of stages. The grid is resident: each block works on tile after tile, the row tiles of one column tile at the
// same time, so that a weight is fetched from memory once. Where there are few tiles, several blocks share one, each
// with a part of K, and write parts that the next kernel adds.
//
// Two consumers are fed by one thread of a producer warpgroup, which hands them its registers. Three leave no room for
// another warpgroup: what a launch gives to four is less than the compiler wants for tall tiles, whatever they hand
// over. There the warp that is the last one to have read a stage asks for what comes into its slot next, so that no
// warp waits for a slot to become free, and a consumer may be ahead of another one by all stages of the ring.
//
// TILE_ROWS, STAGES, CONSUMERS (two or three warpgroups), PARTS that K is cut into. FP8: x and weights are E4M3 instead
// of bfloat16. GEGLU, GELU, OUT8, ROW_SCALE, CHUNKS: see gemm_epilogue.cuh. ROTARY, HEAD_CODES: see gemm_rotary.cuh.
// SHARE_X, SHARE_WEIGHTS: see gemm_sharing.cuh.
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
#ifndef HEAD_CODES
#define HEAD_CODES 0
#endif
#ifndef CONSUMERS
#define CONSUMERS 2
#endif
#ifndef PARTS
#define PARTS 1
#endif

constexpr int kGroupThreads = 128, kConsumers = CONSUMERS;
constexpr bool kHasProducer = kConsumers == 2;
constexpr int kThreads = kGroupThreads * (kConsumers + kHasProducer);
constexpr int kConsumerWarps = kConsumers * kGroupThreads / kWarpSize;
constexpr int kColumns = 64 * kConsumers;
constexpr bool kPairs = GEGLU || ROTARY;  // each thread has both weight rows of a pair: gate and up, or halves of a head
constexpr int kHeadDim = 256, kHeadTiles = kHeadDim / kColumns;  // with ROTARY: weight rows of a head, and its tiles
constexpr int kStepBytes = 128;  // of K in a stage: the width of the swizzle
constexpr int kStep = FP8 ? kStepBytes : kStepBytes / 2;
constexpr int kWeightBytes = kColumns * kStepBytes, kRowBytes = TILE_ROWS * kStepBytes;
constexpr int kStageBytes = kWeightBytes + kRowBytes;
constexpr int kOutColumns = kPairs ? 32 : 64;  // of out, in a consumer's part of a tile; with ROTARY of both halves each
// Tiles of few rows need few registers: the compiler gives to each thread what a launch of kRegisterThreads would have. The
// rest is for blocks of the kernels in front and behind, which stay or begin on the same multiprocessor meanwhile.
constexpr bool kIsLow = TILE_ROWS <= 128, kHandsOver = kHasProducer && !kIsLow;
constexpr int kRegisterThreads = kIsLow ? 640 : kThreads;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // where registers are handed over
static_assert(!HEAD_CODES || ROTARY, "codes of heads");
static_assert(kConsumers == 2 || kConsumers == 3 && TILE_ROWS <= 240, "registers for the sums of each consumer");
static_assert(TILE_ROWS % 8 == 0 && TILE_ROWS <= 256, "rows of a tile");
static_assert(kStageBytes % 1024 == 0, "swizzle atoms");
static_assert(STAGES >= 2, "one stage is fetched while another is read");
static_assert(PARTS == 1 || !ROTARY, "heads are rotated when they are complete");

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
#include "gemm_sharing.cuh"

// Shared memory: stages, then out of each consumer, then the scales of each consumer, then the barriers.
constexpr int kOutAt = STAGES * kStageBytes;
constexpr int kScalesAt = kOutAt + kConsumers * kOutBytes;
constexpr int kBarriersAt = kScalesAt + (ROW_SCALE ? kConsumers * TILE_ROWS * 4 : 0);

// The tiles of this block, one after the other. They are dealt in groups, one tile to each block of a cluster. A block
// has to find its first tile before it can ask for anything, and where it begins late nothing hides that: so nothing is
// divided by what the compiler does not know.
struct Schedule {
  u32 row_tiles, column_tiles, row_groups, row_inverse, steps, total, next;

  __device__ Schedule(u32 row_tiles, u32 column_tiles, u32 row_inverse, u32 steps)
      : row_tiles(row_tiles),
        column_tiles(column_tiles),
        row_groups((row_tiles + SHARE_WEIGHTS - 1) / SHARE_WEIGHTS),
        row_inverse(row_inverse),
        steps(steps),
        total(row_groups * ((column_tiles + SHARE_X - 1) / SHARE_X) * PARTS * kBlocks),
        next(blockIdx.x) {}

  // number / row_groups: see `inverse_of_divisor` in flashrt_ros/ops/cuda/gemm_tiling.py.
  __device__ __forceinline__ u32 by_row_groups(u32 number) const {
    return row_groups == 1 ? number : __umulhi(number, row_inverse);
  }

  __device__ bool take(Tile& tile) {
    if (next >= total) return false;
    const u32 group = next / kBlocks, weights = by_row_groups(group), part = weights % PARTS;
    tile.row = (group - weights * row_groups) * SHARE_WEIGHTS + row_in_cluster();
    tile.column = weights / PARTS * SHARE_X + column_in_cluster();
    tile.part = part;
    tile.first = part * steps / PARTS;
    tile.last = (part + 1) * steps / PARTS;
    next += gridDim.x;
    return true;
  }

  // Not a tile that only completes a group.
  __device__ __forceinline__ bool stores(const Tile& tile) const {
    return !kShares || static_cast<u32>(tile.row) < row_tiles && static_cast<u32>(tile.column) < column_tiles;
  }
};

// The tile that a block works on and, where consumers themselves ask for it, the one behind it; if there are such.
struct Work {
  Schedule schedule;  // of what is behind them
  Tile tile, next;
  bool has_tile, has_next = false;

  __device__ explicit Work(const Schedule& from) : schedule(from), tile{}, next{} {
    has_tile = schedule.take(tile);
    if (!kHasProducer) has_next = schedule.take(next);
  }

  __device__ __forceinline__ void advance() {
    if (kHasProducer) {
      has_tile = schedule.take(tile);
    } else {
      tile = next;
      has_tile = has_next;
      has_next = schedule.take(next);
    }
  }
};

// Where one side stands in the ring; full and empty barriers are u64 in shared memory. Without a producer a counter of
// the warps that have read the stage lies in the place of an empty barrier.
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

// Counts up to `last`, then from zero again; the count before. As ordered as an arrival and a wait: what is in front of
// it in other threads that have counted, is in front of what is behind it in this one.
__device__ __forceinline__ u32 count_around(u32 counter, u32 last) {
  u32 before;
  asm volatile("atom.acq_rel.cta.shared::cta.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(counter), "r"(last)
               : "memory");
  return before;
}

__device__ __forceinline__ void counter_init(u32 counter) {
  asm volatile("st.shared::cta.u32 [%0], 0;" ::"r"(counter) : "memory");
}

// What one thread streams into the ring.
struct Feed {
  u32 shared;
  const TensorMap &weights, &x;
  const Rotary& rotary;
  u64 once, usual;

  // Stages of a block's first tile that are free from the beginning.
  __device__ static int early(const Tile& tile) { return min(STAGES, tile.last - tile.first); }

  __device__ void expect(int slot) const { barrier_expect(full_barrier(shared, slot), kFetchedBytes); }

  __device__ void fetch(int slot, int step, const Tile& tile) const {
    expect(slot);
    fetch_weights(slot, step, tile);
    fetch_x(slot, step, tile);
  }

  // Without a producer: what comes into a slot that is free. `step` is counted from the steps of work.tile on, over all
  // tiles behind it.
  __device__ void refill(int slot, int step, const Work& work) const {
    if (step < work.tile.last) return fetch(slot, step, work.tile);
    step -= work.tile.last;
    Schedule schedule = work.schedule;
    Tile tile = work.next;
    for (bool more = work.has_next; more; more = schedule.take(tile)) {
      const int steps = tile.last - tile.first;
      if (step < steps) return fetch(slot, tile.first + step, tile);
      step -= steps;
    }
  }

  // Groups of 8 weight rows; with pairs of 8 rows and those 8 that form pairs with them.
  __device__ void fetch_weights(int slot, int step, const Tile& tile) const {
    const u32 to = shared + slot * kStageBytes + share_group() * kGroupBytes, full = full_barrier(shared, slot);
    const int group = tile.output() / 8 + share_group();
    if (SHARE_WEIGHTS > 1)
      load_groups_for(weight_sharers(), to, weights, step * kStep, group, full, once);
    else
      load_groups(to, weights, step * kStep, group, full, once);
  }

  __device__ void fetch_x(int slot, int step, const Tile& tile) const {
    const u32 to = shared + slot * kStageBytes + kWeightBytes + share_row() * kStepBytes;
    const u32 full = full_barrier(shared, slot);
    const int row = tile.row * TILE_ROWS + share_row();
    if (SHARE_X > 1)
      load_box_for(x_sharers(), to, x, step * kStep, row, full, usual);
    else
      load_box(to, x, step * kStep, row, full, usual);
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
      feed.fetch(at.slot, step, tile);
      at.advance();
    }
#if ROTARY
    // Blocks that share wait also if they need no table, or they could end before they have been told all.
    const bool rotates = schedule.stores(tile) && feed.rotary.rotates(tile);
    for (int half = 0; half < 2 && (kShares || rotates); ++half, at.advance()) {
      barrier_wait(empty_barrier(feed.shared, at.slot), at.parity ^ 1);
      if (rotates) feed.fetch_table(at.slot, half, tile);
    }
#endif
  } while (schedule.take(tile));
}

// Without a producer, one thread: x of the stages whose weights are on their way, and all of the others.
__device__ __forceinline__ void fill(const Feed& feed, const Work& work) {
  if (!work.has_tile) return;
  const int early = Feed::early(work.tile);
  for (int i = 0; i < early; ++i) feed.fetch_x(i, work.tile.first + i, work.tile);
  for (int i = early; i < STAGES; ++i) feed.refill(i, work.tile.first + i, work);
}

// One warp of a consumer: it has read the stage of that step of work.tile.
__device__ __forceinline__ void release(const Feed& feed, int slot, int step, const Work& work) {
  const u32 empty = empty_barrier(feed.shared, slot);
  if (kShares) {
    // Only what is waited for: no block ends before it has been told all.
    if (step + STAGES < work.tile.last + (ROTARY ? 2 : 0)) tell_sharers(empty);
    return;
  }
  if (threadIdx.x % kWarpSize != 0) return;
  if (kHasProducer) return barrier_arrive(empty);
  if (count_around(empty, kConsumerWarps - 1) == kConsumerWarps - 1) feed.refill(slot, step + STAGES, work);
}

// Waits for the stage at `at` and starts its products, this consumer's 64 rows of the weight tile times the tile of x.
// Where `accumulates` is known to be false, the registers of `sums` are free up to here.
__device__ __forceinline__ void start_step(float (&sums)[TILE_ROWS / 2], u32 shared, int consumer, const Place& at,
                                           bool accumulates) {
  const u32 weights = tile_start(shared + consumer * 64 * kStepBytes), x = tile_start(shared + kWeightBytes);
  const u32 stage = at.slot * kStageBytes;
  barrier_wait(full_barrier(shared, at.slot), at.parity);
  products_begin();
#pragma unroll
  for (u32 bytes = 0; bytes < kStepBytes; bytes += 32)
    multiply(sums, further(weights, stage + bytes), further(x, stage + bytes), accumulates || bytes > 0);
  products_commit();
}

// sums = the products of all steps of work.tile. With three consumers the first step stands in front of the loop: the
// compiler then knows that it begins at zero, and lets the epilogue of the tile before use the registers of its sums.
// Two consumers have registers enough. `meanwhile` is called while the last products run.
template <class Call>
__device__ __forceinline__ void accumulate(float (&sums)[TILE_ROWS / 2], const Feed& feed, int consumer,
                                           const Work& work, Place& at, Call meanwhile) {
  constexpr bool kFirstApart = !kHasProducer;
  const int first = work.tile.first, last = work.tile.last;
  int before = 0;
  if (kFirstApart) {
    start_step(sums, feed.shared, consumer, at, false);
    before = at.slot;
    at.advance();
  }
#pragma unroll 1
  for (int step = first + kFirstApart; step < last; ++step) {
    const bool accumulates = kFirstApart || step > first;
    start_step(sums, feed.shared, consumer, at, accumulates);
    if (accumulates) {
      products_wait<1>();
      release(feed, before, step - 1, work);
    }
    before = at.slot;
    at.advance();
  }
  meanwhile();
  products_finish(sums);
  release(feed, before, last - 1, work);
}

#if ROTARY
// Behind the products of a tile: takes its cosines and sines out of the ring, rotates and stores.
__device__ __forceinline__ void rotate_and_store(const float (&sums)[TILE_ROWS / 2], const Outputs& outputs,
                                                 const Feed& feed, const TensorMap& map, const Work& work,
                                                 int consumer, Place& at) {
  const u32 shared = feed.shared;
  const Rotary& rotary = feed.rotary;
  u32 tables[2] = {};
  int slots[2] = {};
  const bool rotates = rotary.rotates(work.tile);  // work.tile is stored
  for (int half = 0; half < 2 && rotates; ++half, at.advance()) {
    barrier_wait(full_barrier(shared, at.slot), at.parity);
    slots[half] = at.slot;
    tables[half] = shared + at.slot * kStageBytes;
  }
  rotary_epilogue(sums, outputs, rotates, tables, shared + kOutAt + consumer * kOutBytes, map, rotary, work.tile,
                  consumer);
  for (int half = 0; half < 2 && rotates && !kShares; ++half)  // behind a barrier of the epilogue
    release(feed, slots[half], work.tile.last + half, work);
}
#endif

__device__ __forceinline__ void consume(const Feed& feed, float* scales, const TensorMap& map,
                                        const Operands& operands, Work work, int rows, int consumer) {
  const int thread = threadIdx.x % kGroupThreads;
  const u32 out = feed.shared + kOutAt + consumer * kOutBytes;
  float sums[TILE_ROWS / 2];
  Place at;
  const float inverse = OUT8 ? inverse_of(operands.out_scale) : 1.0f;
  int scales_of = -1;
  bool first = true;
  cluster_wait();
  while (work.has_tile) {
    const Tile& tile = work.tile;
#if HEAD_CODES
    const Outputs outputs(operands, tile, consumer, feed.rotary.inverse(tile));
#else
    const Outputs outputs(operands, tile, consumer, inverse);
#endif
    Work behind = work;
    accumulate(sums, feed, consumer, work, at, [&] { behind.advance(); });
    cluster_arrive();
    if (ROW_SCALE && first) overlap_wait();
    first = false;
    if (kShares && !work.schedule.stores(tile)) break;
#if ROTARY
    rotate_and_store(sums, outputs, feed, map, work, consumer, at);
#else
    if (ROW_SCALE && tile.row != scales_of) {
      consumer_barrier(consumer);
      for (int i = thread; i < TILE_ROWS; i += kGroupThreads) {
        const int row = tile.row * TILE_ROWS + i;
        scales[i] = operands.scale == nullptr ? 1.0f : row < rows ? operands.scale[row] : 0.0f;
      }
      scales_of = tile.row;  // the epilogue's first barrier stands between these writes and their use
    }
    epilogue(sums, scales, outputs, out, map, operands, tile, rows, consumer);
#endif
    work = behind;
  }
  if (!OUT8 && is_storer(thread)) stores_read();
  cluster_wait();
}

// The arguments of the epilogue: see Operands. With OVERLAP, no kernel that may still run makes what is read before the
// wait: weights, factor, bias, out_scale, code_scales, and with ROW_SCALE x. So the kernel in front makes x, or with
// ROW_SCALE `scale` alone, and then lets this one begin only behind a wait of its own. K is covered by `steps` stages,
// each part has at least one. `row_inverse` belongs to the groups of row tiles. Boxes of the maps: weights kStep x 8 x
// (pairs: 2) x kShareGroups, x kShareRows x kStep, both swizzled over 128 bytes; out kBoxMatrices * 8 x kOutColumns,
// over all of their bytes; key, value as out; rope TILE_ROWS x 128 bytes, as x. The grid has at most as many blocks as
// there are tiles times parts, if blocks share anything exactly as many, with those that complete groups.
extern "C" __global__ void CLUSTER_SIZE __launch_bounds__(kRegisterThreads, 1)
    gemm(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap x,
         const __grid_constant__ TensorMap out,
#if ROTARY
         const __grid_constant__ TensorMap key, const __grid_constant__ TensorMap value,
         const __grid_constant__ TensorMap rope,
#endif
#if HEAD_CODES
         unsigned char* query_codes, unsigned char* key_codes, unsigned char* value_codes, const float* code_scales,
#endif
         const float* scale, const float* factor, const bf16* bias, const float* out_scale, unsigned char* codes,
         int rows, int outputs, int column_tiles, u32 row_inverse, int steps, int part_rows) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const Schedule schedule((static_cast<u32>(rows) + TILE_ROWS - 1) / TILE_ROWS, column_tiles, row_inverse, steps);
#if HEAD_CODES
  const Rotary rotary{key, value, rope, column_tiles, {query_codes, key_codes, value_codes, code_scales, rows}};
#elif ROTARY
  const Rotary rotary{key, value, rope, column_tiles, {}};
#else
  const Rotary rotary;
#endif
  const Feed feed{shared, weights, x, rotary, streaming_policy(), usual_policy()};
  if (threadIdx.x == 0) {
    if (shared % 1024 != 0) __trap();  // or swizzle and descriptors disagree
    prefetch_map(weights);
    prefetch_map(x);
    prefetch_map(out);
    if (OUT8) prefetch_line(out_scale);  // it was used a decision ago, and would come from memory behind the wait
    for (int slot = 0; slot < STAGES; ++slot) {
      barrier_init(full_barrier(shared, slot), 1);
      if (kHasProducer) barrier_init(empty_barrier(shared, slot), kSharers * kConsumerWarps);
      else counter_init(empty_barrier(shared, slot));
    }
    barriers_publish();
    if (SHARE_WEIGHTS == 1) produce_early(feed, schedule);
  }
  __syncthreads();
  cluster_arrive();
  overlap_trigger();
  const int group = __shfl_sync(kAllLanes, threadIdx.x / kGroupThreads, 0);  // known to be one for a warp
  const int consumer = group - kHasProducer;
  float* scales = reinterpret_cast<float*>(memory + kScalesAt) + consumer * TILE_ROWS;
  const Operands operands{scale, factor, bias, out_scale, codes, outputs, part_rows};
  if (!kHasProducer) {
    const Work work(schedule);
    if (!ROW_SCALE) overlap_wait();
    if (threadIdx.x == 0) fill(feed, work);
    __syncwarp();
    consume(feed, scales, out, operands, work, rows, consumer);
  } else if (group == 0) {
    if (kHandsOver) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    cluster_wait();
    if (SHARE_WEIGHTS > 1 && threadIdx.x == 0) produce_early(feed, schedule);
    if (threadIdx.x == 0) produce(feed, schedule);
    if (kShares) __syncwarp();
    cluster_arrive();
    cluster_wait();
  } else {
    if (kHandsOver) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    consume(feed, scales, out, operands, Work(schedule), rows, consumer);
  }
}
