// The operator that writes keys and values to their pages, and attends; see attention.h.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attend.h"
#include "attention.h"
#include "attention_units.h"
#include "operators.h"

namespace {

using outrider::kLeastWork;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// In the order of `outrider.native.Variant`.
constexpr outrider::AttentionKernel kAttentions[] = {
    outrider::attention_avx2,
    outrider::attention_avx512,
    outrider::attention_avx512_bf16,
    outrider::attention_amx,
};

}  // namespace

void outrider::attend(Attention attention, const std::vector<AttentionRow>& rows, int64_t variant) {
  int64_t num_pages = 0;
  for (const AttentionRow& row : rows) num_pages += row.position / kPageLen + 1;
  const int64_t num_heads = attention.num_key_heads * attention.group, cell = attention.is_bfloat16 ? 2 : 1;
  const int64_t work = num_pages * num_heads * kPageLen * (attention.key_cells * cell + attention.value_dim);
  const int64_t most_threads = std::min<int64_t>(torch::stable::get_num_threads(), work / kLeastWork + 1);
  const std::vector<Unit> units = divide(rows, attention, most_threads);
  const int64_t num_units = units.size(), num_threads = std::min(num_units, most_threads);
  // Each thread takes the next unit. To fetch its pages early it takes it before it is done with the last one, but for
  // the last units, which are for the thread that is done first.
  const int64_t num_early = num_units - 2 * num_threads;
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, num_threads, 1, [&](int64_t, int64_t) {
    float* scratch = thread_scratch(attention_scratch(attention));
    for (int64_t number = next++, following; number < num_units; number = following) {
      const bool is_early = number < num_early;
      if (is_early) following = next++;
      const Unit& unit = units[number];
      const Unit* after = is_early && following < num_units ? &units[following] : nullptr;
      kAttentions[variant](
          attention,
          {unit.first, unit.last, unit.key_head, after ? after->first->pages : nullptr, after ? after->key_head : 0},
          scratch);
      if (!is_early) following = next++;
    }
  });
}

namespace {

// The numbers of a layout, in order.
class Numbers {
 public:
  explicit Numbers(const Tensor& tensor)
      : next_(static_cast<const int32_t*>(tensor.const_data_ptr())), end_(next_ + tensor.numel()) {}

  const int32_t* take(int64_t num) {
    STD_TORCH_CHECK(num >= 0 && num <= end_ - next_, "the layout ends too early");
    return next_ += num, next_ - num;
  }
  // As `take`; each is at least 0 and less than `bound`.
  const int32_t* take_below(int64_t bound, int64_t num) {
    const int32_t* numbers = take(num);
    for (int64_t index = 0; index < num; ++index) {
      STD_TORCH_CHECK(
          numbers[index] >= 0 && numbers[index] < bound, "the layout has ", numbers[index], " where less than ", bound,
          " is allowed");
    }
    return numbers;
  }

 private:
  const int32_t* next_;
  const int32_t* end_;
};

outrider::PageSteps steps_of(const Tensor& stored) { return {stored.stride(1), stored.stride(2)}; }

// Copies new keys or values, [1, key_heads, rows, dim], to their slots.
void write_slots(const Tensor& given, const Tensor& stored, const int32_t* rows, const int32_t* slots, int64_t num) {
  const int64_t num_heads = stored.size(1), dim = stored.size(3), item = stored.element_size();
  const auto [head_step, row_step] = steps_of(stored);
  const auto* from = static_cast<const char*>(given.const_data_ptr());
  auto* to = static_cast<char*>(stored.mutable_data_ptr());
  for (int64_t write = 0; write < num; ++write) {
    const int64_t page = slots[write] / outrider::kPageLen, position = slots[write] % outrider::kPageLen;
    for (int64_t head = 0; head < num_heads; ++head) {
      const int64_t source = head * given.stride(1) + rows[write] * given.stride(2);
      const int64_t target = page * stored.stride(0) + head * head_step + position * row_step;
      std::memcpy(to + target * item, from + source * item, dim * item);
    }
  }
}

// Whether pages, [pages, key_heads, page_len, dim], have no gaps; the rows of a head, or the heads of a row, may be
// together.
bool are_dense_pages(const Tensor& stored) {
  const int64_t num_heads = stored.size(1), dim = stored.size(3);
  const auto has_steps = [&](int64_t head, int64_t row) { return stored.stride(1) == head && stored.stride(2) == row; };
  return stored.size(2) == outrider::kPageLen && stored.stride(3) == 1 &&
         stored.stride(0) == num_heads * outrider::kPageLen * dim &&
         (has_steps(outrider::kPageLen * dim, dim) || has_steps(dim, num_heads * dim));
}

// Whether rows are dense, and begin at multiples of a cell.
bool has_whole_cells(const Tensor& tensor) {
  const auto is_whole = [](uint64_t num_bytes) { return num_bytes % sizeof(uint32_t) == 0; };
  return tensor.stride(3) == 1 && is_whole(reinterpret_cast<uintptr_t>(tensor.const_data_ptr())) &&
         is_whole(tensor.stride(1) * tensor.element_size()) && is_whole(tensor.stride(2) * tensor.element_size());
}

// query: [1, heads, rows, key_dim]. new_keys, new_values: [1, key_heads, rows, ...]. keys, values: [pages, key_heads,
// page_len, ...], see `are_dense_pages`; they are written first, a slot being page * page_len + position. All are
// bfloat16, key_dim being even, or float32. layout: int32, see `lay_out` in outrider/lm/attention/native.py. Returns
// [1, rows, heads, value_dim], zero for rows that no branch has.
Tensor paged_attention(
    const Tensor& query, const Tensor& new_keys, const Tensor& new_values, Tensor keys, Tensor values,
    const Tensor& layout, double scaling, int64_t window, double softcap, int64_t variant) {
  const ScalarType type = query.scalar_type();
  const bool is_bfloat16 = type == ScalarType::BFloat16;
  STD_TORCH_CHECK(is_bfloat16 || type == ScalarType::Float, "attention is of bfloat16 or float32");
  for (const Tensor* tensor : {&new_keys, &new_values}) {
    STD_TORCH_CHECK(
        tensor->scalar_type() == type && tensor->dim() == 4 && tensor->size(0) == 1 && tensor->stride(3) == 1,
        "new keys and values must have the query's type, four dimensions, one batch and dense rows");
  }
  for (const Tensor* tensor : {&keys, &values}) {
    STD_TORCH_CHECK(
        tensor->scalar_type() == type && tensor->dim() == 4 && are_dense_pages(*tensor),
        "stored keys and values must have the query's type and four dimensions, and be pages of ", outrider::kPageLen,
        " positions without gaps");
  }
  STD_TORCH_CHECK(query.dim() == 4 && query.size(0) == 1, "the query must be of one batch");
  const int64_t num_heads = query.size(1), num_rows = query.size(2), key_dim = query.size(3);
  const int64_t num_pages = keys.size(0), num_key_heads = keys.size(1), value_dim = values.size(3);
  const int64_t num_slots = num_pages * outrider::kPageLen;
  STD_TORCH_CHECK(
      num_heads > 0 && num_key_heads > 0 && num_heads % num_key_heads == 0, "key heads must divide the query's heads");
  STD_TORCH_CHECK(
      num_heads / num_key_heads <= outrider::kMostQueries, "more than ", outrider::kMostQueries,
      " heads of the query have one key head");
  STD_TORCH_CHECK(
      keys.size(3) == key_dim && new_keys.size(3) == key_dim && new_values.size(3) == value_dim &&
          values.size(0) == num_pages && values.size(1) == num_key_heads && new_keys.size(1) == num_key_heads &&
          new_values.size(1) == num_key_heads && new_keys.size(2) == num_rows && new_values.size(2) == num_rows,
      "query, keys and values do not fit");
  STD_TORCH_CHECK(!is_bfloat16 || key_dim % 2 == 0, "keys of bfloat16 must have an even number of values");
  STD_TORCH_CHECK(layout.scalar_type() == ScalarType::Int && layout.is_contiguous(), "the layout must be int32");
  outrider::check_variant(variant);

  Numbers numbers(layout);
  const int32_t num_writes = *numbers.take(1);
  const int32_t* write_rows = numbers.take_below(num_rows, num_writes);
  const int32_t* slots = numbers.take_below(num_slots, num_writes);
  std::vector<outrider::AttentionRow> rows;
  rows.reserve(num_rows);
  std::vector<bool> has_row(num_rows);
  const int32_t num_branches = *numbers.take(1);
  STD_TORCH_CHECK(num_branches >= 0, "the layout has ", num_branches, " branches");
  for (int32_t branch = 0; branch < num_branches; ++branch) {
    const int32_t num = *numbers.take(1), table_len = *numbers.take(1);
    const int32_t* indices = numbers.take_below(num_rows, num);
    const int32_t* positions = numbers.take_below(int64_t{table_len} * outrider::kPageLen, num);
    const int32_t* pages = numbers.take_below(num_pages, table_len);
    for (int32_t index = 0; index < num; ++index) {
      STD_TORCH_CHECK(!has_row[indices[index]], "the layout has row ", indices[index], " twice");
      has_row[indices[index]] = true;
      rows.push_back({indices[index], positions[index], pages});
    }
  }

  // Nothing is written before the whole layout is known to be right.
  write_slots(new_keys, keys, write_rows, slots, num_writes);
  write_slots(new_values, values, write_rows, slots, num_writes);

  Tensor output = outrider::empty({1, num_rows, num_heads, value_dim}, query.scalar_type());
  if (static_cast<int64_t>(rows.size()) != num_rows) torch::stable::zero_(output);
  Tensor given = has_whole_cells(query) ? query : torch::stable::contiguous(query);
  if (!has_whole_cells(given)) given = torch::stable::clone(given);
  const int64_t cell = is_bfloat16 ? 2 : 1;
  outrider::Attention attention{
      static_cast<const uint32_t*>(given.const_data_ptr()),
      given.stride(1) / cell,
      given.stride(2) / cell,
      static_cast<const uint32_t*>(keys.const_data_ptr()),
      {keys.stride(1) / cell, keys.stride(2) / cell},
      values.const_data_ptr(),
      steps_of(values),
      output.mutable_data_ptr(),
      num_key_heads,
      num_heads / num_key_heads,
      key_dim / cell,
      value_dim,
      static_cast<float>(scaling),
      static_cast<float>(softcap),
      window,
      is_bfloat16,
      1};
  outrider::attend(attention, rows, variant);
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(outrider, library) {
  library.def(
      "paged_attention(Tensor query, Tensor new_keys, Tensor new_values, Tensor(a!) keys, Tensor(b!) values, "
      "Tensor layout, float scaling, int window, float softcap, int variant) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(outrider, CPU, library) {
  library.impl("paged_attention", TORCH_BOX(&paged_attention));
}
