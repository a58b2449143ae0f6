// bfloat16 → E4M3 under one calibrated scale, for what comes out of a library's kernel; own producers write codes
// themselves. NVFP4 → bfloat16, for products without tensor cores of their own.
#include "quantise.cuh"

constexpr int kThreads = 128, kValues = 16;  // that a thread converts: one block of NVFP4

// x bf16[groups * 16]; scale float32[1]; out uint8[groups * 16].
extern "C" __global__ void __launch_bounds__(kThreads)
    quantise(const bf16* x, const float* scale, unsigned char* out, int groups) {
  overlap_trigger();
  const int group = blockIdx.x * kThreads + threadIdx.x;
  const float inverse = inverse_of(scale);
  overlap_wait();
  if (group >= groups) return;
  const bf16* from = x + static_cast<u64>(group) * kValues;
  store16(out + static_cast<u64>(group) * kValues, e4m3_sixteen(load16(from), load16(from + 8), inverse));
}

// codes uint8[groups * 8], two E2M1 a byte, the even one in the low bits; scales uint8[groups], E4M3 → out bf16[groups *
// 16] = code * scale, which bfloat16 holds exactly: for products whose operands no tensor core takes together.
extern "C" __global__ void __launch_bounds__(kThreads)
    decode_nvfp4(const uint2* codes, const unsigned char* scales, bf16* out, int groups) {
  overlap_trigger();
  const int group = blockIdx.x * kThreads + threadIdx.x;
  overlap_wait();
  if (group >= groups) return;
  const uint2 sixteen = codes[group];
  const float scale = e4m3_value(scales[group]);
  float v[2][8];
#pragma unroll
  for (int i = 0; i < kValues; ++i) v[i / 8][i % 8] = e2m1_value((i < 8 ? sixteen.x : sixteen.y) >> i % 8 * 4) * scale;
  store16(out + static_cast<u64>(group) * kValues, pack8(v[0]));
  store16(out + static_cast<u64>(group) * kValues + 8, pack8(v[1]));
}
