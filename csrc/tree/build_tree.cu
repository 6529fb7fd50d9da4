// build_tree on a GPU: one block per row.
//
// The block reads the row once, in tiles of candidates in registers; best_candidates.cuh keeps the best, in order; then
// one thread per node finds its parent among them, and tree_nodes.cuh writes the tree. Reads 12 bytes per candidate,
// writes 20 + 8 W bytes per node. Latency bound: loads are independent where possible, and barriers are few.
#include "tree/best_candidates.cuh"
#include "tree/build_tree.h"
#include "tree/tree_nodes.cuh"

namespace specdec::tree {
namespace {

// A thread's part of the tile that starts at candidate `first`, with its loads in flight.
template <class Best>
struct LoadedTile {
  float scores[Best::kEach];
  int32_t tokens[Best::kEach], parents[Best::kEach];

  __device__ LoadedTile(const CandidateRow& row, int64_t first, int64_t candidates) {
#pragma unroll
    for (int e = 0; e < Best::kEach; ++e) {
      const int64_t c = first + e * Best::kThreads + threadIdx.x;
      const bool there = c < candidates;
      scores[e] = there ? row.scores[c] : -INFINITY;
      parents[e] = there ? row.parents[c] : -1;
      tokens[e] = there ? row.tokens[c] : 0;
    }
  }
};

template <class Best>
__device__ __forceinline__ void drop_malformed(typename Best::Tile& tile, const CandidateRow& row, int64_t first,
                                               int64_t nodes) {
#pragma unroll
  for (int e = 0; e < Best::kEach; ++e)
    if (tile.scores[e] != 0 && !row.reaches_root(first + e * Best::kThreads + threadIdx.x, nodes - 1))
      tile.scores[e] = 0;
}

template <class Best, int kWords, bool kOneTile>
__global__ void __launch_bounds__(Best::kThreads) build_tree_kernel(BuildTreeParams p) {
  begin_kernel();
  __shared__ typename Best::Storage storage;
  __shared__ TreeNodes<kWords> nodes;
  const auto i = static_cast<int32_t>(threadIdx.x);
  const int64_t b = blockIdx.x;
  const CandidateRow row = candidate_row(p, b);

  LoadedTile<Best> next(row, 0, p.candidates);  // does not wait for the slot
  clear_nodes(nodes);
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  TreeHead head;
  if (slot >= 0) head = {.count = 1, .root_token = p.root_tokens[slot], .seq_len = p.seq_lens[slot]};

  Best best(storage, static_cast<int>(p.out.nodes) - 1);
  bool malformed = false;  // descendants of a malformed candidate come after it
  for (int64_t first = 0; first < p.candidates; first += Best::kTile) {
    const LoadedTile<Best> loaded = next;
    if (!kOneTile) next = LoadedTile<Best>(row, first + Best::kTile, p.candidates);
    const int64_t left = p.candidates - first;
    const int width = left < Best::kTile ? static_cast<int>(left) : Best::kTile;
    typename Best::Tile tile;
    float ranks[Best::kEach];
#pragma unroll
    for (int e = 0; e < Best::kEach; ++e) {
      ranks[e] = row.ranked(loaded.scores[e]);
      tile.scores[e] = rising_bits(ranks[e]);
      tile.tokens[e] = loaded.tokens[e];
      tile.parents[e] = loaded.parents[e];
    }
    const auto has_malformed = [&] {
      bool found = false;
#pragma unroll
      for (int e = 0; e < Best::kEach; ++e) {  // & rather than &&: the loads are independent
        const float above = row.rank_above(first + e * Best::kThreads + i, tile.parents[e]);
        found |= (ranks[e] > -INFINITY) & (above < ranks[e]);
      }
      return found;
    };
    if (malformed) drop_malformed<Best>(tile, row, first, p.out.nodes);
    if (first > 0 && !__syncthreads_or(best.improves(tile) | has_malformed())) continue;

    best.publish(tile);
    __syncthreads();
    const bool found = has_malformed();
    best.count(width);
    if (__syncthreads_or(found)) {  // after count(), which takes as long as reading the parents' scores
      malformed = true;
      drop_malformed<Best>(tile, row, first, p.out.nodes);
      best.publish(tile);
      __syncthreads();
      best.count(width);
      __syncthreads();
    }
    best.merge(tile, first, width);
    if (kOneTile) break;
  }
  if (malformed && i == 0) set_status(p.status, slot, kBadTree);

  int32_t token = head.root_token, parent = -1;
  if (slot >= 0) head.count += best.count();
  if (i > 0 && i < head.count) {
    token = best.token(i - 1);
    const int32_t candidate = best.parent(i - 1);
    parent = candidate < 0 ? 0 : 1 + best.rank_of(candidate);
  }
  if (p.out_scores && i < p.out.nodes)
    p.out_scores[b * p.out.nodes + i] = i == 0 ? 0.0f : i < head.count ? row.scores[best.index(i - 1)] : -INFINITY;
  write_nodes(p.out, b, head, token, parent, nodes);
}

template <int kThreads, int kEach, int kWords, bool kOneTile>
void start(const BuildTreeParams& p, Stream stream) {
  using Best = BestCandidates<kThreads, kEach, 64 * kWords, kOneTile>;
  const LaunchShape shape{.grid = grid_x("build_tree", p.batch), .threads = kThreads};
  launch("build_tree", build_tree_kernel<Best, kWords, kOneTile>, shape, stream, p);
}

}  // namespace

void build_tree_cuda(const BuildTreeParams& p, Stream stream) {
  if (p.out.nodes <= 64 && p.candidates <= 512)
    start<256, 2, 1, true>(p, stream);
  else
    start<512, 2, kMaxTreeNodes / 64, false>(p, stream);
}

}  // namespace specdec::tree
