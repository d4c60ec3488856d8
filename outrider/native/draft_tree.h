// The tree of a proposal while it is drafted, as `outrider.drafters.tree.DraftTree` grows one that waits for verdicts
// under the rule `coupled`: the same nodes, in the same order.

#pragma once

#include <algorithm>
#include <cstdint>
#include <queue>
#include <vector>

namespace outrider {

// The values of nodes, as `outrider.drafters.node_values.NodeValues.numbers` lists them: of each depth the rates of all
// ranks; of each rank the sum of the draft's probabilities, and their number; the least and the most that a value can be.
class NodeValues {
 public:
  NodeValues(const std::vector<double>& numbers, int64_t num_ranks) : numbers_(numbers), num_ranks_(num_ranks) {
    num_depths_ = (static_cast<int64_t>(numbers.size()) - 2) / num_ranks - 2;
  }

  static bool are_whole(const std::vector<double>& numbers, int64_t num_ranks) {
    const auto num = static_cast<int64_t>(numbers.size()) - 2;
    return num_ranks > 0 && num >= 3 * num_ranks && num % num_ranks == 0;
  }

  int64_t num_ranks() const { return num_ranks_; }

  // The mean value of a choice by its depth and rank, both from 1.
  double mean(int64_t depth, int64_t rank) const {
    return numbers_[(std::min(depth, num_depths_) - 1) * num_ranks_ + rank - 1];
  }

  // That of one which the draft finds so probable.
  double value(int64_t depth, int64_t rank, double likelihood) const {
    const double* of_ranks = numbers_.data() + num_depths_ * num_ranks_;
    const double total = of_ranks[rank - 1], num = of_ranks[num_ranks_ + rank - 1];
    const double weighed = mean(depth, rank) * (num * likelihood + 1.0) / (total + 1.0);
    return std::min(numbers_.back(), std::max(numbers_.end()[-2], weighed));
  }

 private:
  const std::vector<double>& numbers_;
  int64_t num_ranks_, num_depths_;
};

// A choice after a node that was run, or the root, which is node 0.
struct DraftNode {
  int64_t parent;
  int64_t token_id;
  double likelihood;
  int64_t rank;
  int64_t depth;
  // From 1, in the order in which they are sent; 0 where it is not.
  int64_t number = 0;
  int64_t first_child = 0;
  // -1 until it is run.
  int64_t num_children = -1;
};

// What bounds a tree.
struct DraftBounds {
  // Nodes that are sent.
  int64_t num_nodes;
  // Steps from the root to the deepest of them.
  int64_t end_depth;
  // Times that nodes are run.
  int64_t num_steps;
  // Tokens after which nothing follows.
  const int64_t* stop_ids;
  int64_t num_stop_ids;
};

class DraftTree {
 public:
  DraftTree(const NodeValues& values, const DraftBounds& bounds, int64_t last_id) : values_(values), bounds_(bounds) {
    nodes_.push_back({0, last_id, 0.0, 0, 0});
    edge_.push_back(0);
  }

  const std::vector<DraftNode>& nodes() const { return nodes_; }

  // Nodes to be run next, those worth most first: the root at the beginning, none where the tree is whole.
  const std::vector<int64_t>& edge() const { return edge_; }

  // Adds the draft's choices after a node of the edge, in order: all nodes of the edge have theirs before `decide`.
  void add_choices(int64_t node, const int64_t* token_ids, const float* likelihoods, int64_t num) {
    nodes_[node].first_child = static_cast<int64_t>(nodes_.size());
    nodes_[node].num_children = num;
    const int64_t depth = nodes_[node].depth + 1;
    for (int64_t place = 0; place < num; ++place) {
      const double likelihood = std::min(1.0, static_cast<double>(likelihoods[place]));
      nodes_.push_back({node, token_ids[place], likelihood, place + 1, depth});
    }
  }

  // Decides which choices are sent, and which nodes are run next, at most `width` of them.
  void decide(int64_t width) {
    ++num_run_;
    const std::vector<Valued> best = this->best();
    const double least = static_cast<int64_t>(best.size()) >= bounds_.num_nodes && !best.empty() ? best.back().value : 0.0;
    int64_t room = num_run_ < bounds_.num_steps ? bounds_.num_nodes - num_sent_ : 0;
    edge_.clear();
    // A choice is sent unless one after a node that is yet to be run may be worth more.
    double floor = 0.0;
    for (const auto& [value, node] : best) {
      const double below = value * values_.mean(nodes_[node].depth + 1, 1);
      if (room > 0 && may_run(nodes_[node]) && below >= least) {
        --room;
        floor = std::max(floor, below);
        if (static_cast<int64_t>(edge_.size()) < width) edge_.push_back(node);
      }
    }
    for (const auto& [value, node] : best) {
      if (nodes_[node].number == 0 && value >= floor) nodes_[node].number = ++num_sent_;
    }
  }

 private:
  struct Valued {
    double value;
    int64_t node;
  };

  bool may_run(const DraftNode& node) const {
    const int64_t* end = bounds_.stop_ids + bounds_.num_stop_ids;
    return node.num_children < 0 && node.depth < bounds_.end_depth &&
           std::find(bounds_.stop_ids, end, node.token_id) == end;
  }

  // The nodes that were sent, and the best choices for which there is room beside them; those worth most first.
  std::vector<Valued> best() const {
    struct Offer {
      double value;
      int64_t tie;
      int64_t node;
      double above;
      bool operator<(const Offer& other) const {
        return value != other.value ? value < other.value : tie > other.tie;
      }
    };
    std::priority_queue<Offer> offers;
    int64_t num_offers = 0;
    const auto offer = [&](int64_t parent, int64_t place, double above, double most) {
      const DraftNode& from = nodes_[parent];
      if (place >= from.num_children || from.depth >= bounds_.end_depth) return;
      const DraftNode& child = nodes_[from.first_child + place];
      const double value = above * values_.value(child.depth, child.rank, child.likelihood);
      offers.push({std::min(most, value), num_offers++, from.first_child + place, above});
    };
    int64_t room = bounds_.num_nodes - num_sent_, num_missing = num_sent_;
    std::vector<Valued> best;
    offer(0, 0, 1.0, 1.0);
    while (!offers.empty()) {
      const Offer next = offers.top();
      offers.pop();
      const DraftNode& node = nodes_[next.node];
      bool has_room = true;
      if (node.number > 0) {
        --num_missing;
      } else if (room > 0) {
        --room;
      } else if (num_missing > 0) {
        has_room = false;
      } else {
        break;
      }
      if (has_room) best.push_back({next.value, next.node});
      offer(next.node, 0, next.value, 1.0);
      // A choice is worth no more than one that the draft prefers, whatever their probabilities say.
      offer(node.parent, node.rank, next.above, next.value);
    }
    return best;
  }

  const NodeValues& values_;
  DraftBounds bounds_;
  std::vector<DraftNode> nodes_;
  std::vector<int64_t> edge_;
  int64_t num_sent_ = 0, num_run_ = 0;
};

}  // namespace outrider
