// Keyed noise, as in outrider.speculation.randomness, and which tokens can win a race: the others need no exact noise.

#pragma once

#include <cstdint>

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

// A row of the race: token v has weight exp((scores[v] - top) / temperature) and noise -log(u), u being its uniform
// random number; the largest weight / noise wins.
struct RaceRow {
  const float* scores;
  float top;
  float inverse_temperature;
  Counter counter;
};

// Writes, for tokens [begin, end), a bound above each one's weight / noise, times 2^-32, and returns a bound below the
// largest. `begin` is even.
using RaceKernel = float (*)(const RaceRow& row, int64_t begin, int64_t end, float* bounds);

float race_avx2(const RaceRow& row, int64_t begin, int64_t end, float* bounds);
float race_avx512(const RaceRow& row, int64_t begin, int64_t end, float* bounds);

}  // namespace outrider
