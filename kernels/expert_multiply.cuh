// Products of streamed weights with the operand rows, in registers. A unit is two tiles of outputs, which a warp
// multiplies at once; a stage of the ring holds one chunk of the inputs of four units (see Product). OPERAND_ROWS:
// kOperandRows, as text.
#pragma once
#include "expert_weights.cuh"

// Many rows on Hopper: its own instructions read operands from shared memory for four warps at once. With few rows they
// are no faster than the others (docs/performance.md).
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && OPERAND_ROWS > 16
#define WARPGROUPS 1
#define TILE_ROWS OPERAND_ROWS
#include "wgmma.cuh"
#else
#define WARPGROUPS 0
#endif
static_assert(OPERAND_ROWS == kOperandRows, "the host computes the same");

// Sums of a warp: sums[4 * block + i] is output lane / 4 of tile i / 2 of a unit, and operand row
// 8 * block + 2 * (lane % 4) + i % 2.
constexpr int kSums = 4 * kRowBlocks;
constexpr int kStageUnits = kStageTiles / 2;

// Where this lane's row of the matrices of each step lies, in the first chunk: for two blocks of eight rows, both
// groups of eight inputs.
struct OperandAddress {
  u32 step[kSteps];

  __device__ __forceinline__ explicit OperandAddress(const Consumer& c) {
    const int row = c.lane % 8, half = c.lane / 8 % 2, block = kRowBlocks > 1 ? c.lane / 16 : 0;
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      step[s] = shared_address(c.shared.operands) + (block * 8 + row) * 128 + ((2 * s + half) ^ row) * 16;
  }

  // Operands of two neighbouring blocks of rows; of one if there is no more.
  __device__ __forceinline__ uint4 load(int chunk, int s, int block) const {
    const u32 from = step[s] + chunk * kOperandBytesOfChunk + block * 1024;
    if (block + 1 < kRowBlocks) return load_matrices(from);
    const uint2 one = load_two_matrices(from);
    return make_uint4(one.x, one.y, 0u, 0u);
  }
};

// Operands of few rows, for one chunk.
struct FewRows {
  uint4 first[kSteps / 2], more[kSteps / 2];  // of two steps each: of the first eight rows, of those behind them

  // Both groups of eight inputs of the first rows, and of those behind them.
  __device__ __forceinline__ uint4 step(int s) const {
    const uint4 &a = first[s / 2], &b = more[s / 2];
    return s % 2 == 0 ? make_uint4(a.x, a.y, b.x, b.y) : make_uint4(a.z, a.w, b.z, b.w);
  }
};

// Where this lane's parts of those lie, from an even chunk on (see kMoreRowsOffset).
struct FewRowsAddress {
  u32 first[kSteps / 2], more;

  __device__ __forceinline__ FewRowsAddress(const Consumer& c, int chunk) {
    const u32 operands = shared_address(c.shared.operands) + chunk * kOperandBytesOfChunk;
    const int row = c.lane % 8;
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) first[i] = operands + row * 128 + (4 * i + c.lane / 8 ^ row) * 16;
    more = operands + kMoreRowsOffset + c.lane * 16;
  }
  // They stay in registers from here on.
  __device__ __forceinline__ void pin() { asm volatile("" : "+r"(first[0]), "+r"(first[1]), "+r"(more)); }

  // Only lanes whose row exists load what lies behind the first eight rows.
  __device__ __forceinline__ FewRows load(const Consumer& c, int chunk) const {
    FewRows rows;
    const int offset = chunk * kOperandBytesOfChunk;
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) rows.first[i] = load_matrices(first[i] + offset);
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) {
      rows.more[i] = make_uint4(0u, 0u, 0u, 0u);
      if (c.lane < (ROWS - 8) * 4)
        rows.more[i] = load_shared16((more ^ more_rows_swizzle(chunk, i)) + i * kMoreRowsPair + offset);
    }
    return rows;
  }
};

// One step for two blocks of rows.
__device__ __forceinline__ void multiply_step(float (&sums)[kSums], const uint4& weights, const uint4& rows,
                                              int block) {
#pragma unroll
  for (int b = 0; b < 2 && block + b < kRowBlocks; ++b) {
    float(&d)[4] = *reinterpret_cast<float(*)[4]>(sums + 4 * (block + b));
    mma_16x8x16(d, weights.x, weights.y, weights.z, weights.w, b == 0 ? rows.x : rows.z, b == 0 ? rows.y : rows.w);
  }
}

// A chunk of a unit in the ring: where this lane finds it, the barrier that says that it is there, for how many warps
// this one arrives when it needs the stage no longer, and what Ring::wait must know.
struct Source {
  u32 from, full, parity, arrivals, number;
  bool replaces;
};

// Where the weights of one unit of a product lie in the ring.
template <typename P>
struct Unit {
  int tiles, shift, member;  // tiles of its stage, log2 of the chunks in it, and which of its units this is
  u32 first, lane_offset;    // stage of the first chunk; where a chunk has what this lane loads

  __device__ __forceinline__ Unit(const Consumer& c, int unit) {
    const int group = unit / kStageUnits;
    member = unit % kStageUnits;
    tiles = min(kStageTiles, c.count<P>() - group * kStageTiles);
    shift = P::log2_chunks_in_stage(tiles);
    first = c.stages + group * P::kChunks;
    lane_offset = Weights<P::kBits>::offset(member, c.lane);
  }

  __device__ __forceinline__ int inside(int chunk) const { return chunk & (1 << shift) - 1; }
  __device__ __forceinline__ u32 stage(int chunk) const { return first + (chunk >> shift); }

  // Whether its place in the ring held another stage of this phase before.
  __device__ __forceinline__ bool replaces(const Consumer& c, int chunk) const {
    return P::stages(P::kMost) > STAGES && stage(chunk) - c.stages >= STAGES;
  }

  // Where the weights of a chunk lie whose stage is at `spot`: of the whole unit's stage, or what this lane loads of
  // them.
  __device__ __forceinline__ u32 all_weights(const Consumer& c, int chunk, const Spot& spot) const {
    return c.ring.stage(spot) + inside(chunk) * tiles * P::kChunkBytes;
  }
  __device__ __forceinline__ u32 weights(const Consumer& c, int chunk, const Spot& spot) const {
    return all_weights(c, chunk, spot) + lane_offset;
  }

  // Every stage gets kArrivals arrivals: the first that there must be counts for those that there are not.
  __device__ __forceinline__ u32 arrivals(int chunk) const {
    const int missing = kArrivals - min(1 << shift, P::kChunks) * ((tiles + 1) / 2);
    return member == 0 && inside(chunk) == 0 ? 1u + missing : 1u;
  }

  __device__ __forceinline__ Source source(const Consumer& c, int chunk, const Spot& spot) const {
    return {weights(c, chunk, spot), c.ring.full_barrier(spot), spot.parity,
            arrivals(chunk),         stage(chunk),              replaces(c, chunk)};
  }

  // Waits for the weights of a chunk, and says where they are.
  __device__ __forceinline__ u32 await_all(const Consumer& c, int chunk, const Spot& spot) const {
    c.ring.wait(stage(chunk), replaces(c, chunk), c.ring.full_barrier(spot), spot.parity);
    return all_weights(c, chunk, spot);
  }
  __device__ __forceinline__ u32 await(const Consumer& c, int chunk, const Spot& spot) const {
    return await_all(c, chunk, spot) + lane_offset;
  }

  __device__ __forceinline__ void release(const Consumer& c, int chunk, const Spot& spot, u32 loaded) const {
    if (c.lane == 0) c.ring.release(c.ring.full_barrier(spot), loaded, arrivals(chunk));
  }
};

// -- few rows: a warp multiplies whole units, or half of the inputs of one where there are many -----------------------

static_assert(Project::kChunks == 2 && GateUp::kChunks == 2 && Output::kChunks == 4, "a warp has two chunks of a unit");
template <typename P>
constexpr bool kPairs = P::kChunks > 2;  // two warps share a unit
template <typename P>
constexpr int kUnitsAtOnce = kPairs<P> ? kWarps / 2 : kWarps;

// The sums of eight outputs as the exchange wants them: words[block] is outputs 2 * (lane % 4) and the next, of row
// 8 * block + lane / 4.
__device__ __forceinline__ void transpose_tile(u32 (&words)[kRowBlocks], const float (&sums)[kSums], int tile) {
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b)
    words[b] = transposed_matrix(pack_bf16(sums[4 * b + 2 * tile], sums[4 * b + 2 * tile + 1]));
}

template <typename P, typename Finish>
__device__ __forceinline__ void finish_unit(const Consumer& c, const float (&sums)[kSums], int unit,
                                            const Finish& finish) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int tile = 2 * unit + half;
    if (tile >= c.count<P>()) break;
    u32 words[kRowBlocks];
    transpose_tile(words, sums, half);
    finish(tile, words);
  }
}

// The same of few rows, which lets each lane finish eight outputs of one row: finish(tile, row, outputs). Sums become
// rows in memory: that of the operands of chunks that this product does not have, 16 bytes a row.
template <typename P>
__device__ __forceinline__ u32 rows_memory(const Consumer& c) {
  constexpr int kBefore = P::kChunks * kOperandBytesOfChunk, kEnd = kBefore + kWarps * kUnitRowsBytes;
  static_assert(!kFewRows || kPairs<P> || kEnd <= kOperandBytes, "chunks of other products");
  static_assert(!kFewRows || kPairs<P> || kEnd <= kHiddenOffset, "other blocks may send hidden values already");
  return shared_address(c.shared.operands) + kBefore + c.warp * kUnitRowsBytes + c.lane * kTile * 2;
}
template <typename P, typename Finish>
__device__ __forceinline__ void finish_unit_by_rows(const Consumer& c, const float (&sums)[kSums], int unit,
                                                    const Finish& finish) {
  u32 words[2 * kRowBlocks];
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    const int first = i % kRowBlocks * 4 + i / kRowBlocks * 2;
    words[i] = pack_bf16(sums[first], sums[first + 1]);
  }
  const u32 memory = rows_memory<P>(c);
  __syncwarp();  // all lanes have loaded what was there before
  store_matrices_transposed(memory, words);
  __syncwarp();
  const int tile = 2 * unit + c.lane / kOperandRows, row = c.lane % kOperandRows;
  if (c.lane < 2 * kOperandRows && row < ROWS && tile < c.count<P>()) finish(tile, row, load_shared16(memory));
}

// Decodes one step, here and not where it is used.
template <int BITS>
__device__ __forceinline__ void decode_step(uint4& to, const Weights<BITS>& weights, int s) {
  to = weights.step(s);
  asm volatile("" : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w));
}

// The units of a product that a warp multiplies, one at a time. It is made in front of the wait for rows, which is long
// enough to work out all addresses, and to take the first weights into registers: the ring is filled again meanwhile.
template <typename P>
struct Multiplier {
  static constexpr int kOwn = 2;  // chunks of a unit that this warp has: both, or half of four
  static constexpr bool kMore = ceil_div(P::kMost, 2) > kUnitsAtOnce<P>;
  // A warp waits for its first weights in front of the barrier behind the operands. Other stages of the phase are
  // released behind it only, so that is for rings where none of those first ones takes the place of another stage of
  // the phase.
  static constexpr int kGroupsAtOnce = min_of(ceil_div(P::kMost, kStageTiles), ceil_div(kUnitsAtOnce<P>, kStageUnits));
  static constexpr bool kIsEarly = (kGroupsAtOnce - 1) * P::kChunks + (kPairs<P> ? kOwn : 0) + 1 < STAGES;
  // Steps of the first unit that it decodes before it asks for rows. NVFP4 takes almost twice as many instructions as
  // E4M3, and whoever asks later gets them later: the others are decoded while rows are on their way.
  static constexpr int kDecoded = kOwn * kSteps, kInFront = P::kBits == 4 ? 6 : kDecoded;
  static constexpr bool kLeaves = kIsEarly && kInFront < kDecoded;

  int unit, half;  // number of the unit; of its inputs
  FewRowsAddress operands;
  Source sources[kOwn];
  Weights<P::kBits> weights[kOwn];
  uint4 decoded[kOwn][kSteps] = {};  // what the matrix instructions take of codes

  __device__ __forceinline__ explicit Multiplier(const Consumer& c)
      : unit(kPairs<P> ? c.warp / 2 : c.warp),
        half(kPairs<P> ? c.warp % 2 : 0),
        operands(c, kPairs<P> ? c.warp % 2 * kOwn : 0) {
    operands.pin();
    locate(c);
  }

  __device__ __forceinline__ bool exists(const Consumer& c) const { return 2 * unit < c.count<P>(); }

  __device__ __forceinline__ void locate(const Consumer& c) {
    const Unit<P> place(c, unit);
    Spot spot = c.ring.spot(place.stage(half * kOwn));
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int chunk = half * kOwn + i;
      Source& source = sources[i];
      source = place.source(c, chunk, spot);
      asm volatile("" : "+r"(source.from), "+r"(source.full), "+r"(source.parity), "+r"(source.arrivals));
      if (place.inside(chunk + 1) == 0) spot = c.ring.behind(spot);
    }
  }

  // Takes a unit's first weights: in front of the barrier behind the operands if it can, otherwise behind it.
  __device__ __forceinline__ void prepare(const Consumer& c) {
    if (kIsEarly) take_and_release<kInFront>(c);
  }
  __device__ __forceinline__ void begin(const Consumer& c) {
    if (!kIsEarly) take_and_release<kDecoded>(c);
  }
  template <int COUNT>
  __device__ __forceinline__ void take_and_release(const Consumer& c) {
    take(c);
    if (exists(c)) release_and_decode<COUNT>(c);
  }
  // What `prepare` has left.
  __device__ __forceinline__ void decode_others(const Consumer& c) {
    if (kLeaves && exists(c)) decode<kInFront, kDecoded>();
  }

  // Takes the weights of its chunks, if its unit exists.
  __device__ __forceinline__ void take(const Consumer& c) {
    if (!exists(c)) return;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const Source& source = sources[i];
      c.ring.wait(source.number, source.replaces, source.full, source.parity);
      weights[i].load(c.lane, source.from);
    }
  }

  // The ring may have the memory of what was taken. The first COUNT steps of codes are decoded at once.
  template <int COUNT = kDecoded>
  __device__ __forceinline__ void release_and_decode(const Consumer& c) {
    release(c);
    decode<0, COUNT>();
  }
  template <int BEGIN, int END>
  __device__ __forceinline__ void decode() {
    if constexpr (P::kBits != 16) {
#pragma unroll
      for (int k = BEGIN; k < END; ++k) decode_step(decoded[k / kSteps][k % kSteps], weights[k / kSteps], k % kSteps);
    }
  }
  __device__ __forceinline__ void release(const Consumer& c) const {
    __syncwarp();
    if (c.lane > 0) return;
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      c.ring.release(sources[i].full, weights[i].loaded(), sources[i].arrivals);
  }

  // sums[i] += chunk i times rows[i]: both side by side, whose chains of sums overlap.
  __device__ __forceinline__ void multiply(float (&sums)[kOwn][kSums], const FewRows (&rows)[kOwn]) const {
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        multiply_step(sums[i], P::kBits == 16 ? weights[i].step(s) : decoded[i][s], rows[i].step(s), 0);
  }
};

// The same where the ring holds the whole product, and a warp has few units: it waits for all weights in front of the
// wait for rows, knows by then where they are, and has as many of them as there are registers for. What it loads later,
// it loads behind products of another unit.
template <typename P>
constexpr int kUnitsEach = ceil_div(ceil_div(P::kMost, 2), kUnitsAtOnce<P>);
template <typename P>
constexpr bool kHolds = !kPairs<P> && P::stages(P::kMost) <= STAGES && kUnitsEach<P> <= 4;

template <typename P>
struct HeldUnits {
  static constexpr int kUnits = kUnitsEach<P>;
  static constexpr int kSets = P::kBits == 16 ? 1 : kUnits;  // units whose weights there are registers for
  // Decoded chunks that there are registers for: codes of NVFP4 leave more. What is decoded before there are rows need
  // not be behind products.
  static constexpr int kPlaces = kUnits == 1 ? 2 : P::kBits == 4 ? 4 : 3;
  // Steps of them that are decoded before rows are asked for: see Multiplier. Of one unit all, since then rows, which
  // are those that the layer begins with, come late enough.
  static constexpr int kDecoded = kPlaces * kSteps, kInFront = P::kBits == 4 && kUnits > 1 ? 4 : kDecoded;
  static constexpr bool kLeaves = P::kBits != 16 && kInFront < kDecoded;
  static_assert(!kHolds<P> || P::kChunks == 2, "a warp multiplies whole units");

  int first;  // number of this warp's first unit
  FewRowsAddress operands;
  u32 from[kUnits][2];                  // where the weights of both chunks lie in the ring
  u32 empty[kUnits], arrivals[kUnits];  // of lane i's release, which is that of chunk i
  Weights<P::kBits> weights[kSets][2];
  uint4 decoded[kPlaces][kSteps] = {};  // what the matrix instructions take of codes: of the chunks to come

  __device__ __forceinline__ explicit HeldUnits(const Consumer& c) : first(c.warp), operands(c, 0) { operands.pin(); }

  // Whether the groups in which unit i of some warp lies are whole, whatever the cluster.
  static __host__ __device__ constexpr bool is_whole(int i) { return (i + 1) * kUnitsAtOnce<P> * 2 <= P::kLeast; }

  __device__ __forceinline__ int unit(int i) const { return first + i * kUnitsAtOnce<P>; }
  __device__ __forceinline__ bool exists(const Consumer& c, int i) const {
    return is_whole(i) || 2 * unit(i) < c.count<P>();
  }

  // Waits for the weights of unit i: from its group on there are `left` tiles, and its first chunk is at `spot`. All
  // that the ring holds of a phase has places that were free when it began.
  __device__ __forceinline__ void await(const Consumer& c, int i, const Spot& spot, int left) {
    constexpr bool kAll = P::kIsWhole;
    const int member = first % kStageUnits, tiles = kAll || is_whole(i) ? kStageTiles : min(left, kStageTiles);
    const bool shares = !kAll && !is_whole(i) && P::log2_chunks_in_stage(tiles) > 0;  // one stage has both chunks
    const Spot behind = c.ring.behind(spot);
    const u32 full[2] = {c.ring.full_barrier(spot), c.ring.full_barrier(shares ? spot : behind)};
    const u32 offset = Weights<P::kBits>::offset(member, c.lane);
    from[i][0] = c.ring.stage(spot) + offset;
    from[i][1] = shares ? from[i][0] + tiles * P::kChunkBytes : c.ring.stage(behind) + offset;
    const int missing = kArrivals - (shares ? 2 : 1) * ((tiles + 1) / 2);
    const bool is_second = c.lane > 0;
    empty[i] = is_second ? full[1] : full[0];
    arrivals[i] = member == 0 && !(is_second && shares) ? 1 + missing : 1;  // see Unit::arrivals
    asm volatile("" : "+r"(from[i][0]), "+r"(from[i][1]), "+r"(empty[i]), "+r"(arrivals[i]));
    const u32 number = c.stages + (unit(i) / kStageUnits) * P::kChunks;
    c.ring.wait(number, false, full[0], spot.parity);
    c.ring.wait(shares ? number : number + 1, false, full[1], shares ? spot.parity : behind.parity);
  }

  __device__ __forceinline__ void load(const Consumer& c, int i) {
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) weights[i % kSets][chunk].load(c.lane, from[i][chunk]);
  }

  // The ring may have the memory of unit i, once all lanes have loaded.
  __device__ __forceinline__ void release(const Consumer& c, int i) const {
    const auto& loaded = weights[i % kSets];
    const u32 all = loaded[0].loaded() | loaded[1].loaded();
    __syncwarp();
    if (c.lane < 2) c.ring.release(empty[i], all, arrivals[i]);
  }

  // Chunks of all units are counted: a unit has two, and a chunk's place is its number modulo kPlaces.
  __device__ __forceinline__ void decode_step_of(int chunk, int s) {
    if constexpr (P::kBits != 16)
      decode_step(decoded[chunk % kPlaces][s], weights[chunk / 2 % kSets][chunk % 2], s);
  }
  // Steps BEGIN to END, counted from the first chunk on.
  template <int BEGIN, int END>
  __device__ __forceinline__ void decode_first(const Consumer& c) {
    if (!exists(c, 0)) return;
#pragma unroll
    for (int k = BEGIN; k < END; ++k) decode_step_of(k / kSteps, k % kSteps);
  }
  // What `prepare` has left.
  __device__ __forceinline__ void decode_others(const Consumer& c) { decode_first<kInFront, kDecoded>(c); }

  // Behind products of unit i: its places have room for two chunks. Those of units that do not exist are zeros, which
  // are decoded too: what is written under one condition and read under another would be in registers for ever.
  __device__ __forceinline__ void decode_behind(int i) {
#pragma unroll
    for (int chunk = 2 * i + kPlaces; chunk < min_of(2 * i + kPlaces + 2, 2 * kUnits); ++chunk) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) decode_step_of(chunk, s);
    }
  }

  __device__ __forceinline__ void prepare(const Consumer& c) {
    constexpr u32 kFurther = kUnitsAtOnce<P> / kStageUnits * P::kChunks;  // stages from one unit to the next
    static_assert(kPairs<P> || kUnitsAtOnce<P> % kStageUnits == 0, "all units of a warp are the same member");
    const int group = first / kStageUnits;
    Spot spot = c.ring.spot(c.stages + group * P::kChunks);
    int left = c.count<P>() - group * kStageTiles;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (!exists(c, i)) break;
      await(c, i, spot, left);
      if (i < kSets) load(c, i);
      left -= kUnitsAtOnce<P> * 2;
      spot = c.ring.behind(spot, kFurther);
    }
#pragma unroll
    for (int i = 0; i < kSets; ++i)
      if (exists(c, i)) release(c, i);
    decode_first<0, kInFront>(c);
  }

  // What both chunks of unit i add, side by side: chains of sums that overlap.
  __device__ __forceinline__ void multiply(float (&sums)[kSums], const FewRows (&rows)[2], int i) const {
    float both[2][kSums] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk)
        multiply_step(both[chunk],
                      P::kBits == 16 ? weights[i % kSets][chunk].step(s) : decoded[(2 * i + chunk) % kPlaces][s],
                      rows[chunk].step(s), 0);
#pragma unroll
    for (int k = 0; k < kSums; ++k) sums[k] = both[0][k] + both[1][k];
  }
};

template <typename P, typename Finish>
__device__ __forceinline__ void multiply_held_units(const Consumer& c, HeldUnits<P>& m, const Finish& finish) {
  constexpr int kUnits = HeldUnits<P>::kUnits, kSets = HeldUnits<P>::kSets;
  if (!m.exists(c, 0)) return;
  const FewRows kept[2] = {m.operands.load(c, 0), m.operands.load(c, 1)};
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    float sums[kSums];
    m.multiply(sums, kept, i);
    const bool loads = i + kSets < kUnits && m.exists(c, i + kSets), goes_on = i + 1 < kUnits && m.exists(c, i + 1);
    if (loads) m.load(c, i + kSets);
    if (goes_on) m.decode_behind(i);
    finish_unit_by_rows<P>(c, sums, m.unit(i), finish);
    if (!goes_on) return;
    if (loads) m.release(c, i + kSets);
  }
}

// Whole units. One is finished while the weights of the next come.
template <typename P, typename Finish>
__device__ __forceinline__ void multiply_whole(const Consumer& c, Multiplier<P>& m, const Finish& finish) {
  if (!m.exists(c)) return;
  const FewRows kept[2] = {m.operands.load(c, 0), m.operands.load(c, 1)};
  m.begin(c);
#pragma unroll 1
  while (true) {
    float both[2][kSums] = {}, sums[kSums];
    m.multiply(both, kept);
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = both[0][i] + both[1][i];
    const int unit = m.unit;
    if (Multiplier<P>::kMore) {
      m.unit += kUnitsAtOnce<P>;
      m.locate(c);
      m.take(c);
    }
    finish_unit_by_rows<P>(c, sums, unit, finish);
    if (!Multiplier<P>::kMore || !m.exists(c)) return;
    m.release_and_decode(c);
  }
}

// Halves of units: the two warps of a pair trade sums, and each finishes one tile.
template <typename P, typename Finish>
__device__ __forceinline__ void multiply_halves(const Consumer& c, Multiplier<P>& m, const Finish& finish) {
  if (!m.exists(c)) return;
  float4* traded = reinterpret_cast<float4*>(c.shared.traded) + c.lane;
  const int half = m.half;
#pragma unroll 1
  while (true) {
    float both[2][kSums] = {};
    const FewRows rows[2] = {m.operands.load(c, 0), m.operands.load(c, 1)};
    m.begin(c);
    m.multiply(both, rows);
    float mine[4] = {}, given[4] = {};
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int low = i / 2 * 4 + i % 2;
      const float first = both[0][low] + both[1][low], second = both[0][low + 2] + both[1][low + 2];
      mine[i] = half == 0 ? first : second;
      given[i] = half == 0 ? second : first;
    }
    traded[c.warp * kWarpSize] = make_float4(given[0], given[1], given[2], given[3]);
    pair_barrier(c.warp / 2);
    const float4 more = traded[(c.warp ^ 1) * kWarpSize];
    const float sums[4] = {mine[0] + more.x, mine[1] + more.y, mine[2] + more.z, mine[3] + more.w};
    const int tile = 2 * m.unit + half;
    if (tile < c.count<P>()) {
      u32 words[kRowBlocks];
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) words[b] = transposed_matrix(pack_bf16(sums[2 * b], sums[2 * b + 1]));
      finish(tile, words);
    }
    if (!Multiplier<P>::kMore) return;
    pair_barrier(c.warp / 2);
    m.unit += kUnitsAtOnce<P>;
    if (!m.exists(c)) return;
    m.locate(c);
    m.prepare(c);
    m.decode_others(c);
  }
}

// -- many rows: there is enough to do for a team of four warps, which takes up to eight tiles -------------------------

// sums = this warp's unit of the group that its team has.
template <typename P>
__device__ __forceinline__ void multiply_many_rows(const Consumer& c, float (&sums)[kSums], const Unit<P>& unit,
                                                   const OperandAddress& operands) {
#pragma unroll
  for (int s = 0; s < kSums; ++s) sums[s] = 0.0f;
#pragma unroll
  for (int chunk = 0; chunk < P::kChunks; ++chunk) {
    const Spot spot = c.ring.spot(unit.stage(chunk));
    Weights<P::kBits> weights;
    weights.load(c.lane, unit.await(c, chunk, spot));
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint4 of_step = weights.step(s);
#pragma unroll
      for (int block = 0; block < kRowBlocks; block += 2)
        multiply_step(sums, of_step, operands.load(chunk, s, block), block);
    }
    __syncwarp();
    unit.release(c, chunk, spot, weights.loaded());
  }
}

template <typename P, typename Finish>
__device__ __forceinline__ void multiply_in_teams(const Consumer& c, const Finish& finish) {
  const OperandAddress operands(c);
#pragma unroll 1
  for (int unit = c.warp; 2 * unit < c.count<P>(); unit += kWarps) {
    float sums[kSums];
    multiply_many_rows<P>(c, sums, Unit<P>(c, unit), operands);
    finish_unit<P>(c, sums, unit, finish);
  }
}

// -- many rows on Hopper: four warps multiply a stage -----------------------------------------------------------------

#if WARPGROUPS
constexpr int kGroups = kWarps / 4;
static_assert(kStageUnits == 4, "a warp's sixteen rows of the product are a unit");

// The matrices of a stage of bfloat16, eight outputs by eight inputs, lie one behind the other without a swizzle: 128
// bytes to the next eight inputs (in the low word of a descriptor), a tile's chunk to the next eight outputs (in the
// high one).
constexpr u32 kNextInputs = 128 >> 4 << 16, kNextOutputs = chunk_bytes(16) >> 4;
__device__ __forceinline__ u32 matrices_start(u32 shared) { return tile_start(shared) | kNextInputs; }

// Starts d += weights * rows^T for sixteen inputs, with this warp's weights in registers, two words each; `d` must have
// begun. `multiply` of wgmma.cuh says how it is laid out: as the sums of a unit. The weights must stay as they are
// until the product has ended, and are outputs only because the lists count from the operand behind them.
__device__ __forceinline__ void multiply_held(float (&d)[kSums], u64& first, u64& second, u32 rows) {
  u64 of_rows = joined(rows, kTileHigh);
  asm volatile(
      "{\n.reg .pred p;\n.reg .b32 a0, a1, a2, a3;\nsetp.eq.b32 p, 0, 0;\n"
      "mov.b64 {a0, a1}, %1;\nmov.b64 {a2, a3}, %2;\n"
      "wgmma.mma_async.sync.aligned.m64n" WG_STRING(TILE_ROWS) WG_SHAPE
      "{" WG_OF(WG_NAMES_, TILE_ROWS) "}, {a0, a1, a2, a3}, %0, p, 1, 1, 0;\n}"
      : "+l"(of_rows), "+l"(first), "+l"(second), WG_OF(WG_SUMS_, TILE_ROWS)::"memory");
}

// All of these words are in registers here.
__device__ __forceinline__ void hold(u64 (&first)[kSteps], u64 (&second)[kSteps]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) asm volatile("" : "+l"(first[s]), "+l"(second[s])::"memory");
}

// What a group of four warps does with the stages of its units.
template <typename P>
struct Group {
  const Consumer& c;
  Unit<P> unit;  // this warp's
  u32 operands = tile_start(shared_address(c.shared.operands));

  __device__ __forceinline__ u32 rows(int chunk, int s) const {
    return further(operands, chunk * kOperandBytesOfChunk + s * 32);
  }

  // Behind the last chunk of a stage. Every stage gets kArrivals arrivals.
  __device__ __forceinline__ void release(int chunk, u32 loaded) const {
    if (unit.inside(chunk + 1) == 0 && c.lane == 0)
      c.ring.release(c.ring.full_barrier(c.ring.spot(unit.stage(chunk))), loaded, c.warp % 4 == 0 ? kArrivals - 3 : 1);
  }

  // Weights as they lie in the ring. One chunk is on its way while the one before it ends.
  __device__ __forceinline__ void multiply_bf16(float (&sums)[kSums]) const {
#pragma unroll
    for (int chunk = 0; chunk < P::kChunks; ++chunk) {
      const u32 from = matrices_start(unit.await_all(c, chunk, c.ring.spot(unit.stage(chunk))));
      __syncwarp();
      products_begin();
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
        multiply<kNextOutputs>(sums, further(from, s * 256), rows(chunk, s), chunk + s > 0);
      products_commit();
      if (chunk > 0) {
        products_wait<1>();
        release(chunk - 1, 0u);
      }
    }
    products_finish(sums);
    release(P::kChunks - 1, 0u);
  }

  // Codes, decoded by the warp that they are for.
  __device__ __forceinline__ void multiply_codes(float (&sums)[kSums]) const {
#pragma unroll
    for (int chunk = 0; chunk < P::kChunks; ++chunk) {
      Weights<P::kBits> weights;
      weights.load(c.lane, unit.await(c, chunk, c.ring.spot(unit.stage(chunk))));
      u64 first[kSteps], second[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint4 decoded = weights.step(s);
        first[s] = joined(decoded.x, decoded.y);
        second[s] = joined(decoded.z, decoded.w);
      }
      __syncwarp();
      release(chunk, weights.loaded());
      hold(first, second);  // all decoded, so that no product waits for the next one's weights
      products_begin();
#pragma unroll
      for (int s = 0; s < kSteps; ++s) multiply_held(sums, first[s], second[s], rows(chunk, s));
      products_commit();
      products_finish(sums);
      hold(first, second);
    }
  }
};

template <typename P, typename Finish>
__device__ __forceinline__ void multiply_in_groups(const Consumer& c, const Finish& finish) {
#pragma unroll 1
  for (int group = c.warp / 4; group * kStageTiles < c.count<P>(); group += kGroups) {
    const int unit = group * kStageUnits + c.warp % 4;
    const Group<P> all{c, Unit<P>(c, unit)};
    float sums[kSums] = {};
    if constexpr (P::kBits == 16) {
      all.multiply_bf16(sums);
    } else {
      all.multiply_codes(sums);
    }
    if (2 * unit < c.count<P>()) finish_unit<P>(c, sums, unit, finish);
  }
}
#else
template <typename P, typename Finish>
__device__ __forceinline__ void multiply_in_groups(const Consumer&, const Finish&) {}
#endif

// -- either -----------------------------------------------------------------------------------------------------------

// With many rows nothing is done before there are operands.
template <typename P>
struct ManyRowsMultiplier {
  static constexpr bool kLeaves = false;
  __device__ __forceinline__ explicit ManyRowsMultiplier(const Consumer&) {}
  __device__ __forceinline__ void prepare(const Consumer&) const {}
};
template <typename P, bool IS_FEW = kFewRows, bool HOLDS = kHolds<P>>
struct MultiplierOf {
  using Type = Multiplier<P>;
};
template <typename P>
struct MultiplierOf<P, true, true> {
  using Type = HeldUnits<P>;
};
template <typename P, bool HOLDS>
struct MultiplierOf<P, false, HOLDS> {
  using Type = ManyRowsMultiplier<P>;
};
// What multiplies the tiles of this cluster.
template <typename P>
using TileMultiplier = typename MultiplierOf<P>::Type;

// Asks for rows, and meanwhile decodes what `prepare` has left: ask(meanwhile), see poll.
template <typename M, typename Ask>
__device__ __forceinline__ void while_asking(const Consumer& c, M& multiplier, const Ask& ask) {
  if constexpr (M::kLeaves) {
    ask([&] { multiplier.decode_others(c); });
  } else {
    ask(Nothing{});
  }
}

// Multiplies the tiles of this cluster; finish(tile, words) takes each of this warp's (see transpose_tile).
template <typename P, typename Finish>
__device__ __forceinline__ void multiply_tiles(const Consumer& c, TileMultiplier<P>& m, const Finish& finish) {
  if constexpr (WARPGROUPS) {
    multiply_in_groups<P>(c, finish);
  } else if constexpr (!kFewRows) {
    multiply_in_teams<P>(c, finish);
  } else if constexpr (kHolds<P>) {
    multiply_held_units<P>(c, m, finish);
  } else if constexpr (kPairs<P>) {
    multiply_halves<P>(c, m, finish);
  } else {
    multiply_whole<P>(c, m, finish);
  }
}
