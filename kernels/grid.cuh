// Data exchange inside one resident grid of clusters, and the ring of weight stages in shared memory.
#pragma once
#include "common.cuh"

constexpr int kRanks = 8;  // blocks of a cluster: each takes an eighth of every sum

// A grid that was not wholly resident would wait for ever: after some seconds the launch fails instead.
constexpr u32 kMostSpins = 1u << 24;

// -- between clusters: words that say themselves whether they have been written ------------------------------------------

// A word of an exchanged buffer holds kUnwritten until its value arrives: a reader polls the data itself, so a value
// takes one store and one load through L2, without a fence and a flag. As two bfloat16 or one float, kUnwritten is a NaN
// that no instruction produces. Every buffer has copies that take turns. A block resets its words of a copy that everybody
// has read, and its resets are fenced before any value without which nobody gets to read that copy again.
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

__device__ __forceinline__ bool written(const uint4& v) {
  return v.x != kUnwritten && v.y != kUnwritten && v.z != kUnwritten && v.w != kUnwritten;
}

// Loads COUNT pieces of 16 bytes as soon as all of their words have been written. `from(i)` is the address of piece i, or
// null: nothing is loaded.
template <int COUNT, typename From>
__device__ __forceinline__ void poll(uint4 (&to)[COUNT], const From& from) {
  bool all;
  u32 spins = 0;
  do {
    all = true;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      to[i] = make_uint4(0, 0, 0, 0);
      if (from(i) != nullptr) to[i] = load_relaxed16(from(i));
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) all = all && written(to[i]);
    if (++spins > kMostSpins) __trap();
  } while (!all);
}

// Publishes one word: `value` into the copy in use, kUnwritten into the other.
__device__ __forceinline__ void exchange(void* copy, void* other, u32 value) {
  store_relaxed(copy, value);
  store_relaxed(other, kUnwritten);
}

// -- inside a cluster: stores into the shared memory of another block, counted by its barrier ----------------------------

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

__device__ __forceinline__ void send_word(u32 to, u32 word, u32 barrier) { send(to, __uint_as_float(word), barrier); }

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// -- barriers ------------------------------------------------------------------------------------------------------------

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

__device__ __forceinline__ void mbarrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// With the usual scope of a block: the wider ones invalidate the first-level cache at every wait, and what arrives is shared
// memory, which is not cached.
__device__ __forceinline__ bool mbarrier_passed(u64* barrier, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return done;
}

__device__ __forceinline__ void mbarrier_wait(u64* barrier, u32 parity) {
  if (mbarrier_passed(barrier, parity)) return;
#pragma unroll 1
  for (u32 spins = 0; !mbarrier_passed(barrier, parity); ++spins)
    if (spins > kMostSpins) __trap();
}

// -- the ring ------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u64 evict_first_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void bulk_copy(void* shared, const void* global, u32 bytes, u64* barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// One producer thread fills stages with bulk copies, in the order in which the consumers use them. Stages are numbered
// from the start of the launch. FARTHEST: how far ahead of a stage that is still in use somebody may wait.
struct Spot {
  u32 slot, parity;
};

template <int DEPTH, int BYTES, int FARTHEST>
struct Ring {
  unsigned char* data;
  u64* full;
  u64* empty;
  u32* claims;  // stages claimed so far

  // Producer: stage `number` is free, and will hold `bytes`. At most AHEAD stages are under way at once.
  template <int AHEAD>
  __device__ __forceinline__ void claim(u32 number, u32 bytes) const {
    static_assert(AHEAD <= DEPTH, "stages under way");
    if (number >= AHEAD) mbarrier_wait(full + (number - AHEAD) % DEPTH, (number - AHEAD) / DEPTH & 1);
    if (number >= DEPTH) mbarrier_wait(empty + number % DEPTH, (number / DEPTH - 1) & 1);
    mbarrier_expect(full + number % DEPTH, bytes);
    asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(claims)), "r"(number + 1) : "memory");
  }

  __device__ __forceinline__ u32 claimed() const {
    u32 count;
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(count) : "r"(shared_address(claims)) : "memory");
    return count;
  }

  // Producer: `bytes` from `global`, to `offset` in the stage.
  __device__ __forceinline__ void fetch(u32 number, u32 offset, const void* global, u32 bytes, u64 policy) const {
    bulk_copy(data + number % DEPTH * BYTES + offset, global, bytes, full + number % DEPTH, policy);
  }

  // Where stage `number` lies, and how often that place was used before, odd or even.
  __device__ __forceinline__ Spot spot(u32 number) const { return {number % DEPTH, number / DEPTH & 1}; }
  __device__ __forceinline__ Spot behind(const Spot& s) const {
    const bool wraps = s.slot + 1 == DEPTH;
    return {wraps ? 0 : s.slot + 1, s.parity ^ static_cast<u32>(wraps)};
  }

  __device__ __forceinline__ const unsigned char* stage(const Spot& s) const { return data + s.slot * BYTES; }

  // A barrier tells two uses of its stage apart, but not three: in a shallow ring the stage must have been claimed first.
  __device__ __forceinline__ void wait(u32 number, const Spot& s) const {
    if (DEPTH < FARTHEST)
      for (u32 spins = 0; claimed() <= number; ++spins)
        if (spins > kMostSpins) __trap();
    mbarrier_wait(full + s.slot, s.parity);
  }

  // One lane: `count` warps need the stage no longer; `loaded` is what this one loaded last. The count is made from it,
  // since an arrival would overtake a load that is still under way.
  __device__ __forceinline__ void release(const Spot& s, u32 loaded, u32 count) const {
    asm volatile(
        "{\n.reg .b32 n;\nor.b32 n, %1, %2;\nmin.u32 n, n, %2;\nmbarrier.arrive.shared.b64 _, [%0], n;\n}" ::"r"(
            shared_address(empty + s.slot)),
        "r"(loaded), "r"(count)
        : "memory");
  }
};
