// What stands behind the product of queries, keys and values (gemm.cu with ROTARY): they are rotated, and each goes where
// attention reads it.
//
// `weights` hold heads of kHeadDim rows: those of queries, or none, then one of keys, then one of values. Values i and
// i + kHeadDim / 2 of a head are a pair, which one thread has. Queries go to `out` bf16[rows, heads of queries *
// kHeadDim], keys and values to bf16[rows, kHeadDim] each. rope bf16[rows, kHeadDim]: cosines, then sines, of which a
// tile needs the columns of its pairs; they come through the ring, behind the tile's last step.
//
// HEAD_CODES: attention (prefix_attention.cu) reads E4M3 codes of the bfloat16 that are, or would be, stored: queries
// are stored as codes alone, keys and values as both. See HeadCodes for how attention wants them to lie.
#pragma once
#include "gemm_epilogue.cuh"

#if ROTARY
constexpr int kTablePitch = kColumns / 2 * 2;  // bytes of cosines, or sines, of a row
static_assert(kConsumers == 2 && kTablePitch == kStepBytes, "a slot takes a tile's cosines or sines, swizzled as x");
static_assert(!GEGLU && !GELU && !OUT8 && !ROW_SCALE, "nothing but a factor and a bias of each output goes with ROTARY");

// query uint8[rows, heads of queries * kHeadDim]. key uint8[rows in multiples of 16, kHeadDim], of 16 rows in the order
// of `place_of`. value uint8[rows in multiples of 64 / 64, kHeadDim, 64]: a row of a dimension's values of 64 keys, whose
// ends behind the last key are left as they are. scales float32[3], of queries, keys and values.
struct HeadCodes {
  unsigned char *query, *key, *value;
  const float* scales;
  int rows;
};

struct Rotary {
  const TensorMap &key, &value, &rope;
  int columns;  // tiles of weight rows
  HeadCodes codes;

  // Not the last head, which is that of values.
  __device__ __forceinline__ bool rotates(const Tile& tile) const { return tile.column < columns - kHeadTiles; }
  __device__ __forceinline__ bool is_query(const Tile& tile) const { return tile.column < columns - 2 * kHeadTiles; }

  // What the tile's values are multiplied by before they become codes.
  __device__ __forceinline__ float inverse(const Tile& tile) const {
    return inverse_of(codes.scales + (is_query(tile) ? 0 : rotates(tile) ? 1 : 2));
  }
};

// Where attention wants row `row` of keys: of 16, four that follow each other are the two of one matrix of scores that
// a thread has and the two of the next, so that its scores are neighbours in `value`.
__device__ __forceinline__ int place_of(int row) {
  const int quad = row % 16 / 4;
  return row / 16 * 16 + row % 4 / 2 * 8 + 2 * quad + row % 2;
}

// Both values of a pair, rotated, for this thread's two rows of a matrix. Cosine and sine hold those of both rows.
__device__ __forceinline__ void rotate(const float* sums, const Outputs& outputs, u32 cosine, u32 sine, u32& first,
                                       u32& second) {
  const float c[2] = {low_float(cosine), high_float(cosine)}, s[2] = {low_float(sine), high_float(sine)};
  float u[2], v[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float a = outputs.linear(sums[i], 1.0f, 0), b = outputs.linear(sums[2 + i], 1.0f, 1);
    u[i] = a * c[i] - b * s[i];
    v[i] = b * c[i] + a * s[i];
  }
  first = pack_bf16(u[0], u[1]);
  second = pack_bf16(v[0], v[1]);
}

// Stages 8 columns, group `group`, of up to four matrices from matrix m on.
__device__ __forceinline__ void stage_matrices(u32 out, int group, int m, const u32 (&four)[4]) {
  const int lane = threadIdx.x % kWarpSize;
  if (m + 4 <= kMatrices) return store_matrices_transposed(staged(out, 8 * m + lane, group), four);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (m + i < kMatrices) store_matrix_transposed(staged(out, 8 * (m + i) + lane % 8, group), four[i]);
}

#if HEAD_CODES
// Codes of the staged rows of queries or keys, 16 of a row in each thread. `out`: the staged output, of both halves.
__device__ __forceinline__ void send_head_codes(u32 out, const Outputs& outputs, const Rotary& rotary, const Tile& tile,
                                                int consumer) {
  constexpr int kValues = 16, kPieces = kOutColumns / kValues, kTurnRows = kGroupThreads / kPieces;
  const int thread = threadIdx.x % kGroupThreads, piece = thread % kPieces;
  const bool is_query = rotary.is_query(tile);
  const int pitch = is_query ? (rotary.columns / kHeadTiles - 2) * kHeadDim : kHeadDim;
  const int column = out_column(tile, consumer) - (is_query ? 0 : tile.output() / kHeadDim * kHeadDim);
  unsigned char* to = (is_query ? rotary.codes.query : rotary.codes.key) + column + piece * kValues;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int first = 0; first < TILE_ROWS; first += kTurnRows) {
      const int line = first + thread / kPieces, row = tile.row * TILE_ROWS + line;
      if (line >= TILE_ROWS || row >= rotary.codes.rows) continue;
      const u32 from = out + half * (kOutBytes / 2);
      const uint4 a = load_shared16(staged(from, line, 2 * piece)), b = load_shared16(staged(from, line, 2 * piece + 1));
      store16(to + static_cast<u64>(is_query ? row : place_of(row)) * pitch + half * (kHeadDim / 2),
              e4m3_sixteen(a, b, outputs.inverse));
    }
}

// Four neighbours have 16 bits of each of four groups (the first two groups in `low`, the first one in its low bits):
// each of them gets all 64 bits of its own group, its neighbours' in their order.
__device__ __forceinline__ uint2 exchange_quad(u32 low, u32 high) {
  const int lane = threadIdx.x % 4;
  const bool upper = lane / 2, odd = lane % 2;
  const u32 mine = upper ? high : low;  // of groups 2 * upper and the next
  const u32 theirs = __shfl_xor_sync(kAllLanes, upper ? low : high, 2);
  const u32 first = upper ? theirs : mine, third = upper ? mine : theirs;  // of a lane of the lower two, of the upper
  const u32 kept = __byte_perm(first, third, odd ? 0x7632 : 0x5410);       // group 2 * upper + odd: both of these
  const u32 got = __shfl_xor_sync(kAllLanes, __byte_perm(first, third, odd ? 0x5410 : 0x7632), 1);
  const u32 even_lanes = odd ? got : kept, odd_lanes = odd ? kept : got;
  return make_uint2(__byte_perm(even_lanes, odd_lanes, 0x5410), __byte_perm(even_lanes, odd_lanes, 0x7632));
}

// Stores values, transposed, of up to four matrices from matrix m on: of each this thread's two rows of one dimension,
// as bfloat16. It stores the codes of the eight rows of one matrix.
__device__ __forceinline__ void send_value_codes(const u32 (&four)[4], const Outputs& outputs, const HeadCodes& codes,
                                                 const Tile& tile, int dimension, int m) {
  constexpr int kKeys = 64;  // in a row of `value`
  u32 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    pairs[i] = e4m3_pair(low_float(four[i]) * outputs.inverse, high_float(four[i]) * outputs.inverse);
  const uint2 eight = exchange_quad(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
  const int matrix = m + threadIdx.x % 4, row = tile.row * TILE_ROWS + 8 * matrix;
  if (matrix >= kMatrices || row >= codes.rows) return;
  const u64 at = static_cast<u64>(row / kKeys * kHeadDim + dimension) * kKeys + row % kKeys;
  *reinterpret_cast<uint2*>(codes.value + at) = eight;
}
#endif

// `tables`: the tile's cosines and sines in shared memory, read where it `rotates`; `out` is this consumer's staged
// output, map that of queries.
__device__ __forceinline__ void rotary_epilogue(const float (&sums)[TILE_ROWS / 2], const Outputs& outputs, bool rotates,
                                                const u32 (&tables)[2], u32 out, const TensorMap& map,
                                                const Rotary& rotary, const Tile& tile, int consumer) {
  constexpr int kHalfBytes = kOutBytes / 2;
  const int thread = threadIdx.x % kGroupThreads, warp = thread / kWarpSize, lane = thread % kWarpSize;
  const u32 at = lane * kTablePitch + ((consumer * 4 + warp ^ lane % 8) << 4);  // of this warp's pairs, in row `lane`
  if (is_storer(thread)) stores_read();
  consumer_barrier(consumer);
#pragma unroll
  for (int m = 0; m < kMatrices; m += 4) {
    uint4 cosines = make_uint4(0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80), sines = make_uint4(0, 0, 0, 0);
    if (rotates) {  // behind the last matrix stands what was in the slot before; it is not used
      cosines = load_matrices_transposed(tables[0] + at + m * 8 * kTablePitch);
      sines = load_matrices_transposed(tables[1] + at + m * 8 * kTablePitch);
    }
    const u32 c[4] = {cosines.x, cosines.y, cosines.z, cosines.w}, s[4] = {sines.x, sines.y, sines.z, sines.w};
    u32 halves[2][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (m + i < kMatrices) rotate(sums + 4 * (m + i), outputs, c[i], s[i], halves[0][i], halves[1][i]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      stage_matrices(out + half * kHalfBytes, warp, m, halves[half]);
#if HEAD_CODES
      const int dimension = out_column(tile, consumer) % kHeadDim + half * (kHeadDim / 2) + warp * 8 + lane / 4;
      if (!rotates) send_value_codes(halves[half], outputs, rotary.codes, tile, dimension, m);
#endif
    }
  }
  publish_to_engine();
  consumer_barrier(consumer);
  if (is_storer(thread) && !(HEAD_CODES && rotary.is_query(tile))) {
    const TensorMap& to = rotary.is_query(tile) ? map : rotates ? rotary.key : rotary.value;
    const int column = out_column(tile, consumer) - (rotary.is_query(tile) ? 0 : tile.output() / kHeadDim * kHeadDim);
    store_box(to, column + warp * (kHeadDim / 2), tile.row * TILE_ROWS, out + warp * kHalfBytes);
  }
#if HEAD_CODES
  if (rotates) send_head_codes(out, outputs, rotary, tile, consumer);
#endif
}
#else
struct Rotary {};
#endif
