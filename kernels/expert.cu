// The action expert over a few rows, as one resident grid: all steps and layers, or any range of their phases.
//
// A step is: enter | (project, attend, combine, output, gate_up, down) x layers | leave. A phase reads what all blocks
// wrote in the phase before, so there is a grid barrier between two of them. The weights depend on nothing: one
// producer thread a block streams them through a ring in shared memory, across phases, layers and steps, so that memory
// never waits for a barrier. Launching the phases one by one computes the same bits.
//
// A product splits its output features over the blocks (tiles of eight) and its sum over the consumer warps: a
// warp holds its slice of the activation rows in registers, as the A operand, and multiplies it with its part of each
// 16 KB stage. Features and sums are permuted when weights are packed so that every access is 16 bytes wide:
//   stage [group 32][feature 8][quad 4][8]: k = chunk * 1024 + group * 32 + quad * 8 + 0..7
// Query and key features come in rotary pairs (i, i + 128).
//
// ROWS: rows of the chunk. STAGES: depth of the ring. LAYERS: number of layers. BLOCKS: size of the grid.
#include "expert_attention.cuh"
#include "expert_plan.cuh"
#include "expert_products.cuh"

// -- phases --------------------------------------------------------------------------------------------------------------

// x = actions @ enter_weight + enter_bias, in float.
__device__ void enter(Consumer& c, const Position& at) {
  c.begin(0);
  const float* actions = at.step == 0 ? c.plan.noise : c.plan.actions;
  for (int i = c.block * kConsumers + c.thread; i < ROWS * kWidth; i += kBlocks * kConsumers) {
    const int row = i / kWidth, column = i % kWidth;
    float sum = c.plan.enter_bias[column];
#pragma unroll
    for (int j = 0; j < kActions; ++j)
      sum = fmaf(__ldcg(actions + row * kActions + j), c.plan.enter_weight[j * kWidth + column], sum);
    c.plan.x[i] = to_bf16(sum);
  }
  c.end(0);
}

constexpr int kTilesPerHead = kHeadDim / kTile;

// How many of `tiles` tiles this block has.
__device__ __forceinline__ int tiles_of(const Consumer& c, int tiles) {
  return (tiles - c.block + kBlocks - 1) / kBlocks;
}

struct Turn {
  bf16 cosine, sine;
};

// Cosine and sine for one pair of a projection tile (values do not use them).
__device__ __forceinline__ Turn turn_of(const Consumer& c, int tile, int row, int pair) {
  const bf16* from = c.plan.rope + row * kHeadDim + tile % kTilesPerHead * 4 + pair;
  return {from[0], from[kHeadDim / 2]};
}

// The rotated pair (or two value columns) of one row of a projection tile.
__device__ __forceinline__ void store_projection(const Consumer& c, int tile, int row, int pair, float2 v, Turn turn) {
  const int head = tile / kTilesPerHead, local = tile % kTilesPerHead;
  if (head > kHeads) {
    *reinterpret_cast<u32*>(c.plan.value + row * kHeadDim + local * kTile + pair * 2) = pack_bf16(v.x, v.y);
    return;
  }
  bf16* to =
      (head < kHeads ? c.plan.query + row * kInner + head * kHeadDim : c.plan.key + row * kHeadDim) + local * 4 + pair;
  const float cosine = to_float(turn.cosine), sine = to_float(turn.sine);
  to[0] = to_bf16(v.x * cosine - v.y * sine);
  to[kHeadDim / 2] = to_bf16(v.y * cosine + v.x * sine);
}

// query, key, value = rope(norm(x) @ project).
__device__ void project(Consumer& c, const Position& at) {
  constexpr int kMost = (kProjectTiles + kBlocks - 1) / kBlocks;
  const int tiles = tiles_of(c, kProjectTiles);
  // The table entries for the first result of this thread are fetched before the wait.
  const int early = min(c.thread, max(kPassRows * 4 * tiles - 1, 0));
  const Turn early_turn = turn_of(c, c.block + early / (kPassRows * 4) * kBlocks, early / 4 % kPassRows, early % 4);
  multiply_normalised<kMost>(c, c.modulation(at.step, 2 * at.layer), tiles, [&](int first, int count) {
    for (int i = c.thread; i < count * kPassRows * 4; i += kConsumers) {
      const int slot = i / (kPassRows * 4), local = i / 4 % kPassRows, row = c.first_row + local, pair = i % 4;
      const int tile = c.block + (first + slot) * kBlocks;
      if (row >= ROWS) continue;
      const bool is_early = i == c.thread && first == 0 && c.first_row == 0;
      const Turn turn = is_early ? early_turn : turn_of(c, tile, row, pair);
      store_projection(c, tile, row, pair, collect(c, slot, local, pair * 2), turn);
    }
  });
}

// x += gate * (rows @ weights), for the eight columns of each tile of this block.
template <int CHUNKS>
__device__ void accumulate(Consumer& c, const bf16* rows, const float* gate) {
  constexpr int kAtOnce = M == 1 ? 2 : 1;  // chunks whose rows are in registers at once
  static_assert(CHUNKS % kAtOnce == 0, "whole groups of chunks");
  // In each pass a thread has at most one pair of outputs; what it needs of the first is fetched before the wait.
  static_assert(kPassRows * 4 <= kConsumers, "one pair of outputs a thread");
  const int local_row = c.thread / 4, local = c.thread % 4 * 2;
  for (int tile = c.block; tile < kOutputTiles || tile == c.block; tile += kBlocks) {
    const bool mine = tile < kOutputTiles;
    const int column = tile * kTile + local;
    if (OVERLAP && tile == c.block) c.begin(CHUNKS);
    bool writes = mine && c.thread < kPassRows * 4;
    u32* to = reinterpret_cast<u32*>(c.plan.x + local_row * kWidth + column);
    float2 factor = make_float2(0.0f, 0.0f);
    u32 old = 0;
    if (writes) {
      factor = *reinterpret_cast<const float2*>(gate + column);
      // The block that wrote these values last is this one, or the barrier in front of the last phase is behind them.
      old = __ldcg(to);
    }
    if (tile != c.block) {
      if (!mine) break;
      c.exchange(CHUNKS, CHUNKS);
    } else if (!OVERLAP) {
      c.begin(mine ? CHUNKS : 0);
    }
    if (!mine) break;
    for (int pass = 0; pass < kPasses; ++pass) {
      c.first_row = pass * kPassRows;
      if (pass > 0) {
        to += kPassRows * kWidth / 2;
        writes = writes && c.first_row + local_row < ROWS;
        if (writes) old = __ldcg(to);
        c.block_barrier();  // the partial sums before have been collected
      }
      Sums s;
      clear(s);
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk += kAtOnce) {
        Slice a[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) load_slice(c, a[i], rows, CHUNKS * kChunk, (chunk + i) * kChunk);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          uint4 b[kGroups];
          load_weights(c, chunk + i, b);
          multiply(s, a[i], b);
        }
      }
      publish(c, s, 0);
      c.block_barrier();
      if (writes) {
        const float2 y = collect(c, 0, local_row, local);
        *to = pack_bf16(fmaf(factor.x, y.x, low_float(old)), fmaf(factor.y, y.y, high_float(old)));
      }
    }
    c.first_row = 0;
  }
  c.end(c.block < kOutputTiles ? CHUNKS : 0);
}

// hidden = gelu(norm(x) @ gate) * (norm(x) @ up).
__device__ void gate_up(Consumer& c, const Position& at) {
  constexpr int kMost = (kHiddenTiles + kBlocks - 1) / kBlocks * 2;
  const int stages = 2 * tiles_of(c, kHiddenTiles);
  multiply_normalised<kMost>(c, c.modulation(at.step, 2 * at.layer + 1), stages, [&](int first, int count) {
    for (int i = c.thread; i < count / 2 * kPassRows * 4; i += kConsumers) {
      const int pair = i / (kPassRows * 4), local = i / 4 % kPassRows, row = c.first_row + local, column = i % 4 * 2;
      if (row >= ROWS) continue;
      const float2 gate = collect(c, 2 * pair, local, column), up = collect(c, 2 * pair + 1, local, column);
      const int tile = c.block + (first / 2 + pair) * kBlocks;
      *reinterpret_cast<u32*>(c.plan.hidden + row * kHidden + tile * kTile + column) =
          pack_bf16(gelu_tanh(gate.x) * up.x, gelu_tanh(gate.y) * up.y);
    }
  });
}

// actions += norm(x) @ leave_weight + leave_bias, one warp an output value.
__device__ void leave(Consumer& c, const Position& at) {
  const float* scale = c.modulation(at.step, 2 * LAYERS);
  const float* before = at.step == 0 ? c.plan.noise : c.plan.actions;
  c.begin(0);
  for (int item = c.block * kWarps + c.warp; item < ROWS * kActions; item += kBlocks * kWarps) {
    const int row = item / kActions, action = item % kActions;
    uint4 x[kWidth / 256];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kWidth / 256; ++i) {
      x[i] = load_shared_by_grid(c.plan.x + row * kWidth + i * 256 + c.lane * 8);
      squares += sum_of_squares8(x[i]);
    }
    const float inverse = rsqrtf(warp_sum(squares) / kWidth + kEps);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWidth / 256; ++i) {
      const int column = i * 256 + c.lane * 8;
      float f[8], one[8], two[8], three[8];
      unpack8(x[i], f);
      load_floats8(scale + column, one);
      load_floats8(scale + kWidth + column, two);
      load_floats8(c.plan.leave_weight + action * kWidth + column, three);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum = fmaf(fmaf(f[j] * inverse, 1.0f + one[j], two[j]), three[j], sum);
    }
    sum = warp_sum(sum);
    if (c.lane == 0) c.plan.actions[item] = __ldcg(before + item) + sum + c.plan.leave_bias[action];
  }
  c.end(0);
}

__device__ void run_phase(Consumer& c, const Position& at) {
  switch (at.phase) {
    case kEnter:
      return enter(c, at);
    case kProject:
      return project(c, at);
    case kAttend:
      return attend(c, at);
    case kCombine:
      return combine(c, at);
    case kOutput:
      return accumulate<kInner / kChunk>(c, c.plan.attended, c.modulation(at.step, 2 * at.layer) + 2 * kWidth);
    case kGateUp:
      return gate_up(c, at);
    case kDown:
      return accumulate<kHidden / kChunk>(c, c.plan.hidden, c.modulation(at.step, 2 * at.layer + 1) + 2 * kWidth);
    case kLeave:
      return leave(c, at);
  }
}

// The last block to leave sets every counter back to zero for the next launch.
__device__ void reset_counters(u32* sync) {
  if (fetch_add(sync + kDoneCounter * kSyncStride, 1) + 1 != kBlocks) return;
  for (int i = 0; i <= kDoneCounter; ++i) __stcg(sync + i * kSyncStride, 0u);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    expert(const unsigned char* project_weight, const unsigned char* output_weight, const unsigned char* gate_up_weight,
           const unsigned char* down_weight, const float* enter_weight, const float* enter_bias,
           const float* leave_weight, const float* leave_bias, const float* modulation, const bf16* rope,
           const bf16* prefix_key, const bf16* prefix_value, const int* valid, const float* noise, float* actions,
           bf16* x, bf16* query, bf16* key, bf16* value, bf16* attended, bf16* hidden, float* partial, float* extremes,
           u32* sync, int capacity, int first, int last) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Plan plan{project_weight,
                  output_weight,
                  gate_up_weight,
                  down_weight,
                  enter_weight,
                  enter_bias,
                  leave_weight,
                  leave_bias,
                  modulation,
                  rope,
                  prefix_key,
                  prefix_value,
                  valid,
                  noise,
                  actions,
                  x,
                  query,
                  key,
                  value,
                  attended,
                  hidden,
                  partial,
                  extremes,
                  sync,
                  capacity,
                  first,
                  last};
  if (threadIdx.x == 0)
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(shared.full + s, 1);
      mbarrier_init(shared.empty + s, 1);
    }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  overlap_trigger();
  const WeightRing ring{shared.ring, shared.full, shared.empty};
  // Registers are dealt out to groups of four warps: the producer's group gives its share to the consumers.
  if (threadIdx.x >= kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == kConsumers) produce(plan, ring);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
    Consumer c(plan, shared, ring);
    for (; c.index < plan.last; ++c.index) {
      c.identify();
      run_phase(c, locate(c.index));
    }
    if (plan.last - plan.first > 1 && c.thread == 0) reset_counters(plan.sync);
  }
}
