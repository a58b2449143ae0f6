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

// A consumer stages a chunk of its rows at a time, with all of its columns, so that all of its warps compute.
constexpr int kMatrices = TILE_ROWS / 8;
constexpr int kChunks = OUT8 || kMatrices == 1 ? 1 : 2;
constexpr int kChunkMatrices = (kMatrices + kChunks - 1) / kChunks;  // the largest chunk's

__host__ __device__ constexpr int first_matrix(int chunk) { return chunk * kMatrices / kChunks; }

// A chunk that the compiler knows: sums stay in registers only if it knows which ones are meant.
template <int NUMBER>
struct Chunk {
  static constexpr int kFirst = first_matrix(NUMBER), kLast = first_matrix(NUMBER + 1);
};

// Calls with each chunk.
template <int NUMBER = 0, class Call>
__device__ __forceinline__ void for_chunks(Call call) {
  call(Chunk<NUMBER>{});
  if constexpr (NUMBER + 1 < kChunks) for_chunks<NUMBER + 1>(call);
}

// One copy stores whole chunks if all are of one size, otherwise the 8 rows of a matrix.
constexpr int kBoxMatrices = kMatrices % kChunks == 0 ? kChunkMatrices : 1;

// The staged output: rows of bfloat16, or with OUT8 rows of 16-bit pairs of codes, those of two rows in one column.
constexpr int kLineBytes = kOutColumns * 2;
constexpr int kOutLines = OUT8 ? (kMatrices + 1) / 2 * 8 : kChunkMatrices * 8;
constexpr int kOutBytes = kOutLines * kLineBytes;
static_assert(kOutBytes % (8 * kLineBytes) == 0, "swizzle atoms");

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

// gelu_tanh of two values as x * sigmoid(2u), with one reciprocal for both: the epilogue waits for the unit of
// exponentials and reciprocals. Exponents are bounded, so that the product of both denominators stays finite; what lies
// beyond is smaller than the value times 1e-18.
__device__ __forceinline__ float2 gelu_tanh_two(float first, float second) {
  constexpr float kLinear = -2.302208198f, kCubic = -0.1029432396f, kLargest = 62.0f;  // of -2u * log2(e)
  const float a = 1.0f + exp2_fast(fminf(first * fmaf(kCubic, first * first, kLinear), kLargest));
  const float b = 1.0f + exp2_fast(fminf(second * fmaf(kCubic, second * second, kLinear), kLargest));
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(a * b));
  return make_float2(first * (inverse * b), second * (inverse * a));
}

// Factors and biases of this thread's two weight rows: lane / 4 of its warp's 16, and 8 further (with GEGLU, a gate and
// the up of the same output). They are read before the sums are there.
struct Outputs {
  float factor[2], bias[2], inverse;

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
    inverse = OUT8 ? inverse_of(operands.out_scale) : 1.0f;
  }

  // One sum of weight row `half`, in a row of x with that scale.
  __device__ __forceinline__ float linear(float sum, float scale, int half) const {
    return ROW_SCALE ? sum * scale : fmaf(sum, factor[half], bias[half]);
  }

  // What is stored of matrix `m`, this thread's two rows of its column `half`.
  __device__ __forceinline__ u32 pair(const float (&sums)[TILE_ROWS / 2], float2 scale, int m, int half) const {
    const float* s = sums + 4 * m + (GEGLU ? 0 : 2 * half);
    float first = linear(s[0], scale.x, half), second = linear(s[1], scale.y, half);
    if (GELU || GEGLU) {
      const float2 active = gelu_tanh_two(first, second);
      first = active.x, second = active.y;
    }
    if (GEGLU) first *= linear(s[2], scale.x, 1), second *= linear(s[3], scale.y, 1);
    return pack_bf16(first, second);
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

// Where 8 columns of a line stand in the staged output: 16-byte groups swizzled as the engine expects, over 64 or 128 bytes.
__device__ __forceinline__ u32 staged(u32 out, int line, int group) {
  const int swizzle = kLineBytes == 128 ? line % 8 : line / 2 % 4;
  return out + line * kLineBytes + ((group ^ swizzle) << 4);
}

#if OUT8
// A warp stages 8 columns, group `group`, of all rows of the tile. Pairs of rows of two matrices make one of 8 lines:
// line 8 * w + i holds rows 16 * w + 2 * i and the one behind it. value(m) are this thread's two rows of matrix m.
template <class Value>
__device__ __forceinline__ void stage_columns(u32 out, int group, float inverse, Value value) {
  const int lane = threadIdx.x % kWarpSize, line = lane % 8 / 2 + lane % 2 * 4;
  const auto codes = [&](int m) -> u32 {
    if (m >= kMatrices) return 0;
    const u32 pair = value(m);
    return e4m3_pair(low_float(pair) * inverse, high_float(pair) * inverse);
  };
  const auto two = [&](int w) { return codes(2 * w) | codes(2 * w + 1) << 16; };
  constexpr int kWords = (kMatrices + 1) / 2, kFours = kWords / 4 * 4;
#pragma unroll
  for (int w = 0; w < kFours; w += 4) {
    const u32 four[4] = {two(w), two(w + 1), two(w + 2), two(w + 3)};
    store_matrices_transposed(staged(out, 8 * (w + lane / 8) + line, group), four);
  }
#pragma unroll
  for (int w = kFours; w < kWords; ++w) store_matrix_transposed(staged(out, 8 * w + line, group), two(w));
}

__device__ __forceinline__ uint4 load_staged(u32 shared) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared)
               : "memory");
  return v;
}

// Stores all rows of the tile, from column `column`: each thread 16 codes of two rows at a time.
__device__ __forceinline__ void send_codes(u32 out, const Operands& operands, int column, const Tile& tile,
                                           int rows) {
  constexpr int kValues = 16, kPieces = kOutColumns / kValues;
  const int columns = operands.columns();
  for (int i = threadIdx.x % kGroupThreads; i < TILE_ROWS / 2 * kPieces; i += kGroupThreads) {
    const int line = i / kPieces, piece = i % kPieces;
    const int row = tile.row * TILE_ROWS + 2 * line, at = column + piece * kValues;
    if (row >= rows || at >= columns) continue;
    const uint4 a = load_staged(staged(out, line, 2 * piece)), b = load_staged(staged(out, line, 2 * piece + 1));
    unsigned char* first = operands.codes + static_cast<u64>(row) * columns + at;
    constexpr u32 kEven = 0x6420, kOdd = 0x7531;  // bytes of two words: those of the first row, of the second
    store16(first, make_uint4(__byte_perm(a.x, a.y, kEven), __byte_perm(a.z, a.w, kEven),
                              __byte_perm(b.x, b.y, kEven), __byte_perm(b.z, b.w, kEven)));
    if (row + 1 < rows)
      store16(first + columns, make_uint4(__byte_perm(a.x, a.y, kOdd), __byte_perm(a.z, a.w, kOdd),
                                          __byte_perm(b.x, b.y, kOdd), __byte_perm(b.z, b.w, kOdd)));
  }
}
#else
// A warp stages 8 columns, group `group`, of the rows of a chunk. value(m) are this thread's two rows of matrix m.
template <int NUMBER, class Value>
__device__ __forceinline__ void stage_columns(u32 out, int group, Chunk<NUMBER>, Value value) {
  constexpr int kFirst = Chunk<NUMBER>::kFirst, kLast = Chunk<NUMBER>::kLast, kRest = kFirst + (kLast - kFirst) / 4 * 4;
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int m = kFirst; m < kRest; m += 4) {
    const u32 four[4] = {value(m), value(m + 1), value(m + 2), value(m + 3)};
    store_matrices_transposed(staged(out, 8 * (m - kFirst) + lane, group), four);
  }
#pragma unroll
  for (int m = kRest; m < kLast; ++m)
    store_matrix_transposed(staged(out, 8 * (m - kFirst) + lane % 8, group), value(m));
}
#endif

// Row and column of `out` that this consumer's part of a tile begins at.
__device__ __forceinline__ int out_row(const Operands& operands, const Tile& tile) {
  return tile.part * operands.part_rows + tile.row * TILE_ROWS;
}
__device__ __forceinline__ int out_column(const Tile& tile, int consumer) {
  return (tile.column * kConsumers + consumer) * kOutColumns;
}

// `out` is this consumer's staged output.
__device__ __forceinline__ void epilogue(const float (&sums)[TILE_ROWS / 2], const float* scales,
                                         const Outputs& outputs, u32 out, const TensorMap& map,
                                         const Operands& operands, const Tile& tile, int rows, int consumer) {
  const int thread = threadIdx.x % kGroupThreads, warp = thread / kWarpSize;
  constexpr int kGroups = GEGLU ? 1 : 2;  // of 8 columns that a warp stages
#if OUT8
  consumer_barrier(consumer);  // all have read what was staged before
#pragma unroll
  for (int half = 0; half < kGroups; ++half)
    stage_columns(out, warp * kGroups + half, outputs.inverse,
                  [&](int m) { return outputs.pair(sums, row_scales(scales, m), m, half); });
  consumer_barrier(consumer);
  send_codes(out, operands, out_column(tile, consumer), tile, rows);
#else
  for_chunks([&](auto chunk) {
    if (thread == 0) stores_read();
    consumer_barrier(consumer);
#pragma unroll
    for (int half = 0; half < kGroups; ++half)
      stage_columns(out, warp * kGroups + half, chunk,
                    [&](int m) { return outputs.pair(sums, row_scales(scales, m), m, half); });
    publish_to_engine();
    consumer_barrier(consumer);
    if (thread == 0)
      for (int m = chunk.kFirst; m < chunk.kLast; m += kBoxMatrices)
        store_box(map, out_column(tile, consumer), out_row(operands, tile) + 8 * m,
                  out + (m - chunk.kFirst) * 8 * kLineBytes);
  });
#endif
}
