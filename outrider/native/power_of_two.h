// Powers of two, in loops that a compiler turns into those of any instruction set.

#pragma once

#include <bit>
#include <cstdint>

namespace outrider {
namespace {

constexpr float kLog2OfE = 1.44269504f;

// 2^x for x in (-126, 0], with a relative error below 1e-4.
inline float power_of_two(float x) {
  const int32_t whole = static_cast<int32_t>(x);  // towards zero
  const float rest = x - static_cast<float>(whole);
  // 2^rest for rest in (-1, 0]: Taylor's series around -1/2, in z = rest + 1/2.
  const float z = rest + 0.5f;
  const float value = 0.70710678f + z * (0.49012907f + z * (0.16986576f + z * (0.03924717f + z * 0.0068009f)));
  return value * std::bit_cast<float>((whole + 127) << 23);
}

}  // namespace
}  // namespace outrider
