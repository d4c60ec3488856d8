// Which tokens can win a race: the others need no exact noise.

#pragma once

#include <cstdint>

namespace outrider {

// A row of the race: token v has weight exp((scores[v] - top) / temperature) and noise -log(u), where u is of the
// Philox counter (v / 2, words), as in outrider.speculation.randomness; the largest weight / noise wins.
struct RaceRow {
  const float* scores;
  float top;
  float inverse_temperature;
  uint32_t words[3];
  uint32_t key[2];
};

// Writes, for tokens [begin, end), a bound above each one's weight / noise, times 2^-32, and returns a bound below the
// largest. `begin` is even.
using RaceKernel = float (*)(const RaceRow& row, int64_t begin, int64_t end, float* bounds);

float race_avx2(const RaceRow& row, int64_t begin, int64_t end, float* bounds);
float race_avx512(const RaceRow& row, int64_t begin, int64_t end, float* bounds);

}  // namespace outrider
