// The expert's sizes, its memory, its producer of weights, and how a consumer keeps step with the grid.
#pragma once
#include "common.cuh"
#include "grid.cuh"

__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int kWidth = 1024, kHeads = 8, kHeadDim = 256, kInner = kHeads * kHeadDim, kHidden = 4096, kActions = 32;
constexpr int kClusters = CLUSTERS, kBlocks = kClusters * kRanks;
// With fewer warps each has more registers; what does not fit into them costs hundreds of cycles at every use.
constexpr int kWarps = ROWS <= 32 ? 12 : 16, kConsumers = kWarps * kWarpSize, kThreads = kConsumers + 4 * kWarpSize;
constexpr int kTeamWarps = 4, kTeams = kWarps / kTeamWarps;  // a team multiplies up to eight tiles of outputs at once
constexpr int kModulations = 2 * LAYERS + 1;
constexpr int kPhasesPerLayer = 5, kPhasesPerStep = 2 + kPhasesPerLayer * LAYERS;
constexpr float kEps = 1e-6f;
static_assert(kClusters >= 1 && kClusters <= 16, "every block owns outputs of every product");
static_assert(ROWS >= 1 && ROWS <= 64, "rows of the chunk");

enum Phase { kEnter, kLeave, kProject, kAttend, kOutput, kGateUp, kDown };

// -- products ------------------------------------------------------------------------------------------------------------

// A product's outputs come in tiles of eight. Neighbouring tiles belong to one cluster; each of its blocks multiplies all
// of them with its eighth of the inputs, and a tile's owner in the cluster adds the eight parts.
constexpr int kTile = 8, kTeamTiles = 8;
// Inputs come in chunks: a tile's part of one is eight matrices of eight inputs by eight outputs, as the matrix
// instructions read them from shared memory.
constexpr int kChunk = 64, kChunkBytes = kChunk * kTile * 2, kStageBytes = kTeamTiles * kChunkBytes;
// Rows of the operand: the chunk, and the shift of the norm behind it, in whole matrices. A row's part of a chunk is 128
// bytes, in which groups of eight inputs are swizzled as the matrix instructions expect.
constexpr int kOperandRows = ceil_div(ROWS + 1, 8) * 8, kOperandBytesOfChunk = kOperandRows * kChunk * 2;

template <int TILES, int INPUTS, int UNIT>
struct Product {  // UNIT: tiles that must have one owner
  static constexpr int kTiles = TILES, kUnit = UNIT;
  static constexpr int kSlice = INPUTS / kRanks, kChunks = kSlice / kChunk;  // inputs of a block
  static constexpr int kMost = ceil_div(TILES / UNIT, kClusters) * UNIT;     // tiles of a cluster
  static constexpr int kSlots = ceil_div(kMost / UNIT, kRanks) * UNIT;       // tiles of an owner
  static_assert(kSlice % kChunk == 0 && TILES % UNIT == 0, "whole chunks and units");
  static_assert(kChunks == 2 || kChunks == 4 || kChunks == 8, "a power of two");

  static __device__ __forceinline__ int first(int cluster) { return cluster * (TILES / UNIT) / kClusters * UNIT; }
  static __device__ __forceinline__ int count(int cluster) { return first(cluster + 1) - first(cluster); }
  // A stage holds one chunk of eight tiles, or two, four or eight chunks of the fewer tiles that are left over.
  static __device__ __forceinline__ int log2_chunks_in_stage(int tiles) {
    constexpr int kMostLog2 = kChunks == 2 ? 1 : kChunks == 4 ? 2 : 3;
    return min(kMostLog2, tiles > 4 ? 0 : tiles > 2 ? 1 : tiles > 1 ? 2 : 3);
  }
  static __device__ __forceinline__ int chunks_in_stage(int tiles) { return 1 << log2_chunks_in_stage(tiles); }
  static __device__ __forceinline__ int stages(int cluster) {
    const int tiles = count(cluster), left = tiles % kTeamTiles;
    return tiles / kTeamTiles * kChunks + (left > 0 ? kChunks >> log2_chunks_in_stage(left) : 0);
  }
};

using Project = Product<(kHeads + 2) * kHeadDim / kTile, kWidth, 1>;
using Output = Product<kWidth / kTile, kInner, 1>;
using GateUp = Product<2 * kHidden / kTile, kWidth, 2>;
using Down = Product<kWidth / kTile, kHidden, 1>;
constexpr int kArrivals = kTeamTiles;  // at a stage, at most: one for each chunk in it and each warp that uses it

// -- attention -----------------------------------------------------------------------------------------------------------

// A cluster takes some of the ROWS * kHeads queries, each of its blocks an eighth of the keys, at most KEYS.
constexpr int kQueries = ROWS * kHeads, kMostQueries = ceil_div(kQueries, kClusters);
constexpr int kQueryTiles = ceil_div(kMostQueries, 16), kDims = kHeadDim / kRanks;
constexpr int kScoreStride = KEYS + 8;
static_assert(KEYS % 16 == 0 && KEYS <= 128, "a warp weighs four keys a lane");

// -- shared memory -------------------------------------------------------------------------------------------------------

// Other blocks may be one phase ahead and send already. So the parts of neighbours lie apart: in X, Y, X, V, Y for the
// phases of a layer, where V is the memory of attention's values.
constexpr int kPartRows = ROWS + 1;  // of a product behind a norm
// Parts of such a product are rounded to bfloat16, as its result will be: half as much to exchange.
constexpr int kPartFloats = kRanks * kPartRows * kTile / 2;  // of one output tile
constexpr int kSquares = kRanks * ROWS;
constexpr int kAttendFloats = kRanks * kMostQueries * (kDims + 2);
constexpr int kProjectFloats = Project::kSlots * kPartFloats + kSquares;
constexpr int kGateUpFloats = GateUp::kSlots * kPartFloats + kSquares;
constexpr int kSumFloats = max_of(Output::kSlots, Down::kSlots) * kRanks * ROWS * kTile;
constexpr int kFloatsX = max_of(kProjectFloats, kSumFloats);
constexpr int kFloatsY = max_of(kAttendFloats, kSumFloats);
constexpr int kPartialFloats = ROWS < 16 ? kTeams * Down::kMost * ROWS * kTile : 4;
constexpr int kValueStride = kHeadDim * 2 + 16, kQueryStride = kHeadDim * 2 + 64;  // bytes, free of bank conflicts
constexpr int kFloatsV = max_of(KEYS * kValueStride / 4, kGateUpFloats);

constexpr int kQueriesHeld = kQueryTiles * 16;
constexpr int kScoreBytes = kQueriesHeld * kScoreStride * 6;  // scores as float, weights as bfloat16
constexpr int kOperandBytes = max_of(Down::kChunks * kOperandBytesOfChunk, kQueriesHeld * kQueryStride + kScoreBytes);

// Where the parts of one phase go, which barrier counts them, and whether that barrier's turn is odd.
struct Place {
  float* parts;
  int barrier;
  u32 parity;
};

struct Shared {
  unsigned char ring[STAGES * kStageBytes];
  alignas(1024) unsigned char operands[kOperandBytes];
  alignas(16) float values[kFloatsV];  // as bfloat16; later parts of gate_up
  alignas(16) float x[kFloatsX];
  alignas(16) float y[kFloatsY];
  alignas(16) float partial[kPartialFloats];  // sums of the teams, where they share the inputs
  u64 full[STAGES], empty[STAGES], values_full, parts[3];  // `parts`: phases that may be under way at once
  u32 claimed;
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
  int capacity, steps, phase;  // `phase`: the one of this launch, unless the grid is resident
};

// The grid is resident: one launch runs all phases. Otherwise a launch runs one.
constexpr bool kResident = RESIDENT;

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

__device__ __forceinline__ int first_phase(const Plan& plan) { return kResident ? 0 : plan.phase; }
__device__ __forceinline__ int end_phase(const Plan& plan) {
  return kResident ? plan.steps * kPhasesPerStep : plan.phase + 1;
}

// -- producer ------------------------------------------------------------------------------------------------------------

constexpr int kUnderWay = min_of(4, STAGES);  // stages that a block fetches at once
// Teams take turns, so that one may wait for a stage far ahead of what another still uses.
constexpr int kFarthest = max_of(kTeams * Project::kChunks, Down::kChunks + 1);
using WeightRing = Ring<STAGES, kStageBytes, kFarthest>;

// Visits what this block needs of one product, stage by stage: weights [layer][rank][chunk][tile][8][output 8][8].
template <typename P, typename Visitor>
__device__ __forceinline__ void visit_product(Visitor& visitor, const unsigned char* weights, int piece, int cluster) {
  const int tiles = P::count(cluster);
  const unsigned char* from =
      weights + (static_cast<u64>(piece) * P::kChunks * P::kTiles + P::first(cluster)) * kChunkBytes;
  for (int tile = 0; tile < tiles; tile += kTeamTiles, from += kTeamTiles * kChunkBytes) {
    const int count = min(kTeamTiles, tiles - tile), each = P::chunks_in_stage(count), bytes = count * kChunkBytes;
    for (int chunk = 0; chunk < P::kChunks; chunk += each) {
      visitor.begin(each * bytes);
      for (int i = 0; i < each; ++i)
        visitor.piece(i * bytes, from + static_cast<u64>(chunk + i) * P::kTiles * kChunkBytes, bytes);
    }
  }
}

template <typename Visitor>
__device__ __forceinline__ void visit_weights(const Plan& plan, Visitor& visitor) {
  const int cluster = blockIdx.x / kRanks, rank = cluster_rank();
  for (int index = first_phase(plan); index < end_phase(plan); ++index) {
    const Position at = locate(index);
    const int piece = at.layer * kRanks + rank;
    if (at.phase == kProject) visit_product<Project>(visitor, plan.project, piece, cluster);
    if (at.phase == kOutput) visit_product<Output>(visitor, plan.output, piece, cluster);
    if (at.phase == kGateUp) visit_product<GateUp>(visitor, plan.gate_up, piece, cluster);
    if (at.phase == kDown) visit_product<Down>(visitor, plan.down, piece, cluster);
  }
}

// One thread fetches the weights into the ring.
struct Producer {
  const WeightRing& ring;
  u64 policy = evict_first_policy();
  u32 number = 0, next = 0;

  __device__ __forceinline__ void begin(u32 bytes) {
    number = next++;
    ring.claim<kUnderWay>(number, bytes);
  }
  __device__ __forceinline__ void piece(u32 offset, const unsigned char* from, u32 bytes) {
    ring.fetch(number, offset, from, bytes, policy);
  }
};

// Another one runs ahead of it and fetches what the ring has no room for into the second-level cache: the memory keeps
// busy while the blocks exchange, and what comes in a hurry has a short way.
constexpr u32 kCachedStages = 12;  // more than twice as many are slower than none
struct Prefetcher {
  const WeightRing& ring;
  u32 next = 0;
  bool late = false;  // the producer is there already

  __device__ __forceinline__ void begin(u32) {
    u32 claimed = ring.claimed();
    while (next >= claimed + kCachedStages) {
      __nanosleep(100);
      claimed = ring.claimed();
    }
    late = next++ < claimed;
  }
  __device__ __forceinline__ void piece(u32, const unsigned char* from, u32 bytes) const {
    if (!late) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
  }
};

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
  for (int index = first_phase(plan); index < end_phase(plan); ++index) {
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
  const Position only = locate(plan.phase);
  const int count = kResident ? plan.steps * LAYERS : only.phase == kAttend;
  for (int i = 0; i < count; ++i) {
    if (i > 0) named_barrier<kValueBarrier, kConsumers + kWarpSize>();
    copy_prefix_values(plan, shared, kResident ? i % LAYERS : only.layer, policy);
  }
  if (kResident || only.phase == kGateUp) named_barrier<kValueBarrier, kConsumers + kWarpSize>();
}

// -- consumer: what every phase uses -------------------------------------------------------------------------------------

struct Consumer {
  const Plan& plan;
  Shared& shared;
  WeightRing ring;
  u32 stages = 0;    // of the ring, used up
  u32 parity;        // bit 0: of the residual's first copy in this decision; bit 1: of the layers' buffers
  float2 residual;   // the two values that this thread owns (see owned_*)
  float4 scale, shift;  // of the next norm, for the columns of this lane
  int prefix;        // rows of the prefix that exist
  int cluster, rank, thread, warp, lane, quad, row;  // lane = row * 4 + quad

  __device__ __forceinline__ Consumer(const Plan& plan_, Shared& shared_, const WeightRing& ring_)
      : plan(plan_), shared(shared_), ring(ring_) {}

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
  __device__ __forceinline__ void phase_barrier() const { named_barrier<kPhaseBarrier, kConsumers + kWarpSize>(); }
  __device__ __forceinline__ void block_barrier() const { named_barrier<kConsumerBarrier, kConsumers>(); }

  // Before the first read of what another launch wrote.
  __device__ __forceinline__ void begin() const {
    if (!kResident) overlap_wait();
  }

  // After the last store of a phase.
  __device__ __forceinline__ void end() { named_barrier_arrive<kResetBarrier, kConsumers + kWarpSize>(); }

  // One thread: the next turn of `place` brings `bytes`.
  __device__ __forceinline__ void expect(const Place& place, u32 bytes) {
    if (thread == 0) mbarrier_expect(shared.parts + place.barrier, bytes);
  }

  // All parts of that turn of `place` have come. One warp looks, since many that do slow down those that still multiply.
  __device__ __forceinline__ void await(const Place& place) {
    if (warp == kWarps - 1) mbarrier_wait(shared.parts + place.barrier, place.parity);
    block_barrier();
  }

  __device__ __forceinline__ int layers(const Position& at) const { return at.step * LAYERS + at.layer; }

  // Where the parts of the running phase go. Barrier 0 counts those of project, output; 1 those of attend, gate_up; 2 those
  // of down. A launch of one phase starts to count anew.
  __device__ __forceinline__ Place place(const Position& at) const {
    constexpr u32 kSecond = kResident ? 1 : 0;
    switch (at.phase) {
      case kProject: return {shared.x, 0, 0};
      case kAttend: return {shared.y, 1, 0};
      case kOutput: return {shared.x, 0, kSecond};
      case kGateUp: return {shared.values, 1, kSecond};
      default: return {shared.y, 2, kResident ? layers(at) & 1 : 0u};
    }
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
  // Fetches scale and shift of a norm that comes later: they come from far, and nobody should wait for them.
  __device__ __forceinline__ void fetch_norm(int step, int norm) {
    const float* from = modulation(step, norm) + rank * Project::kSlice + lane * 4;
    scale = *reinterpret_cast<const float4*>(from);
    shift = *reinterpret_cast<const float4*>(from + kWidth);
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
