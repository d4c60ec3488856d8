// Fetches the keys and values that are read next.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <utility>

#include "attention.h"
#include "attention_space.h"
#include "cache_line.h"

namespace outrider {
namespace {

// The lines of a page's keys or values, of the heads that are computed at once.
class Lines {
 public:
  Lines() = default;

  // stored: of all pages. row_bytes: of a position of a head. steps: in bytes.
  Lines(
      const void* stored, int64_t page, int64_t row_bytes, PageSteps steps, int64_t key_head, const Attention& attention)
      : run_(static_cast<const char*>(stored) + page * attention.num_key_heads * kPageLen * row_bytes +
             key_head * steps.head) {
    const bool has_rows_together = steps.row == row_bytes;
    step_ = has_rows_together ? steps.head : steps.row;
    num_runs_ = has_rows_together ? attention.heads_together : kPageLen;
    run_bytes_ = row_bytes * (has_rows_together ? kPageLen : attention.heads_together);
    // Runs without gaps are one.
    if (run_bytes_ == step_) run_bytes_ *= std::exchange(num_runs_, 1);
  }

  bool is_wanted() const { return num_runs_ > 0; }

  // Fetches the next lines: so many bytes of them, and what is left of earlier calls.
  void fetch(int64_t num_bytes) {
    due_bytes_ += num_bytes;
    while (due_bytes_ >= kLineBytes && num_runs_ > 0) {
      _mm_prefetch(run_ + byte_, _MM_HINT_T1);
      due_bytes_ -= kLineBytes;
      byte_ += kLineBytes;
      if (byte_ < run_bytes_) continue;
      byte_ = 0;
      run_ += step_;
      --num_runs_;
    }
  }

 private:
  const char* run_ = nullptr;
  int64_t step_ = 0;
  int64_t run_bytes_ = 0;
  int64_t num_runs_ = 0;
  int64_t byte_ = 0;
  int64_t due_bytes_ = 0;
};

// Fetches the page that is read next, as many bytes at a time as are read of this one: of many lines at once a core drops
// those for which it has no place.
struct Fetcher {
  Lines keys;
  Lines values;

  Fetcher() = default;

  Fetcher(const Attention& attention, int64_t page, int64_t key_head) {
    const auto lines = [&](const void* stored, int64_t row_len, PageSteps steps, int64_t item) {
      return Lines(stored, page, row_len * item, {steps.head * item, steps.row * item}, key_head, attention);
    };
    keys = lines(attention.keys, attention.key_cells, attention.key_steps, sizeof(uint32_t));
    values = lines(attention.values, attention.value_dim, attention.value_steps, value_bytes(attention));
  }
};

}  // namespace
}  // namespace outrider
