// A product of rows with packed weights, both in 8 bits, with integer sums: exact, in whatever order they are added.
// What a kernel reads of a row is written by the kernel beside it.

#pragma once

#include <cstdint>

namespace outrider {

// Inputs that an instruction multiplies and adds at once.
constexpr int64_t kQuad = 4;
// Outputs of a block of weights.
constexpr int64_t kByteColumns = 16;
// Of the scales, in bytes: those of a block are read at once.
constexpr int64_t kByteScaleAlignment = 64;
// What is added to a weight, so that it is stored without a sign.
constexpr int32_t kByteOffset = 128;
// Inputs whose products cannot exceed a sum.
constexpr int64_t kMostByteInputs = 65536;

struct ByteProduct {
  const int8_t* rows;       // [num_rows, num_quads, bytes of a quad], as `ByteRowKernel` writes them
  const float* row_scales;  // [num_rows]: a number of a row is its integer times this
  const int32_t* offsets;   // [num_rows]: kByteOffset times the sum of the row
  const uint8_t* weights;   // [blocks, num_quads, kByteColumns, kQuad], each plus kByteOffset
  const float* scales;      // [blocks, kByteColumns]
  const uint16_t* bias;     // bfloat16 [num_columns], or null
  uint16_t* output;         // bfloat16 [num_rows, num_columns]
  int64_t num_rows;
  int64_t num_quads;
  int64_t num_columns;
};

// Computes the columns of blocks [begin, end) for all rows.
using ByteProductKernel = void (*)(const ByteProduct& product, int64_t begin, int64_t end);

// Rounds a row of bfloat16 to the nearest multiples of its scale, 127 of which are its largest number; writes zeros
// behind it up to the end of its last quad. Returns the scale, and kByteOffset times the sum.
struct ByteRow {
  float scale;
  int32_t offset;
};
using ByteRowKernel = ByteRow (*)(const uint16_t* row, int64_t num, int8_t* written);

// Of an instruction set: what writes rows, what reads them, and the bytes that a quad of a written row takes.
struct ByteKernels {
  ByteRowKernel row;
  ByteProductKernel product;
  int64_t quad_bytes;
};

ByteKernels byte_kernels_avx2();
ByteKernels byte_kernels_vnni();

}  // namespace outrider
