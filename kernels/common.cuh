// What every kernel shares: bfloat16 conversion, vector access, reductions, matrix instructions, launch overlap.
// No CUDA header is included, so that NVRTC compiles this without a toolkit.
#pragma once

typedef unsigned short bf16;  // the bits of one bfloat16
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int kWarpSize = 32;
constexpr u32 kAllLanes = 0xffffffffu;

// -- launch overlap (programmatic dependent launch) ---------------------------------------------------------------------

// `overlap_trigger` lets the next kernel in the stream start; `overlap_wait` waits until all memory of the kernels
// before is visible. What stands between them may touch only memory that no earlier kernel of the stage writes, or
// that was complete before the kernel in front let this one begin. With OVERLAP=0 both are no-ops, and results are
// equal bit for bit.
#ifndef OVERLAP
#define OVERLAP 0
#endif

__device__ __forceinline__ void overlap_trigger() {
#if OVERLAP
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void overlap_wait() {
#if OVERLAP
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// -- bfloat16 ------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float low_float(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ bf16 to_bf16(float x) { return static_cast<bf16>(pack_bf16(x, 0.0f)); }

// Eight bfloat16 in one 16-byte register group.
__device__ __forceinline__ void unpack8(const uint4& v, float (&f)[8]) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    f[2 * i] = low_float(words[i]);
    f[2 * i + 1] = high_float(words[i]);
  }
}

__device__ __forceinline__ uint4 pack8(const float (&f)[8]) {
  return make_uint4(pack_bf16(f[0], f[1]), pack_bf16(f[2], f[3]), pack_bf16(f[4], f[5]), pack_bf16(f[6], f[7]));
}

// -- memory --------------------------------------------------------------------------------------------------------------

// Sixteen bytes through L2 only: for data that other blocks of the running grid write.
__device__ __forceinline__ uint4 load_shared_by_grid(const void* p) {
  return __ldcg(reinterpret_cast<const uint4*>(p));
}
// A later load will find it in L2. For one thread to ask: a warp whose lanes all do takes one turn for each.
__device__ __forceinline__ void prefetch_line(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
__device__ __forceinline__ uint4 load16(const void* p) { return *reinterpret_cast<const uint4*>(p); }
__device__ __forceinline__ void store16(void* p, const uint4& v) { *reinterpret_cast<uint4*>(p) = v; }

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// From shared memory that barriers fill: these stay where they stand.
__device__ __forceinline__ u32 load_shared4(u32 shared) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared) : "memory");
  return v;
}

__device__ __forceinline__ uint2 load_shared8(u32 shared) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared) : "memory");
  return v;
}

__device__ __forceinline__ uint4 load_shared16(u32 shared) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared)
               : "memory");
  return v;
}

// -- reductions ----------------------------------------------------------------------------------------------------------

template <int LANES = kWarpSize>
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

template <int LANES = kWarpSize>
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}

// Sum over a block of THREADS threads; every thread gets it. `scratch` holds THREADS / 32 floats and may be reused
// after the next barrier.
template <int THREADS>
__device__ __forceinline__ float block_sum(float x, float* scratch) {
  constexpr int kWarps = THREADS / kWarpSize;
  x = warp_sum(x);
  if (threadIdx.x % kWarpSize == 0) scratch[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += scratch[w];
  return total;
}

__device__ __forceinline__ float sum_of_squares8(const uint4& v) {
  float f[8], sum = 0.0f;
  unpack8(v, f);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += f[i] * f[i];
  return sum;
}

__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }

// -- arithmetic ----------------------------------------------------------------------------------------------------------

// GELU in its tanh form, written as x * sigmoid(2u), which keeps full float precision at both ends.
__device__ __forceinline__ float gelu_tanh(float x) {
  const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return __fdividef(x, 1.0f + __expf(-2.0f * u));
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// d += a * b for one 16x8 tile, k = 16: bfloat16 operands, float accumulators.
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four 8x8 matrices of bfloat16 from shared memory.
__device__ __forceinline__ uint4 load_matrices(u32 shared) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared)
               : "memory");
  return v;
}

// Two of them, named by lanes 0 to 15.
__device__ __forceinline__ uint2 load_two_matrices(u32 shared) {
  uint2 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared) : "memory");
  return v;
}

// The transpose of an 8x8 matrix of bfloat16 that lies in a warp's registers, a row in four lanes.
__device__ __forceinline__ u32 transposed_matrix(u32 word) {
  u32 result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
  return result;
}

// Writes the transposes of two or four 8x8 matrices of bfloat16 into shared memory; lane i names row i % 8 of
// number i / 8 there.
__device__ __forceinline__ void store_matrices_transposed(u32 shared, const u32 (&words)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared), "r"(words[0]),
               "r"(words[1])
               : "memory");
}
__device__ __forceinline__ void store_matrices_transposed(u32 shared, const u32 (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Four transposed 8x8 matrices of bfloat16 from shared memory.
__device__ __forceinline__ uint4 load_matrices_transposed(u32 shared) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared)
               : "memory");
  return v;
}
