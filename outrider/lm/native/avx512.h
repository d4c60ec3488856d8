// What both variants with AVX-512 do with 16 sums.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace outrider {
namespace {

// Rounds to the nearest bfloat16, ties to even; what is no number stays none.
inline void round_512(uint16_t* columns, __m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_none = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512i chosen = _mm512_mask_or_epi32(nearest, is_none, bits, _mm512_set1_epi32(0x400000));
  const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(columns), halves);
}

inline __m512 plus_512(__m512 sum, const uint16_t* columns) {
  const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(columns));
  return _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16)));
}

}  // namespace
}  // namespace outrider
