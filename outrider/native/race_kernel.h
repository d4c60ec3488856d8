// Keyed noise, and a race's bounds, in loops that a compiler turns into those of any instruction set.
//
// Noise is -log(u), and 1 - u <= -log(u) <= (1 - u) / u. With n the first 32 bits of 1 - u, rounded down,
//     weight * (1 - (n + 1) / 2^32) / (n + 1)  <=  weight / noise / 2^32  <=  weight / n.
// Weights are within 2e-4 of their exact values, which the caller's slack covers. Those below 2^-90 count as so much, which
// hides no winner: the likeliest token, of weight 1, has at least 2^-38 of weight / noise / 2^32, since u is 2^-53 or more.
// None of these numbers is subnormal.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "race.h"

namespace outrider {
namespace {

constexpr int kBlocks = 256;
constexpr float kLeastExponent = -90.0f;  // of two

// 2^x for x in (-126, 0], with a relative error below 1e-4.
inline float power_of_two(float x) {
  const int32_t whole = static_cast<int32_t>(x);  // towards zero
  const float rest = x - static_cast<float>(whole);
  // 2^rest for rest in (-1, 0]: Taylor's series around -1/2, in z = rest + 1/2.
  const float z = rest + 0.5f;
  const float value = 0.70710678f + z * (0.49012907f + z * (0.16986576f + z * (0.03924717f + z * 0.0068009f)));
  return value * std::bit_cast<float>((whole + 127) << 23);
}

// The words of so many Philox counters; before the rounds the first one of each is its block.
struct Blocks {
  uint32_t x0[kBlocks], x1[kBlocks], x2[kBlocks], x3[kBlocks];

  // Philox4x32-10 (Salmon et al. 2011, section 3.3).
  void mix(const Counter& counter) {
    std::fill(x1, x1 + kBlocks, counter.words[0]);
    std::fill(x2, x2 + kBlocks, counter.words[1]);
    std::fill(x3, x3 + kBlocks, counter.words[2]);
    uint32_t key0 = counter.key[0], key1 = counter.key[1];
    for (int round = 0; round < 10; ++round) {
      for (int b = 0; b < kBlocks; ++b) {
        const uint64_t product0 = static_cast<uint64_t>(x0[b]) * 0xD2511F53u;
        const uint64_t product1 = static_cast<uint64_t>(x2[b]) * 0xCD9E8D57u;
        const uint32_t y0 = static_cast<uint32_t>(product1 >> 32) ^ x1[b] ^ key0;
        const uint32_t y2 = static_cast<uint32_t>(product0 >> 32) ^ x3[b] ^ key1;
        x1[b] = static_cast<uint32_t>(product1);
        x3[b] = static_cast<uint32_t>(product0);
        x0[b] = y0;
        x2[b] = y2;
      }
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
  }
};

inline void uniforms(const Counter& counter, const int64_t* token_ids, int64_t num, double* output) {
  for (int64_t first = 0; first < num; first += kBlocks) {
    const int now = static_cast<int>(std::min<int64_t>(kBlocks, num - first));
    const int64_t* given = token_ids + first;
    Blocks blocks;
    for (int b = 0; b < kBlocks; ++b) blocks.x0[b] = b < now ? static_cast<uint32_t>(given[b] >> 1) : 0;
    blocks.mix(counter);
    for (int b = 0; b < now; ++b) {
      const bool is_odd = given[b] & 1;
      const uint64_t high = is_odd ? blocks.x2[b] : blocks.x0[b];
      const uint64_t low = is_odd ? blocks.x3[b] : blocks.x1[b];
      output[first + b] = (static_cast<double>(static_cast<int64_t>(high << 20 | low >> 12)) + 0.5) * 0x1p-52;
    }
  }
}

inline float race(const RaceRow& row, int64_t begin, int64_t end, float* bounds) {
  float best = 0.0f;
  const float scale = row.inverse_temperature * 1.44269504f;
  for (int64_t first = begin; first < end; first += 2 * kBlocks) {
    Blocks blocks;
    for (int b = 0; b < kBlocks; ++b) blocks.x0[b] = static_cast<uint32_t>(first / 2) + b;
    blocks.mix(row.counter);
    float complements[2 * kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
      complements[2 * b] = static_cast<float>(~blocks.x0[b]);
      complements[2 * b + 1] = static_cast<float>(~blocks.x2[b]);
    }
    const int num = static_cast<int>(std::min<int64_t>(2 * kBlocks, end - first));
    float scores[2 * kBlocks], above[2 * kBlocks];
    std::fill(scores + num, scores + 2 * kBlocks, -HUGE_VALF);
    std::memcpy(scores, row.scores + first, num * sizeof(float));
    // Floats that are not negative are ordered as their bits are, and a largest integer is found in vectors.
    int32_t largest = 0;
    for (int v = 0; v < 2 * kBlocks; ++v) {
      const float exponent = (scores[v] - row.top) * scale;
      const float weight = power_of_two(exponent > kLeastExponent ? exponent : kLeastExponent);
      const float next = complements[v] + 1.0f;
      const int32_t below = std::bit_cast<int32_t>(weight * ((1.0f - next * 0x1p-32f) / next));
      largest = below > largest ? below : largest;
      // Infinite where n is 0: such a token is always looked at.
      above[v] = weight / complements[v];
    }
    std::memcpy(bounds + first, above, num * sizeof(float));
    best = std::max(best, std::bit_cast<float>(largest));
  }
  return best;
}

}  // namespace
}  // namespace outrider
