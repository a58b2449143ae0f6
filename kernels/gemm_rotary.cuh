// What stands behind the product of queries, keys and values (gemm.cu with ROTARY): they are rotated, and each goes where
// attention reads it.
//
// `weights` hold heads of kHeadDim rows: those of queries, or none, then one of keys, then one of values. Values i and
// i + kHeadDim / 2 of a head are a pair, which one thread has. Queries go to `out` bf16[rows, heads of queries *
// kHeadDim], keys and values to bf16[rows, kHeadDim] each. rope bf16[rows, kHeadDim]: cosines, then sines, of which a
// tile needs the columns of its pairs; they come through the ring, behind the tile's last step.
#pragma once
#include "gemm_epilogue.cuh"

#if ROTARY
constexpr int kTablePitch = kColumns / 2 * 2;  // bytes of cosines, or sines, of a row
static_assert(kConsumers == 2 && kTablePitch == kStepBytes, "a slot takes a tile's cosines or sines, swizzled as x");
static_assert(!GEGLU && !GELU && !OUT8 && !ROW_SCALE, "nothing but a factor and a bias of each output goes with ROTARY");

struct Rotary {
  const TensorMap &key, &value, &rope;
  int columns;  // tiles of weight rows

  // Not the last head, which is that of values.
  __device__ __forceinline__ bool rotates(const Tile& tile) const { return tile.column < columns - kHeadTiles; }
  __device__ __forceinline__ bool is_query(const Tile& tile) const { return tile.column < columns - 2 * kHeadTiles; }
};

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
    for (int half = 0; half < 2; ++half) stage_matrices(out + half * kHalfBytes, warp, m, halves[half]);
  }
  publish_to_engine();
  consumer_barrier(consumer);
  if (!is_storer(thread)) return;
  const TensorMap& to = rotary.is_query(tile) ? map : rotates ? rotary.key : rotary.value;
  const int column = out_column(tile, consumer) - (rotary.is_query(tile) ? 0 : tile.output() / kHeadDim * kHeadDim);
  store_box(to, column + warp * (kHeadDim / 2), tile.row * TILE_ROWS, out + warp * kHalfBytes);
}
#else
struct Rotary {};
#endif
