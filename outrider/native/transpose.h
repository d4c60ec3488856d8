// A transposition of 8 by 8 cells of 32 bits, by AVX2.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace outrider {
namespace {

inline void transpose8(const uint32_t* from, int64_t from_step, uint32_t* to, int64_t to_step) {
  __m256 rows[8], pairs[8], quads[8];
  for (int r = 0; r < 8; ++r) rows[r] = _mm256_loadu_ps(reinterpret_cast<const float*>(from + r * from_step));
  for (int r = 0; r < 8; r += 2) {
    pairs[r] = _mm256_unpacklo_ps(rows[r], rows[r + 1]);
    pairs[r + 1] = _mm256_unpackhi_ps(rows[r], rows[r + 1]);
  }
  for (int r = 0; r < 8; r += 4)
    for (int half = 0; half < 2; ++half) {
      quads[r + 2 * half] = _mm256_shuffle_ps(pairs[r + half], pairs[r + half + 2], 0x44);
      quads[r + 2 * half + 1] = _mm256_shuffle_ps(pairs[r + half], pairs[r + half + 2], 0xee);
    }
  for (int r = 0; r < 4; ++r) {
    float* low = reinterpret_cast<float*>(to + r * to_step);
    float* high = reinterpret_cast<float*>(to + (r + 4) * to_step);
    _mm256_storeu_ps(low, _mm256_permute2f128_ps(quads[r], quads[r + 4], 0x20));
    _mm256_storeu_ps(high, _mm256_permute2f128_ps(quads[r], quads[r + 4], 0x31));
  }
}

}  // namespace
}  // namespace outrider
