// Matrix product of two NVFP4 matrices on block-scaled FP4 tensor cores (sm_120a and sm_110a):
//   out[row, output] = sum_k x[row, k] * w[output, k],  sums in float32, out in bfloat16.
//
// Both operands are as flashrt_ros/precision/nvfp4.py stores them: E2M1 codes, two a byte and the even one low, in rows
// of K / 2 bytes; unsigned E4M3 scales of 16 codes each, in rows of K / 16 bytes; one float32 scale a tensor. K is a
// macro and a multiple of 64. Rows beyond `rows` are read as zeros and never written; `outputs` is a multiple of 128.
//
// NOT RUN: compiled for both architectures in every test run, and the tests look for the block-scaled instruction in
// the machine code. No GPU of either kind was at hand, so neither correctness nor speed has been seen.
#include "common.cuh"

typedef unsigned char u8;

constexpr int kStep = 64;             // of K in one instruction
constexpr int kStepBytes = kStep / 2;  // of a row
constexpr int kScaleWord = 4;          // scales of a row in one instruction, one 32-bit word
static_assert(K % kStep == 0, "K must be a multiple of 64");

struct Operand {
  const u8* codes;
  const u8* scales;

  __device__ __forceinline__ u32 code_word(int row, int byte) const {
    return *reinterpret_cast<const u32*>(codes + static_cast<u64>(row) * (K / 2) + byte);
  }
  __device__ __forceinline__ u32 scale_word(int row, int step) const {
    return *reinterpret_cast<const u32*>(scales + static_cast<u64>(row) * (K / 16) + step * kScaleWord);
  }
};

#if defined(__CUDA_ARCH_FEAT_SM120_ALL)
// -- sm_120a: one warp multiplies 16 rows with 64 outputs, operands in registers --------------------------------------

constexpr int kRows = 16, kOutputs = 64, kTiles = kOutputs / 8, kWarps = 4;

__device__ __forceinline__ void mma_nvfp4(float (&d)[4], const u32 (&a)[4], u32 a_scale, const u32 (&b)[2],
                                          u32 b_scale) {
  asm volatile(
      "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, %10, {0,0}, %11, {0,0};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(a_scale), "r"(b_scale));
}

// Fragments by lane, with g = lane / 4 and t = lane % 4: a[0], a[1] are columns 8t.. of rows g and g + 8, a[2], a[3]
// the same 32 columns further; b likewise, of output g. Scales of rows g and g + 8 come from lanes t = 0 and t = 1 of a
// quad, those of output g from lane t = 0. d[0..1] are outputs 2t, 2t + 1 of row g, d[2..3] of row g + 8.
extern "C" __global__ void __launch_bounds__(kWarps* kWarpSize)
    fp4_linear(const u8* x_codes, const u8* x_scales, const float* x_scale, const u8* w_codes, const u8* w_scales,
               const float* w_scale, bf16* out, int rows, int outputs) {
  const Operand x{x_codes, x_scales}, w{w_codes, w_scales};
  const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
  const int row = blockIdx.y * kRows + g;
  const int first = (blockIdx.x * kWarps + threadIdx.x / kWarpSize) * kOutputs;
  if (first >= outputs) return;
  const bool low = row < rows, high = row + 8 < rows;
  const int scaled = row + 8 * (t == 1);
  float d[kTiles][4] = {};
  overlap_wait();
  for (int step = 0; step < K / kStep; ++step) {
    const int byte = step * kStepBytes + 4 * t;
    const u32 a[4] = {low ? x.code_word(row, byte) : 0u, high ? x.code_word(row + 8, byte) : 0u,
                      low ? x.code_word(row, byte + 16) : 0u, high ? x.code_word(row + 8, byte + 16) : 0u};
    const u32 a_scale = scaled < rows ? x.scale_word(scaled, step) : 0u;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int output = first + 8 * tile + g;
      const u32 b[2] = {w.code_word(output, byte), w.code_word(output, byte + 16)};
      mma_nvfp4(d[tile], a, a_scale, b, w.scale_word(output, step));
    }
  }
  overlap_trigger();
  const float scale = x_scale[0] * w_scale[0];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    u32* pair = reinterpret_cast<u32*>(out + static_cast<u64>(row) * outputs + first + 8 * tile + 2 * t);
    if (low) pair[0] = pack_bf16(d[tile][0] * scale, d[tile][1] * scale);
    if (high) pair[4 * outputs] = pack_bf16(d[tile][2] * scale, d[tile][3] * scale);
  }
}

#elif defined(__CUDA_ARCH_FEAT_SM110_ALL)
// -- sm_110a: one block multiplies 64 rows with 128 outputs, operands in shared memory, sums in tensor memory ---------
//
// The weights are the instruction's A (M = 128 outputs, one lane of tensor memory each), x is its B (N = 64 rows, one
// column each). Operands lie in shared memory as core matrices of 8 rows x 16 bytes without swizzle, K before rows;
// scales as blocks of 512 bytes, the word of row r at (r % 32) * 16 + (r / 32) * 4, which a copy of 32 x 128 bits
// spreads over the four 32-lane windows of tensor memory.

constexpr int kOutputs = 128, kRows = 64, kThreads = 128;
constexpr int kScaleBytes = 512, kScaleColumns = 4;
constexpr int kColumns = 128;  // of tensor memory: 64 sums, 4 + 4 scales; a power of two is allotted
constexpr int kMatrixBytes = 128;
// Instruction descriptor: both operands E2M1 and K-major, unsigned E4M3 scales, N / 8, M / 128, dense K = 64.
constexpr u32 kInstruction =
    1u << 7 | 1u << 10 | static_cast<u32>(kRows / 8) << 17 | static_cast<u32>(kOutputs / 128) << 27;

__device__ __forceinline__ u64 descriptor(u32 shared, u32 along_k, u32 along_rows) {
  return static_cast<u64>((shared & 0x3ffffu) >> 4) | static_cast<u64>(along_k >> 4) << 16 |
         static_cast<u64>(along_rows >> 4) << 32 | 1ull << 46;
}

// Rows `first`... of a step into core matrices, and their scales into a block of 512 bytes; zeros from `count` on.
template <int TILE>
__device__ __forceinline__ void fetch(const Operand& from, int first, int count, int step, u8* codes, u8* scales) {
  for (int i = threadIdx.x; i < TILE * (kStepBytes / 16); i += kThreads) {
    const int row = i / 2, half = i % 2;
    const u8* source = from.codes + static_cast<u64>(first + row) * (K / 2) + step * kStepBytes + 16 * half;
    u8* target = codes + (row / 8 * 2 + half) * kMatrixBytes + row % 8 * 16;
    store16(target, first + row < count ? load16(source) : make_uint4(0, 0, 0, 0));
  }
  for (int row = threadIdx.x; row < 128; row += kThreads) {
    const u32 word = row < TILE && first + row < count ? from.scale_word(first + row, step) : 0u;
    *reinterpret_cast<u32*>(scales + row % 32 * 16 + row / 32 * 4) = word;
  }
}

__device__ __forceinline__ void copy_scales(u32 tensor, u64 shared) {
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(tensor), "l"(shared) : "memory");
}

__device__ __forceinline__ void mma_nvfp4(u32 sums, u64 a, u64 b, u32 a_scales, u32 b_scales, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %6, 0;\n"
      "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%0], %1, %2, %3, [%4], [%5], p;\n}"
      ::"r"(sums), "l"(a), "l"(b), "r"(kInstruction), "r"(a_scales), "r"(b_scales), "r"(add ? 1u : 0u)
      : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}"
      ::"r"(barrier), "r"(parity)
      : "memory");
}

extern "C" __global__ void __launch_bounds__(kThreads)
    fp4_linear(const u8* x_codes, const u8* x_scales, const float* x_scale, const u8* w_codes, const u8* w_scales,
               const float* w_scale, bf16* out, int rows, int outputs) {
  __shared__ __align__(128) u8 w_tile[kOutputs * kStepBytes], x_tile[kRows * kStepBytes];
  __shared__ __align__(128) u8 w_block[kScaleBytes], x_block[kScaleBytes];
  __shared__ __align__(8) u64 done;
  __shared__ u32 allotted;
  const Operand x{x_codes, x_scales}, w{w_codes, w_scales};
  const int warp = threadIdx.x / kWarpSize, first_output = blockIdx.x * kOutputs, first_row = blockIdx.y * kRows;
  const u32 barrier = shared_address(&done);
  if (warp == 0) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;"
                 ::"r"(shared_address(&allotted)), "n"(kColumns) : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
  }
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(barrier)
                 : "memory");
  }
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  const u32 sums = allotted, w_words = sums + kRows, x_words = w_words + kScaleColumns;
  overlap_wait();
  for (int step = 0; step < K / kStep; ++step) {
    fetch<kOutputs>(w, first_output, outputs, step, w_tile, w_block);
    fetch<kRows>(x, first_row, rows, step, x_tile, x_block);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
      copy_scales(w_words, descriptor(shared_address(w_block), 0, kMatrixBytes));
      copy_scales(x_words, descriptor(shared_address(x_block), 0, kMatrixBytes));
      mma_nvfp4(sums, descriptor(shared_address(w_tile), kMatrixBytes, 2 * kMatrixBytes),
                descriptor(shared_address(x_tile), kMatrixBytes, 2 * kMatrixBytes), w_words, x_words, step > 0);
      asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
                   : "memory");
    }
    wait(barrier, step & 1);  // the tiles may be overwritten, and the sums read
  }
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  overlap_trigger();
  const float scale = x_scale[0] * w_scale[0];
  const int output = first_output + threadIdx.x;  // the lane of tensor memory
#pragma unroll
  for (int row = 0; row < kRows; row += 8) {
    u32 sum[8];
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8];\n"
                 "tcgen05.wait::ld.sync.aligned;"
                 : "=r"(sum[0]), "=r"(sum[1]), "=r"(sum[2]), "=r"(sum[3]), "=r"(sum[4]), "=r"(sum[5]), "=r"(sum[6]),
                   "=r"(sum[7])
                 : "r"(sums + (static_cast<u32>(warp) * kWarpSize << 16) + row)
                 : "memory");
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = first_row + row + i;
      if (at < rows) out[static_cast<u64>(at) * outputs + output] = to_bf16(__uint_as_float(sum[i]) * scale);
    }
  }
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();
  if (warp == 0) asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(sums), "n"(kColumns));
}

#else
#error "fp4.cu is written for sm_110a and sm_120a: no other architecture of ours has block-scaled FP4 instructions"
#endif
