// Pairs of bfloat16 numbers, as a product's inputs are laid out. Their types are each file's own, so that the functions of
// a vector of them are not shared between instruction sets.

#pragma once

#include <bit>
#include <cstdint>

namespace outrider {
namespace {

// The numbers of inputs k (low half) and k + 1.
struct StoredPair {
  uint32_t both;
};

// The same in float32, for instruction sets that have no addition of pairs.
struct WidePair {
  float even, odd;
};

inline WidePair widened(uint32_t pair) {
  return {std::bit_cast<float>(pair << 16), std::bit_cast<float>(pair & 0xffff0000u)};
}

}  // namespace
}  // namespace outrider
