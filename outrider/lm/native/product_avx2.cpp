// The product by AVX2 and FMA: two halves of eight columns.

#include <immintrin.h>

#include "product_kernel.h"

namespace outrider {
namespace {

struct Avx2 {
  struct Sum {
    __m256 low, high;
  };
  struct Weights {
    __m256 low_even, low_odd, high_even, high_odd;
  };
  struct Pair {
    __m256 even, odd;
  };

  static constexpr int kRegisters = 16, kSumRegisters = 2, kWeightRegisters = 4, kPairRegisters = 2;
  static constexpr int kRows = 4;

  static Sum zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static __m256 even(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
  static __m256 odd(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static Weights load(const uint32_t* weights) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + 8));
    return {even(low), odd(low), even(high), odd(high)};
  }
  static Pair spread(uint32_t pair) {
    const __m256i pairs = _mm256_set1_epi32(static_cast<int>(pair));
    return {even(pairs), odd(pairs)};
  }
  static void add(Sum& sum, const Pair& pair, const Weights& weights) {
    sum.low = _mm256_fmadd_ps(pair.odd, weights.low_odd, sum.low);
    sum.high = _mm256_fmadd_ps(pair.odd, weights.high_odd, sum.high);
    sum.low = _mm256_fmadd_ps(pair.even, weights.low_even, sum.low);
    sum.high = _mm256_fmadd_ps(pair.even, weights.high_even, sum.high);
  }
  static Sum read(const float* values) { return {_mm256_load_ps(values), _mm256_load_ps(values + 8)}; }
  static __m256 plus_half(__m256 sum, const uint16_t* columns) {
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(columns));
    return _mm256_add_ps(sum, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(values), 16)));
  }
  static Sum plus(Sum sum, const uint16_t* columns) {
    return {plus_half(sum.low, columns), plus_half(sum.high, columns + 8)};
  }
  // The upper half of each number rounded to the nearest bfloat16, ties to even; what is no number stays none.
  static __m256i nearest(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i none = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_srli_epi32(_mm256_blendv_epi8(sum, quiet, none), 16);
  }
  static void round(uint16_t* columns, Sum sum) {
    // Packing works within each half of its inputs, so that quarters have to be put in order.
    const __m256i packed = _mm256_packus_epi32(nearest(sum.low), nearest(sum.high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(columns), _mm256_permute4x64_epi64(packed, 0xd8));
  }
  static void store(float* values, Sum sum) {
    _mm256_store_ps(values, sum.low);
    _mm256_store_ps(values + 8, sum.high);
  }
};

}  // namespace

void product_avx2(const Product& product, int64_t begin, int64_t end) {
  product_rows<Avx2>(product, begin, end);
}

}  // namespace outrider
