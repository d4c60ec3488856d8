// AVX-512 with its instruction for pairs of bfloat16 numbers.

#pragma once

#include <immintrin.h>

#include <cstdint>

#include "vectors_avx512.h"

namespace outrider {
namespace {

struct Avx512Bf16 : Avx512Vectors {
  using Weights = __m512i;
  using Pair = __m512i;

  static constexpr int kSteps = 1, kRows = 16;
  static constexpr int64_t kLinesAhead = 48;
  static constexpr bool kWidensRows = false, kInRegisters = true;

  static Weights split(Cells cells) { return cells; }
  static Weights load(const Weights& weights, int) { return weights; }
  static Weights load(const uint32_t* weights, int) { return cells(weights); }
  static Pair spread(uint32_t pair, int) { return _mm512_set1_epi32(static_cast<int>(pair)); }
  static void add(Sum& sum, Pair pair, Weights weights) {
    sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(pair), reinterpret_cast<__m512bh>(weights));
  }
};

}  // namespace
}  // namespace outrider
