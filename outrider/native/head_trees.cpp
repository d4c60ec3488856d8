// The operator that grows the trees of a block head: on the way of a proposal nothing takes longer than what lies between
// its products.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <tuple>
#include <vector>

#include "draft_tree.h"
#include "head_layer.h"
#include "score_kernels.h"

namespace {

using namespace outrider;

// What differs between the sessions of a call; see `head_trees`.
struct Sessions {
  const std::vector<int64_t>& num_rows;
  const std::vector<int64_t>& last_ids;
  const std::vector<int64_t>& num_nodes;
  const std::vector<int64_t>& end_depths;
  const std::vector<int64_t>& num_choices;
  const std::vector<double>& least_likelihoods;
  const std::vector<double>& inverse_temperatures;
  const std::vector<int64_t>& first_counters;
  const std::vector<int64_t>& stop_ids;
  const std::vector<int64_t>& num_stop_ids;

  size_t num() const { return num_rows.size(); }

  void check(int64_t num_given, int64_t num_tokens, int64_t num_counters, int64_t num_ranks) const {
    for (const size_t given :
         {last_ids.size(), num_nodes.size(), end_depths.size(), num_choices.size(), least_likelihoods.size(),
          inverse_temperatures.size(), first_counters.size(), num_stop_ids.size()}) {
      STD_TORCH_CHECK(given == num(), "each of ", num(), " sessions has one of all numbers, not ", given);
    }
    int64_t num_stops = 0, num_all = 0;
    for (size_t session = 0; session < num(); ++session) {
      const int64_t first = first_counters[session], depth = end_depths[session];
      STD_TORCH_CHECK(
          last_ids[session] >= 0 && last_ids[session] < num_tokens, "there is no token ", last_ids[session]);
      STD_TORCH_CHECK(
          num_nodes[session] > 0 && depth > 0 && depth <= num_rows[session], "a tree of ", num_nodes[session],
          " nodes, ", depth, " deep, cannot grow over ", num_rows[session], " rows");
      STD_TORCH_CHECK(
          num_choices[session] > 0 && num_choices[session] <= num_ranks, "there are no ", num_choices[session],
          " choices after a node");
      STD_TORCH_CHECK(first < 0 || first + depth <= num_counters, "there is no counter ", first + depth - 1);
      STD_TORCH_CHECK(num_stop_ids[session] >= 0, "a session cannot have ", num_stop_ids[session], " stop tokens");
      num_stops += num_stop_ids[session];
      num_all += num_rows[session];
    }
    STD_TORCH_CHECK(num_stops == static_cast<int64_t>(stop_ids.size()), "each stop token is of a session");
    STD_TORCH_CHECK(num_all == num_given, "the sessions have ", num_all, " rows, not ", num_given);
  }
};

// The noise of the draft's tokens at the positions of blocks; each row is made when it is first needed.
class BlockNoise {
 public:
  BlockNoise(const Tensor& counters, const Tensor& vocabulary, LogNoiseKernel kernel)
      : counters_(static_cast<const int64_t*>(counters.const_data_ptr())),
        token_ids_(static_cast<const int64_t*>(vocabulary.const_data_ptr())),
        num_tokens_(vocabulary.numel()),
        kernel_(kernel),
        rows_(counters.size(0)) {}

  // Makes the rows of these counters; below 0 is none.
  void make(const std::vector<int64_t>& counters) {
    std::vector<int64_t> missing;
    for (const int64_t counter : counters) {
      if (counter < 0 || !rows_[counter].empty()) continue;
      rows_[counter].resize(num_tokens_);
      missing.push_back(counter);
    }
    torch::stable::parallel_for(0, static_cast<int64_t>(missing.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; ++at) {
        kernel_(counter_of(counters_ + missing[at] * 5), token_ids_, num_tokens_, rows_[missing[at]].data());
      }
    });
  }

  // The noise of a counter; null below 0.
  const float* of(int64_t counter) const { return counter < 0 ? nullptr : rows_[counter].data(); }

 private:
  const int64_t* counters_;
  const int64_t* token_ids_;
  int64_t num_tokens_;
  LogNoiseKernel kernel_;
  std::vector<std::vector<float>> rows_;
};

// A node that is run next, and its session.
struct EdgeNode {
  size_t session;
  int64_t node;
};

// The largest of a node's scores: logits, or where there is noise, about log(weight / noise) as in a race of the tokens.
class BestTokens {
 public:
  BestTokens(const ScoreKernels& kernels, int64_t num_logits) : kernels_(kernels), num_logits_(num_logits) {}

  void find(
      const uint16_t* logits, const float* noise, double inverse_temperature, int64_t num, int64_t* places,
      float* shares) const {
    const int64_t scratch_len = largest_scratch(num_logits_);
    float* scratch = thread_scratch(scratch_len + num_logits_);
    const ScoreRow given{logits, num_logits_, false, true};
    if (noise == nullptr) {
      kernels_.largest(given, num, scratch, places, shares);
      return;
    }
    float* drawn = scratch + scratch_len;
    const float top = number_of(logits[kernels_.place(given)]), scale = static_cast<float>(inverse_temperature);
    for (int64_t token = 0; token < num_logits_; ++token) {
      drawn[token] = (number_of(logits[token]) - top) * scale - noise[token];
    }
    kernels_.largest({drawn, num_logits_, true, true}, num, scratch, places, shares);
  }

 private:
  static float number_of(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

  const ScoreKernels& kernels_;
  int64_t num_logits_;
};

// The choices of all trees; see `head_trees`.
std::tuple<Tensor, Tensor, Tensor> choices_of(const std::vector<DraftTree>& trees) {
  const auto num_trees = static_cast<int64_t>(trees.size());
  int64_t num = 0;
  Tensor counts = empty({num_trees}, ScalarType::Long);
  auto* count = static_cast<int64_t*>(counts.mutable_data_ptr());
  for (const DraftTree& tree : trees) {
    *count = static_cast<int64_t>(tree.nodes().size()) - 1;
    num += *count++;
  }
  Tensor choices = empty({3, num}, ScalarType::Long), likelihoods = empty({num}, ScalarType::Double);
  auto* numbers = static_cast<int64_t*>(choices.mutable_data_ptr());
  auto* likelihood = static_cast<double*>(likelihoods.mutable_data_ptr());
  for (const DraftTree& tree : trees) {
    for (size_t place = 1; place < tree.nodes().size(); ++place, ++numbers) {
      const DraftNode& node = tree.nodes()[place];
      numbers[0] = node.parent;
      numbers[num] = node.token_id;
      numbers[2 * num] = node.number;
      *likelihood++ = node.likelihood;
    }
  }
  return {choices, likelihoods, counts};
}

// Trees over blocks of rows, grown to their ends.
// outputs: bfloat16 [R, H], of the sessions' rows. num_rows: of each session. last_ids: of each the text's last token.
// norm, epsilon, output: as in `head_logits`. state, token, added: the layers of the transition, of `rank` numbers.
// embedding: bfloat16 [V, H]. vocabulary: int64 [D], ascending, the draft's tokens. num_nodes, end_depths: of each tree, at
// most; nodes are run at most as many times as it has rows. num_choices: after a node. least_likelihoods: of a choice.
// inverse_temperatures; first_counters: the row of `counters`, int64 [C, 5] as for `uniform_noise`, for the first position
// of a session's block; -1 where it is greedy. stop_ids: of all sessions, `num_stop_ids` of each. values, num_ranks: see
// `NodeValues`. width: nodes of a session that are run at a time, at most.
// Returns the choices, session by session, int64 [3, M]: of each its parent, 0 for the root, else the place, from 1, of a
// choice among the session's; its token; the number under which it is sent, or 0. Their likelihoods, float64 [M]. And how
// many there are of each session, int64 [S].
std::tuple<Tensor, Tensor, Tensor> head_trees(
    const Tensor& outputs, const std::vector<int64_t>& num_rows, const std::vector<int64_t>& last_ids,
    const Tensor& norm, double epsilon, const std::vector<Tensor>& output, const std::vector<Tensor>& state,
    const std::vector<Tensor>& token, const std::vector<Tensor>& added, int64_t rank, const Tensor& embedding,
    const Tensor& vocabulary, const std::vector<int64_t>& num_nodes, const std::vector<int64_t>& end_depths,
    const std::vector<int64_t>& num_choices, const std::vector<double>& least_likelihoods,
    const std::vector<double>& inverse_temperatures, const std::vector<int64_t>& first_counters, const Tensor& counters,
    const std::vector<int64_t>& stop_ids, const std::vector<int64_t>& num_stop_ids, const std::vector<double>& values,
    int64_t num_ranks, int64_t width, int64_t variant) {
  const auto& kernels = score_kernels(variant);
  STD_TORCH_CHECK(outputs.dim() == 2 && embedding.dim() == 2, "outputs and embedding must have two dimensions");
  const int64_t num_all = outputs.size(0), hidden = outputs.size(1), num_logits = vocabulary.numel();
  STD_TORCH_CHECK(
      vocabulary.scalar_type() == ScalarType::Long && vocabulary.is_contiguous() && num_logits > 0,
      "the vocabulary must be int64 [D]");
  STD_TORCH_CHECK(
      counters.scalar_type() == ScalarType::Long && counters.is_contiguous() && counters.dim() == 2 &&
          counters.size(1) == 5,
      "counters must be int64 [C, 5]");
  STD_TORCH_CHECK(NodeValues::are_whole(values, num_ranks) && width > 0, "the values are not those of whole ranks");
  check_rows(outputs, num_all, hidden, "outputs");
  check_weight(norm, hidden, "norm");
  check_weight(embedding, embedding.numel(), "embedding");
  const Sessions sessions{num_rows, last_ids, num_nodes, end_depths, num_choices, least_likelihoods,
                          inverse_temperatures, first_counters, stop_ids, num_stop_ids};
  sessions.check(num_all, embedding.size(0), counters.size(0), num_ranks);
  const auto* ids = static_cast<const int64_t*>(vocabulary.const_data_ptr());
  STD_TORCH_CHECK(
      ids[0] >= 0 && ids[num_logits - 1] < embedding.size(0), "the vocabulary has tokens without an embedding");
  const Layer predict(output, hidden, num_logits), of_states(state, hidden, rank);
  const Layer of_tokens(token, embedding.size(1), rank), of_both(added, rank, num_logits);

  const Tensor given = dense(outputs);
  std::vector<uint16_t> normed(num_all * hidden), logits(num_all * num_logits), states(num_all * rank);
  logits_of_rows(
      numbers_of(given), num_all, hidden, numbers_of(norm), static_cast<float>(epsilon), predict, normed.data(),
      logits.data(), variant);
  of_states.multiply(normed.data(), num_all, states.data(), variant);

  const Transition transition{of_tokens, of_both, numbers_of(embedding), embedding.size(1), rank, num_logits};
  const NodeValues node_values(values, num_ranks);
  const BestTokens best(kernels, num_logits);
  BlockNoise noise(counters, vocabulary, kernels.log_noise);
  std::vector<DraftTree> trees;
  std::vector<int64_t> first_rows;
  int64_t first_row = 0;
  const int64_t* own_stops = stop_ids.data();
  for (size_t session = 0; session < sessions.num(); ++session) {
    const DraftBounds bounds{
        num_nodes[session], end_depths[session], num_rows[session], own_stops, num_stop_ids[session]};
    trees.emplace_back(node_values, bounds, last_ids[session]);
    first_rows.push_back(first_row);
    first_row += num_rows[session];
    own_stops += num_stop_ids[session];
  }
  std::vector<EdgeNode> edge;
  std::vector<int64_t> rows, before, needed, places, token_ids(num_ranks);
  std::vector<uint16_t> found;
  std::vector<float> shares;
  for (;;) {
    edge.clear(), rows.clear(), before.clear(), needed.clear();
    for (size_t session = 0; session < trees.size(); ++session) {
      for (const int64_t number : trees[session].edge()) {
        const DraftNode& node = trees[session].nodes()[number];
        edge.push_back({session, number});
        rows.push_back(first_rows[session] + node.depth);
        before.push_back(node.token_id);
        const int64_t first = first_counters[session];
        needed.push_back(first < 0 ? -1 : first + node.depth);
      }
    }
    if (edge.empty()) break;
    const auto num_edge = static_cast<int64_t>(edge.size());
    found.resize(num_edge * num_logits);
    places.resize(num_edge * num_ranks);
    shares.resize(num_edge * num_ranks);
    transition.add(logits.data(), states.data(), rows, before, found.data(), variant);
    noise.make(needed);
    const int64_t grain = std::max<int64_t>(1, kLeastWork / num_logits);
    torch::stable::parallel_for(0, num_edge, grain, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; ++at) {
        const size_t session = edge[at].session;
        best.find(
            found.data() + at * num_logits, noise.of(needed[at]), inverse_temperatures[session],
            std::min(num_choices[session], num_logits), places.data() + at * num_ranks, shares.data() + at * num_ranks);
      }
    });
    for (int64_t at = 0; at < num_edge; ++at) {
      const auto [session, node] = edge[at];
      const float* share = shares.data() + at * num_ranks;
      int64_t num = 0;
      for (; num < std::min(num_choices[session], num_logits); ++num) {
        if (!(share[num] > 0.0f && share[num] >= least_likelihoods[session])) break;
        token_ids[num] = ids[places[at * num_ranks + num]];
      }
      trees[session].add_choices(node, token_ids.data(), share, num);
    }
    for (DraftTree& tree : trees) {
      if (!tree.edge().empty()) tree.decide(width);
    }
  }
  return choices_of(trees);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(outrider, library) {
  library.def(
      "head_trees(Tensor outputs, int[] num_rows, int[] last_ids, Tensor norm, float epsilon, Tensor[] output, "
      "Tensor[] state, Tensor[] token, Tensor[] added, int rank, Tensor embedding, Tensor vocabulary, int[] num_nodes, "
      "int[] end_depths, int[] num_choices, float[] least_likelihoods, float[] inverse_temperatures, "
      "int[] first_counters, Tensor counters, int[] stop_ids, int[] num_stop_ids, float[] values, int num_ranks, "
      "int width, int variant) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(outrider, CPU, library) {
  library.impl("head_trees", TORCH_BOX(&head_trees));
}
