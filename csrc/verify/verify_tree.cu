// Clusters of blocks share a row of logits (cluster_row.cuh). They are as large as the batch leaves room for: 8 blocks
// at batch 1 to 32, 4 at 64, 1 from 256 on (2 blocks of 512 threads an SM).
//
// Walking: one cluster a request goes down its tree, and reads the rows of visited nodes alone, once for a greedy
// request (2 or 4 bytes x vocab a node) and in part once more, from L1 or L2, for a sampled one. Each node costs a
// memory latency and a round or three of messages, 2 to 4 us at batch 1.
//
// Ahead: where the device has room for half of a small batch's nodes at once, and there is a workspace, every node gets
// a cluster, and the last one to finish walks over the tokens found. A token does not depend on the walk: it is the
// argmax of its row, or a draw keyed by its position.
#include <cuda_pipeline.h>

#include <algorithm>

#include "verify/draw_token.cuh"
#include "verify/verify_tree.h"

namespace specdec {
namespace {

constexpr int kBlocksPerSm = 2;

// A tree in shared memory, copied while the root's logits are on their way.
struct SharedTree {
  TreeNode* nodes;     // [num_nodes]
  int32_t* positions;  // [num_nodes]

  __device__ TreeNode operator()(int32_t i) const { return nodes[i]; }

  __device__ void copy(const VerifyTreeParams& p, int64_t b) const {
    const int64_t first = b * p.links.num_nodes;
    for (int i = threadIdx.x; i < p.links.num_nodes; i += kRowThreads) {
      __pipeline_memcpy_async(&nodes[i].token, p.links.tokens + first + i, 4);
      __pipeline_memcpy_async(&nodes[i].parent, p.links.parents + first + i, 4);
      __pipeline_memcpy_async(&nodes[i].first_child, p.links.first_child + first + i, 4);
      __pipeline_memcpy_async(&nodes[i].next_sibling, p.links.next_sibling + first + i, 4);
      __pipeline_memcpy_async(&positions[i], p.positions + first + i, 4);
    }
    __pipeline_commit();
  }
  __device__ static void wait() {
    __pipeline_wait_prior(0);
    __syncthreads();
  }
};

// One request's walk. One thread `writes`, the others of its cluster only follow.
struct Walk {
  const VerifyTreeParams& p;
  const SharedTree& tree;
  int64_t b, slot;
  int32_t size, bits;
  bool writes;
  EmittedRow out;

  // Emits the target's token after `node`; the node to visit next, or a negative number.
  __device__ int32_t next(int32_t node, int32_t token) {
    if (token < 0) bits |= kBadLogits;
    if (token < 0 || !out.emit(token, node, writes)) return kNoChild;
    const int32_t child = find_child(tree, size, node, token);
    if (child == kMalformed) bits |= kBadTree;
    return child;
  }
  __device__ void finish() const {
    if (!writes) return;
    if (bits) set_status(p.status, slot, bits);
    out.finish();
    p.out_len[b] = static_cast<int32_t>(out.len);
  }
};

// `teams` clusters for each request: 1 walks, more find every node's token first.
template <class T, bool kAdjusted, bool kSampled>
__global__ void __launch_bounds__(kRowThreads, kBlocksPerSm) verify_tree_kernel(VerifyTreeParams p, int teams) {
  extern __shared__ TreeNode shared_nodes[];
  __shared__ Exchange::Storage exchange_storage;
  __shared__ typename std::conditional_t<kSampled, DrawStorage, char> draw_storage;
  begin_kernel();

  const int64_t cluster = blockIdx.x / Cluster::size(), b = cluster / teams;
  const int team = static_cast<int>(cluster % teams);
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  const bool leads = Cluster::rank() == 0 && threadIdx.x == 0;
  const SharedTree tree{shared_nodes, reinterpret_cast<int32_t*>(shared_nodes + p.links.num_nodes)};
  int32_t bits = 0;
  const int32_t size = slot < 0 ? 0 : tree_size(p.tree_sizes[b], p.links.num_nodes, bits);
  Walk walk{p, tree, b, slot, size, bits, leads, emitted_row(p, b)};
  if (size <= 0) {
    if (team == 0) walk.finish();
    return;
  }

  TiledRow<T>(logit_row<T>(p, b, slot, min(team, size - 1)), p.vocab).prefetch();
  tree.copy(p, b);
  Sampler sampler;
  unsigned list_phase = 0;
  if constexpr (kSampled) {
    sampler = sampler_of(p.sampling, slot, p.vocab);
    TokenDraw<T, kAdjusted>::init(draw_storage);
  }
  Exchange exchange(exchange_storage);
  int32_t* tokens = teams > 1 ? p.workspace + kWorkspaceCounters + b * p.links.num_nodes : nullptr;
  if (!sampler.greedy) tree.wait();
#pragma unroll 1
  for (int32_t node = team; node >= 0 && node < size;) {
    const LogitRow<T> row = logit_row<T>(p, b, slot, node);
    int32_t token = kNoChild;
    if constexpr (kSampled) {
      if (!sampler.greedy)
        token = TokenDraw<T, kAdjusted>(row, p.vocab, sampler, exchange, draw_storage, list_phase)
                    .token(static_cast<uint32_t>(tree.positions[node]) + 1);
    }
    if (sampler.greedy) token = largest_id<T, kAdjusted>(TiledRow<T>(row, p.vocab), exchange);
    if (sampler.greedy && node == team) tree.wait();  // by now it is there

    if (tokens) {
      if (leads) tokens[node] = token;
      node += teams;
    } else {
      node = walk.next(node, token);
    }
  }
  if (!tokens) {
    walk.finish();
    return;
  }

  if (team >= size) tree.wait();  // which found no token
  if (Cluster::rank() != 0 || threadIdx.x >= kWarp) return;
  unsigned done = 0;
  if (leads) {
    __threadfence();                                                            // the tokens come before the count
    done = atomicInc(reinterpret_cast<unsigned*>(p.workspace) + b, teams - 1);  // which is 0 again behind the last one
    __threadfence();
  }
  if (__shfl_sync(kFullMask, done, 0) != static_cast<unsigned>(teams - 1)) return;
  for (int32_t i = lane_id(); i < size; i += kWarp) tree.positions[i] = __ldcg(tokens + i);  // nobody needs them now
  __syncwarp();
  if (!leads) return;
  for (int32_t node = 0; node >= 0;) node = walk.next(node, tree.positions[node]);
  walk.finish();
}

template <class T, bool kAdjusted, bool kSampled>
void start(const VerifyTreeParams& p, Stream stream) {
  constexpr int64_t kUseful = kRowThreads * TiledRow<T>::kItems;  // ids that keep a block busy
  const int64_t nodes = p.links.num_nodes, useful = p.vocab / kUseful;
  int64_t teams = 1;
  if (p.workspace && p.batch <= kWorkspaceCounters) {
    // As many clusters of full size as the device holds; worth it when a team has two nodes at most.
    while (teams < nodes && cluster_size("verify_tree", p.batch * 2 * teams, kBlocksPerSm, useful) == kMaxCluster)
      teams *= 2;
    teams = 2 * teams >= nodes ? std::min(teams, nodes) : 1;
  }
  const unsigned cluster = cluster_size("verify_tree", p.batch * teams, kBlocksPerSm, useful);
  launch("verify_tree", verify_tree_kernel<T, kAdjusted, kSampled>,
         {.grid = grid_x("verify_tree", p.batch * teams * cluster),
          .threads = kRowThreads,
          .shared_bytes = static_cast<size_t>(nodes) * (sizeof(TreeNode) + sizeof(int32_t)),
          .cluster = cluster},
         stream, p, static_cast<int>(teams));
}

}  // namespace

void verify_tree_cuda(const VerifyTreeParams& p, Stream stream) {
  with_float_type(p.logits_dtype, [&]<class T>() {
    const bool adjusted = p.logit_bias || p.vocab_mask, sampled = p.sampling.temperature;
    if (adjusted)
      sampled ? start<T, true, true>(p, stream) : start<T, true, false>(p, stream);
    else
      sampled ? start<T, false, true>(p, stream) : start<T, false, false>(p, stream);
  });
}

}  // namespace specdec
