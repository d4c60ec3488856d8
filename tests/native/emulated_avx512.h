// AVX-512 in terms of AVX2, by SIMDe, and what its version of 2022 lacks or does otherwise: a fused multiplication and
// addition rounds once.

#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/fma.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulated {

template <class To, class From>
inline To as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

struct Floats {
  __m256 low, high;
};

template <class Lane, int NUM>
struct Lanes {
  Lane at[NUM];
};

inline __m512 fmadd_ps(__m512 one, __m512 other, __m512 added) {
  const auto a = as<Floats>(one), b = as<Floats>(other), c = as<Floats>(added);
  return as<__m512>(Floats{_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)});
}

inline float reduce_max_ps(__m512 values) {
  const auto lanes = as<Lanes<float, 16>>(values);
  float most = lanes.at[0];
  for (const float value : lanes.at) most = value > most ? value : most;
  return most;
}

inline __m512 cvtepi32_ps(__m512i values) {
  const auto lanes = as<Lanes<int32_t, 16>>(values);
  Lanes<float, 16> found;
  for (int lane = 0; lane < 16; ++lane) found.at[lane] = static_cast<float>(lanes.at[lane]);
  return as<__m512>(found);
}

inline __m512i cvtepu16_epi32(__m256i values) {
  const auto lanes = as<Lanes<uint16_t, 16>>(values);
  Lanes<int32_t, 16> found;
  for (int lane = 0; lane < 16; ++lane) found.at[lane] = lanes.at[lane];
  return as<__m512i>(found);
}

inline __m256i cvtepi32_epi16(__m512i values) {
  const auto lanes = as<Lanes<int32_t, 16>>(values);
  Lanes<uint16_t, 16> found;
  for (int lane = 0; lane < 16; ++lane) found.at[lane] = static_cast<uint16_t>(lanes.at[lane]);
  return as<__m256i>(found);
}

inline __m256i maskz_loadu_epi16(__mmask16 mask, const void* from) {
  Lanes<uint16_t, 16> found{};
  for (int lane = 0; lane < 16; ++lane) {
    if (mask >> lane & 1) std::memcpy(&found.at[lane], static_cast<const uint16_t*>(from) + lane, sizeof(uint16_t));
  }
  return as<__m256i>(found);
}

inline __mmask16 mask_cmp_epi32_mask(__mmask16 mask, __m512i one, __m512i other, int predicate) {
  const auto a = as<Lanes<int32_t, 16>>(one), b = as<Lanes<int32_t, 16>>(other);
  __mmask16 found = 0;
  for (int lane = 0; lane < 16; ++lane) {
    const int32_t x = a.at[lane], y = b.at[lane];
    const bool holds[] = {x == y, x < y, x <= y, false, x != y, x >= y, x > y, true};
    if (mask >> lane & 1 && holds[predicate]) found |= __mmask16{1} << lane;
  }
  return found;
}

inline __m512i dpbusd_epi32(__m512i sums, __m512i unsigned_bytes, __m512i signed_bytes) {
  auto found = as<Lanes<int32_t, 16>>(sums);
  const auto a = as<Lanes<uint8_t, 64>>(unsigned_bytes);
  const auto b = as<Lanes<int8_t, 64>>(signed_bytes);
  for (int byte = 0; byte < 64; ++byte) found.at[byte / 4] += a.at[byte] * b.at[byte];
  return as<__m512i>(found);
}

}  // namespace emulated

#undef _mm512_fmadd_ps
#undef _mm512_dpbusd_epi32
#define _mm512_fmadd_ps emulated::fmadd_ps
#define _mm512_reduce_max_ps emulated::reduce_max_ps
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtepi32_epi16 emulated::cvtepi32_epi16
#define _mm256_maskz_loadu_epi16 emulated::maskz_loadu_epi16
#define _mm512_mask_cmp_epi32_mask emulated::mask_cmp_epi32_mask
#define _mm512_cmp_epi32_mask(one, other, predicate) emulated::mask_cmp_epi32_mask(0xffff, one, other, predicate)
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
