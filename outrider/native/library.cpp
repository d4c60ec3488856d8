// The operators of `outrider.native`, by PyTorch's stable ABI.

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "attention.h"
#include "attention_units.h"
#include "largest.h"
#include "operators.h"
#include "product.h"
#include "race.h"

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

constexpr outrider::UniformKernel kUniforms[] = {
    outrider::uniforms_avx2,
    outrider::uniforms_avx512,
    outrider::uniforms_avx512,
    outrider::uniforms_avx512,
};

constexpr outrider::RaceKernel kRaces[] = {
    outrider::race_avx2,
    outrider::race_avx512,
    outrider::race_avx512,
    outrider::race_avx512,
};

constexpr outrider::LargestKernel kLargest[] = {
    outrider::largest_avx2,
    outrider::largest_avx512,
    outrider::largest_avx512,
    outrider::largest_avx512,
};

constexpr outrider::PlaceKernel kPlaces[] = {
    outrider::place_of_largest_avx2,
    outrider::place_of_largest_avx512,
    outrider::place_of_largest_avx512,
    outrider::place_of_largest_avx512,
};

constexpr outrider::AttentionKernel kAttentions[] = {
    outrider::attention_avx2,
    outrider::attention_avx512,
    outrider::attention_avx512_bf16,
    outrider::attention_amx,
};

// Share by which a bound may be wrong.
constexpr float kSlack = 2e-3f;
// Tokens that one thread looks at, at least.
constexpr int64_t kLeastTokens = 8192;

// Whether the CPU has AMX for bfloat16, and the operating system lets this process use it.
bool may_use_tiles() {
  static const bool may = [] {
    constexpr unsigned int kLeaf = 7, kBfloat16 = 1u << 22, kTiles = 1u << 24;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!__get_cpuid_count(kLeaf, 0, &eax, &ebx, &ecx, &edx)) return false;
    if (!(edx & kBfloat16) || !(edx & kTiles)) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return may;
}

}  // namespace

int64_t outrider::best_variant() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return -1;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return 0;
  }
  if (!__builtin_cpu_supports("avx512bf16")) return 1;
  return may_use_tiles() ? 3 : 2;
}

namespace {

// Memory of this thread, at a multiple of 64 bytes, which is kept for the next call.
float* thread_scratch(int64_t num_floats) {
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

outrider::Counter counter_of(const int64_t* numbers) {
  const auto word = [&](int index) { return static_cast<uint32_t>(numbers[index]); };
  return {{word(0), word(1), word(2)}, {word(3), word(4)}};
}

// token_ids: int64 [1 or R, N], from 0 to 2^33 - 1. counters: int64 [R, 5], three words of a Philox counter and two of
// its key. Returns float64 [R, N].
Tensor uniform_noise(const Tensor& token_ids, const Tensor& counters, int64_t variant) {
  STD_TORCH_CHECK(
      token_ids.dim() == 2 && counters.dim() == 2 && counters.size(1) == 5, "token ids or counters have no row");
  STD_TORCH_CHECK(
      token_ids.scalar_type() == ScalarType::Long && counters.scalar_type() == ScalarType::Long,
      "token ids and counters must be int64");
  const int64_t num_rows = counters.size(0), num_tokens = token_ids.size(1);
  STD_TORCH_CHECK(
      token_ids.is_contiguous() && counters.is_contiguous() && (token_ids.size(0) == 1 || token_ids.size(0) == num_rows),
      "both must be contiguous, and have as many rows");
  outrider::check_variant(variant);

  Tensor output = torch::stable::new_empty(counters, {num_rows, num_tokens}, ScalarType::Double);
  const auto* tokens = static_cast<const int64_t*>(token_ids.const_data_ptr());
  const auto* numbers = static_cast<const int64_t*>(counters.const_data_ptr());
  auto* values = static_cast<double*>(output.mutable_data_ptr());
  const int64_t step = token_ids.size(0) == 1 ? 0 : num_tokens;
  const int64_t num_parts = (num_tokens + kLeastTokens - 1) / kLeastTokens;
  const int64_t grain = std::max<int64_t>(1, kLeastTokens / std::max<int64_t>(1, num_tokens));
  torch::stable::parallel_for(0, num_rows * num_parts, grain, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      const int64_t row = part / num_parts, begin = part % num_parts * kLeastTokens;
      const int64_t num = std::min(kLeastTokens, num_tokens - begin);
      kUniforms[variant](
          counter_of(numbers + row * 5), tokens + row * step + begin, num, values + row * num_tokens + begin);
    }
  });
  return output;
}

// The rows of bfloat16 or float32 scores, [R, V].
class Scores {
 public:
  explicit Scores(const Tensor& scores)
      : memory_(static_cast<const char*>(scores.const_data_ptr())),
        is_float32_(scores.scalar_type() == ScalarType::Float),
        row_bytes_(static_cast<int64_t>(scores.element_size())) {
    STD_TORCH_CHECK(scores.dim() == 2 && scores.is_contiguous(), "scores must have rows, and be contiguous");
    STD_TORCH_CHECK(is_float32_ || scores.scalar_type() == ScalarType::BFloat16, "scores are bfloat16 or float32");
    num_rows_ = scores.size(0), num_scores_ = scores.size(1);
    row_bytes_ *= num_scores_;
  }

  int64_t num_rows() const { return num_rows_; }
  int64_t num_scores() const { return num_scores_; }
  outrider::ScoreRow row(int64_t number, bool is_softmax) const {
    return {memory_ + number * row_bytes_, num_scores_, is_float32_, is_softmax};
  }
  float score(int64_t number, int64_t place) const {
    const char* own = memory_ + number * row_bytes_;
    if (is_float32_) return reinterpret_cast<const float*>(own)[place];
    return std::bit_cast<float>(static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(own)[place]) << 16);
  }

  // Calls `each` with the number of every row, on as many threads as they are worth.
  template <class Each>
  void for_each(const Each& each) const {
    torch::stable::parallel_for(
        0, num_rows_, std::max<int64_t>(1, kLeastWork / num_scores_), [&](int64_t first, int64_t last) {
          for (int64_t number = first; number < last; ++number) each(number);
        });
  }

 private:
  const char* memory_;
  bool is_float32_;
  int64_t row_bytes_;
  int64_t num_rows_ = 0, num_scores_ = 0;
};

// scores: bfloat16 or float32 [R, V], contiguous. inverse_temperatures: float32 [R]. counters: int64 [R, 5], as for
// `uniform_noise`. Returns the tokens that can win their row's race, int64 [2, M], their rows, ascending, and their ids;
// and the largest score of each row, float32 [R]. Where that is not finite, token 0 is the row's only one.
std::tuple<Tensor, Tensor> race_candidates(
    const Tensor& scores, const Tensor& inverse_temperatures, const Tensor& counters, int64_t variant) {
  const Scores given(scores);
  const int64_t num_rows = given.num_rows(), num_tokens = given.num_scores();
  STD_TORCH_CHECK(
      inverse_temperatures.scalar_type() == ScalarType::Float && counters.scalar_type() == ScalarType::Long,
      "temperatures must be float32, counters int64");
  STD_TORCH_CHECK(
      inverse_temperatures.is_contiguous() && counters.is_contiguous() && inverse_temperatures.numel() == num_rows &&
          counters.dim() == 2 && counters.size(0) == num_rows && counters.size(1) == 5,
      "temperatures and counters must be contiguous, and have as many rows");
  STD_TORCH_CHECK(num_tokens > 0, "a race needs a token");
  outrider::check_variant(variant);

  Tensor tops = torch::stable::new_empty(scores, {num_rows}, ScalarType::Float);
  auto* top = static_cast<float*>(tops.mutable_data_ptr());
  given.for_each([&](int64_t row) { top[row] = given.score(row, kPlaces[variant](given.row(row, true))); });

  const auto* scales = static_cast<const float*>(inverse_temperatures.const_data_ptr());
  const auto* numbers = static_cast<const int64_t*>(counters.const_data_ptr());
  const int64_t num_groups = (num_tokens + outrider::kRaceTokens - 1) / outrider::kRaceTokens;
  std::vector<outrider::RaceBounds> groups(num_rows * num_groups);
  const auto race_of = [&](int64_t row, int64_t group, float* bounds) {
    const outrider::RaceRow race{given.row(row, true), top[row], scales[row], counter_of(numbers + row * 5)};
    const int64_t begin = group * outrider::kRaceTokens;
    return kRaces[variant](race, begin, std::min(begin + outrider::kRaceTokens, num_tokens), bounds);
  };
  constexpr int64_t kGroups = kLeastTokens / outrider::kRaceTokens;
  torch::stable::parallel_for(0, num_rows * num_groups, kGroups, [&](int64_t first, int64_t last) {
    for (int64_t group = first; group < last; ++group) {
      if (std::isfinite(top[group / num_groups])) {
        groups[group] = race_of(group / num_groups, group % num_groups, nullptr);
      }
    }
  });
  // The few groups with a token that can win are looked at once more, in place of keeping the bounds of all tokens.
  std::vector<int64_t> rows, tokens;
  float bounds[outrider::kRaceTokens];
  for (int64_t row = 0; row < num_rows; ++row) {
    if (!std::isfinite(top[row])) {
      rows.push_back(row);
      tokens.push_back(0);
      continue;
    }
    const outrider::RaceBounds* own = groups.data() + row * num_groups;
    float least = 0.0f;
    for (int64_t group = 0; group < num_groups; ++group) least = std::max(least, own[group].below);
    least *= 1.0f - kSlack;
    for (int64_t group = 0; group < num_groups; ++group) {
      if (own[group].above < least) continue;
      race_of(row, group, bounds);
      const int64_t begin = group * outrider::kRaceTokens;
      const int64_t num = std::min(outrider::kRaceTokens, num_tokens - begin);
      for (int64_t token = 0; token < num; ++token) {
        if (bounds[token] < least) continue;
        rows.push_back(row);
        tokens.push_back(begin + token);
      }
    }
  }
  Tensor output = torch::stable::new_empty(counters, {2, static_cast<int64_t>(rows.size())});
  auto* found = static_cast<int64_t*>(output.mutable_data_ptr());
  std::copy(tokens.begin(), tokens.end(), std::copy(rows.begin(), rows.end(), found));
  return {output, tops};
}

// scores: bfloat16 or float32 [R, V], contiguous, no NaN; at least 0 unless `is_softmax`. Returns of each row the places
// of its `num` largest, int64 [R, num], and their shares, float32 [R, num]; see `outrider::LargestKernel`.
std::tuple<Tensor, Tensor> largest_scores(const Tensor& scores, int64_t num, bool is_softmax, int64_t variant) {
  const Scores given(scores);
  STD_TORCH_CHECK(
      num > 0 && num <= given.num_scores(), "a row of ", given.num_scores(), " scores has no ", num, " largest");
  outrider::check_variant(variant);

  Tensor places = torch::stable::new_empty(scores, {given.num_rows(), num}, ScalarType::Long);
  Tensor shares = torch::stable::new_empty(scores, {given.num_rows(), num}, ScalarType::Float);
  auto* place = static_cast<int64_t*>(places.mutable_data_ptr());
  auto* share = static_cast<float*>(shares.mutable_data_ptr());
  given.for_each([&](int64_t row) {
    float* scratch = thread_scratch(outrider::largest_scratch(given.num_scores()));
    kLargest[variant](given.row(row, is_softmax), num, scratch, place + row * num, share + row * num);
  });
  return {places, shares};
}

// scores: bfloat16 or float32 [R, V], contiguous. Returns the place of each row's largest score, and 1 where it is
// finite, else 0: int64 [2, R]; see `outrider::PlaceKernel`.
Tensor places_of_largest(const Tensor& scores, int64_t variant) {
  const Scores given(scores);
  STD_TORCH_CHECK(given.num_scores() > 0, "a row has no scores");
  outrider::check_variant(variant);

  Tensor output = torch::stable::new_empty(scores, {2, given.num_rows()}, ScalarType::Long);
  auto* places = static_cast<int64_t*>(output.mutable_data_ptr());
  given.for_each([&](int64_t row) {
    places[row] = kPlaces[variant](given.row(row, false));
    places[given.num_rows() + row] = std::isfinite(given.score(row, places[row]));
  });
  return output;
}

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

// Copies new keys or values, [1, key_heads, rows, dim], to their slots.
void write_slots(const Tensor& given, const Tensor& stored, const int32_t* rows, const int32_t* slots, int64_t num) {
  const int64_t num_heads = stored.size(1), item = stored.element_size(), num_bytes = stored.size(2) * item;
  const auto* from = static_cast<const char*>(given.const_data_ptr());
  auto* to = static_cast<char*>(stored.mutable_data_ptr());
  for (int64_t write = 0; write < num; ++write) {
    for (int64_t head = 0; head < num_heads; ++head) {
      const char* row = from + (head * given.stride(1) + rows[write] * given.stride(2)) * item;
      std::memcpy(to + (slots[write] * num_heads + head) * num_bytes, row, num_bytes);
    }
  }
}

// Whether rows are dense, and begin at multiples of a cell.
bool has_whole_cells(const Tensor& tensor) {
  const auto is_whole = [](uint64_t num_bytes) { return num_bytes % sizeof(uint32_t) == 0; };
  return tensor.stride(3) == 1 && is_whole(reinterpret_cast<uintptr_t>(tensor.const_data_ptr())) &&
         is_whole(tensor.stride(1) * tensor.element_size()) && is_whole(tensor.stride(2) * tensor.element_size());
}

// query: [1, heads, rows, key_dim]. new_keys, new_values: [1, key_heads, rows, ...]. keys, values: [slots, key_heads,
// ...], contiguous, written first. All are bfloat16, key_dim being even, or float32. layout: int32, see `lay_out` in
// outrider/lm/attention/native.py. Returns [1, rows, heads, value_dim], zero for rows that no branch has.
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
        tensor->scalar_type() == type && tensor->dim() == 3 && tensor->is_contiguous(),
        "stored keys and values must have the query's type and three dimensions, and be contiguous");
  }
  STD_TORCH_CHECK(query.dim() == 4 && query.size(0) == 1, "the query must be of one batch");
  const int64_t num_heads = query.size(1), num_rows = query.size(2), key_dim = query.size(3);
  const int64_t num_slots = keys.size(0), num_key_heads = keys.size(1), value_dim = values.size(2);
  STD_TORCH_CHECK(
      num_heads > 0 && num_key_heads > 0 && num_heads % num_key_heads == 0, "key heads must divide the query's heads");
  STD_TORCH_CHECK(
      num_heads / num_key_heads <= outrider::kMostQueries, "more than ", outrider::kMostQueries,
      " heads of the query have one key head");
  STD_TORCH_CHECK(
      keys.size(2) == key_dim && new_keys.size(3) == key_dim && new_values.size(3) == value_dim &&
          values.size(0) == num_slots && values.size(1) == num_key_heads && new_keys.size(1) == num_key_heads &&
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
  int64_t num_pages = 0;
  const int32_t num_branches = *numbers.take(1);
  STD_TORCH_CHECK(num_branches >= 0, "the layout has ", num_branches, " branches");
  for (int32_t branch = 0; branch < num_branches; ++branch) {
    const int32_t num = *numbers.take(1), table_len = *numbers.take(1);
    const int32_t* indices = numbers.take_below(num_rows, num);
    const int32_t* positions = numbers.take_below(int64_t{table_len} * outrider::kPageLen, num);
    const int32_t* pages = numbers.take_below(num_slots / outrider::kPageLen, table_len);
    for (int32_t index = 0; index < num; ++index) {
      STD_TORCH_CHECK(!has_row[indices[index]], "the layout has row ", indices[index], " twice");
      has_row[indices[index]] = true;
      rows.push_back({indices[index], positions[index], pages});
      num_pages += positions[index] / outrider::kPageLen + 1;
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
      values.const_data_ptr(),
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
  const int64_t work = num_pages * num_heads * outrider::kPageLen * (key_dim + value_dim);
  const int64_t most_threads = std::min<int64_t>(torch::stable::get_num_threads(), work / kLeastWork + 1);
  const std::vector<outrider::Unit> units = outrider::divide(rows, attention, most_threads);
  const int64_t num_units = units.size(), num_threads = std::min(num_units, most_threads);
  // Each thread takes the next unit. To fetch its pages early it takes it before it is done with the last one, but for
  // the last units, which are for the thread that is done first.
  const int64_t num_early = num_units - 2 * num_threads;
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, num_threads, 1, [&](int64_t, int64_t) {
    float* scratch = thread_scratch(outrider::attention_scratch(attention));
    for (int64_t number = next++, following; number < num_units; number = following) {
      const bool is_early = number < num_early;
      if (is_early) following = next++;
      const outrider::Unit& unit = units[number];
      const outrider::Unit* after = is_early && following < num_units ? &units[following] : nullptr;
      kAttentions[variant](
          attention,
          {unit.first, unit.last, unit.key_head, after ? after->first->pages : nullptr, after ? after->key_head : 0},
          scratch);
      if (!is_early) following = next++;
    }
  });
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(outrider, library) {
  library.def(
      "packed_product(Tensor rows, Tensor weight, Tensor? bias, int out_features, int variant) -> Tensor");
  library.def(
      "race_candidates(Tensor scores, Tensor inverse_temperatures, Tensor counters, int variant) -> (Tensor, Tensor)");
  library.def(
      "paged_attention(Tensor query, Tensor new_keys, Tensor new_values, Tensor(a!) keys, Tensor(b!) values, "
      "Tensor layout, float scaling, int window, float softcap, int variant) -> Tensor");
  library.def("uniform_noise(Tensor token_ids, Tensor counters, int variant) -> Tensor");
  library.def("largest_scores(Tensor scores, int num, bool is_softmax, int variant) -> (Tensor, Tensor)");
  library.def("places_of_largest(Tensor scores, int variant) -> Tensor");
  library.def("best_variant() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(outrider, CPU, library) {
  library.impl("packed_product", TORCH_BOX(&packed_product));
  library.impl("paged_attention", TORCH_BOX(&paged_attention));
  library.impl("race_candidates", TORCH_BOX(&race_candidates));
  library.impl("uniform_noise", TORCH_BOX(&uniform_noise));
  library.impl("largest_scores", TORCH_BOX(&largest_scores));
  library.impl("places_of_largest", TORCH_BOX(&places_of_largest));
}

STABLE_TORCH_LIBRARY_IMPL(outrider, CompositeExplicitAutograd, library) {
  library.impl("best_variant", TORCH_BOX(&outrider::best_variant));
}
