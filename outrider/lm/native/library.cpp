// The operators of `outrider.lm.native`, by PyTorch's stable ABI.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "product.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Multiplications below which a second thread costs more than it saves.
constexpr int64_t kLeastWork = 1 << 16;

// In the order of `outrider.lm.native.Variant`.
constexpr outrider::ProductKernel kProducts[] = {
    outrider::product_avx2,
    outrider::product_avx512,
    outrider::product_avx512_bf16,
};

// The best variant that this CPU can run; -1 for none.
int64_t best_variant() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return -1;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw")) return 0;
  return __builtin_cpu_supports("avx512bf16") ? 2 : 1;
}

// rows: bfloat16 [..., K]. weight: bfloat16 [blocks, ceil(K / 2), 16, 2]. bias: bfloat16 [out_features].
Tensor packed_product(
    const Tensor& rows, const Tensor& weight, std::optional<Tensor> bias, int64_t out_features, int64_t variant) {
  STD_TORCH_CHECK(rows.dim() > 0 && weight.dim() == 4, "rows must have a dimension, the packed weight four");
  const int64_t num_inputs = rows.size(rows.dim() - 1);
  const int64_t num_blocks = weight.size(0);
  const int64_t num_pairs = weight.size(1);
  STD_TORCH_CHECK(
      rows.scalar_type() == ScalarType::BFloat16 && weight.scalar_type() == ScalarType::BFloat16 &&
          (!bias || bias->scalar_type() == ScalarType::BFloat16),
      "rows, weight and bias must be bfloat16");
  STD_TORCH_CHECK((num_inputs + 1) / 2 == num_pairs, "rows and weight differ in their number of inputs");
  STD_TORCH_CHECK(
      weight.is_contiguous() && weight.size(2) == outrider::kColumns && weight.size(3) == 2 &&
          (out_features + outrider::kColumns - 1) / outrider::kColumns == num_blocks,
      "the weight is not packed for so many outputs");
  STD_TORCH_CHECK(!bias || (bias->numel() == out_features && bias->is_contiguous()), "the bias does not fit");
  STD_TORCH_CHECK(variant >= 0 && variant <= best_variant(), "this CPU cannot run variant ", variant);

  std::vector<int64_t> sizes(rows.sizes().begin(), rows.sizes().end());
  sizes.back() = out_features;
  Tensor output = torch::stable::new_empty(rows, sizes);
  const Tensor given = torch::stable::contiguous(rows);
  const int64_t num_rows = num_inputs ? given.numel() / num_inputs : 0;

  const auto* inputs = static_cast<const uint16_t*>(given.const_data_ptr());
  std::vector<uint32_t> copied;
  // Pairs are read at once: each row must begin at one, and end with one.
  if (num_inputs % 2 != 0 || reinterpret_cast<uintptr_t>(inputs) % alignof(uint32_t) != 0) {
    copied.resize(num_rows * num_pairs);
    for (int64_t row = 0; row < num_rows; ++row) {
      std::copy_n(inputs + row * num_inputs, num_inputs, reinterpret_cast<uint16_t*>(copied.data() + row * num_pairs));
    }
  }
  const outrider::Product product{
      copied.empty() ? reinterpret_cast<const uint32_t*>(inputs) : copied.data(),
      static_cast<const uint32_t*>(weight.const_data_ptr()),
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
  library.def("packed_product(Tensor rows, Tensor weight, Tensor? bias, int out_features, int variant) -> Tensor");
  library.def("best_variant() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(outrider, CPU, library) {
  library.impl("packed_product", TORCH_BOX(&packed_product));
}

STABLE_TORCH_LIBRARY_IMPL(outrider, CompositeExplicitAutograd, library) {
  library.impl("best_variant", TORCH_BOX(&best_variant));
}
