// The action expert over a few rows, as one resident grid: all steps and layers, or any range of their phases.
//
// A step is: enter | (project, attend, output, gate_up, down) x layers | leave. The grid consists of clusters of eight
// blocks. A cluster computes some outputs of a product, each of its blocks with an eighth of the inputs; the parts meet
// in the shared memory of the block that owns the output. So a block reads an eighth of the rows only, and a phase ends
// with one exchange inside the cluster and one between clusters (see grid.cuh), neither of which needs a flag in front
// of the reader; one fence a layer is for the resets behind them. With few rows `down` is part of gate_up: a cluster
// multiplies its own hidden values, and what all clusters get is added (see expert_hidden.cuh).
//
// The weights depend on nothing: a producer thread of each block streams them through a ring in shared memory, across
// phases, layers and steps. While a block waits for rows, its warps work out addresses, and with few rows they take the
// first weights into registers.
//
// Launching the phases one by one computes the same bits. So does any number of clusters with many rows; with few, each
// cluster rounds its share of `down`, and there are as many shares as clusters.
//
// The residual stays in float, in registers: every cluster has all of it, and adds the same sums in the same order. The
// adaptive norm rides on the product behind it: the operands are x * (1 + scale), the row's 1 / rms is applied to the
// sum, and what the shift gives behind the product is in a table, as it depends on weights and step alone.
//
// Query and key features come in rotary pairs (i, i + 128).
//
// ROWS: rows of the chunk; OPERAND_ROWS: those in whole groups of eight. KEYS: keys that a block may have, in groups of
// 32. LAYERS: number of layers. CLUSTERS: size of the grid. RESIDENT: one launch runs all phases; otherwise a launch
// runs one. STAGES: of the ring, that there is room for. SHARED_BYTES: shared memory of a block. PROJECT_BITS,
// OUTPUT_BITS, GATE_UP_BITS, DOWN_BITS: of a product's weights, 16 for bfloat16, 8 for E4M3 or 4 for NVFP4; activations
// are bfloat16.
#include "expert_attention.cuh"
#include "expert_hidden.cuh"
#include "expert_plan.cuh"
#include "expert_products.cuh"

// -- phases of a layer ------------------------------------------------------------------------------------------------

constexpr int kTilesPerHead = kHeadDim / kTile;

struct Turn {
  float cosine, sine;
};

// Cosine and sine for one pair of a projection tile (values do not use them).
__device__ __forceinline__ Turn turn_of(const Consumer& c, int tile, int row) {
  const bf16* from = c.plan.rope + min(row, ROWS - 1) * kHeadDim + tile % kTilesPerHead * 4 + c.quad;
  return {to_float(from[0]), to_float(from[kHeadDim / 2])};
}

// Where a lane's word of one row of a projection tile goes.
struct Target {
  bf16* to;
  int other;     // elements to the same place in the other copy
  bool rotates;  // queries and keys do, values do not

  __device__ __forceinline__ void pin() { asm volatile("" : "+l"(to), "+r"(other)); }
};

__device__ __forceinline__ Target target_of(const Consumer& c, int copy, int tile, int row) {
  const int head = tile / kTilesPerHead, local = tile % kTilesPerHead, pair = c.quad;
  const bool low = pair % 2 == 0;
  int offset = row * kHeadDim + local * kTile + pair * 2, base = kValue, width = kHeadDim;
  if (head <= kHeads) {
    offset = local * 4 + (low ? pair : pair - 1 + kHeadDim / 2) + row * kHeadDim;
    base = kKey;
  }
  if (head < kHeads) {
    offset += row * (kInner - kHeadDim) + head * kHeadDim;
    base = kQuery;
    width = kInner;
  }
  return {c.rows(base, width, copy) + offset, (1 - 2 * copy) * ROWS * width, head <= kHeads};
}

// The rotated pair (or two value columns) of one row of a projection tile. The lanes of two neighbouring pairs trade,
// so that each writes whole words; all lanes of the warp must come here.
__device__ __forceinline__ void store_projection(const Consumer& c, const Target& target, int row, float2 v,
                                                 Turn turn) {
  const int pair = c.quad;
  // Written out, since a compiler may fuse either product, and another grid must give the same bits.
  const float first = fmaf(v.x, turn.cosine, -(v.y * turn.sine)), second = fmaf(v.y, turn.cosine, v.x * turn.sine);
  const bool low = pair % 2 == 0;
  const float traded = __shfl_xor_sync(kAllLanes, low ? second : first, 1);
  if (row >= ROWS) return;
  const float low_half = low ? first : traded, high_half = low ? traded : second;
  const u32 word = target.rotates ? pack_bf16(low_half, high_half) : pack_bf16(v.x, v.y);
  exchange(target.to, target.to + target.other, word);
}

// What is made before the wait, for the first tile and row of a warp.
struct FirstProjection {
  float2 factor;
  Target target;
};

// query, key, value = rope(norm(x) @ project).
__device__ __forceinline__ void project(Consumer& c, const Position& at) {
  const int copy = c.layer_copy(at), first = c.first<Project>() + c.rank;
  const auto tile_of = [&](int slot) { return min(first + slot * kRanks, Project::kTiles - 1); };
  // What the tables say of this warp's first tile is fetched before the wait.
  const int early_tile = tile_of(c.warp / kRowBlocks), early_row = c.warp % kRowBlocks * 8 + c.row;
  const Turn early = turn_of(c, early_tile, early_row);
  const float2 early_shift = shift_of<Project>(c, at, c.plan.project_shift, early_tile);
  const auto factor = [&](int tile) { return factor_of<Project>(c, at, c.plan.project_factor, tile); };
  const auto fetch = [&] {
    FirstProjection made{factor(early_tile), target_of(c, copy, early_tile, early_row)};
    if (kOnce<Project>) made.target.pin();
    return made;
  };
  multiply_normalised<Project>(c, at, fetch, [&](const Arrived& arrived, const auto& made, int slot, int row) {
    const int tile = kOnce<Project> ? early_tile : tile_of(slot);
    const bool is_early = kOnce<Project> || (tile == early_tile && row == early_row);
    const Turn turn = is_early ? early : turn_of(c, tile, row);
    const float2 shift = is_early ? early_shift : shift_of<Project>(c, at, c.plan.project_shift, tile);
    const float2 scale = is_early ? made.factor : factor(tile);
    const float2 v = arrived.value<Project>(0, arrived.inverse_rms(), scale, shift);
    store_projection(c, kOnce<Project> ? made.target : target_of(c, copy, tile, row), row, v, turn);
  });
}

// Parts of attended @ output.
__device__ __forceinline__ void output(Consumer& c, const Position& at) {
  c.fetch_norm(at.step, 2 * at.layer + 1);
  multiply_added<Output>(c, at, kAttended, c.plan.output_factor);
}

// Of two neighbouring outputs of gate, and of up.
struct Factors {
  float2 gate, up;
};

// Where a lane's hidden values go: through the second-level cache, to all clusters.
struct ToClusters {
  bf16* to;
  int other;  // elements to the same place in the other copy

  // Of the block's `slot`, which is number `unit` of the layer.
  __device__ __forceinline__ ToClusters(const Consumer& c, const Position& at, int, int unit, int row)
      : to(c.rows(kHiddenWords, kHidden, c.layer_copy(at)) + row * kHidden + unit * kTile + c.quad * 2),
        other((1 - 2 * c.layer_copy(at)) * ROWS * kHidden) {}
  __device__ __forceinline__ void pin() { asm volatile("" : "+l"(to)); }
  __device__ __forceinline__ void put(const Consumer&, int row, u32 word) const {
    if (row < ROWS) exchange(to, to + other, word);
  }
};

template <bool IS_FEW>
struct HiddenPlaceOf {
  using Type = ToCluster;
};
template <>
struct HiddenPlaceOf<false> {
  using Type = ToClusters;
};
using HiddenPlace = typename HiddenPlaceOf<kFewRows>::Type;

// What is made before the wait, for the first unit and row of a warp.
struct FirstHidden {
  Factors factors;
  HiddenPlace place;
};

// hidden = gelu(norm(x) @ gate) * (norm(x) @ up).
__device__ __forceinline__ void gate_up(Consumer& c, const Position& at) {
  const int first = c.first<GateUp>() / 2 + c.rank;
  if (kFewRows) expect_hidden(c, at);
  const auto unit_of = [&](int unit) { return min(first + unit * kRanks, GateUp::kTiles / 2 - 1); };
  const int early_unit = unit_of(c.warp / kRowBlocks);
  const float2 early_gate = shift_of<GateUp>(c, at, c.plan.gate_up_shift, 2 * early_unit),
               early_up = shift_of<GateUp>(c, at, c.plan.gate_up_shift, 2 * early_unit + 1);
  const auto factors = [&](int unit) {
    return Factors{factor_of<GateUp>(c, at, c.plan.gate_up_factor, 2 * unit),
                   factor_of<GateUp>(c, at, c.plan.gate_up_factor, 2 * unit + 1)};
  };
  Share share(c);
  const auto fetch = [&] {
    const int slot = c.warp / kRowBlocks;
    FirstHidden made{factors(early_unit), HiddenPlace(c, at, slot, early_unit, c.warp % kRowBlocks * 8 + c.row)};
    if (kOnce<GateUp>) made.place.pin();
    if (kFewRows && kRowsEach == 1) {
      share.fetch_factors(c, at);
      share.locate(c);
      share.take_early(c);
    }
    return made;
  };
  multiply_normalised<GateUp>(c, at, fetch, [&](const Arrived& arrived, const auto& made, int slot, int row) {
    if (!kFewRows && row >= ROWS) return;
    const int unit = unit_of(slot);
    const bool is_early = kOnce<GateUp> || unit == early_unit;
    const float2 gate_shift = is_early ? early_gate : shift_of<GateUp>(c, at, c.plan.gate_up_shift, 2 * unit),
                 up_shift = is_early ? early_up : shift_of<GateUp>(c, at, c.plan.gate_up_shift, 2 * unit + 1);
    const Factors scale = is_early ? made.factors : factors(unit);
    const float inverse = arrived.inverse_rms();
    const float2 gate = arrived.value<GateUp>(0, inverse, scale.gate, gate_shift),
                 up = arrived.value<GateUp>(1, inverse, scale.up, up_shift);
    const u32 word = pack_bf16(lifted<Down>(gelu_tanh(gate.x) * up.x), lifted<Down>(gelu_tanh(gate.y) * up.y));
    if (kOnce<GateUp>) {
      made.place.put(c, row, word);
    } else {
      HiddenPlace(c, at, slot, unit, row).put(c, row, word);
    }
  });
  if (!kResident || at.layer + 1 < LAYERS) c.free_values();
  if (!kFewRows) return c.resets_done();
  if (kRowsEach > 1) {
    share.fetch_factors(c, at);
    share.locate(c);
  }
  c.fetch_norm(at.step, 2 * at.layer + 2);
  multiply_hidden(c, at, share);
}

// Parts of hidden @ down.
__device__ __forceinline__ void down(Consumer& c, const Position& at) {
  c.fetch_norm(at.step, 2 * at.layer + 2);
  multiply_added<Down>(c, at, kHiddenWords, c.plan.down_factor);
}

// -- where a step ends ------------------------------------------------------------------------------------------------

// This block's part of (x * (1 + scale)) @ leave_weight for this warp's rows, to all blocks of the cluster:
// parts[rank][row][action].
__device__ __forceinline__ void send_velocity(const Consumer& c, const float* parts, u32 barrier) {
  const float* weight = c.plan.leave_weight + c.rank * Project::kSlice * kActions + c.lane;
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const int row = c.row_of_warp(i);
    if (row >= ROWS) break;
    float* inputs = reinterpret_cast<float*>(c.shared.operands) + row * Project::kSlice;
    *reinterpret_cast<float4*>(inputs + c.inner_column()) = scaled(c, c.residual[i]);
    __syncwarp();
    float sum = 0.0f;
#pragma unroll 8
    for (int column = 0; column < Project::kSlice; column += 4) {
      const float4 x = load_float4(inputs + column);
      const float* w = weight + column * kActions;
      sum = fmaf(x.x, w[0], sum);
      sum = fmaf(x.y, w[kActions], sum);
      sum = fmaf(x.z, w[2 * kActions], sum);
      sum = fmaf(x.w, w[3 * kActions], sum);
    }
    const u32 to = shared_address(parts + (c.rank * ROWS + row) * kActions + c.lane);
#pragma unroll
    for (int r = 0; r < kRanks; ++r) send(remote(to, r), sum, remote(barrier, r));
  }
}

// actions += norm(x) @ leave_weight + leave_bias, in every block.
__device__ __forceinline__ void leave(Consumer& c, const Position& at) {
  const Place place = c.place(at);
  const float* parts = place.parts + kSquares;
  const u32 barrier = c.parts_barrier(place);
  c.expect(place, kLeaveFloats * 4);
  update_residual(c, at);
  if (!kResident) recall_actions(c, at);
  send_velocity(c, parts, barrier);
  send_squares(c, place.parts, barrier);
  c.await(place);
  const bool writes = blockIdx.x == 0 && (!kResident || at.step + 1 == c.plan.steps);
  const float bias = c.plan.leave_bias[at.step * kActions + c.lane];
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const int row = c.row_of_warp(i);
    if (row >= ROWS) break;
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) sum += parts[(r * ROWS + row) * kActions + c.lane];
    const float action = *c.action(row) + fmaf(sum, Arrived{0, shared_address(place.parts + row)}.inverse_rms(), bias);
    *c.action(row) = action;
    if (writes) c.plan.actions[row * kActions + c.lane] = action;
  }
  __syncwarp();
  if (!kResident) return;
  c.free_values();
  if (at.step + 1 < c.plan.steps) c.fetch_norm(at.step + 1, 0);
}

// -- all phases -------------------------------------------------------------------------------------------------------

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
#pragma unroll 1
    for (int layer = 0; layer < LAYERS; ++layer) {
      run(c, step, layer, kProject, project);
      run(c, step, layer, kAttend, attend);
      run(c, step, layer, kOutput, output);
      run(c, step, layer, kGateUp, gate_up);
      if (!kFewRows) run(c, step, layer, kDown, down);
    }
    run(c, step, LAYERS, kLeave, leave);
  }
}

__device__ __forceinline__ void run_one(Consumer& c) {
  const Position at = locate(c.plan.phase);
  switch (at.phase) {
    case kProject: return project(c, at);
    case kAttend: return attend(c, at);
    case kOutput: return output(c, at);
    case kGateUp: return gate_up(c, at);
    case kDown:
      if (!kFewRows) down(c, at);
      return;
    case kLeave: return leave(c, at);
  }
}

// -- kernel -----------------------------------------------------------------------------------------------------------

// What a consumer must know of the launches before: which copies come first.
__device__ __forceinline__ void recall(Consumer& c) {
  if (kResident) overlap_wait();
  c.know(*c.plan.valid);
  c.parity = __ldcg(c.plan.sync);
  if (kResident) c.fetch_norm(0, 0);
}

// The last block to leave notes which copies the next decision starts with.
__device__ __forceinline__ void remember(const Consumer& c) {
  if ((!kResident && c.plan.phase + 1 < c.plan.steps * kPhasesPerStep) || c.thread > 0) return;
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(c.plan.sync + 1) : "memory");
  if (before + 1 < kBlocks) return;
  const u32 layers = c.plan.steps * LAYERS;
  __stcg(c.plan.sync, (c.parity + 2 * layers & 3) | ((c.parity >> 2) + layers & 1) << 2);
  __stcg(c.plan.sync + 1, 0u);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    expert(const unsigned char* project_weight, const unsigned char* output_weight, const unsigned char* gate_up_weight,
           const unsigned char* down_weight, const float* enter_weight, const float* enter_bias,
           const float* leave_weight, const float* leave_bias, const float* modulation, const float* project_shift,
           const float* gate_up_shift, const bf16* rope,
           const bf16* prefix_key, const bf16* prefix_value, const int* valid, const float* noise, float* actions,
           u32* words, u32* sync, int capacity, int steps, int phase,
           const float* project_factor, const float* output_factor, const float* gate_up_factor,
           const float* down_factor) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Plan plan{project_weight, output_weight, gate_up_weight, down_weight, enter_weight, enter_bias, leave_weight,
                  leave_bias, modulation, project_shift, gate_up_shift, rope, prefix_key, prefix_value, valid, noise,
                  actions, words, sync, capacity, steps, phase, project_factor, output_factor, gate_up_factor,
                  down_factor};
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(shared_address(shared.full + s), 1);
      mbarrier_init(shared_address(shared.empty + s), kArrivals);
    }
    for (int i = 0; i < kPlaces; ++i) mbarrier_init(shared_address(shared.parts + i), 1);
    shared.claimed = 0;
    mbarrier_init(shared_address(&shared.values_full), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_barrier();
  overlap_trigger();
  const WeightRing ring{shared_address(shared.ring), shared_address(shared.full), shared_address(shared.empty),
                        shared_address(&shared.claimed)};
  if (threadIdx.x >= kConsumers) {
    if (kMovesRegisters) give_registers<kRegistersThatFetch>();
    const int warp = threadIdx.x / kWarpSize;
    if (warp == kWarps && elect_one()) produce(plan, ring);
    if (warp == kWarps + 1) fence_resets(plan);
    if (warp == kWarps + 2) fetch_values(plan, shared);
    if (kPrefetches && warp == kWarps + 3 && elect_one()) prefetch(plan, ring);
    __syncwarp();
    cluster_barrier();  // nobody leaves while others may still send to it
  } else {
    if (kMovesRegisters) take_registers<kRegistersThatMultiply>();
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
