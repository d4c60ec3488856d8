// Instructions that few CPUs have, in terms of those that more have: `make emulate` builds the native operators with this
// file included before each source, so that all variants run, slowly, on any CPU with AVX2. bfloat16 instructions and AMX
// are in terms of AVX-512, and that in terms of AVX2, where the CPU lacks it (`emulating_compiler`), by SIMDe.
//
// Their definitions are those of Intel's manual: VDPBF16PS adds the odd one of a pair of products first, TDPBF16PS adds up
// the even and the odd ones of a tile for themselves. Numbers below the normal ones count as zero, by the mode in which the
// operators run.

#pragma once

#include <cpuid.h>
#ifdef EMULATES_AVX512
#include "emulated_avx512.h"
#else
#include <immintrin.h>
#endif
#include <unistd.h>

#include <bit>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(EMULATES_AVX512)
#define EMULATES_TILES
#endif

namespace emulated {

#ifdef EMULATES_TILES

inline __m512 even_ones(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 odd_ones(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

inline __m512 dpbf16_ps(__m512 sums, __m512i one, __m512i other) {
  return _mm512_fmadd_ps(even_ones(one), even_ones(other), _mm512_fmadd_ps(odd_ones(one), odd_ones(other), sums));
}

inline __m256i rounded(__m512 numbers) {
  const __m512i bits = _mm512_castps_si512(_mm512_add_ps(numbers, _mm512_setzero_ps()));  // subnormal ones are zero
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_none = _mm512_cmp_ps_mask(numbers, numbers, _CMP_UNORD_Q);
  const __m512i chosen = _mm512_mask_or_epi32(nearest, is_none, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16));
}

inline __m512i cvtne2ps_pbh(__m512 high, __m512 low) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(rounded(low)), rounded(high), 1);
}

struct Tile {
  uint8_t bytes[16][64];
  int num_rows, row_bytes;
};

inline thread_local Tile tiles[8];

inline void zero(int tile) { std::memset(tiles[tile].bytes, 0, sizeof(tiles[tile].bytes)); }

inline void load_shapes(const void* shapes) {
  const auto* bytes = static_cast<const uint8_t*>(shapes);
  for (int tile = 0; tile < 8; ++tile) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * tile, sizeof(row_bytes));
    tiles[tile].row_bytes = row_bytes;
    tiles[tile].num_rows = bytes[48 + tile];
    zero(tile);
  }
}

inline void load(int tile, const void* from, int64_t step) {
  zero(tile);
  for (int row = 0; row < tiles[tile].num_rows; ++row) {
    std::memcpy(tiles[tile].bytes[row], static_cast<const char*>(from) + row * step, tiles[tile].row_bytes);
  }
}

inline void store(int tile, void* to, int64_t step) {
  for (int row = 0; row < tiles[tile].num_rows; ++row) {
    std::memcpy(static_cast<char*>(to) + row * step, tiles[tile].bytes[row], tiles[tile].row_bytes);
  }
}

inline void dpbf16ps(int sums, int one, int other) {
  for (int row = 0; row < tiles[sums].num_rows; ++row) {
    __m512 even = _mm512_setzero_ps(), odd = even;
    for (int pair = 0; pair < tiles[one].row_bytes / 4; ++pair) {
      int inputs;
      std::memcpy(&inputs, tiles[one].bytes[row] + 4 * pair, sizeof(inputs));
      const __m512i spread = _mm512_set1_epi32(inputs), given = _mm512_loadu_si512(tiles[other].bytes[pair]);
      even = _mm512_fmadd_ps(even_ones(spread), even_ones(given), even);
      odd = _mm512_fmadd_ps(odd_ones(spread), odd_ones(given), odd);
    }
    auto* own = reinterpret_cast<float*>(tiles[sums].bytes[row]);
    _mm512_storeu_ps(own, _mm512_add_ps(_mm512_loadu_ps(own), _mm512_add_ps(even, odd)));
  }
}

#endif

inline bool has_all_of_leaf_7(unsigned int* features) { return *features = ~0u, true; }

}  // namespace emulated

#ifdef EMULATES_TILES
#undef _tile_dpbf16ps
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#define _mm512_dpbf16_ps(sums, one, other) \
  emulated::dpbf16_ps(sums, reinterpret_cast<__m512i>(one), reinterpret_cast<__m512i>(other))
#define _mm512_cvtne2ps_pbh emulated::cvtne2ps_pbh
#define _tile_loadconfig emulated::load_shapes
#define _tile_release() static_cast<void>(0)
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::dpbf16ps
#endif

// What the operators find out about the CPU, and that the system lets them use tiles.
#define __builtin_cpu_supports(name) (std::strncmp(name, "avx512", 6) == 0 || __builtin_cpu_supports(name))
#define __get_cpuid_count(leaf, part, eax, ebx, ecx, edx) emulated::has_all_of_leaf_7(edx)
#define syscall(...) 0L
