// Keyed noise, and a race's bounds: random words by AVX-512 or AVX2, the rest in loops that a compiler turns into either.
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

#include <immintrin.h>

#include "power_of_two.h"
#include "race.h"

namespace outrider {
namespace {

constexpr int kBlocks = 256;
constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u, kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
constexpr float kLeastExponent = -90.0f;  // of two

#ifdef __AVX512F__
using Words = __m512i;

inline Words spread(uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }
inline Words load(const uint32_t* words) { return _mm512_loadu_si512(words); }
inline void store(uint32_t* to, Words words) { _mm512_storeu_si512(to, words); }
inline Words xor_of(Words a, Words b, Words c) {
  constexpr int kXorOfThree = 0x96;
  return _mm512_ternarylogic_epi32(a, b, c, kXorOfThree);
}

// The lower and the upper words of products.
struct Products {
  Words low, high;

  Products(Words words, Words factors) {
    const Words even = _mm512_mul_epu32(words, factors);
    const Words odd = _mm512_mul_epu32(_mm512_srli_epi64(words, 32), factors);
    const Words lows = _mm512_setr_epi32(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    const Words highs = _mm512_setr_epi32(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    low = _mm512_permutex2var_epi32(even, lows, odd);
    high = _mm512_permutex2var_epi32(even, highs, odd);
  }
};
#else
using Words = __m256i;

inline Words spread(uint32_t word) { return _mm256_set1_epi32(static_cast<int>(word)); }
inline Words load(const uint32_t* words) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)); }
inline void store(uint32_t* to, Words words) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words); }
inline Words xor_of(Words a, Words b, Words c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }

// The lower and the upper words of products.
struct Products {
  Words low, high;

  Products(Words words, Words factors) {
    constexpr int kOdd = 0xaa;
    const Words even = _mm256_mul_epu32(words, factors);
    const Words odd = _mm256_mul_epu32(_mm256_srli_epi64(words, 32), factors);
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), kOdd);
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, kOdd);
  }
};
#endif

constexpr int kTogether = sizeof(Words) / sizeof(uint32_t);

// The words of as many Philox counters as a register holds.
struct Counters {
  Words x0, x1, x2, x3;

  Counters(const Counter& counter, const uint32_t* blocks)
      : x0(load(blocks)), x1(spread(counter.words[0])), x2(spread(counter.words[1])), x3(spread(counter.words[2])) {}

  void mix(Words key0, Words key1) {
    const Products product0(x0, spread(kMultiplier0)), product1(x2, spread(kMultiplier1));
    x0 = xor_of(product1.high, x1, key0);
    x2 = xor_of(product0.high, x3, key1);
    x1 = product1.low;
    x3 = product0.low;
  }
};

// The words of so many Philox counters; before the rounds the first one of each is its block.
struct Blocks {
  uint32_t x0[kBlocks], x1[kBlocks], x2[kBlocks], x3[kBlocks];

  // Philox4x32-10 (Salmon et al. 2011, section 3.3).
  void mix(const Counter& counter) {
    for (int b = 0; b < kBlocks; b += 2 * kTogether) {
      // Two at a time: a round of one waits for its products.
      Counters first(counter, x0 + b), second(counter, x0 + b + kTogether);
      uint32_t key0 = counter.key[0], key1 = counter.key[1];
      for (int round = 0; round < 10; ++round) {
        first.mix(spread(key0), spread(key1));
        second.mix(spread(key0), spread(key1));
        key0 += kWeyl0;
        key1 += kWeyl1;
      }
      write(first, b);
      write(second, b + kTogether);
    }
  }

 private:
  void write(const Counters& counters, int b) {
    store(x0 + b, counters.x0);
    store(x1 + b, counters.x1);
    store(x2 + b, counters.x2);
    store(x3 + b, counters.x3);
  }
};

// The blocks of so many tokens, at most kBlocks.
inline Blocks blocks_of(const Counter& counter, const int64_t* token_ids, int num) {
  Blocks blocks;
  for (int b = 0; b < kBlocks; ++b) blocks.x0[b] = b < num ? static_cast<uint32_t>(token_ids[b] >> 1) : 0;
  blocks.mix(counter);
  return blocks;
}

inline void uniforms(const Counter& counter, const int64_t* token_ids, int64_t num, double* output) {
  for (int64_t first = 0; first < num; first += kBlocks) {
    const int now = static_cast<int>(std::min<int64_t>(kBlocks, num - first));
    const int64_t* given = token_ids + first;
    const Blocks blocks = blocks_of(counter, given, now);
    for (int b = 0; b < now; ++b) {
      const bool is_odd = given[b] & 1;
      const uint64_t high = is_odd ? blocks.x2[b] : blocks.x0[b];
      const uint64_t low = is_odd ? blocks.x3[b] : blocks.x1[b];
      output[first + b] = (static_cast<double>(static_cast<int64_t>(high << 20 | low >> 12)) + 0.5) * 0x1p-52;
    }
  }
}

// -log(x) for x from 1/2 to 1, given 1 - x: 2 artanh(y), with y = (1 - x) / (1 + x) of at most 1/3.
inline float minus_log_of_complement(float complement) {
  const float y = complement / (2.0f - complement), square = y * y;
  return 2.0f * y * (1.0f + square * (1.0f / 3.0f + square * (1.0f / 5.0f + square * (1.0f / 7.0f))));
}

// -log(x) for a normal x.
inline float minus_log(float x) {
  constexpr float kLogOf2 = 0.69314718f;
  const int32_t bits = std::bit_cast<int32_t>(x);
  const float half_to_one = std::bit_cast<float>((bits & 0x7fffff) | 0x3f000000);
  return minus_log_of_complement(1.0f - half_to_one) - kLogOf2 * static_cast<float>((bits >> 23) - 126);
}

// Of u and of 1 - u the first 32 bits are enough: the noise of the largest vocabularies' winners is far above 2^-32.
inline void log_noise(const Counter& counter, const int64_t* token_ids, int64_t num, float* output) {
  for (int64_t first = 0; first < num; first += kBlocks) {
    const int now = static_cast<int>(std::min<int64_t>(kBlocks, num - first));
    const int64_t* given = token_ids + first;
    const Blocks blocks = blocks_of(counter, given, now);
    uint32_t words[kBlocks] = {};
    for (int b = 0; b < now; ++b) words[b] = given[b] & 1 ? blocks.x2[b] : blocks.x0[b];
    float values[kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
      const float uniform = (static_cast<float>(words[b]) + 0.5f) * 0x1p-32f;
      const float complement = (static_cast<float>(~words[b]) + 0.5f) * 0x1p-32f;
      const float small = minus_log(uniform), large = minus_log_of_complement(complement);
      values[b] = -minus_log(uniform < 0.5f ? small : large);
    }
    std::memcpy(output + first, values, now * sizeof(float));
  }
}

// Writes scores [begin, end), and minus infinity behind them.
inline void write_scores(const ScoreRow& row, int64_t begin, int64_t end, float* scores) {
  const int64_t num = end - begin;
  std::fill(scores + num, scores + kRaceTokens, -HUGE_VALF);
  if (row.is_float32) {
    std::memcpy(scores, static_cast<const float*>(row.scores) + begin, num * sizeof(float));
  } else {
    const auto* given = static_cast<const uint16_t*>(row.scores) + begin;
    for (int64_t v = 0; v < num; ++v) scores[v] = std::bit_cast<float>(static_cast<uint32_t>(given[v]) << 16);
  }
}

inline RaceBounds race(const RaceRow& row, int64_t begin, int64_t end, float* bounds) {
  static_assert(kRaceTokens == 2 * kBlocks);
  const float scale = row.inverse_temperature * kLog2OfE;
  Blocks blocks;
  for (int b = 0; b < kBlocks; ++b) blocks.x0[b] = static_cast<uint32_t>(begin / 2) + b;
  blocks.mix(row.counter);
  float complements[kRaceTokens];
  for (int b = 0; b < kBlocks; ++b) {
    complements[2 * b] = static_cast<float>(~blocks.x0[b]);
    complements[2 * b + 1] = static_cast<float>(~blocks.x2[b]);
  }
  float scores[kRaceTokens], above[kRaceTokens];
  write_scores(row.scores, begin, end, scores);
  // Floats that are not negative are ordered as their bits are, and a largest integer is found in vectors.
  int32_t largest_below = 0, largest_above = 0;
  for (int v = 0; v < kRaceTokens; ++v) {
    const float exponent = (scores[v] - row.top) * scale;
    const float weight = power_of_two(exponent > kLeastExponent ? exponent : kLeastExponent);
    const float next = complements[v] + 1.0f;
    const int32_t lower = std::bit_cast<int32_t>(weight * ((1.0f - next * 0x1p-32f) / next));
    largest_below = lower > largest_below ? lower : largest_below;
    // Infinite where n is 0: such a token is always looked at.
    above[v] = weight / complements[v];
    const int32_t upper = std::bit_cast<int32_t>(above[v]);
    largest_above = upper > largest_above ? upper : largest_above;
  }
  if (bounds != nullptr) std::memcpy(bounds, above, (end - begin) * sizeof(float));
  return {std::bit_cast<float>(largest_below), std::bit_cast<float>(largest_above)};
}

}  // namespace
}  // namespace outrider
