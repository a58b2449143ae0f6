// Normalisations over rows of bfloat16, fused with what stands beside them. One warp a row.
// COLS: row width, a multiple of 128. QUANTISED: layer_norm and residual_rms_norm write E4M3 codes of the bfloat16 that
// they would have written: `out` uint8[rows, COLS], under input_scale float32[1], behind multiplier float32[COLS] (null
// for none). Otherwise `out` is bf16[rows, COLS], and both are not read.
#include "quantise.cuh"

#ifndef QUANTISED
#define QUANTISED 0
#endif

constexpr int kRowsPerBlock = 4;
constexpr int kGroups = COLS / (4 * kWarpSize);  // eight-byte groups a lane
static_assert(COLS % (4 * kWarpSize) == 0, "a lane reads groups of four values");

__device__ __forceinline__ void load_row(const bf16* row, float (&v)[kGroups][4]) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const uint2 pair = *reinterpret_cast<const uint2*>(row + (g * kWarpSize + lane) * 4);
    v[g][0] = low_float(pair.x);
    v[g][1] = high_float(pair.x);
    v[g][2] = low_float(pair.y);
    v[g][3] = high_float(pair.y);
  }
}

__device__ __forceinline__ void store4(bf16* p, const float (&v)[4]) {
  *reinterpret_cast<uint2*>(p) = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
}

// A branch of `parts` parts, each part_rows rows behind the one before: v = bfloat16(v + their sum), also to `row`.
struct Branch {
  const bf16* first;
  int parts, part_rows;

  __device__ __forceinline__ void add(float (&v)[kGroups][4], bf16* rows, u64 start) const {
    if (first == nullptr) return;
    float sum[kGroups][4];
    load_row(first + start, sum);
#pragma unroll 1
    for (int part = 1; part < parts; ++part) {
      float more[kGroups][4];
      load_row(first + static_cast<u64>(part) * part_rows * COLS + start, more);
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[g][i] += more[g][i];
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[g][i] = to_float(to_bf16(v[g][i] + sum[g][i]));
      store4(rows + start + (g * kWarpSize + threadIdx.x % kWarpSize) * 4, v[g]);
    }
  }
};

// Where a normalised row goes.
struct Target {
  void* out;
  const float *input_scale, *multiplier;

  // Four values of group g of the row that starts at `start`.
  __device__ __forceinline__ void store(u64 start, int g, float (&v)[4], float inverse) const {
    const int column = (g * kWarpSize + threadIdx.x % kWarpSize) * 4;
    if (!QUANTISED) return store4(static_cast<bf16*>(out) + start + column, v);
    float factor[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    if (multiplier != nullptr) {
      const float4 four = *reinterpret_cast<const float4*>(multiplier + column);
      factor[0] = four.x, factor[1] = four.y, factor[2] = four.z, factor[3] = four.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = to_float(to_bf16(v[i])) * factor[i] * inverse;
    *reinterpret_cast<u32*>(static_cast<unsigned char*>(out) + start + column) = e4m3_four(v);
  }

  __device__ __forceinline__ float inverse() const { return QUANTISED ? inverse_of(input_scale) : 1.0f; }
};

// x += branch (skipped when null), then out = LayerNorm(x) * weight + bias. x bf16[rows, COLS]; weight, bias bf16[COLS];
// branch bf16[parts * part_rows, COLS].
extern "C" __global__ void __launch_bounds__(kRowsPerBlock* kWarpSize)
    layer_norm(bf16* x, const bf16* branch, const bf16* weight, const bf16* bias, void* out, const float* input_scale,
               const float* multiplier, int rows, int parts, int part_rows, float eps) {
  overlap_trigger();
  const int row = blockIdx.x * kRowsPerBlock + threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  if (row >= rows) return;
  const u64 start = static_cast<u64>(row) * COLS;
  float scale[kGroups][4], shift[kGroups][4], v[kGroups][4];
  load_row(weight, scale);
  load_row(bias, shift);
  const Target target{out, input_scale, multiplier};
  const float to_codes = target.inverse();
  overlap_wait();
  load_row(x + start, v);
  Branch{branch, parts, part_rows}.add(v, x, start);
  float sum = 0.0f;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) sum += (v[g][0] + v[g][1]) + (v[g][2] + v[g][3]);
  const float mean = warp_sum(sum) / COLS;
  float squares = 0.0f;
#pragma unroll
  for (int g = 0; g < kGroups; ++g)
#pragma unroll
    for (int i = 0; i < 4; ++i) squares += (v[g][i] - mean) * (v[g][i] - mean);
  const float inverse = rsqrtf(warp_sum(squares) / COLS + eps);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = (v[g][i] - mean) * inverse * scale[g][i] + shift[g][i];
    target.store(start, g, y, to_codes);
  }
}

// residual += branch (skipped when null), then out = residual / rms(residual). residual bf16[rows, COLS]; branch
// bf16[parts * part_rows, COLS].
extern "C" __global__ void __launch_bounds__(kRowsPerBlock* kWarpSize)
    residual_rms_norm(bf16* residual, const bf16* branch, void* out, const float* input_scale, const float* multiplier,
                      int rows, int parts, int part_rows, float eps) {
  overlap_trigger();
  const int row = blockIdx.x * kRowsPerBlock + threadIdx.x / kWarpSize;
  if (row >= rows) return;
  const u64 start = static_cast<u64>(row) * COLS;
  const Target target{out, input_scale, multiplier};
  const float to_codes = target.inverse();
  overlap_wait();
  float v[kGroups][4];
  load_row(residual + start, v);
  Branch{branch, parts, part_rows}.add(v, residual, start);
  float squares = 0.0f;
#pragma unroll
  for (int g = 0; g < kGroups; ++g)
#pragma unroll
    for (int i = 0; i < 4; ++i) squares += v[g][i] * v[g][i];
  const float inverse = rsqrtf(warp_sum(squares) / COLS + eps);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[g][i] *= inverse;
    target.store(start, g, v[g], to_codes);
  }
}

// residual += gate * branch (skipped when branch is null), then out = residual / rms * (1 + scale) + shift.
// residual, branch, out bf16[rows, COLS]; gate float[COLS]; modulation float[3, COLS] = scale, shift, (unused) gate.
extern "C" __global__ void __launch_bounds__(kRowsPerBlock* kWarpSize)
    gated_residual_ada_rms_norm(bf16* residual, const bf16* branch, const float* gate, const float* modulation,
                                bf16* out, int rows, float eps) {
  overlap_trigger();
  overlap_wait();
  const int row = blockIdx.x * kRowsPerBlock + threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  if (row >= rows) return;
  const u64 start = static_cast<u64>(row) * COLS;
  float v[kGroups][4];
  load_row(residual + start, v);
  if (branch != nullptr) {
    float b[kGroups][4];
    load_row(branch + start, b);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int column = (g * kWarpSize + lane) * 4;
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
  const float inverse = rsqrtf(warp_sum(squares) / COLS + eps);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int column = (g * kWarpSize + lane) * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[g][i] = fmaf(v[g][i] * inverse, 1.0f + modulation[column + i], modulation[COLS + column + i]);
    store4(out + start + column, v[g]);
  }
}
