// Keyed noise, as in outrider.speculation.randomness, and which tokens can win a race: the others need no exact noise.

#pragma once

#include <cstdint>

#include "largest.h"

namespace outrider {

// The upper words of a row's Philox counters, and its key. The lowest word is v / 2 for tokens v (even) and v + 1.
struct Counter {
  uint32_t words[3];
  uint32_t key[2];
};

// Writes the uniform random number of each token, strictly between 0 and 1.
using UniformKernel = void (*)(const Counter& counter, const int64_t* token_ids, int64_t num, double* output);

void uniforms_avx2(const Counter& counter, const int64_t* token_ids, int64_t num, double* output);
void uniforms_avx512(const Counter& counter, const int64_t* token_ids, int64_t num, double* output);

// Writes log(-log(u)) of each token's uniform random number u, within 1e-4.
using LogNoiseKernel = void (*)(const Counter& counter, const int64_t* token_ids, int64_t num, float* output);

void log_noise_avx2(const Counter& counter, const int64_t* token_ids, int64_t num, float* output);
void log_noise_avx512(const Counter& counter, const int64_t* token_ids, int64_t num, float* output);

// A row of the race: token v has weight exp((scores[v] - top) / temperature) and noise -log(u), u being its uniform
// random number; the largest weight / noise wins.
struct RaceRow {
  ScoreRow scores;
  float top;
  float inverse_temperature;
  Counter counter;
};

// Tokens that are looked at together.
constexpr int64_t kRaceTokens = 512;

// Bounds of the largest weight / noise of some tokens, times 2^-32.
struct RaceBounds {
  float below, above;
};

// Returns the bounds of tokens [begin, end), at most `kRaceTokens`; `begin` is even. Where `bounds` is given, it writes a
// bound above each token's weight / noise, times 2^-32.
using RaceKernel = RaceBounds (*)(const RaceRow& row, int64_t begin, int64_t end, float* bounds);

RaceBounds race_avx2(const RaceRow& row, int64_t begin, int64_t end, float* bounds);
RaceBounds race_avx512(const RaceRow& row, int64_t begin, int64_t end, float* bounds);

}  // namespace outrider
