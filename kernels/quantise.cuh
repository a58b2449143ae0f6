// E4M3 codes of values that stand as bfloat16: rounded to nearest even, saturating at 448, NaN stays NaN. What the codes
// mean is defined in flashrt_ros/precision/e4m3.py: a code is that of the value times the reciprocal of the scale. And
// back: values of E4M3 and E2M1 codes.
#pragma once
#include "common.cuh"

// Two codes; that of `low` in the low byte.
__device__ __forceinline__ u32 e4m3_pair(float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Four codes, the first in the low byte.
__device__ __forceinline__ u32 e4m3_four(const float (&v)[4]) {
  return e4m3_pair(v[0], v[1]) | e4m3_pair(v[2], v[3]) << 16;
}

// Eight bfloat16 times `inverse` → eight codes.
__device__ __forceinline__ uint2 e4m3_eight(const uint4& v, float inverse) {
  float f[8];
  unpack8(v, f);
  const float low[4] = {f[0] * inverse, f[1] * inverse, f[2] * inverse, f[3] * inverse};
  const float high[4] = {f[4] * inverse, f[5] * inverse, f[6] * inverse, f[7] * inverse};
  return make_uint2(e4m3_four(low), e4m3_four(high));
}

// Sixteen bfloat16 times `inverse` → sixteen codes.
__device__ __forceinline__ uint4 e4m3_sixteen(const uint4& first, const uint4& second, float inverse) {
  float v[2][8];
  unpack8(first, v[0]);
  unpack8(second, v[1]);
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float(&part)[8] = v[i / 2];
    const float four[4] = {part[i % 2 * 4] * inverse, part[i % 2 * 4 + 1] * inverse, part[i % 2 * 4 + 2] * inverse,
                           part[i % 2 * 4 + 3] * inverse};
    words[i] = e4m3_four(four);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// What a value is multiplied by before it is rounded to a code.
__device__ __forceinline__ float inverse_of(float scale) { return 1.0f / scale; }
__device__ __forceinline__ float inverse_of(const float* scale) { return 1.0f / *scale; }

// The value of an E4M3 code without sign: its fields are those of a float, with a bias of 7 instead of 127, so that this
// holds for subnormal codes too. NaN (all ones) becomes NaN.
__device__ __forceinline__ float e4m3_value(unsigned char code) {
  const u32 magnitude = code & 0x7fu;
  if (magnitude == 0x7fu) return __uint_as_float(0x7fffffffu);
  return __uint_as_float(magnitude << 20) * __uint_as_float((127u + 120u) << 23);
}

// The value of the E2M1 code in the lowest four bits: likewise, with a bias of 1.
__device__ __forceinline__ float e2m1_value(u32 bits) {
  const float magnitude = __uint_as_float((bits & 7u) << 22) * __uint_as_float((127u + 126u) << 23);
  return __uint_as_float(__float_as_uint(magnitude) | (bits & 8u) << 28);
}
