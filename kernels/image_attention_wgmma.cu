// Full attention within each image on Hopper's warpgroup instructions (sm_90a): out = softmax(Q K^T / sqrt(HEAD_DIM))
// V. It is what image_attention.cu computes, for the same sizes; weights are summed in another order, so that bits
// differ.
//
// A block has 64 queries of one head of one image, the rows of one product. Each warpgroup has all of them and one part
// of the keys, whose scores stay in its registers: no maximum is ever revised. Queries and weights are operands from
// registers, keys and values from shared memory. Of two parts the first one's warpgroup, the giver, leaves its sums in
// shared memory, in the place of its keys and values; the other one's, the keeper, joins both and stores the result. As
// the giver's keys come first, its exponentials and the keeper's products overlap.
//
// The copy engine lays keys and values out as these instructions want them: in blocks of columns that are as wide as
// the swizzle. It sees each head as a matrix of its own: columns of a last block that the head does not have become
// zeros, and are not read. So keys have zeros up to a whole step of a product, where queries have zeros too.
//
// TILE_ROWS: keys of a piece, a quarter of TOKENS. WARPGROUPS: 1 or 2. KEY_LINE: bytes of a line of keys' whole blocks
// of columns, 128 (what is left over has the narrowest line that holds it) or 64. VALUE_LINE: of all blocks of values,
// 128 or 64. VALUE_PIECES: 2 or 4, which values arrive in. Others: see image_attention.cuh.
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "image_attention_wgmma.cu is written for sm_90a: no other architecture has its matrix instructions"
#endif
#include "image_attention.cuh"
#include "wgmma.cuh"

constexpr int kHeadSteps = kWholeSteps + 1;  // of a product over HEAD_DIM
constexpr int kGroupThreads = 128, kParts = WARPGROUPS, kThreads = kParts * kGroupThreads;
constexpr int kGiver = 0, kKeeper = kParts - 1;
constexpr int kFetcher = kKeeper * kGroupThreads;  // the thread that fetches: the keeper's keys come last
static_assert(HEAD_DIM < 128, "columns of a product");
static_assert(WARPGROUPS == 1 || WARPGROUPS == 2, "one who keeps, at most one who gives");

constexpr int kPartPieces = kPieces / kParts, kPartKeys = TOKENS / kParts;
constexpr int kValuePieces = VALUE_PIECES, kValueKeys = TOKENS / kValuePieces, kPartValues = kValuePieces / kParts;
constexpr int kPieceSteps = kPieceKeys / 16, kPartSteps = kPartKeys / 16, kValueSteps = kValueKeys / 16;
static_assert(kPieceKeys == TILE_ROWS, "pieces");
static_assert(kValuePieces == 2 || kValuePieces == 4, "pieces of values");

// How a key lies: perhaps a block of 64 columns with lines of 128 bytes, then blocks with lines of kRestLine bytes. A
// step of a product is 32 bytes of a line.
constexpr int kWideLine = 128, kStepBytes = 32;
constexpr int kWide = KEY_LINE == kWideLine ? HEAD_DIM / 64 : 0, kRestBytes = kHeadBytes - kWide * kWideLine;
constexpr int kRestLine = KEY_LINE == 64 ? 64 : kRestBytes <= 32 ? 32 : kRestBytes <= 64 ? 64 : 128;
constexpr int kRestBlocks = (kRestBytes + kRestLine - 1) / kRestLine;
constexpr int kKeyBytes = kWide * kWideLine + kRestBlocks * kRestLine;
constexpr int kWideSteps = kWide * (kWideLine / kStepBytes), kRestLineSteps = kRestLine / kStepBytes;
// How a value lies.
constexpr int kValueLine = VALUE_LINE, kValueBlocks = (kHeadBytes + kValueLine - 1) / kValueLine;
constexpr int kValueBytes = kValueBlocks * kValueLine;
static_assert(KEY_LINE == 64 || KEY_LINE == 128, "lines of keys");
static_assert(kValueLine == 64 || kValueLine == 128, "lines of values");

// The high word that describes a tile with lines of so many bytes: see wgmma.cuh; 3 in the topmost two bits is the
// swizzle over 32 bytes. Eight lines lie from one group of 8 rows to the next.
constexpr u32 tile_high(int line) { return line == 128 ? kTileHigh : line == 64 ? kHalfTileHigh : 0xc0000010u; }

// Shared memory: each part's keys, piece by piece and the wide blocks of all pieces first, and its values; queries, a
// row behind the other, and later the results in their place; barriers. What is given lies in the place of the giver's
// part.
constexpr int kWideBytes = kPieceKeys * kWideLine, kRestBlockBytes = kPieceKeys * kRestLine;  // of a piece
constexpr int kValueBlockBytes = kValueKeys * kValueLine;
constexpr int kRestAt = kPartKeys * kWide * kWideLine, kValuesAt = kPartKeys * kKeyBytes;  // in a part
constexpr int kPartBytes = kPartKeys * (kKeyBytes + kValueBytes);
constexpr int kGivenChunk = kGroupThreads * 16;  // 16 bytes of each thread
constexpr int kGivenBytes = kParts > 1 ? (1 + kHeadGroups) * kGivenChunk : 0;
constexpr int kPartStride = kPartBytes > kGivenBytes ? kPartBytes : kGivenBytes;
constexpr int kQueriesAt = kParts * kPartStride, kQueryBytes = kRows * kHeadBytes;
constexpr int kBarriersAt = kQueriesAt + kQueryBytes, kBarriers = 1 + kPieces + kValuePieces;
static_assert(kRestAt % 1024 == 0 && kValuesAt % 1024 == 0 && kPartStride % 1024 == 0, "the swizzle's pattern begins");
static_assert(kRestBlockBytes % (8 * kRestLine) == 0 && kValueBlockBytes % (8 * kValueLine) == 0, "and begins again");
static_assert(kBarriersAt + kBarriers * 8 <= SHARED_BYTES, "shared memory");

__device__ __forceinline__ u32 query_barrier(u32 shared) { return shared + kBarriersAt; }

// -- from global to shared memory -------------------------------------------------------------------------------------

// Box at (column, row) of one head; columns that it does not have become zeros.
__device__ __forceinline__ void load_head(u32 shared, const TensorMap& map, int column, int row, int head, u32 barrier,
                                          u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(barrier), "l"(policy)
      : "memory");
}

// The same into several blocks of the cluster (bits of `blocks`), at the same place of each, completing on the barrier
// at the same place of each.
__device__ __forceinline__ void load_head_for(unsigned short blocks, u32 shared, const TensorMap& map, int column,
                                              int row, int head, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(barrier), "h"(blocks), "l"(policy)
      : "memory");
}

// The matrices of all heads, a head's rows together, in the boxes of queries, of both kinds of blocks of keys, and of
// values.
struct Maps {
  const TensorMap &query, &wide, &rest, &value;
};

// One thread, before anybody copies: every barrier completes when its bytes have arrived, zeros included.
__device__ __forceinline__ void prepare(const Maps& maps, u32 shared) {
  prefetch_map(maps.query);
  if (kWide > 0) prefetch_map(maps.wide);
  prefetch_map(maps.rest);
  prefetch_map(maps.value);
  for (int i = 0; i < kBarriers; ++i) barrier_init(query_barrier(shared) + i * 8, 1);
  barrier_expect(query_barrier(shared), kQueryBytes);
  for (int i = 0; i < kPieces; ++i) barrier_expect(key_barrier(shared, i), kPieceKeys * kKeyBytes);
  for (int i = 0; i < kValuePieces; ++i) barrier_expect(value_barrier(shared, i), kValueKeys * kValueBytes);
  barriers_publish();
}

// What one thread fetches: this block's queries, and its share of keys and values for all blocks of the cluster.
struct Feed {
  const Maps& maps;
  u32 shared;
  Work work;
  u64 policy;

  // This block's share of `count` rows of one block of columns.
  __device__ __forceinline__ void share(u32 to, const TensorMap& map, int line, int count, int column, int row,
                                        int head, u32 barrier) const {
    const int first = CLUSTER > 1 ? static_cast<int>(block_in_cluster()) * (count / CLUSTER) : 0;
    const u32 at = to + first * line;
    if (CLUSTER > 1)
      load_head_for((1 << CLUSTER) - 1, at, map, column, work.image_row + row + first, head, barrier, policy);
    else
      load_head(at, map, column, work.image_row + row, head, barrier, policy);
  }

  __device__ __forceinline__ void queries() const {
    load_head(shared + kQueriesAt, maps.query, 0, work.first_row, work.head, query_barrier(shared), policy);
  }

  __device__ __forceinline__ void keys(int piece) const {
    const u32 part = shared + piece / kPartPieces * kPartStride, barrier = key_barrier(shared, piece);
    const int turn = piece % kPartPieces, row = piece * kPieceKeys, head = HEADS + work.head;
    if (kWide > 0) share(part + turn * kWideBytes, maps.wide, kWideLine, kPieceKeys, 0, row, head, barrier);
#pragma unroll
    for (int block = 0; block < kRestBlocks; ++block)
      share(part + kRestAt + (turn * kRestBlocks + block) * kRestBlockBytes, maps.rest, kRestLine, kPieceKeys,
            kWide * (kWideLine / 2) + block * (kRestLine / 2), row, head, barrier);
  }

  __device__ __forceinline__ void values(int piece) const {
    const u32 part = shared + piece / kPartValues * kPartStride + kValuesAt;
#pragma unroll
    for (int block = 0; block < kValueBlocks; ++block)
      share(part + (piece % kPartValues * kValueBlocks + block) * kValueBlockBytes, maps.value, kValueLine, kValueKeys,
            block * (kValueLine / 2), piece * kValueKeys, 2 * HEADS + work.head, value_barrier(shared, piece));
  }

  __device__ __forceinline__ void all() const {
    queries();
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) keys(piece);
#pragma unroll
    for (int piece = 0; piece < kValuePieces; ++piece) values(piece);
  }
};

// -- products ---------------------------------------------------------------------------------------------------------

// The operands behind a list of accumulators, for n rows or columns of B: the words of A.
#define A_WORDS_16 "{%11, %12, %13, %14}"
#define A_WORDS_24 "{%15, %16, %17, %18}"
#define A_WORDS_32 "{%19, %20, %21, %22}"
#define A_WORDS_40 "{%23, %24, %25, %26}"
#define A_WORDS_48 "{%27, %28, %29, %30}"
#define A_WORDS_56 "{%31, %32, %33, %34}"
#define A_WORDS_64 "{%35, %36, %37, %38}"
#define A_WORDS_72 "{%39, %40, %41, %42}"
#define A_WORDS_88 "{%47, %48, %49, %50}"
#define A_WORDS_104 "{%55, %56, %57, %58}"
#define A_WORDS_120 "{%63, %64, %65, %66}"

// Starts d = a * b^T + (accumulate ? d : 0) for 16 columns of TILE_ROWS keys, from the tile's start `b` on. a and d as
// in wgmma.cuh's `multiply_wide`: there is why words of A are inputs only, and what stands in front of the
// accumulators.
template <u32 B_HIGH>
__device__ __forceinline__ void multiply_keys(float (&d)[TILE_ROWS / 2], const uint4& a, u32 b, u32 accumulate) {
  u64 of_b = joined(b, B_HIGH);
  u32 unused = 0;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n" WG_STRING(TILE_ROWS) WG_SHAPE
      "{" WG_OF(WG_NAMES_, TILE_ROWS) "}, " WG_OF(A_WORDS_, TILE_ROWS) ", %0, p, 1, 1, 0;\n}"
      : "+l"(of_b), "+r"(accumulate), "+r"(unused), WG_OF(WG_SUMS_, TILE_ROWS)
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w)
      : "memory");
}

// Starts d = a * b + (accumulate ? d : 0) for the values of 16 keys. Their columns lie as wgmma.cuh's `wide_start`
// says, in blocks as wide as a line.
__device__ __forceinline__ void multiply_values(float (&d)[HEAD_DIM / 2], const uint4& a, u32 b, u32 accumulate) {
  u64 of_b = joined(b, tile_high(kValueLine));
  u32 unused = 0;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n" WG_STRING(HEAD_DIM) WG_SHAPE
      "{" WG_OF(WG_NAMES_, HEAD_DIM) "}, " WG_OF(A_WORDS_, HEAD_DIM) ", %0, p, 1, 1" WG_WIDE_MAJOR ";\n}"
      : "+l"(of_b), "+r"(accumulate), "+r"(unused), WG_OF(WG_SUMS_, HEAD_DIM)
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w)
      : "memory");
}

// Waits until at most `pending` committed groups are under way; known where this is compiled.
__device__ __forceinline__ void wait_for_products(int pending) {
  switch (pending) {
    case 0: products_wait<0>(); break;
    case 1: products_wait<1>(); break;
    case 2: products_wait<2>(); break;
    default: products_wait<3>(); break;
  }
}

// Behind the wait: the sums may be read, and the words that were A be overwritten.
__device__ __forceinline__ void settle(float (&d)[TILE_ROWS / 2]) {
  u32 unused = 0;
  asm volatile("" : "+r"(unused), WG_OF(WG_SUMS_, TILE_ROWS)::"memory");
}
__device__ __forceinline__ void settle_results(float (&d)[HEAD_DIM / 2]) {
  u32 unused = 0;
  asm volatile("" : "+r"(unused), WG_OF(WG_SUMS_, HEAD_DIM)::"memory");
}
template <int COUNT>
__device__ __forceinline__ void settle(uint4 (&words)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    asm volatile("" : "+r"(words[i].x), "+r"(words[i].y), "+r"(words[i].z), "+r"(words[i].w)::"memory");
}

// -- one warpgroup ----------------------------------------------------------------------------------------------------

// Until a barrier of this block has completed. All lanes go on together, as matrix instructions demand.
__device__ __forceinline__ void await(u32 barrier) {
  barrier_wait(barrier, 0);
  __syncwarp();
}

// A warp's 16 queries, as operands; the columns behind the last are zeros.
__device__ __forceinline__ void load_queries(uint4 (&q)[kHeadSteps], u32 rows) {
  const int lane = threadIdx.x % kWarpSize;
  const u32 from = rows + lane % 16 * kHeadBytes;
#pragma unroll
  for (int k = 0; k < kWholeSteps; ++k) q[k] = load_matrices(from + k * kStepBytes + lane / 16 * 16);
  const uint2 last = load_two_matrices(from + kWholeSteps * kStepBytes);
  q[kWholeSteps] = make_uint4(last.x, last.y, 0, 0);
}

// Starts the scores of one piece of the keys of a part.
__device__ __forceinline__ void score_piece(float (&s)[TILE_ROWS / 2], const uint4 (&q)[kHeadSteps], u32 part,
                                            int turn) {
  const u32 wide = tile_start(part + turn * kWideBytes);
  const u32 rest = tile_start(part + kRestAt + turn * kRestBlocks * kRestBlockBytes);
  products_begin();
#pragma unroll
  for (int k = 0; k < kHeadSteps; ++k) {
    const int step = k - kWideSteps;
    if (k < kWideSteps)
      multiply_keys<kTileHigh>(s, q[k], further(wide, k * kStepBytes), k > 0);
    else
      multiply_keys<tile_high(kRestLine)>(s, q[k],
                                          further(rest, step / kRestLineSteps * kRestBlockBytes +
                                                            step % kRestLineSteps * kStepBytes),
                                          k > 0);
  }
  products_commit();
}

// exp2 of the scores of 16 keys, as operand; `sums` counts this thread's. s: of 8 keys two neighbouring ones for the
// first row, then for the second; then of the next 8.
__device__ __forceinline__ uint4 weigh_step(const float* s, float scale, const float (&base)[2], float (&sums)[2]) {
  float p[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) p[e] = exp2_fast(fmaf(s[e], scale, -base[e / 2 % 2]));
#pragma unroll
  for (int half = 0; half < 2; ++half)
    sums[half] += (p[2 * half] + p[2 * half + 1]) + (p[4 + 2 * half] + p[4 + 2 * half + 1]);
  return make_uint4(pack_bf16(p[0], p[1]), pack_bf16(p[2], p[3]), pack_bf16(p[4], p[5]), pack_bf16(p[6], p[7]));
}

// What a thread has of its two rows, lane / 4 of its warp's 16 and 8 further: sums of weighted values, as products
// leave them; the largest score in units of log2, and the sum of the weights under it, over all keys of the part.
struct Part {
  float o[HEAD_DIM / 2];
  float base[2], sums[2];
};

// Attention of all rows to one part of the keys, not yet divided by the sums.
__device__ __forceinline__ void attend(Part& mine, u32 shared, int part, float scale) {
  const int row = threadIdx.x % kGroupThreads / kWarpSize * kWarpRows;
  const u32 at = shared + part * kPartStride;
  uint4 q[kHeadSteps], weights[kPartSteps];
  float s[kPartPieces][TILE_ROWS / 2];
  await(query_barrier(shared));
  load_queries(q, shared + kQueriesAt + row * kHeadBytes);
#pragma unroll
  for (int turn = 0; turn < kPartPieces; ++turn) {
    await(key_barrier(shared, part * kPartPieces + turn));
    score_piece(s[turn], q, at, turn);
  }
  float largest[2] = {negative_infinity(), negative_infinity()};
#pragma unroll
  for (int turn = 0; turn < kPartPieces; ++turn) {
    wait_for_products(kPartPieces - 1 - turn);
    settle(s[turn]);
#pragma unroll
    for (int i = 0; i < TILE_ROWS / 2; i += 2)
      largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], fmaxf(s[turn][i], s[turn][i + 1]));
  }
  settle(q);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    mine.base[half] = warp_max<4>(largest[half]) * scale;
    mine.sums[half] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < kPartSteps; ++step) {
    weights[step] = weigh_step(s[step / kPieceSteps] + step % kPieceSteps * 8, scale, mine.base, mine.sums);
    const int turn = step / kValueSteps;
    if (step % kValueSteps == 0) await(value_barrier(shared, part * kPartValues + turn));
    products_begin();
    multiply_values(mine.o, weights[step],
                    wide_start(at + kValuesAt + turn * kValueBlocks * kValueBlockBytes +
                                   step % kValueSteps * 16 * kValueLine,
                               kValueBlockBytes),
                    step > 0);
  }
  products_commit();
#pragma unroll
  for (int half = 0; half < 2; ++half) mine.sums[half] = warp_sum<4>(mine.sums[half]);
  products_wait<0>();
  settle_results(mine.o);
  settle(weights);
}

// -- both parts -------------------------------------------------------------------------------------------------------

// The giver's threads among themselves; then they announce, and the keeper's wait, that all is given.
__device__ __forceinline__ void giver_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(kGroupThreads) : "memory");
}
__device__ __forceinline__ void announce_given() { asm volatile("bar.arrive 2, %0;" ::"n"(kThreads) : "memory"); }
__device__ __forceinline__ void await_given() { asm volatile("bar.sync 2, %0;" ::"n"(kThreads) : "memory"); }

// Where this thread's 16 bytes number `chunk` lie; the keeper's thread at the same place has the same rows and columns.
__device__ __forceinline__ u32 given_at(u32 shared, int chunk) {
  return shared + kGiver * kPartStride + chunk * kGivenChunk + threadIdx.x % kGroupThreads * 16;
}

__device__ __forceinline__ void give_chunk(u32 to, float v0, float v1, float v2, float v3) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(v0), "f"(v1), "f"(v2), "f"(v3) : "memory");
}

__device__ __forceinline__ void give(const Part& mine, u32 shared) {
  giver_barrier();  // all of its warps have read its keys and values
  give_chunk(given_at(shared, 0), mine.base[0], mine.base[1], mine.sums[0], mine.sums[1]);
#pragma unroll
  for (int group = 0; group < kHeadGroups; ++group) {
    const float* v = mine.o + 4 * group;
    give_chunk(given_at(shared, 1 + group), v[0], v[1], v[2], v[3]);
  }
  announce_given();
}

// The keeper's sums become those of all keys, divided by the sum of all weights: that is about 1 at least, and about
// TOKENS at most.
__device__ __forceinline__ void join(Part& mine, u32 shared) {
  if (kParts == 1) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) mine.o[i] = __fdividef(mine.o[i], mine.sums[i / 2 % 2]);
    return;
  }
  await_given();
  const uint4 theirs = load_shared16(given_at(shared, 0));
  const float base[2] = {__uint_as_float(theirs.x), __uint_as_float(theirs.y)};
  const float sums[2] = {__uint_as_float(theirs.z), __uint_as_float(theirs.w)};
  float keep[2], take[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float top = fmaxf(mine.base[half], base[half]);
    keep[half] = exp2_fast(mine.base[half] - top);
    take[half] = exp2_fast(base[half] - top);
    const float inverse = __fdividef(1.0f, fmaf(take[half], sums[half], keep[half] * mine.sums[half]));
    keep[half] *= inverse;
    take[half] *= inverse;
  }
#pragma unroll
  for (int group = 0; group < kHeadGroups; ++group) {
    const uint4 found = load_shared16(given_at(shared, 1 + group));
    const u32 given[4] = {found.x, found.y, found.z, found.w};
    float* v = mine.o + 4 * group;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = fmaf(__uint_as_float(given[i]), take[i / 2], v[i] * keep[i / 2]);
  }
}

// -- result -----------------------------------------------------------------------------------------------------------

// Four 8x8 matrices to shared memory; lane l names row l % 8 of matrix l / 8. Then two, named by lanes 0 to 15.
__device__ __forceinline__ void store_matrices(u32 shared, u32 v0, u32 v1, u32 v2, u32 v3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(v0), "r"(v1),
               "r"(v2), "r"(v3)
               : "memory");
}
__device__ __forceinline__ void store_two_matrices(u32 shared, u32 v0, u32 v1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1,%2};" ::"r"(shared), "r"(v0), "r"(v1) : "memory");
}

// Rounds, turns a warp's 16 rows in the place of its queries, which every warp that has the same ones has read, so that
// a lane holds whole groups of columns; and stores them.
__device__ __forceinline__ void store(const float (&o)[HEAD_DIM / 2], u32 shared, const Work& work, void* out,
                                      float to_codes) {
  const int row = threadIdx.x % kGroupThreads / kWarpSize * kWarpRows, lane = threadIdx.x % kWarpSize;
  const u32 staged = shared + kQueriesAt + row * kHeadBytes;
  u32 words[2 * kHeadGroups];
#pragma unroll
  for (int i = 0; i < 2 * kHeadGroups; ++i) words[i] = pack_bf16(o[2 * i], o[2 * i + 1]);
#pragma unroll
  for (int group = 0; group + 1 < kHeadGroups; group += 2)
    store_matrices(staged + lane % 16 * kHeadBytes + (group + lane / 16) * 16, words[2 * group], words[2 * group + 1],
                   words[2 * group + 2], words[2 * group + 3]);
  store_two_matrices(staged + lane % 16 * kHeadBytes + (kHeadGroups - 1) * 16, words[2 * kHeadGroups - 2],
                     words[2 * kHeadGroups - 1]);
  __syncwarp();
  constexpr int kCount = kWarpRows * kHeadGroups;
#pragma unroll
  for (int begin = 0; begin < kCount; begin += kWarpSize) {
    const int i = begin + lane;
    if (begin + kWarpSize <= kCount || i < kCount) {
      const uint4 v = load_shared16(staged + i * 16);
      const u64 at = static_cast<u64>(work.first_row + row + i / kHeadGroups) * kWidth + work.head * HEAD_DIM +
                     i % kHeadGroups * 8;
      if (QUANTISED)
        *reinterpret_cast<uint2*>(static_cast<unsigned char*>(out) + at) = e4m3_eight(v, to_codes);
      else
        store16(static_cast<bf16*>(out) + at, v);
    }
  }
}

// A float that is asked for here and need not have come before `arrived`: whatever is computed from it in front of the
// fetch would hold that up.
__device__ __forceinline__ float ask_for(const float* from) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ float arrived(float v) {
  asm volatile("" : "+f"(v)::"memory");
  return v;
}

// All maps are of qkv bf16[images * TOKENS, 3 * HEADS, HEAD_DIM]: query, key, value of all heads; boxes of some rows
// and columns of one head. query: 64 rows of HEAD_DIM, as they are; wide: kPieceKeys / CLUSTER rows of 64 columns,
// swizzled over 128 bytes; rest: as many of kRestLine bytes, swizzled over these; value: kValueKeys / CLUSTER rows of
// VALUE_LINE bytes, likewise. out bf16[images * TOKENS, kWidth], or uint8 codes with QUANTISED, under output_scale
// float32[1], which no kernel that may still run makes. `scale` is 1 / sqrt(HEAD_DIM), from e to 2. The grid is images
// * HEADS * TOKENS / 64 blocks.
extern "C" __global__ void CLUSTER_SIZE __launch_bounds__(kThreads, kResident)
    image_attention_wgmma(const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap wide,
                          const __grid_constant__ TensorMap rest, const __grid_constant__ TensorMap value, void* out,
                          const float* output_scale, float scale) {
  extern __shared__ __align__(1024) unsigned char memory[];
  overlap_trigger();
  const u32 shared = shared_address(memory);
  const Work work;
  const Maps maps{query, wide, rest, value};
  const int part = __shfl_sync(kAllLanes, threadIdx.x / kGroupThreads, 0);  // known to be one for a warp
  const float code_scale = QUANTISED ? ask_for(output_scale) : 1.0f;
  if (threadIdx.x == kFetcher) {
    if ((shared & 0x3ff) != 0) __trap();  // or swizzle and descriptors disagree
    prepare(maps, shared);
  }
  __syncwarp();
  prepared();
  overlap_wait();
  if (threadIdx.x == kFetcher) Feed{maps, shared, work, usual_policy()}.all();
  __syncwarp();
  Part mine;
  attend(mine, shared, part, scale);
  cluster_arrive();  // every warp has waited for all that its part reads, so all that others send here has arrived
  if (kParts > 1 && part == kGiver) {
    give(mine, shared);
  } else {
    join(mine, shared);
    store(mine.o, shared, work, out, QUANTISED ? inverse_of(arrived(code_scale)) : 1.0f);
  }
  cluster_wait();
}
