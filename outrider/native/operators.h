// What the files of operators share. They are compiled with the same flags.

#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
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

// Memory of this thread, at a multiple of 64 bytes, which is kept for the next call.
inline float* thread_scratch(int64_t num_floats) {
  constexpr uintptr_t kAlignment = 64;
  thread_local std::unique_ptr<float[]> memory;
  thread_local int64_t size = 0;
  if (size < num_floats) {
    memory = std::make_unique_for_overwrite<float[]>(num_floats + kAlignment / sizeof(float));
    size = num_floats;
  }
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.get());
  return memory.get() + (kAlignment - address % kAlignment) % kAlignment / sizeof(float);
}

}  // namespace outrider
