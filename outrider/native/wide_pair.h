// Pairs of bfloat16 numbers in float32, for instruction sets that have no addition of pairs.

#pragma once

#include <bit>
#include <cstdint>

namespace outrider {
namespace {

// The numbers of inputs k and k + 1. Of a type that each file has for itself, so that its vector's functions are not
// shared between instruction sets.
struct WidePair {
  float even, odd;
};

inline WidePair widened(uint32_t pair) {
  return {std::bit_cast<float>(pair << 16), std::bit_cast<float>(pair & 0xffff0000u)};
}

}  // namespace
}  // namespace outrider
