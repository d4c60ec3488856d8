// A product of bfloat16 rows with packed weights, with float32 sums, for CPUs.

#pragma once

#include <cstdint>

#include "packed_weight.h"

namespace outrider {

// A cell holds the numbers of inputs k (low half) and k + 1.
struct Product {
  const uint32_t* rows;  // [num_rows, num_pairs]
  PackedWeight weight;
  const uint16_t* bias;  // [num_columns], or null
  uint16_t* output;      // [num_rows, num_columns]
  int64_t num_rows;
  int64_t num_pairs;
  int64_t num_columns;
  const void* laid_out_rows = nullptr;  // see the function of that name in product_kernel.h
};

// Computes the columns of blocks [begin, end) for all rows.
using ProductKernel = void (*)(const Product& product, int64_t begin, int64_t end);

void product_avx2(const Product& product, int64_t begin, int64_t end);
void product_avx512(const Product& product, int64_t begin, int64_t end);
void product_avx512_bf16(const Product& product, int64_t begin, int64_t end);
void product_amx(const Product& product, int64_t begin, int64_t end);

}  // namespace outrider
