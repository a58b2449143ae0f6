// Synchronisation inside one resident grid, and the ring of weight stages in shared memory.
#pragma once
#include "common.cuh"

// -- barriers between blocks ---------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 load_acquire(const u32* p) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

__device__ __forceinline__ void add_release(u32* p, u32 value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

__device__ __forceinline__ u32 fetch_add(u32* p, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(value) : "memory");
  return before;
}

// Spins until *p >= target. A grid that was not wholly resident would wait for ever: trap after some seconds instead.
__device__ __forceinline__ void wait_until(const u32* p, u32 target) {
  for (u32 spins = 0; load_acquire(p) < target; ++spins)
    if (spins > (1u << 24)) __trap();
}

// Barrier among the THREADS consumer threads of a block.
template <int THREADS>
__device__ __forceinline__ void consumer_barrier() {
  __syncwarp();
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// -- the ring -----------------------------------------------------------------------------------------------------------

// One producer thread fills stages with bulk copies; the consumers wait for all stages of a piece of work at once, and
// release them together: waiting and arriving at every stage by every warp would cost as much as the work.

__device__ __forceinline__ void mbarrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void mbarrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbarrier_wait(u64* barrier, u32 parity) {
  u32 done = 0;
  while (!done) {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  }
}

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

template <int DEPTH, int BYTES>
struct Ring {
  unsigned char* data;
  u64* full;
  u64* empty;
  int slot = 0;
  u32 parity = 0;

  int pushed = 0;

  // Producer: fetch BYTES from `global` into the next stage. At most AHEAD stages are under way at once: more would
  // only queue in front of the few bytes that other blocks wait for.
  template <int AHEAD>
  __device__ __forceinline__ void push(const void* global, u64 policy) {
    static_assert(AHEAD <= DEPTH, "stages under way");
    if (pushed >= AHEAD) mbarrier_wait(full + (slot + DEPTH - AHEAD) % DEPTH, slot >= AHEAD ? parity : parity ^ 1);
    ++pushed;
    mbarrier_wait(empty + slot, parity ^ 1);
    mbarrier_expect(full + slot, BYTES);
    bulk_copy(data + slot * BYTES, global, BYTES, full + slot, policy);
    advance(1);
  }

  // The stage that comes `ahead` behind the next one; `ahead` < DEPTH.
  __device__ __forceinline__ int slot_of(int ahead) const {
    const int ring_slot = slot + ahead;
    return ring_slot < DEPTH ? ring_slot : ring_slot - DEPTH;
  }

  __device__ __forceinline__ const unsigned char* stage(int ahead) const { return data + slot_of(ahead) * BYTES; }

  // One thread: wait for the next `count` stages. A barrier of the block makes them visible to the other threads.
  __device__ __forceinline__ void wait(int count) const {
    for (int i = 0; i < count; ++i) mbarrier_wait(full + slot_of(i), slot + i < DEPTH ? parity : parity ^ 1);
  }

  // One thread: the next `count` stages may be filled again. Between the loads from them and this call there must be a
  // barrier that waits for results which depend on the loads: an arrival may overtake a load that is still under way.
  __device__ __forceinline__ void release(int count) const {
    for (int i = 0; i < count; ++i) mbarrier_arrive(empty + slot_of(i));
  }

  // All threads: go on behind the next `count` stages.
  __device__ __forceinline__ void advance(int count) {
    slot += count;
    if (slot >= DEPTH) {
      slot -= DEPTH;
      parity ^= 1;
    }
  }
};
