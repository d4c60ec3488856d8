// Product and attention by AVX-512's instruction for pairs of bfloat16 numbers.

#include <immintrin.h>

#include "attention_kernel.h"
#include "product_kernel.h"
#include "vectors_avx512_bf16.h"

namespace outrider {

void product_avx512_bf16(const Product& product, int64_t begin, int64_t end) {
  product_rows<Avx512Bf16>(product, begin, end);
}

void attention_avx512_bf16(const Attention& attention, const AttentionUnit& unit, float* scratch) {
  attend<Avx512Bf16>(attention, unit, scratch);
}

}  // namespace outrider
