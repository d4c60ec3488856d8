// The innermost loops of attention, for any instruction set: scores of queries, and weighted sums of values.

#pragma once

#include <cstdint>
#include <cstring>

#include "attention_space.h"

namespace outrider {
namespace {

// How scores read keys and queries, of which each cell is kept as `kNumbers` cells, one after the other: pairs of
// bfloat16 numbers as they are stored.
template <class Isa>
struct Pairs {
  static constexpr int64_t kNumbers = 1;
  using Vector = typename Isa::Vector;

  static void keep(uint32_t cell, uint32_t* kept, int64_t) { *kept = cell; }
  // The same of one cell of some keys.
  static void keep_lanes(const typename Isa::Lanes& cells, uint32_t* kept, int64_t) { Isa::store_lanes(kept, cells); }
  static auto load(const uint32_t* cells) { return Isa::load(cells, 0); }
  static auto spread(uint32_t cell) { return Isa::spread(cell, 0); }
  static void add(auto& sum, const auto& query, const auto& keys) { Isa::add(sum, query, keys); }
};

// float32 numbers.
template <class Isa>
struct Singles : Pairs<Isa> {
  using Vector = typename Isa::Vector;

  static auto load(const uint32_t* cells) { return Vector::read(reinterpret_cast<const float*>(cells)); }
  static auto spread(uint32_t cell) {
    float value;
    std::memcpy(&value, &cell, sizeof value);
    return Vector::spread_float(value);
  }
  static void add(auto& sum, const auto& query, const auto& keys) { sum = Vector::fused(query, keys, sum); }
};

// Pairs, widened to float32 once for all queries; of each the odd number comes first.
template <class Isa>
struct WidenedPairs : Singles<Isa> {
  static constexpr int64_t kNumbers = 2;

  static void keep(uint32_t cell, uint32_t* kept, int64_t step) {
    kept[0] = cell & 0xffff0000u;
    kept[step] = cell << 16;
  }
  static void keep_lanes(const typename Isa::Lanes& cells, uint32_t* kept, int64_t step) {
    Isa::store_lanes(kept, Isa::odd(cells));
    Isa::store_lanes(kept + step, Isa::even(cells));
  }
};

// Adds to each sum the product of its row's number and its vector: sums, and all numbers or all vectors, whichever are
// fewer, are in registers.
template <int ROWS, int VECTORS>
inline void add_products(auto& sums, const auto& number, const auto& vector, const auto& add) {
  if constexpr (ROWS < VECTORS) {
    decltype(number(0)) numbers[ROWS];
    for (int r = 0; r < ROWS; ++r) numbers[r] = number(r);
    for (int v = 0; v < VECTORS; ++v) {
      const auto loaded = vector(v);
      for (int r = 0; r < ROWS; ++r) add(sums[r][v], numbers[r], loaded);
    }
  } else {
    decltype(vector(0)) vectors[VECTORS];
    for (int v = 0; v < VECTORS; ++v) vectors[v] = vector(v);
    for (int r = 0; r < ROWS; ++r) {
      const auto spread = number(r);
      for (int v = 0; v < VECTORS; ++v) add(sums[r][v], spread, vectors[v]);
    }
  }
}

// Writes the scores of ROWS queries for VECTORS times as many keys as a vector has; `num` cells are kept of each. `fetch`
// is called with each cell.
template <class Isa, class Kind, int ROWS, int VECTORS>
inline void score_tile(
    const uint32_t* queries, const uint32_t* keys, int64_t num, float* scores, const auto& fetch) {
  using Vector = typename Isa::Vector;
  typename Vector::Sum sums[ROWS][VECTORS];
  for (auto& row : sums)
    for (auto& sum : row) sum = Vector::zero();
  for (int64_t cell = 0; cell < num; ++cell) {
    const uint32_t* row = keys + cell * kPageLen;
    fetch(cell);
    add_products<ROWS, VECTORS>(
        sums, [&](int r) { return Kind::spread(queries[r * num + cell]); },
        [&](int v) { return Kind::load(row + v * Vector::kWidth); },
        [](auto& sum, const auto& query, const auto& loaded) { Kind::add(sum, query, loaded); });
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) Vector::store(scores + r * kPageLen + v * Vector::kWidth, sums[r][v]);
}

template <class Isa, class Kind, int ROWS>
inline void score_rows(
    const uint32_t* queries, const uint32_t* keys, int64_t num_cells, float* scores, int64_t num, const auto& fetch) {
  if (num == ROWS) {
    for (int64_t lane = 0; lane < kPageLen; lane += Isa::kScoreVectors * Isa::Vector::kWidth) {
      score_tile<Isa, Kind, ROWS, Isa::kScoreVectors>(queries, keys + lane, num_cells, scores + lane, fetch);
    }
  } else if constexpr (ROWS > 1) {
    score_rows<Isa, Kind, ROWS - 1>(queries, keys, num_cells, scores, num, fetch);
  }
}

// The values of a page, as `copy_values` laid them out.
template <class Vector>
struct CopiedValues {
  const float* values;
  int64_t step;

  auto read(int64_t key, int64_t column) const { return Vector::read(values + key * step + column); }
};

// The values of a page where they are stored, in bfloat16.
template <class Vector>
struct StoredValues {
  const uint16_t* values;
  int64_t step;

  auto read(int64_t key, int64_t column) const { return Vector::widened(values + key * step + column); }
};

// Adds the values of keys [first, last), times their weights, to some numbers of ROWS outputs: as many as VECTORS
// vectors have. `fetch` is called for each key, with the number of its values that are read.
template <class Vector, int ROWS, int VECTORS, class Values, class Fetch>
inline void value_tile(
    const Workspace& space, int64_t query, int64_t column, Seen keys, const Values& values, const Fetch& fetch) {
  typename Vector::Sum sums[ROWS][VECTORS];
  float* outputs = space.outputs + query * space.value_lanes + column;
  for (int r = 0; r < ROWS; ++r) {
    const auto factor = Vector::spread_float(space.factors[query + r]);
    for (int v = 0; v < VECTORS; ++v) {
      sums[r][v] = Vector::times(Vector::read(outputs + r * space.value_lanes + v * Vector::kWidth), factor);
    }
  }
  const float* weights = space.weights + query * kPageLen;
  for (int64_t key = keys.first; key < keys.last; ++key) {
    fetch(VECTORS * Vector::kWidth);
    add_products<ROWS, VECTORS>(
        sums, [&](int r) { return Vector::spread_float(weights[r * kPageLen + key]); },
        [&](int v) { return values.read(key, column + v * Vector::kWidth); },
        [](auto& sum, const auto& weight, const auto& read) { sum = Vector::fused(weight, read, sum); });
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) {
      Vector::store(outputs + r * space.value_lanes + v * Vector::kWidth, sums[r][v]);
    }
}

template <class Isa, int ROWS, class Values, class Fetch>
inline void value_rows(
    const Workspace& space, int64_t query, int64_t num, Seen keys, const Values& values, const Fetch& fetch) {
  using Vector = typename Isa::Vector;
  if (num == ROWS) {
    constexpr int64_t kColumns = Isa::kValueVectors * Vector::kWidth;
    int64_t column = 0;
    for (; column + kColumns <= space.value_lanes; column += kColumns) {
      value_tile<Vector, ROWS, Isa::kValueVectors>(space, query, column, keys, values, fetch);
    }
    for (; column < space.value_lanes; column += kLanes) {
      value_tile<Vector, ROWS, kLanes / Vector::kWidth>(space, query, column, keys, values, fetch);
    }
  } else if constexpr (ROWS > 1) {
    value_rows<Isa, ROWS - 1>(space, query, num, keys, values, fetch);
  }
}

}  // namespace
}  // namespace outrider
