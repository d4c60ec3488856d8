// What all variants with AVX-512 do with 16 numbers.

#pragma once

#include <immintrin.h>

#include <cstdint>

#include "packed_weight.h"

namespace outrider {
namespace {

struct Avx512Vectors {
  using Vector = Avx512Vectors;
  using Sum = __m512;
  using Cells = __m512i;
  using Lanes = __m512i;

  static constexpr int kScoreRows = 12, kScoreVectors = 2, kValueRows = 6, kValueVectors = 4;
  static constexpr int64_t kWidth = 16, kTransposed = 16;

  static Sum zero() { return _mm512_setzero_ps(); }
  static Sum read(const float* values) { return _mm512_load_ps(values); }
  static void store(float* values, Sum sum) { _mm512_store_ps(values, sum); }
  static Sum widened(const uint16_t* values) {
    const __m256i given = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(given), 16));
  }
  static Sum spread_float(float value) { return _mm512_set1_ps(value); }
  static Sum plus(Sum one, Sum other) { return _mm512_add_ps(one, other); }
  static Sum minus(Sum one, Sum other) { return _mm512_sub_ps(one, other); }
  static Sum times(Sum one, Sum other) { return _mm512_mul_ps(one, other); }
  static Sum over(Sum one, Sum other) { return _mm512_div_ps(one, other); }
  static Sum fused(Sum one, Sum other, Sum added) { return _mm512_fmadd_ps(one, other, added); }
  static Sum larger(Sum one, Sum other) { return _mm512_max_ps(one, other); }
  static float largest(Sum values) { return _mm512_reduce_max_ps(values); }
  static Sum magnitude(Sum values) { return _mm512_abs_ps(values); }
  static Sum with_sign(Sum values, Sum of) { return _mm512_or_ps(values, _mm512_and_ps(of, _mm512_set1_ps(-0.0f))); }
  // values times 2 to the power of the last bits of `powers`.
  static Sum raised(Sum values, Sum powers) {
    const __m512i shifted = _mm512_slli_epi32(_mm512_castps_si512(powers), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(values), shifted));
  }
  static Sum zero_where_less(Sum values, Sum x, float least) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(least), _CMP_NLT_UQ), values);
  }
  // The values of lanes [first, last).
  static Sum within(Sum values, int64_t first, int64_t last, float otherwise) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 after = _mm512_cmp_epi32_mask(lanes, _mm512_set1_epi32(static_cast<int>(first)), _MM_CMPINT_NLT);
    const __mmask16 both =
        _mm512_mask_cmp_epi32_mask(after, lanes, _mm512_set1_epi32(static_cast<int>(last)), _MM_CMPINT_LT);
    return _mm512_mask_mov_ps(_mm512_set1_ps(otherwise), both, values);
  }
  static Cells cells(const uint32_t* weights) { return _mm512_loadu_si512(weights); }
  static void store_cells(uint32_t* memory, Cells cells) { _mm512_store_si512(memory, cells); }
  // Calls `each` with the number and the cells of each pair of a compressed segment.
  template <class Each>
  static void expand(const uint8_t* segment, const uint8_t* upper_bytes, const Each& each) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(upper_bytes)));
    const __m512i low_half = _mm512_set1_epi8(0x0f);
    const auto two_pairs = [&](int64_t pair, __m512i codes) {
      const __m512i lower = _mm512_loadu_si512(segment + pair / 2 * kTwoPairs);
      const __m512i upper = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, low_half));
      each(pair, _mm512_unpacklo_epi8(lower, upper));
      each(pair + 1, _mm512_unpackhi_epi8(lower, upper));
    };
    for (int64_t pair = 0; pair < kSegmentPairs; pair += 4) {
      const __m512i codes = _mm512_loadu_si512(segment + kCodesAt + pair / 4 * kTwoPairs);
      two_pairs(pair, codes);
      two_pairs(pair + 2, _mm512_srli_epi16(codes, 4));
    }
  }
  static void store_lanes(uint32_t* memory, Lanes lanes) { _mm512_store_si512(memory, lanes); }
  // Calls `each` with the number of each of eight cells, and with that cell of sixteen rows.
  template <class Each>
  static void transpose(const uint32_t* from, int64_t step, const Each& each) {
    // Row r, and beside it row r + 8.
    __m512 rows[8], pairs[8], quads[8];
    for (int r = 0; r < 8; ++r) {
      const auto row = [&](int64_t number) {
        return _mm256_loadu_ps(reinterpret_cast<const float*>(from + number * step));
      };
      rows[r] = _mm512_insertf32x8(_mm512_castps256_ps512(row(r)), row(r + 8), 1);
    }
    for (int r = 0; r < 8; r += 2) {
      pairs[r] = _mm512_unpacklo_ps(rows[r], rows[r + 1]);
      pairs[r + 1] = _mm512_unpackhi_ps(rows[r], rows[r + 1]);
    }
    for (int r = 0; r < 8; r += 4)
      for (int half = 0; half < 2; ++half) {
        quads[r + 2 * half] = _mm512_shuffle_ps(pairs[r + half], pairs[r + half + 2], 0x44);
        quads[r + 2 * half + 1] = _mm512_shuffle_ps(pairs[r + half], pairs[r + half + 2], 0xee);
      }
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(4));
    for (int r = 0; r < 4; ++r) {
      each(r, _mm512_castps_si512(_mm512_permutex2var_ps(quads[r], low, quads[r + 4])));
      each(r + 4, _mm512_castps_si512(_mm512_permutex2var_ps(quads[r], high, quads[r + 4])));
    }
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
