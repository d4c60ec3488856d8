// The largest scores of a row, and their shares.

#pragma once

#include <cstdint>

namespace outrider {

// A row of scores: bfloat16, or float32 where `is_float32`.
struct ScoreRow {
  const void* scores;
  int64_t num_scores;
  bool is_float32;
  // Whether shares are those of exponentials, as in a softmax; else scores are at least 0.
  bool is_softmax;
};

// Memory that a kernel needs for a row, in floats.
inline int64_t largest_scratch(int64_t num_scores) { return num_scores + num_scores / 128 + 64; }

// Of a row without NaN: writes the places of the `num` largest scores, in descending order, of equals that at the lowest place first; and the
// share of each in the sum of all, within 1e-3 of it: 0 for minus infinity, and where the sum is 0.
using LargestKernel =
    void (*)(const ScoreRow& row, int64_t num, float* scratch, int64_t* places, float* shares);

// The place of the largest score of a row of any scores: of equals the lowest, and a NaN is larger than all others.
using PlaceKernel = int64_t (*)(const ScoreRow& row);

void largest_avx2(const ScoreRow& row, int64_t num, float* scratch, int64_t* places, float* shares);
void largest_avx512(const ScoreRow& row, int64_t num, float* scratch, int64_t* places, float* shares);
int64_t place_of_largest_avx2(const ScoreRow& row);
int64_t place_of_largest_avx512(const ScoreRow& row);

}  // namespace outrider
