// The bulk tensor copy engine of Hopper and later: boxes of a matrix to and from shared memory, completing on barriers.
#pragma once
#include "common.cuh"

// What the host's driver encodes: address, sizes, box and swizzle of a matrix.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// -- barriers in shared memory ----------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes fresh barriers known to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void barriers_publish() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives and announces that `bytes` will be copied.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ bool barrier_passed(u32 barrier, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

// Waits for the end of the phase of that parity. A barrier that nobody completes would hold the GPU for ever: trap
// after some seconds instead. With the scope of a block also for what other blocks send: that is shared memory, which
// is not cached, and a wider scope would empty the first-level cache at every wait.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  if (barrier_passed(barrier, parity)) return;
  const long long start = clock64();
  while (!barrier_passed(barrier, parity))
    if (clock64() - start > (1ll << 33)) __trap();
}

// -- cluster ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 block_in_cluster() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks of the cluster.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// -- copies -----------------------------------------------------------------------------------------------------------

// For data that is read once: leaves the cache first.
__device__ __forceinline__ u64 streaming_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ u64 usual_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Box at (column, row) of the matrix → shared memory; what lies outside of the matrix becomes zero.
__device__ __forceinline__ void load_box(u32 shared, const TensorMap& map, int column, int row, u32 barrier,
                                         u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

// The same for rows in groups: box at (column, 0, 0, group) of a matrix that the map cuts in four dimensions, see
// flashrt_ros/ops/cuda/tensor_map.py.
__device__ __forceinline__ void load_groups(u32 shared, const TensorMap& map, int column, int group, u32 barrier,
                                            u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %6, %6, %3}], [%4], %5;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(group), "r"(barrier), "l"(policy), "r"(0)
      : "memory");
}

// The same into several blocks of the cluster (bits of `blocks`), at the same place of each, completing on the barrier
// at the same place of each.
__device__ __forceinline__ void load_groups_for(unsigned short blocks, u32 shared, const TensorMap& map, int column,
                                                int group, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%2, %7, %7, %3}], [%4], %5, %6;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(group), "r"(barrier), "h"(blocks), "l"(policy), "r"(0)
      : "memory");
}

// A box, likewise.
__device__ __forceinline__ void load_box_for(unsigned short blocks, u32 shared, const TensorMap& map, int column,
                                             int row, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(blocks), "l"(policy)
      : "memory");
}

// Shared memory → box at (column, row) of the matrix; what lies outside of it is dropped.
__device__ __forceinline__ void store_box(const TensorMap& map, int column, int row, u32 shared) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
      "cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(column), "r"(row), "r"(shared)
      : "memory");
}

// The thread that stored: shared memory has been read and may be written again.
__device__ __forceinline__ void stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// What this thread has written to shared memory, the copy engine may read, behind the next barrier.
__device__ __forceinline__ void publish_to_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
