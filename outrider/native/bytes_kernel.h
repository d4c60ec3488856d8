// The loops of a product in 8 bits: `Isa` says how a quad of inputs is added to 16 sums, in one or several parts of
// `kSpreadBytes` each.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "bytes.h"
#include "cache_line.h"

namespace outrider {
namespace {

// What is broadcast of a row at once.
constexpr int64_t kSpreadBytes = 4;
constexpr int kMostByteBlocks = 8;
// Lines that are fetched ahead: the CPU's own fetching stops at the end of each memory page.
constexpr int64_t kByteLinesAhead = 24;

// Scales, adds the bias, rounds and writes the columns that there are.
template <class Isa>
inline void store_byte_sums(const ByteProduct& product, int64_t row, int64_t block, typename Isa::Integers sums) {
  const int64_t first = block * kByteColumns, num = std::min(kByteColumns, product.num_columns - first);
  alignas(32) uint16_t columns[kByteColumns] = {};
  if (product.bias != nullptr) std::memcpy(columns, product.bias + first, num * sizeof(uint16_t));
  const auto values = Isa::scaled(sums, product.offsets[row], product.row_scales[row], product.scales + first);
  uint16_t* output = product.output + row * product.num_columns + first;
  uint16_t* to = num == kByteColumns ? output : columns;
  Isa::round(to, product.bias == nullptr ? values : Isa::plus(values, Isa::widened(columns)));
  if (to == columns) std::memcpy(output, columns, num * sizeof(uint16_t));
}

// A function of its own, and loops that are unrolled before the compiler decides what stays in registers: else some of
// the sums go to memory and back for every quad.
template <class Isa, int ROWS, int BLOCKS>
[[gnu::noinline]] void byte_tile(const ByteProduct& product, int64_t row, int64_t block) {
  typename Isa::Integers sums[ROWS][BLOCKS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; ++b) sums[r][b] = Isa::none();
  const int64_t row_bytes = product.num_quads * Isa::kParts * kSpreadBytes, block_bytes = product.num_quads * kLineBytes;
  const int8_t* rows = product.rows + row * row_bytes;
  const uint8_t* weights = product.weights + block * block_bytes;
  for (int64_t quad = 0; quad < product.num_quads; ++quad) {
    const uint8_t* lines = weights + quad * kLineBytes;
    // Behind the end of a block is the next one, which is read already, but for the last.
    const bool is_beyond = quad + kByteLinesAhead >= product.num_quads;
    const uint8_t* ahead = lines + kByteLinesAhead * kLineBytes + (is_beyond ? (BLOCKS - 1) * block_bytes : 0);
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; ++b) _mm_prefetch(reinterpret_cast<const char*>(ahead + b * block_bytes), _MM_HINT_T0);
#pragma GCC unroll 2
    for (int part = 0; part < Isa::kParts; ++part) {
      typename Isa::Quads loaded[BLOCKS];
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; ++b) loaded[b] = Isa::load(lines + b * block_bytes, part);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const auto inputs = Isa::spread(rows + r * row_bytes + (quad * Isa::kParts + part) * kSpreadBytes);
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) Isa::add(sums[r][b], loaded[b], inputs);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; ++b) store_byte_sums<Isa>(product, row + r, block + b, sums[r][b]);
}

// Blocks of a tile of so many rows: as many as the registers hold, with their sums and weights.
template <class Isa, int ROWS>
constexpr int byte_blocks() {
  constexpr int free = Isa::kRegisters - Isa::kInputRegisters;
  return std::clamp(free / (ROWS * Isa::kSumRegisters + Isa::kWeightRegisters), 1, kMostByteBlocks);
}

// ROWS rows from `row` on are all that are left.
template <class Isa, int ROWS, int BLOCKS>
inline void byte_band(const ByteProduct& product, int64_t row, int64_t num_rows, int64_t block) {
  if (num_rows == ROWS) {
    byte_tile<Isa, ROWS, BLOCKS>(product, row, block);
  } else if constexpr (ROWS > 1) {
    byte_band<Isa, ROWS - 1, BLOCKS>(product, row, num_rows, block);
  }
}

// All rows are of one tile: as wide as the registers allow.
template <class Isa, int ROWS>
inline void byte_few(const ByteProduct& product, int64_t begin, int64_t end) {
  if (product.num_rows == ROWS) {
    constexpr int kBlocks = byte_blocks<Isa, ROWS>();
    int64_t block = begin;
    for (; block + kBlocks <= end; block += kBlocks) byte_tile<Isa, ROWS, kBlocks>(product, 0, block);
    for (; block < end; ++block) byte_tile<Isa, ROWS, 1>(product, 0, block);
  } else if constexpr (ROWS > 1) {
    byte_few<Isa, ROWS - 1>(product, begin, end);
  }
}

template <class Isa>
inline void byte_product(const ByteProduct& product, int64_t begin, int64_t end) {
  if (product.num_rows <= Isa::kRows) {
    byte_few<Isa, Isa::kRows>(product, begin, end);
    return;
  }
  // A group of blocks stays in the inner caches while all rows pass over it.
  constexpr int kGroup = byte_blocks<Isa, Isa::kRows>();
  for (int64_t block = begin; block < end;) {
    const bool is_whole = block + kGroup <= end;
    for (int64_t row = 0; row < product.num_rows; row += Isa::kRows) {
      const int64_t num = std::min<int64_t>(Isa::kRows, product.num_rows - row);
      if (is_whole) {
        byte_band<Isa, Isa::kRows, kGroup>(product, row, num, block);
      } else {
        byte_band<Isa, Isa::kRows, 1>(product, row, num, block);
      }
    }
    block += is_whole ? kGroup : 1;
  }
}

}  // namespace
}  // namespace outrider
