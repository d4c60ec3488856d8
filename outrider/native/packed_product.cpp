// The operator that multiplies rows with packed weights; see product.h.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "operators.h"
#include "product.h"

namespace {

using outrider::kLeastWork;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// In the order of `outrider.native.Variant`.
constexpr outrider::ProductKernel kProducts[] = {
    outrider::product_avx2,
    outrider::product_avx512,
    outrider::product_avx512_bf16,
    outrider::product_amx,
};

// The parts of a packed weight, if it is one of so many pairs of inputs and outputs.
outrider::PackedWeight weight_of(const Tensor& packed, int64_t num_pairs, int64_t out_features) {
  using namespace outrider;
  const auto* memory = static_cast<const uint8_t*>(packed.const_data_ptr());
  PackedHeader header{};
  STD_TORCH_CHECK(
      packed.scalar_type() == ScalarType::Byte && packed.dim() == 1 && packed.is_contiguous() &&
          packed.numel() >= static_cast<int64_t>(sizeof(header)) && reinterpret_cast<uintptr_t>(memory) % kLineBytes == 0,
      "the weight is not packed");
  std::memcpy(&header, memory, sizeof(header));
  STD_TORCH_CHECK(header.num_bytes == packed.numel(), "the weight is not packed");
  STD_TORCH_CHECK(header.num_pairs == num_pairs, "rows and weight differ in their number of inputs");
  STD_TORCH_CHECK(
      header.num_blocks == (out_features + kColumns - 1) / kColumns, "the weight is not packed for so many outputs");
  const auto* upper_bytes = memory + offsetof(PackedHeader, upper_bytes);
  const auto* places = reinterpret_cast<const uint32_t*>(memory + sizeof(header));
  const uint8_t* lines = memory + header.num_bytes - header.num_blocks * num_pairs * kLineBytes;
  return {upper_bytes, places, lines, (num_pairs + kSegmentPairs - 1) / kSegmentPairs};
}

// rows: bfloat16 [..., K]. weight: as `pack_weight` returned it. bias: bfloat16 [out_features].
Tensor packed_product(
    const Tensor& rows, const Tensor& weight, std::optional<Tensor> bias, int64_t out_features, int64_t variant) {
  STD_TORCH_CHECK(rows.dim() > 0, "rows must have a dimension");
  STD_TORCH_CHECK(
      rows.scalar_type() == ScalarType::BFloat16 && (!bias || bias->scalar_type() == ScalarType::BFloat16),
      "rows and bias must be bfloat16");
  const int64_t num_inputs = rows.size(rows.dim() - 1), num_pairs = outrider::pairs_of_inputs(num_inputs);
  const int64_t num_blocks = (out_features + outrider::kColumns - 1) / outrider::kColumns;
  const outrider::PackedWeight packed = weight_of(weight, num_pairs, out_features);
  STD_TORCH_CHECK(!bias || (bias->numel() == out_features && bias->is_contiguous()), "the bias does not fit");
  outrider::check_variant(variant);

  std::vector<int64_t> sizes(rows.sizes().begin(), rows.sizes().end());
  sizes.back() = out_features;
  Tensor output = outrider::empty(sizes, ScalarType::BFloat16);
  const Tensor given = outrider::dense(rows);
  int64_t num_rows = 1;
  for (int64_t dimension = 0; dimension + 1 < rows.dim(); ++dimension) num_rows *= rows.size(dimension);

  const auto* inputs = static_cast<const uint16_t*>(given.const_data_ptr());
  std::vector<uint32_t> copied;
  // Pairs are read at once: each row must begin at one, and end with one.
  if (num_inputs != 2 * num_pairs || reinterpret_cast<uintptr_t>(inputs) % alignof(uint32_t) != 0) {
    copied.resize(num_rows * num_pairs);
    for (int64_t row = 0; row < num_rows; ++row) {
      std::copy_n(inputs + row * num_inputs, num_inputs, reinterpret_cast<uint16_t*>(copied.data() + row * num_pairs));
    }
  }
  const outrider::Product product{
      copied.empty() ? reinterpret_cast<const uint32_t*>(inputs) : copied.data(),
      packed,
      bias ? static_cast<const uint16_t*>(bias->const_data_ptr()) : nullptr,
      static_cast<uint16_t*>(output.mutable_data_ptr()),
      num_rows,
      num_pairs,
      out_features};
  const int64_t block_work = std::max<int64_t>(1, num_rows * num_pairs * 2 * outrider::kColumns);
  torch::stable::parallel_for(0, num_blocks, (kLeastWork + block_work - 1) / block_work, [&](int64_t begin, int64_t end) {
    kProducts[variant](product, begin, end);
  });
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(outrider, library) {
  library.def(
      "packed_product(Tensor rows, Tensor weight, Tensor? bias, int out_features, int variant) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(outrider, CPU, library) {
  library.impl("packed_product", TORCH_BOX(&packed_product));
}
