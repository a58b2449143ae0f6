// The action expert over a few rows, as one resident grid: all steps and layers, or any range of their phases.
//
// A step is: enter | (project, attend, output, gate_up, down) x layers | leave. The grid consists of clusters of eight
// blocks. A cluster computes some outputs of a product, each of its blocks with an eighth of the inputs; the parts meet in
// the shared memory of the block that owns the output. So a block reads an eighth of the rows only, and a phase ends with
// one exchange inside the cluster and one between clusters (see grid.cuh), neither of which needs a fence or a flag in
// front of the reader. The weights depend on nothing: one producer thread a block streams them through a ring in shared
// memory, across phases, layers and steps. Launching the phases one by one computes the same bits, and so does any number
// of clusters.
//
// The residual stays in float, in the registers of the threads that own it. The adaptive norm rides on the product behind
// it: the operands are x * (1 + scale), the row's 1 / rms is applied to the sum, and the shift is one more row.
//
// Features and sums are permuted when weights are packed so that every access is 16 bytes wide:
//   tile [group 32][output 8][quad 4][8]: input = group * 32 + quad * 8 + 0..7
// Query and key features come in rotary pairs (i, i + 128).
//
// ROWS: rows of the chunk. KEYS: keys that a block may have. LAYERS: number of layers. CLUSTERS: size of the grid.
// RESIDENT: one launch runs all phases; otherwise a launch runs one. STAGES: depth of the ring. SHARED_BYTES: shared memory
// of a block.
#include "expert_attention.cuh"
#include "expert_plan.cuh"
#include "expert_products.cuh"

// -- ends of a step --------------------------------------------------------------------------------------------------------

// x = actions @ enter_weight + enter_bias, in float.
__device__ __forceinline__ void enter(Consumer& c, const Position& at) {
  constexpr int kPieces = kActions / 4;
  const int column = c.owned_column(), row = c.owned_row();
  c.fetch_norm(at.step, 0);
  c.begin();
  c.phase_barrier();
  if (column >= 0) {
    const float* actions = (at.step == 0 ? c.plan.noise : c.step_actions((at.step - 1) & 1)) + row * kActions;
    uint4 v[kPieces];
    if (at.step == 0) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) v[i] = load16(actions + i * 4);
    } else {
      poll(v, [&](int i) { return actions + i * 4; });
    }
    c.residual = *reinterpret_cast<const float2*>(c.plan.enter_bias + column);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const u32 words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 w = *reinterpret_cast<const float2*>(c.plan.enter_weight + (i * 4 + j) * kWidth + column);
        c.residual.x = fmaf(__uint_as_float(words[j]), w.x, c.residual.x);
        c.residual.y = fmaf(__uint_as_float(words[j]), w.y, c.residual.y);
      }
    }
    publish_residual(c, at, column);
  }
  c.end();
}

// norm(x) @ leave_weight for one row and action, by one warp.
__device__ __forceinline__ float velocity(const Consumer& c, const Position& at, int row, int action) {
  constexpr int kPieces = kWidth / (kWarpSize * 4);
  const float* scale = c.modulation(at.step, 2 * LAYERS) + c.lane * 4;
  const float* weight = c.plan.leave_weight + action * kWidth + c.lane * 4;
  const float* rows = c.residual_rows(c.residual_copy(at)) + row * kWidth + c.lane * 4;
  uint4 v[kPieces];
  poll(v, [&](int i) { return rows + i * kWarpSize * 4; });
  float squares = 0.0f, sum = 0.0f, shifted = 0.0f;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int offset = i * kWarpSize * 4;
    const float4 s = load_float4(scale + offset), t = load_float4(scale + kWidth + offset),
                 w = load_float4(weight + offset);
    const float x[4] = {__uint_as_float(v[i].x), __uint_as_float(v[i].y), __uint_as_float(v[i].z),
                        __uint_as_float(v[i].w)};
    const float scales[4] = {s.x, s.y, s.z, s.w}, shifts[4] = {t.x, t.y, t.z, t.w}, weights[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      squares = fmaf(x[j], x[j], squares);
      sum = fmaf(x[j] * (1.0f + scales[j]), weights[j], sum);
      shifted = fmaf(shifts[j], weights[j], shifted);
    }
  }
  return fmaf(warp_sum(sum), rsqrtf(warp_sum(squares) / kWidth + kEps), warp_sum(shifted));
}

// actions += norm(x) @ leave_weight + leave_bias, one warp an output value.
__device__ __forceinline__ void leave(Consumer& c, const Position& at) {
  c.begin();
  c.phase_barrier();
#pragma unroll 1
  for (int item = c.warp * kBlocks + blockIdx.x; item < ROWS * kActions; item += kBlocks * kWarps) {
    const int row = item / kActions, action = item % kActions;
    const float change = velocity(c, at, row, action) + c.plan.leave_bias[action];
    if (c.lane > 0) continue;
    float *now = c.step_actions(at.step & 1) + item, *other = c.step_actions(at.step & 1 ^ 1) + item;
    const float sum = (at.step == 0 ? c.plan.noise[item] : __ldcg(other)) + change;
    if (at.step + 1 == c.plan.steps) {
      c.plan.actions[item] = sum;
    } else {
      store_relaxed(now, __float_as_uint(sum));
    }
    store_relaxed(other, kUnwritten);
  }
  c.end();
}

// -- phases of a layer -----------------------------------------------------------------------------------------------------

constexpr int kTilesPerHead = kHeadDim / kTile;

struct Turn {
  float cosine, sine;
};

// Cosine and sine for one pair of a projection tile (values do not use them).
__device__ __forceinline__ Turn turn_of(const Consumer& c, int tile, int row, int pair) {
  const bf16* from = c.plan.rope + row * kHeadDim + tile % kTilesPerHead * 4 + pair;
  return {to_float(from[0]), to_float(from[kHeadDim / 2])};
}

// The rotated pair (or two value columns) of one row of a projection tile. The lanes of two neighbouring pairs trade, so
// that each writes whole words; all lanes of the warp must come here.
__device__ __forceinline__ void store_projection(const Consumer& c, int copy, int tile, int row, int pair, float2 v,
                                                 Turn turn, bool active) {
  const int head = tile / kTilesPerHead, local = tile % kTilesPerHead;
  // Written out, since a compiler may fuse either product, and another grid must give the same bits.
  const float first = fmaf(v.x, turn.cosine, -(v.y * turn.sine)), second = fmaf(v.y, turn.cosine, v.x * turn.sine);
  const bool low = pair % 2 == 0;
  const float traded = __shfl_xor_sync(kAllLanes, low ? second : first, 1);
  if (!active) return;
  int offset = row * kHeadDim + local * kTile + pair * 2, base = kValue, width = kHeadDim;
  u32 word = pack_bf16(v.x, v.y);
  if (head <= kHeads) {
    offset = local * 4 + (low ? pair : pair - 1 + kHeadDim / 2) + row * kHeadDim;
    base = kKey;
    word = low ? pack_bf16(first, traded) : pack_bf16(traded, second);
  }
  if (head < kHeads) {
    offset += row * (kInner - kHeadDim) + head * kHeadDim;
    base = kQuery;
    width = kInner;
  }
  exchange(c.rows(base, width, copy) + offset, c.rows(base, width, copy ^ 1) + offset, word);
}

// query, key, value = rope(norm(x) @ project).
__device__ __forceinline__ void project(Consumer& c, const Position& at) {
  const int copy = c.layer_copy(at), first = Project::first(c.cluster) + c.rank;
  // The table entries for the first result of this thread are fetched before the wait.
  const Turn early = turn_of(c, first + c.thread / (ROWS * 4) * kRanks, c.thread / 4 % ROWS, c.thread % 4);
  multiply_normalised<Project>(c, at, 2 * at.layer, [&](const Arrived& r) {
    // Whole warps stay away: there is much to fetch and issue.
    for (int start = 0; start + c.warp * kWarpSize < r.slots * ROWS * 4; start += kConsumers) {
      const int i = start + c.thread, last = r.slots - 1, slot = min(i / (ROWS * 4), last), row = i / 4 % ROWS,
                pair = i % 4, tile = first + slot * kRanks;
      const Turn turn = start == 0 ? early : turn_of(c, tile, row, pair);
      const float2 v = r.value(slot, row, pair, r.inverse_rms(row));
      store_projection(c, copy, tile, row, pair, v, turn, i < r.slots * ROWS * 4);
    }
  });
}

// x += gate * (attended @ output).
__device__ __forceinline__ void output(Consumer& c, const Position& at) {
  c.fetch_norm(at.step, 2 * at.layer + 1);
  const Addition addition(c, c.modulation(at.step, 2 * at.layer) + 2 * kWidth);
  const Place place = c.place(at);
  expect_sums(c, place);
  c.begin();
  c.block_barrier();  // nobody reads the operands of the phase before
  load_rows<1>(c, c.rows(kAttended, kInner, c.layer_copy(at)) + c.rank * Output::kSlice, kInner);
  c.phase_barrier();
  multiply_tiles<Output, ROWS, false>(c, place);
  c.stages += Output::stages(c.cluster);
  add_to_residual(c, at, place, addition);
}

// hidden = gelu(norm(x) @ gate) * (norm(x) @ up).
__device__ __forceinline__ void gate_up(Consumer& c, const Position& at) {
  const int copy = c.layer_copy(at);
  multiply_normalised<GateUp>(c, at, 2 * at.layer + 1, [&](const Arrived& r) {
    for (int i = c.thread; i < r.slots / 2 * ROWS * 4; i += kConsumers) {
      const int unit = i / (ROWS * 4), row = i / 4 % ROWS, pair = i % 4;
      const float inverse = r.inverse_rms(row);
      const float2 gate = r.value(2 * unit, row, pair, inverse), up = r.value(2 * unit + 1, row, pair, inverse);
      const int tile = GateUp::first(c.cluster) / 2 + unit * kRanks + c.rank;
      const int offset = row * kHidden + tile * kTile + pair * 2;
      exchange(c.rows(kHiddenWords, kHidden, copy) + offset, c.rows(kHiddenWords, kHidden, copy ^ 1) + offset,
               pack_bf16(gelu_tanh(gate.x) * up.x, gelu_tanh(gate.y) * up.y));
    }
  });
}

// x += gate * (hidden @ down).
__device__ __forceinline__ void down(Consumer& c, const Position& at) {
  if (at.layer + 1 < LAYERS) c.fetch_norm(at.step, 2 * at.layer + 2);
  const Addition addition(c, c.modulation(at.step, 2 * at.layer + 1) + 2 * kWidth);
  const Place place = c.place(at);
  expect_sums(c, place);
  c.begin();
  c.block_barrier();  // nobody reads the operands of the phase before
  load_rows<2>(c, c.rows(kHiddenWords, kHidden, c.layer_copy(at)) + c.rank * Down::kSlice, kHidden);
  c.phase_barrier();
  multiply_tiles<Down, ROWS, false>(c, place);
  c.stages += Down::stages(c.cluster);
  add_to_residual(c, at, place, addition);
}

// Runs one phase. Who a thread is, is read anew each time (see Consumer::identify), and where it is, is hidden from the
// compiler, which would carry an address for every table through the loops.
template <typename Body>
__device__ __forceinline__ void run(Consumer& c, int step, int layer, Phase phase, const Body& body) {
  c.identify();
  asm volatile("" : "+r"(step), "+r"(layer));
  body(c, Position{step, layer, phase});
}

__device__ __forceinline__ void run_all(Consumer& c) {
#pragma unroll 1
  for (int step = 0; step < c.plan.steps; ++step) {
    run(c, step, 0, kEnter, enter);
#pragma unroll 1
    for (int layer = 0; layer < LAYERS; ++layer) {
      run(c, step, layer, kProject, project);
      run(c, step, layer, kAttend, attend);
      run(c, step, layer, kOutput, output);
      run(c, step, layer, kGateUp, gate_up);
      run(c, step, layer, kDown, down);
    }
    run(c, step, LAYERS, kLeave, leave);
  }
}

__device__ __forceinline__ void run_one(Consumer& c) {
  const Position at = locate(c.plan.phase);
  switch (at.phase) {
    case kEnter: return enter(c, at);
    case kProject: return project(c, at);
    case kAttend: return attend(c, at);
    case kOutput: return output(c, at);
    case kGateUp: return gate_up(c, at);
    case kDown: return down(c, at);
    case kLeave: return leave(c, at);
  }
}

// -- kernel ------------------------------------------------------------------------------------------------------------------

// What a consumer must know of the launches before: which copies come first, and the residual values that it owns.
__device__ __forceinline__ void recall(Consumer& c) {
  c.identify();
  if (kResident) overlap_wait();
  c.prefix = *c.plan.valid;
  c.parity = __ldcg(c.plan.sync);
  const Position at = locate(c.plan.phase);
  if (kResident || (at.phase != kOutput && at.phase != kDown)) return;
  overlap_wait();
  const int column = c.owned_column();
  if (column >= 0)
    c.residual = __ldcg(reinterpret_cast<const float2*>(c.residual_rows(c.residual_copy(at) ^ 1) +
                                                        c.owned_row() * kWidth + column));
}

// The last block to leave notes which copies the next decision starts with.
__device__ __forceinline__ void remember(const Consumer& c) {
  if ((!kResident && c.plan.phase + 1 < c.plan.steps * kPhasesPerStep) || c.thread > 0) return;
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(c.plan.sync + 1) : "memory");
  if (before + 1 < kBlocks) return;
  const u32 flips = (c.plan.steps * kModulations & 1) | (c.plan.steps * LAYERS & 1) << 1;
  __stcg(c.plan.sync, c.parity ^ flips);
  __stcg(c.plan.sync + 1, 0u);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    expert(const unsigned char* project_weight, const unsigned char* output_weight, const unsigned char* gate_up_weight,
           const unsigned char* down_weight, const float* enter_weight, const float* enter_bias,
           const float* leave_weight, const float* leave_bias, const float* modulation, const bf16* rope,
           const bf16* prefix_key, const bf16* prefix_value, const int* valid, const float* noise, float* actions,
           u32* words, u32* sync, int capacity, int steps, int phase) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Plan plan{project_weight, output_weight, gate_up_weight, down_weight, enter_weight, enter_bias, leave_weight,
                  leave_bias,     modulation,    rope,           prefix_key,  prefix_value, valid,      noise,
                  actions,        words,         sync,           capacity,    steps,        phase};
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(shared.full + s, 1);
      mbarrier_init(shared.empty + s, kArrivals);
    }
    for (int i = 0; i < 3; ++i) mbarrier_init(shared.parts + i, 1);
    shared.claimed = 0;
    mbarrier_init(&shared.values_full, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_barrier();
  overlap_trigger();
  const WeightRing ring{shared.ring, shared.full, shared.empty, &shared.claimed};
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) {
      Producer producer{ring};
      visit_weights(plan, producer);
    }
    if (threadIdx.x / kWarpSize == kWarps + 1) fence_resets(plan);
    if (threadIdx.x / kWarpSize == kWarps + 2) fetch_values(plan, shared);
    if (kResident && threadIdx.x == kConsumers + 3 * kWarpSize) {
      Prefetcher prefetcher{ring};
      visit_weights(plan, prefetcher);
    }
    __syncwarp();
    cluster_barrier();  // nobody leaves while others may still send to it
  } else {
    Consumer c(plan, shared, ring);
    recall(c);
    if (kResident) {
      run_all(c);
    } else {
      run_one(c);
    }
    remember(c);
    cluster_barrier();
  }
}
