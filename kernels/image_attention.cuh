// What both kernels of attention within each image have in common: image_attention.cu, and image_attention_wgmma.cu for
// Hopper.
//
// TOKENS (of an image), HEADS, HEAD_DIM, SHARED_BYTES. QUANTISED: E4M3 codes of the bfloat16 results under
// output_scale. CLUSTER blocks of one head share the keys and values that each of them fetches a part of.
#pragma once
#include "quantise.cuh"
#include "tma.cuh"

#ifndef QUANTISED
#define QUANTISED 0
#endif
#ifndef CLUSTER
#define CLUSTER 1
#endif
#if CLUSTER > 1
#define CLUSTER_SIZE __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_SIZE
#endif

constexpr int kWidth = HEADS * HEAD_DIM, kHeadBytes = HEAD_DIM * 2, kHeadGroups = HEAD_DIM / 8;
constexpr int kWholeSteps = HEAD_DIM / 16;         // of a product over HEAD_DIM; half a step follows
constexpr int kRows = 64, kWarpRows = 16;          // queries of a block, of a warp
constexpr int kResident = HEAD_DIM <= 72 ? 2 : 1;  // blocks of a multiprocessor that registers are left for
static_assert(HEAD_DIM % 16 == 8 && HEAD_DIM > 8, "rows that fall into different banks, and half a step at the end");
static_assert(TOKENS % kRows == 0 && TOKENS <= 256, "scores stay in registers");

// Keys and values arrive in pieces; a part of the keys is several of them.
constexpr int kPieces = 4, kPieceKeys = TOKENS / kPieces;
static_assert(kPieceKeys % 16 == 0, "pieces are whole steps");
static_assert(TOKENS / kRows % CLUSTER == 0 && kPieceKeys / CLUSTER % 8 == 0, "a cluster has one head, shares atoms");

// Barriers in shared memory, one behind the other: where the first one lies, a kernel says.
__device__ __forceinline__ u32 query_barrier(u32 shared);
__device__ __forceinline__ u32 key_barrier(u32 shared, int piece) { return query_barrier(shared) + (1 + piece) * 8; }
__device__ __forceinline__ u32 value_barrier(u32 shared, int piece) { return key_barrier(shared, kPieces + piece); }

// Which part of the work a block has.
struct Work {
  int image_row, first_row;  // of this image, of this block's queries
  int head, column;          // among the queries': this head, and where it begins

  __device__ Work() {
    constexpr int kTiles = TOKENS / kRows;
    const int number = blockIdx.x / kTiles;  // of the head, of all images
    image_row = number / HEADS * TOKENS;
    first_row = image_row + blockIdx.x % kTiles * kRows;
    head = number % HEADS;
    column = head * HEAD_DIM;
  }
};

// The blocks of a cluster write to each other: barriers of all must be prepared before the first one sends.
__device__ __forceinline__ void prepared() {
  if (CLUSTER > 1)
    cluster_barrier();
  else
    __syncthreads();
}

// None may end before the others have what it sends. Between the two calls a block need not stop.
__device__ __forceinline__ void cluster_arrive() {
  if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  if (CLUSTER > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
