// Attention of a pass, for operators.

#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"

namespace outrider {

// Computes the outputs of rows, on as many threads as they are worth. The keys and values that they see are stored.
void attend(Attention attention, const std::vector<AttentionRow>& rows, int64_t variant);

}  // namespace outrider
