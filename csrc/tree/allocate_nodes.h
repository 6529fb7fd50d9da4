// allocate_nodes: how many nodes of its list each request of a batch gets, under one budget of rows.
//
// Lists are sorted, so that how many nodes of a request reach a score is a binary search, and the score of the worst
// node that a budget takes is a bisection over the ordered bits of floats: 31 turns, each a sum over the batch. Both
// devices do the same searches, so that they give the same integers whatever the scores are. Probabilities are summed
// in whole 2^-40, in any order.
#pragma once

#include "core/dispatch.h"
#include "core/exact_math.h"
#include "core/host_device.h"
#include "core/slots.h"
#include "tree/tree_rows.h"

namespace specdec::tree {

struct AllocateNodesParams {
  const float* scores;   // [batch, nodes]: log-probabilities of paths, falling; the root's is not read
  const int32_t* slots;  // [batch] or null: below 0 the row is empty
  // Of slots, each or null: nodes that a request gets at most, the root included; and whose rows are empty, too.
  const int32_t* max_nodes;       // [num_slots]
  const int32_t* finish_reasons;  // [num_slots]: other than 0
  const int32_t* status;          // [num_slots]: kStalled
  const int32_t* budget_levels;   // [num_levels] or null
  const int32_t* level_limits;    // [num_levels] or null: nodes that any request gets at most
  int32_t* out_num_nodes;         // [batch]
  int32_t* out_cu_seqlens;        // [batch + 1]
  float* out_expected;            // [num_levels]
  float* out_cuts;                // [num_levels]
  int64_t batch, nodes, num_slots, num_levels, budget;
};

constexpr int64_t kMaxSharedRows = 1 << 16;  // of a batch: sums of weights fit 64 bits

// No score is above that of a root, and one of -inf, or NaN, is no node.
constexpr uint32_t kLeastNodeKey = kKeyOfMinusInf + 1, kRootKey = 0x80000000u;
SD_HD uint32_t node_key(float score) {
  const uint32_t key = order_key(score);
  return key < kRootKey ? key : kRootKey;
}

// Nodes that any request gets at most, by the budget itself or by a level.
SD_HD int32_t limit_of_all(const AllocateNodesParams& p, int64_t level) {
  const auto nodes = static_cast<int32_t>(p.nodes);
  return level < 0 || !p.level_limits ? nodes : clamp_to(p.level_limits[level], 1, nodes);
}

// Nodes of row b's list that may be taken, the root included; 0 for an empty row.
SD_HD int32_t list_length(const AllocateNodesParams& p, int64_t b, int32_t limit) {
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  if (slot < 0 || (p.finish_reasons && p.finish_reasons[slot] != 0) || (p.status && (p.status[slot] & kStalled)))
    return 0;
  return p.max_nodes ? clamp_to(p.max_nodes[slot], 1, limit) : limit;
}

// How many nodes of row b, whose list is so long, score at least `key`, without the root.
SD_HD int32_t num_reaching(const AllocateNodesParams& p, int64_t b, int32_t length, uint32_t key) {
  const float* const scores = p.scores + b * p.nodes;
  int32_t low = 1, high = length;  // all before `low` do, none from `high` on
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
SD_HD Reaching reaching(const AllocateNodesParams& p, int64_t b, int32_t length, const Cut& cut) {
  const int32_t above = num_reaching(p, b, length, cut.key + 1);
  if (cut.ties == 0) return {above, 0};
  const int32_t all = num_reaching(p, b, length, cut.key);
  return {above, all > above ? all - above : 0};  // a list that is not sorted may say anything
}

// The probabilities of the root and of the nodes above a cut.
SD_HD uint64_t weight_above(const AllocateNodesParams& p, int64_t b, int32_t length, const Cut& cut) {
  if (length == 0) return 0;
  const int32_t above = num_reaching(p, b, length, cut.key + 1);
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
