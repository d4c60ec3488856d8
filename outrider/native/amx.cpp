// Product and attention by AMX: tiles of 16 rows and 16 columns, to which one instruction adds 16 pairs of inputs.
//
// An output's chain of additions is not that of the other variants: the even and the odd ones of each 32 inputs are added
// up for themselves, in order of k, and their two sums, added, to those before. It depends on its row and its weights
// alone, all the same; in attention, where 32 inputs are the keys of a page, on the row and on what it sees.

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "attention_kernel.h"
#include "product_kernel.h"
#include "vectors_avx512_bf16.h"

namespace outrider {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTilePairs = 16;
static_assert(kTilePairs == kSegmentPairs);
constexpr int64_t kTileBytes = kTilePairs * kLineBytes;
constexpr int64_t kBandRows = 2 * kTileRows;
// Rows that pass over a part of the weights, one band after another.
constexpr int64_t kPanelRows = 512;
// Blocks of columns that are added up together: their sums take four of eight tiles.
constexpr int kMostSums = 4;
// Tiles of a block that stay in the innermost cache, with as many of a band's inputs.
constexpr int64_t kTilesAtOnce = 8;
// Tiles for which there is memory to expand them: those of two blocks, or, one after another, those of four.
constexpr int64_t kExpandedTiles = 2 * kTilesAtOnce;
// Tiles of a block that are fetched ahead.
constexpr int64_t kTilesAhead = 1;

// Has the compiler store what tiles are to be loaded from: it does not know that the instructions read memory.
inline void before_tiles() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// What the eight tiles are: 0 to 3 sums, of both halves of a band by two blocks, or of one half by four; 4 and 5 inputs;
// 6 and 7 weights.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t num_rows[16] = {};

  // first_rows, second_rows: of the two tiles of inputs; num_pairs: that one instruction adds.
  TileShapes(int64_t first_rows, int64_t second_rows, int64_t num_pairs, bool has_halves = false) {
    const auto set = [this](int tile, int64_t rows, int64_t cells) {
      num_rows[tile] = static_cast<uint8_t>(rows);
      row_bytes[tile] = static_cast<uint16_t>(cells * sizeof(uint32_t));
    };
    for (int tile = 0; tile < 4; ++tile) set(tile, has_halves && tile % 2 == 1 ? second_rows : first_rows, kColumns);
    set(4, first_rows, num_pairs), set(5, second_rows, num_pairs);
    set(6, num_pairs, kColumns), set(7, num_pairs, kColumns);
  }
};

inline void load(const TileShapes& shapes) {
  before_tiles();
  _tile_loadconfig(&shapes);
}

struct Sums {
  alignas(64) float values[4][kTileRows * kColumns];
};

inline void load_sums(const Sums& sums) {
  _tile_loadd(0, sums.values[0], kLineBytes);
  _tile_loadd(1, sums.values[1], kLineBytes);
  _tile_loadd(2, sums.values[2], kLineBytes);
  _tile_loadd(3, sums.values[3], kLineBytes);
}

inline void store_sums(Sums& sums) {
  _tile_stored(0, sums.values[0], kLineBytes);
  _tile_stored(1, sums.values[1], kLineBytes);
  _tile_stored(2, sums.values[2], kLineBytes);
  _tile_stored(3, sums.values[3], kLineBytes);
}

// Adds pairs of a band's inputs times some blocks to the sums: of both halves of a band and two blocks, or of one half
// and four.
template <bool HALVES, int BLOCKS>
inline void add_tiles(const uint32_t* rows, int64_t num_pairs, const std::array<const uint32_t*, BLOCKS>& cells) {
  const int64_t row_bytes = num_pairs * sizeof(uint32_t);
  before_tiles();
  _tile_loadd(4, rows, row_bytes);
  if constexpr (HALVES) _tile_loadd(5, rows + kTileRows * num_pairs, row_bytes);
  _tile_loadd(6, cells[0], kLineBytes);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (HALVES) _tile_dpbf16ps(1, 5, 6);
  if constexpr (BLOCKS > 1) {
    _tile_loadd(7, cells[1], kLineBytes);
    if constexpr (HALVES) {
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    } else {
      _tile_dpbf16ps(1, 4, 7);
    }
  }
  if constexpr (BLOCKS > 2) {
    _tile_loadd(6, cells[2], kLineBytes);
    _tile_dpbf16ps(2, 4, 6);
  }
  if constexpr (BLOCKS > 3) {
    _tile_loadd(7, cells[3], kLineBytes);
    _tile_dpbf16ps(3, 4, 7);
  }
}

class TileProduct {
 public:
  explicit TileProduct(const Product& product) : product_(product) {}

  // Computes blocks [begin, end) for all rows. Those of one band read all of a weight at once. With more bands it is
  // read part by part: each part stays in the innermost cache while they pass over it, and their sums are stored.
  void run(int64_t begin, int64_t end) {
    const int64_t most = product_.num_rows > kTileRows ? kMostSums / 2 : kMostSums;
    const int64_t num_tiles = product_.num_pairs / kTilePairs;
    const int64_t at_once = product_.num_rows > kBandRows ? kTilesAtOnce : std::max<int64_t>(1, num_tiles);
    for (int64_t row = 0; row < product_.num_rows; row += kPanelRows) {
      const int64_t rows_end = std::min(row + kPanelRows, product_.num_rows);
      for (int64_t block = begin; block < end; block += most) {
        int64_t tile = 0;
        do {
          const Part part{block, std::min(most, end - block), end, tile, std::min(tile + at_once, num_tiles)};
          for (int64_t first = row; first < rows_end; first += kBandRows) {
            band(part, first, std::min(kBandRows, rows_end - first), first == row, sums_[(first - row) / kBandRows]);
          }
          tile = part.last_tile;
        } while (tile < num_tiles);
      }
    }
    _tile_release();
  }

 private:
  // Blocks of columns, of `end` in all, and the tiles of their weights that are added.
  struct Part {
    int64_t block;
    int64_t num_blocks;
    int64_t end;
    int64_t first_tile;
    int64_t last_tile;
  };

  void shape(int64_t num_rows, int64_t num_pairs) {
    if (num_rows == shaped_rows_ && num_pairs == shaped_pairs_) return;
    const bool has_halves = num_rows > kTileRows;
    const int64_t first = has_halves ? kTileRows : num_rows;
    const TileShapes shapes(first, has_halves ? num_rows - first : first, num_pairs, has_halves);
    load(shapes);
    shaped_rows_ = num_rows, shaped_pairs_ = num_pairs;
  }

  void band(const Part& part, int64_t row, int64_t num_rows, bool is_first, Sums& sums) {
    if (num_rows > kTileRows) {
      part.num_blocks == 2 ? band<true, 2>(part, row, num_rows, is_first, sums)
                           : band<true, 1>(part, row, num_rows, is_first, sums);
    } else if (part.num_blocks == 4) {
      band<false, 4>(part, row, num_rows, is_first, sums);
    } else if (part.num_blocks == 3) {
      band<false, 3>(part, row, num_rows, is_first, sums);
    } else {
      part.num_blocks == 2 ? band<false, 2>(part, row, num_rows, is_first, sums)
                           : band<false, 1>(part, row, num_rows, is_first, sums);
    }
  }

  // Adds a part of the weights to the sums of a band, and writes its outputs after the last part.
  template <bool HALVES, int BLOCKS>
  void band(const Part& part, int64_t row, int64_t num_rows, bool is_first, Sums& sums) {
    const int64_t num_pairs = product_.num_pairs, num_tiles = num_pairs / kTilePairs;
    const uint32_t* rows = product_.rows + row * num_pairs;
    shape(num_rows, kTilePairs);
    if (part.first_tile == 0) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      load_sums(sums);
    }
    for (int64_t tile = part.first_tile; tile < part.last_tile; ++tile) {
      if (is_first) fetch(part, BLOCKS, tile, num_tiles);
      add_tiles<HALVES, BLOCKS>(rows + tile * kTilePairs, num_pairs, cells<BLOCKS>(part, tile, is_first));
    }
    store_sums(sums);
    if (part.last_tile < num_tiles) return;
    if (const int64_t pair = num_tiles * kTilePairs; pair < num_pairs) {
      shape(num_rows, num_pairs - pair);
      load_sums(sums);
      add_tiles<HALVES, BLOCKS>(rows + pair, num_pairs, cells<BLOCKS>(part, num_tiles, is_first));
      store_sums(sums);
    }
    for (int64_t at = 0; at < num_rows; ++at) {
      for (int number = 0; number < BLOCKS; ++number) {
        const int64_t sum = HALVES ? 2 * number + at / kTileRows : number;
        const float* columns = sums.values[sum] + at % kTileRows * kColumns;
        store_columns<Avx512Bf16>(product_, row + at, part.block + number, Avx512Bf16::read(columns));
      }
    }
  }

  // The cells of a tile of each block, which are expanded where it is compressed; once for all bands.
  template <int BLOCKS>
  std::array<const uint32_t*, BLOCKS> cells(const Part& part, int64_t tile, bool is_first) {
    std::array<const uint32_t*, BLOCKS> found;
    for (int number = 0; number < BLOCKS; ++number) {
      uint32_t* memory = expanded_[((tile - part.first_tile) * BLOCKS + number) % kExpandedTiles];
      const PackedWeight& weight = product_.weight;
      found[number] = is_first || !is_compressed(weight, part.block + number, tile)
                          ? segment_cells<Avx512Bf16>(weight, part.block + number, tile, memory)
                          : memory;
    }
    return found;
  }

  // Fetches the tiles that these blocks, or those after them, need some tiles later.
  void fetch(const Part& part, int blocks, int64_t tile, int64_t num_tiles) const {
    const bool is_next = tile + kTilesAhead >= num_tiles;
    const int64_t next = is_next ? tile + kTilesAhead - num_tiles : tile + kTilesAhead;
    const int64_t first = is_next ? part.block + blocks : part.block;
    if (next >= num_tiles) return;
    for (int64_t block = first; block < std::min(first + blocks, part.end); ++block) {
      const uint8_t* stored = stored_segment(product_.weight, block, next);
      for (int64_t line = 0; line < kCompressedLines; ++line) fetch_line(stored + line * kLineBytes);
    }
  }

  const Product& product_;
  int64_t shaped_rows_ = 0, shaped_pairs_ = 0;
  Sums sums_[kPanelRows / kBandRows];
  alignas(kLineBytes) uint32_t expanded_[kExpandedTiles][kSegmentCells];
};

// Attention's way with a page: scores are sums over pairs of a key's numbers, outputs over pairs of keys.
class ByTiles : public ByVectors<Avx512Bf16, Pairs<Avx512Bf16>> {
 public:
  static constexpr bool kAddsWholePages = true;
  static constexpr bool kFetchesInScores = false;

  ~ByTiles() {
    if (shaped_rows_ > 0) _tile_release();
  }

  void score(const Attention& attention, const Workspace& space, int64_t query, int64_t end, Fetcher& fetcher) {
    if (attention.key_cells % kTilePairs != 0) return ByVectors::score(attention, space, query, end, fetcher);
    const int64_t query_bytes = attention.key_cells * sizeof(uint32_t);
    before_tiles();
    for (; query < end; query += kTileRows) {
      shape(std::min(kTileRows, end - query));
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t cell = 0; cell < attention.key_cells; cell += kTilePairs) {
        const uint32_t* keys = space.keys + cell * kPageLen;
        _tile_loadd(4, space.queries + query * attention.key_cells + cell, query_bytes);
        _tile_loadd(6, keys, kPageBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, keys + kLanes, kPageBytes);
        _tile_dpbf16ps(1, 4, 7);
      }
      _tile_stored(0, space.weights + query * kPageLen, kPageBytes);
      _tile_stored(1, space.weights + query * kPageLen + kLanes, kPageBytes);
    }
  }

  // Lays the values of each two keys of a page side by side; what is missing in the last 16 numbers is zero.
  void pair_values(const Attention& attention, int64_t first_value, const Workspace& space, Fetcher& fetcher) {
    const int64_t step = attention.value_steps.row;
    const auto* values = static_cast<const uint16_t*>(attention.values) + first_value;
    for (int64_t pair = 0; pair < kPagePairs; ++pair) {
      const uint16_t* given = values + 2 * pair * step;
      fetcher.values.fetch(2 * attention.value_dim * sizeof(uint16_t));
      for (int64_t v = 0; v < space.value_lanes; v += kLanes) {
        const auto rest = std::min(kLanes, attention.value_dim - v);
        const auto mask = static_cast<__mmask16>((1u << rest) - 1);
        const __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, given + v));
        const __m512i odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, given + step + v));
        const __m512i both = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
        _mm512_storeu_si512(space.pairs + pair * space.value_lanes + v, both);
      }
    }
  }

  // Adds the values of all keys of a page, times their weights, to the outputs of queries [query, end). A weight is the
  // sum of two numbers of bfloat16, so that next to nothing of it is lost.
  void add_whole_page(const Workspace& space, int64_t query, int64_t end) {
    const int64_t value_bytes = space.value_lanes * sizeof(float);
    for (; query < end; query += kTileRows) {
      const int64_t num = std::min(kTileRows, end - query);
      split_weights(space, query, num);
      before_tiles();
      shape(num);
      _tile_loadd(4, large_, kLineBytes);
      _tile_loadd(5, small_, kLineBytes);
      for (int64_t v = 0; v < space.value_lanes; v += kLanes) {
        float* outputs = space.outputs + query * space.value_lanes + v;
        _tile_loadd(0, outputs, value_bytes);
        _tile_loadd(6, space.pairs + v, value_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(0, 5, 6);
        _tile_stored(0, outputs, value_bytes);
      }
    }
  }

 private:
  static constexpr int64_t kPageBytes = kPageLen * sizeof(float);
  static_assert(kPagePairs == kTilePairs, "the keys of a page are the inputs of one tile");

  void shape(int64_t num_rows) {
    if (num_rows == shaped_rows_) return;
    const TileShapes shapes(num_rows, num_rows, kTilePairs);
    load(shapes);
    shaped_rows_ = num_rows;
  }

  // Splits the weights of some queries, and scales their outputs by the queries' factors.
  void split_weights(const Workspace& space, int64_t query, int64_t num) {
    for (int64_t at = 0; at < num; ++at) {
      const float* weights = space.weights + (query + at) * kPageLen;
      const __m512 first = _mm512_load_ps(weights), second = _mm512_load_ps(weights + kLanes);
      const __m512i large = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
      const __m512 first_rest = _mm512_sub_ps(first, widened(_mm512_castsi512_si256(large)));
      const __m512 second_rest = _mm512_sub_ps(second, widened(_mm512_extracti64x4_epi64(large, 1)));
      const __m512i small = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second_rest, first_rest));
      _mm512_store_si512(large_ + at * kTilePairs, large);
      _mm512_store_si512(small_ + at * kTilePairs, small);
      if (space.factors[query + at] == 1.0f) continue;
      const __m512 factor = _mm512_set1_ps(space.factors[query + at]);
      float* outputs = space.outputs + (query + at) * space.value_lanes;
      for (int64_t v = 0; v < space.value_lanes; v += kLanes) {
        _mm512_store_ps(outputs + v, _mm512_mul_ps(_mm512_load_ps(outputs + v), factor));
      }
    }
  }

  static __m512 widened(__m256i numbers) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
  }

  int64_t shaped_rows_ = 0;
  alignas(64) uint32_t large_[kTileRows * kTilePairs];
  alignas(64) uint32_t small_[kTileRows * kTilePairs];
};

}  // namespace

void product_amx(const Product& product, int64_t begin, int64_t end) {
  const NoSubnormals guard;
  TileProduct(product).run(begin, end);
}

void attention_amx(const Attention& attention, const AttentionUnit& unit, float* scratch) {
  if (!attention.is_bfloat16) return attention_avx512_bf16(attention, unit, scratch);
  const NoSubnormals guard;
  attend_tile<Avx512Bf16, ByTiles>(attention, unit, scratch);
}

}  // namespace outrider
