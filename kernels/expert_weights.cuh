// Weights in shared memory as operands of the matrix instruction: bfloat16, or codes that are decoded in registers.
//
// A lane's part of sixteen inputs of a tile is two words, of two bfloat16 each: of output lane / 4, inputs
// 2 * (lane % 4) and the next, and those eight inputs further on. Codes are stored as lanes read them, and their bits so
// that one mask leaves a word of two values, with sign, exponent and mantissa where bfloat16 has them:
//   E4M3   [pair of steps 2][lane 32][step 2]: a word holds four codes, the two words of a step
//   NVFP4  [lane 32][pair of steps 2]: a word holds eight codes, the words of two steps; behind these [output 8]: the
//          scales of four steps in a word
// Their exponents lack the bias of bfloat16, so that values are too small by a power of two, exactly, also subnormal
// ones. For E4M3 the operand rows make up for it (see lifted), for NVFP4 the scales. What a sum lacks then is one
// factor for each output: who adds the parts applies it.
#pragma once
#include "expert_plan.cuh"

constexpr int kSteps = kChunk / 16;  // of sixteen inputs, in a chunk

// An input of product P as its operand rows hold it. Those that meet E4M3 are larger by 2^80 of the 2^120 that the
// weights lack, so that neither operands below 2^47 nor sums leave the range of float.
constexpr float kLift = 0x1p80f;

template <typename P>
__device__ __forceinline__ float lifted(float x) {
  return P::kBits == 8 ? x * kLift : x;
}

// Both values of a pair times value HALF of the pair `b`, which the instruction picks by itself when asked in this way.
template <int HALF>
__device__ __forceinline__ u32 multiply_by_half(u32 a, u32 b) {
  u32 product;
  if constexpr (HALF == 0) {
    asm("{\n.reg .b16 l, h;\n.reg .b32 s;\nmov.b32 {l, h}, %2;\nmov.b32 s, {l, l};\nmul.rn.bf16x2 %0, %1, s;\n}"
        : "=r"(product)
        : "r"(a), "r"(b));
  } else {
    asm("{\n.reg .b16 l, h;\n.reg .b32 s;\nmov.b32 {l, h}, %2;\nmov.b32 s, {h, h};\nmul.rn.bf16x2 %0, %1, s;\n}"
        : "=r"(product)
        : "r"(a), "r"(b));
  }
  return product;
}

// The weights of one chunk of a unit, which is number `member` of its stage; `offset` is where a lane begins to load
// them. `load` takes them into registers; `loaded` depends on all of them (see Ring::release), so whoever asks waits
// for the loads.
template <int BITS>
struct Weights;

template <>
struct Weights<16> {
  uint4 steps[kSteps] = {};

  // This lane's row in both tiles of eight inputs, then of the next eight.
  static __device__ __forceinline__ u32 offset(int member, int lane) {
    return (2 * member + lane / 8 % 2) * chunk_bytes(16) + lane / 16 * 128 + lane % 8 * 16;
  }

  __device__ __forceinline__ void load(int, u32 from) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) steps[s] = load_matrices(from + s * 256);
  }
  __device__ __forceinline__ u32 loaded() const { return steps[0].w | steps[1].w | steps[2].w | steps[3].w; }
  __device__ __forceinline__ uint4 step(int s) const { return steps[s]; }
};

template <>
struct Weights<8> {
  uint2 tiles[kSteps / 2][2] = {};  // codes of two steps each

  static __device__ __forceinline__ u32 offset(int member, int lane) { return 2 * member * chunk_bytes(8) + lane * 8; }

  __device__ __forceinline__ void load(int, u32 from) {
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i)
#pragma unroll
      for (int t = 0; t < 2; ++t) tiles[i][t] = load_shared8(from + i * 256 + t * chunk_bytes(8));
  }
  __device__ __forceinline__ u32 loaded() const {
    return tiles[0][0].y | tiles[0][1].y | tiles[1][0].y | tiles[1][1].y;
  }

  __device__ __forceinline__ uint4 step(int s) const {
    const uint2(&codes)[2] = tiles[s / 2];
    const uint2 a = decoded(s % 2 == 0 ? codes[0].x : codes[0].y), b = decoded(s % 2 == 0 ? codes[1].x : codes[1].y);
    return make_uint4(a.x, b.x, a.y, b.y);
  }

 private:
  // The two pairs of values * 2^-120 that share a word.
  static __device__ __forceinline__ uint2 decoded(u32 codes) {
    constexpr u32 kMask = 0x87f087f0u;
    return make_uint2(codes & kMask, (codes << 4 ^ codes >> 4) & kMask);
  }
};

template <>
struct Weights<4> {
  static constexpr int kScales = kChunk * kTile / 2;  // where the scales of a tile begin, behind its codes

  uint2 tiles[2] = {};  // codes of four steps
  u32 scales[2] = {};   // of each tile, as codes

  static __device__ __forceinline__ u32 offset(int member, int lane) { return 2 * member * chunk_bytes(4) + lane * 8; }

  __device__ __forceinline__ uint4 step(int s) const {
    const uint2 a = decoded(0, s), b = decoded(1, s);
    return make_uint4(a.x, b.x, a.y, b.y);
  }

  __device__ __forceinline__ void load(int lane, u32 from) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      tiles[t] = load_shared8(from + t * chunk_bytes(4));
      scales[t] = load_shared4(from + t * chunk_bytes(4) + kScales + lane / 4 * 4 - lane * 8);
    }
  }
  __device__ __forceinline__ u32 loaded() const { return tiles[0].y | tiles[1].y | scales[0] | scales[1]; }

 private:
  // Five bits of exponent and three of mantissa, to which the upper bits of the exponent are added: scale * 2^119. One
  // instruction, which takes one number only as such: the other one comes in a register.
  static __device__ __forceinline__ u32 scale_values(u32 codes) {
    u32 exponents, values;
    asm("mov.b32 %0, 0x70007000;" : "=r"(exponents));
    asm("lop3.b32 %0, %1, 0x0ff00ff0, %2, 0xea;" : "=r"(values) : "r"(codes), "r"(exponents));
    return values;
  }

  __device__ __forceinline__ uint2 decoded(int t, int s) const {
    constexpr u32 kMask = 0x81c081c0u;  // a value * 2^-126
    const u32 codes = s < 2 ? tiles[t].x : tiles[t].y,
              of_two_steps = s % 2 == 0 ? scales[t] : __byte_perm(scales[t], 0, 0x2301),  // s % 2, and the next but one
              scale = scale_values(of_two_steps);
    const u32 first = (s % 2 == 0 ? codes : __funnelshift_l(codes, codes, 12)) & kMask,
              second = (s % 2 == 0 ? codes << 6 : codes >> 6 ^ codes << 2) & kMask;
    if (s < 2) return make_uint2(multiply_by_half<0>(first, scale), multiply_by_half<0>(second, scale));
    return make_uint2(multiply_by_half<1>(first, scale), multiply_by_half<1>(second, scale));
  }
};
