// How all variants of an operator treat subnormal numbers.

#pragma once

#include <immintrin.h>

namespace outrider {
namespace {

// Counts subnormal numbers as zero and rounds to the nearest, in this thread, for a while: some instructions do so whatever
// the thread's mode is.
class NoSubnormals {
 public:
  NoSubnormals() : before_(_mm_getcsr()) {
    _mm_setcsr((before_ & ~_MM_ROUND_MASK) | _MM_FLUSH_ZERO_ON | kDenormalsAreZero);
  }
  ~NoSubnormals() { _mm_setcsr(before_); }
  NoSubnormals(const NoSubnormals&) = delete;
  NoSubnormals& operator=(const NoSubnormals&) = delete;

 private:
  static constexpr unsigned int kDenormalsAreZero = 0x0040;
  unsigned int before_;
};

}  // namespace
}  // namespace outrider
