// expand_trellis on a GPU, best first: one block or one cluster of blocks per request; one warp searches.
//
// All warps compute the costs of all steps (trellis_costs.cuh). Then nodes are found in the order of the result. Each
// node found offers its best child that is left, its head; the root is the first one. The best head of all is the next
// node, for which its parent offers the next child. So there is one head per node found: node i's belongs to lane
// i % 32, the best head takes two reductions over the warp, and no barrier of the block is needed.
//
// - Sorted: rows of costs are sorted before the search, so that the next child is one read. A node's state (the head
//   after its head, the first child of its head) is completed while the next reduction runs.
// - Unsorted: the warp searches the rows of two nodes for their heads, a candidate or two per lane. A cluster spreads
//   the positions over its blocks, where the rows of one would be too many for its shared memory or take long.
//
// Where neither fits, as without clusters, expand_trellis_levels() finds the nodes level by level.
#include <algorithm>

#include "core/cluster.cuh"
#include "draft/expand_trellis_levels.h"
#include "draft/trellis_costs.cuh"

namespace specdec::draft {
namespace {

constexpr int kThreads = 512;
constexpr uint32_t kInfinity = 0x7f800000;
constexpr int kMostSorted = 32;  // candidates: one per lane
constexpr uint32_t kNoPlace = 31 << 8;
constexpr size_t kFoundBytes = 24 * kMaxTrellisNodes + 32;  // at most, of shared memory of a fixed size

struct Plan {
  bool fits, sorted, by_tiles;
  unsigned cluster;  // blocks
  size_t bytes;      // of shared memory, by its sizes
};

// A child of a node, in the order of a sorted row. Two more come after the last row: one costs +inf, and the last turn
// of a search may read one more.
struct alignas(16) SortedChild {
  float cost;
  float next_cost;    // of the child after it; +inf: none
  int32_t candidate;  // d * k + c
};

// A node that was found, or the root (0), and its head.
struct alignas(16) SearchNode {
  float cost;
  float next;      // the cost of the child after the head, from the root
  float first;     // the least cost of a step from the head
  uint32_t where;  // the head: candidate << 16 | index among the sorted children
};

// The same where rows are not sorted. The row of the node's children is in block `owner` of the cluster.
struct alignas(16) UnsortedNode {
  float cost;
  int32_t row;  // offset of its children's costs
  int32_t owner;
  int32_t head;  // a candidate of the row
};

struct alignas(8) FoundNode {
  float cost;
  uint32_t link;  // parent's number << 16 | candidate, d * k + c; the root is number 0
};

// The nodes that a search has found, at fixed places of shared memory.
template <class Node, int kSlots>
struct Found {
  Node nodes[kSlots * kWarp + 1];  // the root is node 0
  FoundNode list[kSlots * kWarp];  // in the order of the result
  int count;
};

// The shared memory of a block, by its sizes.
struct Shared {
  float* costs;           // [rows, pitch]
  float* unary;           // [depth, pitch]
  SortedChild* children;  // [rows * k + 2]; unsorted: not there
  float* rests;           // [depth]
  int32_t* tokens;        // [depth, k], of the target

  __device__ Shared(unsigned char* memory, const TrellisRows& rows, bool sorted) {
    const int positions = (rows.depth + rows.stride - 1) / rows.stride, depth = rows.depth;
    const int num_rows = positions * rows.rows_per_position();
    costs = reinterpret_cast<float*>(memory);
    unary = costs + num_rows * rows.pitch;
    children = reinterpret_cast<SortedChild*>(unary + depth * rows.pitch);
    rests = reinterpret_cast<float*>(children + (sorted ? num_rows * rows.k + 2 : 0));
    tokens = reinterpret_cast<int32_t*>(rests + depth);
  }
  static size_t bytes(const ExpandTrellisParams& p, bool sorted, unsigned cluster) {
    const int64_t depth = std::min(p.depth, p.nodes), pitch = (p.k + kPerLane - 1) / kPerLane * kPerLane;
    const int64_t rows = (depth + cluster - 1) / cluster * (p.predecessors ? p.k : 1);
    return static_cast<size_t>(4 * (rows + depth) * pitch + (sorted ? 16 * (rows * p.k + 2) : 0) + 4 * depth +
                               4 * depth * p.k);
  }
};

// The heads of a lane's nodes, and how many nodes of each depth may still be found.
template <int kSlots>
struct Heads {
  float cost[kSlots];
  uint32_t place[kSlots];  // position of the head << 8 | node: of equal costs, the lower one is first
  uint32_t full = 0;       // bits of positions that have `width` nodes
  int used = 0;            // nodes of position lane_id()
  int width;

  __device__ explicit Heads(const ExpandTrellisParams& p) : width(static_cast<int>(min(p.width, p.nodes))) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      cost[s] = INFINITY;
      place[s] = kNoPlace;
    }
  }
  // Return the best head of this lane.
  __device__ void best(float& least, uint32_t& where) const {
    float costs[kSlots];
    uint32_t places[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      costs[s] = cost[s];
      places[s] = place[s];
    }
#pragma unroll
    for (int step = kSlots / 2; step > 0; step /= 2) {
#pragma unroll
      for (int s = 0; s < step; ++s) {
        const bool other = costs[s + step] < costs[s] || (costs[s + step] == costs[s] && places[s + step] < places[s]);
        costs[s] = other ? costs[s + step] : costs[s];
        places[s] = other ? places[s + step] : places[s];
      }
    }
    least = costs[0];
    where = places[0];
  }
  // Set node's head to a next child of position d, and the head of the new node `found` to a first child.
  __device__ void replace(int node, float next, int found, float first, int d) {
    used += lane_id() == d;
    full = __ballot_sync(kFullMask, used >= width);
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int of_slot = s * kWarp + lane_id();
      if (of_slot == node) cost[s] = next;
      if (of_slot == found) {
        cost[s] = first;
        place[s] = static_cast<uint32_t>((d + 1) << 8 | found);
      }
    }
    if (full != 0) {
#pragma unroll
      for (int s = 0; s < kSlots; ++s)
        if (full >> (place[s] >> 8) & 1) cost[s] = INFINITY;
    }
  }
};

__device__ __forceinline__ float child_cost(float parent, float step) { return fmaxf(parent, add(parent, step)); }

// Find the nodes with one warp over sorted rows; return their number.
template <int kSlots>
__device__ int search_sorted(const ExpandTrellisParams& p, const TrellisRows& rows, const Shared& s,
                             Found<SearchNode, kSlots>& shared_found) {
  Found<SearchNode, kSlots>& found = *hold_shared(&shared_found);
  const SortedChild* const children = hold_shared(s.children);
  const int lane = lane_id(), k = rows.k, nodes = static_cast<int>(min(p.nodes, int64_t{kSlots * kWarp}));
  Heads<kSlots> heads(p);

  // Return the index of the first child of candidate `candidate` of position d: a row, or the one after the last.
  const int by_candidate = rows.moves ? k : 0, by_position = rows.moves ? 0 : k;
  const int by_all = rows.moves ? k * k : k;
  const auto none = static_cast<unsigned>(rows.depth * rows.rows_per_position() * k);
  const auto first_child = [&](int candidate, int d) {
    return static_cast<int>(min(static_cast<unsigned>(candidate * by_candidate + d * by_position + by_all), none));
  };

  // The head that changed last of lane 0 (that of the parent) and of the others (that of the new node, for lane 1): its
  // state is written one turn later. The root comes as a new node.
  SortedChild child = children[0];
  float above = 0, score = child_cost(0, child.cost), before = -1;
  int at = lane == 1 ? 0 : nodes, index = 0, position = 0, taken = 0, count = 0;
  if (lane == 0) {
    heads.cost[0] = score;
    heads.place[0] = 0;
    score = INFINITY;
  }

  bool is_node = true;
  while (is_node && count < nodes) {
    float mine;
    uint32_t place;
    heads.best(mine, place);
    const uint32_t least = __reduce_min_sync(kFullMask, float_bits(mine));

    const float next = child_cost(above, child.next_cost);
    int candidate = child.candidate;
    const bool ties = score < INFINITY && (score == next || score == before);
    const unsigned tied = __ballot_sync(kFullMask, ties);
    if (tied != 0) {  // a sum may tie where costs do not: of equal sums, the lower candidate is first
#pragma unroll 1
      for (int who = 0; who < 2; ++who) {
        if (!(tied >> who & 1)) continue;
        const float parents = __shfl_sync(kFullMask, above, who), wanted = __shfl_sync(kFullMask, score, who);
        const float last = __shfl_sync(kFullMask, before, who);
        const int row = __shfl_sync(kFullMask, index, who) / k, first = __shfl_sync(kFullMask, position, who) * k;
        const bool equal = lane < k && child_cost(parents, s.costs[row * rows.pitch + lane]) == wanted &&
                           (last != wanted || lane > taken - first);
        const int c = __ffs(__ballot_sync(kFullMask, equal)) - 1;
        if (lane == who) candidate = first + c;
      }
    }
    const float first = children[first_child(candidate, position)].cost;

    const uint32_t found_place = __reduce_min_sync(kFullMask, float_bits(mine) == least ? place : ~0u);
    is_node = least < kInfinity;  // else the rest of this turn counts for nothing
    if (lane < 2) found.nodes[at] = {above, next, first, static_cast<uint32_t>(candidate << 16 | index)};
    __syncwarp();
    const int parent = static_cast<int>(found_place & 255), d = static_cast<int>(found_place >> 8);
    const SearchNode state = found.nodes[parent];
    const float cost = bits_float(least);
    taken = static_cast<int>(state.where >> 16);
    if (lane == 0) found.list[count] = {cost, static_cast<uint32_t>(parent << 16 | taken)};
    count += is_node;

    const float new_score = child_cost(cost, state.first);
    heads.replace(parent, state.next, count, new_score, d);
    const bool is_parent = lane == 0;
    index = is_parent ? static_cast<int>(state.where & 0xffff) + 1 : first_child(taken, d);
    child = children[index];
    at = is_parent ? parent : count;
    above = is_parent ? state.cost : cost;
    score = is_parent ? state.next : new_score;
    before = is_parent ? cost : -1.0f;
    position = is_parent ? d : d + 1;
    __syncwarp();
  }
  return count;
}

// Find the nodes with one warp over rows in the blocks of a cluster, or in this block; return their number.
template <int kSlots, bool kCluster>
__device__ int search_unsorted(const ExpandTrellisParams& p, const TrellisRows& rows, const Shared& s,
                               Found<UnsortedNode, kSlots>& shared_found) {
  Found<UnsortedNode, kSlots>& found = *hold_shared(&shared_found);
  const int lane = lane_id(), k = rows.k, nodes = static_cast<int>(min(p.nodes, int64_t{kSlots * kWarp}));
  const int position_size = rows.rows_per_position() * rows.pitch;
  Heads<kSlots> heads(p);
  float of_lane[2];
  // Read this lane's children of a node, from the root.
  const auto read = [&](float cost, int owner, int row, float (&out)[2]) {
    const float* const from = (kCluster ? Cluster::at(s.costs, owner) : s.costs) + row;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = lane + i * kWarp;
      out[i] = c < k ? child_cost(cost, from[c]) : INFINITY;
    }
  };
  // Return the first candidate with the least cost.
  const auto candidate_of = [](const float (&costs)[2], uint32_t least) {
    const unsigned low = __ballot_sync(kFullMask, float_bits(costs[0]) == least);
    const unsigned high = __ballot_sync(kFullMask, float_bits(costs[1]) == least);
    return low ? __ffs(low) - 1 : high ? __ffs(high) + kWarp - 1 : 0;
  };

  read(0, 0, 0, of_lane);
  const uint32_t of_root = __reduce_min_sync(kFullMask, float_bits(fminf(of_lane[0], of_lane[1])));
  const int roots_head = candidate_of(of_lane, of_root);
  if (lane == 0) {
    found.nodes[0] = {0, 0, 0, roots_head};
    heads.cost[0] = bits_float(of_root);
    heads.place[0] = 0;
  }

  int count = 0;
  while (count < nodes) {
    float mine;
    uint32_t place;
    heads.best(mine, place);
    const uint32_t least = __reduce_min_sync(kFullMask, float_bits(mine));
    if (least >= kInfinity) break;
    const uint32_t found_place = __reduce_min_sync(kFullMask, float_bits(mine) == least ? place : ~0u);
    __syncwarp();
    const int parent = static_cast<int>(found_place & 255), d = static_cast<int>(found_place >> 8);
    const UnsortedNode state = found.nodes[parent];
    const float cost = bits_float(least);
    const int taken = d * k + state.head;
    if (lane == 0) found.list[count] = {cost, static_cast<uint32_t>(parent << 16 | taken)};
    ++count;

    const bool goes_on = d + 1 < rows.depth;
    const int owner = kCluster ? (d + 1) % rows.stride : 0, of_owner = kCluster ? (d + 1) / rows.stride : d + 1;
    const int row = goes_on ? of_owner * position_size + (rows.moves ? state.head * rows.pitch : 0) : 0;
    float left[2], fresh[2];
    read(state.cost, state.owner, state.row, left);
    read(cost, goes_on ? owner : 0, row, fresh);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = lane + i * kWarp;
      if (left[i] < cost || (left[i] == cost && c <= state.head)) left[i] = INFINITY;
      if (!goes_on) fresh[i] = INFINITY;
    }
    const uint32_t next = __reduce_min_sync(kFullMask, float_bits(fminf(left[0], left[1])));
    const uint32_t first = __reduce_min_sync(kFullMask, float_bits(fminf(fresh[0], fresh[1])));
    heads.replace(parent, bits_float(next), count, bits_float(first), d);
    const int next_head = candidate_of(left, next), first_head = candidate_of(fresh, first);
    __syncwarp();
    if (lane == 0) found.nodes[parent].head = next_head;
    if (lane == 1) found.nodes[count] = {cost, row, owner, first_head};
  }
  return count;
}

// Sort a row whose candidates c to c + 3 this lane has; other lanes of the warp have the rest. Equal costs go to the
// lower candidate.
__device__ __forceinline__ void sort_row(const TrellisRows& rows, int row, int d, int c, const float4& costs,
                                         SortedChild* children) {
  const uint32_t keys[kPerLane] = {float_bits(costs.x), float_bits(costs.y), float_bits(costs.z), float_bits(costs.w)};
  int ranks[kPerLane] = {};
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
#pragma unroll
    for (int j = 0; j < i; ++j) {
      const bool earlier = keys[j] <= keys[i];
      ranks[i] += earlier;
      ranks[j] += !earlier;
    }
#pragma unroll
  for (int step = 1; step < kMostSorted / kPerLane; ++step) {
    if (step >= rows.lanes) break;
    const int lane = lane_id() % rows.lanes;
    const uint32_t wins_ties = (lane ^ step) < lane;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const uint32_t other = __shfl_xor_sync(kFullMask, keys[j], step);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) ranks[i] += other < keys[i] + wins_ties;
    }
  }
  if (d < 0) return;
  SortedChild* const out = children + row * rows.k;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (c + i >= rows.k) continue;
    const int rank = ranks[i];
    out[rank].candidate = d * rows.k + c + i;
    out[rank].cost = bits_float(keys[i]);
    if (rank > 0) out[rank - 1].next_cost = bits_float(keys[i]);
    if (rank == rows.k - 1) out[rank].next_cost = INFINITY;
  }
}

template <class T, int kSlots, bool kSorted, bool kCluster>
__global__ void __launch_bounds__(kThreads) expand_trellis_kernel(ExpandTrellisParams p, bool by_tiles) {
  begin_kernel();
  extern __shared__ __align__(16) unsigned char memory[];
  const int blocks = kCluster ? static_cast<int>(Cluster::size()) : 1;
  const int block = kCluster ? static_cast<int>(Cluster::rank()) : 0;
  __shared__ Found<std::conditional_t<kSorted, SearchNode, UnsortedNode>, kSlots> found;
  const TrellisRows rows(p, block, blocks);
  const Shared s(memory, rows, kSorted);
  const int64_t b = blockIdx.x / blocks;

  if (rows.moves) transitions<T>(p, b, rows, rows.depth, by_tiles, s.costs);
  read_unary(p, b, rows, s.unary, s.rests);
  __syncthreads();
  normalise(p, rows, rows.depth, s.unary, s.rests, s.costs, [&](int row, int d, int c, const float4& costs) {
    if constexpr (kSorted) sort_row(rows, row, d, c, costs, s.children);
  });
  if (kSorted && threadIdx.x == 0) s.children[rows.depth * rows.rows_per_position() * rows.k] = {INFINITY, INFINITY, 0};
  if constexpr (kCluster)
    Cluster::sync();
  else
    __syncthreads();

  if (block == 0) {
    if (warp_id() == 0) {
      int count;
      if constexpr (kSorted)
        count = search_sorted<kSlots>(p, rows, s, found);
      else
        count = search_unsorted<kSlots, kCluster>(p, rows, s, found);
      if (lane_id() == 0) found.count = count;
    } else {
      for (int i = static_cast<int>(threadIdx.x) - kWarp; i < rows.depth * rows.k; i += kThreads - kWarp)
        s.tokens[i] = target_id(p, p.topk_ids[b * p.depth * rows.k + i]);
    }
    __syncthreads();
    const int i = static_cast<int>(threadIdx.x);
    if (i < p.nodes) {
      const bool is_node = i < found.count;
      const FoundNode node = is_node ? found.list[i] : FoundNode{INFINITY, 0};
      const int64_t out = b * p.nodes + i;
      p.out_tokens[out] = is_node ? s.tokens[node.link & 0xffff] : 0;
      p.out_parents[out] = static_cast<int32_t>(node.link >> 16) - 1;
      p.out_scores[out] = sub(0.0f, node.cost);
    }
  }
  if constexpr (kCluster) Cluster::sync();  // the first block reads the costs of the others
}

template <class T, int kSlots, bool kSorted, bool kCluster>
void start(const ExpandTrellisParams& p, const Plan& plan, Stream stream) {
  const auto kernel = expand_trellis_kernel<T, kSlots, kSorted, kCluster>;
  if (plan.bytes + kFoundBytes > 48 * 1024)
    SD_CUDA_CHECK("expand_trellis", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                         static_cast<int>(plan.bytes)));
  launch("expand_trellis", kernel,
         {.grid = grid_x("expand_trellis", p.batch * plan.cluster),
          .threads = kThreads,
          .shared_bytes = plan.bytes,
          .cluster = plan.cluster},
         stream, p, plan.by_tiles);
}

void run(const ExpandTrellisParams& p, const Plan& plan, Stream stream) {
  with_float_type(p.factor_dtype, [&]<class T>() {
    if (plan.cluster > 1)
      start<T, 8, false, true>(p, plan, stream);
    else if (p.nodes > 2 * kWarp)
      plan.sorted ? start<T, 8, true, false>(p, plan, stream) : start<T, 8, false, false>(p, plan, stream);
    else if (!plan.sorted)
      start<T, 2, false, false>(p, plan, stream);
    else if (p.nodes > kWarp)
      start<T, 2, true, false>(p, plan, stream);
    else
      start<T, 1, true, false>(p, plan, stream);
  });
}

// Return how to search: sorted or not, in how many blocks; whether that fits at all.
Plan plan_of(const ExpandTrellisParams& p, bool sorted, unsigned cluster) {
  const auto is_aligned = [](const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; };
  Plan plan{
      .sorted = sorted && cluster == 1,
      .by_tiles = p.rank % kStep == 0 && is_aligned(p.predecessors) && is_aligned(p.successors) && is_aligned(p.gates),
      .cluster = cluster,
      .bytes = Shared::bytes(p, sorted && cluster == 1, cluster)};
  plan.fits =
      plan.bytes + kFoundBytes <= static_cast<size_t>(current_device("expand_trellis").shared_bytes_per_block) &&
      (!plan.sorted || p.k <= kMostSorted);
  return plan;
}

Plan choose(const ExpandTrellisParams& p) {
  const bool sorted = p.k <= 16 || !p.predecessors || p.nodes > 2 * kWarp;  // sorting pays per node found
  unsigned cluster = 1;
  // A block takes some 32 tiles of 16 x 8 transitions in as long as a cluster takes to begin and end.
  const int64_t tiles = p.predecessors ? p.depth * ((p.k + 15) / 16) * ((p.k + 7) / 8) : 0;
  if (tiles > 64) cluster = cluster_size("expand_trellis", p.batch, 1, std::min(tiles / 32, p.depth));
  if (const Plan plan = plan_of(p, sorted, cluster); plan.fits) return plan;
  const bool clusters = current_device("expand_trellis").is_hopper_or_later;
  for (cluster = 1; cluster <= (clusters ? kMaxCluster : 1u); cluster *= 2)
    if (const Plan plan = plan_of(p, false, cluster); plan.fits) return plan;
  return {.fits = false};
}

}  // namespace

void expand_trellis_cuda(const ExpandTrellisParams& p, Stream stream) {
  if (const Plan plan = choose(p); plan.fits)
    run(p, plan, stream);
  else
    expand_trellis_levels(p, stream);
}

}  // namespace specdec::draft
