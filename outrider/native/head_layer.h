// A draft head's layer, which its operators share; they are compiled with the same flags. All numbers are bfloat16.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "bytes.h"
#include "head.h"
#include "operators.h"

namespace outrider {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Rows that one thread takes, at least.
constexpr int64_t kLeastRows = 16;

template <class Do>
inline void for_each_row(int64_t num_rows, const Do& one) {
  torch::stable::parallel_for(0, num_rows, kLeastRows, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) one(row);
  });
}

inline const HeadKernels& kernels_of(int64_t variant) {
  static const HeadKernels kernels[] = {head_kernels_avx2(), head_kernels_avx512()};
  return kernels[variant > 0];
}

inline const uint16_t* numbers_of(const Tensor& tensor) { return static_cast<const uint16_t*>(tensor.const_data_ptr()); }
inline uint16_t* changed(const Tensor& tensor) { return static_cast<uint16_t*>(tensor.mutable_data_ptr()); }

// All variants give the same bits.
inline const ByteKernels& byte_kernels_of(int64_t variant) {
  static const ByteKernels narrow = byte_kernels_avx2();
  static const ByteKernels widest = __builtin_cpu_supports("avx512vnni") ? byte_kernels_vnni() : narrow;
  return variant > 0 ? widest : narrow;
}

// A layer with weights of 8 bits: uint8 [blocks, quads, 16, 4], each plus 128; scales, float32 [blocks, 16]; where it has
// one, a bias, bfloat16 [out_features].
class Layer {
 public:
  Layer(const std::vector<Tensor>& tensors, int64_t num_inputs, int64_t out_features)
      : tensors_(tensors), num_inputs_(num_inputs), out_features_(out_features) {
    STD_TORCH_CHECK(tensors.size() == 2 || tensors.size() == 3, "a layer has a weight, scales and perhaps a bias");
    const Tensor &weight = tensors[0], &scales = tensors[1];
    STD_TORCH_CHECK(
        weight.scalar_type() == ScalarType::Byte && weight.dim() == 4 && weight.is_contiguous() &&
            weight.size(2) == kByteColumns && weight.size(3) == kQuad,
        "the weight is not packed in bytes");
    STD_TORCH_CHECK(
        (num_inputs + kQuad - 1) / kQuad == weight.size(1) && num_inputs <= kMostByteInputs,
        "rows and weight differ in their number of inputs, or it exceeds ", kMostByteInputs);
    STD_TORCH_CHECK(
        (out_features + kByteColumns - 1) / kByteColumns == weight.size(0), "the weight is not packed for so many outputs");
    STD_TORCH_CHECK(
        scales.scalar_type() == ScalarType::Float && scales.is_contiguous() &&
            scales.numel() == weight.size(0) * kByteColumns &&
            reinterpret_cast<uintptr_t>(scales.const_data_ptr()) % kByteScaleAlignment == 0,
        "the scales do not fit");
    STD_TORCH_CHECK(
        tensors.size() == 2 || (tensors[2].scalar_type() == ScalarType::BFloat16 && tensors[2].is_contiguous() &&
                                tensors[2].numel() == out_features),
        "the bias does not fit");
  }

  // Multiplies rows, bfloat16 [num_rows, num_inputs], by all threads.
  void multiply(const uint16_t* rows, int64_t num_rows, uint16_t* output, int64_t variant) const {
    const auto& kernels = byte_kernels_of(variant);
    const int64_t num_blocks = tensors_[0].size(0), num_quads = tensors_[0].size(1);
    const int64_t row_bytes = num_quads * kernels.quad_bytes;
    std::vector<int8_t> integers(num_rows * row_bytes);
    std::vector<float> scales(num_rows);
    std::vector<int32_t> offsets(num_rows);
    for_each_row(num_rows, [&](int64_t row) {
      const ByteRow given = kernels.row(rows + row * num_inputs_, num_inputs_, integers.data() + row * row_bytes);
      scales[row] = given.scale;
      offsets[row] = given.offset;
    });
    const ByteProduct product{
        integers.data(),
        scales.data(),
        offsets.data(),
        static_cast<const uint8_t*>(tensors_[0].const_data_ptr()),
        static_cast<const float*>(tensors_[1].const_data_ptr()),
        tensors_.size() == 3 ? numbers_of(tensors_[2]) : nullptr,
        output,
        num_rows,
        num_quads,
        out_features_};
    const int64_t block_work = std::max<int64_t>(1, num_rows * num_quads * kQuad * kByteColumns);
    torch::stable::parallel_for(
        0, num_blocks, (kLeastWork + block_work - 1) / block_work,
        [&](int64_t begin, int64_t end) { kernels.product(product, begin, end); });
  }

 private:
  const std::vector<Tensor>& tensors_;
  int64_t num_inputs_, out_features_;
};

inline void check_rows(const Tensor& rows, int64_t num_rows, int64_t width, const char* name) {
  STD_TORCH_CHECK(
      rows.scalar_type() == ScalarType::BFloat16 && rows.dim() == 2 && rows.size(0) == num_rows && rows.size(1) == width,
      name, " must be bfloat16 [", num_rows, ", ", width, "]");
}

inline void check_weight(const Tensor& weight, int64_t num, const char* name) {
  STD_TORCH_CHECK(
      weight.scalar_type() == ScalarType::BFloat16 && weight.is_contiguous() && weight.numel() == num, name,
      " must be bfloat16, contiguous, and have ", num, " numbers");
}

// Rows on their way into a layer: each has an embedding, [width], and beside it a feature, or what its parent put out.
struct InputRows {
  const uint16_t* embeddings;
  const uint16_t* hidden;
  const int64_t* positions;
  int64_t num;
  int64_t width;
};

// The angles of all positions, [P, dim] each.
struct Rotations {
  const uint16_t* cosines;
  const uint16_t* sines;
  int64_t dim;
};

// Writes the heads of rows, [num, num_heads, dim], the first `num_rotated` of them rotated, and the norms of their hidden
// halves, [num, width]. norms: of both halves.
inline void project_rows(
    const InputRows& rows, const uint16_t* norms, float epsilon, const Layer& qkv, const Rotations& rotations,
    int64_t num_heads, int64_t num_rotated, uint16_t* heads, uint16_t* normed_hidden, int64_t variant) {
  const auto& kernels = kernels_of(variant);
  const int64_t width = rows.width, dim = rotations.dim;
  std::vector<uint16_t> normed(rows.num * 2 * width);
  for_each_row(rows.num, [&](int64_t row) {
    uint16_t* both = normed.data() + row * 2 * width;
    kernels.norm(rows.embeddings + row * width, norms, width, epsilon, both);
    kernels.norm(rows.hidden + row * width, norms + width, width, epsilon, both + width);
    std::memcpy(normed_hidden + row * width, both + width, width * sizeof(uint16_t));
  });
  qkv.multiply(normed.data(), rows.num, heads, variant);
  for_each_row(rows.num, [&](int64_t row) {
    const int64_t at = rows.positions[row] * dim;
    for (int64_t head = 0; head < num_rotated; ++head) {
      kernels.rotate(heads + (row * num_heads + head) * dim, rotations.cosines + at, rotations.sines + at, dim);
    }
  });
}

// The products behind attention.
struct LastLayers {
  const Layer& o;
  const Layer& gate_up;
  const Layer& down;
  int64_t num_inner;
};

// Writes the outputs of rows, [num_rows, width]: what `o` makes of what they attended to, plus their residuals; and added
// to that, what the gated layers make of its norm.
inline void finish_rows(
    const uint16_t* attended, const uint16_t* residual, int64_t num_rows, int64_t width, const LastLayers& layers,
    const uint16_t* norm, float epsilon, uint16_t* output, int64_t variant) {
  const auto& kernels = kernels_of(variant);
  const int64_t num_inner = layers.num_inner;
  std::vector<uint16_t> hidden(num_rows * width), normed(num_rows * width);
  std::vector<uint16_t> inner(num_rows * 2 * num_inner), gated(num_rows * num_inner);
  layers.o.multiply(attended, num_rows, hidden.data(), variant);
  for_each_row(num_rows, [&](int64_t row) {
    uint16_t* own = hidden.data() + row * width;
    kernels.add(own, residual + row * width, width);
    kernels.norm(own, norm, width, epsilon, normed.data() + row * width);
  });
  layers.gate_up.multiply(normed.data(), num_rows, inner.data(), variant);
  for_each_row(num_rows, [&](int64_t row) {
    uint16_t* own = inner.data() + row * 2 * num_inner;
    kernels.gate(own, num_inner);
    std::memcpy(gated.data() + row * num_inner, own, num_inner * sizeof(uint16_t));
  });
  layers.down.multiply(gated.data(), num_rows, output, variant);
  for_each_row(num_rows, [&](int64_t row) { kernels.add(output + row * width, hidden.data() + row * width, width); });
}

// Writes the norms of rows' outputs, [num_rows, width], and what a layer makes of them: logits.
inline void logits_of_rows(
    const uint16_t* outputs, int64_t num_rows, int64_t width, const uint16_t* norm, float epsilon, const Layer& layer,
    uint16_t* states, uint16_t* logits, int64_t variant) {
  const auto& kernels = kernels_of(variant);
  for_each_row(num_rows, [&](int64_t row) {
    kernels.norm(outputs + row * width, norm, width, epsilon, states + row * width);
  });
  layer.multiply(states, num_rows, logits, variant);
}

// The sequential part of a block head: output(silu(token(embedding of the token before) + state)), added to logits.
struct Transition {
  const Layer& token;
  const Layer& output;
  const uint16_t* embedding;
  int64_t width;
  int64_t rank;
  int64_t num_logits;

  // Writes the logits after nodes, [F, num_logits]: those of their rows, with what the token before adds.
  void add(
      const uint16_t* logits, const uint16_t* states, const std::vector<int64_t>& rows,
      const std::vector<int64_t>& token_ids, uint16_t* found, int64_t variant) const {
    const auto& kernels = kernels_of(variant);
    const auto num_nodes = static_cast<int64_t>(rows.size());
    std::vector<uint16_t> embedded(num_nodes * width), inner(num_nodes * rank);
    for (int64_t node = 0; node < num_nodes; ++node) {
      std::memcpy(embedded.data() + node * width, embedding + token_ids[node] * width, width * sizeof(uint16_t));
    }
    token.multiply(embedded.data(), num_nodes, inner.data(), variant);
    for (int64_t node = 0; node < num_nodes; ++node) {
      kernels.silu(inner.data() + node * rank, states + rows[node] * rank, rank);
    }
    output.multiply(inner.data(), num_nodes, found, variant);
    for (int64_t node = 0; node < num_nodes; ++node) {
      kernels.add(found + node * num_logits, logits + rows[node] * num_logits, num_logits);
    }
  }
};

}  // namespace
}  // namespace outrider
