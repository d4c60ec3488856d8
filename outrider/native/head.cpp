// The operators of a draft head: its products, each with what lies between it and the next. A head is so small that the
// way into an operator takes as long as a product.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <vector>

#include "bytes.h"
#include "head.h"
#include "operators.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Rows that one thread takes, at least.
constexpr int64_t kLeastRows = 16;

const outrider::HeadKernels& kernels_of(int64_t variant) {
  static const outrider::HeadKernels kernels[] = {outrider::head_kernels_avx2(), outrider::head_kernels_avx512()};
  return kernels[variant > 0];
}

const uint16_t* numbers_of(const Tensor& tensor) { return static_cast<const uint16_t*>(tensor.const_data_ptr()); }
uint16_t* changed(const Tensor& tensor) { return static_cast<uint16_t*>(tensor.mutable_data_ptr()); }

template <class Do>
void for_each_row(int64_t num_rows, const Do& one) {
  torch::stable::parallel_for(0, num_rows, kLeastRows, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) one(row);
  });
}

// All variants give the same bits.
outrider::ByteProductKernel byte_product_of(int64_t variant) {
  static const bool has_vnni = __builtin_cpu_supports("avx512vnni");
  return variant > 0 && has_vnni ? outrider::byte_product_vnni : outrider::byte_product_avx2;
}

// A layer with weights of 8 bits: uint8 [blocks, quads, 16, 4], each plus 128; scales, float32 [blocks, 16]; where it has
// one, a bias, bfloat16 [out_features].
class Layer {
 public:
  Layer(const std::vector<Tensor>& tensors, int64_t num_inputs, int64_t out_features)
      : tensors_(tensors), num_inputs_(num_inputs), out_features_(out_features) {
    using namespace outrider;
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
    const int64_t num_blocks = tensors_[0].size(0), num_quads = tensors_[0].size(1), width = num_quads * outrider::kQuad;
    std::vector<int8_t> integers(num_rows * width);
    std::vector<float> scales(num_rows);
    std::vector<int32_t> offsets(num_rows);
    for_each_row(num_rows, [&](int64_t row) {
      const auto given = outrider::byte_row_avx2(rows + row * num_inputs_, num_inputs_, integers.data() + row * width);
      scales[row] = given.scale;
      offsets[row] = given.offset;
    });
    const outrider::ByteProduct product{
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
    const int64_t block_work = std::max<int64_t>(1, num_rows * width * outrider::kByteColumns);
    const auto kernel = byte_product_of(variant);
    torch::stable::parallel_for(
        0, num_blocks, (outrider::kLeastWork + block_work - 1) / block_work,
        [&](int64_t begin, int64_t end) { kernel(product, begin, end); });
  }

 private:
  const std::vector<Tensor>& tensors_;
  int64_t num_inputs_, out_features_;
};

void check_rows(const Tensor& rows, int64_t num_rows, int64_t width, const char* name) {
  STD_TORCH_CHECK(
      rows.scalar_type() == ScalarType::BFloat16 && rows.dim() == 2 && rows.size(0) == num_rows && rows.size(1) == width,
      name, " must be bfloat16 [", num_rows, ", ", width, "]");
}

void check_weight(const Tensor& weight, int64_t num, const char* name) {
  STD_TORCH_CHECK(
      weight.scalar_type() == ScalarType::BFloat16 && weight.is_contiguous() && weight.numel() == num, name,
      " must be bfloat16, contiguous, and have ", num, " numbers");
}

// rows: bfloat16 [..., K]. Returns bfloat16 [..., out_features].
Tensor byte_product(const Tensor& rows, const std::vector<Tensor>& layer, int64_t out_features, int64_t variant) {
  outrider::check_variant(variant);
  STD_TORCH_CHECK(rows.dim() > 0 && rows.scalar_type() == ScalarType::BFloat16, "rows must be bfloat16");
  const int64_t num_inputs = rows.size(rows.dim() - 1);
  const Layer given(layer, num_inputs, out_features);
  std::vector<int64_t> sizes(rows.sizes().begin(), rows.sizes().end());
  sizes.back() = out_features;
  Tensor output = torch::stable::new_empty(rows, sizes);
  int64_t num_rows = 1;
  for (int64_t dimension = 0; dimension + 1 < rows.dim(); ++dimension) num_rows *= rows.size(dimension);
  const Tensor dense = torch::stable::contiguous(rows);
  given.multiply(numbers_of(dense), num_rows, changed(output), variant);
  return output;
}

// embeddings, hidden: bfloat16 [N, H]. norms: bfloat16 [2, H]. qkv: of 2 H inputs. cosines, sines: bfloat16 [P, dim].
// positions: int64 [N], below P. Returns queries, keys and values, [N, heads, dim], of which the first `num_rotated` are
// rotated; and the norm of `hidden`, [N, H].
std::tuple<Tensor, Tensor> head_project(
    const Tensor& embeddings, const Tensor& hidden, const Tensor& norms, double epsilon, const std::vector<Tensor>& qkv,
    const Tensor& cosines, const Tensor& sines, const Tensor& positions, int64_t num_heads, int64_t num_rotated,
    int64_t variant) {
  outrider::check_variant(variant);
  STD_TORCH_CHECK(hidden.dim() == 2 && cosines.dim() == 2, "rows and rotations must have two dimensions");
  const int64_t num_rows = hidden.size(0), width = hidden.size(1), dim = cosines.size(1);
  check_rows(hidden, num_rows, width, "hidden");
  check_rows(embeddings, num_rows, width, "embeddings");
  check_weight(norms, 2 * width, "norms");
  check_weight(cosines, cosines.size(0) * dim, "cosines");
  check_weight(sines, cosines.numel(), "sines");
  STD_TORCH_CHECK(
      positions.scalar_type() == ScalarType::Long && positions.is_contiguous() && positions.numel() == num_rows,
      "positions must be int64, one for each row");
  STD_TORCH_CHECK(dim % 2 == 0 && num_rotated >= 0 && num_rotated <= num_heads, "so many heads cannot be rotated");
  const Layer layer(qkv, 2 * width, num_heads * dim);
  const auto* places = static_cast<const int64_t*>(positions.const_data_ptr());
  for (int64_t row = 0; row < num_rows; ++row) {
    STD_TORCH_CHECK(places[row] >= 0 && places[row] < cosines.size(0), "position ", places[row], " has no rotation");
  }

  const auto& kernels = kernels_of(variant);
  const Tensor first = torch::stable::contiguous(embeddings), second = torch::stable::contiguous(hidden);
  Tensor residual = torch::stable::new_empty(hidden, {num_rows, width});
  Tensor heads = torch::stable::new_empty(hidden, {num_rows, num_heads, dim});
  std::vector<uint16_t> normed(num_rows * 2 * width);
  const uint16_t* weights = numbers_of(norms);
  const auto bound = static_cast<float>(epsilon);
  for_each_row(num_rows, [&](int64_t row) {
    uint16_t* both = normed.data() + row * 2 * width;
    kernels.norm(numbers_of(first) + row * width, weights, width, bound, both);
    kernels.norm(numbers_of(second) + row * width, weights + width, width, bound, both + width);
    std::memcpy(changed(residual) + row * width, both + width, width * sizeof(uint16_t));
  });
  layer.multiply(normed.data(), num_rows, changed(heads), variant);
  for_each_row(num_rows, [&](int64_t row) {
    for (int64_t head = 0; head < num_rotated; ++head) {
      kernels.rotate(
          changed(heads) + (row * num_heads + head) * dim, numbers_of(cosines) + places[row] * dim,
          numbers_of(sines) + places[row] * dim, dim);
    }
  });
  return {heads, residual};
}

// attended: bfloat16 [N, inputs of `o`]. residual: bfloat16 [N, H]. norm: bfloat16 [H]. Returns the outputs of the layer,
// [N, H]: residual + o(attended), plus what down(silu(gate) * up) makes of its norm.
Tensor head_finish(
    const Tensor& attended, const Tensor& residual, const std::vector<Tensor>& o, const Tensor& norm, double epsilon,
    const std::vector<Tensor>& gate_up, const std::vector<Tensor>& down, int64_t num_inner, int64_t variant) {
  outrider::check_variant(variant);
  STD_TORCH_CHECK(attended.dim() == 2 && residual.dim() == 2 && num_inner > 0, "rows must have two dimensions");
  const int64_t num_rows = residual.size(0), width = residual.size(1), num_attended = attended.size(1);
  check_rows(residual, num_rows, width, "residual");
  check_rows(attended, num_rows, num_attended, "attended");
  check_weight(norm, width, "norm");
  const Layer after_attention(o, num_attended, width);
  const Layer before(gate_up, width, 2 * num_inner), after(down, num_inner, width);

  const auto& kernels = kernels_of(variant);
  const Tensor given = torch::stable::contiguous(attended), added = torch::stable::contiguous(residual);
  Tensor output = torch::stable::new_empty(residual, {num_rows, width});
  std::vector<uint16_t> hidden(num_rows * width), normed(num_rows * width);
  std::vector<uint16_t> inner(num_rows * 2 * num_inner), gated(num_rows * num_inner);
  after_attention.multiply(numbers_of(given), num_rows, hidden.data(), variant);
  for_each_row(num_rows, [&](int64_t row) {
    uint16_t* own = hidden.data() + row * width;
    kernels.add(own, numbers_of(added) + row * width, width);
    kernels.norm(own, numbers_of(norm), width, static_cast<float>(epsilon), normed.data() + row * width);
  });
  before.multiply(normed.data(), num_rows, inner.data(), variant);
  for_each_row(num_rows, [&](int64_t row) {
    uint16_t* own = inner.data() + row * 2 * num_inner;
    kernels.gate(own, num_inner);
    std::memcpy(gated.data() + row * num_inner, own, num_inner * sizeof(uint16_t));
  });
  after.multiply(gated.data(), num_rows, changed(output), variant);
  for_each_row(num_rows, [&](int64_t row) {
    kernels.add(changed(output) + row * width, hidden.data() + row * width, width);
  });
  return output;
}

// outputs: bfloat16 [N, H]. norm: bfloat16 [H]. Returns their norm, [N, H], and what the layer makes of it, [N, D].
std::tuple<Tensor, Tensor> head_logits(
    const Tensor& outputs, const Tensor& norm, double epsilon, const std::vector<Tensor>& output, int64_t num_logits,
    int64_t variant) {
  outrider::check_variant(variant);
  STD_TORCH_CHECK(outputs.dim() == 2, "rows must have two dimensions");
  const int64_t num_rows = outputs.size(0), width = outputs.size(1);
  check_rows(outputs, num_rows, width, "outputs");
  check_weight(norm, width, "norm");
  const Layer layer(output, width, num_logits);

  const auto& kernels = kernels_of(variant);
  const Tensor given = torch::stable::contiguous(outputs);
  Tensor states = torch::stable::new_empty(outputs, {num_rows, width});
  Tensor logits = torch::stable::new_empty(outputs, {num_rows, num_logits});
  for_each_row(num_rows, [&](int64_t row) {
    kernels.norm(
        numbers_of(given) + row * width, numbers_of(norm), width, static_cast<float>(epsilon),
        changed(states) + row * width);
  });
  layer.multiply(numbers_of(states), num_rows, changed(logits), variant);
  return {states, logits};
}

// logits: bfloat16 [R, D]. states: bfloat16 [R, rank]. rows: of each of F nodes, below R. token_ids: the token before,
// below V. embedding: bfloat16 [V, H]. Returns [F, D]: the logits of the nodes' rows plus output(silu(token(embedding) +
// state)).
Tensor transition_logits(
    const Tensor& logits, const Tensor& states, const std::vector<int64_t>& rows, const std::vector<int64_t>& token_ids,
    const Tensor& embedding, const std::vector<Tensor>& token, const std::vector<Tensor>& output, int64_t variant) {
  outrider::check_variant(variant);
  STD_TORCH_CHECK(
      logits.dim() == 2 && states.dim() == 2 && embedding.dim() == 2, "logits, states and embedding have two dimensions");
  const int64_t num_logits = logits.size(1), rank = states.size(1), width = embedding.size(1);
  const auto num_nodes = static_cast<int64_t>(rows.size());
  check_rows(states, logits.size(0), rank, "states");
  check_weight(logits, logits.numel(), "logits");
  check_weight(states, states.numel(), "states");
  check_weight(embedding, embedding.numel(), "embedding");
  STD_TORCH_CHECK(token_ids.size() == rows.size(), "each node has a row and a token");
  for (size_t node = 0; node < rows.size(); ++node) {
    STD_TORCH_CHECK(rows[node] >= 0 && rows[node] < logits.size(0), "there is no row ", rows[node]);
    STD_TORCH_CHECK(
        token_ids[node] >= 0 && token_ids[node] < embedding.size(0), "there is no token ", token_ids[node]);
  }
  const Layer before(token, width, rank), after(output, rank, num_logits);

  const auto& kernels = kernels_of(variant);
  Tensor found = torch::stable::new_empty(logits, {num_nodes, num_logits});
  std::vector<uint16_t> embedded(num_nodes * width), inner(num_nodes * rank);
  for (int64_t node = 0; node < num_nodes; ++node) {
    std::memcpy(
        embedded.data() + node * width, numbers_of(embedding) + token_ids[node] * width, width * sizeof(uint16_t));
  }
  before.multiply(embedded.data(), num_nodes, inner.data(), variant);
  for (int64_t node = 0; node < num_nodes; ++node) {
    kernels.silu(inner.data() + node * rank, numbers_of(states) + rows[node] * rank, rank);
  }
  after.multiply(inner.data(), num_nodes, changed(found), variant);
  for (int64_t node = 0; node < num_nodes; ++node) {
    kernels.add(changed(found) + node * num_logits, numbers_of(logits) + rows[node] * num_logits, num_logits);
  }
  return found;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(outrider, library) {
  library.def("byte_product(Tensor rows, Tensor[] layer, int out_features, int variant) -> Tensor");
  library.def(
      "head_project(Tensor embeddings, Tensor hidden, Tensor norms, float epsilon, Tensor[] qkv, Tensor cosines, "
      "Tensor sines, Tensor positions, int num_heads, int num_rotated, int variant) -> (Tensor, Tensor)");
  library.def(
      "head_finish(Tensor attended, Tensor residual, Tensor[] o, Tensor norm, float epsilon, Tensor[] gate_up, "
      "Tensor[] down, int num_inner, int variant) -> Tensor");
  library.def(
      "head_logits(Tensor outputs, Tensor norm, float epsilon, Tensor[] output, int num_logits, int variant) -> "
      "(Tensor, Tensor)");
  library.def(
      "transition_logits(Tensor logits, Tensor states, int[] rows, int[] token_ids, Tensor embedding, Tensor[] token, "
      "Tensor[] output, int variant) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(outrider, CPU, library) {
  library.impl("byte_product", TORCH_BOX(&byte_product));
  library.impl("head_project", TORCH_BOX(&head_project));
  library.impl("head_finish", TORCH_BOX(&head_finish));
  library.impl("head_logits", TORCH_BOX(&head_logits));
  library.impl("transition_logits", TORCH_BOX(&transition_logits));
}
