// Normalisations over rows of bfloat16, fused with what stands beside them. A block has one row: with less for each
// thread its rows are done sooner, and rows come out more evenly over the multiprocessors.
// COLS: row width, a multiple of 128 * ROW_WARPS. ROW_WARPS: of a block. QUANTISED: layer_norm and residual_rms_norm
// write E4M3 codes of the bfloat16 that they would have written: `out` uint8[rows, COLS], under input_scale float32[1];
// MULTIPLIED: of these times multiplier float32[COLS]. Otherwise `out` is bf16[rows, COLS]. PARTS: of the branch that both
// add; 0: none. What is not used is not read.
#include "quantise.cuh"

#ifndef QUANTISED
#define QUANTISED 0
#endif
#ifndef MULTIPLIED
#define MULTIPLIED 0
#endif
#ifndef PARTS
#define PARTS 0
#endif
static_assert(QUANTISED || !MULTIPLIED, "only codes have a multiplier in front");

constexpr int kThreads = ROW_WARPS * kWarpSize;
constexpr int kGroups = COLS / (4 * kThreads);  // eight-byte groups of a thread
static_assert(COLS % (4 * kThreads) == 0, "a thread reads groups of four values");
// Blocks of a multiprocessor: 712 rows are done in one go on 132 of them, and with few registers more begin beside the
// product in front. With several parts a thread has registers for all that it asks for at once.
constexpr int kResident = PARTS > 1 ? 6 : 8;

// Where group g of this thread stands in a row.
__device__ __forceinline__ int column_of(int g) { return (g * kThreads + threadIdx.x) * 4; }

__device__ __forceinline__ uint2 load4(const bf16* p) { return *reinterpret_cast<const uint2*>(p); }

__device__ __forceinline__ void unpack4(const uint2& four, float (&v)[4]) {
  v[0] = low_float(four.x), v[1] = high_float(four.x);
  v[2] = low_float(four.y), v[3] = high_float(four.y);
}

__device__ __forceinline__ uint2 pack4(const float (&v)[4]) {
  return make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
}

__device__ __forceinline__ void load_row(const bf16* row, float (&v)[kGroups][4]) {
#pragma unroll
  for (int g = 0; g < kGroups; ++g) unpack4(load4(row + column_of(g)), v[g]);
}

__device__ __forceinline__ void store4(bf16* p, const float (&v)[4]) {
  *reinterpret_cast<uint2*>(p) = pack4(v);
}

// v = row; with PARTS, first row = bfloat16(row + the sum of the branch's parts), each `part_values` values behind the one
// before. All that is read is asked for before any of it is used: what a row waits for is one round trip, not one for
// each part.
__device__ __forceinline__ void load_and_add(bf16* row, const bf16* branch, u64 part_values, float (&v)[kGroups][4]) {
  uint2 own[kGroups], more[kGroups][PARTS + 1];  // the last one is not used
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    own[g] = load4(row + column_of(g));
#pragma unroll
    for (int part = 0; part < PARTS; ++part) more[g][part] = load4(branch + part * part_values + column_of(g));
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    unpack4(own[g], v[g]);
    if (PARTS == 0) continue;
    float sum[4];
    unpack4(more[g][0], sum);
#pragma unroll
    for (int part = 1; part < PARTS; ++part) {
      float next[4];
      unpack4(more[g][part], next);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] += next[i];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = v[g][i] + sum[i];
    const uint2 rounded = pack4(sum);
    unpack4(rounded, v[g]);
    *reinterpret_cast<uint2*>(row + column_of(g)) = rounded;
  }
}

// What values are multiplied by in front of their codes, for this thread's groups.
struct Multipliers {
  float4 of[kGroups];

  __device__ __forceinline__ explicit Multipliers(const float* row) {
#pragma unroll
    for (int g = 0; MULTIPLIED && g < kGroups; ++g) of[g] = __ldg(reinterpret_cast<const float4*>(row + column_of(g)));
  }
};

// Where a normalised row goes. It is made in front of the wait, and only asks: scale and multipliers were used a
// decision ago and come from memory. Nothing in front of the row's loads needs the scale; and as there are registers for
// the multipliers only behind them, one block has all of them brought into the cache.
struct Target {
  void* out;
  float scale;

  __device__ __forceinline__ Target(void* out, const float* input_scale, const float* multiplier)
      : out(out), scale(QUANTISED ? *input_scale : 1.0f) {
    if (!MULTIPLIED || blockIdx.x > 0) return;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) prefetch_line(multiplier + column_of(g));
  }

  // The row that starts at `start`; value(g, i): the i-th of group g, normalised.
  template <class Value>
  __device__ __forceinline__ void store(u64 start, const Multipliers& multipliers, Value value) const {
    const float inverse = QUANTISED ? inverse_of(scale) : 1.0f;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      float four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] = value(g, i);
      const uint2 pairs = pack4(four);
      if (!QUANTISED) {
        *reinterpret_cast<uint2*>(static_cast<bf16*>(out) + start + column_of(g)) = pairs;
        continue;
      }
      unpack4(pairs, four);
      if (MULTIPLIED) {
        const float4& by = multipliers.of[g];
        four[0] *= by.x, four[1] *= by.y, four[2] *= by.z, four[3] *= by.w;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] *= inverse;
      *reinterpret_cast<u32*>(static_cast<unsigned char*>(out) + start + column_of(g)) = e4m3_four(four);
    }
  }
};

// x += branch (skipped without PARTS), then out = LayerNorm(x) * weight + bias. x bf16[rows, COLS]; weight, bias
// bf16[COLS]; branch bf16[PARTS * part_rows, COLS].
extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    layer_norm(bf16* x, const bf16* branch, const bf16* weight, const bf16* bias, void* out, const float* input_scale,
               const float* multiplier, int part_rows, float eps) {
  overlap_trigger();
  __shared__ float scratch[2][ROW_WARPS];
  const u64 start = static_cast<u64>(blockIdx.x) * COLS;
  float scale[kGroups][4], shift[kGroups][4], v[kGroups][4];
  load_row(weight, scale);
  load_row(bias, shift);
  const Target target(out, input_scale, multiplier);
  overlap_wait();
  load_and_add(x + start, branch + start, static_cast<u64>(part_rows) * COLS, v);
  const Multipliers multipliers(multiplier);
  float sum = 0.0f;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) sum += (v[g][0] + v[g][1]) + (v[g][2] + v[g][3]);
  const float mean = block_sum<kThreads>(sum, scratch[0]) / COLS;
  float squares = 0.0f;
#pragma unroll
  for (int g = 0; g < kGroups; ++g)
#pragma unroll
    for (int i = 0; i < 4; ++i) squares += (v[g][i] - mean) * (v[g][i] - mean);
  const float inverse = rsqrtf(block_sum<kThreads>(squares, scratch[1]) / COLS + eps);
  target.store(start, multipliers,
               [&](int g, int i) { return (v[g][i] - mean) * inverse * scale[g][i] + shift[g][i]; });
}

// residual += branch (skipped without PARTS), then out = residual / rms(residual). residual bf16[rows, COLS]; branch
// bf16[PARTS * part_rows, COLS].
extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    residual_rms_norm(bf16* residual, const bf16* branch, void* out, const float* input_scale, const float* multiplier,
                      int part_rows, float eps) {
  overlap_trigger();
  __shared__ float scratch[ROW_WARPS];
  const u64 start = static_cast<u64>(blockIdx.x) * COLS;
  const Target target(out, input_scale, multiplier);
  overlap_wait();
  float v[kGroups][4];
  load_and_add(residual + start, branch + start, static_cast<u64>(part_rows) * COLS, v);
  const Multipliers multipliers(multiplier);
  float squares = 0.0f;
#pragma unroll
  for (int g = 0; g < kGroups; ++g)
#pragma unroll
    for (int i = 0; i < 4; ++i) squares += v[g][i] * v[g][i];
  const float inverse = rsqrtf(block_sum<kThreads>(squares, scratch) / COLS + eps);
  target.store(start, multipliers, [&](int g, int i) { return v[g][i] * inverse; });
}

// residual += gate * branch (skipped when branch is null), then out = residual / rms * (1 + scale) + shift.
// residual, branch, out bf16[rows, COLS]; gate float[COLS]; modulation float[3, COLS] = scale, shift, (unused) gate.
extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    gated_residual_ada_rms_norm(bf16* residual, const bf16* branch, const float* gate, const float* modulation,
                                bf16* out, float eps) {
  overlap_trigger();
  overlap_wait();
  __shared__ float scratch[ROW_WARPS];
  const u64 start = static_cast<u64>(blockIdx.x) * COLS;
  float v[kGroups][4];
  load_row(residual + start, v);
  if (branch != nullptr) {
    float b[kGroups][4];
    load_row(branch + start, b);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int column = column_of(g);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[g][i] = to_float(to_bf16(fmaf(b[g][i], gate[column + i], v[g][i])));
      store4(residual + start + column, v[g]);
    }
  }
  float squares = 0.0f;
#pragma unroll
  for (int g = 0; g < kGroups; ++g)
#pragma unroll
    for (int i = 0; i < 4; ++i) squares += v[g][i] * v[g][i];
  const float inverse = rsqrtf(block_sum<kThreads>(squares, scratch) / COLS + eps);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int column = column_of(g);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[g][i] = fmaf(v[g][i] * inverse, 1.0f + modulation[column + i], modulation[COLS + column + i]);
    store4(out + start + column, v[g]);
  }
}
