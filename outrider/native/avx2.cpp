// The operators by AVX2 and FMA; a block of a product has two halves of eight columns.

#include <immintrin.h>

#include "attention_kernel.h"
#include "byte_row.h"
#include "bytes_kernel.h"
#include "head_kernel.h"
#include "largest_kernel.h"
#include "product_kernel.h"
#include "race_kernel.h"

namespace outrider {
namespace {

// Eight numbers, of which the tiles of attention have several: of sixteen at once the registers would hold too few.
struct Avx2Vector {
  using Sum = __m256;

  static constexpr int64_t kWidth = 8;

  static Sum zero() { return _mm256_setzero_ps(); }
  static Sum read(const float* values) { return _mm256_load_ps(values); }
  static void store(float* values, Sum sum) { _mm256_store_ps(values, sum); }
  static Sum spread_float(float value) { return _mm256_set1_ps(value); }
  static Sum times(Sum one, Sum other) { return _mm256_mul_ps(one, other); }
  static Sum fused(Sum one, Sum other, Sum added) { return _mm256_fmadd_ps(one, other, added); }
  static Sum widened(const uint16_t* values) {
    const __m128i given = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(given), 16));
  }
};

struct Avx2 {
  using Vector = Avx2Vector;
  struct Sum {
    __m256 low, high;
  };
  struct Cells {
    __m256i low, high;
  };
  struct Weights {
    Sum odd, even;
  };
  using Lanes = __m256i;

  // In two steps, each with half of the weights: the registers then hold the sums of six rows.
  static constexpr int kSteps = 2;
  static constexpr int kRegisters = 16, kSumRegisters = 2, kWeightRegisters = 2, kPairRegisters = 1;
  static constexpr int kFewRows = 4, kRows = 6, kMostBlocks = 1;
  static constexpr int64_t kLinesAhead = 36;
  static constexpr bool kWidensRows = true, kInRegisters = false;
  static constexpr int kScoreRows = 3, kScoreVectors = 4, kValueRows = 3, kValueVectors = 4;
  static constexpr int64_t kTransposed = 8;

  static Sum zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static __m256 even(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
  static __m256 odd(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static Cells cells(const uint32_t* weights) {
    const auto* given = reinterpret_cast<const __m256i*>(weights);
    return {_mm256_loadu_si256(given), _mm256_loadu_si256(given + 1)};
  }
  static Weights split(const Cells& cells) {
    return {{odd(cells.low), odd(cells.high)}, {even(cells.low), even(cells.high)}};
  }
  static Sum load(const Weights& weights, int step) { return step == 0 ? weights.odd : weights.even; }
  static Sum load(const uint32_t* weights, int step) { return load(split(cells(weights)), step); }
  static void store_cells(uint32_t* memory, const Cells& cells) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(memory), cells.low);
    _mm256_store_si256(reinterpret_cast<__m256i*>(memory + 8), cells.high);
  }
  // Calls `each` with the number and the cells of each pair of a compressed segment.
  template <class Each>
  static void expand(const uint8_t* segment, const uint8_t* upper_bytes, const Each& each) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(upper_bytes)));
    const __m256i low_half = _mm256_set1_epi8(0x0f);
    const auto two_pairs = [&](int64_t pair, __m256i low_codes, __m256i high_codes) {
      const auto* lower = reinterpret_cast<const __m256i*>(segment + pair / 2 * kTwoPairs);
      const __m256i low = _mm256_loadu_si256(lower), high = _mm256_loadu_si256(lower + 1);
      const __m256i low_upper = _mm256_shuffle_epi8(table, _mm256_and_si256(low_codes, low_half));
      const __m256i high_upper = _mm256_shuffle_epi8(table, _mm256_and_si256(high_codes, low_half));
      each(pair, Cells{_mm256_unpacklo_epi8(low, low_upper), _mm256_unpacklo_epi8(high, high_upper)});
      each(pair + 1, Cells{_mm256_unpackhi_epi8(low, low_upper), _mm256_unpackhi_epi8(high, high_upper)});
    };
    for (int64_t pair = 0; pair < kSegmentPairs; pair += 4) {
      const auto* codes = reinterpret_cast<const __m256i*>(segment + kCodesAt + pair / 4 * kTwoPairs);
      const __m256i low = _mm256_loadu_si256(codes), high = _mm256_loadu_si256(codes + 1);
      two_pairs(pair, low, high);
      two_pairs(pair + 2, _mm256_srli_epi16(low, 4), _mm256_srli_epi16(high, 4));
    }
  }
  static __m256 spread(const WidePair& pair, int step) { return _mm256_set1_ps(step == 0 ? pair.odd : pair.even); }
  static void add(Sum& sum, __m256 input, const Sum& weights) {
    sum.low = _mm256_fmadd_ps(input, weights.low, sum.low);
    sum.high = _mm256_fmadd_ps(input, weights.high, sum.high);
  }
  static Sum read(const float* values) { return {_mm256_load_ps(values), _mm256_load_ps(values + 8)}; }
  static Sum widened(const uint16_t* values) { return {Vector::widened(values), Vector::widened(values + 8)}; }
  static Sum spread_float(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static Sum plus(Sum one, Sum other) {
    return {_mm256_add_ps(one.low, other.low), _mm256_add_ps(one.high, other.high)};
  }
  static Sum minus(Sum one, Sum other) {
    return {_mm256_sub_ps(one.low, other.low), _mm256_sub_ps(one.high, other.high)};
  }
  static Sum times(Sum one, Sum other) {
    return {_mm256_mul_ps(one.low, other.low), _mm256_mul_ps(one.high, other.high)};
  }
  static Sum over(Sum one, Sum other) {
    return {_mm256_div_ps(one.low, other.low), _mm256_div_ps(one.high, other.high)};
  }
  static Sum fused(Sum one, Sum other, Sum added) {
    return {_mm256_fmadd_ps(one.low, other.low, added.low), _mm256_fmadd_ps(one.high, other.high, added.high)};
  }
  static Sum larger(Sum one, Sum other) {
    return {_mm256_max_ps(one.low, other.low), _mm256_max_ps(one.high, other.high)};
  }
  static float largest(Sum values) {
    const __m256 eight = _mm256_max_ps(values.low, values.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }
  static Sum magnitude(Sum values) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, values.low), _mm256_andnot_ps(sign, values.high)};
  }
  static Sum with_sign(Sum values, Sum of) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(values.low, _mm256_and_ps(of.low, sign)),
            _mm256_or_ps(values.high, _mm256_and_ps(of.high, sign))};
  }
  static __m256 raised_half(__m256 values, __m256 powers) {
    const __m256i shifted = _mm256_slli_epi32(_mm256_castps_si256(powers), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(values), shifted));
  }
  // values times 2 to the power of the last bits of `powers`.
  static Sum raised(Sum values, Sum powers) {
    return {raised_half(values.low, powers.low), raised_half(values.high, powers.high)};
  }
  static Sum zero_where_less(Sum values, Sum x, float least) {
    const __m256 bound = _mm256_set1_ps(least);
    return {_mm256_and_ps(values.low, _mm256_cmp_ps(x.low, bound, _CMP_NLT_UQ)),
            _mm256_and_ps(values.high, _mm256_cmp_ps(x.high, bound, _CMP_NLT_UQ))};
  }
  static __m256 within_half(__m256 values, __m256i lanes, int64_t first, int64_t last, float otherwise) {
    const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(first)), lanes);
    const __m256i inside = _mm256_andnot_si256(before, _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(last)), lanes));
    return _mm256_blendv_ps(_mm256_set1_ps(otherwise), values, _mm256_castsi256_ps(inside));
  }
  // The values of lanes [first, last).
  static Sum within(Sum values, int64_t first, int64_t last, float otherwise) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i more = _mm256_add_epi32(lanes, _mm256_set1_epi32(8));
    return {within_half(values.low, lanes, first, last, otherwise),
            within_half(values.high, more, first, last, otherwise)};
  }
  static void store_lanes(uint32_t* memory, Lanes lanes) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(memory), lanes);
  }
  static void store_lanes(uint32_t* memory, __m256 lanes) { store_lanes(memory, _mm256_castps_si256(lanes)); }
  // Calls `each` with the number of each of eight cells, and with that cell of eight rows.
  template <class Each>
  static void transpose(const uint32_t* from, int64_t step, const Each& each) {
    const auto quarter = [&](int row, int cell) {
      return _mm_loadu_ps(reinterpret_cast<const float*>(from + row * step + cell));
    };
#pragma GCC unroll 2
    for (int cell = 0; cell < 8; cell += 4) {
      // Four cells of a row, and beside them of the row four further on.
      __m256 rows[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        rows[r] = _mm256_insertf128_ps(_mm256_castps128_ps256(quarter(r, cell)), quarter(r + 4, cell), 1);
      }
      const auto pair_up = [&](__m256 first, __m256 second, int64_t number) {
        each(number, _mm256_castps_si256(_mm256_shuffle_ps(first, second, 0x44)));
        each(number + 1, _mm256_castps_si256(_mm256_shuffle_ps(first, second, 0xee)));
      };
      pair_up(_mm256_unpacklo_ps(rows[0], rows[1]), _mm256_unpacklo_ps(rows[2], rows[3]), cell);
      pair_up(_mm256_unpackhi_ps(rows[0], rows[1]), _mm256_unpackhi_ps(rows[2], rows[3]), cell + 2);
    }
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

// A quad's even and its odd inputs are multiplied as pairs of 16 bits, each pair a part.
struct Avx2Bytes : Avx2 {
  struct Integers {
    __m256i low, high;
  };
  using Quads = Integers;

  static constexpr int kSumRegisters = 2, kWeightRegisters = 2, kInputRegisters = 2;
  static constexpr int kRows = 6, kParts = 2;

  // Rounds a row (see `ByteRowKernel`), and widens its integers to 16 bits: of each quad the even ones, then the odd.
  static ByteRow row(const uint16_t* row, int64_t num, int8_t* written) {
    // They are rounded into the half behind those that are written first.
    const int64_t num_quads = (num + kQuad - 1) / kQuad;
    int8_t* integers = written + num_quads * kQuad;
    const ByteRow found = byte_row(row, num, integers);
    for (int64_t quad = 0; quad < num_quads; ++quad) {
      int32_t bits;
      std::memcpy(&bits, integers + quad * kQuad, sizeof(bits));
      const __m128i words = _mm_cvtepi8_epi16(_mm_cvtsi32_si128(bits));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(written + quad * kParts * kSpreadBytes), _mm_shufflelo_epi16(words, 0xd8));
    }
    return found;
  }
  static Integers none() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static __m256i bytes_of(const uint8_t* half, int part) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(half));
    return part == 0 ? _mm256_and_si256(words, _mm256_set1_epi16(0xff)) : _mm256_srli_epi16(words, 8);
  }
  static Quads load(const uint8_t* line, int part) { return {bytes_of(line, part), bytes_of(line + 32, part)}; }
  static __m256i spread(const int8_t* pair) {
    int32_t bits;
    std::memcpy(&bits, pair, sizeof(bits));
    return _mm256_set1_epi32(bits);
  }
  static void add(Integers& sums, const Quads& weights, __m256i inputs) {
    sums.low = _mm256_add_epi32(sums.low, _mm256_madd_epi16(weights.low, inputs));
    sums.high = _mm256_add_epi32(sums.high, _mm256_madd_epi16(weights.high, inputs));
    // The compiler must not add up the parts' products first: there are registers for the sums alone.
    __asm__("" : "+x"(sums.low), "+x"(sums.high));
  }
  static __m256 without(__m256i sums, int32_t offset) {
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(sums, _mm256_set1_epi32(offset)));
  }
  static Sum scaled(const Integers& sums, int32_t offset, float row_scale, const float* scales) {
    return times({without(sums.low, offset), without(sums.high, offset)}, times(read(scales), spread_float(row_scale)));
  }
};

}  // namespace

void product_avx2(const Product& product, int64_t begin, int64_t end) {
  product_rows<Avx2>(product, begin, end);
}

HeadKernels head_kernels_avx2() { return head_kernels(); }

ByteKernels byte_kernels_avx2() {
  return {Avx2Bytes::row, byte_product<Avx2Bytes>, Avx2Bytes::kParts * kSpreadBytes};
}

void uniforms_avx2(const Counter& counter, const int64_t* token_ids, int64_t num, double* output) {
  uniforms(counter, token_ids, num, output);
}

void log_noise_avx2(const Counter& counter, const int64_t* token_ids, int64_t num, float* output) {
  log_noise(counter, token_ids, num, output);
}

void largest_avx2(const ScoreRow& row, int64_t num, float* scratch, int64_t* places, float* shares) {
  largest(row, num, scratch, places, shares);
}

int64_t place_of_largest_avx2(const ScoreRow& row) { return place_of_largest(row); }

RaceBounds race_avx2(const RaceRow& row, int64_t begin, int64_t end, float* bounds) {
  return race(row, begin, end, bounds);
}

void attention_avx2(const Attention& attention, const AttentionUnit& unit, float* scratch) {
  attend<Avx2>(attention, unit, scratch);
}

}  // namespace outrider
