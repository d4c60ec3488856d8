// What a tile of attention works on, and which keys of a page its rows see.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "attention.h"

namespace outrider {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kPageVectors = kPageLen / kLanes;
constexpr int64_t kPagePairs = kPageLen / 2;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Where a tile keeps what it works on for one key head: `head_scratch` floats in all.
struct Workspace {
  int64_t value_lanes;
  uint32_t* queries;  // [queries, key_cells], or twice as many: see `Pairs`
  float* weights;     // [queries, kPageLen], scores at first
  float* outputs;     // [queries, value_lanes]
  float* totals;      // [queries, kLanes], sums of the weights by lane
  float* highest;     // [queries]
  float* factors;     // [queries]
  uint32_t* keys;     // [key_cells, kPageLen] of one page, or twice as many
  float* values;      // [kPageLen, value_lanes], of one page
  uint32_t* pairs;    // [kPagePairs, value_lanes], of one page: values of two keys that follow each other

  Workspace(const Attention& attention, float* scratch)
      : value_lanes(outrider::value_lanes(attention)),
        queries(reinterpret_cast<uint32_t*>(scratch)),
        weights(scratch + kMostQueries * 2 * attention.key_cells),
        outputs(weights + kMostQueries * kPageLen),
        totals(outputs + kMostQueries * value_lanes),
        highest(totals + kMostQueries * kLanes),
        factors(highest + kMostQueries),
        keys(reinterpret_cast<uint32_t*>(factors + kMostQueries)),
        values(factors + kMostQueries + kPageLen * 2 * attention.key_cells),
        pairs(reinterpret_cast<uint32_t*>(values + kPageLen * value_lanes)) {}
};

// Keys [first, last) of a page that a row sees.
struct Seen {
  int64_t first;
  int64_t last;
};

inline int64_t value_bytes(const Attention& attention) {
  return attention.is_bfloat16 ? sizeof(uint16_t) : sizeof(float);
}

inline Seen seen_keys(const Attention& attention, int64_t position, int64_t page_start) {
  const int64_t first = attention.window > 0 ? std::max<int64_t>(0, position - attention.window + 1) : 0;
  return {std::clamp<int64_t>(first - page_start, 0, kPageLen),
          std::clamp<int64_t>(position + 1 - page_start, 0, kPageLen)};
}

}  // namespace
}  // namespace outrider
