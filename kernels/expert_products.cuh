// Products of the expert's few rows with streamed weights, and the adaptive norm in front of them.
#pragma once
#include "expert_plan.cuh"

// A slice of the activation rows as A operands: [row tile][group of 32 columns][low, high row half].
struct Slice {
  uint4 part[M][kGroups][2];
};

__device__ __forceinline__ void load_slice(const Consumer& c, Slice& a, const bf16* rows, int stride, int column) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bf16* from = rows + c.real_row(m, half) * stride + column + c.warp * kSlice + c.quad * 8;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) a.part[m][g][half] = load_shared_by_grid(from + g * 32);
    }
}

struct Sums {
  float part[kSums][M][4];
};

__device__ __forceinline__ void clear(Sums& s) {
#pragma unroll
  for (int i = 0; i < kSums; ++i)
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int j = 0; j < 4; ++j) s.part[i][m][j] = 0.0f;
}

// This warp's part of one stage, as B operands.
__device__ __forceinline__ void load_weights(const Consumer& c, int ahead, uint4 (&b)[kGroups]) {
  const unsigned char* from = c.ring.stage(ahead) + c.warp * kGroups * 512 + c.lane * 16;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) b[g] = load16(from + g * 512);
}

__device__ __forceinline__ void multiply(Sums& s, const Slice& a, const uint4 (&b)[kGroups]) {
#pragma unroll
  for (int g = 0; g < kGroups; ++g)
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const uint4 &low = a.part[m][g][0], &high = a.part[m][g][1];
      float (&d)[4] = s.part[g % kSums][m];
      mma_16x8x16(d, low.x, high.x, low.y, high.y, b[g].x, b[g].y);
      mma_16x8x16(d, low.z, high.z, low.w, high.w, b[g].z, b[g].w);
    }
}

// Hands this warp's partial sums of output tile `slot` to the block.
__device__ __forceinline__ void publish(Consumer& c, const Sums& s, int slot) {
  float* to = c.partials() + (c.warp * kBatch + slot) * kPartial + c.row * kTile + c.quad * 2;
#pragma unroll
  for (int m = 0; m < M; ++m) {
    float d[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      d[j] = s.part[0][m][j];
#pragma unroll
      for (int i = 1; i < kSums; ++i) d[j] += s.part[i][m][j];
    }
    *reinterpret_cast<float2*>(to + m * 16 * kTile) = make_float2(d[0], d[1]);
    if (m * 16 + 8 + c.row < kPassRows) *reinterpret_cast<float2*>(to + (m * 16 + 8) * kTile) = make_float2(d[2], d[3]);
  }
}

// Multiplies one slice with the stage `ahead` and hands the sums to the block as output tile `slot`.
__device__ __forceinline__ void multiply_tile(Consumer& c, const Slice& a, int ahead, int slot) {
  uint4 b[kGroups];
  load_weights(c, ahead, b);
  Sums s;
  clear(s);
  multiply(s, a, b);
  publish(c, s, slot);
}

// Two neighbouring outputs of tile `slot`, summed over the warps.
__device__ __forceinline__ float2 collect(Consumer& c, int slot, int row, int column) {
  const float* from = c.partials() + slot * kPartial + row * kTile + column;
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float2 part = *reinterpret_cast<const float2*>(from + w * kBatch * kPartial);
    sum.x += part.x;
    sum.y += part.y;
  }
  return sum;
}

// -- adaptive norm -------------------------------------------------------------------------------------------------------

// Starts to copy scale and shift of one norm to shared memory.
__device__ __forceinline__ void fetch_modulation(Consumer& c, const float* table) {
  constexpr int kPieces = 2 * kWidth / 4;
  const u32 to = shared_address(c.shared.modulation);
  for (int i = c.thread; i < kPieces; i += kConsumers) copy_async16(to + i * 16, table + i * 4, true);
}

// Squares of every row, summed over the block; each thread gets those of its two rows of each row tile as 1 / rms.
__device__ __forceinline__ void inverse_rms(Consumer& c, const Slice& a, float (&inverse)[M][2]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float squares = 0.0f;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) squares += sum_of_squares8(a.part[m][g][half]);
      squares = warp_sum<4>(squares);
      if (c.quad == 0) c.shared.squares[m * 16 + half * 8 + c.row][c.warp] = squares;
    }
  copy_async_wait();  // the modulation
  c.block_barrier();
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; w += 4) {
        const float4 v = *reinterpret_cast<const float4*>(c.shared.squares[m * 16 + half * 8 + c.row] + w);
        total += (v.x + v.y) + (v.z + v.w);
      }
      inverse[m][half] = rsqrtf(total / kWidth + kEps);
    }
}

// Keeps the compiler from holding on to what it has unpacked from `v` before: it would need too many registers.
__device__ __forceinline__ void forget(uint4& v) { asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)); }

__device__ __forceinline__ void load_floats8(const float* from, float (&to)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const float4 v = *reinterpret_cast<const float4*>(from + i);
    to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
  }
}

// Loads this warp's slice of the residual rows and normalises it; a barrier of the block is inside.
__device__ __forceinline__ void load_normalised(Consumer& c, Slice& a) {
  load_slice(c, a, c.plan.x, kWidth, 0);
  float inverse[M][2];
  inverse_rms(c, a, inverse);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const float* from = c.shared.modulation + c.warp * kSlice + g * 32 + c.quad * 8;
    float scale[8], shift[8];
    load_floats8(from, scale);
    load_floats8(from + kWidth, shift);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float f[8];
        forget(a.part[m][g][half]);
        unpack8(a.part[m][g][half], f);
#pragma unroll
        for (int i = 0; i < 8; ++i) f[i] = fmaf(f[i] * inverse[m][half], 1.0f + scale[i], shift[i]);
        a.part[m][g][half] = pack8(f);
      }
  }
}

// Multiplies the normalised rows with `stages` stages, an output tile each. `store(first, count)` stores the `count`
// results that start with stage `first` of this block, for the rows of the running pass.
// MOST: stages that any block can have.
template <int MOST, typename Store>
__device__ __forceinline__ void multiply_normalised(Consumer& c, const float* table, int stages, const Store& store) {
  fetch_modulation(c, table);
  Slice a;
  for (int held = 0; held == 0 || (MOST > kHeld && held < stages); held += kHeld) {
    const int here = min(stages - held, kHeld);
    if (held == 0) {
      c.begin(max(here, 0));
    } else {
      c.exchange(kHeld, here);
    }
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      c.first_row = pass * kPassRows;
      if (kPasses > 1 || held == 0) load_normalised(c, a);
#pragma unroll 1
      for (int done = 0; done < here; done += kBatch) {
        if (done > 0) c.block_barrier();  // the partial sums before have been collected
        const int count = min(here - done, kBatch);
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          if (i < count) multiply_tile(c, a, done + i, i);
        c.block_barrier();
        store(held + done, count);
      }
    }
  }
  c.first_row = 0;
  c.end(stages <= 0 ? 0 : (stages - 1) % kHeld + 1);
}
