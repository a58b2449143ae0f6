// What stands behind a matrix product (gemm.cu): sums of one tile in registers → scaled, activated, rounded, stored.
//
// ROW_SCALE 1: each row of x has a factor (`scale`). 0: each output has one (`factor`), and a bias. GELU: gelu_tanh
// behind it. GEGLU: `weights` hold all gates, then all ups; out [rows, outputs / 2] = gelu_tanh(gate) * up. Otherwise out
// [rows, outputs]. OUT8: E4M3 codes under `out_scale` instead of bfloat16; those of the bfloat16 that would have been
// stored, or behind an activation those of half precision, see gelu_tanh_halves. CHUNKS: see below.
#pragma once
#include "quantise.cuh"

#ifndef ROW_SCALE
#define ROW_SCALE 0
#endif
#ifndef GELU
#define GELU 0
#endif

// Rows of a tile that are staged in the same lines: of an instruction's matrix, with OUT8 of two.
constexpr int kMatrices = TILE_ROWS / 8;
constexpr int kUnitMatrices = OUT8 ? 2 : 1, kUnits = (kMatrices + kUnitMatrices - 1) / kUnitMatrices;

// A consumer stages a chunk of its rows at a time, with all of its columns, so that all of its warps compute: in CHUNKS
// chunks, of which many need little memory.
#ifdef CHUNKS
constexpr int kChunks = CHUNKS;
#else
constexpr int kChunks = OUT8 || ROTARY || kMatrices == 1 ? 1 : 2;
#endif
static_assert(0 < kChunks && kChunks <= kUnits && (kChunks == 1 || !ROTARY), "no chunk is empty");
constexpr int kChunkUnits = (kUnits + kChunks - 1) / kChunks;  // the largest chunk's

__host__ __device__ constexpr int first_unit(int chunk) { return chunk * kUnits / kChunks; }

// A chunk that the compiler knows, in units: sums stay in registers only if it knows which ones are meant.
template <int NUMBER>
struct Chunk {
  static constexpr int kFirst = first_unit(NUMBER), kLast = first_unit(NUMBER + 1);
};

// Calls with each chunk.
template <int NUMBER = 0, class Call>
__device__ __forceinline__ void for_chunks(Call call) {
  call(Chunk<NUMBER>{});
  if constexpr (NUMBER + 1 < kChunks) for_chunks<NUMBER + 1>(call);
}

// One copy stores whole chunks if all are of one size, otherwise the 8 rows of a matrix.
constexpr int kBoxMatrices = kUnits % kChunks == 0 ? kChunkUnits : 1;

// The staged output: rows of bfloat16, or with OUT8 rows of 16-bit pairs of codes, those of two rows in one column. With
// ROTARY first halves of heads, then second ones.
constexpr int kLineBytes = kOutColumns * 2;
constexpr int kOutLines = kChunkUnits * 8;
constexpr int kOutBytes = (ROTARY ? 2 : 1) * kOutLines * kLineBytes;
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

#if OUT8
// Two values as half precision, the first in the low bits; what is larger becomes 65504, NaN stays NaN.
__device__ __forceinline__ u32 pack_halves(float low, float high) {
  u32 pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ u32 fma_halves(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ __forceinline__ u32 multiply_halves(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ u32 magnitudes(u32 pair) {
  u32 d;
  asm("abs.f16x2 %0, %1;" : "=r"(d) : "r"(pair));
  return d;
}

// Codes of two values in half precision; that of the low one in the low byte.
__device__ __forceinline__ u32 e4m3_of_halves(u32 pair) {
  unsigned short codes;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(codes) : "r"(pair));
  return codes;
}

// gelu_tanh(x) * c of two values in half precision. `x` holds them, finite or NaN, and `scaled` holds x * c with c > 0.
// The result is max(x, 0) - |x| * sigmoid(-2u) with u of |x|. The base-2 logarithm of that sigmoid is so smooth that a
// polynomial of degree four stays within 0.0015 of it. So what remains of a negative x keeps its relative precision,
// which 1 + tanh(u) would lose, and no reciprocal is needed. All coefficients have one sign: however large |x| is, the
// exponent ends at minus infinity and the sigmoid at zero. NaN stays NaN.
//
// Codes of such values are those of the exact ones, or of one in a hundred the neighbour, about as if the values had
// been rounded to bfloat16 first. That holds while |x| with GELU, |up| with GEGLU, is at most 65504 times out_scale,
// and out_scale at least 1e-4 with GELU.
__device__ __forceinline__ u32 gelu_tanh_halves(u32 x, u32 scaled) {
  constexpr u32 kCoefficients[5] = {0xbc01bc01, 0xbc84bc84, 0xb822b822, 0x98a898a8, 0x9f779f77};  // of |x|^0 to |x|^4
  const u32 y = magnitudes(x);
  u32 exponent = kCoefficients[4];
#pragma unroll
  for (int i = 3; i >= 0; --i) exponent = fma_halves(y, exponent, kCoefficients[i]);
  u32 sigmoid, positive, negative;
  asm("ex2.approx.f16x2 %0, %1;" : "=r"(sigmoid) : "r"(exponent));
  asm("max.f16x2 %0, %1, %2;" : "=r"(positive) : "r"(scaled), "r"(0));
  asm("neg.f16x2 %0, %1;" : "=r"(negative) : "r"(magnitudes(scaled)));
  return fma_halves(negative, sigmoid, positive);
}
#endif

// Factors and biases of this thread's two weight rows: lane / 4 of its warp's 16, and 8 further (with pairs: a gate and
// the up of the same output, or a value of a head and that of the other half). They are read before the sums are there.
struct Outputs {
  float factor[2], bias[2], inverse;

  // `inverse`: what a value is multiplied by before it becomes a code; 1 without codes.
  __device__ Outputs(const Operands& operands, const Tile& tile, int consumer, float inverse) : inverse(inverse) {
    const int thread = threadIdx.x % kGroupThreads, warp = thread / kWarpSize, quad = thread % kWarpSize / 4;
    const int apart = GEGLU ? operands.columns() : ROTARY ? kHeadDim / 2 : 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int output = tile.output() + consumer * kOutColumns + warp * (kOutColumns / 4) + quad + half * apart;
      const bool there = !ROW_SCALE && output < operands.outputs;
      factor[half] = there && operands.factor != nullptr ? operands.factor[output] : 1.0f;
      bias[half] = there && operands.bias != nullptr && tile.part == 0 ? to_float(operands.bias[output]) : 0.0f;
    }
    if (OUT8 && GEGLU) factor[1] *= inverse, bias[1] *= inverse;  // for `codes`: up as the code wants it
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

#if OUT8
  // The two codes of the same, in 16 bits.
  __device__ __forceinline__ u32 codes(const float (&sums)[TILE_ROWS / 2], float2 scale, int m, int half) const {
    if (!GELU && !GEGLU) {
      const u32 two = pair(sums, scale, m, half);
      return e4m3_pair(low_float(two) * inverse, high_float(two) * inverse);
    }
    const float* s = sums + 4 * m + (GEGLU ? 0 : 2 * half);
    const float first = linear(s[0], scale.x, half), second = linear(s[1], scale.y, half);
    const u32 x = pack_halves(first, second);
    if (!GEGLU) return e4m3_of_halves(gelu_tanh_halves(x, pack_halves(first * inverse, second * inverse)));
    const float rest = ROW_SCALE ? inverse : 1.0f;  // otherwise the factor of up holds it
    const u32 up = pack_halves(linear(s[2], scale.x, 1) * rest, linear(s[3], scale.y, 1) * rest);
    return e4m3_of_halves(multiply_halves(gelu_tanh_halves(x, x), up));
  }
#endif
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

// One 8x8 matrix, transposed, to shared memory (see store_matrices_transposed); lane l names row l % 8.
__device__ __forceinline__ void store_matrix_transposed(u32 shared, u32 v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(shared), "r"(v) : "memory");
}

// Where 8 columns of a line stand in the staged output: 16-byte groups swizzled as the engine expects, over 64 or 128 bytes.
__device__ __forceinline__ u32 staged(u32 out, int line, int group) {
  const int swizzle = kLineBytes == 128 ? line % 8 : line / 2 % 4;
  return out + line * kLineBytes + ((group ^ swizzle) << 4);
}

#if OUT8
// A warp stages 8 columns, group `group`, of the rows of a chunk. Pairs of rows of two matrices make one of 8 lines:
// line 8 * w + i holds rows 16 * w + 2 * i of the chunk and the one behind it. codes(m): of this thread's two rows of
// matrix m.
template <int NUMBER, class Codes>
__device__ __forceinline__ void stage_columns(u32 out, int group, Chunk<NUMBER>, Codes codes) {
  constexpr int kFirst = Chunk<NUMBER>::kFirst, kLast = Chunk<NUMBER>::kLast, kRest = kFirst + (kLast - kFirst) / 4 * 4;
  const int lane = threadIdx.x % kWarpSize, line = lane % 8 / 2 + lane % 2 * 4;
  const auto two = [&](int w) -> u32 { return codes(2 * w) | (2 * w + 1 < kMatrices ? codes(2 * w + 1) << 16 : 0); };
#pragma unroll
  for (int w = kFirst; w < kRest; w += 4) {
    const u32 four[4] = {two(w), two(w + 1), two(w + 2), two(w + 3)};
    store_matrices_transposed(staged(out, 8 * (w - kFirst + lane / 8) + line, group), four);
  }
#pragma unroll
  for (int w = kRest; w < kLast; ++w) store_matrix_transposed(staged(out, 8 * (w - kFirst) + line, group), two(w));
}

// Stores the rows of a chunk, from column `column`: each thread 16 codes of two rows in a turn. From turn to turn only
// the line changes, by a multiple of the 8 after which the swizzle comes back. All turns load before the first stores;
// in place of lines that are not there the last ones are read, so that nobody branches.
template <int NUMBER>
__device__ __forceinline__ void send_codes(u32 out, const Operands& operands, int column, const Tile& tile, int rows,
                                           Chunk<NUMBER>) {
  constexpr int kValues = 16, kPieces = kOutColumns / kValues, kTurnLines = kGroupThreads / kPieces;
  constexpr int kFirst = Chunk<NUMBER>::kFirst * 16, kEnd = Chunk<NUMBER>::kLast * 16;
  constexpr int kRows = (kEnd < TILE_ROWS ? kEnd : TILE_ROWS) - kFirst;
  constexpr int kLines = kRows / 2, kTurns = (kLines + kTurnLines - 1) / kTurnLines;
  static_assert(kTurnLines % 8 == 0 && kOutLines % 8 == 0, "lines of equal swizzle");
  const int columns = operands.columns(), thread = threadIdx.x % kGroupThreads;
  const int line = thread / kPieces, piece = thread % kPieces, at = column + piece * kValues;
  const int row = tile.row * TILE_ROWS + kFirst + 2 * line;
  const u32 from[2] = {staged(out, line, 2 * piece), staged(out, line, 2 * piece + 1)};
  const int left = at < columns ? min(rows - row, kRows - 2 * line) : 0;  // rows of the chunk for this thread
  uint4 v[kTurns][2];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    int further = turn * kTurnLines;
    if (further + kTurnLines > kOutLines) further = min(further, kOutLines - 8 - line / 8 * 8);
#pragma unroll
    for (int i = 0; i < 2; ++i) v[turn][i] = load_shared16(from[i] + further * kLineBytes);
  }
  unsigned char* to = operands.codes + static_cast<u64>(row) * columns + at;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const uint4 &a = v[turn][0], &b = v[turn][1];
    constexpr u32 kEven = 0x6420, kOdd = 0x7531;  // bytes of two words: those of the first row, of the second
    if (2 * turn * kTurnLines < left)
      store16(to, make_uint4(__byte_perm(a.x, a.y, kEven), __byte_perm(a.z, a.w, kEven),
                             __byte_perm(b.x, b.y, kEven), __byte_perm(b.z, b.w, kEven)));
    if (2 * turn * kTurnLines + 1 < left)
      store16(to + columns, make_uint4(__byte_perm(a.x, a.y, kOdd), __byte_perm(a.z, a.w, kOdd),
                                       __byte_perm(b.x, b.y, kOdd), __byte_perm(b.z, b.w, kOdd)));
    to += static_cast<u64>(2 * kTurnLines) * columns;
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
  return tile.output() + consumer * kOutColumns;
}
// Who lets the engine store what a consumer has staged: its first thread, with ROTARY another one too.
__device__ __forceinline__ bool is_storer(int thread) { return thread == 0 || ROTARY && thread == kWarpSize; }

// `out` is this consumer's staged output.
__device__ __forceinline__ void epilogue(const float (&sums)[TILE_ROWS / 2], const float* scales,
                                         const Outputs& outputs, u32 out, const TensorMap& map,
                                         const Operands& operands, const Tile& tile, int rows, int consumer) {
  const int thread = threadIdx.x % kGroupThreads, warp = thread / kWarpSize;
  constexpr int kGroups = GEGLU ? 1 : 2;  // of 8 columns that a warp stages
#if OUT8
  for_chunks([&](auto chunk) {
    consumer_barrier(consumer);  // all have read what was staged before
#pragma unroll
    for (int half = 0; half < kGroups; ++half)
      stage_columns(out, warp * kGroups + half, chunk,
                    [&](int m) { return outputs.codes(sums, row_scales(scales, m), m, half); });
    consumer_barrier(consumer);
    send_codes(out, operands, out_column(tile, consumer), tile, rows, chunk);
  });
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
