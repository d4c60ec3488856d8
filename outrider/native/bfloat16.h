// Numbers of bfloat16 in loops that a compiler turns into those of any instruction set.

#pragma once

#include <bit>
#include <cstdint>

namespace outrider {
namespace {

inline float wide(uint16_t number) { return std::bit_cast<float>(static_cast<uint32_t>(number) << 16); }

// The nearest bfloat16, ties to even; of what is no number, none.
inline uint16_t narrow(float number) {
  const uint32_t bits = std::bit_cast<uint32_t>(number);
  const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(number == number ? nearest : (bits >> 16) | 0x40u);
}

}  // namespace
}  // namespace outrider
