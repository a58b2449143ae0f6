// Hidden values of few rows stay inside their cluster: the block that makes some sends them to all eight, and each
// multiplies all hidden values of its cluster with `down` for an eighth of the outputs. What it gets is the cluster's
// share of these outputs; the shares of all clusters meet in one sum (see Fixed). So one exchange between clusters is
// left of two, and sums depend on the number of clusters.
//
// What comes from other blocks overwrites nothing that is still read. Hidden values lie in the memory of the operands,
// behind those of `gate_up`: a block sends them when it has parts of `gate_up` from all blocks of its cluster, and each
// has multiplied those behind a barrier of its own, in front of which it has read all operands of `output`, and hidden
// values of the layer before. For the same reason barrier 2 counts one layer at a time. Nor do they come to what is
// written anew: `attend` and `output` use that memory when the block has multiplied these hidden values. Parts of the
// next `project` may come while it still does: their memory was read last in `output`. Parts of `leave` may come as
// well, to that of parts of `gate_up`: whoever sends them has hidden values of all, which those parts became. Sums of
// teams take the place of the operands of `gate_up`, all of which have been read behind the block's barrier in front of
// its hidden values.
#pragma once
#include "expert_products.cuh"

// -- the way to the other blocks --------------------------------------------------------------------------------------

// One thread: the hidden values of this layer will come.
__device__ __forceinline__ void expect_hidden(Consumer& c, const Position& at) {
  c.expect(c.place({at.step, at.layer, kDown}), c.count<GateUp>() / 2 * ROWS * kTile * 2);
}

// Where the hidden values of a quad's row go: to all blocks of the cluster, whose memory is laid out alike.
struct ToCluster {
  u32 to;

  // Of the block's `slot`, in all layers.
  __device__ __forceinline__ ToCluster(const Consumer& c, const Position&, int slot, int, int row)
      : to(shared_address(c.hidden()) + (slot * kRanks + c.rank) * kHiddenStride + row * 16) {}
  __device__ __forceinline__ void pin() { asm volatile("" : "+r"(to)); }
  // All lanes of the warp: each gets the words of its quad, and sends them to two blocks. No two blocks of the cluster
  // begin with the same ones.
  __device__ __forceinline__ void put(const Consumer& c, int row, u32 word) const {
    const u32 counted = shared_address(c.shared.parts + 2) - to;
    const uint4 words = make_uint4(__shfl_sync(kAllLanes, word, 0, 4), __shfl_sync(kAllLanes, word, 1, 4),
                                   __shfl_sync(kAllLanes, word, 2, 4), __shfl_sync(kAllLanes, word, 3, 4));
    if (row >= ROWS) return;
#pragma unroll
    for (int r = 0; r < kRanks; r += 4) {
      const u32 there = remote(to, (r + c.quad) ^ c.rank);
      send(there, words, there + counted);
    }
  }
};

// -- the share of this block ------------------------------------------------------------------------------------------

// A lane has eight hidden values, four of each step; the scales of NVFP4 are for sixteen that come one after the other,
// which are those of two quads in both steps.
template <int BITS>
__device__ __forceinline__ void choose_scales(Weights<BITS>& weights, int quad) {
  if constexpr (BITS == 4) weights.scales[0] = weights.scales[1] = quad < 2 ? weights.scales[0] : weights.scales[1];
}

// Weights of one block of inputs and four tiles of outputs as the matrix instruction takes them, for each pair of tiles
// and step: a word of the first tile and of the second, and of the inputs behind those. What a stage holds for a tile
// is a word of both steps, and of the inputs behind those.
using ShareOperands = uint4[2][2];
__device__ __forceinline__ u32 share_offset(int group, int lane) {
  if (DOWN_BITS != 16) return Weights<DOWN_BITS>::offset(group, lane);
  return 2 * group * chunk_bytes(16) + lane / 8 % 2 * 256 + lane / 16 * 128 + lane % 8 * 16;
}
template <int BITS>
__device__ __forceinline__ void load_share(Weights<BITS>& weights, int lane, u32 from) {
  if constexpr (BITS == 16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) weights.steps[i] = load_matrices(from + i / 2 * 512 + i % 2 * chunk_bytes(16));
  } else {
    weights.load(lane, from);
  }
}
template <int BITS>
__device__ __forceinline__ void decode_share(const Weights<BITS>& weights, ShareOperands& to) {
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    if constexpr (BITS == 16) {
      to[pair][0] = weights.steps[2 * pair];
      to[pair][1] = weights.steps[2 * pair + 1];
    } else {
      const uint4 a = weights.step(2 * pair), b = weights.step(2 * pair + 1);
      to[pair][0] = make_uint4(a.x, b.x, a.z, b.z);
      to[pair][1] = make_uint4(a.y, b.y, a.w, b.w);
    }
  }
}

// What the sums of narrow weights are multiplied by, for the columns of a lane: those of its words of a row.
constexpr int kShareWords = kOutputsOfRank / kWarpSize;
using ShareFactors = float[kShareWords];

// Sums of a warp: of two pairs of tiles and each eight rows, as the matrix instruction has them: outputs lane / 4 of
// both tiles, of rows 2 * (lane % 4) and the next.
using ShareSums = float[2][kRowBlocks][4];

// Of four groups of outputs and three teams, which share the inputs: who this warp is, and what it holds at once.
struct Share {
  static constexpr int kEach = ceil_div(kMostHiddenBlocks, kDownTeams), kHeld = min_of(kEach, 3);  // blocks of inputs
  // Whether the ring has room for what all teams hold: then none waits for what another one has not released yet.
  static constexpr bool kHasRoom = kHeld * kDownTeams <= STAGES;
  // So many of the first blocks a warp takes behind its last unit of `gate_up`, in front of the wait for parts: those
  // whose stages have places that are free before there are rows, or that the first units of all warps leave. Others
  // would come too late to be waited for in front of hidden values that all blocks wait for.
  //
  // Nobody waits for ever: the producer fills the ring in order, and this warp has released all stages of `gate_up`
  // that it uses; the other ones release theirs without waiting for anything but earlier stages. All blocks that are
  // held have room in the ring, so none waits for another one's release either. And no parity is mistaken: a place that
  // held no stage of `gate_up` was released by all warps in front of a barrier of the block; one that did is waited for
  // until it is released (see Ring::wait), and what was there before that stage belongs to an earlier phase, since a
  // stage's number in this phase is below twice the number of places.
  static constexpr int kFirstStages =
      min_of(ceil_div(GateUp::kMost, kStageTiles), ceil_div(kUnitsAtOnce<GateUp>, kStageUnits)) * GateUp::kChunks;
  static constexpr int kReplaced = GateUp::stages(GateUp::kMost) - STAGES;  // stages of `gate_up` without places
  static constexpr int kEarly = kRowsEach > 1 || !kHasRoom || kFirstStages > STAGES
                                    ? 0
                                    : max_of(0, min_of(kHeld, (kFirstStages - kReplaced) / kDownTeams));

  // So many of those are decoded there, the others while this block waits for hidden values.
  static constexpr int kDecodedEarly = min_of(kEarly, DOWN_BITS == 4 ? 1 : kHeld);

  int group, team, blocks;
  u32 from[kHeld], full[kHeld], parity[kHeld];  // where weights lie, and what says that they are there
  Weights<DOWN_BITS> weights[kHeld];
  ShareOperands decoded[kHeld];
  ShareFactors factors;

  __device__ __forceinline__ explicit Share(const Consumer& c)
      : group(c.warp % kDownGroups), team(c.warp / kDownGroups), blocks(c.count<GateUp>() / kTilesOfBlock) {}

  __device__ __forceinline__ int block(int i) const { return team + i * kDownTeams; }

  // Where those of the blocks from number `first` of this team on lie: worked out while nobody waits for it.
  __device__ __forceinline__ void locate(const Consumer& c, int first = 0) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const Spot spot = c.ring.spot(c.stages + block(first + i));
      from[i] = c.ring.stage(spot) + share_offset(group, c.lane);
      full[i] = c.ring.full_barrier(spot);
      parity[i] = spot.parity;
      asm volatile("" : "+r"(from[i]), "+r"(full[i]), "+r"(parity[i]));
    }
  }

  // Takes the first weights behind this warp's last unit of `gate_up`.
  __device__ __forceinline__ void take_early(const Consumer& c) {
    constexpr bool kMayReplace = kReplaced + kEarly * kDownTeams > 0;
    const int before = GateUp::stages(c.count<GateUp>()) - STAGES;
    take<0, kEarly>(c, 0, [&](int number) { return kMayReplace && before + number >= 0; });
    decode<0, kDecodedEarly>(c);
  }
  // What that has left.
  __device__ __forceinline__ void decode_others(const Consumer& c) { decode<kDecodedEarly, kEarly>(c); }

  // Takes the others. All warps of this block have had all stages of `gate_up`.
  template <int BEGIN = 0>
  __device__ __forceinline__ void take_late(const Consumer& c, int first) {
    take<BEGIN, kHeld>(c, first, [](int number) { return kMostHiddenBlocks > STAGES && number >= STAGES; });
    decode<BEGIN, kHeld>(c);
  }

  // sums += what was taken, times the hidden values.
  __device__ __forceinline__ void multiply(const Consumer& c, int first, ShareSums& sums) const {
    const u32 from = shared_address(c.hidden()) + c.quad * kHiddenStride + c.row * 16;
    uint4 values[kHeld][kRowBlocks];  // of rows lane / 4 and eight further on; zero if they do not exist
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) {
        values[i][b] = make_uint4(0u, 0u, 0u, 0u);
        if (block(first + i) < blocks && 8 * b + c.row < ROWS)
          values[i][b] = load_shared16(from + block(first + i) * 4 * kHiddenStride + b * 8 * 16);
      }
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int pair = 0; pair < 2; ++pair)
#pragma unroll
          for (int b = 0; b < kRowBlocks; ++b) {
            const uint4 &w = decoded[i][pair][step], &x = values[i][b];
            mma_16x8x16(sums[pair][b], w.x, w.y, w.z, w.w, step == 0 ? x.x : x.z, step == 0 ? x.y : x.w);
          }
  }

  // What the sums are multiplied by, fetched while nobody waits for it.
  __device__ __forceinline__ void fetch_factors(const Consumer& c, const Position& at) {
#pragma unroll
    for (int k = 0; k < kShareWords; ++k)
      factors[k] = DOWN_BITS == 16 ? 1.0f
                                   : __ldg(c.plan.down_factor + at.layer * kWidth + c.rank * kOutputsOfRank +
                                           column_of_word(c.lane + k * kWarpSize));
  }

 private:
  // Weights BEGIN to END of those that are located; `replaces(number)`: see Ring::wait.
  template <int BEGIN, int END, typename Replaces>
  __device__ __forceinline__ void take(const Consumer& c, int first, const Replaces& replaces) {
#pragma unroll
    for (int i = BEGIN; i < END; ++i) {
      const int number = block(first + i);
      if (number < blocks) {
        c.ring.wait(c.stages + number, replaces(number), full[i], parity[i]);
        load_share(weights[i], c.lane, from[i]);
        if (!kHasRoom) release(c, i);
      } else {
        weights[i] = Weights<DOWN_BITS>{};
      }
    }
#pragma unroll
    for (int i = BEGIN; i < END; ++i)
      if (kHasRoom && block(first + i) < blocks) release(c, i);
  }

  __device__ __forceinline__ void release(const Consumer& c, int i) const {
    __syncwarp();
    if (c.lane == 0) c.ring.release(full[i], weights[i].loaded(), kArrivals / kDownGroups);
  }

  template <int BEGIN, int END>
  __device__ __forceinline__ void decode(const Consumer& c) {
#pragma unroll
    for (int i = BEGIN; i < END; ++i) {
      choose_scales(weights[i], c.quad);
      decode_share(weights[i], decoded[i]);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint4& to = decoded[i][k / 2][k % 2];
        if (DOWN_BITS != 16) asm volatile("" : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w));
      }
    }
  }
};

// Where the sums of a team lie. The memory of traded sums is free by then: squares of `gate_up` were read in front of
// the barrier behind its parts, and those of the next `project` come behind a barrier of the block.
__device__ __forceinline__ float* sums_of_team(const Consumer& c, int team) {
  if (kTradesTeam && team == kDownTeams - 1) return c.shared.traded;
  return reinterpret_cast<float*>(c.shared.operands) + team * kTeamFloats;
}

// This lane's sums, for those that add the sums of the teams.
__device__ __forceinline__ void store_team(const Consumer& c, const Share& share, const ShareSums& sums) {
  float* to = sums_of_team(c, share.team) + c.quad * 2 * kTeamStride + share.group * (kOutputsOfRank / kDownGroups) +
              c.row;
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (8 * b + c.quad * 2 + j >= ROWS) continue;
#pragma unroll
      for (int pair = 0; pair < 2; ++pair)
#pragma unroll
        for (int t = 0; t < 2; ++t)
          to[(8 * b + j) * kTeamStride + (2 * pair + t) * kTile] = sums[pair][b][2 * t + j];
    }
}

// Adds the share to that of the other clusters: a warp its rows, all lanes neighbouring words.
__device__ __forceinline__ void publish_share(const Consumer& c, u64* to, const ShareFactors& factors) {
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const int row = c.row_of_warp(i);
    if (row >= ROWS) break;
#pragma unroll
    for (int k = 0; k < kShareWords; ++k) {
      const int from = row * kTeamStride + column_of_word(c.lane + k * kWarpSize);
      float sum = sums_of_team(c, 0)[from];
#pragma unroll
      for (int team = 1; team < kDownTeams; ++team) sum += sums_of_team(c, team)[from];
      if (DOWN_BITS != 16) sum = __fmul_rn(sum, factors[k]);
      add_relaxed(to + i * kWarps * kWidth + k * kWarpSize, ShareSum::of(sum));
    }
  }
}

// This cluster's share of hidden @ down.
__device__ __forceinline__ void multiply_hidden(Consumer& c, const Position& at, Share& share) {
  const Place place = c.place({at.step, at.layer, kDown});
  u64* to = reinterpret_cast<u64*>(c.plan.words + kShares) + (c.layer_copy(at) * ROWS + c.warp) * kWidth +
            c.rank * kOutputsOfRank + c.lane;
  asm volatile("" : "+l"(to));
  ShareSums sums = {};
  share.decode_others(c);
  if (Share::kEarly < Share::kHeld) share.take_late<Share::kEarly>(c, 0);
  mbarrier_wait(c.parts_barrier(place), place.parity);
  share.multiply(c, 0, sums);
#pragma unroll 1
  for (int first = Share::kHeld; first < Share::kEach; first += Share::kHeld) {
    share.locate(c, first);
    share.take_late(c, first);
    share.multiply(c, first, sums);
  }
  c.stages += share.blocks;
  store_team(c, share, sums);
  c.fence_barrier();  // all teams, and the resets of this layer
  publish_share(c, to, share.factors);
}
