// How all variants of an operator treat subnormal numbers.

#pragma once

#include <immintrin.h>

namespace outrider {
namespace {

// Counts subnormal numbers as zero, in this thread, for a while.
class NoSubnormals {
 public:
  NoSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~NoSubnormals() { _mm_setcsr(before_); }
  NoSubnormals(const NoSubnormals&) = delete;
  NoSubnormals& operator=(const NoSubnormals&) = delete;

 private:
  unsigned int before_;
};

}  // namespace
}  // namespace outrider
