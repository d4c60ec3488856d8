// What lies between a draft head's products, in loops that a compiler turns into those of any instruction set.

#pragma once

#include <cmath>
#include <cstdint>

#include "bfloat16.h"
#include "head.h"
#include "power_of_two.h"

namespace outrider {
namespace {

constexpr int kNormSums = 16;
// Below it a power of e adds nothing to 1.
constexpr float kLeastSiluPower = -100.0f;

// x / (1 + e^-x), with a relative error below 2e-4.
inline float silu_of(float x) {
  const float size = x < 0.0f ? x : -x;
  const float exponent = size * kLog2OfE;
  const float power = power_of_two(exponent > kLeastSiluPower ? exponent : kLeastSiluPower);
  return x * (x < 0.0f ? power : 1.0f) / (1.0f + power);
}

inline void norm_row(const uint16_t* row, const uint16_t* weight, int64_t num, float epsilon, uint16_t* output) {
  float sums[kNormSums] = {};
  int64_t at = 0;
  for (; at + kNormSums <= num; at += kNormSums) {
    for (int sum = 0; sum < kNormSums; ++sum) sums[sum] += wide(row[at + sum]) * wide(row[at + sum]);
  }
  for (; at < num; ++at) sums[0] += wide(row[at]) * wide(row[at]);
  float total = 0.0f;
  for (float sum : sums) total += sum;
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(num) + epsilon);
  for (at = 0; at < num; ++at) output[at] = narrow(wide(row[at]) * scale * wide(weight[at]));
}

inline void add_row(uint16_t* row, const uint16_t* added, int64_t num) {
  for (int64_t at = 0; at < num; ++at) row[at] = narrow(wide(row[at]) + wide(added[at]));
}

inline void gate_row(uint16_t* row, int64_t num) {
  for (int64_t at = 0; at < num; ++at) row[at] = narrow(silu_of(wide(row[at])) * wide(row[num + at]));
}

inline void silu_row(uint16_t* row, const uint16_t* added, int64_t num) {
  for (int64_t at = 0; at < num; ++at) row[at] = narrow(silu_of(wide(row[at]) + wide(added[at])));
}

inline void rotate_row(uint16_t* head, const uint16_t* cosines, const uint16_t* sines, int64_t num) {
  const int64_t half = num / 2;
  for (int64_t at = 0; at < half; ++at) {
    const float first = wide(head[at]), second = wide(head[half + at]);
    head[at] = narrow(first * wide(cosines[at]) - second * wide(sines[at]));
    head[half + at] = narrow(second * wide(cosines[half + at]) + first * wide(sines[half + at]));
  }
}

inline HeadKernels head_kernels() { return {norm_row, add_row, gate_row, silu_row, rotate_row}; }

}  // namespace
}  // namespace outrider
