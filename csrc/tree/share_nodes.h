// share_nodes: how many nodes of its list each request of a batch gets, under one budget of rows.
//
// Lists are sorted, so that how many nodes of a request reach a score is a binary search, and the score of the worst
// node that a budget takes is a bisection over the ordered bits of floats: 31 turns, each a sum over the batch. Both
// devices do the same searches, so that they give the same integers whatever the scores are. Probabilities are summed
// in whole 2^-40, in any order.
#pragma once

#include "core/dispatch.h"
#include "core/exact_math.h"
#include "core/host_device.h"
#include "tree/tree_rows.h"

namespace specdec::tree {

struct ShareNodesParams {
  const float* scores;      // [batch, nodes]: log-probabilities of paths, falling; the root's is not read
  const int32_t* limits;    // [batch] or null: nodes that a request gets at most, the root included
  const int32_t* slots;     // [batch] or null: below 0 the row is empty
  const int32_t* rungs;     // [num_rungs] or null
  int32_t* out_num_nodes;   // [batch]
  int32_t* out_cu_seqlens;  // [batch + 1]
  float* out_expected;      // [num_rungs]
  float* out_cuts;          // [num_rungs]
  int64_t batch, nodes, num_rungs, budget;
};

constexpr int64_t kMaxSharedRows = 1 << 16;  // of a batch: sums of weights fit 64 bits

// No score is above that of a root, and one of -inf, or NaN, is no node.
constexpr uint32_t kLeastNodeKey = kKeyOfMinusInf + 1, kRootKey = 0x80000000u;
SD_HD uint32_t node_key(float score) {
  const uint32_t key = order_key(score);
  return key < kRootKey ? key : kRootKey;
}

// Nodes of row b's list that may be taken, the root included; 0 for an empty row.
SD_HD int32_t list_length(const ShareNodesParams& p, int64_t b) {
  if (p.slots && p.slots[b] < 0) return 0;
  return p.limits ? clamp_to(p.limits[b], 1, static_cast<int32_t>(p.nodes)) : static_cast<int32_t>(p.nodes);
}

// How many nodes of row b score at least `key`, without the root.
SD_HD int32_t num_reaching(const ShareNodesParams& p, int64_t b, uint32_t key) {
  const float* const scores = p.scores + b * p.nodes;
  int32_t low = 1, high = list_length(p, b);  // all before `low` do, none from `high` on
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

// Of how many nodes beyond the roots a number of rows has room.
SD_HD int64_t room_of(int64_t rows, int64_t roots) { return rows > roots ? rows - roots : 0; }

SD_HD uint64_t weight_of(float score) { return exp2_weight(mul(score < 0 ? score : 0.0f, kLog2e)); }
SD_HD float expected_of(uint64_t weights) { return static_cast<float>(mul(static_cast<double>(weights), 0x1p-40)); }

// What a budget takes: all nodes from key + 1 up, and the first `ties` of those that score just `key`.
struct Cut {
  uint32_t key;
  int64_t ties;
};

// The cut that takes the best `room` nodes. total(key) is how many nodes of the batch score at least `key`.
template <class Total>
SD_HD Cut find_cut(int64_t room, Total&& total) {
  if (room == 0) return {kRootKey, 0};
  if (total(kLeastNodeKey) <= room) return {kLeastNodeKey - 1, 0};
  uint32_t low = kLeastNodeKey, high = kRootKey + 1;  // total(low) > room - 1, total(high) < room
  int64_t above = 0;                                  // total(high)
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

// The score of the worst node that is taken.
SD_HD float cut_score(int64_t room, const Cut& cut) {
  if (room == 0) return INFINITY;
  return key_float(cut.key);
}

// Nodes of row b, without the root, that are taken for certain, and those that share the cut's score.
struct Reaching {
  int32_t above, equal;
};
SD_HD Reaching reaching(const ShareNodesParams& p, int64_t b, const Cut& cut) {
  const int32_t above = num_reaching(p, b, cut.key + 1);
  if (cut.ties == 0) return {above, 0};
  const int32_t all = num_reaching(p, b, cut.key);
  return {above, all > above ? all - above : 0};  // a list that is not sorted may say anything
}

// The probabilities of the root and of the nodes above a cut.
SD_HD uint64_t weight_above(const ShareNodesParams& p, int64_t b, const Cut& cut) {
  if (list_length(p, b) == 0) return 0;
  const int32_t above = num_reaching(p, b, cut.key + 1);
  uint64_t weight = uint64_t{1} << kWeightBits;
  for (int32_t i = 1; i <= above; ++i) weight += weight_of(p.scores[b * p.nodes + i]);
  return weight;
}

void share_nodes(CallStream stream, const TensorView& scores, int64_t budget, const OptTensor& limits,
                 const OptTensor& slots, const OptTensor& rungs, const TensorView& out_num_nodes,
                 const TensorView& out_cu_seqlens, const TensorView& out_expected, const TensorView& out_cuts);

void share_nodes_cpu(const ShareNodesParams& p);
void share_nodes_cuda(const ShareNodesParams& p, Stream stream);

}  // namespace specdec::tree
