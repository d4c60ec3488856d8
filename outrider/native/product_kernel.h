// The product's loops, for any instruction set: `Isa` says how 16 columns are loaded, and how they are added up: a pair
// in kSteps steps. Rows are taken in bands of up to kRows.
//
// With kInRegisters all bands pass over a block before the next one, with weights that are used as they are expanded.
// Without, up to kFewRows rows take them from memory of a segment's size, and more from memory that stays in the
// innermost cache while all bands pass over it. A tile then has up to kMostBlocks blocks: more would read from more
// places at once than the CPU fetches well.
//
// kLinesAhead lines of each block are fetched ahead: the CPU's own fetching stops at the end of each memory page.
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
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cache_line.h"
#include "input_pair.h"
#include "no_subnormals.h"
#include "product.h"

namespace outrider {
namespace {

// Bytes of weights that stay in the innermost cache while all rows of a panel pass over them.
constexpr int64_t kPartBytes = 12 << 10;
constexpr int64_t kRowsAtOnce = 64;

// Lines of weights that are fetched while other ones are used: one for every pair.
struct Ahead {
  const uint8_t* lines;
  int64_t num;
};

// Rows are split into bands of at most `Isa::kRows`, of like sizes: few rows wait for their own additions.
template <class Isa>
inline int64_t num_bands(const Product& product) {
  return (product.num_rows + Isa::kRows - 1) / Isa::kRows;
}

// The first row of a band; that of the one after the last is the number of rows.
template <class Isa>
inline int64_t band_start(const Product& product, int64_t band) {
  return band * product.num_rows / num_bands<Isa>(product);
}

// A pair of a row's inputs, as the instruction set reads it.
template <class Isa>
using Input = std::conditional_t<Isa::kWidensRows, WidePair, StoredPair>;

// Writes the pairs of rows, in float32 where the instruction set needs that: each is read once for every block of
// weights. Those of a band lie pair by pair, row by row, so that all are at one address and constant steps from it. The
// memory is this thread's, and kept for the next call.
template <class Isa>
inline const Input<Isa>* laid_out_rows(const Product& product) {
  thread_local std::vector<Input<Isa>> memory;
  const size_t num = product.num_rows * product.num_pairs;
  if (memory.size() < num) memory.resize(num);
  for (int64_t band = 0; band < num_bands<Isa>(product); ++band) {
    const int64_t first = band_start<Isa>(product, band), num_rows = band_start<Isa>(product, band + 1) - first;
    const uint32_t* from = product.rows + first * product.num_pairs;
    Input<Isa>* to = memory.data() + first * product.num_pairs;
    int64_t begun = 0;
    if constexpr (!Isa::kWidensRows) {
      for (; num_rows == Isa::kTransposed && begun + 8 <= product.num_pairs; begun += 8) {
        Isa::transpose(from + begun, product.num_pairs, [&](int64_t number, const typename Isa::Lanes& lanes) {
          std::memcpy(to + (begun + number) * Isa::kTransposed, &lanes, sizeof(lanes));
        });
      }
    }
    for (int64_t row = 0; row < num_rows; ++row)
      for (int64_t pair = begun; pair < product.num_pairs; ++pair) {
        const uint32_t given = from[row * product.num_pairs + pair];
        if constexpr (Isa::kWidensRows) {
          to[pair * num_rows + row] = widened(given);
        } else {
          to[pair * num_rows + row] = {given};
        }
      }
  }
  return memory.data();
}

// The pairs, from `first` on, of a band of ROWS rows that begins with `row`.
template <class Isa, int ROWS>
class Inputs {
 public:
  Inputs(const Product& product, int64_t row, int64_t first)
      : pairs_(static_cast<const Input<Isa>*>(product.laid_out_rows) + row * product.num_pairs + first * ROWS) {}

  auto at(int64_t row, int64_t pair) const {
    if constexpr (Isa::kWidensRows) {
      return pairs_[pair * ROWS + row];
    } else {
      return pairs_[pair * ROWS + row].both;
    }
  }

 private:
  const Input<Isa>* pairs_;
};

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

// Where a segment is stored.
inline const uint8_t* stored_segment(const PackedWeight& weight, int64_t block, int64_t segment) {
  return weight.lines + static_cast<int64_t>(weight.places[block * weight.num_segments + segment] >> 1) * kLineBytes;
}

inline bool is_compressed(const PackedWeight& weight, int64_t block, int64_t segment) {
  return (weight.places[block * weight.num_segments + segment] & 1) != 0;
}

// The cells of a segment, [pairs, kColumns]: those that are stored, else `memory` with the expanded ones.
template <class Isa>
inline const uint32_t* segment_cells(const PackedWeight& weight, int64_t block, int64_t segment, uint32_t* memory) {
  const uint8_t* stored = stored_segment(weight, block, segment);
  if (!is_compressed(weight, block, segment)) return reinterpret_cast<const uint32_t*>(stored);
  Isa::expand(stored, weight.upper_bytes, [&](int64_t pair, typename Isa::Cells cells) {
    Isa::store_cells(memory + pair * kColumns, cells);
  });
  return memory;
}

// Adds `num_pairs` pairs of the inputs of ROWS rows times BLOCKS blocks. With the number of a pair, `weights` returns
// where those of a block are; for each of the first `num_fetched` pairs `fetch` is called.
//
// The loops over rows and blocks are unrolled before the compiler decides what stays in registers; after that it would
// write sums of two halves to memory with each pair.
template <class Isa, int ROWS, int BLOCKS, class Weights, class Fetch>
inline void add_pairs(
    const Inputs<Isa, ROWS>& inputs, int64_t num_pairs, typename Isa::Sum (&sums)[ROWS][BLOCKS], const Weights& weights,
    int64_t num_fetched, const Fetch& fetch) {
  // Copied, so that the compiler keeps them in registers.
  typename Isa::Sum own[ROWS][BLOCKS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
    for (int b = 0; b < BLOCKS; ++b) own[r][b] = sums[r][b];
  const auto add = [&](int64_t pair) {
#pragma GCC unroll 2
    for (int step = 0; step < Isa::kSteps; ++step) {
      decltype(Isa::load(weights(pair, 0), step)) loaded[BLOCKS];
#pragma GCC unroll 16
      for (int b = 0; b < BLOCKS; ++b) loaded[b] = Isa::load(weights(pair, b), step);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        const auto input = Isa::spread(inputs.at(r, pair), step);
#pragma GCC unroll 16
        for (int b = 0; b < BLOCKS; ++b) Isa::add(own[r][b], input, loaded[b]);
      }
    }
  };
  int64_t pair = 0;
  for (; pair < std::min(num_fetched, num_pairs); ++pair) {
    fetch(pair);
    add(pair);
  }
#pragma GCC unroll 2
  for (; pair < num_pairs; ++pair) add(pair);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
    for (int b = 0; b < BLOCKS; ++b) sums[r][b] = own[r][b];
}

inline void fetch_line(const void* address) { _mm_prefetch(static_cast<const char*>(address), _MM_HINT_T0); }

// All pairs of a block and a band of rows. A function of its own: inlined beside those of other numbers of rows, it would
// have some of its sums in memory.
template <class Isa, int ROWS>
[[gnu::noinline]] void product_block(const Product& product, int64_t row, int64_t block, int64_t num_lines_ahead) {
  typename Isa::Sum sums[ROWS];
  for (auto& sum : sums) sum = Isa::zero();
  for (int64_t segment = 0; segment < product.weight.num_segments; ++segment) {
    const int64_t first = segment * kSegmentPairs, num = std::min(kSegmentPairs, product.num_pairs - first);
    const Inputs<Isa, ROWS> inputs(product, row, first);
    const auto add = [&](int64_t pair, typename Isa::Cells cells) {
      const auto weights = Isa::split(cells);
#pragma GCC unroll 2
      for (int step = 0; step < Isa::kSteps; ++step)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
          Isa::add(sums[r], Isa::spread(inputs.at(r, pair), step), Isa::load(weights, step));
        }
    };
    const uint8_t* stored = stored_segment(product.weight, block, segment);
    const uint8_t* ahead = stored + num_lines_ahead * kLineBytes;
    if (is_compressed(product.weight, block, segment)) {
      Isa::expand(stored, product.weight.upper_bytes, [&](int64_t pair, typename Isa::Cells cells) {
        // Three lines hold four pairs.
        if (pair % 4 != 3) fetch_line(ahead + (pair / 4 * 3 + pair % 4) * kLineBytes);
        add(pair, cells);
      });
      continue;
    }
    const auto* cells = reinterpret_cast<const uint32_t*>(stored);
    for (int64_t pair = 0; pair < num; ++pair) {
      fetch_line(ahead + pair * kLineBytes);
      add(pair, Isa::cells(cells + pair * kColumns));
    }
  }
  for (int r = 0; r < ROWS; ++r) store_columns<Isa>(product, row + r, block, sums[r]);
}

// A block and a band of up to ROWS rows.
template <class Isa, int ROWS>
inline void block_of_band(
    const Product& product, int64_t row, int64_t num_rows, int64_t block, int64_t num_lines_ahead) {
  if (num_rows == ROWS) {
    product_block<Isa, ROWS>(product, row, block, num_lines_ahead);
  } else if constexpr (ROWS > 1) {
    block_of_band<Isa, ROWS - 1>(product, row, num_rows, block, num_lines_ahead);
  }
}

// All bands pass over a block before the next one: those after the first have it in their caches.
template <class Isa>
inline void product_in_registers(const Product& product, int64_t begin, int64_t end) {
  const int64_t bands = num_bands<Isa>(product);
  for (int64_t block = begin; block < end; ++block)
    for (int64_t band = 0; band < bands; ++band) {
      const int64_t row = band_start<Isa>(product, band), num_rows = band_start<Isa>(product, band + 1) - row;
      block_of_band<Isa, Isa::kRows>(product, row, num_rows, block, band == 0 ? Isa::kLinesAhead : 0);
    }
}

// All pairs of some blocks at once, from memory where those of a segment are expanded.
template <class Isa, int ROWS, int BLOCKS>
inline void product_tile(const Product& product, int64_t block) {
  typename Isa::Sum sums[ROWS][BLOCKS];
  for (auto& row : sums)
    for (auto& sum : row) sum = Isa::zero();
  alignas(kLineBytes) uint32_t memory[BLOCKS][kSegmentCells];
  for (int64_t segment = 0; segment < product.weight.num_segments; ++segment) {
    const uint32_t* cells[BLOCKS];
    const uint8_t* ahead[BLOCKS];
    for (int b = 0; b < BLOCKS; ++b) {
      cells[b] = segment_cells<Isa>(product.weight, block + b, segment, memory[b]);
      ahead[b] = stored_segment(product.weight, block + b, segment) + Isa::kLinesAhead * kLineBytes;
    }
    const int64_t first = segment * kSegmentPairs, num = std::min(kSegmentPairs, product.num_pairs - first);
    const Inputs<Isa, ROWS> inputs(product, 0, first);
    const auto weights = [&](int64_t pair, int b) { return cells[b] + pair * kColumns; };
    add_pairs<Isa, ROWS, BLOCKS>(inputs, num, sums, weights, kCompressedLines, [&](int64_t pair) {
      for (int b = 0; b < BLOCKS; ++b) fetch_line(ahead[b] + pair * kLineBytes);
    });
  }
  for (int r = 0; r < ROWS; ++r)
    for (int b = 0; b < BLOCKS; ++b) store_columns<Isa>(product, r, block + b, sums[r][b]);
}

// Blocks of a tile of so many rows: as many as the registers hold, with their sums and weights.
template <class Isa, int ROWS>
constexpr int blocks_of_tile() {
  constexpr int free = Isa::kRegisters - Isa::kPairRegisters;
  return std::clamp(free / (ROWS * Isa::kSumRegisters + Isa::kWeightRegisters), 1, Isa::kMostBlocks);
}

// Blocks [block, end), BLOCKS at a time, and the last ones by half as many: a single one waits for its own additions.
template <class Isa, int ROWS, int BLOCKS>
inline void product_blocks(const Product& product, int64_t block, int64_t end) {
  for (; block + BLOCKS <= end; block += BLOCKS) product_tile<Isa, ROWS, BLOCKS>(product, block);
  if constexpr (BLOCKS > 1) product_blocks<Isa, ROWS, BLOCKS / 2>(product, block, end);
}

// ROWS rows are all there are: the time goes into reading the weights.
template <class Isa, int ROWS>
inline void product_few(const Product& product, int64_t begin, int64_t end) {
  if (product.num_rows == ROWS) {
    product_blocks<Isa, ROWS, blocks_of_tile<Isa, ROWS>()>(product, begin, end);
  } else if constexpr (ROWS > 1) {
    product_few<Isa, ROWS - 1>(product, begin, end);
  }
}

// Weights of a group of blocks for a part of the inputs.
template <class Isa, int BLOCKS>
struct Part {
  using Weights = typename Isa::Weights;

  static constexpr int64_t kSegmentBytes = BLOCKS * kSegmentPairs * sizeof(Weights);
  static constexpr int64_t kSegments = std::max<int64_t>(1, kPartBytes / kSegmentBytes);
  static constexpr int64_t kPairs = kSegments * kSegmentPairs;

  Weights weights[kPairs][BLOCKS];

  // Takes the weights of some segments of a block.
  void read(const PackedWeight& weight, int64_t block, int64_t segment, int64_t num_pairs, int number) {
    for (int64_t first = 0; first < num_pairs; first += kSegmentPairs, ++segment) {
      const uint8_t* stored = stored_segment(weight, block, segment);
      Weights(*own)[BLOCKS] = weights + first;
      if (is_compressed(weight, block, segment)) {
        Isa::expand(stored, weight.upper_bytes, [&](int64_t pair, typename Isa::Cells cells) {
          own[pair][number] = Isa::split(cells);
        });
        continue;
      }
      const auto* cells = reinterpret_cast<const uint32_t*>(stored);
      for (int64_t pair = 0; pair < std::min(kSegmentPairs, num_pairs - first); ++pair) {
        own[pair][number] = Isa::split(Isa::cells(cells + pair * kColumns));
      }
    }
  }
};

// Adds pairs, from `first` on, of a band of rows to the sums of its panel, which are stored in between.
template <class Isa, int ROWS, int BLOCKS>
inline void product_band(
    const Product& product, int64_t row, int64_t num_rows, int64_t block, int64_t first, int64_t num_pairs,
    const Part<Isa, BLOCKS>& part, float* panel, const Ahead (&ahead)[2]) {
  if (num_rows == ROWS) {
    typename Isa::Sum sums[ROWS][BLOCKS];
    for (int r = 0; r < ROWS; ++r)
      for (int b = 0; b < BLOCKS; ++b) {
        sums[r][b] = first == 0 ? Isa::zero() : Isa::read(panel + (r * BLOCKS + b) * kColumns);
      }
    const auto weights = [&](int64_t pair, int b) -> const auto& { return part.weights[pair][b]; };
    const Inputs<Isa, ROWS> inputs(product, row, first);
    const int64_t num_fetched = std::max(ahead[0].num, ahead[1].num);
    add_pairs<Isa, ROWS, BLOCKS>(inputs, num_pairs, sums, weights, num_fetched, [&](int64_t pair) {
      for (const Ahead& each : ahead) {
        if (pair < each.num) fetch_line(each.lines + pair * kLineBytes);
      }
    });
    for (int r = 0; r < ROWS; ++r)
      for (int b = 0; b < BLOCKS; ++b) {
        if (first + num_pairs == product.num_pairs) {
          store_columns<Isa>(product, row + r, block + b, sums[r][b]);
        } else {
          Isa::store(panel + (r * BLOCKS + b) * kColumns, sums[r][b]);
        }
      }
  } else if constexpr (ROWS > 1) {
    product_band<Isa, ROWS - 1, BLOCKS>(product, row, num_rows, block, first, num_pairs, part, panel, ahead);
  }
}

// The rows of a panel pass over a group of blocks part by part, each part from the innermost cache, while the next part
// is fetched.
template <class Isa, int BLOCKS>
inline void product_group(const Product& product, int64_t block, int64_t end) {
  alignas(kLineBytes) float panel[kRowsAtOnce * BLOCKS * kColumns];
  alignas(kLineBytes) Part<Isa, BLOCKS> part;
  const PackedWeight& weight = product.weight;
  const int64_t bands = num_bands<Isa>(product);
  for (int64_t first = 0; first < product.num_pairs; first += part.kPairs) {
    const int64_t num_pairs = std::min(part.kPairs, product.num_pairs - first), last = first + num_pairs;
    for (int b = 0; b < BLOCKS; ++b) part.read(weight, block + b, first / kSegmentPairs, num_pairs, b);
    const bool is_last = last == product.num_pairs;
    const int64_t next_block = is_last ? block + BLOCKS : block, next_segment = is_last ? 0 : last / kSegmentPairs;
    for (int64_t band = 0; band < bands; ++band) {
      const int64_t row = band_start<Isa>(product, band);
      // The first bands fetch one or two blocks each of the next part; if there is one block, each fetches its share.
      const int64_t each = bands >= BLOCKS ? 1 : 2;
      const int64_t num_lines = part.kSegments * kCompressedLines;
      const int64_t from = BLOCKS == 1 ? num_lines * band / bands : 0;
      const int64_t to = BLOCKS == 1 ? num_lines * (band + 1) / bands : num_lines;
      const auto next = [&](int64_t number) -> Ahead {
        if (number >= BLOCKS || next_block + number >= end) return {nullptr, 0};
        return {stored_segment(weight, next_block + number, next_segment) + from * kLineBytes, to - from};
      };
      const Ahead ahead[] = {
          next(BLOCKS == 1 ? 0 : band * each), each == 2 ? next(band * each + 1) : Ahead{nullptr, 0}};
      const int64_t num_rows = band_start<Isa>(product, band + 1) - row;
      float* sums = panel + row * BLOCKS * kColumns;
      product_band<Isa, Isa::kRows, BLOCKS>(product, row, num_rows, block, first, num_pairs, part, sums, ahead);
    }
  }
}

template <class Isa>
inline void product_panel(const Product& product, int64_t begin, int64_t end) {
  if (product.num_rows <= Isa::kFewRows) {
    product_few<Isa, Isa::kFewRows>(product, begin, end);
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
    panel.laid_out_rows = laid_out_rows<Isa>(panel);
    if constexpr (Isa::kInRegisters) {
      product_in_registers<Isa>(panel, begin, end);
    } else {
      product_panel<Isa>(panel, begin, end);
    }
  }
}

template <class Isa>
inline void product_rows(const Product& product, int64_t begin, int64_t end) {
  const NoSubnormals guard;
  product_cells<Isa>(product, begin, end);
}

}  // namespace
}  // namespace outrider
