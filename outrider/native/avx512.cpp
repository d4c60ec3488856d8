// The operators by AVX-512; two fused additions stand for its instruction for bfloat16.

#include <immintrin.h>

#include "attention_kernel.h"
#include "head_kernel.h"
#include "largest_kernel.h"
#include "product_kernel.h"
#include "race_kernel.h"
#include "vectors_avx512.h"

namespace outrider {
namespace {

struct Avx512 : Avx512Vectors {
  struct Weights {
    __m512 even, odd;
  };
  using Pair = Weights;

  static constexpr int kSteps = 1;
  static constexpr int kRegisters = 32, kSumRegisters = 1, kWeightRegisters = 2, kPairRegisters = 2;
  static constexpr int kFewRows = 8, kRows = 8, kMostBlocks = 4;
  static constexpr int64_t kLinesAhead = 24;
  static constexpr bool kWidensRows = true, kInRegisters = false;

  static __m512i even(__m512i pairs) { return _mm512_slli_epi32(pairs, 16); }
  // With a mask, not the bits to keep: these would take the register that sums of eight rows need.
  static __m512i odd(__m512i pairs) { return _mm512_maskz_mov_epi16(0xaaaaaaaa, pairs); }
  static Weights split(__m512i pairs) { return {_mm512_castsi512_ps(even(pairs)), _mm512_castsi512_ps(odd(pairs))}; }
  static Weights load(const Weights& weights, int) { return weights; }
  static Weights load(const uint32_t* weights, int) { return split(cells(weights)); }
  static Pair spread(const WidePair& pair, int) { return {_mm512_set1_ps(pair.even), _mm512_set1_ps(pair.odd)}; }
  static void add(Sum& sum, const Pair& pair, const Weights& weights) {
    sum = _mm512_fmadd_ps(pair.odd, weights.odd, sum);
    sum = _mm512_fmadd_ps(pair.even, weights.even, sum);
  }
};

}  // namespace

void product_avx512(const Product& product, int64_t begin, int64_t end) {
  product_rows<Avx512>(product, begin, end);
}

HeadKernels head_kernels_avx512() { return head_kernels(); }

void uniforms_avx512(const Counter& counter, const int64_t* token_ids, int64_t num, double* output) {
  uniforms(counter, token_ids, num, output);
}

void log_noise_avx512(const Counter& counter, const int64_t* token_ids, int64_t num, float* output) {
  log_noise(counter, token_ids, num, output);
}

void largest_avx512(const ScoreRow& row, int64_t num, float* scratch, int64_t* places, float* shares) {
  largest(row, num, scratch, places, shares);
}

int64_t place_of_largest_avx512(const ScoreRow& row) { return place_of_largest(row); }

RaceBounds race_avx512(const RaceRow& row, int64_t begin, int64_t end, float* bounds) {
  return race(row, begin, end, bounds);
}

void attention_avx512(const Attention& attention, const AttentionUnit& unit, float* scratch) {
  attend<Avx512>(attention, unit, scratch);
}

}  // namespace outrider
