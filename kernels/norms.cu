// Normalisations over rows of bfloat16, fused with what stands beside them. One warp a row.
// COLS: row width, a multiple of 128.
#include "common.cuh"

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

// x += branch (skipped when null), then out = LayerNorm(x) * weight + bias. x, branch, out bf16[rows, COLS]; weight,
// bias bf16[COLS].
extern "C" __global__ void __launch_bounds__(kRowsPerBlock* kWarpSize)
    layer_norm(bf16* x, const bf16* branch, const bf16* weight, const bf16* bias, bf16* out, int rows, float eps) {
  overlap_trigger();
  const int row = blockIdx.x * kRowsPerBlock + threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  if (row >= rows) return;
  const u64 start = static_cast<u64>(row) * COLS;
  float scale[kGroups][4], shift[kGroups][4], v[kGroups][4];
  load_row(weight, scale);
  load_row(bias, shift);
  overlap_wait();
  load_row(x + start, v);
  if (branch != nullptr) {
    float b[kGroups][4];
    load_row(branch + start, b);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[g][i] = to_float(to_bf16(v[g][i] + b[g][i]));
      store4(x + start + (g * kWarpSize + lane) * 4, v[g]);
    }
  }
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
    store4(out + start + (g * kWarpSize + lane) * 4, y);
  }
}

// residual += branch (skipped when null), then out = residual / rms(residual). bf16[rows, COLS].
extern "C" __global__ void __launch_bounds__(kRowsPerBlock* kWarpSize)
    residual_rms_norm(bf16* residual, const bf16* branch, bf16* out, int rows, float eps) {
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
#pragma unroll
      for (int i = 0; i < 4; ++i) v[g][i] = to_float(to_bf16(v[g][i] + b[g][i]));
      store4(residual + start + (g * kWarpSize + lane) * 4, v[g]);
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
#pragma unroll
    for (int i = 0; i < 4; ++i) v[g][i] *= inverse;
    store4(out + start + (g * kWarpSize + lane) * 4, v[g]);
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
