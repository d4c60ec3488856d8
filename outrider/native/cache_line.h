#pragma once

#include <cstdint>

namespace outrider {

// What a CPU reads of memory at once.
constexpr int64_t kLineBytes = 64;

}  // namespace outrider
