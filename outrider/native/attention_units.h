// Divides the attention of a pass into units: few enough that pages are seldom read twice, and such that no thread
// waits long for another at the end.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "attention.h"

namespace outrider {
namespace {

// Units of each thread where there are many rows.
constexpr int64_t kUnitsOfThread = 4;
// Queries of a unit for which it pays to read a page.
constexpr int64_t kLeastQueries = 96;
// To read a page takes about as long as to attend to it with so many queries.
constexpr int64_t kPageQueries = 8;
// A unit of less than this part of a thread's work is not cut, and leaves no thread waiting for long.
constexpr int64_t kSmallPart = 8;

// Rows [first, last), which follow each other in a pass and begin with the same page, for key heads from `key_head` on.
struct Unit {
  const AttentionRow* first;
  const AttentionRow* last;
  int64_t key_head;
  int64_t work;  // in no unit of its own
};

inline int64_t work_of(const AttentionRow* first, const AttentionRow* last, int64_t group, int64_t window) {
  int64_t lowest = first->position, highest = first->position;
  for (const AttentionRow* row = first; row < last; ++row) {
    lowest = std::min(lowest, row->position);
    highest = std::max(highest, row->position);
  }
  const int64_t first_seen = window > 0 ? std::max<int64_t>(0, lowest - window + 1) : 0;
  return (highest / kPageLen + 1 - first_seen / kPageLen) * (kPageQueries + (last - first) * group);
}

// Each has up to `most` rows.
inline std::vector<Unit> cut_tiles(
    const std::vector<AttentionRow>& rows, int64_t most, int64_t group, int64_t window) {
  std::vector<Unit> tiles;
  for (const AttentionRow& row : rows) {
    if (tiles.empty() || tiles.back().last - tiles.back().first == most || *tiles.back().first->pages != *row.pages) {
      tiles.push_back({&row, &row, 0, 0});
    }
    ++tiles.back().last;
  }
  for (Unit& tile : tiles) tile.work = work_of(tile.first, tile.last, group, window);
  return tiles;
}

inline void sort_by_work(std::vector<Unit>& units) {
  const auto has_more = [](const Unit& one, const Unit& other) { return one.work > other.work; };
  std::stable_sort(units.begin(), units.end(), has_more);
}

// Cuts units by rows where some threads would have nothing to do while the others still have much. Threads are taken to
// choose the next unit whenever they are done with one; those with most work come first.
inline void even_out(std::vector<Unit>& units, int64_t num_threads, int64_t group, int64_t window) {
  int64_t total = 0;
  for (const Unit& unit : units) total += unit.work;
  const int64_t share = total / num_threads;
  sort_by_work(units);
  std::vector<int64_t> loads(num_threads);
  const auto give = [&](int64_t work) { *std::min_element(loads.begin(), loads.end()) += work; };
  std::vector<Unit> even;
  even.reserve(units.size() + num_threads);
  for (const Unit& unit : units) {
    const int64_t room = share - *std::min_element(loads.begin(), loads.end());
    const int64_t excess = unit.work - room, num_rows = unit.last - unit.first;
    if (excess * kSmallPart <= share || unit.work * kSmallPart <= share || num_rows == 1) {
      give(unit.work);
      even.push_back(unit);
      continue;
    }
    const int64_t wanted = room > 0 ? (unit.work + room - 1) / room : num_threads;
    const int64_t num_parts = std::min({wanted, num_threads, num_rows});
    for (int64_t part = 0; part < num_parts; ++part) {
      const AttentionRow* first = unit.first + num_rows * part / num_parts;
      const AttentionRow* last = unit.first + num_rows * (part + 1) / num_parts;
      even.push_back({first, last, unit.key_head, work_of(first, last, group, window)});
      give(even.back().work);
    }
  }
  sort_by_work(even);
  units = std::move(even);
}

// Returns the units of a pass, and sets how many heads each of them is computed for.
inline std::vector<Unit> divide(
    const std::vector<AttentionRow>& rows, Attention& attention, int64_t num_threads) {
  const int64_t group = attention.group, num_heads = attention.num_key_heads;
  // A page is read, and its keys laid side by side, once for each tile; small tiles are for there being enough of them.
  const int64_t enough = static_cast<int64_t>(rows.size()) * num_heads / (kUnitsOfThread * num_threads);
  const int64_t largest = kMostQueries / group, least = std::min(kLeastQueries / group, largest);
  std::vector<Unit> tiles =
      cut_tiles(rows, std::max<int64_t>(1, std::clamp(enough, least, largest)), group, attention.window);
  // Tiles of few queries wait for their keys and values. Of enough such tiles each is computed for all heads, which lie
  // side by side; else there are enough units only where each head is one.
  int64_t total = 0, most = 0;
  bool are_small = true;
  for (const Unit& tile : tiles) {
    total += tile.work;
    most = std::max(most, tile.work);
    are_small = are_small && (tile.last - tile.first) * group <= kFewQueries;
  }
  const bool are_enough = static_cast<int64_t>(tiles.size()) >= kUnitsOfThread / 2 * num_threads;
  if (are_enough && are_small && most * num_threads <= total) {
    attention.heads_together = num_heads;
    sort_by_work(tiles);
    return tiles;
  }
  attention.heads_together = 1;
  std::vector<Unit> units;
  units.reserve(tiles.size() * num_heads);
  for (const Unit& tile : tiles)
    for (int64_t head = 0; head < num_heads; ++head) units.push_back({tile.first, tile.last, head, tile.work});
  even_out(units, num_threads, group, attention.window);
  return units;
}

}  // namespace
}  // namespace outrider
