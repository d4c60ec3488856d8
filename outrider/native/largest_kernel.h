// The largest scores of a row, in loops that a compiler turns into those of any instruction set.
//
// Scores become integers of the same order, whose largest is found in vectors: of each group of them, then of the groups.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "largest.h"
#include "power_of_two.h"

namespace outrider {
namespace {

constexpr int64_t kGroup = 128;
constexpr int kSums = 16;
constexpr float kLeastPower = -100.0f;

// An integer that is ordered as floats are, -0 being below 0. It is its own inverse.
inline int32_t ordered(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

inline float score_of(int32_t key) { return std::bit_cast<float>(ordered(key)); }

inline int32_t largest_key(const int32_t* keys, int64_t num) {
  int32_t largest = INT32_MIN;
  for (int64_t at = 0; at < num; ++at) largest = keys[at] > largest ? keys[at] : largest;
  return largest;
}

// The place of a key that is among these; not by std::find, which files for other instruction sets would share.
inline int64_t place_of(int32_t key, const int32_t* keys) {
  int64_t at = 0;
  while (keys[at] != key) ++at;
  return at;
}

// The key of a score. A sum with 0 makes -0 one of the equals of 0.
inline int32_t key_of(float score) {
  return score != score ? INT32_MAX : ordered(std::bit_cast<int32_t>(score + 0.0f));
}

// Writes the keys of scores [begin, end) to `keys`, and returns the largest.
inline int32_t write_keys(const ScoreRow& row, int64_t begin, int64_t end, int32_t* keys) {
  const int64_t num = end - begin;
  if (row.is_float32) {
    const auto* scores = static_cast<const float*>(row.scores) + begin;
    for (int64_t at = 0; at < num; ++at) keys[at] = key_of(scores[at]);
  } else {
    const auto* scores = static_cast<const uint16_t*>(row.scores) + begin;
    for (int64_t at = 0; at < num; ++at) keys[at] = key_of(std::bit_cast<float>(static_cast<uint32_t>(scores[at]) << 16));
  }
  return largest_key(keys, num);
}

// The sum of all scores, or of 2 to the power of their distances from the top, in bits.
inline float total_of(const int32_t* keys, int64_t num, bool is_softmax, float top) {
  float sums[kSums] = {};
  int64_t at = 0;
  const auto term = [&](int32_t key) {
    if (!is_softmax) return score_of(key);
    const float power = (score_of(key) - top) * kLog2OfE;
    return power_of_two(power > kLeastPower ? power : kLeastPower);
  };
  for (; at + kSums <= num; at += kSums) {
    for (int sum = 0; sum < kSums; ++sum) sums[sum] += term(keys[at + sum]);
  }
  for (; at < num; ++at) sums[0] += term(keys[at]);
  float total = 0.0f;
  for (float sum : sums) total += sum;
  return total;
}

inline void largest(const ScoreRow& row, int64_t num, float* scratch, int64_t* places, float* shares) {
  auto* keys = reinterpret_cast<int32_t*>(scratch);
  int32_t* groups = keys + row.num_scores;
  const int64_t num_groups = (row.num_scores + kGroup - 1) / kGroup;
  const auto end_of = [&](int64_t group) { return std::min((group + 1) * kGroup, row.num_scores); };
  for (int64_t group = 0; group < num_groups; ++group) {
    groups[group] = write_keys(row, group * kGroup, end_of(group), keys + group * kGroup);
  }
  const float top = score_of(largest_key(groups, num_groups));
  const float total = total_of(keys, row.num_scores, row.is_softmax, top);
  for (int64_t rank = 0; rank < num; ++rank) {
    const int32_t key = largest_key(groups, num_groups);
    const int64_t group = place_of(key, groups), first = group * kGroup;
    places[rank] = first + place_of(key, keys + first);
    const float score = score_of(key);
    const float part = row.is_softmax ? std::exp(score - top) : score;
    shares[rank] = score > -HUGE_VALF && total > 0.0f ? part / total : 0.0f;
    // Taken: no score has this key.
    keys[places[rank]] = INT32_MIN;
    groups[group] = largest_key(keys + first, end_of(group) - first);
  }
}

inline int64_t place_of_largest(const ScoreRow& row) {
  int32_t keys[kGroup];
  const auto write_group = [&](int64_t begin) {
    return write_keys(row, begin, std::min(begin + kGroup, row.num_scores), keys);
  };
  int64_t best = 0;
  int32_t largest = write_group(0);
  for (int64_t begin = kGroup; begin < row.num_scores; begin += kGroup) {
    const int32_t key = write_group(begin);
    if (key > largest) largest = key, best = begin;
  }
  write_group(best);
  return best + place_of(largest, keys);
}

}  // namespace
}  // namespace outrider
