// The operator of a draft head that runs its layer over new columns of sessions.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "attend.h"
#include "head_layer.h"

namespace {

using namespace outrider;

// The new rows of sessions: of each its columns, and behind them mask rows, which have the feature of the last column.
class ColumnRows {
 public:
  ColumnRows(
      const std::vector<int64_t>& num_columns, const std::vector<int64_t>& num_masks, const std::vector<int64_t>& firsts)
      : num_columns_(num_columns), num_masks_(num_masks) {
    STD_TORCH_CHECK(
        num_masks.size() == num_columns.size() && firsts.size() == num_columns.size(), "sessions differ in number");
    for (size_t session = 0; session < firsts.size(); ++session) {
      STD_TORCH_CHECK(
          num_columns[session] > 0 && num_masks[session] >= 0 && firsts[session] >= 0,
          "a session has a column, no less than 0 mask rows, and slots from 0 on");
      for (int64_t row = 0; row < num_of(session); ++row) positions.push_back(firsts[session] + row);
      num_columns_of_all += num_columns[session];
      num_outputs_of_all += num_outputs(session);
      most_masks = std::max(most_masks, num_masks[session]);
    }
  }

  int64_t num_of(size_t session) const { return num_columns_[session] + num_masks_[session]; }
  // Of its last column and its mask rows; of the other columns only keys and values are used.
  int64_t num_outputs(size_t session) const { return 1 + num_masks_[session]; }

  // Writes the rows' halves, [num, width] each. fused: of the columns. masks: [2, most, width].
  void write(
      const uint16_t* fused, const std::vector<int64_t>& token_ids, const uint16_t* embedding, const uint16_t* masks,
      int64_t most, int64_t width, AddKernel add, uint16_t* embeddings, uint16_t* hidden) const {
    const int64_t row_bytes = width * static_cast<int64_t>(sizeof(uint16_t));
    const int64_t* token_id = token_ids.data();
    for (size_t session = 0; session < num_columns_.size(); ++session) {
      for (int64_t column = 0; column < num_columns_[session]; ++column) {
        std::memcpy(embeddings, embedding + *token_id++ * width, row_bytes);
        std::memcpy(hidden, fused, row_bytes);
        embeddings += width, hidden += width, fused += width;
      }
      for (int64_t mask = 0; mask < num_masks_[session]; ++mask) {
        std::memcpy(embeddings, masks + mask * width, row_bytes);
        std::memcpy(hidden, fused - width, row_bytes);
        add(hidden, masks + (most + mask) * width, width);
        embeddings += width, hidden += width;
      }
    }
  }

  std::vector<int64_t> positions;
  int64_t num_columns_of_all = 0, num_outputs_of_all = 0, most_masks = 0;

 private:
  const std::vector<int64_t>& num_columns_;
  const std::vector<int64_t>& num_masks_;
};

// Stores the keys and values of a session's rows, whose heads, [num_rows, heads + 2 * key_heads, dim], are queries, keys
// and values, and writes what the last `num_outputs` rows attend to, [num_outputs, heads, dim]: all slots up to their own,
// which is the position.
void attend_columns(
    const uint16_t* heads, int64_t num_rows, int64_t num_outputs, const int64_t* positions, Tensor& keys, Tensor& values,
    int64_t num_heads, uint16_t* attended, int64_t variant) {
  const int64_t num_key_heads = keys.size(1), dim = keys.size(2), row_size = (num_heads + 2 * num_key_heads) * dim;
  const int64_t stored_bytes = num_key_heads * dim * static_cast<int64_t>(sizeof(uint16_t));
  for (int64_t row = 0; row < num_rows; ++row) {
    const uint16_t* key = heads + row * row_size + num_heads * dim;
    const int64_t at = positions[row] * num_key_heads * dim;
    std::memcpy(changed(keys) + at, key, stored_bytes);
    std::memcpy(changed(values) + at, key + num_key_heads * dim, stored_bytes);
  }
  std::vector<int32_t> pages(positions[num_rows - 1] / kPageLen + 1);
  std::iota(pages.begin(), pages.end(), 0);
  const int64_t first = num_rows - num_outputs;
  std::vector<AttentionRow> rows;
  for (int64_t row = 0; row < num_outputs; ++row) rows.push_back({row, positions[first + row], pages.data()});
  constexpr int64_t kCell = 2;
  attend(
      {reinterpret_cast<const uint32_t*>(heads + first * row_size),
       dim / kCell,
       row_size / kCell,
       static_cast<const uint32_t*>(keys.const_data_ptr()),
       {dim / kCell, num_key_heads * dim / kCell},
       values.const_data_ptr(),
       {dim, num_key_heads * dim},
       attended,
       num_key_heads,
       num_heads / num_key_heads,
       dim / kCell,
       dim,
       1.0f / std::sqrt(static_cast<float>(dim)),
       0.0f,
       0,
       true,
       1},
      rows, variant);
}

// The whole layer for new columns of sessions, and for the mask rows behind them.
// features: bfloat16 [C, F], of all columns. token_ids: of them, below V. num_columns, num_masks, firsts: of each session,
// firsts being slots and positions. keys, values: each session's, bfloat16 [slots, key_heads, dim]; those of the rows are
// stored. embedding: bfloat16 [V, H]. masks: bfloat16 [2, M, H], the embeddings of mask rows and what is added to their
// features. norms: bfloat16 [3, H], of embeddings, of features, and after attention. Returns the outputs of each session's
// last column and of the mask rows behind it: bfloat16 [N, H].
Tensor head_columns(
    const Tensor& features, const std::vector<int64_t>& token_ids, const std::vector<int64_t>& num_columns,
    const std::vector<int64_t>& num_masks, const std::vector<int64_t>& firsts, std::vector<Tensor> keys,
    std::vector<Tensor> values, const Tensor& embedding, const Tensor& masks, const std::vector<Tensor>& fc,
    const Tensor& norms, double epsilon, bool starts_normed, const std::vector<Tensor>& qkv, const Tensor& cosines,
    const Tensor& sines, int64_t num_heads, const std::vector<Tensor>& o, const std::vector<Tensor>& gate_up,
    const std::vector<Tensor>& down, int64_t num_inner, int64_t variant) {
  check_variant(variant);
  const ColumnRows rows(num_columns, num_masks, firsts);
  STD_TORCH_CHECK(
      features.dim() == 2 && embedding.dim() == 2 && masks.dim() == 3 && cosines.dim() == 2 && num_inner > 0,
      "features, embedding and rotations have two dimensions, masks three");
  const int64_t width = embedding.size(1), dim = cosines.size(1), num = static_cast<int64_t>(rows.positions.size());
  check_rows(features, rows.num_columns_of_all, features.size(1), "features");
  check_weight(embedding, embedding.numel(), "embedding");
  check_weight(masks, 2 * masks.size(1) * width, "masks");
  check_weight(norms, 3 * width, "norms");
  check_weight(cosines, cosines.numel(), "cosines");
  check_weight(sines, cosines.numel(), "sines");
  STD_TORCH_CHECK(rows.most_masks <= masks.size(1), "a session has more mask rows than there are masks");
  STD_TORCH_CHECK(
      static_cast<int64_t>(token_ids.size()) == rows.num_columns_of_all, "each column has a token");
  for (const int64_t token_id : token_ids) {
    STD_TORCH_CHECK(token_id >= 0 && token_id < embedding.size(0), "there is no token ", token_id);
  }
  STD_TORCH_CHECK(
      keys.size() == num_columns.size() && values.size() == num_columns.size(), "each session has keys and values");
  const int64_t num_key_heads = keys.empty() ? 1 : keys[0].size(1);
  STD_TORCH_CHECK(
      num_key_heads > 0 && num_heads > 0 && num_heads % num_key_heads == 0 && dim % 2 == 0 &&
          num_heads / num_key_heads <= kMostQueries,
      "the heads do not fit");
  for (size_t session = 0, row = 0; session < keys.size(); ++session) {
    row += rows.num_of(session);
    for (const Tensor* stored : {&keys[session], &values[session]}) {
      STD_TORCH_CHECK(
          stored->scalar_type() == ScalarType::BFloat16 && stored->dim() == 3 && stored->is_contiguous() &&
              stored->size(0) % kPageLen == 0 && stored->size(1) == num_key_heads && stored->size(2) == dim,
          "keys and values must be bfloat16 [slots, ", num_key_heads, ", ", dim, "], whole pages of them");
      STD_TORCH_CHECK(rows.positions[row - 1] < stored->size(0), "there is no slot ", rows.positions[row - 1]);
    }
    STD_TORCH_CHECK(
        rows.positions[row - 1] < cosines.size(0), "position ", rows.positions[row - 1], " has no rotation");
  }
  const int64_t num_all = num_heads + 2 * num_key_heads;
  const Layer fuse(fc, features.size(1), width), project(qkv, 2 * width, num_all * dim);
  const Layer after_attention(o, num_heads * dim, width);
  const Layer before(gate_up, width, 2 * num_inner), after(down, num_inner, width);

  const Tensor given = dense(features);
  std::vector<uint16_t> fused(rows.num_columns_of_all * width), embeddings(num * width), hidden(num * width);
  fuse.multiply(numbers_of(given), rows.num_columns_of_all, fused.data(), variant);
  rows.write(
      fused.data(), token_ids, numbers_of(embedding), numbers_of(masks), masks.size(1), width, kernels_of(variant).add,
      embeddings.data(), hidden.data());
  std::vector<uint16_t> heads(num * num_all * dim), normed(num * width);
  const uint16_t* norm = numbers_of(norms);
  const auto bound = static_cast<float>(epsilon);
  project_rows(
      {embeddings.data(), hidden.data(), rows.positions.data(), num, width}, norm, bound, project,
      {numbers_of(cosines), numbers_of(sines), dim}, num_all, num_heads + num_key_heads, heads.data(), normed.data(),
      variant);
  const int64_t num_outputs = rows.num_outputs_of_all;
  std::vector<uint16_t> attended(num_outputs * num_heads * dim), residual;
  int64_t first = 0, output_row = 0;
  for (size_t session = 0; session < keys.size(); ++session) {
    const int64_t own = rows.num_outputs(session), end = first + rows.num_of(session);
    attend_columns(
        heads.data() + first * num_all * dim, end - first, own, rows.positions.data() + first, keys[session],
        values[session], num_heads, attended.data() + output_row * num_heads * dim, variant);
    const uint16_t* added = (starts_normed ? normed : hidden).data();
    residual.insert(residual.end(), added + (end - own) * width, added + end * width);
    first = end;
    output_row += own;
  }
  Tensor output = empty({num_outputs, width}, ScalarType::BFloat16);
  finish_rows(
      attended.data(), residual.data(), num_outputs, width, {after_attention, before, after, num_inner}, norm + 2 * width,
      bound, changed(output), variant);
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(outrider, library) {
  library.def(
      "head_columns(Tensor features, int[] token_ids, int[] num_columns, int[] num_masks, int[] firsts, "
      "Tensor(a!)[] keys, Tensor(b!)[] values, Tensor embedding, Tensor masks, Tensor[] fc, Tensor norms, float epsilon, "
      "bool starts_normed, Tensor[] qkv, Tensor cosines, Tensor sines, int num_heads, Tensor[] o, Tensor[] gate_up, "
      "Tensor[] down, int num_inner, int variant) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(outrider, CPU, library) {
  library.impl("head_columns", TORCH_BOX(&head_columns));
}
