// The warpgroup matrix product of Hopper (sm_90a): 128 threads multiply 64 rows of A by TILE_ROWS rows of B, both in
// shared memory, into registers. TILE_ROWS: a multiple of 8, at most 256. FP8: operands are E4M3 instead of bfloat16.
#pragma once
#include "common.cuh"

#ifndef FP8
#define FP8 0
#endif

// A tile in shared memory whose rows are 128 bytes, swizzled by the copy engine in atoms of 8 rows, is described by 64
// bits. The low word is the start address in units of 16 bytes; a tile starts at a multiple of 1024 bytes. The high word
// says: 1024 bytes from atom to atom (in the same units), swizzle over 128 bytes (1 in the topmost two bits).
constexpr u32 kTileHigh = 0x40000040u;
// The same for rows of 64 bytes, swizzled over 64 (2 in the topmost two bits): 512 bytes from atom to atom.
constexpr u32 kHalfTileHigh = 0x80000020u;
// A start has 14 bits. In a cluster an address also says, above these, which block is meant: that must not reach the
// fields behind them.
__device__ __forceinline__ u32 tile_start(u32 shared) { return (shared & 0x3ffff) >> 4; }
__device__ __forceinline__ u64 joined(u32 low, u32 high) { return static_cast<u64>(high) << 32 | low; }

// Further along a row by `bytes` of it, a multiple of 32, or on to another tile: addresses are swizzled after the sum.
__device__ __forceinline__ u32 further(u32 start, u32 bytes) { return start + (bytes >> 4); }

// Before the first product on registers that other instructions have touched.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING committed groups are under way.
template <int PENDING>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Inline assembly takes no lists, so they are written out: names and operands of the accumulators for n rows of B.
#define WG_NAMES_8 "%3,%4,%5,%6"
#define WG_NAMES_16 WG_NAMES_8 ",%7,%8,%9,%10"
#define WG_NAMES_24 WG_NAMES_16 ",%11,%12,%13,%14"
#define WG_NAMES_32 WG_NAMES_24 ",%15,%16,%17,%18"
#define WG_NAMES_40 WG_NAMES_32 ",%19,%20,%21,%22"
#define WG_NAMES_48 WG_NAMES_40 ",%23,%24,%25,%26"
#define WG_NAMES_56 WG_NAMES_48 ",%27,%28,%29,%30"
#define WG_NAMES_64 WG_NAMES_56 ",%31,%32,%33,%34"
#define WG_NAMES_72 WG_NAMES_64 ",%35,%36,%37,%38"
#define WG_NAMES_80 WG_NAMES_72 ",%39,%40,%41,%42"
#define WG_NAMES_88 WG_NAMES_80 ",%43,%44,%45,%46"
#define WG_NAMES_96 WG_NAMES_88 ",%47,%48,%49,%50"
#define WG_NAMES_104 WG_NAMES_96 ",%51,%52,%53,%54"
#define WG_NAMES_112 WG_NAMES_104 ",%55,%56,%57,%58"
#define WG_NAMES_120 WG_NAMES_112 ",%59,%60,%61,%62"
#define WG_NAMES_128 WG_NAMES_120 ",%63,%64,%65,%66"
#define WG_NAMES_136 WG_NAMES_128 ",%67,%68,%69,%70"
#define WG_NAMES_144 WG_NAMES_136 ",%71,%72,%73,%74"
#define WG_NAMES_152 WG_NAMES_144 ",%75,%76,%77,%78"
#define WG_NAMES_160 WG_NAMES_152 ",%79,%80,%81,%82"
#define WG_NAMES_168 WG_NAMES_160 ",%83,%84,%85,%86"
#define WG_NAMES_176 WG_NAMES_168 ",%87,%88,%89,%90"
#define WG_NAMES_184 WG_NAMES_176 ",%91,%92,%93,%94"
#define WG_NAMES_192 WG_NAMES_184 ",%95,%96,%97,%98"
#define WG_NAMES_200 WG_NAMES_192 ",%99,%100,%101,%102"
#define WG_NAMES_208 WG_NAMES_200 ",%103,%104,%105,%106"
#define WG_NAMES_216 WG_NAMES_208 ",%107,%108,%109,%110"
#define WG_NAMES_224 WG_NAMES_216 ",%111,%112,%113,%114"
#define WG_NAMES_232 WG_NAMES_224 ",%115,%116,%117,%118"
#define WG_NAMES_240 WG_NAMES_232 ",%119,%120,%121,%122"
#define WG_NAMES_248 WG_NAMES_240 ",%123,%124,%125,%126"
#define WG_NAMES_256 WG_NAMES_248 ",%127,%128,%129,%130"
#define WG_SUMS_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define WG_SUMS_16 WG_SUMS_8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define WG_SUMS_24 WG_SUMS_16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define WG_SUMS_32 WG_SUMS_24, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define WG_SUMS_40 WG_SUMS_32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define WG_SUMS_48 WG_SUMS_40, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define WG_SUMS_56 WG_SUMS_48, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define WG_SUMS_64 WG_SUMS_56, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define WG_SUMS_72 WG_SUMS_64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define WG_SUMS_80 WG_SUMS_72, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define WG_SUMS_88 WG_SUMS_80, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define WG_SUMS_96 WG_SUMS_88, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define WG_SUMS_104 WG_SUMS_96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define WG_SUMS_112 WG_SUMS_104, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define WG_SUMS_120 WG_SUMS_112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define WG_SUMS_128 WG_SUMS_120, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define WG_SUMS_136 WG_SUMS_128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define WG_SUMS_144 WG_SUMS_136, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define WG_SUMS_152 WG_SUMS_144, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define WG_SUMS_160 WG_SUMS_152, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define WG_SUMS_168 WG_SUMS_160, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define WG_SUMS_176 WG_SUMS_168, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define WG_SUMS_184 WG_SUMS_176, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define WG_SUMS_192 WG_SUMS_184, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define WG_SUMS_200 WG_SUMS_192, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define WG_SUMS_208 WG_SUMS_200, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define WG_SUMS_216 WG_SUMS_208, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define WG_SUMS_224 WG_SUMS_216, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define WG_SUMS_232 WG_SUMS_224, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define WG_SUMS_240 WG_SUMS_232, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define WG_SUMS_248 WG_SUMS_240, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define WG_SUMS_256 WG_SUMS_248, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
#define WG_JOIN(a, b) a##b
#define WG_OF(list, n) WG_JOIN(list, n)
#define WG_TEXT(x) #x
#define WG_STRING(x) WG_TEXT(x)

#if FP8
#define WG_SHAPE "k32.f32.e4m3.e4m3 "
#define WG_MAJOR ""
#define WG_WIDE_MAJOR ""
#else
#define WG_SHAPE "k16.f32.bf16.bf16 "
#define WG_MAJOR ", 0, 0"    // neither operand is transposed
#define WG_WIDE_MAJOR ", 1"  // B is
#endif

// Starts d = a * b^T + (accumulate ? d : 0) for 32 bytes of each row; a and b are starts of tiles. d[4 * g + i]: row
// lane / 4 + 8 * (i / 2) of the warp's 16 rows of A, row 8 * g + 2 * (lane % 4) + i % 2 of B. A_HIGH: the high word for
// A, if that is no tile as described above. The descriptors stand in front, as outputs, only because the numbers of
// operands behind a list would depend on its length.
template <u32 A_HIGH = kTileHigh>
__device__ __forceinline__ void multiply(float (&d)[TILE_ROWS / 2], u32 a, u32 b, u32 accumulate) {
  u64 of_a = joined(a, A_HIGH), of_b = joined(b, kTileHigh);
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n" WG_STRING(TILE_ROWS) WG_SHAPE
      "{" WG_OF(WG_NAMES_, TILE_ROWS) "}, %0, %1, p, 1, 1" WG_MAJOR ";\n}"
      : "+l"(of_a), "+l"(of_b), "+r"(accumulate), WG_OF(WG_SUMS_, TILE_ROWS)::"memory");
}

// Waits for all products; the sums may be read behind it.
__device__ __forceinline__ void products_finish(float (&d)[TILE_ROWS / 2]) {
  u32 unused = 0;
  products_wait<0>();
  asm volatile("" : "+r"(unused), WG_OF(WG_SUMS_, TILE_ROWS)::"memory");
}

// -- A from registers -------------------------------------------------------------------------------------------------

// A tile of B whose rows are the inner dimension: columns in blocks of 64, a block's rows 128 bytes each and swizzled
// like those above. Its start also says, in bits 16 to 29, how many bytes lie between two blocks; the high word's 1024
// bytes then lie between groups of 8 rows. This is the canonical layout "MN-major, swizzle 128 B" of the PTX ISA, in
// CUTLASS's words ((8,n),(8,k)):((1,LBO),(8,SBO)) in units of 16 bytes (make_gmma_desc, mma_traits_sm90_gmma.hpp).
__device__ __forceinline__ u32 wide_start(u32 shared, u32 block_bytes) {
  return tile_start(shared) | block_bytes >> 4 << 16;
}

// Starts d += a * b for 16 rows of a tile of B with 256 columns; with FP8 for 32 bytes of each of 256 rows of a tile of
// B, d += a * b^T. a: two bfloat16 a word, rows lane / 4, then 8 further, of inner columns 2 * (lane % 4) + {0, 1}, then
// the same 8 columns further; with FP8 four codes a word, of 4 * (lane % 4) + {0, 1, 2, 3}, then 16 further. d as in
// `multiply`; three operands stand in front of it because the lists count from there. The words of `a` must be inputs
// only: as outputs they would need registers of their own, and the compiler, short of them, would let one product wait
// for the other. B_HIGH: the high word for B.
template <u32 B_HIGH = kTileHigh>
__device__ __forceinline__ void multiply_wide(float (&d)[128], u32 a0, u32 a1, u32 a2, u32 a3, u32 b) {
  u64 of_b = joined(b, B_HIGH);
  u32 accumulate = 1, unused = 0;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256" WG_SHAPE "{" WG_NAMES_256
      "}, {%131, %132, %133, %134}, %0, p, 1, 1" WG_WIDE_MAJOR ";\n}"
      : "+l"(of_b), "+r"(accumulate), "+r"(unused), WG_SUMS_256
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3)
      : "memory");
}

// Behind the wait for all products: the sums may be read, and the words that were A be overwritten.
template <int WORDS>
__device__ __forceinline__ void wide_finish(float (&d)[128], u32 (&a)[WORDS]) {
  u32 unused = 0;
  products_wait<0>();
  asm volatile("" : "+r"(unused), WG_SUMS_256::"memory");
#pragma unroll
  for (int i = 0; i < WORDS; ++i) asm volatile("" : "+r"(a[i])::"memory");
}
