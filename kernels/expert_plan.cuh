// The expert's sizes, its memory, its producer of weights, and how a consumer keeps step with the grid.
#pragma once
#include "common.cuh"
#include "grid.cuh"

__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int kWidth = 1024, kHeads = 8, kHeadDim = 256, kInner = kHeads * kHeadDim, kHidden = 4096, kActions = 32;
constexpr int kClusters = CLUSTERS, kBlocks = kClusters * kRanks;
constexpr int kWarps = 16, kConsumers = kWarps * kWarpSize, kThreads = kConsumers + 4 * kWarpSize;
constexpr int kModulations = 2 * LAYERS + 1;
constexpr int kPhasesPerLayer = 5, kPhasesPerStep = 2 + kPhasesPerLayer * LAYERS;
constexpr float kEps = 1e-6f;
static_assert(kClusters >= 1 && kClusters <= 16, "every block owns outputs of every product");
static_assert(ROWS >= 1 && ROWS <= 64, "rows of the chunk");

enum Phase { kEnter, kLeave, kProject, kAttend, kOutput, kGateUp, kDown };

// -- products ------------------------------------------------------------------------------------------------------------

// A product's outputs come in tiles of eight. Neighbouring tiles belong to one cluster; each of its blocks multiplies all
// of them with its eighth of the inputs, and a tile's owner in the cluster adds the eight parts.
constexpr int kTile = 8, kStageBytes = 8192;
constexpr int kRowTiles = ceil_div(ROWS + 1, 16);  // of sixteen rows: the chunk, and the shift of the norm behind it

constexpr int kTilesAtOnce = min_of(kRowTiles, 2);  // row tiles that a warp takes at once
constexpr int kRowGroups = ceil_div(kRowTiles, kTilesAtOnce);

template <int TILES, int INPUTS, int UNIT>
struct Product {                                                        // UNIT: tiles that must have one owner
  static constexpr int kTiles = TILES, kUnit = UNIT;
  static constexpr int kSlice = INPUTS / kRanks, kGroups = kSlice / 32;  // inputs of a block, in groups of 32
  static constexpr int kTileBytes = kSlice * kTile * 2;
  static constexpr int kShared = kStageBytes / kTileBytes;  // tiles in a stage
  static constexpr int kMost = ceil_div(TILES / UNIT, kClusters) * UNIT;  // tiles of a cluster
  static constexpr int kSlots = ceil_div(kMost / UNIT, kRanks) * UNIT;    // tiles of an owner
  static constexpr int kStride = kSlice * 2 + 64;  // bytes between two rows in shared memory, free of bank conflicts
  static_assert(kStageBytes % kTileBytes == 0 && TILES % UNIT == 0, "whole tiles in a stage");

  static __device__ __forceinline__ int first(int cluster) { return cluster * (TILES / UNIT) / kClusters * UNIT; }
  static __device__ __forceinline__ int count(int cluster) { return first(cluster + 1) - first(cluster); }
  static __device__ __forceinline__ int stages(int cluster) { return (count(cluster) + kShared - 1) / kShared; }
};

using Project = Product<(kHeads + 2) * kHeadDim / kTile, kWidth, 1>;
using Output = Product<kWidth / kTile, kInner, 1>;
using GateUp = Product<2 * kHidden / kTile, kWidth, 2>;
constexpr int kHalves = 2;  // pieces in which the inputs of `down` come
using Down = Product<kWidth / kTile, kHidden / kHalves, 1>;  // one of them
constexpr int kArrivals = GateUp::kShared * kRowGroups;  // shares of a stage: one for each tile and group of rows
static_assert(Project::kShared == GateUp::kShared, "no stage has more shares than arrivals");

// -- attention -----------------------------------------------------------------------------------------------------------

// A cluster takes some of the ROWS * kHeads queries, each of its blocks an eighth of the keys, at most KEYS.
constexpr int kQueries = ROWS * kHeads, kMostQueries = ceil_div(kQueries, kClusters);
constexpr int kQueryTiles = ceil_div(kMostQueries, 16), kDims = kHeadDim / kRanks;
constexpr int kScoreStride = KEYS + 8;
static_assert(KEYS % 16 == 0 && KEYS <= 128, "eight keys a warp");

// -- shared memory -------------------------------------------------------------------------------------------------------

// Other blocks may be one phase ahead, or one round of a phase, and send already. So the parts of neighbours lie apart: in
// X, Y, X, V, Y for the phases of a layer, where V is the memory of attention's values. A product in several rounds
// alternates between its place and another.
constexpr int kPartRows = ROWS + 1;                                   // of a product behind a norm
constexpr int kPartFloats = kRanks * kPartRows * kTile;               // of one output tile
constexpr int kSquares = kRanks * ROWS;
constexpr int kAttendFloats = kRanks * kMostQueries * (kDims + 2);
constexpr int kRoundSlots = kRowTiles > 1 ? 2 : 12;                   // output tiles of an owner in one round, at most
template <typename P>
constexpr int kRoundsOf = ceil_div(P::kSlots, kRoundSlots) | 1;       // odd, so that the buffers still alternate
template <typename P>
constexpr int kSlotsOf = ceil_div(P::kSlots / P::kUnit, kRoundsOf<P>) * P::kUnit;
constexpr int kProjectFloats = kSlotsOf<Project> * kPartFloats + kSquares;
constexpr int kGateUpFloats = kSlotsOf<GateUp> * kPartFloats + kSquares;
constexpr int kSumFloats = max_of(Output::kSlots, Down::kSlots) * kRanks * ROWS * kTile;
constexpr int kFloatsX = max_of(kProjectFloats, kSumFloats);
constexpr int kFloatsY = max_of(max_of(kAttendFloats, kSumFloats), kRoundsOf<Project> > 1 ? kProjectFloats : 0);
constexpr int kValueStride = kHeadDim * 2 + 16;  // bytes between two value rows, free of bank conflicts
constexpr int kFloatsV = max_of(KEYS * kValueStride / 4, kGateUpFloats);
constexpr bool kSecondInV = kRoundsOf<GateUp> == 1 || 2 * kGateUpFloats <= kFloatsV;  // of gate_up's alternating places
constexpr int kFloatsZ = kSecondInV ? 4 : kGateUpFloats;

constexpr int kRowsHeld = kRowTiles * 16, kQueriesHeld = kQueryTiles * 16;
constexpr int kQueryStride = kHeadDim * 2 + 64;
constexpr int kScoreBytes = kQueriesHeld * kScoreStride * 6;  // scores as float, weights as bfloat16
constexpr int kHalvesHeld = kRowTiles == 1 ? kHalves : 1;  // of the inputs of `down`
constexpr int kHalfBytes = kRowsHeld * Down::kStride;
constexpr int kOperandBytes = max_of(kHalvesHeld * kHalfBytes, kQueriesHeld * kQueryStride + kScoreBytes);

// Where the parts of one round go, which barrier counts them, and the barrier's phase in that round.
struct Place {
  float* parts;
  int barrier;
  u32 parity;
};

struct Shared {
  unsigned char ring[STAGES * kStageBytes];
  float values[kFloatsV];  // as bfloat16; later parts of gate_up
  unsigned char operands[kOperandBytes];
  float x[kFloatsX], y[kFloatsY], z[kFloatsZ];
  float sink[kWarps];
  u64 full[STAGES], empty[STAGES], values_full, parts[3];  // `parts`: rounds that may be under way at once
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host computes the same layout");

// -- what a launch knows -------------------------------------------------------------------------------------------------

// Offsets in the exchanged memory, in words; every buffer has two copies (see grid.cuh).
constexpr int kResidual = 0, kStepActions = kResidual + 2 * ROWS * kWidth,
              kQuery = kStepActions + 2 * ROWS * kActions, kKey = kQuery + ROWS * kInner,
              kValue = kKey + ROWS * kHeadDim, kAttended = kValue + ROWS * kHeadDim,
              kHiddenWords = kAttended + ROWS * kInner;

// All pointers are device memory.
struct Plan {
  const unsigned char *project, *output, *gate_up, *down;  // packed, all layers
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
  u32* words;                                              // exchanged memory, kUnwritten at first
  u32* sync;                                               // three zeros at first: parities, blocks that have left
  int capacity, steps, first, last;  // either all phases or one
};

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

// -- producer ------------------------------------------------------------------------------------------------------------

#ifndef UNDER_WAY
#define UNDER_WAY 4
#endif
constexpr int kUnderWay = UNDER_WAY < STAGES ? UNDER_WAY : STAGES;  // stages that a block fetches at once
using WeightRing = Ring<STAGES, kStageBytes>;

// Streams what this block needs of one product: weights [layer][rank][tile][group 32][output 8][quad 4][8]; `piece`
// counts layers and ranks (and halves).
template <typename P>
__device__ __forceinline__ void push_product(const WeightRing& ring, u32& number, const unsigned char* weights,
                                             int piece, int cluster, u64 policy) {
  const u64 tile = static_cast<u64>(piece) * P::kTiles + P::first(cluster);
  const unsigned char* from = weights + tile * P::kTileBytes;
  for (int left = P::count(cluster) * P::kTileBytes; left > 0; left -= kStageBytes, from += kStageBytes)
    ring.push<kUnderWay>(number++, from, left < kStageBytes ? left : kStageBytes, policy);
}

__device__ __forceinline__ void produce(const Plan& plan, const WeightRing& ring) {
  const u64 policy = evict_first_policy();
  const int cluster = blockIdx.x / kRanks, rank = cluster_rank();
  u32 number = 0;
  for (int index = plan.first; index < plan.last; ++index) {
    const Position at = locate(index);
    const int piece = at.layer * kRanks + rank;
    if (at.phase == kProject) push_product<Project>(ring, number, plan.project, piece, cluster, policy);
    if (at.phase == kOutput) push_product<Output>(ring, number, plan.output, piece, cluster, policy);
    if (at.phase == kGateUp) push_product<GateUp>(ring, number, plan.gate_up, piece, cluster, policy);
    if (at.phase == kDown)
      for (int half = 0; half < kHalves; ++half)
        push_product<Down>(ring, number, plan.down, piece * kHalves + half, cluster, policy);
  }
}

// -- what one warp does for all ------------------------------------------------------------------------------------------

struct Work {
  int first, queries;        // of a cluster
  int start, count, prefix;  // keys of a block; keys before the chunk's own

  __device__ __forceinline__ Work(int cluster, int rank, int prefix_) : prefix(prefix_) {
    first = cluster * kQueries / kClusters;
    queries = (cluster + 1) * kQueries / kClusters - first;
    const int total = prefix + ROWS, each = ceil_div(ceil_div(total, kRanks), 8) * 8;
    start = rank * each;
    count = max(0, min(each, total - start));
  }
};

constexpr int kPhaseBarrier = 1, kConsumerBarrier = 2, kResetBarrier = 3, kValueBarrier = 4;

// One warp makes every reset of a phase visible to the grid before its block writes the values of the next phase, while
// the consumers wait for theirs.
__device__ __forceinline__ void fence_resets(const Plan& plan) {
  for (int index = plan.first; index < plan.last; ++index) {
    named_barrier<kPhaseBarrier, kConsumers + kWarpSize>();
    named_barrier<kResetBarrier, kConsumers + kWarpSize>();
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
  }
}

// Starts to copy the prefix's value rows of this block for one layer.
__device__ __forceinline__ void copy_prefix_values(const Plan& plan, Shared& shared, int layer, u64 policy) {
  const Work work(blockIdx.x / kRanks, cluster_rank(), *plan.valid);
  const int rows = max(0, min(work.count, work.prefix - work.start)), lane = threadIdx.x % kWarpSize;
  if (lane == 0) mbarrier_expect(&shared.values_full, rows * kHeadDim * 2);
  __syncwarp();
  const bf16* from = plan.prefix_value + (static_cast<u64>(layer) * plan.capacity + work.start) * kHeadDim;
  for (int row = lane; row < rows; row += kWarpSize)
    bulk_copy(reinterpret_cast<unsigned char*>(shared.values) + row * kValueStride, from + row * kHeadDim, kHeadDim * 2,
              &shared.values_full, policy);
}

// Another warp fetches the values for every attention as soon as their memory is free: behind gate_up of the layer before.
__device__ __forceinline__ void fetch_values(const Plan& plan, Shared& shared) {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  const bool whole = plan.last - plan.first > 1;
  const int count = whole ? plan.steps * LAYERS : locate(plan.first).phase == kAttend;
  for (int i = 0; i < count; ++i) {
    if (i > 0) named_barrier<kValueBarrier, kConsumers + kWarpSize>();
    copy_prefix_values(plan, shared, whole ? i % LAYERS : locate(plan.first).layer, policy);
  }
  if (whole || locate(plan.first).phase == kGateUp) named_barrier<kValueBarrier, kConsumers + kWarpSize>();
}

// -- consumer: what every phase uses -------------------------------------------------------------------------------------

struct Consumer {
  const Plan& plan;
  Shared& shared;
  WeightRing ring;
  int index;         // of the running phase
  u32 stages = 0;    // of the ring, used up
  u32 parity;        // bit 0: of the residual's first copy in this decision; bit 1: of the layers' buffers
  float2 residual;   // the two values that this thread owns (see owned_*)
  int prefix;        // rows of the prefix that exist
  int cluster, rank, thread, warp, lane, quad, row;  // lane = row * 4 + quad

  __device__ __forceinline__ Consumer(const Plan& plan_, Shared& shared_, const WeightRing& ring_)
      : plan(plan_), shared(shared_), ring(ring_), index(plan_.first) {}

  // Who this thread is, read anew for every phase: the compiler would otherwise compute addresses of all phases in
  // advance, and has no registers for them.
  __device__ __forceinline__ void identify() {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    __builtin_assume(thread >= 0 && thread < kConsumers);
    cluster = blockIdx.x / kRanks;
    rank = blockIdx.x % kRanks;
    warp = thread / kWarpSize;
    lane = thread % kWarpSize;
    quad = lane % 4;
    row = lane / 4;
  }

  // All consumers have prepared the operands of a phase, and what was reset in the phase before is visible to the grid.
  __device__ __forceinline__ void phase_barrier() { named_barrier<kPhaseBarrier, kConsumers + kWarpSize>(); }
  __device__ __forceinline__ void block_barrier() { named_barrier<kConsumerBarrier, kConsumers>(); }

  // Before the first read of what another phase wrote.
  __device__ __forceinline__ void begin() {
    if (index == plan.first) overlap_wait();
  }

  // After the last store of a phase.
  __device__ __forceinline__ void end() { named_barrier_arrive<kResetBarrier, kConsumers + kWarpSize>(); }

  // One thread: the next round of `place` brings `bytes`.
  __device__ __forceinline__ void expect(const Place& place, u32 bytes) {
    if (thread == 0) mbarrier_expect(shared.parts + place.barrier, bytes);
  }

  // All parts of the next round of `place` have come.
  __device__ __forceinline__ void await(const Place& place) {
    mbarrier_wait(shared.parts + place.barrier, place.parity);
  }

  __device__ __forceinline__ bool single() const { return plan.last - plan.first == 1; }
  __device__ __forceinline__ int layers(const Position& at) const { return at.step * LAYERS + at.layer; }

  // Where the parts of a round of the running phase go. Barriers 0, 1 and 2 count, in this order of rounds: those of
  // project and output; of project (every second), attend and gate_up; of gate_up (every second) and down. A launch of one
  // phase starts to count anew.
  __device__ __forceinline__ Place place(const Position& at, int round = 0) {
    constexpr int kP = kRoundsOf<Project>, kG = kRoundsOf<GateUp>;
    constexpr int kUses[3] = {(kP + 1) / 2 + 1, kP / 2 + 1 + (kG + 1) / 2, kG / 2 + 1};
    const bool second = round % 2 > 0;
    int barrier = 0, before = 0;  // rounds of the same barrier in this layer
    float* parts = shared.x;
    if (at.phase == kProject && second) barrier = 1, parts = shared.y;
    if (at.phase == kAttend) barrier = 1, parts = shared.y, before = kP / 2;
    if (at.phase == kOutput) before = (kP + 1) / 2;
    if (at.phase == kGateUp) barrier = 1, parts = shared.values, before = kP / 2 + 1;
    if (at.phase == kGateUp && second)
      barrier = 2, parts = kSecondInV ? shared.values + kGateUpFloats : shared.z, before = 0;
    if (at.phase == kDown) barrier = 2, parts = shared.y, before = kG / 2;
    const int uses = single() ? 0 : layers(at) * kUses[barrier] + before;
    return {parts, barrier, static_cast<u32>(uses + round / 2) & 1};
  }

  // Copy 0 or 1 of the residual that was written last before, or is written in, the running phase.
  __device__ __forceinline__ int residual_copy(const Position& at) const {
    const int uses = at.step * kModulations + (at.phase == kEnter     ? 0
                                               : at.phase == kProject || at.phase == kAttend ? 2 * at.layer
                                               : at.phase == kLeave   ? 2 * LAYERS
                                               : at.phase == kDown    ? 2 * at.layer + 2
                                                                      : 2 * at.layer + 1);
    return (uses + static_cast<int>(parity & 1)) & 1;
  }

  // Copy of the buffers that are written once a layer.
  __device__ __forceinline__ int layer_copy(const Position& at) const {
    return (at.step * LAYERS + at.layer + static_cast<int>(parity >> 1 & 1)) & 1;
  }

  __device__ __forceinline__ float* residual_rows(int copy) const {
    return reinterpret_cast<float*>(plan.words + kResidual + copy * ROWS * kWidth);
  }
  __device__ __forceinline__ float* step_actions(int copy) const {
    return reinterpret_cast<float*>(plan.words + kStepActions + copy * ROWS * kActions);
  }
  // `width` bfloat16 a row, from word `offset` on.
  __device__ __forceinline__ bf16* rows(int offset, int width, int copy) const {
    return reinterpret_cast<bf16*>(plan.words + offset) + copy * ROWS * width;
  }

  __device__ __forceinline__ const float* modulation(int step, int norm) const {
    return plan.modulation + static_cast<u64>(step * kModulations + norm) * 3 * kWidth;
  }

  // The pair of residual values that this thread owns: which row, and which column (negative: none).
  __device__ __forceinline__ int owned_row() const { return thread / 4 % ROWS; }
  __device__ __forceinline__ int owned_slot() const { return thread / (ROWS * 4); }
  __device__ __forceinline__ int owned_column() const {
    const int tile = owned_slot() * kRanks + rank;
    return tile < Output::count(cluster) ? (Output::first(cluster) + tile) * kTile + thread % 4 * 2 : -1;
  }
};
static_assert(Output::kSlots * ROWS * 4 <= kConsumers, "a thread owns at most one pair of residual values");
