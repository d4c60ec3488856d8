// The loops of attention, for any instruction set: `Isa` as for the product, and a few more operations on 16 lanes.
//
// The keys of a page are the lanes: a score is one chain of additions in order of the key's numbers (of a pair, the odd
// one first, as in the product), and an output is one chain in order of the keys' positions, rescaled where a page has
// a higher score than all before (Dao et al. 2022, FlashAttention, algorithm 1). So the bits of a row depend on its
// query and on the keys and values that it sees, and on nothing else of the pass.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "attention.h"
#include "attention_fetch.h"
#include "attention_space.h"
#include "attention_tiles.h"
#include "attention_weights.h"
#include "no_subnormals.h"

namespace outrider {
namespace {

// Lays the cells of some keys side by side, cell by cell; the others of a group of kTransposed come along.
template <class Isa, class Kind>
inline void transpose_keys(
    const Attention& attention, const uint32_t* page, Seen keys, uint32_t* lanes, const auto& fetch) {
  const int64_t step = attention.key_steps.row;
  constexpr int64_t kAtOnce = Isa::kTransposed, kCellLanes = Kind::kNumbers * kPageLen;
  for (int64_t key = keys.first / kAtOnce * kAtOnce; key < keys.last; key += kAtOnce) {
    int64_t cell = 0;
    for (; cell + 8 <= attention.key_cells; cell += 8) {
      fetch(8 * kAtOnce * sizeof(uint32_t));
      uint32_t* kept = lanes + cell * kCellLanes + key;
      Isa::transpose(page + key * step + cell, step, [kept](int64_t number, const typename Isa::Lanes& cells) {
        Kind::keep_lanes(cells, kept + number * kCellLanes, kPageLen);
      });
    }
    for (; cell < attention.key_cells; ++cell)
      for (int64_t k = key; k < key + kAtOnce; ++k) {
        Kind::keep(page[k * step + cell], lanes + cell * kCellLanes + k, kPageLen);
      }
  }
}

// Copies the values of some keys as float32; what is missing in the last 16 numbers is zero.
template <class Isa>
inline void copy_values(
    const Attention& attention, int64_t first_value, Seen keys, const Workspace& space, Fetcher& fetcher) {
  const int64_t step = attention.value_steps.row;
  const int64_t whole = attention.value_dim / kLanes * kLanes, rest = attention.value_dim - whole;
  for (int64_t key = keys.first; key < keys.last; ++key) {
    float* copied = space.values + key * space.value_lanes;
    fetcher.values.fetch(attention.value_dim * value_bytes(attention));
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
  // Whether half of the next page's keys are left for `score` to fetch.
  static constexpr bool kFetchesInScores = true;

  // Writes the scores of queries [query, end) for the keys of a page.
  void score(const Attention& attention, const Workspace& space, int64_t query, int64_t end, Fetcher& fetcher) {
    const int64_t num_cells = attention.key_cells * Kind::kNumbers;
    const auto score_next = [&](const auto& fetch) {
      const int64_t num = std::min<int64_t>(Isa::kScoreRows, end - query);
      score_rows<Isa, Kind, Isa::kScoreRows>(
          space.queries + query * num_cells, space.keys, num_cells, space.weights + query * kPageLen, num, fetch);
      query += num;
    };
    if (fetcher.keys.is_wanted()) {
      constexpr int64_t kBytes = kPageLen * sizeof(uint32_t) / Kind::kNumbers / 2;
      score_next([&](int64_t) { fetcher.keys.fetch(kBytes); });
    }
    while (query < end) score_next([](int64_t) {});
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
  const int64_t first_row = tile[first].pages[index] * kPageLen * attention.num_key_heads;
  const int64_t first_value = first_row * attention.value_dim + key_head * attention.value_steps.head;
  const uint32_t* page = attention.keys + first_row * attention.key_cells + key_head * attention.key_steps.head;
  if (fetcher.keys.is_wanted()) {
    transpose_keys<Isa, typename Way::Cells>(attention, page, keys, space.keys, [&](int64_t num_bytes) {
      fetcher.keys.fetch(Way::kFetchesInScores ? num_bytes / 2 : num_bytes);
    });
  } else {
    transpose_keys<Isa, typename Way::Cells>(attention, page, keys, space.keys, [](int64_t) {});
  }
  const int64_t group = attention.group;
  way.score(attention, space, first * group, last * group, fetcher);
  weigh_rows<Isa>(attention, space, tile, first, last, page_start);
  // Rows that see the same keys go together. Keys that a row does not see have weight zero, but must not be added all
  // the same: a value that is no number would spoil the sum, and a negative zero would lose its sign.
  bool has_values = false, has_pairs = false;
  const bool reads_stored = attention.is_bfloat16 && (last - first) * group <= kStoredTiles * Isa::kValueRows &&
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
        const StoredValues<typename Isa::Vector> values{
            static_cast<const uint16_t*>(attention.values) + first_value, attention.value_steps.row};
        const auto fetch = [&](int64_t num_values) { fetcher.values.fetch(num_values * sizeof(uint16_t)); };
        value_rows<Isa, Isa::kValueRows>(space, query, num, seen, values, fetch);
      } else {
        const CopiedValues<typename Isa::Vector> values{space.values, space.value_lanes};
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
      uint32_t* kept = space.queries + (row * group + g) * attention.key_cells * Cells::kNumbers;
      for (int64_t cell = 0; cell < attention.key_cells; ++cell) {
        Cells::keep(query[cell], kept, 1);
        kept += Cells::kNumbers;
      }
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
    if (index < last_page) return Fetcher(attention, tile->pages[index + 1], key_head);
    if (unit.next_pages == nullptr) return Fetcher();
    return Fetcher(attention, unit.next_pages[0], unit.next_key_head);
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
    using Cells = std::conditional_t<Isa::kWidensRows, WidenedPairs<Isa>, Pairs<Isa>>;
    attend_tile<Isa, ByVectors<Isa, Cells>>(attention, unit, scratch);
  } else {
    attend_tile<Isa, ByVectors<Isa, Singles<Isa>>>(attention, unit, scratch);
  }
}

}  // namespace
}  // namespace outrider
