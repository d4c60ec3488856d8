// What is done with a row of scores, by a variant's instructions; see race.h and largest.h.

#pragma once

#include "largest.h"
#include "operators.h"
#include "race.h"

namespace outrider {

struct ScoreKernels {
  UniformKernel uniforms;
  LogNoiseKernel log_noise;
  RaceKernel race;
  LargestKernel largest;
  PlaceKernel place;
};

inline const ScoreKernels& score_kernels(int64_t variant) {
  static constexpr ScoreKernels avx2{uniforms_avx2, log_noise_avx2, race_avx2, largest_avx2, place_of_largest_avx2};
  static constexpr ScoreKernels avx512{
      uniforms_avx512, log_noise_avx512, race_avx512, largest_avx512, place_of_largest_avx512};
  check_variant(variant);
  return variant > 0 ? avx512 : avx2;
}

// The counter of a row of int64: three words of a Philox counter, and two of its key.
inline Counter counter_of(const int64_t* numbers) {
  const auto word = [&](int index) { return static_cast<uint32_t>(numbers[index]); };
  return {{word(0), word(1), word(2)}, {word(3), word(4)}};
}

}  // namespace outrider
