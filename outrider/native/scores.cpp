// The operators that draw tokens and find the best of them; see race.h and largest.h.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <vector>

#include "operators.h"
#include "score_kernels.h"

namespace {

using outrider::kLeastWork;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Share by which a bound may be wrong.
constexpr float kSlack = 2e-3f;
// And by which weight / noise may be, in double precision: the temperature is rounded.
constexpr double kExactSlack = 1e-4;
// Tokens that one thread looks at, at least.
constexpr int64_t kLeastTokens = 8192;

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
  const auto& kernels = outrider::score_kernels(variant);

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
      kernels.uniforms(
          outrider::counter_of(numbers + row * 5), tokens + row * step + begin, num, values + row * num_tokens + begin);
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
  const auto& kernels = outrider::score_kernels(variant);

  Tensor tops = torch::stable::new_empty(scores, {num_rows}, ScalarType::Float);
  auto* top = static_cast<float*>(tops.mutable_data_ptr());
  given.for_each([&](int64_t row) { top[row] = given.score(row, kernels.place(given.row(row, true))); });

  const auto* scales = static_cast<const float*>(inverse_temperatures.const_data_ptr());
  const auto* numbers = static_cast<const int64_t*>(counters.const_data_ptr());
  const int64_t num_groups = (num_tokens + outrider::kRaceTokens - 1) / outrider::kRaceTokens;
  std::vector<outrider::RaceBounds> groups(num_rows * num_groups);
  const auto race_of = [&](int64_t row, int64_t group, float* bounds) {
    const outrider::RaceRow race{given.row(row, true), top[row], scales[row], outrider::counter_of(numbers + row * 5)};
    const int64_t begin = group * outrider::kRaceTokens;
    return kernels.race(race, begin, std::min(begin + outrider::kRaceTokens, num_tokens), bounds);
  };
  constexpr int64_t kGroups = kLeastTokens / outrider::kRaceTokens;
  torch::stable::parallel_for(0, num_rows * num_groups, kGroups, [&](int64_t first, int64_t last) {
    for (int64_t group = first; group < last; ++group) {
      if (std::isfinite(top[group / num_groups])) {
        groups[group] = race_of(group / num_groups, group % num_groups, nullptr);
      }
    }
  });
  // The few groups with a token that can win are looked at once more, in place of keeping the bounds of all tokens. And
  // of these few tokens only those are left that exact noise cannot tell apart: nearly always one.
  std::vector<int64_t> rows, tokens, own_tokens;
  std::vector<double> values;
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
    own_tokens.clear();
    for (int64_t group = 0; group < num_groups; ++group) {
      if (own[group].above < least) continue;
      race_of(row, group, bounds);
      const int64_t begin = group * outrider::kRaceTokens;
      const int64_t num = std::min(outrider::kRaceTokens, num_tokens - begin);
      for (int64_t token = 0; token < num; ++token) {
        if (bounds[token] >= least) own_tokens.push_back(begin + token);
      }
    }
    values.resize(own_tokens.size());
    kernels.uniforms(
        outrider::counter_of(numbers + row * 5), own_tokens.data(), static_cast<int64_t>(own_tokens.size()),
        values.data());
    double best = 0.0;
    for (size_t at = 0; at < values.size(); ++at) {
      const double distance = static_cast<double>(given.score(row, own_tokens[at])) - top[row];
      values[at] = std::exp(distance * scales[row]) / -std::log(values[at]);
      best = std::max(best, values[at]);
    }
    for (size_t at = 0; at < values.size(); ++at) {
      if (values[at] < best * (1.0 - kExactSlack)) continue;
      rows.push_back(row);
      tokens.push_back(own_tokens[at]);
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
  const auto& kernels = outrider::score_kernels(variant);

  Tensor places = torch::stable::new_empty(scores, {given.num_rows(), num}, ScalarType::Long);
  Tensor shares = torch::stable::new_empty(scores, {given.num_rows(), num}, ScalarType::Float);
  auto* place = static_cast<int64_t*>(places.mutable_data_ptr());
  auto* share = static_cast<float*>(shares.mutable_data_ptr());
  given.for_each([&](int64_t row) {
    float* scratch = outrider::thread_scratch(outrider::largest_scratch(given.num_scores()));
    kernels.largest(given.row(row, is_softmax), num, scratch, place + row * num, share + row * num);
  });
  return {places, shares};
}

// scores: bfloat16 or float32 [R, V], contiguous. Returns the place of each row's largest score, and 1 where it is
// finite, else 0: int64 [2, R]; see `outrider::PlaceKernel`.
Tensor places_of_largest(const Tensor& scores, int64_t variant) {
  const Scores given(scores);
  STD_TORCH_CHECK(given.num_scores() > 0, "a row has no scores");
  const auto& kernels = outrider::score_kernels(variant);

  Tensor output = torch::stable::new_empty(scores, {2, given.num_rows()}, ScalarType::Long);
  auto* places = static_cast<int64_t*>(output.mutable_data_ptr());
  given.for_each([&](int64_t row) {
    places[row] = kernels.place(given.row(row, false));
    places[given.num_rows() + row] = std::isfinite(given.score(row, places[row]));
  });
  return output;
}

// scores: bfloat16 or float32 [F, D], contiguous. token_ids: int64 [D], from 0 to 2^33 - 1. counters: int64 [R, 5], as for
// `uniform_noise`. noise_rows: the counter of each row. Returns about log(weight / noise) as in a race of these tokens,
// float32 [F, D]: (score - the row's largest) * inverse_temperature - log(-log(u)).
Tensor drawn_scores(
    const Tensor& scores, const Tensor& token_ids, const Tensor& counters, const std::vector<int64_t>& noise_rows,
    double inverse_temperature, int64_t variant) {
  const Scores given(scores);
  const int64_t num_rows = given.num_rows(), num_tokens = given.num_scores();
  STD_TORCH_CHECK(
      token_ids.scalar_type() == ScalarType::Long && token_ids.is_contiguous() && token_ids.dim() == 1 &&
          token_ids.numel() == num_tokens && num_tokens > 0,
      "token ids must be int64, one for each score");
  STD_TORCH_CHECK(
      counters.scalar_type() == ScalarType::Long && counters.is_contiguous() && counters.dim() == 2 &&
          counters.size(1) == 5,
      "counters must be int64 [R, 5]");
  STD_TORCH_CHECK(static_cast<int64_t>(noise_rows.size()) == num_rows, "each row has a counter");
  for (const int64_t row : noise_rows) STD_TORCH_CHECK(row >= 0 && row < counters.size(0), "there is no counter ", row);
  const auto& kernels = outrider::score_kernels(variant);

  const auto* tokens = static_cast<const int64_t*>(token_ids.const_data_ptr());
  const auto* numbers = static_cast<const int64_t*>(counters.const_data_ptr());
  std::vector<float> noise(counters.size(0) * num_tokens);
  torch::stable::parallel_for(0, counters.size(0), 1, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      kernels.log_noise(outrider::counter_of(numbers + row * 5), tokens, num_tokens, noise.data() + row * num_tokens);
    }
  });
  Tensor output = outrider::empty({num_rows, num_tokens}, ScalarType::Float);
  auto* drawn = static_cast<float*>(output.mutable_data_ptr());
  const auto scale = static_cast<float>(inverse_temperature);
  given.for_each([&](int64_t row) {
    const float top = given.score(row, kernels.place(given.row(row, true)));
    const float* own_noise = noise.data() + noise_rows[row] * num_tokens;
    float* to = drawn + row * num_tokens;
    for (int64_t token = 0; token < num_tokens; ++token) {
      to[token] = (given.score(row, token) - top) * scale - own_noise[token];
    }
  });
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(outrider, library) {
  library.def(
      "race_candidates(Tensor scores, Tensor inverse_temperatures, Tensor counters, int variant) -> (Tensor, Tensor)");
  library.def("uniform_noise(Tensor token_ids, Tensor counters, int variant) -> Tensor");
  library.def(
      "drawn_scores(Tensor scores, Tensor token_ids, Tensor counters, int[] noise_rows, float inverse_temperature, "
      "int variant) -> Tensor");
  library.def("largest_scores(Tensor scores, int num, bool is_softmax, int variant) -> (Tensor, Tensor)");
  library.def("places_of_largest(Tensor scores, int variant) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(outrider, CPU, library) {
  library.impl("race_candidates", TORCH_BOX(&race_candidates));
  library.impl("uniform_noise", TORCH_BOX(&uniform_noise));
  library.impl("drawn_scores", TORCH_BOX(&drawn_scores));
  library.impl("largest_scores", TORCH_BOX(&largest_scores));
  library.impl("places_of_largest", TORCH_BOX(&places_of_largest));
}
