// What the files of operators share. They are compiled with the same flags.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace outrider {

// Multiplications below which a second thread costs more than it saves.
constexpr int64_t kLeastWork = 1 << 16;

// The best variant that this CPU can run; -1 for none.
int64_t best_variant();

inline void check_variant(int64_t variant) {
  STD_TORCH_CHECK(variant >= 0 && variant <= best_variant(), "this CPU cannot run variant ", variant);
}

}  // namespace outrider
