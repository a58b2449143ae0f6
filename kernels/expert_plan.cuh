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
constexpr int kModulations = 2 * LAYERS + 1;
constexpr int kPhasesPerLayer = 5, kPhasesPerStep = kPhasesPerLayer * LAYERS + 1;
constexpr float kEps = 1e-6f;
static_assert(kClusters >= 1 && kClusters <= 16, "every block owns outputs of every product");
static_assert(ROWS >= 1 && ROWS <= 64, "rows of the chunk");

enum Phase { kProject, kAttend, kOutput, kGateUp, kDown, kLeave };

// -- products ------------------------------------------------------------------------------------------------------------

// A product's outputs come in tiles of eight. Neighbouring tiles belong to one cluster; each of its blocks multiplies all
// of them with its eighth of the inputs, and a tile's owner in the cluster adds the eight parts.
constexpr int kTile = 8, kStageTiles = 8;
// Inputs come in chunks: a tile's part of one is eight matrices of eight inputs by eight outputs, as the matrix
// instructions read them from shared memory, or the codes of as many narrow weights (see expert_weights.cuh).
constexpr int kChunk = 64;
__host__ __device__ constexpr int chunk_bytes(int bits) {
  return bits == 4 ? kChunk * kTile / 2 + kChunk / 16 * kTile : kChunk * kTile * bits / 8;
}
// Rows of the operand, in whole matrices. A row's part of a chunk is 128 bytes, in which groups of eight inputs are swizzled as
// the matrix instructions expect.
constexpr int kRowBlocks = ceil_div(ROWS, 8), kOperandRows = kRowBlocks * 8, kOperandBytesOfChunk = kOperandRows * kChunk * 2;
// Few rows: every product is so short that its latency counts, not its work.
constexpr bool kFewRows = kOperandRows <= 16;

template <int TILES, int INPUTS, int UNIT, int PLACE, int BITS>
struct Product {  // UNIT: tiles that must have one owner; PLACE: in a Consumer's tables; BITS: of a weight
  static constexpr int kTiles = TILES, kUnit = UNIT, kPlace = PLACE;
  static constexpr int kBits = BITS, kChunkBytes = chunk_bytes(BITS);        // of a tile's part of a chunk
  static constexpr int kSlice = INPUTS / kRanks, kChunks = kSlice / kChunk;  // inputs of a block
  static constexpr int kMost = ceil_div(TILES / UNIT, kClusters) * UNIT;     // tiles of a cluster
  static constexpr int kSlots = ceil_div(kMost / UNIT, kRanks) * UNIT;       // tiles of an owner
  static_assert(kSlice % kChunk == 0 && TILES % UNIT == 0, "whole chunks and units");
  static_assert(kChunks == 2 || kChunks == 4 || kChunks == 8, "a power of two");
  static_assert(BITS == 16 || BITS == 8 || BITS == 4, "bfloat16, E4M3 or NVFP4");

  static __device__ __forceinline__ int first(int cluster) { return cluster * (TILES / UNIT) / kClusters * UNIT; }
  static __device__ __forceinline__ int count(int cluster) { return first(cluster + 1) - first(cluster); }
  // A stage holds one chunk of eight tiles, or two, four or eight chunks of the fewer tiles that are left over.
  static __device__ __forceinline__ int log2_chunks_in_stage(int tiles) {
    constexpr int kMostLog2 = kChunks == 2 ? 1 : kChunks == 4 ? 2 : 3;
    return min(kMostLog2, tiles > 4 ? 0 : tiles > 2 ? 1 : tiles > 1 ? 2 : 3);
  }
  static __device__ __forceinline__ int chunks_in_stage(int tiles) { return 1 << log2_chunks_in_stage(tiles); }
  static __device__ __forceinline__ int stages(int tiles) {
    const int left = tiles % kStageTiles;
    return tiles / kStageTiles * kChunks + (left > 0 ? kChunks >> log2_chunks_in_stage(left) : 0);
  }
};

using Project = Product<(kHeads + 2) * kHeadDim / kTile, kWidth, 1, 0, PROJECT_BITS>;
using Output = Product<kWidth / kTile, kInner, 1, 1, OUTPUT_BITS>;
using GateUp = Product<2 * kHidden / kTile, kWidth, 2, 2, GATE_UP_BITS>;
using Down = Product<kWidth / kTile, kHidden, 1, 1, DOWN_BITS>;  // tiles as those of Output
constexpr int kStageBytes = kStageTiles * max_of(max_of(Project::kChunkBytes, Output::kChunkBytes),
                                                 max_of(GateUp::kChunkBytes, Down::kChunkBytes));
// At a stage, always: one for each chunk in it and each warp that uses it, and as many more as there are fewer of those.
constexpr int kArrivals = kStageTiles;

// -- attention -----------------------------------------------------------------------------------------------------------

// A cluster takes some of the ROWS * kHeads queries, each of its blocks an eighth of the keys, at most KEYS.
constexpr int kQueries = ROWS * kHeads, kMostQueries = ceil_div(kQueries, kClusters);
constexpr int kQueryTiles = ceil_div(kMostQueries, 16), kDims = kHeadDim / kRanks;
constexpr int kScoreStride = KEYS + 8;
static_assert(KEYS % 16 == 0 && KEYS <= 128, "a warp weighs four keys a lane");

// -- shared memory -------------------------------------------------------------------------------------------------------

// Other blocks may be ahead and send already. So the parts of neighbours lie apart: those of project and output in X, of
// attend and down in Y, of gate_up and leave in V, the memory of attention's values.
// Parts of a product are rounded to bfloat16: half as much to exchange.
constexpr int kPartFloats = kRanks * ROWS * kTile / 2;  // of one output tile
constexpr int kSquares = kRanks * ROWS;
constexpr int kAttendFloats = kRanks * kMostQueries * (kDims + 2);
constexpr int kProjectFloats = Project::kSlots * kPartFloats + kSquares;
constexpr int kGateUpFloats = GateUp::kSlots * kPartFloats + kSquares;
constexpr int kLeaveFloats = kRanks * ROWS * kActions + kSquares;
constexpr int kSumFloats = max_of(Output::kSlots, Down::kSlots) * kPartFloats;
constexpr int kFloatsX = max_of(kProjectFloats, kSumFloats);
constexpr int kFloatsY = max_of(kAttendFloats, kSumFloats);
constexpr int kTradedFloats = kFewRows ? kWarps * kWarpSize * 4 : 4;
constexpr int kValueStride = kHeadDim * 2 + 16, kQueryStride = kHeadDim * 2 + 64;  // bytes, free of bank conflicts
constexpr int kFloatsV = max_of(KEYS * kValueStride / 4, max_of(kGateUpFloats, kLeaveFloats));

constexpr int kQueriesHeld = kQueryTiles * 16;
constexpr int kScoreBytes = kQueriesHeld * kScoreStride * 6;  // scores as float, weights as bfloat16
constexpr int kOperandBytes = max_of(Down::kChunks * kOperandBytesOfChunk, kQueriesHeld * kQueryStride + kScoreBytes);

constexpr int kPlaces = 4;
// Where the parts of one phase go, which barrier counts them, and whether that barrier's turn is odd.
struct Place {
  float* parts;
  int barrier;
  u32 parity;
};

struct Shared {
  unsigned char ring[STAGES * kStageBytes];
  alignas(1024) unsigned char operands[kOperandBytes];
  alignas(16) float values[kFloatsV];  // as bfloat16; later parts of gate_up or leave
  alignas(16) float x[kFloatsX];
  alignas(16) float y[kFloatsY];
  alignas(16) float actions[ROWS * kActions];  // in front of the running step; a warp reads and writes those of its rows only
  alignas(16) float traded[kTradedFloats];  // sums of pairs of warps that share the inputs
  u64 full[STAGES], empty[STAGES], values_full, parts[kPlaces];  // `parts`: phases that may be under way at once
  u32 claimed;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host computes the same layout");

// -- what a launch knows -------------------------------------------------------------------------------------------------

// What output and down make: [copy][row][column] as float, in four copies that take turns (see reset_sums).
constexpr int kSumCopies = 4;

// Offsets in the exchanged memory, in words; every buffer but the sums has two copies (see grid.cuh). The residual lies
// there between the launches of single phases only.
constexpr int kResidual = 0, kSumWords = kResidual + 2 * ROWS * kWidth, kQuery = kSumWords + kSumCopies * ROWS * kWidth,
              kKey = kQuery + ROWS * kInner, kValue = kKey + ROWS * kHeadDim, kAttended = kValue + ROWS * kHeadDim,
              kHiddenWords = kAttended + ROWS * kInner;

// All pointers are device memory.
struct Plan {
  const unsigned char *project, *output, *gate_up, *down;  // packed, all layers
  const float* enter_weight;                               // [kActions][kWidth]
  const float* enter_bias;                                 // [kWidth]
  const float* leave_weight;                               // [kWidth][kActions], times the step size
  const float* leave_bias;                                 // [steps][kActions], times the step size, with the shift's part
  const float* modulation;                                 // [steps][kModulations][3][kWidth]: scale, shift (unused), gate
  const float* project_shift;                              // [steps][LAYERS][outputs]: what the norm's shift gives
  const float* gate_up_shift;
  const bf16* rope;                                        // [ROWS][kHeadDim]: cosines, sines
  const bf16 *prefix_key, *prefix_value;                   // [LAYERS][capacity][kHeadDim]
  const int* valid;                                        // rows of the prefix that exist
  const float* noise;                                      // [ROWS][kActions]
  float* actions;                                          // [ROWS][kActions], result
  u32* words;                                              // exchanged memory, kUnwritten at first
  u32* sync;                                               // four zeros at first; used are two: parities, blocks that have left
  int capacity, steps, phase;  // `phase`: the one of this launch, unless the grid is resident
  // [LAYERS][outputs]: what the sums of a product's codes are multiplied by; null where its weights are bfloat16.
  const float *project_factor, *output_factor, *gate_up_factor, *down_factor;
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
  p.layer = inner / kPhasesPerLayer;
  p.phase = p.layer == LAYERS ? kLeave : static_cast<Phase>(inner % kPhasesPerLayer);
  return p;
}

__device__ __forceinline__ int first_phase(const Plan& plan) { return kResident ? 0 : plan.phase; }
__device__ __forceinline__ int end_phase(const Plan& plan) {
  return kResident ? plan.steps * kPhasesPerStep : plan.phase + 1;
}

// -- producer ------------------------------------------------------------------------------------------------------------

constexpr int kBytesUnderWay = 32768;  // that a block fetches at once: with fewer the memory idles
constexpr int kUnderWay = min_of(kBytesUnderWay / kStageBytes, STAGES);
// Warps begin with different stages, so that one may wait for a stage far ahead of what is claimed, and of what is on its
// way.
template <typename P>
constexpr int kFirstWait = (min_of(ceil_div(P::kMost, kStageTiles), ceil_div(2 * kWarps, kStageTiles)) - 1) * P::kChunks +
                           P::kChunks / 2 + 1;
constexpr int kFarthest =
    max_of(max_of(kFirstWait<Project>, kFirstWait<Output>), max_of(kFirstWait<GateUp>, kFirstWait<Down>)) + kUnderWay;
using WeightRing = Ring<STAGES, kStageBytes, kFarthest>;

// Visits what this block needs of one product, stage by stage: weights [layer][rank][chunk][tile][P::kChunkBytes].
template <typename P, typename Visitor>
__device__ __forceinline__ void visit_product(Visitor& visitor, const unsigned char* weights, int piece, int cluster) {
  const int tiles = P::count(cluster);
  const unsigned char* from =
      weights + (static_cast<u64>(piece) * P::kChunks * P::kTiles + P::first(cluster)) * P::kChunkBytes;
  for (int tile = 0; tile < tiles; tile += kStageTiles, from += kStageTiles * P::kChunkBytes) {
    const int count = min(kStageTiles, tiles - tile), each = P::chunks_in_stage(count), bytes = count * P::kChunkBytes;
    for (int chunk = 0; chunk < P::kChunks; chunk += each) {
      visitor.begin(each * bytes);
      for (int i = 0; i < each; ++i)
        visitor.piece(i * bytes, from + static_cast<u64>(chunk + i) * P::kTiles * P::kChunkBytes, bytes);
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
constexpr int kCachedBytes = 98304;  // ahead: more than twice as many are slower than none
constexpr u32 kCachedStages = kCachedBytes / kStageBytes;
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

  __device__ __forceinline__ Work(int first_, int queries_, int start_, int count_, int prefix_)
      : first(first_), queries(queries_), start(start_), count(count_), prefix(prefix_) {}
  __device__ __forceinline__ Work(int cluster, int rank, int prefix_) : prefix(prefix_) {
    first = cluster * kQueries / kClusters;
    queries = (cluster + 1) * kQueries / kClusters - first;
    const int total = prefix + ROWS, each = ceil_div(ceil_div(total, kRanks), 8) * 8;
    start = rank * each;
    count = max(0, min(each, total - start));
  }
};

constexpr int kFenceBarrier = 1, kConsumerBarrier = 2, kResetBarrier = 3, kValueBarrier = 4;

// One warp makes the resets of a layer visible to the grid before its block writes the sums of `down`, while the consumers
// wait for hidden values. Whoever reads a buffer that was reset in this layer has read sums of this `down` before.
__device__ __forceinline__ void fence_resets(const Plan& plan) {
  if (!kResident) return;  // the end of a launch does it
  for (int i = 0; i < plan.steps * LAYERS; ++i) {
    named_barrier<kResetBarrier, kConsumers + kWarpSize>();
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    named_barrier<kFenceBarrier, kConsumers + kWarpSize>();
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

// Another warp fetches the values for every attention as soon as their memory is free: behind gate_up of the layer before, or
// behind leave.
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

constexpr int kRowsEach = ceil_div(ROWS, kWarps);  // rows of the chunk that one warp has

// A warp has some rows of the chunk, and of those the columns that its block multiplies: four a lane.
struct Consumer {
  const Plan& plan;
  Shared& shared;
  WeightRing ring;
  u32 stages = 0;              // of the ring, used up
  u32 parity;                  // bits 0 and 1: copy of this decision's first sums; bit 2: of the layers' buffers
  float4 residual[kRowsEach];  // every cluster has all of it, and computes the same bits
  float4 scale, gate;          // of the next norm, and of the sum that is added in front of it
  u32 firsts, counts;          // first tile and number of tiles of this cluster, ten bits a product
  u32 queries, keys;           // see work()
  int prefix;                  // rows of the prefix that exist
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

  // What this block has of each product and of attention: worked out once and hidden from the compiler, which would do it
  // again in every phase.
  __device__ __forceinline__ void know(int prefix_) {
    prefix = prefix_;
    identify();
    firsts = Project::first(cluster) | Output::first(cluster) << 10 | GateUp::first(cluster) << 20;
    counts = Project::count(cluster) | Output::count(cluster) << 10 | GateUp::count(cluster) << 20;
    const Work all(cluster, rank, prefix);
    queries = all.first | all.queries << 16;
    keys = all.start | all.count << 16;
    asm volatile("" : "+r"(firsts), "+r"(counts), "+r"(queries), "+r"(keys));
  }
  template <typename P>
  __device__ __forceinline__ int first() const { return firsts >> 10 * P::kPlace & (P::kPlace < 2 ? 1023 : 4095); }
  template <typename P>
  __device__ __forceinline__ int count() const { return counts >> 10 * P::kPlace & (P::kPlace < 2 ? 1023 : 4095); }
  __device__ __forceinline__ Work work() const {
    return Work{static_cast<int>(queries & 0xffff), static_cast<int>(queries >> 16), static_cast<int>(keys & 0xffff),
                static_cast<int>(keys >> 16), prefix};
  }
  // How many of its cluster's tiles this block owns.
  template <typename P>
  __device__ __forceinline__ int owned() const {
    const int units = count<P>() / P::kUnit;
    return (units + kRanks - 1 - rank) / kRanks * P::kUnit;
  }

  __device__ __forceinline__ void block_barrier() const { named_barrier<kConsumerBarrier, kConsumers>(); }

  // Before the first read of what another launch wrote.
  __device__ __forceinline__ void begin() const {
    if (!kResident) overlap_wait();
  }

  // Nobody needs the parts in the memory of the values.
  __device__ __forceinline__ void free_values() const { named_barrier_arrive<kValueBarrier, kConsumers + kWarpSize>(); }

  // Behind the last reset of a layer.
  __device__ __forceinline__ void resets_done() const {
    if (kResident) named_barrier_arrive<kResetBarrier, kConsumers + kWarpSize>();
  }
  // All consumers, and the fence behind those resets.
  __device__ __forceinline__ void fence_barrier() const {
    if (kResident) {
      named_barrier<kFenceBarrier, kConsumers + kWarpSize>();
    } else {
      block_barrier();
    }
  }

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

  // Where the parts of the running phase go. Barrier 0 counts those of project and output, 1 those of attend and gate_up, 2
  // those of down, 3 those of leave. A launch of one phase starts to count anew.
  __device__ __forceinline__ Place place(const Position& at) const {
    constexpr u32 kOdd = kResident ? 1 : 0;
    switch (at.phase) {
      case kProject: return {shared.x, 0, 0};
      case kAttend: return {shared.y, 1, 0};
      case kOutput: return {shared.x, 0, kOdd};
      case kGateUp: return {shared.values, 1, kOdd};
      case kDown: return {shared.y, 2, layers(at) & kOdd};
      default: return {shared.values, 3, at.step & kOdd};
    }
  }

  // Sums are counted: those of output of the first layer are number 0. This is the number of those that the running phase
  // adds to the residual (project, gate_up, leave) or makes (output, down).
  __device__ __forceinline__ int sums(const Position& at) const {
    const int made = at.phase == kOutput || at.phase == kGateUp ? 0 : at.phase == kDown ? 1 : -1;
    return static_cast<int>(parity & 3) + 2 * layers(at) + made;
  }
  __device__ __forceinline__ u32* sum_words(int number) const {
    return plan.words + kSumWords + (number & kSumCopies - 1) * ROWS * kWidth;
  }

  // Copy of the buffers that are written once a layer.
  __device__ __forceinline__ int layer_copy(const Position& at) const {
    return (layers(at) + static_cast<int>(parity >> 2)) & 1;
  }
  // `width` bfloat16 a row, from word `offset` on.
  __device__ __forceinline__ bf16* rows(int offset, int width, int copy) const {
    return reinterpret_cast<bf16*>(plan.words + offset) + copy * ROWS * width;
  }

  __device__ __forceinline__ int row_of_warp(int i) const { return warp + i * kWarps; }
  // Address of this lane's action of a row.
  __device__ __forceinline__ float* action(int row_) const { return shared.actions + row_ * kActions + lane; }
  // The first of this lane's four columns.
  __device__ __forceinline__ int column() const { return rank * Project::kSlice + lane * 4; }

  __device__ __forceinline__ const float* modulation(int step, int norm) const {
    return plan.modulation + static_cast<u64>(step * kModulations + norm) * 3 * kWidth + column();
  }
  // Fetches the scale of a norm that comes later, and the gate of the sum in front of it: they come from far, and
  // nobody should wait for them.
  __device__ __forceinline__ void fetch_norm(int step, int norm) {
    const float* from = modulation(step, norm);
    scale = *reinterpret_cast<const float4*>(from);
    if (norm > 0) gate = *reinterpret_cast<const float4*>(from - kWidth);
  }
};
