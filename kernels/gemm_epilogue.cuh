// What stands behind a matrix product (gemm.cu): sums of one tile in registers → scaled, activated, rounded, stored.
//
// ROW_SCALE 1: each row of x has a factor (`scale`). 0: each output has one (`factor`), and a bias. GELU: gelu_tanh
// behind it. GEGLU: `weights` hold all gates, then all ups; out [rows, outputs / 2] = gelu_tanh(gate) * up. Otherwise out
// [rows, outputs]. OUT8: E4M3 codes of the bfloat16 that would have been stored, under `out_scale`, instead of bfloat16.
#pragma once
#include "quantise.cuh"

#ifndef ROW_SCALE
#define ROW_SCALE 0
#endif
#ifndef GELU
#define GELU 0
#endif
#ifndef OUT8
#define OUT8 0
#endif

// scale float32[rows], factor float32[outputs], bias bf16[outputs]: null for none; out_scale float32[1] and codes
// uint8[rows, columns of out] with OUT8. `outputs` counts weight rows. A part of K stores its sums part_rows rows
// behind those of the part before it; the first adds the bias.
struct Operands {
  const float *scale, *factor;
  const bf16* bias;
  const float* out_scale;
  unsigned char* codes;
  int outputs, part_rows;

  __device__ int columns() const { return GEGLU ? outputs / 2 : outputs; }
};

// Factors and biases of this thread's two weight rows: lane / 4 of its warp's 16, and 8 further (with GEGLU, a gate and
// the up of the same output).
struct Outputs {
  float factor[2], bias[2];

  __device__ Outputs(const Operands& operands, const Tile& tile, int consumer) {
    const int thread = threadIdx.x % kGroupThreads, warp = thread / kWarpSize, quad = thread % kWarpSize / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int output = tile.column * kColumns + consumer * 64 + warp * 16 + 8 * half + quad;
      if (GEGLU) output = tile.column * (kColumns / 2) + consumer * 32 + warp * 8 + quad + half * operands.columns();
      const bool there = !ROW_SCALE && output < operands.outputs;
      factor[half] = there && operands.factor != nullptr ? operands.factor[output] : 1.0f;
      bias[half] = there && operands.bias != nullptr && tile.part == 0 ? to_float(operands.bias[output]) : 0.0f;
    }
  }

  // The value of one sum of weight row `half`, in a row of x with that scale.
  __device__ float value(float sum, float scale, int half) const {
    if (ROW_SCALE) return sum * scale;
    const float linear = fmaf(sum, factor[half], bias[half]);
    return GELU ? gelu_tanh(linear) : linear;
  }
};

// Scales of this thread's two rows of matrix m.
__device__ __forceinline__ float2 row_scales(const float* scales, int m) {
  if (!ROW_SCALE) return make_float2(1.0f, 1.0f);
  return *reinterpret_cast<const float2*>(scales + 8 * m + 2 * (threadIdx.x % 4));
}

__device__ __forceinline__ void consumer_barrier(int consumer) {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(1 + consumer), "n"(kGroupThreads) : "memory");
}

// Four 8x8 matrices, transposed, to shared memory; lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices_transposed(u32 shared, const u32 (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(v[0]),
               "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

__device__ __forceinline__ void store_matrix_transposed(u32 shared, u32 v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(shared), "r"(v) : "memory");
}

// Where 8 columns of a row stand in the staged output: rows of 64 bytes, 16-byte groups swizzled as the engine expects.
__device__ __forceinline__ u32 staged(u32 out, int row, int group) {
  return out + row * (kOutColumns * 2) + ((group ^ (row / 2 % 4)) << 4);
}

// Each warp writes 8 columns, group `group`, of all rows of the tile; value(m) are its two rows of matrix m.
template <class Value>
__device__ __forceinline__ void stage_columns(u32 out, int group, Value value) {
  const int lane = threadIdx.x % kWarpSize;
  constexpr int kFours = kMatrices / 4 * 4;
#pragma unroll
  for (int m = 0; m < kFours; m += 4) {
    const u32 four[4] = {value(m), value(m + 1), value(m + 2), value(m + 3)};
    store_matrices_transposed(staged(out, 8 * m + lane, group), four);
  }
#pragma unroll
  for (int m = kFours; m < kMatrices; ++m) store_matrix_transposed(staged(out, 8 * m + lane % 8, group), value(m));
}

__device__ __forceinline__ uint4 load_staged(u32 shared) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared)
               : "memory");
  return v;
}

// Stores what one pass has staged, 32 columns from `column` of out; the next pass may stage again behind it.
#if OUT8
__device__ __forceinline__ void send(u32 out, const TensorMap&, const Operands& operands, int column, const Tile& tile,
                                     int rows, int consumer) {
  constexpr int kValues = 16, kPieces = kOutColumns / kValues;
  const float inverse = inverse_of(operands.out_scale);
  const int columns = operands.columns();
  consumer_barrier(consumer);
  for (int i = threadIdx.x % kGroupThreads; i < TILE_ROWS * kPieces; i += kGroupThreads) {
    const int row = tile.row * TILE_ROWS + i / kPieces, at = column + i % kPieces * kValues;
    if (row >= rows || at >= columns) continue;
    const uint4 first = load_staged(staged(out, i / kPieces, i % kPieces * 2));
    const uint4 second = load_staged(staged(out, i / kPieces, i % kPieces * 2 + 1));
    store16(operands.codes + static_cast<u64>(row) * columns + at, e4m3_sixteen(first, second, inverse));
  }
}

__device__ __forceinline__ void await_staging(int consumer) { consumer_barrier(consumer); }
#else
__device__ __forceinline__ void send(u32 out, const TensorMap& map, const Operands& operands, int column,
                                     const Tile& tile, int, int consumer) {
  publish_to_engine();
  consumer_barrier(consumer);
  if (threadIdx.x % kGroupThreads == 0)
    store_box(map, column, tile.part * operands.part_rows + tile.row * TILE_ROWS, out);
}

__device__ __forceinline__ void await_staging(int consumer) {
  if (threadIdx.x % kGroupThreads == 0) stores_read();
  consumer_barrier(consumer);
}
#endif

#if GEGLU
__device__ __forceinline__ void epilogue(float (&sums)[TILE_ROWS / 2], const float* scales, const Outputs& outputs,
                                         u32 out, const TensorMap& map, const Operands& operands, const Tile& tile,
                                         int rows, int consumer) {
  const int warp = threadIdx.x % kGroupThreads / kWarpSize;
  await_staging(consumer);
  stage_columns(out, warp, [&](int m) {
    const float2 scale = row_scales(scales, m);
    const float* s = sums + 4 * m;  // gate of two rows, then up of both
    return pack_bf16(gelu_tanh(outputs.value(s[0], scale.x, 0)) * outputs.value(s[2], scale.x, 1),
                     gelu_tanh(outputs.value(s[1], scale.y, 0)) * outputs.value(s[3], scale.y, 1));
  });
  send(out, map, operands, tile.column * (kColumns / 2) + consumer * kOutColumns, tile, rows, consumer);
}
#else
// In two passes, as the staged output holds half of a consumer's columns: first those of warps 0 and 1.
__device__ __forceinline__ void epilogue(float (&sums)[TILE_ROWS / 2], const float* scales, const Outputs& outputs,
                                         u32 out, const TensorMap& map, const Operands& operands, const Tile& tile,
                                         int rows, int consumer) {
  const int warp = threadIdx.x % kGroupThreads / kWarpSize;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    await_staging(consumer);
    if (warp / 2 == pass) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        stage_columns(out, warp % 2 * 2 + half, [&](int m) {
          const float2 scale = row_scales(scales, m);
          const float* s = sums + 4 * m + 2 * half;
          return pack_bf16(outputs.value(s[0], scale.x, half), outputs.value(s[1], scale.y, half));
        });
    }
    send(out, map, operands, tile.column * kColumns + consumer * 64 + pass * kOutColumns, tile, rows, consumer);
  }
}
#endif
