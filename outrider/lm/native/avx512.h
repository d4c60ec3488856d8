// What both variants with AVX-512 do with 16 sums.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace outrider {
namespace {

struct Avx512Sums {
  using Sum = __m512;

  static Sum zero() { return _mm512_setzero_ps(); }
  static Sum read(const float* values) { return _mm512_load_ps(values); }
  static void store(float* values, Sum sum) { _mm512_store_ps(values, sum); }
  static Sum plus(Sum sum, const uint16_t* columns) {
    const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(columns));
    return _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16)));
  }
  // Rounds to the nearest bfloat16, ties to even; what is no number stays none.
  static void round(uint16_t* columns, Sum sum) {
    const __m512i bits = _mm512_castps_si512(sum);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 is_none = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q);
    const __m512i chosen = _mm512_mask_or_epi32(nearest, is_none, bits, _mm512_set1_epi32(0x400000));
    const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(columns), halves);
  }
};

}  // namespace
}  // namespace outrider
