// The product's loops, for any instruction set: `Isa` says how 16 columns are loaded, and how they are added up.
//
// Each output is one chain of additions in order of k, which no tile, block or thread splits: its bits depend on its
// row and its weights alone. Of a pair of inputs (k, k + 1) the odd one is added first, and additions are fused, as in
// VDPBF16PS. Subnormal numbers count as zero, as they do for that instruction.
//
// Everything here has internal linkage: each file that includes it is compiled for another instruction set, and a
// function that two of them shared would be taken from either.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cache_line.h"
#include "no_subnormals.h"
#include "product.h"

namespace outrider {
namespace {

constexpr int kMostBlocks = 8;
// Pairs whose weights stay in the innermost cache while all rows of a panel pass over them.
constexpr int64_t kPairsAtOnce = 288;
constexpr int64_t kRowsAtOnce = 64;
// Lines that are fetched ahead of a single pass: the CPU's own fetching stops at the end of each memory page.
constexpr int64_t kLinesAhead = 24;

// Weights that are fetched while other ones are used: a line for every pair, of up to two streams.
struct Ahead {
  const uint32_t* first;
  int64_t first_step;
  const uint32_t* second;
  int64_t second_step;
};

// The numbers of inputs k and k + 1 in float32. Of a type that only this file has, so that its vector's functions are
// not shared either.
struct WidePair {
  float even, odd;
};

// Rows from `row` on, as the instruction set reads them.
template <class Isa>
inline auto rows_from(const Product& product, int64_t row) {
  if constexpr (Isa::kWidensRows) {
    return static_cast<const WidePair*>(product.wide_rows) + row * product.num_pairs;
  } else {
    return product.rows + row * product.num_pairs;
  }
}

// Writes the numbers of rows in float32: each is needed once for every block of weights. The memory is this thread's, and
// kept for the next call.
inline const WidePair* widened_rows(const Product& product) {
  thread_local std::vector<WidePair> memory;
  const size_t num = product.num_rows * product.num_pairs;
  if (memory.size() < num) memory.resize(num);
  for (size_t at = 0; at < num; ++at) {
    const uint32_t pair = product.rows[at];
    memory[at] = {std::bit_cast<float>(pair << 16), std::bit_cast<float>(pair & 0xffff0000u)};
  }
  return memory.data();
}

// Adds the bias, rounds to the nearest bfloat16 (ties to even) and writes the columns that there are.
template <class Isa>
inline void store_columns(const Product& product, int64_t row, int64_t block, typename Isa::Sum sum) {
  const int64_t first = block * kColumns;
  const int64_t num = std::min(kColumns, product.num_columns - first);
  alignas(32) uint16_t columns[kColumns] = {};
  if (product.bias != nullptr) {
    std::memcpy(columns, product.bias + first, num * sizeof(uint16_t));
    sum = Isa::plus(sum, Isa::widened(columns));
  }
  uint16_t* output = product.output + row * product.num_columns + first;
  if (num == kColumns) {
    Isa::round(output, sum);
  } else {
    Isa::round(columns, sum);
    std::memcpy(output, columns, num * sizeof(uint16_t));
  }
}

// Adds the pairs [first, last) of ROWS rows times BLOCKS blocks; `fetch` is called with each pair.
template <class Isa, int ROWS, int BLOCKS, class Fetch>
inline void add_pairs(
    const Product& product, int64_t row, int64_t block, int64_t first, int64_t last,
    typename Isa::Sum (&sums)[ROWS][BLOCKS], const Fetch& fetch) {
  const auto* rows = rows_from<Isa>(product, row);
  const uint32_t* weights = product.weights + block * product.num_pairs * kColumns;
  const int64_t next_block = product.num_pairs * kColumns;
  for (int64_t pair = first; pair < last; ++pair) {
    typename Isa::Weights loaded[BLOCKS];
    for (int b = 0; b < BLOCKS; ++b) loaded[b] = Isa::load(weights + b * next_block + pair * kColumns);
    fetch(pair);
    for (int r = 0; r < ROWS; ++r) {
      const typename Isa::Pair inputs = Isa::spread(rows[r * product.num_pairs + pair]);
      for (int b = 0; b < BLOCKS; ++b) Isa::add(sums[r][b], inputs, loaded[b]);
    }
  }
}

inline void fetch_line(const void* address) { _mm_prefetch(static_cast<const char*>(address), _MM_HINT_T0); }

// All pairs at once, for few rows: the time goes into reading the weights.
template <class Isa, int ROWS, int BLOCKS>
inline void product_tile(const Product& product, int64_t block) {
  typename Isa::Sum sums[ROWS][BLOCKS];
  for (auto& row : sums)
    for (auto& sum : row) sum = Isa::zero();
  constexpr int64_t kAhead = kLinesAhead * kLineBytes / sizeof(uint32_t);
  const uint32_t* ahead = product.weights + block * product.num_pairs * kColumns + kAhead;
  const int64_t next_block = product.num_pairs * kColumns;
  add_pairs<Isa, ROWS, BLOCKS>(product, 0, block, 0, product.num_pairs, sums, [&](int64_t pair) {
    for (int b = 0; b < BLOCKS; ++b) fetch_line(ahead + b * next_block + pair * kColumns);
  });
  for (int r = 0; r < ROWS; ++r)
    for (int b = 0; b < BLOCKS; ++b) store_columns<Isa>(product, r, block + b, sums[r][b]);
}

// Blocks of a tile of so many rows: as many as the registers hold, with their sums and weights.
template <class Isa, int ROWS>
constexpr int blocks_of_tile() {
  constexpr int free = Isa::kRegisters - Isa::kPairRegisters;
  return std::clamp(free / (ROWS * Isa::kSumRegisters + Isa::kWeightRegisters), 1, kMostBlocks);
}

// ROWS rows are all there are.
template <class Isa, int ROWS>
inline void product_few(const Product& product, int64_t begin, int64_t end) {
  if (product.num_rows == ROWS) {
    constexpr int kBlocks = blocks_of_tile<Isa, ROWS>();
    int64_t block = begin;
    for (; block + kBlocks <= end; block += kBlocks) product_tile<Isa, ROWS, kBlocks>(product, block);
    for (; block < end; ++block) product_tile<Isa, ROWS, 1>(product, block);
  } else if constexpr (ROWS > 1) {
    product_few<Isa, ROWS - 1>(product, begin, end);
  }
}

// Adds some pairs of a band of rows to the sums of its panel, which are stored in between.
template <class Isa, int ROWS, int BLOCKS>
inline void product_band(
    const Product& product, int64_t row, int64_t num_rows, int64_t block, int64_t first, int64_t last, float* panel,
    const Ahead& ahead) {
  if (num_rows == ROWS) {
    typename Isa::Sum sums[ROWS][BLOCKS];
    for (int r = 0; r < ROWS; ++r)
      for (int b = 0; b < BLOCKS; ++b) {
        sums[r][b] = first == 0 ? Isa::zero() : Isa::read(panel + (r * BLOCKS + b) * kColumns);
      }
    add_pairs<Isa, ROWS, BLOCKS>(product, row, block, first, last, sums, [&](int64_t pair) {
      fetch_line(ahead.first + (pair - first) * ahead.first_step);
      fetch_line(ahead.second + (pair - first) * ahead.second_step);
    });
    for (int r = 0; r < ROWS; ++r)
      for (int b = 0; b < BLOCKS; ++b) {
        if (last == product.num_pairs) {
          store_columns<Isa>(product, row + r, block + b, sums[r][b]);
        } else {
          Isa::store(panel + (r * BLOCKS + b) * kColumns, sums[r][b]);
        }
      }
  } else if constexpr (ROWS > 1) {
    product_band<Isa, ROWS - 1, BLOCKS>(product, row, num_rows, block, first, last, panel, ahead);
  }
}

// The rows of a panel pass over a group of blocks part by part, each part from the innermost cache, while the next part
// is fetched.
template <class Isa, int BLOCKS>
inline void product_group(const Product& product, int64_t block, int64_t end) {
  alignas(64) float panel[kRowsAtOnce * BLOCKS * kColumns];
  const int64_t num_bands = (product.num_rows + Isa::kRows - 1) / Isa::kRows;
  for (int64_t first = 0; first < product.num_pairs; first += kPairsAtOnce) {
    const int64_t last = std::min(first + kPairsAtOnce, product.num_pairs);
    const bool is_last = last == product.num_pairs;
    const int64_t next_block = is_last ? block + BLOCKS : block;
    for (int64_t band = 0; band < num_bands; ++band) {
      const int64_t row = band * Isa::kRows;
      // The first bands fetch one or two blocks each of the next part.
      const int64_t each = num_bands >= BLOCKS ? 1 : 2;
      const auto part = [&](int64_t number) {
        return product.weights + ((next_block + number) * product.num_pairs + (is_last ? 0 : last)) * kColumns;
      };
      const auto exists = [&](int64_t number) { return number < BLOCKS && next_block + number < end; };
      const int64_t one = band * each, other = one + 1;
      const bool has_one = exists(one), has_other = each == 2 && exists(other);
      const uint32_t* none = product.weights;
      const Ahead ahead{
          has_one ? part(one) : none, has_one ? kColumns : 0, has_other ? part(other) : none, has_other ? kColumns : 0};
      float* sums = panel + band * Isa::kRows * BLOCKS * kColumns;
      const int64_t num = std::min<int64_t>(Isa::kRows, product.num_rows - row);
      product_band<Isa, Isa::kRows, BLOCKS>(product, row, num, block, first, last, sums, ahead);
    }
  }
}

template <class Isa>
inline void product_panel(const Product& product, int64_t begin, int64_t end) {
  if (product.num_rows <= Isa::kRows) {
    product_few<Isa, Isa::kRows>(product, begin, end);
    return;
  }
  constexpr int kGroup = blocks_of_tile<Isa, Isa::kRows>();
  int64_t block = begin;
  for (; block + kGroup <= end; block += kGroup) product_group<Isa, kGroup>(product, block, end);
  for (; block < end; ++block) product_group<Isa, 1>(product, block, end);
}

template <class Isa>
inline void product_cells(const Product& product, int64_t begin, int64_t end) {
  for (int64_t row = 0; row < product.num_rows; row += kRowsAtOnce) {
    Product panel = product;
    panel.rows += row * product.num_pairs;
    panel.output += row * product.num_columns;
    panel.num_rows = std::min(kRowsAtOnce, product.num_rows - row);
    if constexpr (Isa::kWidensRows) panel.wide_rows = widened_rows(panel);
    product_panel<Isa>(panel, begin, end);
  }
}

template <class Isa>
inline void product_rows(const Product& product, int64_t begin, int64_t end) {
  const NoSubnormals guard;
  product_cells<Isa>(product, begin, end);
}

}  // namespace
}  // namespace outrider
