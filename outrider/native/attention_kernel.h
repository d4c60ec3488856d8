// The loops of attention, for any instruction set: `Isa` as for the product, and a few more operations on 16 lanes.
//
// The keys of a page are the lanes: a score is one chain of additions in order of the key's numbers (of a pair, the odd
// one first, as in the product), and an output is one chain in order of the keys' positions, rescaled where a page has
// a higher score than all before (Dao et al. 2022, FlashAttention, algorithm 1). So the bits of a row depend on its
// query and on the keys and values that it sees, and on nothing else of the pass.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "attention.h"
#include "cache_line.h"
#include "no_subnormals.h"
#include "wide_pair.h"

namespace outrider {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kPageVectors = kPageLen / kLanes;
constexpr int64_t kPagePairs = kPageLen / 2;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Keys and queries of bfloat16: a cell is a pair. A query's cells are kept as the instruction set reads them.
template <class Isa>
struct Pairs {
  static constexpr int kSteps = Isa::kSteps;
  using Cell = std::conditional_t<Isa::kWidensRows, WidePair, uint32_t>;
  static Cell kept(uint32_t cell) {
    if constexpr (Isa::kWidensRows) {
      return widened(cell);
    } else {
      return cell;
    }
  }
  static auto load(const uint32_t* cells, int step) { return Isa::load(cells, step); }
  static auto spread(const Cell& cell, int step) { return Isa::spread(cell, step); }
  static void add(typename Isa::Sum& sum, const auto& query, const auto& keys) { Isa::add(sum, query, keys); }
};

template <class Isa>
struct Singles {
  using Sum = typename Isa::Sum;
  using Cell = uint32_t;
  static constexpr int kSteps = 1;
  static Cell kept(uint32_t cell) { return cell; }
  static Sum load(const uint32_t* cells, int) { return Isa::read(reinterpret_cast<const float*>(cells)); }
  static Sum spread(uint32_t cell, int) {
    float value;
    std::memcpy(&value, &cell, sizeof value);
    return Isa::spread_float(value);
  }
  static void add(Sum& sum, const Sum& query, const Sum& keys) { sum = Isa::fused(query, keys, sum); }
};

// Where a tile keeps what it works on for one key head: `head_scratch` floats in all.
struct Workspace {
  int64_t value_lanes;
  uint32_t* queries;  // [queries, key_cells], or twice as much: see `Pairs`
  float* weights;     // [queries, kPageLen], scores at first
  float* outputs;     // [queries, value_lanes]
  float* totals;      // [queries, kLanes], sums of the weights by lane
  float* highest;     // [queries]
  float* factors;     // [queries]
  uint32_t* keys;     // [key_cells, kPageLen], of one page
  float* values;      // [kPageLen, value_lanes], of one page
  uint32_t* pairs;    // [kPagePairs, value_lanes], of one page: values of two keys that follow each other

  Workspace(const Attention& attention, float* scratch)
      : value_lanes(outrider::value_lanes(attention)),
        queries(reinterpret_cast<uint32_t*>(scratch)),
        weights(scratch + kMostQueries * 2 * attention.key_cells),
        outputs(weights + kMostQueries * kPageLen),
        totals(outputs + kMostQueries * value_lanes),
        highest(totals + kMostQueries * kLanes),
        factors(highest + kMostQueries),
        keys(reinterpret_cast<uint32_t*>(factors + kMostQueries)),
        values(factors + kMostQueries + kPageLen * attention.key_cells),
        pairs(reinterpret_cast<uint32_t*>(values + kPageLen * value_lanes)) {}
};

// Keys [first, last) of a page that a row sees.
struct Seen {
  int64_t first;
  int64_t last;
};

inline Seen seen_keys(const Attention& attention, int64_t position, int64_t page_start) {
  const int64_t first = attention.window > 0 ? std::max<int64_t>(0, position - attention.window + 1) : 0;
  return {std::clamp<int64_t>(first - page_start, 0, kPageLen),
          std::clamp<int64_t>(position + 1 - page_start, 0, kPageLen)};
}

// e^x for x <= 0: Taylor's series of degree 7 around the nearest multiple of log 2; 0 below e^-87.
template <class Isa>
inline typename Isa::Sum exponential(typename Isa::Sum x) {
  using Sum = typename Isa::Sum;
  const Sum magic = Isa::spread_float(12582912.0f);  // its sum with a small number has that number's integer part last
  const Sum shifted = Isa::fused(x, Isa::spread_float(1.44269504f), magic);
  const Sum whole = Isa::minus(shifted, magic);
  Sum rest = Isa::fused(whole, Isa::spread_float(-0.693359375f), x);
  rest = Isa::fused(whole, Isa::spread_float(2.12194440e-4f), rest);
  Sum value = Isa::spread_float(1.0f / 5040);
  for (const float next : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    value = Isa::fused(value, rest, Isa::spread_float(next));
  }
  // The product keeps what is no number, of which `raised` may make one.
  value = Isa::fused(x, Isa::zero(), Isa::raised(value, shifted));
  return Isa::zero_where_less(value, x, -87.0f);
}

// bound * tanh(x / bound), by way of e^-|2x / bound|.
template <class Isa>
inline typename Isa::Sum capped(typename Isa::Sum x, float bound) {
  const typename Isa::Sum one = Isa::spread_float(1.0f);
  const typename Isa::Sum size = Isa::magnitude(x);
  const typename Isa::Sum power = exponential<Isa>(Isa::times(size, Isa::spread_float(-2.0f / bound)));
  const typename Isa::Sum tanh = Isa::over(Isa::minus(one, power), Isa::plus(one, power));
  return Isa::with_sign(Isa::times(tanh, Isa::spread_float(bound)), x);
}

// Writes the scores of ROWS queries for BLOCKS times 16 keys.
template <class Isa, class Kind, int ROWS, int BLOCKS>
inline void score_tile(const typename Kind::Cell* queries, const uint32_t* keys, int64_t num_cells, float* scores) {
  typename Isa::Sum sums[ROWS][BLOCKS];
  for (auto& row : sums)
    for (auto& sum : row) sum = Isa::zero();
  for (int64_t cell = 0; cell < num_cells; ++cell) {
    for (int step = 0; step < Kind::kSteps; ++step) {
      decltype(Kind::load(keys, step)) loaded[BLOCKS];
      for (int b = 0; b < BLOCKS; ++b) loaded[b] = Kind::load(keys + cell * kPageLen + b * kLanes, step);
      for (int r = 0; r < ROWS; ++r) {
        const auto query = Kind::spread(queries[r * num_cells + cell], step);
        for (int b = 0; b < BLOCKS; ++b) Kind::add(sums[r][b], query, loaded[b]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int b = 0; b < BLOCKS; ++b) Isa::store(scores + r * kPageLen + b * kLanes, sums[r][b]);
}

template <class Isa, class Kind, int ROWS>
inline void score_rows(
    const typename Kind::Cell* queries, const uint32_t* keys, int64_t num_cells, float* scores, int64_t num) {
  if (num == ROWS) {
    for (int64_t block = 0; block < kPageVectors; block += Isa::kScoreBlocks) {
      const int64_t lane = block * kLanes;
      score_tile<Isa, Kind, ROWS, Isa::kScoreBlocks>(queries, keys + lane, num_cells, scores + lane);
    }
  } else if constexpr (ROWS > 1) {
    score_rows<Isa, Kind, ROWS - 1>(queries, keys, num_cells, scores, num);
  }
}

// The values of a page, as `copy_values` laid them out.
template <class Isa>
struct CopiedValues {
  const float* values;
  int64_t step;

  typename Isa::Sum read(int64_t key, int64_t column) const { return Isa::read(values + key * step + column); }
};

// The values of a page where they are stored, in bfloat16.
template <class Isa>
struct StoredValues {
  const uint16_t* values;
  int64_t step;

  typename Isa::Sum read(int64_t key, int64_t column) const { return Isa::widened(values + key * step + column); }
};

// Adds the values of keys [first, last), times their weights, to 16 * COLUMNS numbers of ROWS outputs. `fetch` is called
// with each key.
template <class Isa, int ROWS, int COLUMNS, class Values, class Fetch>
inline void value_tile(
    const Workspace& space, int64_t query, int64_t column, Seen keys, const Values& values, const Fetch& fetch) {
  typename Isa::Sum sums[ROWS][COLUMNS];
  float* outputs = space.outputs + query * space.value_lanes + column;
  for (int r = 0; r < ROWS; ++r) {
    const typename Isa::Sum factor = Isa::spread_float(space.factors[query + r]);
    for (int c = 0; c < COLUMNS; ++c) {
      sums[r][c] = Isa::times(Isa::read(outputs + r * space.value_lanes + c * kLanes), factor);
    }
  }
  const float* weights = space.weights + query * kPageLen;
  for (int64_t key = keys.first; key < keys.last; ++key) {
    fetch(key);
    typename Isa::Sum read[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) read[c] = values.read(key, column + c * kLanes);
    for (int r = 0; r < ROWS; ++r) {
      const typename Isa::Sum weight = Isa::spread_float(weights[r * kPageLen + key]);
      for (int c = 0; c < COLUMNS; ++c) sums[r][c] = Isa::fused(weight, read[c], sums[r][c]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < COLUMNS; ++c) Isa::store(outputs + r * space.value_lanes + c * kLanes, sums[r][c]);
}

template <class Isa, int ROWS, class Values, class Fetch>
inline void value_rows(
    const Workspace& space, int64_t query, int64_t num, Seen keys, const Values& values, const Fetch& fetch) {
  if (num == ROWS) {
    constexpr int64_t kColumns = Isa::kValueBlocks * kLanes;
    int64_t column = 0;
    for (; column + kColumns <= space.value_lanes; column += kColumns) {
      value_tile<Isa, ROWS, Isa::kValueBlocks>(space, query, column, keys, values, fetch);
    }
    for (; column < space.value_lanes; column += kLanes) {
      value_tile<Isa, ROWS, 1>(space, query, column, keys, values, fetch);
    }
  } else if constexpr (ROWS > 1) {
    value_rows<Isa, ROWS - 1>(space, query, num, keys, values, fetch);
  }
}

// Turns a query's scores of a page into weights, and keeps its highest score, total and factor of what was summed.
template <class Isa>
inline void weigh(const Attention& attention, const Workspace& space, int64_t query, Seen keys) {
  using Sum = typename Isa::Sum;
  float* weights = space.weights + query * kPageLen;
  Sum scores[kPageVectors];
  Sum most = Isa::spread_float(kNothing);
  for (int64_t v = 0; v < kPageVectors; ++v) {
    Sum score = Isa::times(Isa::read(weights + v * kLanes), Isa::spread_float(attention.scaling));
    if (attention.softcap > 0.0f) score = capped<Isa>(score, attention.softcap);
    scores[v] = Isa::within(score, keys.first - v * kLanes, keys.last - v * kLanes, kNothing);
    most = Isa::larger(scores[v], most);
  }
  const float before = space.highest[query];
  const float highest = std::max(before, Isa::largest(most));
  if (highest == kNothing) {
    // No key so far has a weight; the difference of two infinities would be no number.
    std::fill_n(weights, kPageLen, 0.0f);
    space.factors[query] = 0.0f;
    return;
  }
  alignas(64) float factor[kLanes] = {1.0f};
  // Of a zero the exponential is 1, bit for bit.
  if (before != highest) Isa::store(factor, exponential<Isa>(Isa::spread_float(before - highest)));
  Sum total = Isa::times(Isa::read(space.totals + query * kLanes), Isa::spread_float(factor[0]));
  for (int64_t v = 0; v < kPageVectors; ++v) {
    const Sum weight = exponential<Isa>(Isa::minus(scores[v], Isa::spread_float(highest)));
    Isa::store(weights + v * kLanes, weight);
    total = Isa::plus(total, weight);
  }
  Isa::store(space.totals + query * kLanes, total);
  space.highest[query] = highest;
  space.factors[query] = factor[0];
}

// The lines of a page's keys or values, of the heads that are computed at once.
class Lines {
 public:
  Lines() = default;

  // stored: of all slots. row_bytes: of a head. num_parts: in how many parts they are fetched.
  Lines(
      const void* stored, int64_t page, int64_t row_bytes, int64_t key_head, const Attention& attention,
      int64_t num_parts)
      : step_(attention.num_key_heads * row_bytes), num_bytes_(attention.heads_together * row_bytes) {
    row_ = static_cast<const char*>(stored) + page * kPageLen * step_ + key_head * row_bytes;
    num_rows_ = kPageLen;
    // Rows without gaps are one.
    if (num_bytes_ == step_) num_bytes_ *= std::exchange(num_rows_, 1);
    const int64_t num_lines = num_rows_ * ((num_bytes_ + kLineBytes - 1) / kLineBytes);
    part_ = (num_lines + num_parts - 1) / num_parts;
  }

  bool is_wanted() const { return part_ > 0; }

  void fetch_part() {
    for (int64_t line = 0; line < part_ && num_rows_ > 0; ++line) {
      _mm_prefetch(row_ + byte_, _MM_HINT_T1);
      byte_ += kLineBytes;
      if (byte_ < num_bytes_) continue;
      byte_ = 0;
      row_ += step_;
      --num_rows_;
    }
  }

 private:
  const char* row_ = nullptr;
  int64_t step_ = 0;
  int64_t num_bytes_ = 0;
  int64_t num_rows_ = 0;
  int64_t byte_ = 0;
  int64_t part_ = 0;
};

// Fetches the page that is read next a few lines at a time while this one is laid out: many at once would hold up what
// is being read.
struct Fetcher {
  Lines keys;
  Lines values;

  Fetcher() = default;

  // Each head lays out the keys in groups of `keys_at_once` by eight cells, and the values in pairs.
  Fetcher(const Attention& attention, int64_t page, int64_t key_head, int64_t keys_at_once)
      : keys(attention.keys, page, attention.key_cells * sizeof(uint32_t), key_head, attention,
             attention.heads_together * (kPageLen / keys_at_once) * ((attention.key_cells + 7) / 8)),
        values(attention.values, page,
               attention.value_dim * (attention.is_bfloat16 ? sizeof(uint16_t) : sizeof(float)), key_head, attention,
               attention.heads_together * kPagePairs) {}
};

// Lays the cells of some keys side by side, cell by cell; the others of a group of kTransposed come along.
template <class Isa>
inline void transpose_keys(
    const Attention& attention, const uint32_t* page, Seen keys, uint32_t* lanes, Fetcher& fetcher) {
  const int64_t step = attention.num_key_heads * attention.key_cells;
  const bool fetches = fetcher.keys.is_wanted();
  constexpr int64_t kAtOnce = Isa::kTransposed;
  for (int64_t key = keys.first / kAtOnce * kAtOnce; key < keys.last; key += kAtOnce) {
    int64_t cell = 0;
    for (; cell + 8 <= attention.key_cells; cell += 8) {
      if (fetches) fetcher.keys.fetch_part();
      Isa::transpose(page + key * step + cell, step, lanes + cell * kPageLen + key, kPageLen);
    }
    for (; cell < attention.key_cells; ++cell)
      for (int64_t k = key; k < key + kAtOnce; ++k) lanes[cell * kPageLen + k] = page[k * step + cell];
  }
}

// Copies the values of some keys as float32; what is missing in the last 16 numbers is zero.
template <class Isa>
inline void copy_values(
    const Attention& attention, int64_t first_value, Seen keys, const Workspace& space, Fetcher& fetcher) {
  const int64_t step = attention.num_key_heads * attention.value_dim;
  const int64_t whole = attention.value_dim / kLanes * kLanes, rest = attention.value_dim - whole;
  for (int64_t key = keys.first; key < keys.last; ++key) {
    float* copied = space.values + key * space.value_lanes;
    if (key % 2 == 0) fetcher.values.fetch_part();
    if (!attention.is_bfloat16) {
      std::memcpy(copied, static_cast<const float*>(attention.values) + first_value + key * step,
                  attention.value_dim * sizeof(float));
      std::fill(copied + attention.value_dim, copied + space.value_lanes, 0.0f);
      continue;
    }
    const uint16_t* given = static_cast<const uint16_t*>(attention.values) + first_value + key * step;
    for (int64_t v = 0; v < whole; v += kLanes) Isa::store(copied + v, Isa::widened(given + v));
    if (rest > 0) {
      uint16_t last[kLanes] = {};
      std::memcpy(last, given + whole, rest * sizeof(uint16_t));
      Isa::store(copied + whole, Isa::widened(last));
    }
  }
}

// How scores are computed, and how weights and values are added up: by vectors.
template <class Isa, class Kind>
struct ByVectors {
  using Cells = Kind;
  // Whether pages that a row sees whole are added to outputs by `add_whole_page`.
  static constexpr bool kAddsWholePages = false;

  // Writes the scores of queries [query, end) for the keys of a page.
  void score(const Attention& attention, const Workspace& space, int64_t query, int64_t end) {
    const auto* queries = reinterpret_cast<const typename Kind::Cell*>(space.queries);
    for (; query < end; query += Isa::kScoreRows) {
      score_rows<Isa, Kind, Isa::kScoreRows>(
          queries + query * attention.key_cells, space.keys, attention.key_cells, space.weights + query * kPageLen,
          std::min<int64_t>(Isa::kScoreRows, end - query));
    }
  }
};

// Adds one page to the outputs of rows [first, last) of a tile, all of which see some of it.
template <class Isa, class Way>
inline void add_page(
    Way& way, const Attention& attention, const Workspace& space, const AttentionRow* tile, int64_t first, int64_t last,
    int64_t index, int64_t key_head, Fetcher& fetcher) {
  const int64_t page_start = index * kPageLen;
  Seen keys{kPageLen, 0};
  for (int64_t row = first; row < last; ++row) {
    const Seen seen = seen_keys(attention, tile[row].position, page_start);
    keys = {std::min(keys.first, seen.first), std::max(keys.last, seen.last)};
  }
  const int64_t slot = tile[first].pages[index] * kPageLen;
  const int64_t key_step = attention.num_key_heads * attention.key_cells;
  const int64_t first_value = slot * attention.num_key_heads * attention.value_dim + key_head * attention.value_dim;
  transpose_keys<Isa>(
      attention, attention.keys + slot * key_step + key_head * attention.key_cells, keys, space.keys,
      fetcher);
  const int64_t group = attention.group;
  way.score(attention, space, first * group, last * group);
  for (int64_t row = first; row < last; ++row) {
    const Seen seen = seen_keys(attention, tile[row].position, page_start);
    for (int64_t query = row * group; query < (row + 1) * group; ++query) weigh<Isa>(attention, space, query, seen);
  }
  // Rows that see the same keys go together. Keys that a row does not see have weight zero, but must not be added all
  // the same: a value that is no number would spoil the sum, and a negative zero would lose its sign.
  bool has_values = false, has_pairs = false;
  const bool reads_stored = attention.is_bfloat16 && (last - first) * group <= kStoredQueries &&
                            attention.value_dim % kLanes == 0;
  for (int64_t row = first; row < last;) {
    const Seen seen = seen_keys(attention, tile[row].position, page_start);
    const auto sees_the_same = [&](const AttentionRow& other) {
      const Seen also = seen_keys(attention, other.position, page_start);
      return also.first == seen.first && also.last == seen.last;
    };
    int64_t next = row + 1;
    while (next < last && sees_the_same(tile[next])) ++next;
    if constexpr (Way::kAddsWholePages) {
      if (seen.last - seen.first == kPageLen) {
        if (!has_pairs) way.pair_values(attention, first_value, space, fetcher);
        has_pairs = true;
        way.add_whole_page(space, row * group, next * group);
        row = next;
        continue;
      }
    }
    if (!reads_stored && !has_values) {
      copy_values<Isa>(attention, first_value, keys, space, fetcher);
      has_values = true;
    }
    for (int64_t query = row * group; query < next * group; query += Isa::kValueRows) {
      const int64_t num = std::min<int64_t>(Isa::kValueRows, next * group - query);
      if (reads_stored) {
        const StoredValues<Isa> values{
            static_cast<const uint16_t*>(attention.values) + first_value,
            attention.num_key_heads * attention.value_dim};
        const auto fetch = [&](int64_t key) {
          if (key % 2 == 0) fetcher.values.fetch_part();
        };
        value_rows<Isa, Isa::kValueRows>(space, query, num, seen, values, fetch);
      } else {
        const CopiedValues<Isa> values{space.values, space.value_lanes};
        value_rows<Isa, Isa::kValueRows>(space, query, num, seen, values, [](int64_t) {});
      }
    }
    row = next;
  }
}

// Divides a query's output by the sum of its weights, and writes it.
template <class Isa>
inline void write_output(const Attention& attention, const Workspace& space, int64_t query, int64_t first_value) {
  alignas(64) float lanes[kLanes];
  Isa::store(lanes, Isa::read(space.totals + query * kLanes));
  for (int64_t num = kLanes / 2; num > 0; num /= 2)
    for (int64_t lane = 0; lane < num; ++lane) lanes[lane] += lanes[lane + num];
  const typename Isa::Sum total = Isa::spread_float(lanes[0]);
  for (int64_t v = 0; v < space.value_lanes; v += kLanes) {
    const typename Isa::Sum output = Isa::over(Isa::read(space.outputs + query * space.value_lanes + v), total);
    const int64_t num = std::min(kLanes, attention.value_dim - v);
    if (attention.is_bfloat16) {
      uint16_t rounded[kLanes];
      Isa::round(rounded, output);
      std::memcpy(static_cast<uint16_t*>(attention.output) + first_value + v, rounded, num * sizeof(uint16_t));
    } else {
      Isa::store(lanes, output);
      std::memcpy(static_cast<float*>(attention.output) + first_value + v, lanes, num * sizeof(float));
    }
  }
}

template <class Cells>
inline void begin_queries(
    const Attention& attention, const AttentionRow* tile, int64_t num_rows, int64_t key_head, const Workspace& space) {
  const int64_t group = attention.group;
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t g = 0; g < group; ++g) {
      const uint32_t* query =
          attention.query + (key_head * group + g) * attention.head_step + tile[row].row * attention.row_step;
      auto* kept = reinterpret_cast<typename Cells::Cell*>(space.queries) + (row * group + g) * attention.key_cells;
      // Not by std::transform, which files for other instruction sets would share.
      for (int64_t cell = 0; cell < attention.key_cells; ++cell) kept[cell] = Cells::kept(query[cell]);
    }
  }
  std::fill_n(space.outputs, num_rows * group * space.value_lanes, 0.0f);
  std::fill_n(space.totals, num_rows * group * kLanes, 0.0f);
  std::fill_n(space.highest, num_rows * group, kNothing);
}

// All heads read a page before the next one, which is fetched meanwhile.
template <class Isa, class Way>
inline void attend_tile(const Attention& attention, const AttentionUnit& unit, float* scratch) {
  const AttentionRow* tile = unit.first;
  const int64_t num_rows = unit.last - tile, key_head = unit.key_head;
  const int64_t group = attention.group, num_heads = attention.heads_together;
  const auto space_of = [&](int64_t head) { return Workspace(attention, scratch + head * head_scratch(attention)); };
  int64_t last_page = 0;
  for (int64_t row = 0; row < num_rows; ++row) last_page = std::max(last_page, tile[row].position / kPageLen);
  for (int64_t head = 0; head < num_heads; ++head) {
    begin_queries<typename Way::Cells>(attention, tile, num_rows, key_head + head, space_of(head));
  }

  const auto following = [&](int64_t index) {
    if (num_rows * group > kFewQueries) return Fetcher();
    if (index < last_page) return Fetcher(attention, tile->pages[index + 1], key_head, Isa::kTransposed);
    if (unit.next_pages == nullptr) return Fetcher();
    return Fetcher(attention, unit.next_pages[0], unit.next_key_head, Isa::kTransposed);
  };
  Way way;
  for (int64_t index = 0; index <= last_page; ++index) {
    const auto sees = [&](int64_t row) {
      const Seen seen = seen_keys(attention, tile[row].position, index * kPageLen);
      return seen.first < seen.last;
    };
    Fetcher fetcher = following(index);
    for (int64_t head = 0; head < num_heads; ++head) {
      // Rows that follow each other and have the same page pass over it together.
      for (int64_t row = 0; row < num_rows;) {
        if (!sees(row)) {
          ++row;
          continue;
        }
        int64_t end = row + 1;
        while (end < num_rows && sees(end) && tile[end].pages[index] == tile[row].pages[index]) ++end;
        add_page<Isa>(way, attention, space_of(head), tile, row, end, index, key_head + head, fetcher);
        row = end;
      }
    }
  }
  for (int64_t head = key_head; head < key_head + num_heads; ++head) {
    for (int64_t query = 0; query < num_rows * group; ++query) {
      const int64_t output = tile[query / group].row * attention.num_key_heads * group + head * group + query % group;
      write_output<Isa>(attention, space_of(head - key_head), query, output * attention.value_dim);
    }
  }
}

template <class Isa>
inline void attend(const Attention& attention, const AttentionUnit& unit, float* scratch) {
  const NoSubnormals guard;
  if (attention.is_bfloat16) {
    attend_tile<Isa, ByVectors<Isa, Pairs<Isa>>>(attention, unit, scratch);
  } else {
    attend_tile<Isa, ByVectors<Isa, Singles<Isa>>>(attention, unit, scratch);
  }
}

}  // namespace
}  // namespace outrider
