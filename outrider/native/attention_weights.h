// From scores to the weights of keys, for any instruction set.

#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_space.h"

namespace outrider {
namespace {

// e^x for x <= 0: Taylor's series of degree 7 around the nearest multiple of log 2; 0 below e^-87.
template <class Isa>
inline typename Isa::Sum exponential(typename Isa::Sum x) {
  using Sum = typename Isa::Sum;
  const Sum magic = Isa::spread_float(12582912.0f);  // its sum with a small number has that number's integer part last
  const Sum shifted = Isa::fused(x, Isa::spread_float(1.44269504f), magic);
  const Sum whole = Isa::minus(shifted, magic);
  Sum rest = Isa::fused(whole, Isa::spread_float(-0.693359375f), x);
  rest = Isa::fused(whole, Isa::spread_float(2.12194440e-4f), rest);
  Sum value = Isa::spread_float(1.0f / 5040);
  for (const float next : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    value = Isa::fused(value, rest, Isa::spread_float(next));
  }
  // The product keeps what is no number, of which `raised` may make one.
  value = Isa::fused(x, Isa::zero(), Isa::raised(value, shifted));
  return Isa::zero_where_less(value, x, -87.0f);
}

// bound * tanh(x / bound), by way of e^-|2x / bound|.
template <class Isa>
inline typename Isa::Sum capped(typename Isa::Sum x, float bound) {
  const typename Isa::Sum one = Isa::spread_float(1.0f);
  const typename Isa::Sum size = Isa::magnitude(x);
  const typename Isa::Sum power = exponential<Isa>(Isa::times(size, Isa::spread_float(-2.0f / bound)));
  const typename Isa::Sum tanh = Isa::over(Isa::minus(one, power), Isa::plus(one, power));
  return Isa::with_sign(Isa::times(tanh, Isa::spread_float(bound)), x);
}

// Scales a query's scores of a page and hides those of keys that it does not see. Keeps the highest score so far, and as
// the query's factor by how much that was less before.
template <class Isa>
inline void scale_scores(const Attention& attention, const Workspace& space, int64_t query, Seen keys) {
  using Sum = typename Isa::Sum;
  float* scores = space.weights + query * kPageLen;
  const bool sees_all = keys.first == 0 && keys.last == kPageLen;
  Sum most = Isa::spread_float(kNothing);
  for (int64_t v = 0; v < kPageVectors; ++v) {
    Sum score = Isa::times(Isa::read(scores + v * kLanes), Isa::spread_float(attention.scaling));
    if (attention.softcap > 0.0f) score = capped<Isa>(score, attention.softcap);
    if (!sees_all) score = Isa::within(score, keys.first - v * kLanes, keys.last - v * kLanes, kNothing);
    Isa::store(scores + v * kLanes, score);
    most = Isa::larger(score, most);
  }
  const float before = space.highest[query];
  const float highest = std::max(before, Isa::largest(most));
  space.highest[query] = highest;
  // The difference of two infinities would be no number.
  space.factors[query] = highest == kNothing ? kNothing : before - highest;
}

// Turns a query's scaled scores of a page into weights, and adds these to its totals.
template <class Isa>
inline void weigh(const Workspace& space, int64_t query) {
  using Sum = typename Isa::Sum;
  float* weights = space.weights + query * kPageLen;
  const float highest = space.highest[query];
  if (highest == kNothing) {
    // No key so far has a weight.
    std::fill_n(weights, kPageLen, 0.0f);
    return;
  }
  Sum total = Isa::times(Isa::read(space.totals + query * kLanes), Isa::spread_float(space.factors[query]));
  for (int64_t v = 0; v < kPageVectors; ++v) {
    const Sum weight = exponential<Isa>(Isa::minus(Isa::read(weights + v * kLanes), Isa::spread_float(highest)));
    Isa::store(weights + v * kLanes, weight);
    total = Isa::plus(total, weight);
  }
  Isa::store(space.totals + query * kLanes, total);
}

// Turns the scores of rows [first, last) of a tile for a page into weights. Each step is done for all queries before the
// next one: what a query waits for then does not hold up the others.
template <class Isa>
inline void weigh_rows(
    const Attention& attention, const Workspace& space, const AttentionRow* tile, int64_t first, int64_t last,
    int64_t page_start) {
  const int64_t begin = first * attention.group, end = last * attention.group;
  for (int64_t row = first; row < last; ++row) {
    const Seen seen = seen_keys(attention, tile[row].position, page_start);
    for (int64_t query = row * attention.group; query < (row + 1) * attention.group; ++query) {
      scale_scores<Isa>(attention, space, query, seen);
    }
  }
  // What the first and the last vector have of other queries is not used.
  for (int64_t query = begin / kLanes * kLanes; query < end; query += kLanes) {
    Isa::store(space.factors + query, exponential<Isa>(Isa::read(space.factors + query)));
  }
  for (int64_t query = begin; query < end; ++query) weigh<Isa>(space, query);
}

}  // namespace
}  // namespace outrider
