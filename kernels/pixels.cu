// One camera's raw bytes to normalised patch rows: letterbox (bilinear, half-pixel centres, no antialiasing, padding
// -1), [0, 255] -> [-1, 1], channel order, patches. GRID x GRID patches of PATCH x PATCH pixels; LEADING: row stride of
// `out` in values (the rest of a row is zero).
#include "common.cuh"

constexpr int kSize = GRID * PATCH;
constexpr int kPatchValues = 3 * PATCH * PATCH;
constexpr int kBgr = 1, kMono = 2;

struct Axis {
  int first, second;
  float weight;
  bool inside;
};

// Both source positions of target position `index`, and the weight of the second. The resized extent is the integer
// that double division and truncation give, as in the reference.
__device__ __forceinline__ Axis source_positions(int index, int extent, double ratio) {
  int resized = static_cast<int>(extent / ratio);
  resized = resized < 1 ? 1 : resized;
  const int position = index - (kSize - resized) / 2;
  const float scale = static_cast<float>(extent) / static_cast<float>(resized);
  const float source = fmaxf(__fsub_rn(__fmul_rn(position + 0.5f, scale), 0.5f), 0.0f);
  const int last = extent > 1 ? extent - 1 : 0;
  Axis axis;
  axis.first = min(static_cast<int>(source), last);
  axis.second = min(axis.first + 1, last);
  axis.weight = source - axis.first;
  axis.inside = position >= 0 && position < resized;
  return axis;
}

__device__ __forceinline__ float mix(float a, float b, float weight) { return a + weight * (b - a); }

// pixels uint8[capacity]; format int32[4] = height, width, channels, order; out bf16[GRID * GRID, LEADING].
extern "C" __global__ void __launch_bounds__(256)
    pixels_to_patches(const unsigned char* pixels, const int* format, bf16* out, int capacity) {
  overlap_trigger();
  overlap_wait();
  const int height = format[0], width = format[1], channels = format[2], order = format[3];
  const double ratio = fmax(fmax(static_cast<double>(height) / kSize, static_cast<double>(width) / kSize), 1.0 / kSize);
  const int patch = blockIdx.x;
  bf16* row = out + static_cast<u64>(patch) * LEADING;
  for (int i = threadIdx.x; i < PATCH * PATCH; i += blockDim.x) {
    const Axis y = source_positions((patch / GRID) * PATCH + i / PATCH, height, ratio);
    const Axis x = source_positions((patch % GRID) * PATCH + i % PATCH, width, ratio);
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      int offset = order == kMono ? 0 : (order == kBgr ? 2 - c : c);
      offset = min(offset, channels - 1);
      const auto at = [&](int r, int s) {
        const int index = (r * width + s) * channels + offset;
        return static_cast<float>(pixels[max(0, min(index, capacity - 1))]);
      };
      const float upper = mix(at(y.first, x.first), at(y.first, x.second), x.weight);
      const float lower = mix(at(y.second, x.first), at(y.second, x.second), x.weight);
      const float value = mix(upper, lower, y.weight) * (2.0f / 255.0f) - 1.0f;
      row[c * PATCH * PATCH + i] = to_bf16(y.inside && x.inside ? value : -1.0f);
    }
  }
  for (int i = kPatchValues + threadIdx.x; i < LEADING; i += blockDim.x) row[i] = 0;
}
