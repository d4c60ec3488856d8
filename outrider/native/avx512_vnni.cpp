// The product in 8 bits by AVX-512 VNNI, one of whose instructions multiplies and adds four inputs of 16 columns.

#include <immintrin.h>

#include <bit>

#include "byte_row.h"
#include "bytes_kernel.h"
#include "vectors_avx512.h"

namespace outrider {
namespace {

struct Vnni : Avx512Vectors {
  using Integers = __m512i;
  using Quads = __m512i;

  static constexpr int kRegisters = 32, kSumRegisters = 1, kWeightRegisters = 1, kInputRegisters = 2;
  static constexpr int kRows = 8, kParts = 1;

  static Integers none() { return _mm512_setzero_si512(); }
  static Quads load(const uint8_t* line, int) { return _mm512_loadu_si512(line); }
  static __m512i spread(const int8_t* quad) {
    int32_t bits;
    std::memcpy(&bits, quad, sizeof(bits));
    return _mm512_set1_epi32(bits);
  }
  static void add(Integers& sums, Quads weights, __m512i inputs) { sums = _mm512_dpbusd_epi32(sums, weights, inputs); }
  static Sum scaled(Integers sums, int32_t offset, float row_scale, const float* scales) {
    const Sum values = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_set1_epi32(offset)));
    return _mm512_mul_ps(values, _mm512_mul_ps(_mm512_load_ps(scales), _mm512_set1_ps(row_scale)));
  }
};

}  // namespace

ByteKernels byte_kernels_vnni() { return {byte_row, byte_product<Vnni>, Vnni::kParts * kSpreadBytes}; }

}  // namespace outrider
