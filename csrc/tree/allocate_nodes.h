// allocate_nodes: divide a batch's budget of rows among its requests: how many nodes of its tree each gets.
//
// The best nodes of the whole batch win. A request's scores are sorted, so counting its nodes above a score is a binary
// search, and the score of the worst node within the budget is found by bisection over the ordered bits of floats: 31
// steps, each a sum over the batch. CPU and GPU run the same searches, so the integers agree whatever the scores are.
// Probabilities are summed as integer multiples of 2^-40, so the order does not matter.
//
// Reads path scores and slot state. Writes the nodes of each request, their row offsets, and for each budget level the
// expected tokens and the score of its worst node.
#pragma once

#include "core/dispatch.h"
#include "core/exact_math.h"
#include "core/host_device.h"
#include "core/slots.h"
#include "tree/tree_rows.h"

namespace specdec::tree {

struct AllocateNodesParams {
  const float* scores;   // [batch, nodes]: log-probabilities of paths, descending; the root's is not read
  const int32_t* slots;  // [batch] or null; negative: the row is empty
  // Slot state, each or null: node limits including the root, and the flags that make a row empty.
  const int32_t* max_nodes;       // [num_slots]
  const int32_t* finish_reasons;  // [num_slots]: nonzero: empty
  const int32_t* status;          // [num_slots]: kStalled: empty
  const int32_t* budget_levels;   // [num_levels] or null
  const int32_t* level_limits;    // [num_levels] or null: node limit of every request
  int32_t* out_num_nodes;         // [batch]
  int32_t* out_cu_seqlens;        // [batch + 1]
  float* out_expected;            // [num_levels]
  float* out_cuts;                // [num_levels]
  int64_t batch, nodes, num_slots, num_levels, budget;
};

constexpr int64_t kMaxSharedRows = 1 << 16;  // per batch: sums of weights fit 64 bits

// No score exceeds a root's. A score of -inf or NaN is no node.
constexpr uint32_t kMinNodeKey = kKeyOfMinusInf + 1, kRootKey = 0x80000000u;
SD_HD uint32_t node_key(float score) {
  const uint32_t key = order_key(score);
  return key < kRootKey ? key : kRootKey;
}

// Return the node limit of every request, for the budget itself (level -1) or for a budget level.
SD_HD int32_t node_limit(const AllocateNodesParams& p, int64_t level) {
  const auto nodes = static_cast<int32_t>(p.nodes);
  return level < 0 || !p.level_limits ? nodes : clamp_to(p.level_limits[level], 1, nodes);
}

// Return the nodes of row b that may be selected, the root included; 0 for an empty row.
SD_HD int32_t list_length(const AllocateNodesParams& p, int64_t b, int32_t limit) {
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  if (slot < 0 || (p.finish_reasons && p.finish_reasons[slot] != 0) || (p.status && (p.status[slot] & kStalled)))
    return 0;
  return p.max_nodes ? clamp_to(p.max_nodes[slot], 1, limit) : limit;
}

// Count the nodes of row b, out of `length`, that score at least `key`, without the root.
SD_HD int32_t count_at_least(const AllocateNodesParams& p, int64_t b, int32_t length, uint32_t key) {
  const float* const scores = p.scores + b * p.nodes;
  int32_t low = 1, high = length;  // nodes before `low` reach the key, none from `high` on
  if (high <= 1) return 0;
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (node_key(scores[middle]) >= key)
      low = middle + 1;
    else
      high = middle;
  }
  return low - 1;
}

// Return the non-root nodes that fit into `rows` rows.
SD_HD int64_t non_root_rows(int64_t rows, int64_t roots) { return rows > roots ? rows - roots : 0; }

// Selection of a budget: all nodes of at least key + 1, and the first `ties` of those that score exactly `key`.
struct Cut {
  uint32_t key;
  int64_t ties;
};

// Find the cut that selects the best `room` nodes. total(key) counts the batch's nodes that score at least `key`.
template <class Total>
SD_HD Cut find_cut(int64_t room, Total&& total) {
  if (room == 0) return {kRootKey, 0};
  if (total(kMinNodeKey) <= room) return {kMinNodeKey - 1, 0};
  uint32_t low = kMinNodeKey, high = kRootKey + 1;  // total(low) > room - 1, total(high) < room
  int64_t above = 0;                                // total(high)
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    const int64_t count = total(middle);
    if (count >= room) {
      low = middle;
    } else {
      high = middle;
      above = count;
    }
  }
  return {low, room - above};
}

// Return the score of the worst selected node.
SD_HD float cut_score(int64_t room, const Cut& cut) {
  if (room == 0) return INFINITY;
  return key_float(cut.key);
}

// Nodes of row b, without the root: above the cut's score, and equal to it.
struct SelectedCounts {
  int32_t above, equal;
};
SD_HD SelectedCounts count_selected(const AllocateNodesParams& p, int64_t b, int32_t length, const Cut& cut) {
  const int32_t above = count_at_least(p, b, length, cut.key + 1);
  if (cut.ties == 0) return {above, 0};
  const int32_t all = count_at_least(p, b, length, cut.key);
  return {above, all > above ? all - above : 0};  // an unsorted list may give any count
}

// Sum the probabilities of the root and of the nodes above a cut.
SD_HD uint64_t weight_above(const AllocateNodesParams& p, int64_t b, int32_t length, const Cut& cut) {
  if (length == 0) return 0;
  const int32_t above = count_at_least(p, b, length, cut.key + 1);
  uint64_t weight = uint64_t{1} << kWeightBits;
  for (int32_t i = 1; i <= above; ++i) weight += weight_of(p.scores[b * p.nodes + i]);
  return weight;
}

void allocate_nodes(CallStream stream, const TensorView& scores, int64_t budget, const OptTensor& slots,
                    const OptTensor& max_nodes, const OptTensor& finish_reasons, const OptTensor& status,
                    const OptTensor& budget_levels, const OptTensor& level_limits, const TensorView& out_num_nodes,
                    const TensorView& out_cu_seqlens, const TensorView& out_expected, const TensorView& out_cuts);

void allocate_nodes_cpu(const AllocateNodesParams& p);
void allocate_nodes_cuda(const AllocateNodesParams& p, Stream stream);

}  // namespace specdec::tree
