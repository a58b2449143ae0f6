// What stands between the large products of the prefix encoder. The RMS norm in front of a product is a factor for each
// row, so it is applied to the product's result: `x` is the residual stream that the product consumed unnormalised
// (null: it was normalised already, the factor is 1). WIDTH: width of the residual; a weight of the norm is folded into
// the product's matrix.
#include "common.cuh"

constexpr int kThreads = 256;
static_assert(WIDTH == 8 * kThreads, "each thread reads one 16-byte group of a residual row");

// 1 / rms of one residual row, to every thread of the block.
__device__ __forceinline__ float inverse_rms(const bf16* row, float eps, float* scratch) {
  if (row == nullptr) return 1.0f;
  const float squares = sum_of_squares8(load16(row + threadIdx.x * 8));
  return rsqrtf(block_sum<kThreads>(squares, scratch) / WIDTH + eps);
}

// scale[row] = 1 / rms of the residual's row, float32. The next kernel may begin as soon as all blocks run, so it must
// wait for this one before it reads `scale`. One warp a row.
constexpr int kRmsRows = kThreads / kWarpSize;

extern "C" __global__ void __launch_bounds__(kThreads)
    inverse_rms_rows(const bf16* x, float* scale, int rows, float eps) {
  overlap_wait();
  overlap_trigger();  // behind the wait: the next kernel may read what the one in front of this one wrote
  const int row = blockIdx.x * kRmsRows + threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  if (row >= rows) return;
  uint4 groups[WIDTH / (8 * kWarpSize)];
#pragma unroll
  for (int i = 0; i < WIDTH / (8 * kWarpSize); ++i)
    groups[i] = load16(x + static_cast<u64>(row) * WIDTH + (i * kWarpSize + lane) * 8);
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < WIDTH / (8 * kWarpSize); ++i) squares += sum_of_squares8(groups[i]);
  squares = warp_sum(squares);
  if (lane == 0) scale[row] = rsqrtf(squares / WIDTH + eps);
}

#ifdef HEADS
// qkv bf16[rows, (HEADS + 2) * HEAD_DIM] = x @ W; rope bf16[rows, HEAD_DIM] = cosines, sines. Normalises, rotates query
// and key; query and its place in qkv may be the same memory. With WITH_QUERY 0, qkv holds key and value alone.
// query bf16[rows, query_stride]; key, value bf16[rows, HEAD_DIM].
static_assert(HEADS == 8 && HEAD_DIM == 256, "one warp a query head, four pairs a lane");

extern "C" __global__ void __launch_bounds__(kThreads)
    split_rope_write(const bf16* x, const bf16* qkv, const bf16* rope, bf16* query, bf16* key, bf16* value,
                     int query_stride, float eps) {
  __shared__ float scratch[kThreads / kWarpSize];
  constexpr int kHalf = HEAD_DIM / 2;
  constexpr int kQueries = WITH_QUERY ? HEADS : 0;
  const int row = blockIdx.x, thread = threadIdx.x, lane = thread % kWarpSize, warp = thread / kWarpSize;
  overlap_trigger();
  const uint2 cosine = *reinterpret_cast<const uint2*>(rope + row * HEAD_DIM + lane * 4);
  const uint2 sine = *reinterpret_cast<const uint2*>(rope + row * HEAD_DIM + kHalf + lane * 4);
  overlap_wait();
  const bf16* source = qkv + static_cast<u64>(row) * (kQueries + 2) * HEAD_DIM;
  const float inverse = inverse_rms(x == nullptr ? x : x + static_cast<u64>(row) * WIDTH, eps, scratch);
  const auto rotate = [&](const bf16* from, bf16* to) {
    const uint2 a = *reinterpret_cast<const uint2*>(from + lane * 4);
    const uint2 b = *reinterpret_cast<const uint2*>(from + kHalf + lane * 4);
    const float first[4] = {low_float(a.x), high_float(a.x), low_float(a.y), high_float(a.y)};
    const float second[4] = {low_float(b.x), high_float(b.x), low_float(b.y), high_float(b.y)};
    const float c[4] = {low_float(cosine.x), high_float(cosine.x), low_float(cosine.y), high_float(cosine.y)};
    const float s[4] = {low_float(sine.x), high_float(sine.x), low_float(sine.y), high_float(sine.y)};
    float u[4], v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u[i] = inverse * (first[i] * c[i] - second[i] * s[i]);
      v[i] = inverse * (second[i] * c[i] + first[i] * s[i]);
    }
    *reinterpret_cast<uint2*>(to + lane * 4) = make_uint2(pack_bf16(u[0], u[1]), pack_bf16(u[2], u[3]));
    *reinterpret_cast<uint2*>(to + kHalf + lane * 4) = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
  };
  if (WITH_QUERY) rotate(source + warp * HEAD_DIM, query + static_cast<u64>(row) * query_stride + warp * HEAD_DIM);
  if (warp == 0) rotate(source + kQueries * HEAD_DIM, key + static_cast<u64>(row) * HEAD_DIM);
  if (warp == 1) {
    float v[8];
    unpack8(load16(source + (kQueries + 1) * HEAD_DIM + lane * 8), v);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] *= inverse;
    store16(value + static_cast<u64>(row) * HEAD_DIM + lane * 8, pack8(v));
  }
}
#endif

#ifdef HIDDEN
// out = gelu_tanh(gate / rms(x)) * (up / rms(x)); gate_up bf16[rows, 2 * HIDDEN] = x @ W, gate first; out bf16[rows,
// HIDDEN]. Grid (rows, HIDDEN / kSlice).
constexpr int kSlice = kThreads * 8 * 2;
static_assert(HIDDEN % kSlice == 0, "a block writes whole slices");

extern "C" __global__ void __launch_bounds__(kThreads) geglu(const bf16* x, const bf16* gate_up, bf16* out, float eps) {
  __shared__ float scratch[kThreads / kWarpSize];
  overlap_trigger();
  overlap_wait();
  const u64 row = blockIdx.x;
  const bf16* gate = gate_up + row * 2 * HIDDEN + blockIdx.y * kSlice + threadIdx.x * 8;
  uint4 g[2], u[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    g[i] = load16(gate + i * kThreads * 8);
    u[i] = load16(gate + HIDDEN + i * kThreads * 8);
  }
  const float inverse = inverse_rms(x == nullptr ? x : x + row * WIDTH, eps, scratch);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float a[8], b[8];
    unpack8(g[i], a);
    unpack8(u[i], b);
#pragma unroll
    for (int j = 0; j < 8; ++j) a[j] = gelu_tanh(a[j] * inverse) * (b[j] * inverse);
    store16(out + row * HIDDEN + blockIdx.y * kSlice + (i * kThreads + threadIdx.x) * 8, pack8(a));
  }
}
#endif
