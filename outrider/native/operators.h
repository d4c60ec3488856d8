// What the files of operators share. They are compiled with the same flags.

#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace outrider {

// Multiplications below which a second thread costs more than it saves.
constexpr int64_t kLeastWork = 1 << 16;

// The best variant that this CPU can run; -1 for none.
int64_t best_variant();

inline void check_variant(int64_t variant) {
  STD_TORCH_CHECK(variant >= 0 && variant <= best_variant(), "this CPU cannot run variant ", variant);
}

// A dense tensor on the CPU with undefined values, of bfloat16, float32 and so on. Decoding makes hundreds of tensors a
// pass: `torch::stable::new_empty` takes twice as long, as it finds its operator by name.
inline torch::stable::Tensor empty(const std::vector<int64_t>& sizes, torch::headeronly::ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t dimension = sizes.size(); dimension-- > 1;) {
    strides[dimension - 1] = strides[dimension] * std::max<int64_t>(sizes[dimension], 1);
  }
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()),
      sizes.data(),
      strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
      aoti_torch_device_type_cpu(),
      0,
      &handle));
  return torch::stable::Tensor(handle);
}

// The tensor, copied where it is not dense.
inline torch::stable::Tensor dense(const torch::stable::Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

}  // namespace outrider
