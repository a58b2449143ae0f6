// The expert's sizes, what a launch knows, its producer of weights, and how a consumer keeps step with the grid.
#pragma once
#include "common.cuh"
#include "grid.cuh"

constexpr int kWidth = 1024, kHeads = 8, kHeadDim = 256, kInner = kHeads * kHeadDim, kHidden = 4096, kActions = 32;
constexpr int kBlocks = BLOCKS;
constexpr int kWarps = 16, kConsumers = kWarps * kWarpSize, kThreads = kConsumers + 4 * kWarpSize;
constexpr int kTile = 8, kChunk = 1024, kStageBytes = kTile * kChunk * 2;
constexpr int kProjectTiles = (kHeads + 2) * kHeadDim / kTile, kOutputTiles = kWidth / kTile,
              kHiddenTiles = kHidden / kTile;
constexpr int kSplits = 16, kKeys = 64;  // key ranges a head, and keys that one range may hold
constexpr int kModulations = 2 * LAYERS + 1;
constexpr int kPhasesPerLayer = 6, kPhasesPerStep = 2 + kPhasesPerLayer * LAYERS;
constexpr int kRowTiles = (ROWS + 15) / 16;
constexpr int M = kRowTiles < 2 ? kRowTiles : 2;  // tiles of sixteen rows that one pass over the weights takes
constexpr int kPasses = (kRowTiles + M - 1) / M;
constexpr int kPassRows = kPasses == 1 ? ROWS : M * 16;  // rows of a pass; the last one may have fewer
constexpr int kHeld = 8;                                 // stages that are held in the ring over all passes
constexpr int kBatch = 8 / M;                            // output tiles whose partial sums are held at once
constexpr int kGroups = kChunk / 32 / kWarps;            // groups of 32 columns that a warp takes of a chunk
constexpr int kSlice = kGroups * 32;
constexpr int kSums = M == 1 ? 2 : 1;     // independent accumulators, to hide the latency of the matrix unit
constexpr int kPartial = M * 16 * kTile;  // floats of one output tile
constexpr int kScoreStride = kKeys + 8;
constexpr int kScores = kRowTiles * 16 * kScoreStride;
constexpr float kEps = 1e-6f;
static_assert(kRowTiles <= 4, "at most 64 rows");
static_assert(STAGES >= kHeld, "a piece of work must fit into the ring");

enum Phase { kEnter, kLeave, kProject, kAttend, kCombine, kOutput, kGateUp, kDown };

__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }
constexpr int kValueBytes = kKeys * kHeadDim * 2;
constexpr int kScratchBytes = max_of(kWarps * kBatch * kPartial * 4, kValueBytes + 2 * kScores * 4 + kScores * 2);

struct Shared {
  unsigned char ring[STAGES * kStageBytes];
  unsigned char scratch[kScratchBytes];
  float modulation[2 * kWidth];
  float squares[M * 16][kWarps];
  u64 full[STAGES];
  u64 empty[STAGES];
};

// Everything a launch knows. All pointers are device memory.
struct Plan {
  const unsigned char *project, *output, *gate_up, *down;  // packed stages, all layers
  const float* enter_weight;                               // [kActions][kWidth]
  const float* enter_bias;                                 // [kWidth]
  const float* leave_weight;                               // [kActions][kWidth], times the step size
  const float* leave_bias;                                 // [kActions], times the step size
  const float* modulation;                                 // [steps][kModulations][3][kWidth]: scale, shift, gate
  const bf16* rope;                                        // [ROWS][kHeadDim]: cosines, sines
  const bf16 *prefix_key, *prefix_value;                   // [LAYERS][capacity][kHeadDim]
  const int* valid;                                        // rows of the prefix that exist
  const float* noise;                                      // [ROWS][kActions]
  float* actions;                                          // [ROWS][kActions], result
  // scratch
  bf16 *x, *query, *key, *value, *attended, *hidden;
  float *partial, *extremes;  // [kHeads][kSplits][ROWS][kHeadDim], [kHeads][kSplits][ROWS][2]
  u32* sync;                  // kSyncWords zeros; zeros again afterwards
  int capacity, first, last;
};

constexpr int kSyncStride = 32;  // one counter a cache line
constexpr int kGridCounter = 0, kHeadCounter = 1, kDoneCounter = 1 + kHeads;

struct Position {
  int step, layer;
  Phase phase;
};

__device__ __forceinline__ Position locate(int index) {
  Position p;
  p.step = index / kPhasesPerStep;
  const int inner = index % kPhasesPerStep;
  p.layer = (inner - 1) / kPhasesPerLayer;
  p.phase = inner == 0                    ? kEnter
            : inner == kPhasesPerStep - 1 ? kLeave
                                          : static_cast<Phase>(kProject + (inner - 1) % kPhasesPerLayer);
  return p;
}

constexpr int kUnderWay = 2;  // stages that a block fetches at once

using WeightRing = Ring<STAGES, kStageBytes>;

// -- producer ------------------------------------------------------------------------------------------------------------

__device__ void push_tiles(WeightRing& ring, const unsigned char* weights, int layer, int tiles, int stages,
                           u64 policy) {
  const unsigned char* base = weights + static_cast<u64>(layer) * tiles * stages * kStageBytes;
  for (int tile = blockIdx.x; tile < tiles; tile += kBlocks)
    for (int s = 0; s < stages; ++s)
      ring.push<kUnderWay>(base + static_cast<u64>(tile * stages + s) * kStageBytes, policy);
}

__device__ void produce(const Plan& plan, WeightRing ring) {
  const u64 policy = evict_first_policy();
  for (int index = plan.first; index < plan.last; ++index) {
    const Position at = locate(index);
    if (at.phase == kProject) push_tiles(ring, plan.project, at.layer, kProjectTiles, 1, policy);
    if (at.phase == kOutput) push_tiles(ring, plan.output, at.layer, kOutputTiles, kInner / kChunk, policy);
    if (at.phase == kGateUp) push_tiles(ring, plan.gate_up, at.layer, kHiddenTiles, 2, policy);
    if (at.phase == kDown) push_tiles(ring, plan.down, at.layer, kOutputTiles, kHidden / kChunk, policy);
  }
}

// -- consumer: what every phase uses -------------------------------------------------------------------------------------

struct Consumer {
  const Plan& plan;
  Shared& shared;
  WeightRing ring;
  int index;                                 // of the running phase
  u32 barriers = 0;                          // grid barriers passed in this launch
  u32 attentions = 0;                        // attend phases run in this launch
  int prefix;                                // rows of the prefix that exist
  int block, thread, warp, lane, quad, row;  // lane = row * 4 + quad
  int first_row = 0;                         // of the running pass

  __device__ Consumer(const Plan& plan_, Shared& shared_, WeightRing ring_)
      : plan(plan_), shared(shared_), ring(ring_), index(plan_.first), prefix(*plan_.valid) {}

  // Who this thread is, read anew for every phase: the compiler would otherwise compute addresses of all phases in
  // advance, and has no registers for them.
  __device__ __forceinline__ void identify() {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    block = blockIdx.x;
    __builtin_assume(thread >= 0 && thread < kConsumers);
    __builtin_assume(block >= 0 && block < kBlocks);
    warp = thread / kWarpSize;
    lane = thread % kWarpSize;
    quad = lane % 4;
    row = lane / 4;
  }

  __device__ __forceinline__ void block_barrier() { consumer_barrier<kConsumers>(); }

  // Before the first read of what the phase before wrote, and of the next `stages` stages.
  __device__ __forceinline__ void begin(int stages) {
    if (index == plan.first) {
      overlap_wait();
    } else if (thread == 0) {
      wait_until(plan.sync + kGridCounter * kSyncStride, barriers * kBlocks);
    }
    ready(stages);
  }

  // Before the first read of the next `stages` stages; also a barrier.
  __device__ __forceinline__ void ready(int stages) {
    if (thread == kWarpSize) ring.wait(stages);
    block_barrier();
  }

  // After the last write of a phase, which read the next `stages` stages; scratch is free afterwards. The stages are
  // released last: a refill in front of the fence would delay it.
  __device__ __forceinline__ void end(int stages) {
    block_barrier();
    if (thread == 0) {
      if (index + 1 < plan.last) add_release(plan.sync + kGridCounter * kSyncStride, 1);
      ring.release(stages);
    }
    ring.advance(stages);
    ++barriers;
  }

  // The next `stages` stages were read, `following` are wanted; also a barrier.
  __device__ __forceinline__ void exchange(int stages, int following) {
    block_barrier();
    if (thread == 0) ring.release(stages);
    ring.advance(stages);
    ready(following);
  }

  __device__ __forceinline__ const float* modulation(int step, int norm) const {
    return plan.modulation + static_cast<u64>(step * kModulations + norm) * 3 * kWidth;
  }

  // The row that this lane loads for a half of a row tile. Rows behind the last repeat it: their results are not used.
  __device__ __forceinline__ int real_row(int tile, int half) const {
    return min(first_row + tile * 16 + half * 8 + row, ROWS - 1);
  }

  __device__ __forceinline__ float* partials() { return reinterpret_cast<float*>(shared.scratch); }
};
