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
// A launch gives 128 registers to each of 512 threads. The warps that fetch need fewer: 128 threads give back 48 each,
// of which the 384 that multiply take 16 each. With sixteen warps that multiply all are needed as they are.
constexpr bool kMovesRegisters = kWarps == 12;
constexpr int kRegistersThatFetch = 80, kRegistersThatMultiply = 144;
constexpr int kModulations = 2 * LAYERS + 1;
// Few rows: every product is so short that its latency counts, not its work. Then hidden values stay inside their
// cluster, and gate_up and down are one phase (see expert_hidden.cuh).
constexpr bool kFewRows = ROWS <= 16;
constexpr int kPhasesPerLayer = kFewRows ? 4 : 5, kPhasesPerStep = kPhasesPerLayer * LAYERS + 1;
constexpr float kEps = 1e-6f;
static_assert(kClusters >= 1 && kClusters <= 16, "every block owns outputs of every product");
static_assert(ROWS >= 1 && ROWS <= 64, "rows of the chunk");

enum Phase { kProject, kAttend, kOutput, kGateUp, kDown, kLeave };

// -- products ---------------------------------------------------------------------------------------------------------

// A product's outputs come in tiles of eight. Neighbouring tiles belong to one cluster; each of its blocks multiplies
// all of them with its eighth of the inputs, and a tile's owner in the cluster adds the eight parts.
constexpr int kTile = 8, kStageTiles = 8;
// Inputs come in chunks: a tile's part of one is eight matrices of eight inputs by eight outputs, as the matrix
// instructions read them from shared memory, or the codes of as many narrow weights (see expert_weights.cuh).
constexpr int kChunk = 64;
__host__ __device__ constexpr int chunk_bytes(int bits) {
  return bits == 4 ? kChunk * kTile / 2 + kChunk / 16 * kTile : kChunk * kTile * bits / 8;
}
// Rows of the operand, in whole matrices. A row's part of a chunk is 128 bytes, in which groups of eight inputs are
// swizzled as the matrix instructions expect.
constexpr int kRowBlocks = ceil_div(ROWS, 8), kOperandRows = kRowBlocks * 8;
constexpr int kOperandBytesOfChunk = kOperandRows * kChunk * 2;
// Of few rows, those behind the first eight lie in each chunk as lanes need them: 16 bytes a lane for two steps of
// sixteen inputs, [pair of steps][row][quad][step][group of eight inputs][two inputs]. As matrices they would be read
// whole, also where they do not exist. Which quad lies where depends on pair of steps and chunk, for the banks: bits 4
// and 5 of an address.
constexpr int kMoreRowsOffset = 8 * kChunk * 2, kMoreRowsPair = 8 * kChunk;
__host__ __device__ constexpr int more_rows_swizzle(int chunk, int pair_of_steps) {
  return (pair_of_steps + chunk % 2 * 2) * 16;
}

// UNIT: tiles that must have one owner; TOGETHER: those that must have one cluster; PLACE: in a Consumer's tables;
// BITS: of a weight.
template <int TILES, int INPUTS, int UNIT, int TOGETHER, int PLACE, int BITS>
struct Product {
  static constexpr int kTiles = TILES, kUnit = UNIT, kPlace = PLACE;
  static constexpr int kBits = BITS, kChunkBytes = chunk_bytes(BITS);        // of a tile's part of a chunk
  static constexpr int kSlice = INPUTS / kRanks, kChunks = kSlice / kChunk;  // inputs of a block
  static constexpr int kMost = ceil_div(TILES / TOGETHER, kClusters) * TOGETHER;  // tiles of a cluster
  static constexpr int kLeast = TILES / TOGETHER / kClusters * TOGETHER;
  static constexpr bool kIsWhole = TOGETHER % kStageTiles == 0;  // no stage has fewer tiles than others
  static constexpr int kSlots = ceil_div(kMost / UNIT, kRanks) * UNIT;  // tiles of an owner
  static_assert(kSlice % kChunk == 0 && TILES % TOGETHER == 0 && TOGETHER % UNIT == 0, "whole chunks and units");
  static_assert(kChunks == 2 || kChunks == 4 || kChunks == 8, "a power of two");
  static_assert(BITS == 16 || BITS == 8 || BITS == 4, "bfloat16, E4M3 or NVFP4");

  static __device__ __forceinline__ int first(int cluster) {
    return cluster * (TILES / TOGETHER) / kClusters * TOGETHER;
  }
  static __device__ __forceinline__ int count(int cluster) { return first(cluster + 1) - first(cluster); }
  // A stage holds one chunk of eight tiles, or two, four or eight chunks of the fewer tiles that are left over.
  static __host__ __device__ constexpr int log2_chunks_in_stage(int tiles) {
    return min_of(kChunks == 2 ? 1 : kChunks == 4 ? 2 : 3, tiles > 4 ? 0 : tiles > 2 ? 1 : tiles > 1 ? 2 : 3);
  }
  static __host__ __device__ constexpr int stages(int tiles) {
    const int left = tiles % kStageTiles;
    return tiles / kStageTiles * kChunks + (left > 0 ? kChunks >> log2_chunks_in_stage(left) : 0);
  }
};

// Hidden values of a cluster come in blocks of 32 if they are the inputs of its share of `down`.
constexpr int kHiddenBlock = 32;
using Project = Product<(kHeads + 2) * kHeadDim / kTile, kWidth, 1, 1, 0, PROJECT_BITS>;
using Output = Product<kWidth / kTile, kInner, 1, 1, 1, OUTPUT_BITS>;
using GateUp = Product<2 * kHidden / kTile, kWidth, 2, kFewRows ? 2 * kHiddenBlock / kTile : 2, 2, GATE_UP_BITS>;
using Down = Product<kWidth / kTile, kHidden, 1, 1, 1, DOWN_BITS>;  // with many rows; tiles as those of Output
constexpr int kStageBytes = kStageTiles * max_of(max_of(Project::kChunkBytes, Output::kChunkBytes),
                                                 max_of(GateUp::kChunkBytes, Down::kChunkBytes));
// At a stage, always: one for each chunk in it and each warp that uses it, and as many more as there are fewer of
// those.
constexpr int kArrivals = kStageTiles;

// -- hidden values of few rows ----------------------------------------------------------------------------------------

// A cluster's share of `down`: its hidden values are the inputs, in blocks of 32, and each of its blocks has an eighth
// of the outputs, sixteen tiles. Weights of a block of inputs fill a stage: [group of four tiles][step 2], and what the
// stage of another product holds for a tile and four steps, it holds for a step and four tiles.
constexpr int kHiddenBlocks = kHidden / kHiddenBlock, kMostHiddenBlocks = ceil_div(kHiddenBlocks, kClusters);
constexpr int kTilesOfBlock = kHiddenBlock / kTile * 2;            // of gate_up
constexpr int kDownGroups = 4, kDownTeams = kWarps / kDownGroups;  // warps of one group; they share the inputs
constexpr int kDownStageBytes = kStageTiles * chunk_bytes(DOWN_BITS);
constexpr int kOutputsOfRank = kWidth / kRanks;
// Eight values of a row are 16 bytes, [block of 32][eight 4][row]; the stride is for the banks.
constexpr int kHiddenStride = (ROWS <= 2 ? 2 : ROWS <= 10 ? 10 : 18) * 16;
constexpr int kHiddenBytes = kFewRows ? kMostHiddenBlocks * 4 * kHiddenStride : 0;
// Sums of each team: [team][row][output]; those of the last one in the memory of traded sums if they fit.
constexpr int kTeamStride = kOutputsOfRank + 4;  // floats, free of bank conflicts
constexpr int kTeamFloats = ROWS * kTeamStride, kTradedFloats = kFewRows ? kWarps * kWarpSize * 4 : 4;
constexpr bool kTradesTeam = kTeamFloats <= kTradedFloats;
constexpr int kTeamBytes = kFewRows ? (kDownTeams - (kTradesTeam ? 1 : 0)) * kTeamFloats * 4 : 0;
// Where sums of a unit become rows (see rows_memory), behind the operands of gate_up.
constexpr int kUnitRowsBytes = 2 * kOperandRows * kTile * 2;  // of a warp
// Both lie in the memory of the operands, where teams take the place of those of gate_up. Hidden values lie behind all of
// that: other blocks send them once they have the parts that they own, while a warp of this one may still multiply.
constexpr int kHiddenOffset = max_of(kTeamBytes, GateUp::kChunks * kOperandBytesOfChunk + kWarps * kUnitRowsBytes);

// -- attention --------------------------------------------------------------------------------------------------------

// A cluster takes some of the ROWS * kHeads queries, each of its blocks an eighth of the keys, at most KEYS.
constexpr int kQueries = ROWS * kHeads, kMostQueries = ceil_div(kQueries, kClusters);
constexpr int kQueryTiles = ceil_div(kMostQueries, 16), kDims = kHeadDim / kRanks;
// Keys come in tiles of eight, and a lane of a quad weighs every fourth tile: KEYS / 32 of them.
constexpr int kKeyTiles = KEYS / 8, kKeyGroups = KEYS / 32, kKeyPieces = kHeadDim / 32;
constexpr int kScoreStride = KEYS + 4;  // floats, free of bank conflicts
static_assert(KEYS % 32 == 0 && KEYS <= 128, "every lane weighs as many tiles");

// Which row of shared memory holds the value of a key: such that the keys that a lane weighs are those that it
// multiplies with values (inputs 2 * quad, 2 * quad + 1 and both plus eight of every sixteen).
__device__ __forceinline__ int value_row(int key) {
  const int tile = key / 8, inner = key % 8;
  return (tile / 4 * 2 + inner / 4) * 16 + inner % 4 / 2 * 8 + tile % 4 * 2 + inner % 2;
}

// -- shared memory ----------------------------------------------------------------------------------------------------

// Other blocks may be ahead and send already. So the parts of neighbours lie apart: those of project and output in X,
// of attend and down in Y, of gate_up and leave in V, the memory of attention's values. Parts of a product, and of
// attention, are rounded to bfloat16: half as much to exchange.
constexpr int kPartFloats = kRanks * ROWS * kTile / 2;  // of one output tile
constexpr int kSquares = kRanks * ROWS;
constexpr int kExtremeFloats = kRanks * kMostQueries * 2;
constexpr int kAttendFloats = kExtremeFloats + kRanks * kMostQueries * kDims / 2;
constexpr int kProjectFloats = Project::kSlots * kPartFloats + kSquares;
constexpr int kGateUpFloats = GateUp::kSlots * kPartFloats + kSquares;
constexpr int kLeaveFloats = kRanks * ROWS * kActions + kSquares;
constexpr int kSumFloats = Output::kSlots * kPartFloats;  // as many of down
constexpr int kFloatsX = max_of(kProjectFloats, kSumFloats);
constexpr int kFloatsY = kFewRows ? kAttendFloats : max_of(kAttendFloats, kSumFloats);
constexpr int kValueStride = kHeadDim * 2 + 16, kQueryStride = kHeadDim * 2 + 64;  // bytes, free of bank conflicts
constexpr int kFloatsV = max_of(KEYS * kValueStride / 4, max_of(kGateUpFloats, kLeaveFloats));

constexpr int kQueriesHeld = kQueryTiles * 16;
constexpr int kScoreBytes = kQueriesHeld * (kScoreStride + kKeyTiles) * 4;  // weights, and the maximum of each tile
constexpr int kProductBytes = (kFewRows ? Output::kChunks : Down::kChunks) * kOperandBytesOfChunk;
constexpr int kOperandBytes = max_of(max_of(kProductBytes, kHiddenOffset + kHiddenBytes),
                                     kQueriesHeld * kQueryStride + kScoreBytes);

constexpr int kPlaces = 5, kExtremes = 4;  // barriers of parts; the last counts maxima and sums of attention
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
  alignas(16) float actions[ROWS * kActions];  // in front of the running step; a warp uses those of its rows only
  alignas(16) float traded[kTradedFloats];  // sums of pairs of warps that share the inputs
  u64 full[STAGES], empty[STAGES], values_full, parts[kPlaces];  // `parts`: phases that may be under way at once
  u32 claimed;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host computes the same layout");

// -- what a launch knows ----------------------------------------------------------------------------------------------

// What output and down make: [copy][row][column] as float, in four copies that take turns (see reset_sums).
constexpr int kSumCopies = 4;

// Offsets in the exchanged memory, in words; every buffer but the sums has two copies (see grid.cuh). The residual lies
// there between the launches of single phases only.
constexpr int kResidual = 0, kSumWords = kResidual + 2 * ROWS * kWidth, kQuery = kSumWords + kSumCopies * ROWS * kWidth,
              kKey = kQuery + ROWS * kInner, kValue = kKey + ROWS * kHeadDim, kAttended = kValue + ROWS * kHeadDim,
              kHiddenWords = kAttended + ROWS * kInner;
// In the place of hidden values few rows have the sum of what the clusters' shares of `down` give, in two copies:
// [copy][row][rank][word 128] of 64 bits. Two neighbouring words are two columns, and the 64 words behind the first 64
// are those that follow them, so that a lane that has four columns loads two pairs as its neighbours do.
constexpr int kShares = kHiddenWords, kShareRow = 2 * kWidth;  // words of 32 bits
using ShareSum = Fixed<kClusters>;
__device__ __forceinline__ int column_of_word(int word) { return word % 64 / 2 * 4 + word / 64 * 2 + word % 2; }

// All pointers are device memory.
struct Plan {
  const unsigned char *project, *output, *gate_up, *down;  // packed, all layers
  const float* enter_weight;                               // [kActions][kWidth]
  const float* enter_bias;                                 // [kWidth]
  const float* leave_weight;                               // [kWidth][kActions], times the step size
  const float* leave_bias;                                 // [steps][kActions], the same, with the shift's part
  const float* modulation;                                 // [steps][kModulations][3][kWidth]: scale, shift, gate
  const float* project_shift;                              // [steps][LAYERS][outputs]: what the norm's shift gives
  const float* gate_up_shift;
  const bf16* rope;                                        // [ROWS][kHeadDim]: cosines, sines
  const bf16 *prefix_key, *prefix_value;                   // [LAYERS][capacity][kHeadDim]
  const int* valid;                                        // rows of the prefix that exist
  const float* noise;                                      // [ROWS][kActions]
  float* actions;                                          // [ROWS][kActions], result
  u32* words;                                              // exchanged memory: kUnwritten at first, zeros at kShares
  u32* sync;                                               // zeros at first: parities, blocks that have left
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

// -- producer ---------------------------------------------------------------------------------------------------------

// Warps begin with different stages, so that one may wait for a stage far ahead of what is on its way.
template <typename P>
constexpr int kFirstWait =
    (min_of(ceil_div(P::kMost, kStageTiles), ceil_div(2 * kWarps, kStageTiles)) - 1) * P::kChunks + P::kChunks / 2 + 1;
constexpr int kFarthest = max_of(max_of(kFirstWait<Project>, kFirstWait<Output>),
                                 max_of(kFirstWait<GateUp>, kFewRows ? kDownTeams : kFirstWait<Down>));
using WeightRing = Ring<STAGES, kStageBytes, kFarthest>;

// Visits this block's part of one product in one layer, stage by stage: [chunk][tile][P::kChunkBytes], from the first
// of the cluster's tiles on.
template <typename P, typename Visitor>
__device__ __forceinline__ void visit_product(Visitor& visitor, const unsigned char* from, int tiles) {
  constexpr u32 kBytes = kStageTiles * P::kChunkBytes, kNextChunk = P::kTiles * P::kChunkBytes;
#pragma unroll 1
  for (; tiles >= kStageTiles; tiles -= kStageTiles, from += kBytes) {
    const unsigned char* chunk = from;
#pragma unroll 2
    for (int i = 0; i < P::kChunks; ++i, chunk += kNextChunk) {
      visitor.begin(kBytes);
      visitor.piece(0, chunk, kBytes);
    }
  }
  if (tiles == 0) return;
  const u32 shift = P::log2_chunks_in_stage(tiles), bytes = tiles * P::kChunkBytes;
#pragma unroll 1
  for (int chunk = 0; chunk < P::kChunks; chunk += 1 << shift) {
    visitor.begin(bytes << shift);
#pragma unroll 1
    for (u32 offset = 0; offset < bytes << shift; offset += bytes, from += kNextChunk)
      visitor.piece(offset, from, bytes);
  }
}

// Where that part begins in weights [layer][rank][chunk][tile][P::kChunkBytes]; `piece` counts layers and ranks.
template <typename P>
__device__ __forceinline__ const unsigned char* part_of(const unsigned char* weights, int piece, int cluster) {
  return weights + (static_cast<u64>(piece) * P::kChunks * P::kTiles + P::first(cluster)) * P::kChunkBytes;
}

// The same of this block's share of `down`, in weights [layer][rank][block of 32 inputs][kDownStageBytes].
template <typename Visitor>
__device__ __forceinline__ void visit_share(Visitor& visitor, const unsigned char* weights, int piece, int first,
                                            int blocks) {
  const unsigned char* from = weights + (static_cast<u64>(piece) * kHiddenBlocks + first) * kDownStageBytes;
#pragma unroll 1
  for (; blocks > 0; --blocks, from += kDownStageBytes) {
    visitor.begin(kDownStageBytes);
    visitor.piece(0, from, kDownStageBytes);
  }
}

template <typename Visitor>
__device__ __forceinline__ void visit_weights(const Plan& plan, Visitor& visitor) {
  const int cluster = blockIdx.x / kRanks, rank = cluster_rank();
  const int project = Project::count(cluster), added = Output::count(cluster), gate_up = GateUp::count(cluster);
  const auto visit = [&](Phase phase, int piece) {
    if (phase == kProject) visit_product<Project>(visitor, part_of<Project>(plan.project, piece, cluster), project);
    if (phase == kOutput) visit_product<Output>(visitor, part_of<Output>(plan.output, piece, cluster), added);
    if (phase == kGateUp) visit_product<GateUp>(visitor, part_of<GateUp>(plan.gate_up, piece, cluster), gate_up);
    if (kFewRows) {
      if (phase == kGateUp)
        visit_share(visitor, plan.down, piece, GateUp::first(cluster) / kTilesOfBlock, gate_up / kTilesOfBlock);
    } else if (phase == kDown) {
      visit_product<Down>(visitor, part_of<Down>(plan.down, piece, cluster), added);
    }
  };
  if (!kResident) {
    const Position at = locate(plan.phase);
    return visit(at.phase, at.layer * kRanks + rank);
  }
#pragma unroll 1
  for (int step = 0; step < plan.steps; ++step) {
#pragma unroll 1
    for (int piece = rank; piece < LAYERS * kRanks; piece += kRanks) {
      visit(kProject, piece);
      visit(kOutput, piece);
      visit(kGateUp, piece);
      if (!kFewRows) visit(kDown, piece);
    }
  }
}

// Bytes that a block fetches at once: with fewer the memory idles, and with all that the ring holds, what blocks
// exchange has to wait for them.
constexpr int kBytesUnderWay = 65536, kUnderWay = min_of(kBytesUnderWay / kStageBytes, STAGES);

// One thread fetches the weights into the ring. What a stage costs it, whatever its size, bounds the whole grid: a
// layer has some forty of them. So nothing is divided here, nothing is worked out twice, and no fence stands in the way
// where the ring is deep; and it has to be a thread that the compiler knows to be alone (see elect_one).
struct Producer {
  WeightRing ring;
  u64 policy = evict_first_policy();
  Spot spot = {0, 0};  // of the stage to come
  u32 count = 0, to = 0, barrier = 0;

  __device__ __forceinline__ explicit Producer(const WeightRing& ring_) : ring(ring_) {
    // Otherwise they are worked out anew at each stage.
    asm volatile("" : "+r"(ring.data), "+r"(ring.full), "+r"(ring.empty), "+r"(ring.claims));
  }

  __device__ __forceinline__ void begin(u32 bytes) {
    to = ring.stage(spot);
    barrier = ring.full_barrier(spot);
    if (kUnderWay < STAGES) {
      const u32 wrapped = spot.slot < kUnderWay ? 1 : 0, first = spot.slot + wrapped * STAGES - kUnderWay;
      mbarrier_wait(ring.full + first * kBarrierBytes, spot.parity ^ wrapped);
    }
    mbarrier_wait(ring.empty + spot.slot * kBarrierBytes, spot.parity ^ 1);  // passes at once where nothing was before
    mbarrier_expect(barrier, bytes);
    if (!WeightRing::kIsDeep) ring.claim(++count);
    spot = ring.behind(spot);
  }
  __device__ __forceinline__ void piece(u32 offset, const unsigned char* from, u32 bytes) const {
    bulk_copy(to + offset, from, bytes, barrier, policy);
  }
};

__device__ __forceinline__ void produce(const Plan& plan, const WeightRing& ring) {
  Producer producer(ring);
  visit_weights(plan, producer);
}

// Another thread runs ahead of the producer of a shallow ring, and fetches what that has no room for into the
// second-level cache: the memory keeps busy while the blocks exchange, and what comes in a hurry has a short way.
constexpr int kCachedBytes = 98304;  // ahead: more than twice as many are slower than none
constexpr u32 kCachedStages = kCachedBytes / kStageBytes;
constexpr bool kPrefetches = kResident && !WeightRing::kIsDeep;
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

__device__ __forceinline__ void prefetch(const Plan& plan, const WeightRing& ring) {
  Prefetcher prefetcher{ring};
  visit_weights(plan, prefetcher);
}

// -- what one warp does for all ---------------------------------------------------------------------------------------

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

// What this block has published of sums of few rows in the layer before number `layer`, and its part of the sums of
// shares of its columns (see fence_resets).
__device__ __forceinline__ void reset_published(const Plan& plan, int layer, u32 parity) {
  const int cluster = blockIdx.x / kRanks, rank = cluster_rank(), lane = threadIdx.x % kWarpSize;
  const u32 copy = (layer + (parity >> 2) & 1) ^ 1, sums = (parity & 3) + 2 * layer - 2;
  u32* shares = plan.words + kShares + copy * ROWS * kShareRow + rank * kOutputsOfRank * 2;
  constexpr int kPieces = kOutputsOfRank / 2, kSumPieces = kTile / 4;  // of 16 bytes: of a row, of a tile's row
  for (int i = cluster * kWarpSize + lane; i < ROWS * kPieces; i += kClusters * kWarpSize)
    store_relaxed16(shares + i / kPieces * kShareRow + i % kPieces * 4, 0u);
  u32* owned = plan.words + kSumWords + (sums & kSumCopies - 1) * ROWS * kWidth + Output::first(cluster) * kTile;
  for (int tile = rank; tile < Output::count(cluster); tile += kRanks)
    if (lane < ROWS * kSumPieces)
      store_relaxed16(owned + lane / kSumPieces * kWidth + tile * kTile + lane % kSumPieces * 4, kUnwritten);
}

// One warp makes the resets of a layer visible to the grid before its block publishes its sums of `down`, while the
// consumers wait for hidden values and multiply. That is early enough: every block owns a tile of `down`, so each
// publishes behind its own fence, and nobody reads a word that was reset in this layer before parts of the next
// `project` (or of `leave`) have come from all blocks of its cluster, which together have read all columns of these
// sums, hence of every block.
//
// With few rows that warp also resets what its block has published of sums of `output` in the layer before, and its
// cluster's part of that layer's sums of shares of `down`, as soon as the block has all sums of `output`. Those depend
// on all queries, keys and values of this layer, hence on the products of all blocks behind those sums and shares, and
// each block had read what it reads of them by then: all shares had been added. They are read again when there are
// queries of the next layer or shares of the one behind it: who reads then has, or has from blocks that have, shares
// that were published behind this fence. Who adds to the sums of shares again, in the next layer, has read its columns
// of those of this layer, to which every block that resets some of these words added behind its own fence.
__device__ __forceinline__ void fence_resets(const Plan& plan) {
  const Position only = locate(plan.phase);
  const bool is_alone = kFewRows && only.phase == kGateUp;
  if (!kResident && !is_alone) return;  // the end of a launch does it
  const u32 parity = kFewRows ? __ldcg(plan.sync) : 0;
  const int first = kResident ? 0 : only.step * LAYERS + only.layer, count = kResident ? plan.steps * LAYERS : 1;
#pragma unroll 1
  for (int layer = first; layer < first + count; ++layer) {
    named_barrier<kResetBarrier, kConsumers + kWarpSize>();
    if (kFewRows) reset_published(plan, layer, parity);
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    named_barrier<kFenceBarrier, kConsumers + kWarpSize>();
  }
}

// Starts to copy the prefix's value rows of this block for one layer.
__device__ __forceinline__ void copy_prefix_values(const Plan& plan, Shared& shared, int layer, u64 policy) {
  const Work work(blockIdx.x / kRanks, cluster_rank(), *plan.valid);
  const int rows = max(0, min(work.count, work.prefix - work.start)), lane = threadIdx.x % kWarpSize;
  const u32 barrier = shared_address(&shared.values_full), to = shared_address(shared.values);
  if (lane == 0) mbarrier_expect(barrier, rows * kHeadDim * 2);
  __syncwarp();
  const bf16* from = plan.prefix_value + (static_cast<u64>(layer) * plan.capacity + work.start) * kHeadDim;
  for (int row = lane; row < rows; row += kWarpSize)
    bulk_copy(to + value_row(row) * kValueStride, from + row * kHeadDim, kHeadDim * 2, barrier, policy);
}

// Another warp fetches the values for every attention as soon as their memory is free: behind gate_up of the layer
// before, or behind leave.
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

// -- consumer: what every phase uses ----------------------------------------------------------------------------------

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

  // What this block has of each product and of attention: worked out once and hidden from the compiler, which would do
  // it again in every phase.
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
    if (kResident || kFewRows) named_barrier_arrive<kResetBarrier, kConsumers + kWarpSize>();
  }
  // All consumers, and the fence behind those resets.
  __device__ __forceinline__ void fence_barrier() const {
    if (kResident || kFewRows) {
      named_barrier<kFenceBarrier, kConsumers + kWarpSize>();
    } else {
      block_barrier();
    }
  }

  __device__ __forceinline__ u32 parts_barrier(const Place& place) const {
    return shared_address(shared.parts + place.barrier);
  }

  // The cluster's hidden values of few rows.
  __device__ __forceinline__ float* hidden() const {
    return reinterpret_cast<float*>(shared.operands + kHiddenOffset);
  }

  // One thread: the next turn of `place` brings `bytes`.
  __device__ __forceinline__ void expect(const Place& place, u32 bytes) {
    if (thread == 0) mbarrier_expect(parts_barrier(place), bytes);
  }

  // All parts of that turn of `place` have come. One warp looks, since many that do slow down those that still
  // multiply.
  __device__ __forceinline__ void await_parts(const Place& place) const {
    if (warp == kWarps - 1) mbarrier_wait(parts_barrier(place), place.parity);
  }
  __device__ __forceinline__ void await(const Place& place) const {
    await_parts(place);
    block_barrier();
  }

  __device__ __forceinline__ int layers(const Position& at) const { return at.step * LAYERS + at.layer; }

  // Where the parts of the running phase go. Barrier 0 counts those of project and output, 1 those of attend and
  // gate_up, 2 those of down, or hidden values of few rows, 3 those of leave. A launch of one phase starts to count
  // anew.
  __device__ __forceinline__ Place place(const Position& at) const {
    constexpr u32 kOdd = kResident ? 1 : 0;
    switch (at.phase) {
      case kProject: return {shared.x, 0, 0};
      case kAttend: return {shared.y, 1, 0};
      case kOutput: return {shared.x, 0, kOdd};
      case kGateUp: return {shared.values, 1, kOdd};
      case kDown: return {kFewRows ? hidden() : shared.y, 2, layers(at) & kOdd};
      default: return {shared.values, 3, at.step & kOdd};
    }
  }

  // Sums are counted: those of output of the first layer are number 0. This is the number of those that the running
  // phase adds to the residual (project, gate_up, leave) or makes (output, down).
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
  // The first of this lane's four columns, among those of its block.
  __device__ __forceinline__ int inner_column() const { return lane * 4; }
  __device__ __forceinline__ int column() const { return rank * Project::kSlice + inner_column(); }

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
