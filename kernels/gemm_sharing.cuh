// Blocks of a cluster that fetch for each other (gemm.cu), so that less comes through the second-level cache.
//
// SHARE_X blocks with neighbouring column tiles of one row tile need the same x, SHARE_WEIGHTS blocks with neighbouring
// row tiles of one column tile the same weights. Each fetches a share of what is needed at a step, and the copy engine
// writes it into the slots of all of them. A cluster has all combinations of so many columns and rows; its blocks have
// the same part of K, hence equal numbers of steps, and one tile each. Tiles behind the last row or column are
// multiplied, as their blocks have shares to fetch, but not stored.
//
// A share that comes is counted by the full barrier of the slot that it comes to, which expects all shares; it may come
// before its block has announced them, as the barrier's phase then still waits for that. It may not come a phase early:
// a slot is free only when all blocks that share with this one have read theirs, and each warp tells all of these.
#pragma once
#include "tma.cuh"

#ifndef SHARE_X
#define SHARE_X 1
#endif
#ifndef SHARE_WEIGHTS
#define SHARE_WEIGHTS 1
#endif

constexpr int kBlocks = SHARE_X * SHARE_WEIGHTS;  // of a cluster
constexpr bool kShares = kBlocks > 1;
constexpr int kSharers = SHARE_X + SHARE_WEIGHTS - 1;  // blocks that share anything with a block, itself among them
#if SHARE_X * SHARE_WEIGHTS > 1
#define CLUSTER_SIZE __cluster_dims__(kBlocks, 1, 1)
#else
#define CLUSTER_SIZE
#endif

// All shares are of one size, that of a box. Where that does not come out even the last one begins earlier, and some
// rows come twice: the same bytes, into a slot that is not read before both have come.
constexpr int kShareRows = (TILE_ROWS / 8 + SHARE_X - 1) / SHARE_X * 8;
constexpr int kGroups = kColumns / (kPairs ? 16 : 8);  // of weights, see Feed::fetch_weights
constexpr int kShareGroups = (kGroups + SHARE_WEIGHTS - 1) / SHARE_WEIGHTS, kGroupBytes = kWeightBytes / kGroups;
// What comes into a slot in a step.
constexpr int kFetchedBytes = SHARE_WEIGHTS * kShareGroups * kGroupBytes + SHARE_X * kShareRows * kStepBytes;
static_assert(kBlocks <= 8, "blocks of a cluster");
static_assert(!kShares || kHasProducer, "without a producer a block knows its own warps only");

// Of this block's tile in its cluster: the grid and the clusters have one dimension.
__device__ __forceinline__ int column_in_cluster() { return blockIdx.x % kBlocks % SHARE_X; }
__device__ __forceinline__ int row_in_cluster() { return blockIdx.x % kBlocks / SHARE_X; }

// The blocks, as bits, that need the same x, or the same weights.
__device__ __forceinline__ unsigned short x_sharers() { return ((1 << SHARE_X) - 1) << row_in_cluster() * SHARE_X; }
__device__ __forceinline__ unsigned short weight_sharers() {
  int first_column = 0;
#pragma unroll
  for (int row = 0; row < SHARE_WEIGHTS; ++row) first_column |= 1 << row * SHARE_X;
  return first_column << column_in_cluster();
}

// The first row of this block's share of x, the first group of that of weights, in a tile.
__device__ __forceinline__ int share_row() { return min(column_in_cluster() * kShareRows, TILE_ROWS - kShareRows); }
__device__ __forceinline__ int share_group() { return min(row_in_cluster() * kShareGroups, kGroups - kShareGroups); }

// Every thread arrives, and waits, once at the beginning and once at the end. Before the first wait the barriers of the
// other blocks may not be there. Before the second one they may still need this block: an arrival says that all which
// is sent to it has come. Relaxed: what `barriers_publish` has made known is there, and the end publishes nothing.
__device__ __forceinline__ void cluster_arrive() {
  if (kShares) asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  if (kShares) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// One warp: arrives at this barrier in all blocks that share with this one. It publishes nothing that was written: for
// that it would have to wait. Relaxed is enough behind the wait for products only: what was read, products have read.
__device__ __forceinline__ void tell_sharers(u32 barrier) {
  const int block = threadIdx.x % kWarpSize;
  if (block >= kBlocks) return;
  constexpr bool kTwoKinds = SHARE_X > 1 && SHARE_WEIGHTS > 1;  // otherwise all blocks share
  if (kTwoKinds && block % SHARE_X != column_in_cluster() && block / SHARE_X != row_in_cluster()) return;
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(block)
      : "memory");
}
