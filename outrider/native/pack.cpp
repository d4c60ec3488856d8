// The operator that packs the weights of a product; see packed_weight.h.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <numeric>
#include <vector>

#include "operators.h"
#include "packed_weight.h"

namespace {

using namespace outrider;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kUpperBits = 7;
constexpr int kUppers = 1 << kUpperBits;
constexpr uint8_t kNoCode = 0xff;
constexpr int64_t kNumbers = 2;  // of a cell

int64_t rounded_up(int64_t number, int64_t step) { return (number + step - 1) / step * step; }
int upper(uint16_t weight) { return weight >> 8 & (kUppers - 1); }
int sign(uint16_t weight) { return weight >> 15; }

// The weights of a segment, pair by pair, column by column.
using Segment = std::array<uint16_t, kSegmentCells * kNumbers>;

class Packing {
 public:
  Packing(const uint16_t* weights, int64_t num_out, int64_t num_in)
      : weights_(weights),
        num_out_(num_out),
        num_in_(num_in),
        num_blocks_((num_out + kColumns - 1) / kColumns),
        num_pairs_(pairs_of_inputs(num_in)),
        num_segments_((num_pairs_ + kSegmentPairs - 1) / kSegmentPairs),
        places_(num_blocks_ * num_segments_) {}

  int64_t places_bytes() const { return rounded_up(places_.size() * sizeof(uint32_t), kLineBytes); }
  // Those of a weight that cannot be compressed: compiled code takes sizes as constants, and layers of one shape share it.
  int64_t num_bytes() const { return sizeof(PackedHeader) + places_bytes() + num_blocks_ * num_pairs_ * kLineBytes; }

  void write(uint8_t* memory) {
    choose_codes();
    place_segments();
    PackedHeader header{{}, num_bytes(), num_blocks_, num_pairs_};
    for (int upper = 0; upper < kUppers; ++upper) {
      if (codes_[upper] == kNoCode) continue;
      header.upper_bytes[codes_[upper]] = static_cast<uint8_t>(upper);
      header.upper_bytes[codes_[upper] + kCodes / 2] = static_cast<uint8_t>(upper | 1 << kUpperBits);
    }
    std::memcpy(memory, &header, sizeof(header));
    std::memcpy(memory + sizeof(header), places_.data(), places_.size() * sizeof(uint32_t));
    uint8_t* lines = memory + sizeof(header) + places_bytes();
    for_each_segment([&](int64_t block, int64_t number, const Segment& segment) {
      const uint32_t place = places_[block * num_segments_ + number];
      uint8_t* at = lines + static_cast<int64_t>(place >> 1) * kLineBytes;
      if (place & 1) {
        compress(segment, at);
      } else {
        std::memcpy(at, segment.data(), pairs_of(number) * kLineBytes);
      }
    });
  }

 private:
  int64_t pairs_of(int64_t number) const { return std::min(kSegmentPairs, num_pairs_ - number * kSegmentPairs); }

  // Calls `each` with all segments, by all threads; what there is no weight for is zero.
  template <class Each>
  void for_each_segment(const Each& each) const {
    const int64_t block_work = std::max<int64_t>(1, num_in_ * kColumns);
    torch::stable::parallel_for(0, num_blocks_, (kLeastWork + block_work - 1) / block_work, [&](int64_t begin, int64_t end) {
      Segment segment;
      for (int64_t block = begin; block < end; ++block) {
        for (int64_t number = 0; number < num_segments_; ++number) {
          read(block, number, segment);
          each(block, number, segment);
        }
      }
    });
  }

  void read(int64_t block, int64_t number, Segment& segment) const {
    segment.fill(0);
    const int64_t first = number * kSegmentPairs * kNumbers;
    const int64_t num = std::min(kSegmentPairs * kNumbers, num_in_ - first);
    for (int64_t column = 0; column < std::min(kColumns, num_out_ - block * kColumns); ++column) {
      const uint16_t* row = weights_ + (block * kColumns + column) * num_in_ + first;
      for (int64_t in = 0; in < num; ++in) {
        segment[(in / kNumbers * kColumns + column) * kNumbers + in % kNumbers] = row[in];
      }
    }
  }

  // Gives codes to the values that most weights have.
  void choose_codes() {
    std::array<int64_t, kUppers> counts{};
    std::mutex counting;
    torch::stable::parallel_for(0, num_out_ * num_in_, kLeastWork, [&](int64_t begin, int64_t end) {
      std::array<int64_t, kUppers> own{};
      for (int64_t at = begin; at < end; ++at) ++own[upper(weights_[at])];
      const std::lock_guard lock(counting);
      for (int upper = 0; upper < kUppers; ++upper) counts[upper] += own[upper];
    });
    std::array<int, kUppers> order;
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int one, int other) { return counts[one] > counts[other]; });
    codes_.fill(kNoCode);
    for (int code = 0; code < kCodes / 2; ++code) codes_[order[code]] = static_cast<uint8_t>(code);
  }

  void place_segments() {
    for_each_segment([&](int64_t block, int64_t number, const Segment& segment) {
      const bool has_codes = std::all_of(
          segment.begin(), segment.end(), [&](uint16_t weight) { return codes_[upper(weight)] != kNoCode; });
      places_[block * num_segments_ + number] = has_codes && pairs_of(number) == kSegmentPairs;
    });
    uint32_t line = 0;
    for (int64_t at = 0; at < static_cast<int64_t>(places_.size()); ++at) {
      const bool is_compressed = places_[at] != 0;
      places_[at] |= line << 1;
      line += static_cast<uint32_t>(is_compressed ? kCompressedLines : pairs_of(at % num_segments_));
    }
  }

  void compress(const Segment& segment, uint8_t* memory) const {
    constexpr int64_t kGroup = 8;  // weights of one pair that follow each other
    std::memset(memory + kCodesAt, 0, kSegmentPairs / 4 * kTwoPairs);
    for (int64_t two = 0; two < kSegmentPairs / 2; ++two) {
      const uint16_t* given = segment.data() + two * kTwoPairs;
      uint8_t* lower = memory + two * kTwoPairs;
      uint8_t* codes = memory + kCodesAt + two / 2 * kTwoPairs;
      for (int64_t at = 0; at < kTwoPairs; ++at) {
        const int64_t group = at / kGroup;
        const uint16_t weight = given[group % 2 * kTwoPairs / 2 + group / 2 * kGroup + at % kGroup];
        lower[at] = static_cast<uint8_t>(weight);
        const int code = codes_[upper(weight)] + sign(weight) * kCodes / 2;
        codes[at] |= static_cast<uint8_t>(code << two % 2 * 4);
      }
    }
  }

  const uint16_t* weights_;
  int64_t num_out_, num_in_, num_blocks_, num_pairs_, num_segments_;
  std::vector<uint32_t> places_;
  std::array<uint8_t, kUppers> codes_;
};

// weight: bfloat16 [out_features, in_features]. Returns it as `packed_product` reads it, uint8 [N].
Tensor pack_weight(const Tensor& weight) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == ScalarType::BFloat16, "a weight is bfloat16 [out, in]");
  const Tensor given = dense(weight);
  Packing packing(static_cast<const uint16_t*>(given.const_data_ptr()), given.size(0), given.size(1));
  constexpr int64_t kMostBytes = (int64_t{1} << 31) * kLineBytes;
  STD_TORCH_CHECK(packing.num_bytes() < kMostBytes, "a weight has less than 128 GiB");
  Tensor packed = empty({packing.num_bytes()}, ScalarType::Byte);
  packing.write(static_cast<uint8_t*>(packed.mutable_data_ptr()));
  return packed;
}

// packed: what `pack_weight` returned. Returns how many bytes of it were written, from the first on.
int64_t written_bytes(const Tensor& packed) {
  PackedHeader header{};
  STD_TORCH_CHECK(packed.numel() >= static_cast<int64_t>(sizeof(header)), "the weight is not packed");
  const auto* memory = static_cast<const uint8_t*>(packed.const_data_ptr());
  std::memcpy(&header, memory, sizeof(header));
  STD_TORCH_CHECK(header.num_bytes == packed.numel(), "the weight is not packed");
  const int64_t first_line = header.num_bytes - header.num_blocks * header.num_pairs * kLineBytes;
  const int64_t num_segments = (header.num_pairs + kSegmentPairs - 1) / kSegmentPairs;
  if (header.num_blocks == 0) return first_line;
  uint32_t last;
  std::memcpy(&last, memory + sizeof(header) + (header.num_blocks * num_segments - 1) * sizeof(last), sizeof(last));
  const int64_t num_lines = last & 1 ? kCompressedLines : header.num_pairs - (num_segments - 1) * kSegmentPairs;
  return first_line + (static_cast<int64_t>(last >> 1) + num_lines) * kLineBytes;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(outrider, library) {
  library.def("pack_weight(Tensor weight) -> Tensor");
  library.def("written_bytes(Tensor packed) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(outrider, CPU, library) {
  library.impl("pack_weight", TORCH_BOX(&pack_weight));
  library.impl("written_bytes", TORCH_BOX(&written_bytes));
}
