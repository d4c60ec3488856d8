// Rows of a product in 8 bits, in loops that a compiler turns into those of any instruction set.

#pragma once

#include <bit>
#include <cstdint>

#include "bfloat16.h"
#include "bytes.h"

namespace outrider {
namespace {

constexpr float kLargestByte = 127.0f;
// The last bits of a number plus this one are those of the nearest integer, ties to even.
constexpr float kRounding = 12582912.0f;

inline ByteRow byte_row(const uint16_t* row, int64_t num, int8_t* integers) {
  uint16_t largest = 0;  // bits of magnitudes are ordered as they are
  for (int64_t at = 0; at < num; ++at) {
    const uint16_t magnitude = row[at] & 0x7fff;
    largest = magnitude > largest ? magnitude : largest;
  }
  const float top = wide(largest);
  const float inverse = top > 0.0f ? kLargestByte / top : 0.0f;
  int32_t sum = 0;
  for (int64_t at = 0; at < num; ++at) {
    const int32_t integer = std::bit_cast<int32_t>(wide(row[at]) * inverse + kRounding) - std::bit_cast<int32_t>(kRounding);
    integers[at] = static_cast<int8_t>(integer);
    sum += integers[at];  // bounded, whatever became of what is no number
  }
  for (int64_t at = num; at % kQuad != 0; ++at) integers[at] = 0;
  return {top / kLargestByte, sum * kByteOffset};
}

}  // namespace
}  // namespace outrider
