// The operators of a draft head: its products, each with what lies between it and the next. A head is so small that the
// way into an operator takes as long as a product.

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "head_layer.h"

namespace {

using namespace outrider;

// rows: bfloat16 [..., K]. Returns bfloat16 [..., out_features].
Tensor byte_product(const Tensor& rows, const std::vector<Tensor>& layer, int64_t out_features, int64_t variant) {
  check_variant(variant);
  STD_TORCH_CHECK(rows.dim() > 0 && rows.scalar_type() == ScalarType::BFloat16, "rows must be bfloat16");
  const int64_t num_inputs = rows.size(rows.dim() - 1);
  const Layer given(layer, num_inputs, out_features);
  std::vector<int64_t> sizes(rows.sizes().begin(), rows.sizes().end());
  sizes.back() = out_features;
  Tensor output = empty(sizes, ScalarType::BFloat16);
  int64_t num_rows = 1;
  for (int64_t dimension = 0; dimension + 1 < rows.dim(); ++dimension) num_rows *= rows.size(dimension);
  const Tensor inputs = dense(rows);
  given.multiply(numbers_of(inputs), num_rows, changed(output), variant);
  return output;
}

// embeddings, hidden: bfloat16 [N, H]. norms: bfloat16 [2, H]. qkv: of 2 H inputs. cosines, sines: bfloat16 [P, dim].
// positions: int64 [N], below P. Returns queries, keys and values, [N, heads, dim], of which the first `num_rotated` are
// rotated; and the norm of `hidden`, [N, H].
std::tuple<Tensor, Tensor> head_project(
    const Tensor& embeddings, const Tensor& hidden, const Tensor& norms, double epsilon, const std::vector<Tensor>& qkv,
    const Tensor& cosines, const Tensor& sines, const Tensor& positions, int64_t num_heads, int64_t num_rotated,
    int64_t variant) {
  check_variant(variant);
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

  const Tensor first = dense(embeddings), second = dense(hidden);
  Tensor residual = empty({num_rows, width}, ScalarType::BFloat16);
  Tensor heads = empty({num_rows, num_heads, dim}, ScalarType::BFloat16);
  const Rotations rotations{numbers_of(cosines), numbers_of(sines), dim};
  project_rows(
      {numbers_of(first), numbers_of(second), places, num_rows, width}, numbers_of(norms), static_cast<float>(epsilon),
      layer, rotations, num_heads, num_rotated, changed(heads), changed(residual), variant);
  return {heads, residual};
}

// attended: bfloat16 [N, inputs of `o`]. residual: bfloat16 [N, H]. norm: bfloat16 [H]. Returns the outputs of the layer,
// [N, H]: residual + o(attended), plus what down(silu(gate) * up) makes of its norm.
Tensor head_finish(
    const Tensor& attended, const Tensor& residual, const std::vector<Tensor>& o, const Tensor& norm, double epsilon,
    const std::vector<Tensor>& gate_up, const std::vector<Tensor>& down, int64_t num_inner, int64_t variant) {
  check_variant(variant);
  STD_TORCH_CHECK(attended.dim() == 2 && residual.dim() == 2 && num_inner > 0, "rows must have two dimensions");
  const int64_t num_rows = residual.size(0), width = residual.size(1), num_attended = attended.size(1);
  check_rows(residual, num_rows, width, "residual");
  check_rows(attended, num_rows, num_attended, "attended");
  check_weight(norm, width, "norm");
  const Layer after_attention(o, num_attended, width);
  const Layer before(gate_up, width, 2 * num_inner), after(down, num_inner, width);

  const Tensor given = dense(attended), added = dense(residual);
  Tensor output = empty({num_rows, width}, ScalarType::BFloat16);
  finish_rows(
      numbers_of(given), numbers_of(added), num_rows, width, {after_attention, before, after, num_inner}, numbers_of(norm),
      static_cast<float>(epsilon), changed(output), variant);
  return output;
}

// outputs: bfloat16 [N, H]. norm: bfloat16 [H]. Returns their norm, [N, H], and what the layer makes of it, [N, D].
std::tuple<Tensor, Tensor> head_logits(
    const Tensor& outputs, const Tensor& norm, double epsilon, const std::vector<Tensor>& output, int64_t num_logits,
    int64_t variant) {
  check_variant(variant);
  STD_TORCH_CHECK(outputs.dim() == 2, "rows must have two dimensions");
  const int64_t num_rows = outputs.size(0), width = outputs.size(1);
  check_rows(outputs, num_rows, width, "outputs");
  check_weight(norm, width, "norm");
  const Layer layer(output, width, num_logits);

  const Tensor given = dense(outputs);
  Tensor states = empty({num_rows, width}, ScalarType::BFloat16);
  Tensor logits = empty({num_rows, num_logits}, ScalarType::BFloat16);
  logits_of_rows(
      numbers_of(given), num_rows, width, numbers_of(norm), static_cast<float>(epsilon), layer, changed(states),
      changed(logits), variant);
  return {states, logits};
}

// logits: bfloat16 [R, D]. states: bfloat16 [R, rank]. rows: of each of F nodes, below R. token_ids: the token before,
// below V. embedding: bfloat16 [V, H]. Returns [F, D]: the logits of the nodes' rows plus output(silu(token(embedding) +
// state)).
Tensor transition_logits(
    const Tensor& logits, const Tensor& states, const std::vector<int64_t>& rows, const std::vector<int64_t>& token_ids,
    const Tensor& embedding, const std::vector<Tensor>& token, const std::vector<Tensor>& output, int64_t variant) {
  check_variant(variant);
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

  Tensor found = empty({num_nodes, num_logits}, ScalarType::BFloat16);
  const Transition transition{before, after, numbers_of(embedding), width, rank, num_logits};
  transition.add(numbers_of(logits), numbers_of(states), rows, token_ids, changed(found), variant);
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
