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
// STAGES: depth of the ring. SHARED_BYTES: shared memory of a block.
#include "expert_attention.cuh"
#include "expert_plan.cuh"
#include "expert_products.cuh"

// -- ends of a step --------------------------------------------------------------------------------------------------------

// x = actions @ enter_weight + enter_bias, in float.
__device__ __forceinline__ void enter(Consumer& c, const Position& at) {
  constexpr int kPieces = kActions / 4;
  const int column = c.owned_column(), row = c.owned_row();
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
    squares += (x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3]);
    sum += (x[0] * (1.0f + s.x) * w.x + x[1] * (1.0f + s.y) * w.y) +
           (x[2] * (1.0f + s.z) * w.z + x[3] * (1.0f + s.w) * w.w);
    shifted += (t.x * w.x + t.y * w.y) + (t.z * w.z + t.w * w.w);
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
  const float first = v.x * turn.cosine - v.y * turn.sine, second = v.y * turn.cosine + v.x * turn.sine;
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
  const float* table = c.modulation(at.step, 2 * at.layer);
  multiply_normalised<Project>(c, at, table, [&](const Round& r) {
    for (int start = 0; start < r.slots * ROWS * 4; start += kConsumers) {
      const int i = start + c.thread, last = r.slots - 1, slot = min(i / (ROWS * 4), last), row = i / 4 % ROWS,
                pair = i % 4, tile = first + r.first + slot * kRanks;
      const Turn turn = start == 0 && r.first == 0 ? early : turn_of(c, tile, row, pair);
      const float2 v = r.value(slot, row, pair, r.inverse_rms(row));
      store_projection(c, copy, tile, row, pair, v, turn, i < r.slots * ROWS * 4);
    }
  });
}

// x += gate * (attended @ output).
__device__ __forceinline__ void output(Consumer& c, const Position& at) {
  const Addition addition(c, c.modulation(at.step, 2 * at.layer) + 2 * kWidth);
  const Place place = c.place(at);
  expect_sums(c, place);
  c.begin();
  c.block_barrier();  // nobody reads the operands of the phase before
  load_rows<1>(c, c.rows(kAttended, kInner, c.layer_copy(at)) + c.rank * Output::kSlice, kInner);
  c.phase_barrier();
  multiply_tiles<Output, ROWS>(c, 0, Output::count(c.cluster), place);
  c.stages += Output::stages(c.cluster);
  add_to_residual(c, at, place, addition);
}

// hidden = gelu(norm(x) @ gate) * (norm(x) @ up).
__device__ __forceinline__ void gate_up(Consumer& c, const Position& at) {
  const int copy = c.layer_copy(at);
  const float* table = c.modulation(at.step, 2 * at.layer + 1);
  multiply_normalised<GateUp>(c, at, table, [&](const Round& r) {
    for (int i = c.thread; i < r.slots / 2 * ROWS * 4; i += kConsumers) {
      const int unit = i / (ROWS * 4), row = i / 4 % ROWS, pair = i % 4;
      const float inverse = r.inverse_rms(row);
      const float2 gate = r.value(2 * unit, row, pair, inverse), up = r.value(2 * unit + 1, row, pair, inverse);
      const int tile = (GateUp::first(c.cluster) + r.first) / 2 + unit * kRanks + c.rank;
      const int offset = row * kHidden + tile * kTile + pair * 2;
      exchange(c.rows(kHiddenWords, kHidden, copy) + offset, c.rows(kHiddenWords, kHidden, copy ^ 1) + offset,
               pack_bf16(gelu_tanh(gate.x) * up.x, gelu_tanh(gate.y) * up.y));
    }
  });
}

constexpr int kDownTiles = ceil_div(Down::kMost, kTileWarps);  // of a warp, at most

// Adds one half of the inputs to the sums of this warp's tiles.
__device__ __forceinline__ void multiply_half(Consumer& c, const unsigned char* operands, Sums (&sums)[kDownTiles],
                                              const Place& place, bool last) {
  const int tiles = Down::count(c.cluster), group = c.warp % kRowGroups, first = c.warp / kRowGroups;
  const unsigned char* weights[kDownTiles];
#pragma unroll
  for (int n = 0; n < kDownTiles; ++n)
    if (first + n * kTileWarps < tiles) weights[n] = await_tile<Down>(c, first + n * kTileWarps);
  if (first + (kDownTiles - 1) * kTileWarps < tiles) {
    multiply<Down::kGroups, Down::kStride, kDownTiles>(c, sums, operands, group, weights);
  } else if (kDownTiles > 1) {
    multiply<Down::kGroups, Down::kStride, kDownTiles - 1>(c, sums, operands, group, weights);
  }
#pragma unroll
  for (int n = 0; n < kDownTiles; ++n) {
    const int tile = first + n * kTileWarps;
    if (tile >= tiles) break;
    if (last) {
      send_part<ROWS>(c, sums[n], group, place, tile / kRanks, owner_of<Down>(tile));
    } else {  // something that needs the sums, in front of the release
      if (c.lane == 0) *const_cast<volatile float*>(c.shared.sink + c.warp) = sums[n].value(kTilesAtOnce - 1, 0);
    }
    release_tile<Down>(c, tile, tiles);
  }
  c.stages += Down::stages(c.cluster);
}

// x += gate * (hidden @ down).
__device__ __forceinline__ void down(Consumer& c, const Position& at) {
  const Addition addition(c, c.modulation(at.step, 2 * at.layer + 1) + 2 * kWidth);
  const Place place = c.place(at);
  const bf16* rows = c.rows(kHiddenWords, kHidden, c.layer_copy(at)) + c.rank * kHalves * Down::kSlice;
  Sums sums[kDownTiles];
#pragma unroll
  for (int n = 0; n < kDownTiles; ++n) clear(sums[n]);
  expect_sums(c, place);
  c.begin();
#pragma unroll
  for (int half = 0; half < kHalves; half += kHalvesHeld) {
    c.block_barrier();  // nobody reads the operands before
    load_rows<kHalvesHeld>(c, rows + half * Down::kSlice, kHidden);
    if (half == 0) {
      c.phase_barrier();
    } else {
      c.block_barrier();
    }
#pragma unroll
    for (int i = 0; i < kHalvesHeld; ++i)
      multiply_half(c, c.shared.operands + i * kHalfBytes, sums, place, half + i + 1 == kHalves);
  }
  add_to_residual(c, at, place, addition);
}

// Runs `phase` if it is among those of this launch.
template <typename Body>
__device__ __forceinline__ void run(Consumer& c, const Position& at, Phase phase, const Body& body) {
  if (c.index >= c.plan.first && c.index < c.plan.last) {
    c.identify();
    body(c, Position{at.step, at.layer, phase});
  }
  ++c.index;
}

__device__ __forceinline__ void run_phases(Consumer& c) {
  Position at = locate(c.plan.first);
  c.index = at.step * kPhasesPerStep;
  for (; c.index < c.plan.last; ++at.step) {
    at.layer = 0;
    run(c, at, kEnter, enter);
#pragma unroll 1
    for (; at.layer < LAYERS; ++at.layer) {
      run(c, at, kProject, project);
      run(c, at, kAttend, attend);
      run(c, at, kOutput, output);
      run(c, at, kGateUp, gate_up);
      run(c, at, kDown, down);
    }
    run(c, at, kLeave, leave);
  }
}

// -- kernel ------------------------------------------------------------------------------------------------------------------

// What a consumer must know of the launches before: which copies come first, and the residual values that it owns.
__device__ __forceinline__ void recall(Consumer& c) {
  c.identify();
  c.prefix = *c.plan.valid;
  const Position at = locate(c.plan.first);
  c.parity = __ldcg(c.plan.sync);
  if (at.phase != kOutput && at.phase != kDown) return;
  overlap_wait();
  const int column = c.owned_column();
  if (column >= 0)
    c.residual = __ldcg(reinterpret_cast<const float2*>(c.residual_rows(c.residual_copy(at) ^ 1) +
                                                        c.owned_row() * kWidth + column));
}

// The last block to leave notes which copies the next decision starts with.
__device__ __forceinline__ void remember(const Consumer& c) {
  if (c.plan.last < c.plan.steps * kPhasesPerStep || c.thread > 0) return;
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
           u32* words, u32* sync, int capacity, int steps, int first, int last) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Plan plan{project_weight, output_weight, gate_up_weight, down_weight, enter_weight, enter_bias, leave_weight,
                  leave_bias,     modulation,    rope,           prefix_key,  prefix_value, valid,      noise,
                  actions,        words,         sync,           capacity,    steps,        first,      last};
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(shared.full + s, 1);
      mbarrier_init(shared.empty + s, kArrivals);
    }
    for (int i = 0; i < 3; ++i) mbarrier_init(shared.parts + i, 1);
    mbarrier_init(&shared.values_full, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_barrier();
  overlap_trigger();
  const WeightRing ring{shared.ring, shared.full, shared.empty};
  // Registers are dealt out to groups of four warps: the producer's group gives its share to the consumers.
  if (threadIdx.x >= kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == kConsumers) produce(plan, ring);
    if (threadIdx.x / kWarpSize == kWarps + 1) fence_resets(plan);
    if (threadIdx.x / kWarpSize == kWarps + 2) fetch_values(plan, shared);
    __syncwarp();
    cluster_barrier();  // nobody leaves while others may still send to it
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
    Consumer c(plan, shared, ring);
    recall(c);
    run_phases(c);
    remember(c);
    cluster_barrier();
  }
}
