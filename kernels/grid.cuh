// Data exchange inside one resident grid of clusters, and the ring of weight stages in shared memory.
#pragma once
#include "common.cuh"

constexpr int kRanks = 8;  // blocks of a cluster: each takes an eighth of every sum

// A grid that was not wholly resident would wait for ever: after some seconds the launch fails instead.
constexpr u32 kMostSpins = 1u << 24;

// -- between clusters: words that say themselves whether they have been written ---------------------------------------

// A word of an exchanged buffer holds kUnwritten until its value arrives: a reader polls the data itself, so a value
// takes one store and one load through L2, without a fence and a flag. As two bfloat16 or one float, kUnwritten is a
// NaN that no instruction produces. Every buffer has copies that take turns. A block resets its words of a copy that
// everybody has read, and its resets are fenced before any value without which nobody gets to read that copy again.
constexpr u32 kUnwritten = 0xffffffffu;

__device__ __forceinline__ uint4 load_relaxed16(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_relaxed(void* p, u32 value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed(void* p, u32 low, u32 high) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(low), "r"(high) : "memory");
}

__device__ __forceinline__ void store_relaxed16(void* p, u32 value) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(p), "r"(value) : "memory");
}

__device__ __forceinline__ bool written(const uint4& v) {
  return v.x != kUnwritten && v.y != kUnwritten && v.z != kUnwritten && v.w != kUnwritten;
}

// Loads pieces of 16 bytes as soon as all of their words have been written: those i for which has(i) is true, from the
// address from(i). The others are zero.
template <int COUNT, typename Has, typename From>
__device__ __forceinline__ void poll(uint4 (&to)[COUNT], const Has& has, const From& from) {
  bool all;
  u32 spins = 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) to[i] = make_uint4(0, 0, 0, 0);
  do {
    all = true;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (has(i)) to[i] = load_relaxed16(from(i));
#pragma unroll
    for (int i = 0; i < COUNT; ++i) all = all && written(to[i]);
    if (++spins > kMostSpins) __trap();
  } while (!all);
}

// There is something to do while words are on their way, or nothing.
struct Nothing {
  __device__ __forceinline__ void operator()() const {}
};
template <int COUNT, typename Has, typename From>
__device__ __forceinline__ void poll(uint4 (&to)[COUNT], const Has& has, const From& from, const Nothing&) {
  poll(to, has, from);
}
// The first loads stand outside of the loop: what does not depend on them, a compiler would move in front of that.
template <int COUNT, typename Has, typename From, typename Meanwhile>
__device__ __forceinline__ void poll(uint4 (&to)[COUNT], const Has& has, const From& from, const Meanwhile& meanwhile) {
  bool all = true;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    to[i] = make_uint4(0, 0, 0, 0);
    if (has(i)) to[i] = load_relaxed16(from(i));
  }
  meanwhile();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) all = all && written(to[i]);
  if (!all) poll(to, has, from);
}

// -- between clusters: sums of fixed-point numbers, which are the same in any order ----------------------------------

// A word of 64 bits holds a sum in units of 2^-kFractionBits, and in its low bits how many have been added: it is
// complete when there are COUNT. Zero at first; what resets it is fenced before anything without which nobody gets to
// add to it again. A number that is too large or none at all adds so much that whoever reads the sum gets a NaN.
template <int COUNT>
struct Fixed {
  static_assert(COUNT <= 16, "bits of the count");
  static constexpr int kFractionBits = 24, kCountBits = COUNT < 16 ? 4 : 5, kLargest = COUNT < 16 ? 50 : 48;
  static constexpr u32 kMask = (1u << kCountBits) - 1;

  static __device__ __forceinline__ u64 of(float x) {
    const float units = x * static_cast<float>(1 << kFractionBits);
    const bool fits = fabsf(units) < static_cast<float>(1ull << kLargest);  // false for a NaN too
    const long long number = fits ? __float2ll_rn(units) : 1ll << (kLargest + 5);
    return (static_cast<u64>(number) << kCountBits) + 1;
  }

  static __device__ __forceinline__ bool complete(u32 low) { return (low & kMask) == COUNT; }

  // COUNT numbers that fit are below 2^(kLargest + 4); with one that does not, the sum is above that.
  static __device__ __forceinline__ float value(u32 low, u32 high) {
    const float sum = __ll2float_rn(static_cast<long long>(static_cast<u64>(high) << 32 | (low & ~kMask)));
    if (static_cast<int>(high) >= 1 << (kLargest + 4 + kCountBits - 32)) return __uint_as_float(0x7fffffffu);
    return sum * (1.0f / (1ull << (kFractionBits + kCountBits)));
  }
};

__device__ __forceinline__ void add_relaxed(void* p, u64 value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

// Loads pairs of sums as soon as both are complete: those i for which has(i) is true, from the address from(i). The
// others are zero.
template <int COUNT, int PAIRS, typename Has, typename From>
__device__ __forceinline__ void poll_sums(uint4 (&to)[PAIRS], const Has& has, const From& from) {
  bool all;
  u32 spins = 0;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) to[i] = make_uint4(COUNT, 0, COUNT, 0);
  do {
    all = true;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i)
      if (has(i)) to[i] = load_relaxed16(from(i));
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) all = all && Fixed<COUNT>::complete(to[i].x) && Fixed<COUNT>::complete(to[i].z);
    if (++spins > kMostSpins) __trap();
  } while (!all);
}
template <int COUNT, int PAIRS, typename Has, typename From>
__device__ __forceinline__ void poll_sums(uint4 (&to)[PAIRS], const Has& has, const From& from, const Nothing&) {
  poll_sums<COUNT>(to, has, from);
}
template <int COUNT, int PAIRS, typename Has, typename From, typename Meanwhile>
__device__ __forceinline__ void poll_sums(uint4 (&to)[PAIRS], const Has& has, const From& from,
                                          const Meanwhile& meanwhile) {
  bool all = true;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    to[i] = make_uint4(COUNT, 0, COUNT, 0);
    if (has(i)) to[i] = load_relaxed16(from(i));
  }
  meanwhile();
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) all = all && Fixed<COUNT>::complete(to[i].x) && Fixed<COUNT>::complete(to[i].z);
  if (!all) poll_sums<COUNT>(to, has, from);
}

// -- between clusters: either ----------------------------------------------------------------------------------------

// Publishes one word: `value` into the copy in use, kUnwritten into the other.
__device__ __forceinline__ void exchange(void* copy, void* other, u32 value) {
  store_relaxed(copy, value);
  store_relaxed(other, kUnwritten);
}

// -- inside a cluster: stores into the shared memory of another block, counted by its barrier -------------------------

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The address in the block `rank` of what lies at `address` in this one.
__device__ __forceinline__ u32 remote(u32 address, u32 rank) {
  u32 result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
  return result;
}

__device__ __forceinline__ void send(u32 to, float value, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
               "r"(__float_as_uint(value)), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void send(u32 to, float first, float second, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
               "r"(__float_as_uint(first)), "r"(__float_as_uint(second)), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void send(u32 to, const uint4& v, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void send_word(u32 to, u32 word, u32 barrier) { send(to, __uint_as_float(word), barrier); }

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// -- registers --------------------------------------------------------------------------------------------------------

// A group of four warps gives registers back, or asks for more of them, and has COUNT then: those that fetch need few.
template <int COUNT>
__device__ __forceinline__ void give_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

template <int COUNT>
__device__ __forceinline__ void take_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

// -- barriers ---------------------------------------------------------------------------------------------------------

constexpr int kPairBarriers = 8;  // the first of eight that pairs of warps use

template <int NAME, int THREADS>
__device__ __forceinline__ void named_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(NAME), "n"(THREADS) : "memory");
}

template <int NAME, int THREADS>
__device__ __forceinline__ void named_barrier_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(NAME), "n"(THREADS) : "memory");
}

// Two warps wait for each other.
__device__ __forceinline__ void pair_barrier(int pair) {
  asm volatile("bar.sync %0, %1;" ::"r"(kPairBarriers + pair), "n"(2 * kWarpSize) : "memory");
}

// True in one thread of a warp, which must be converged. The compiler knows that it is one: around copies by a thread
// that was chosen by its number it makes loops over all threads that might be there.
__device__ __forceinline__ bool elect_one() {
  u32 chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
  return chosen;
}

// Barriers that count arrivals and bytes, named by their addresses in shared memory.
constexpr u32 kBarrierBytes = 8;

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// With the usual scope of a block: the wider ones invalidate the first-level cache at every wait, and what arrives is
// shared memory, which is not cached.
__device__ __forceinline__ bool mbarrier_passed(u32 barrier, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done;
}

__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
  if (mbarrier_passed(barrier, parity)) return;
#pragma unroll 1
  for (u32 spins = 0; !mbarrier_passed(barrier, parity); ++spins)
    if (spins > kMostSpins) __trap();
}

// -- the ring ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u64 evict_first_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void bulk_copy(u32 shared, const void* global, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Where a stage lies, and whether that place was used before an even or an odd number of times.
struct Spot {
  u32 slot, parity;
};

// One producer thread fills stages with bulk copies, in the order in which the consumers use them. Stages are numbered
// from the start of the launch. DEPTH: stages that it holds, of BYTES. FARTHEST: how far behind a phase's first stage
// somebody may wait for one before waiting for any other.
template <int DEPTH, int BYTES, int FARTHEST>
struct Ring {
  static constexpr bool kIsDeep = DEPTH >= FARTHEST;

  // Addresses in shared memory. `claims`: how many stages have been claimed, unless it is deep.
  u32 data, full, empty, claims;

  // Producer of a shallow ring: the barriers of the first `count` stages are in the turn that they need.
  __device__ __forceinline__ void claim(u32 count) const {
    asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(claims), "r"(count) : "memory");
  }
  __device__ __forceinline__ u32 claimed() const {
    u32 count;
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(count) : "r"(claims) : "memory");
    return count;
  }

  __device__ __forceinline__ Spot spot(u32 number) const { return {number % DEPTH, number / DEPTH & 1}; }
  __device__ __forceinline__ Spot behind(const Spot& s) const {
    const bool wraps = s.slot + 1 == DEPTH;
    return {wraps ? 0 : s.slot + 1, s.parity ^ static_cast<u32>(wraps)};
  }
  // `count` stages further, at most DEPTH.
  __device__ __forceinline__ Spot behind(const Spot& s, u32 count) const {
    const u32 slot = s.slot + count;
    const bool wraps = slot >= DEPTH;
    return {wraps ? slot - DEPTH : slot, s.parity ^ static_cast<u32>(wraps)};
  }
  __device__ __forceinline__ u32 stage(const Spot& s) const { return data + s.slot * BYTES; }
  __device__ __forceinline__ u32 full_barrier(const Spot& s) const { return full + s.slot * kBarrierBytes; }

  // Waits for stage `number`, whose barrier is `barrier`. `replaces`: what its place held before belongs to the same
  // phase. A parity tells two turns of a place apart, but not three: the turn before must have been filled. In a
  // shallow ring the stage is claimed first, which comes behind that. In a deep one the turn before was a stage of an
  // earlier phase, which all warps have released; or it is waited for until they have. The turn before that one cannot
  // be meant: it was in an earlier phase too, or this warp has waited since for a stage that the producer, who keeps
  // the order, filled behind its release.
  __device__ __forceinline__ void wait(u32 number, bool replaces, u32 barrier, u32 parity) const {
    if (!kIsDeep) {
      for (u32 spins = 0; claimed() <= number; ++spins)
        if (spins > kMostSpins) __trap();
    } else if (replaces) {
      mbarrier_wait(barrier + (empty - full), parity ^ 1);
    }
    mbarrier_wait(barrier, parity);
  }

  // One lane: `count` warps need the stage with that barrier no longer; `loaded` is what this one loaded last. The
  // count is made from it, since an arrival would overtake a load that is still under way.
  __device__ __forceinline__ void release(u32 barrier, u32 loaded, u32 count) const {
    asm volatile(
        "{\n.reg .b32 n;\nor.b32 n, %1, %2;\nmin.u32 n, n, %2;\nmbarrier.arrive.shared.b64 _, [%0], n;\n}" ::"r"(
            barrier + (empty - full)),
        "r"(loaded), "r"(count)
        : "memory");
  }
};
