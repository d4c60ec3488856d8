// A product's weights as its kernels read them: in the order of use, and compressed without loss.
//
// Decoding reads every weight once for each pass, so it takes as long as their bytes. The exponents of a model's weights
// are few (Zhang et al. 2025, DFloat11, arXiv:2504.11651, codes them with a variable length): the upper seven bits of
// nearly all have one of eight values, so that a code of four bits stands for a weight's upper byte, its sign and these
// seven bits. Weights of bfloat16 then take 12 bits in place of 16.
//
// A segment holds the weights of a block of 16 outputs for 16 pairs of inputs. It is compressed where all its upper bytes
// have a code, and stored as it is otherwise, as is the last one of a block if it has fewer pairs.

#pragma once

#include <algorithm>
#include <cstdint>

#include "cache_line.h"

namespace outrider {

// Outputs that one block of weights has; the weights of a block lie pair by pair of inputs, column by column.
constexpr int64_t kColumns = 16;
constexpr int64_t kSegmentPairs = 16;
constexpr int64_t kSegmentCells = kSegmentPairs * kColumns;
// A compressed segment: of each two pairs the lower bytes, [64], one after another, then of each four pairs the codes, [64],
// those of the first two in the lower half of a byte. Of two pairs, eight weights of the first and eight of the second
// follow each other.
constexpr int64_t kTwoPairs = 4 * kColumns;
constexpr int64_t kCodesAt = kSegmentPairs / 2 * kTwoPairs;
constexpr int64_t kCompressedLines = kCodesAt * 3 / 2 / kLineBytes;
constexpr int64_t kCodes = 16;

// Pairs of so many inputs, the last of which may lack one; without inputs, one pair of zeros.
constexpr int64_t pairs_of_inputs(int64_t num_inputs) { return std::max<int64_t>(1, (num_inputs + 1) / 2); }

// What memory of a packed weight begins with; places and lines follow.
struct alignas(kLineBytes) PackedHeader {
  uint8_t upper_bytes[kCodes];  // that a code stands for
  int64_t num_bytes;
  int64_t num_blocks;
  int64_t num_pairs;
};

struct PackedWeight {
  const uint8_t* upper_bytes;
  const uint32_t* places;  // [blocks, segments]: twice the first line of a segment, and 1 where it is compressed
  const uint8_t* lines;
  int64_t num_segments;  // of a block
};

}  // namespace outrider
