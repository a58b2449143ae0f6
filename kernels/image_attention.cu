// Full attention within each image: out = softmax(Q K^T / sqrt(HEAD_DIM)) V, for heads of a width that cuts a row of
// shared memory unevenly (72 of SigLIP). A block has 64 queries of one head of one image, and all of its keys and
// values.
//
// Queries, keys and values lie in shared memory as in global memory, a row of HEAD_DIM behind the other: HEAD_DIM is an
// odd multiple of 8, so eight rows begin in eight different groups of banks. A warp has 16 queries and one of two
// parts of the keys, whose scores stay in its registers: no maximum is ever revised. The parts meet at the end. (Half
// as many warps of 32 queries load keys and values half as often, and are slower: little hides what each waits for.)
#include "image_attention.cuh"

constexpr int kRowGroups = kRows / kWarpRows;
constexpr int kSplit = 2;  // parts of the keys
constexpr int kWarps = kRowGroups * kSplit, kThreads = kWarps * kWarpSize;

constexpr int kPieceBytes = kPieceKeys * kHeadBytes;
constexpr int kPartPieces = kPieces / kSplit, kPartKeys = TOKENS / kSplit;
constexpr int kPieceTiles = kPieceKeys / 16, kPartTiles = kPartKeys / 16;  // of 16 keys
constexpr int kShare = kPieceKeys / CLUSTER;                               // keys of a piece that one block fetches
constexpr int kBoxRows = kShare & -kShare;                                 // that one copy moves

// Shared memory: queries, keys, values; later the results of the parts in their place. Behind them what the parts need
// to know of each other's rows, then the barriers.
constexpr int kKeysAt = kRows * kHeadBytes, kValuesAt = kKeysAt + TOKENS * kHeadBytes;
constexpr int kInputBytes = kValuesAt + TOKENS * kHeadBytes;
constexpr int kResultBytes = kSplit * kRows * HEAD_DIM * 4;
constexpr int kExtremesAt = kInputBytes > kResultBytes ? kInputBytes : kResultBytes;
constexpr int kBarriersAt = kExtremesAt + kSplit * kRows * 8;
constexpr int kBarriers = 1 + 2 * kPieces;
static_assert(kBarriersAt + kBarriers * 8 <= SHARED_BYTES, "shared memory");

__device__ __forceinline__ u32 query_barrier(u32 shared) { return shared + kBarriersAt; }

// The order in which pieces are fetched: first the first one of every part.
__device__ __forceinline__ int piece_at(int turn) { return turn % kSplit * kPartPieces + turn / kSplit; }

// -- from global to shared memory -------------------------------------------------------------------------------------

// One thread, before anybody copies: every barrier completes when its bytes have arrived.
__device__ __forceinline__ void prepare(const TensorMap& qkv, u32 shared) {
  prefetch_map(qkv);
  for (int i = 0; i < kBarriers; ++i) barrier_init(query_barrier(shared) + i * 8, 1);
  for (int i = 0; i < kBarriers; ++i) barrier_expect(query_barrier(shared) + i * 8, i == 0 ? kKeysAt : kPieceBytes);
  barriers_publish();
}

// This block's share of one piece, to all blocks of the cluster.
__device__ __forceinline__ void fetch_piece(const TensorMap& qkv, u32 to, int column, int row, u32 barrier,
                                            u64 policy) {
  const int first = CLUSTER > 1 ? static_cast<int>(block_in_cluster()) * kShare : 0;
#pragma unroll
  for (int i = 0; i < kShare; i += kBoxRows) {
    const u32 at = to + (first + i) * kHeadBytes;
    if (CLUSTER > 1)
      load_box_for((1 << CLUSTER) - 1, at, qkv, column, row + first + i, barrier, policy);
    else
      load_box(at, qkv, column, row + first + i, barrier, policy);
  }
}

__device__ __forceinline__ void fetch(const TensorMap& qkv, u32 shared, const Work& work) {
  if (threadIdx.x != 0) return;
  const u64 policy = usual_policy();
#pragma unroll
  for (int i = 0; i < kRows; i += kBoxRows)
    load_box(shared + i * kHeadBytes, qkv, work.column, work.first_row + i, query_barrier(shared), policy);
#pragma unroll
  for (int part = 0; part < 2; ++part)
#pragma unroll
    for (int turn = 0; turn < kPieces; ++turn) {
      const int piece = piece_at(turn);
      fetch_piece(qkv, shared + (part == 0 ? kKeysAt : kValuesAt) + piece * kPieceBytes,
                  work.column + (1 + part) * kWidth, work.image_row + piece * kPieceKeys,
                  part == 0 ? key_barrier(shared, piece) : value_barrier(shared, piece), policy);
    }
}

// -- products ---------------------------------------------------------------------------------------------------------

// d += a * b for one 16x8 tile, k = 8.
__device__ __forceinline__ void mma_16x8x8(float (&d)[4], u32 a0, u32 a1, u32 b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// Two transposed 8x8 matrices of bfloat16 from shared memory, named by lanes 0 to 15.
__device__ __forceinline__ uint2 load_two_matrices_transposed(u32 shared) {
  uint2 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "r"(shared)
               : "memory");
  return v;
}

// A warp's queries, as operands.
struct Queries {
  uint4 steps[kWholeSteps];
  uint2 last;

  __device__ __forceinline__ explicit Queries(u32 rows) {
    const int lane = threadIdx.x % kWarpSize;
    const u32 from = rows + lane % 16 * kHeadBytes;
#pragma unroll
    for (int k = 0; k < kWholeSteps; ++k) steps[k] = load_matrices(from + k * 32 + lane / 16 * 16);
    last = load_two_matrices(from + kWholeSteps * 32);
  }
};

// Scores of a warp: in each tile of 8 keys a lane has two neighbouring keys for row lane / 4, then for the row 8 below.
typedef float Scores[2 * kPartTiles][4];
// Its results, likewise in tiles of 8 columns.
typedef float Results[kHeadGroups][4];

// Scores of 16 keys, which begin at `keys`; they fill tiles 2 * tile and the next.
__device__ __forceinline__ void score_tile(Scores& s, int tile, const Queries& q, u32 keys) {
  const int lane = threadIdx.x % kWarpSize;
  const u32 pairs = keys + (lane % 8 + lane / 16 * 8) * kHeadBytes + lane / 8 % 2 * 16;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[2 * tile + n][e] = 0.0f;
#pragma unroll
  for (int k = 0; k < kWholeSteps; ++k) {
    const uint4 &a = q.steps[k], b = load_matrices(pairs + k * 32);
    mma_16x8x16(s[2 * tile], a.x, a.y, a.z, a.w, b.x, b.y);
    mma_16x8x16(s[2 * tile + 1], a.x, a.y, a.z, a.w, b.z, b.w);
  }
  const uint2 b = load_two_matrices(keys + lane % 16 * kHeadBytes + kWholeSteps * 32);
  mma_16x8x8(s[2 * tile], q.last.x, q.last.y, b.x);
  mma_16x8x8(s[2 * tile + 1], q.last.x, q.last.y, b.y);
}

// Largest score of each row, in units of log2: that of the upper half, of the lower one.
__device__ __forceinline__ void row_maxima(const Scores& s, float scale, float (&base)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = negative_infinity();
#pragma unroll
    for (int n = 0; n < 2 * kPartTiles; ++n) largest = fmaxf(largest, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    base[half] = warp_max<4>(largest) * scale;
  }
}

// exp2 of the scores of 16 keys, as operand; `sums` counts this lane's.
__device__ __forceinline__ uint4 weigh_tile(const float (&first)[4], const float (&second)[4], float scale,
                                            const float (&base)[2], float (&sums)[2]) {
  float p[2][4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    p[0][e] = exp2_fast(fmaf(first[e], scale, -base[e / 2]));
    p[1][e] = exp2_fast(fmaf(second[e], scale, -base[e / 2]));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
    sums[half] += (p[0][2 * half] + p[0][2 * half + 1]) + (p[1][2 * half] + p[1][2 * half + 1]);
  return make_uint4(pack_bf16(p[0][0], p[0][1]), pack_bf16(p[0][2], p[0][3]), pack_bf16(p[1][0], p[1][1]),
                    pack_bf16(p[1][2], p[1][3]));
}

// o += weights of 16 keys times their values, which begin at `values`.
__device__ __forceinline__ void mix_tile(Results& o, const uint4& p, u32 values) {
  const int lane = threadIdx.x % kWarpSize;
  const u32 from = values + lane % 16 * kHeadBytes;
#pragma unroll
  for (int d = 0; d < kWholeSteps; ++d) {
    const uint4 b = load_matrices_transposed(from + d * 32 + lane / 16 * 16);
    mma_16x8x16(o[2 * d], p.x, p.y, p.z, p.w, b.x, b.y);
    mma_16x8x16(o[2 * d + 1], p.x, p.y, p.z, p.w, b.z, b.w);
  }
  const uint2 b = load_two_matrices_transposed(from + kWholeSteps * 32);
  mma_16x8x16(o[2 * kWholeSteps], p.x, p.y, p.z, p.w, b.x, b.y);
}

// -- one warp ---------------------------------------------------------------------------------------------------------

// Until a barrier of this block has completed. All lanes go on together, as matrix instructions demand.
__device__ __forceinline__ void await(u32 barrier) {
  barrier_wait(barrier, 0);
  __syncwarp();
}

struct Part {
  Results o;
  float base[2], sums[2];  // of each row: see row_maxima, weigh_tile
};

// Attention of this warp's rows to its part of the keys, not yet divided by the sums.
__device__ __forceinline__ void attend(Part& part, u32 shared, int row, int split, float scale) {
  const u32 keys = shared + kKeysAt + split * kPartKeys * kHeadBytes;
  const u32 values = shared + kValuesAt + split * kPartKeys * kHeadBytes;
  Scores s;
  await(query_barrier(shared));
  const Queries q(shared + row * kHeadBytes);
#pragma unroll
  for (int tile = 0; tile < kPartTiles; ++tile) {
    if (tile % kPieceTiles == 0) await(key_barrier(shared, split * kPartPieces + tile / kPieceTiles));
    score_tile(s, tile, q, keys + tile * 16 * kHeadBytes);
  }
  row_maxima(s, scale, part.base);
  part.sums[0] = part.sums[1] = 0.0f;
#pragma unroll
  for (int n = 0; n < kHeadGroups; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) part.o[n][e] = 0.0f;
#pragma unroll
  for (int tile = 0; tile < kPartTiles; ++tile) {
    const uint4 p = weigh_tile(s[2 * tile], s[2 * tile + 1], scale, part.base, part.sums);
    if (tile % kPieceTiles == 0) await(value_barrier(shared, split * kPartPieces + tile / kPieceTiles));
    mix_tile(part.o, p, values + tile * 16 * kHeadBytes);
  }
}

// -- the parts of all warps -------------------------------------------------------------------------------------------

// extremes[split][row] = base and sum of the weights.
__device__ __forceinline__ void store_extremes(const Part& part, float2* extremes, int row, int split) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = warp_sum<4>(part.sums[half]);
    if (lane % 4 == 0) extremes[split * kRows + row + half * 8 + lane / 4] = make_float2(part.base[half], sum);
  }
}

// By what a part with this base is multiplied: it brings all parts of the row to one base and divides by the sum of all
// weights.
__device__ __forceinline__ float part_factor(const float2* extremes, int row, float own_base) {
  float2 e[kSplit];
  float base = negative_infinity(), total = 0.0f;
#pragma unroll
  for (int i = 0; i < kSplit; ++i) {
    e[i] = extremes[i * kRows + row];
    base = fmaxf(base, e[i].x);
  }
#pragma unroll
  for (int i = 0; i < kSplit; ++i) total = fmaf(exp2_fast(e[i].x - base), e[i].y, total);
  return __fdividef(exp2_fast(own_base - base), total);  // the total is about 1 at least, and about TOKENS at most
}

// results[split][row][column], float. HEAD_DIM from row to row: what half a warp writes falls into different banks.
__device__ __forceinline__ void store_results(const Part& part, const float2* extremes, float* results, int row,
                                              int split) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = row + half * 8 + lane / 4;
    const float factor = part_factor(extremes, at, part.base[half]);
    float* to = results + (split * kRows + at) * HEAD_DIM + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kHeadGroups; ++n)
      *reinterpret_cast<float2*>(to + n * 8) =
          make_float2(part.o[n][2 * half] * factor, part.o[n][2 * half + 1] * factor);
  }
}

// out = the parts' results, added: four columns a thread and turn.
__device__ __forceinline__ void join_parts(const float4* results, const Work& work, void* out, float scale_of_codes) {
  const float to_codes = QUANTISED ? inverse_of(scale_of_codes) : 1.0f;
  constexpr int kFours = HEAD_DIM / 4, kCount = kRows * kFours;
#pragma unroll
  for (int first = 0; first < kCount; first += kThreads) {
    const int i = first + threadIdx.x;
    if (first + kThreads > kCount && i >= kCount) break;
    float4 v = results[i];
#pragma unroll
    for (int split = 1; split < kSplit; ++split) {
      const float4 more = results[split * kCount + i];
      v.x += more.x, v.y += more.y, v.z += more.z, v.w += more.w;
    }
    const u64 at = static_cast<u64>(work.first_row + i / kFours) * kWidth + work.column + i % kFours * 4;
    const uint2 pairs = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
    if (QUANTISED) {
      const float scaled[4] = {low_float(pairs.x) * to_codes, high_float(pairs.x) * to_codes,
                               low_float(pairs.y) * to_codes, high_float(pairs.y) * to_codes};
      *reinterpret_cast<u32*>(static_cast<unsigned char*>(out) + at) = e4m3_four(scaled);
    } else {
      *reinterpret_cast<uint2*>(static_cast<bf16*>(out) + at) = pairs;
    }
  }
}

// qkv bf16[images * TOKENS, 3 * kWidth], in boxes of kBoxRows x HEAD_DIM: query, key, value of all heads. out
// bf16[images * TOKENS, kWidth], or uint8 codes with QUANTISED, under output_scale float32[1]. `scale` is
// 1 / sqrt(HEAD_DIM), from e to 2. The grid is images * HEADS * TOKENS / 64 blocks.
extern "C" __global__ void CLUSTER_SIZE __launch_bounds__(kThreads, kResident)
    image_attention(const __grid_constant__ TensorMap qkv, void* out, const float* output_scale, float scale) {
  extern __shared__ __align__(128) unsigned char memory[];
  overlap_trigger();
  const u32 shared = shared_address(memory);
  const Work work;
  const int warp = threadIdx.x / kWarpSize, split = warp / kRowGroups, row = warp % kRowGroups * kWarpRows;
  // It was used a decision ago and comes from memory: nothing in front of `fetch` may need it.
  const float scale_of_codes = QUANTISED ? *output_scale : 1.0f;
  if (threadIdx.x == 0) prepare(qkv, shared);
  __syncwarp();
  prepared();
  overlap_wait();
  fetch(qkv, shared, work);
  __syncwarp();
  Part part;
  attend(part, shared, row, split, scale);
  cluster_arrive();  // every warp has waited for all it reads, so all that others send here has arrived
  float2* extremes = reinterpret_cast<float2*>(memory + kExtremesAt);
  store_extremes(part, extremes, row, split);
  __syncthreads();  // nobody reads queries, keys and values any more
  store_results(part, extremes, reinterpret_cast<float*>(memory), row, split);
  __syncthreads();
  join_parts(reinterpret_cast<const float4*>(memory), work, out, scale_of_codes);
  cluster_wait();
}
