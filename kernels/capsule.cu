// Capsules: every live segment of an arena to a packed block, or back, in one launch.
//
// Segment s of the table is {source, pitch, blocks, live, packed} in bytes: `blocks` pieces of `live` bytes lie `pitch`
// bytes apart in the arena from `source` on, and one behind the other in the packed block from `packed` on.
// blockIdx.y chooses the segment. Reference: copy_with_torch in flashrt_ros/engine/copier.py.

#include "common.cuh"

struct Segment {
    long long source, pitch, blocks, live, packed;
};

// Copies `Unit` by `Unit`; all of a segment's offsets and lengths must be multiples of its size.
template <typename Unit>
__device__ void copy_segment(unsigned char* arena, unsigned char* packed, const Segment& segment, bool gather) {
    const long long per_block = segment.live / sizeof(Unit);
    const long long total = per_block * segment.blocks;
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long unit = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; unit < total; unit += step) {
        const long long block = unit / per_block;
        const long long within = unit - block * per_block;
        Unit* inside = reinterpret_cast<Unit*>(arena + segment.source + block * segment.pitch) + within;
        Unit* outside = reinterpret_cast<Unit*>(packed + segment.packed) + unit;
        if (gather) {
            *outside = *inside;
        } else {
            *inside = *outside;
        }
    }
}

extern "C" __global__ void copy_regions(
    unsigned char* arena, unsigned char* packed, const Segment* table, int gather) {
    const Segment segment = table[blockIdx.y];
    const bool wide = ((segment.source | segment.pitch | segment.live | segment.packed) & 15) == 0;
    if (wide) {
        copy_segment<uint4>(arena, packed, segment, gather != 0);
    } else {
        copy_segment<unsigned char>(arena, packed, segment, gather != 0);
    }
}
