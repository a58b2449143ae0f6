// Capsules: live segments of an arena to a packed block, or back, in one launch.
//
// A segment of the table is made of pieces of `live` bytes, which lie `pitch` bytes apart in the arena from `source` on,
// and one behind the other in the packed block from `packed` on. A piece is `units` of 16 bytes (`wide`) or of one. A thread
// block copies one tile, `piece_tiles` of them a piece; those of the segment begin with block `first_tile`. The table is
// an argument, so that another one costs no copy to the device.
// Reference: copy_with_torch in flashrt_ros/engine/copier.py. Launcher and sizes: flashrt_ros/ops/cuda/capsule.py.

#include "common.cuh"

struct Segment {
  long long source, pitch, live, packed;
  u32 first_tile, piece_tiles, units, wide;
};

struct Table {
  Segment segments[SEGMENTS];
  long long count;
};

static_assert(sizeof(Table) == TABLE_BYTES, "the launcher's table has another layout");

// Tile `tile` of one piece. All loads of a thread come before its first store, so that they are in flight together.
template <typename Unit>
__device__ __forceinline__ void copy_tile(void* target, const void* source, u32 tile, u32 units) {
  const u32 first = tile * BLOCK_THREADS * UNITS + threadIdx.x;
  Unit held[UNITS];
#pragma unroll
  for (int i = 0; i < UNITS; ++i) {
    const u32 unit = first + i * BLOCK_THREADS;
    if (unit < units) held[i] = static_cast<const Unit*>(source)[unit];
  }
#pragma unroll
  for (int i = 0; i < UNITS; ++i) {
    const u32 unit = first + i * BLOCK_THREADS;
    if (unit < units) static_cast<Unit*>(target)[unit] = held[i];
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
    copy_regions(unsigned char* arena, unsigned char* packed, int gather, const __grid_constant__ Table table) {
  int s = 0;
  while (s + 1 < table.count && table.segments[s + 1].first_tile <= blockIdx.x) ++s;
  const Segment& segment = table.segments[s];
  const u32 tile = blockIdx.x - segment.first_tile;
  const u32 piece = tile / segment.piece_tiles;
  unsigned char* inside = arena + segment.source + piece * segment.pitch;
  unsigned char* outside = packed + segment.packed + piece * segment.live;
  unsigned char* target = gather ? outside : inside;
  const unsigned char* source = gather ? inside : outside;
  const u32 within = tile - piece * segment.piece_tiles;
  if (segment.wide) {
    copy_tile<uint4>(target, source, within, segment.units);
  } else {
    copy_tile<unsigned char>(target, source, within, segment.units);
  }
}
