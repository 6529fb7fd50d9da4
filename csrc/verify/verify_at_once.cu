// verify_tree for few nodes: find the tokens of all nodes at once, then walk by looking them up.
//
// The node-by-node walk (verify_tree.cu) costs 2 us per node, 6.5 us if sampled, serially. This kernel pair pays that
// once and reads every node's row (2 or 4 bytes x vocab each), with a block on each SM. The blocks of a row leave a
// word in the workspace: in a greedy batch each block its largest logit, without communication; otherwise a cluster its
// drawn token. A flat row whose nucleus is too long for a list would take ten times as long, and most rows are not on
// the path: such a node is left to the walk, whose cluster finds its token as verify_tree.cu does.
//
// A request's temperature enters in node_tokens_kernel and walk_tokens_kernel through sampler_of() (sampling.h).
#include <bit>

#include "verify/draw_token.cuh"
#include "verify/shared_tree.cuh"

namespace specdec::verify {
namespace {

constexpr int32_t kPending = -2;  // token of a node that is left to the walk

// The word that a node's blocks leave in the workspace: a part's largest lane_entry(), or a token in the same format.
__device__ uint64_t entry_of(int32_t token) {
  return token == kNoChild ? 0 : uint64_t{1} << 32 | ~static_cast<uint32_t>(token);
}

// Return whether a node has no packed row: the grid covers the maximum nodes of a tree.
__device__ bool has_no_row(const VerifyTreeParams& p, int64_t b, int64_t node) {
  return p.cu_seqlens_q && node >= packed_rows(p.cu_seqlens_q, b, p.num_rows).count;
}

// Grid: (parts of a row, nodes, requests).
template <class T, bool kAdjusted>
__global__ void __launch_bounds__(kRowThreads, blocks_per_sm(false)) node_maxima_kernel(VerifyTreeParams p) {
  __shared__ uint64_t of_warps[kRowWarps];
  wait_for_kernels_before();
  let_next_kernel_start();

  const int64_t b = blockIdx.z, node = blockIdx.y;
  if (has_no_row(p, b, node)) return;
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  using Row = TiledRow<T, GridBlocks>;
  const Row row(logit_row<T>(p, b, slot, node), p.vocab);
  typename Row::Held held;
  row.begin(held);
  int32_t bits = 0;
  if (slot < 0 || node >= walked_size(p, b, bits)) return;

  const uint64_t of_warp = warp_max(lane_entry<kAdjusted>(row, held));
  if (lane_id() == 0) of_warps[warp_id()] = of_warp;
  __syncthreads();
  if (warp_id() != 0) return;
  const uint64_t best = warp_max(of_warps[lane_id() % kRowWarps]);
  if (lane_id() == 0) p.workspace[row_of_node(p, b, node) * gridDim.x + blockIdx.x] = best;
}

// Grid: (one cluster per node, requests).
template <class T, bool kAdjusted>
__global__ void __launch_bounds__(kRowThreads, blocks_per_sm(true)) node_tokens_kernel(VerifyTreeParams p) {
  __shared__ Exchange::Storage exchange_storage;
  __shared__ DrawStorage draw_storage;
  wait_for_kernels_before();
  let_next_kernel_start();

  const int64_t b = blockIdx.y, node = blockIdx.x >> Cluster::size_log2();
  if (has_no_row(p, b, node)) return;
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  TokenDraw<T, kAdjusted>::init(draw_storage);
  Exchange exchange(exchange_storage);
  const TiledRow<T> row(logit_row<T>(p, b, slot, node), p.vocab);
  typename TiledRow<T>::Held held;
  row.begin(held);
  int32_t bits = 0;
  if (slot < 0 || node >= walked_size(p, b, bits)) return;
  const Sampler sampler = sampler_of(p.sampling, slot, p.vocab);
  exchange.join();

  int32_t token;
  if (sampler.greedy) {
    token = largest_id<T, kAdjusted>(row, held, exchange);
  } else {
    DrawProgress progress;
    token = TokenDraw<T, kAdjusted>(row, held, sampler, exchange, draw_storage, progress)
                .template token<kPending>(position_after(p, b, node));
  }
  if (Cluster::rank() == 0 && threadIdx.x == 0) p.workspace[row_of_node(p, b, node)] = entry_of(token);
}

// One block per request in a greedy batch, else one cluster; one thread per part of the nodes.
template <class T, bool kAdjusted, bool kSampled>
__global__ void __launch_bounds__(kRowThreads, blocks_per_sm(kSampled))
    walk_tokens_kernel(VerifyTreeParams p, int parts_log2) {
  extern __shared__ TreeNode shared_nodes[];
  __shared__ Exchange::Storage exchange_storage;
  __shared__ typename std::conditional_t<kSampled, DrawStorage, char> draw_storage;
  __shared__ int32_t next_node;
  let_next_kernel_start();

  const int64_t b = blockIdx.x >> Cluster::size_log2();
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  const auto num_nodes = static_cast<int32_t>(p.links.num_nodes), thread = static_cast<int32_t>(threadIdx.x);
  const SharedTree tree{shared_nodes, reinterpret_cast<int32_t*>(shared_nodes + num_nodes)};
  int32_t *tokens = tree.positions + num_nodes, *next = tokens + num_nodes;
  tree.copy(p, b);
  if constexpr (kSampled) TokenDraw<T, kAdjusted>::init(draw_storage);
  Exchange exchange(exchange_storage);
  Sampler sampler;
  if (kSampled && slot >= 0) sampler = sampler_of(p.sampling, slot, p.vocab);
  int32_t bits = 0;
  const int32_t size = slot < 0 ? 0 : walked_size(p, b, bits);

  wait_for_kernels_before();
  const int32_t of_node = thread >> parts_log2;
  uint64_t entry = of_node < size ? p.workspace[(row_of_node(p, b, 0) << parts_log2) + thread] : 0;
  for (int d = 1; d < 1 << parts_log2; d *= 2) entry = max(entry, __shfl_xor_sync(kFullMask, entry, d));
  if (of_node < size && thread == of_node << parts_log2) tokens[of_node] = entry_id(entry);
  tree.wait();
  if (thread < size) next[thread] = find_child(tree, size, thread, first_child(tree, size, thread), tokens[thread]);
  __syncthreads();

  const bool decides = warp_id() == 0, writes = Cluster::rank() == 0 && thread == 0;
  EmittedRow out = emitted_row(p, b);
  // Emit a node's token; return the node to visit next.
  const auto after = [&](int32_t node, int32_t token, auto child) {
    if (token < 0) bits |= kBadLogits;
    if (token < 0 || !out.emit(token, node, writes)) return kNoChild;
    const int32_t to = child();
    if (to == kMalformed) bits |= kBadTree;
    return to;
  };
  // Walk from a node to the first one without a token, if there is one on the path.
  const auto walk = [&](int32_t node) {
    while (node >= 0 && tokens[node] != kPending) node = after(node, tokens[node], [&] { return next[node]; });
    return node;
  };
  int32_t node = size > 0 ? 0 : kNoChild;
  if (decides) node = walk(node);
  if constexpr (kSampled) {
    if (thread == 0) next_node = node;
    __syncthreads();
    if (next_node >= 0) exchange.join();
    DrawProgress progress;
    TiledRow<T> row(p.vocab);
#pragma unroll 1
    while ((node = next_node) >= 0) {
      __syncthreads();  // all threads have read next_node
      row.move_to(logit_row<T>(p, b, slot, node));
      typename TiledRow<T>::Held held;
      row.begin(held);
      const int32_t token = TokenDraw<T, kAdjusted>(row, held, sampler, exchange, draw_storage, progress)
                                .token(static_cast<uint32_t>(tree.positions[node]) + 1);
      if (decides) {
        node = walk(
            after(node, token, [&] { return find_child(tree, size, node, first_child(tree, size, node), token); }));
        if (lane_id() == 0) next_node = node;
      }
      __syncthreads();  // the next node is known
    }
  }
  if (writes) finish_walk(p, b, slot, bits, out);
}

template <class T, bool kAdjusted, bool kSampled>
void start(const VerifyTreeParams& p, Stream stream) {
  const auto parts = static_cast<unsigned>(p.plan.parts);
  const auto nodes = static_cast<unsigned>(p.links.num_nodes), batch = static_cast<unsigned>(p.batch);
  if constexpr (kSampled)
    launch("verify_tree", node_tokens_kernel<T, kAdjusted>,
           {.grid = dim3(nodes * parts, batch), .threads = kRowThreads, .cluster = parts}, stream, p);
  else
    launch("verify_tree", node_maxima_kernel<T, kAdjusted>, {.grid = dim3(parts, nodes, batch), .threads = kRowThreads},
           stream, p);

  const unsigned left = kSampled ? 1 : parts;  // per node
  const unsigned threads = kSampled ? kRowThreads : (nodes * left + kWarp - 1) / kWarp * kWarp;
  const unsigned cluster =
      kSampled ? cluster_size("verify_tree", p.batch, blocks_per_sm(true), p.vocab / TiledRow<T>::kIdsPerBlock) : 1;
  launch("verify_tree", walk_tokens_kernel<T, kAdjusted, kSampled>,
         {.grid = batch * cluster,
          .threads = threads,
          .shared_bytes = nodes * (sizeof(TreeNode) + 3 * sizeof(int32_t)),
          .cluster = cluster},
         stream, p, std::countr_zero(left));
}

}  // namespace

void verify_at_once_cuda(const VerifyTreeParams& p, Stream stream) {
  with_kernel_variant(p, [&]<class T, bool kAdjusted, bool kSampled>() { start<T, kAdjusted, kSampled>(p, stream); });
}

}  // namespace specdec::verify
