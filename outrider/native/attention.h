// Attention of a pass's rows over pages of keys and values, for CPUs.

#pragma once

#include <cstdint>

namespace outrider {

constexpr int64_t kPageLen = 32;
// Queries (rows times the query heads of a key head) that pass over a page together, at most.
constexpr int64_t kMostQueries = 384;
// Queries up to which reading keys and values takes longer than what is done with them.
constexpr int64_t kFewQueries = 64;
// Tiles of queries up to which values are widened wherever they are read, and not once in a copy.
constexpr int64_t kStoredTiles = 4;

// A row: its number in the pass, its position in its session, and its session's pages in order of position.
struct AttentionRow {
  int64_t row;
  int64_t position;
  const int32_t* pages;
};

// Where keys or values lie from the first number of their page on.
struct PageSteps {
  int64_t head;
  int64_t row;  // of a position
};

// bfloat16 numbers are read as pairs, float32 ones singly: a `cell` has 32 bits of either.
struct Attention {
  const uint32_t* query;   // [heads, rows, key_cells], with steps
  int64_t head_step;       // in cells
  int64_t row_step;        // in cells
  const uint32_t* keys;    // [pages, key_heads, kPageLen, key_cells], with steps
  PageSteps key_steps;     // in cells
  const void* values;      // [pages, key_heads, kPageLen, value_dim], with steps
  PageSteps value_steps;   // in values
  void* output;            // [rows, heads, value_dim]
  int64_t num_key_heads;
  int64_t group;           // query heads of a key head
  int64_t key_cells;
  int64_t value_dim;
  float scaling;
  float softcap;           // bound of the scores; 0 for none
  int64_t window;          // positions that a row sees, its own included; 0 for all
  bool is_bfloat16;        // else float32
  int64_t heads_together;  // key heads that a tile is computed for at once
};

// Rows [first, last) that pass over pages together, for the query heads of `heads_together` key heads from `key_head`
// on; at most kMostQueries of each.
struct AttentionUnit {
  const AttentionRow* first;
  const AttentionRow* last;
  int64_t key_head;
  const int32_t* next_pages;  // of the unit that the thread comes to next; null for none
  int64_t next_key_head;
};

// Computes the outputs of a unit. `scratch` has `attention_scratch` floats, and begins at a multiple of 64 bytes.
using AttentionKernel = void (*)(const Attention& attention, const AttentionUnit& unit, float* scratch);

void attention_avx2(const Attention&, const AttentionUnit&, float*);
void attention_avx512(const Attention&, const AttentionUnit&, float*);
void attention_avx512_bf16(const Attention&, const AttentionUnit&, float*);
void attention_amx(const Attention&, const AttentionUnit&, float*);

namespace {

// Values of an output or of a key, with what is missing in the last vector of 16.
inline int64_t value_lanes(const Attention& attention) { return (attention.value_dim + 15) / 16 * 16; }

inline int64_t head_scratch(const Attention& attention) {
  const int64_t num_values = value_lanes(attention);
  return kMostQueries * (2 * attention.key_cells + kPageLen + num_values + 16 + 2) +
         kPageLen * (2 * attention.key_cells + num_values) + kPageLen / 2 * num_values;
}

inline int64_t attention_scratch(const Attention& attention) {
  return attention.heads_together * head_scratch(attention);
}

}  // namespace
}  // namespace outrider
