// verify_tree on a GPU, node by node: one cluster per request walks down its tree. The cluster's blocks share a row of
// logits (cluster_row.cuh), and all of them follow the walk. Clusters are as large as the batch allows: 8 blocks at
// batch 1 to 16, 2 at 64, 1 from 128 on; twice that for greedy batches, which need half the registers.
//
// Reads only the rows of visited nodes: once for a greedy request (2 or 4 bytes x vocab per node). A sampled request
// keeps its row in registers at batch 1 to 16; beyond, it reads the tiles with listed entries once more, from L1 or L2.
// At batch 1 a greedy node costs a memory latency and an exchange, about 2 us; a sampled node 7 us. Sixteen warps with
// the same work share four schedulers, so one warp does all work after the row's last exchange.
//
// Where a request's temperature enters: verify_tree_kernel calls sampler_of() (sampling.h) at the root; TokenDraw
// (draw_token.cuh) multiplies logits by Sampler::scale. With sampled candidates sampled_walk.cu runs instead.
//
// verify_at_once.cu is faster for few nodes. Prefetching rows is not faster.
#include "verify/draw_token.cuh"
#include "verify/shared_tree.cuh"
#include "verify/verify_tree.h"

namespace specdec::verify {
namespace {

// The children of a node, loaded by one warp while the node's token is not known yet: lane i holds the i-th.
class Children {
 public:
  __device__ void look_up(const SharedTree& tree, int32_t size, int32_t node) {
    child_ = kNoChild;
    next_ = first_child(tree, size, node);
#pragma unroll 1
    for (int i = 0; i < kWarp && next_ >= 0; ++i) {
      const TreeNode child = tree(next_);
      if (lane_id() == i) {
        child_ = next_;
        token_ = child.token;
      }
      next_ = checked_child(tree, size, node, next_, child.next_sibling);
    }
  }
  // Find the child that carries the token, as find_child() does by walking over all of them.
  __device__ int32_t find(const SharedTree& tree, int32_t size, int32_t node, int32_t token) const {
    const unsigned lanes = __ballot_sync(kFullMask, child_ >= 0 && token_ == token);
    if (lanes != 0) return __shfl_sync(kFullMask, child_, __ffs(static_cast<int>(lanes)) - 1);
    return find_child(tree, size, node, next_, token);
  }

 private:
  int32_t child_, token_ = 0;
  int32_t next_;  // first child that no lane holds
};

template <class T, bool kAdjusted, bool kSampled>
__global__ void __launch_bounds__(kRowThreads, blocks_per_sm(kSampled)) verify_tree_kernel(VerifyTreeParams p) {
  extern __shared__ TreeNode shared_nodes[];
  __shared__ Exchange::Storage exchange_storage;
  __shared__ typename std::conditional_t<kSampled, DrawStorage, char> draw_storage;
  begin_kernel();

  __shared__ int32_t next_node;
  const int64_t b = blockIdx.x >> Cluster::size_log2();
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  const SharedTree tree{shared_nodes, reinterpret_cast<int32_t*>(shared_nodes + p.links.num_nodes)};
  if constexpr (kSampled) TokenDraw<T, kAdjusted>::init(draw_storage);
  Exchange exchange(exchange_storage);
  const bool decides = warp_id() == 0, writes = Cluster::rank() == 0 && threadIdx.x == 0;
  EmittedRow out = emitted_row(p, b);
  TiledRow<T> row(p.vocab);
  int32_t bits = 0, size = 0;
  Sampler sampler;
  DrawProgress progress;
#pragma unroll 1
  for (int32_t node = 0; node >= 0; node = next_node) {
    row.move_to(logit_row<T>(p, b, slot, node));
    typename TiledRow<T>::Held held;
    row.begin(held);
    if (node == 0) {  // while the root's logits load
      tree.copy(p, b);
      if (kSampled && slot >= 0) sampler = sampler_of(p.sampling, slot, p.vocab);
      size = slot < 0 ? 0 : walked_size(p, b, bits);
      tree.wait();
      if (size <= 0) break;
      exchange.join();
    }
    Children children;
    if (decides) children.look_up(tree, size, node);
    int32_t token = kNoChild;
    if constexpr (kSampled) {
      if (!sampler.greedy)
        token = TokenDraw<T, kAdjusted>(row, held, sampler, exchange, draw_storage, progress)
                    .token(static_cast<uint32_t>(tree.positions[node]) + 1);
    }
    if (sampler.greedy) token = largest_id<T, kAdjusted>(row, held, exchange);

    if (decides) {
      int32_t next = kNoChild;
      if (token < 0)
        bits |= kBadLogits;
      else if (out.emit(token, node, writes))
        next = children.find(tree, size, node, token);
      if (next == kMalformed) bits |= kBadTree;
      if (lane_id() == 0) next_node = next;
    }
    __syncthreads();  // the next node is known
  }
  if (writes) finish_walk(p, b, slot, bits, out);
}

template <class T, bool kAdjusted, bool kSampled>
void start(const VerifyTreeParams& p, Stream stream) {
  const unsigned cluster =
      cluster_size("verify_tree", p.batch, blocks_per_sm(kSampled), p.vocab / TiledRow<T>::kIdsPerBlock);
  launch("verify_tree", verify_tree_kernel<T, kAdjusted, kSampled>,
         {.grid = grid_x("verify_tree", p.batch * cluster),
          .threads = kRowThreads,
          .shared_bytes = static_cast<size_t>(p.links.num_nodes) * (sizeof(TreeNode) + sizeof(int32_t)),
          .cluster = cluster},
         stream, p);
}

}  // namespace

void verify_tree_cuda(const VerifyTreeParams& p, Stream stream) {
  if (p.plan.kernel == VerifyKernel::kRejection) return verify_sampled_cuda(p, stream);
  if (p.plan.kernel == VerifyKernel::kAtOnce) return verify_at_once_cuda(p, stream);
  with_kernel_variant(p, [&]<class T, bool kAdjusted, bool kSampled>() { start<T, kAdjusted, kSampled>(p, stream); });
}

}  // namespace specdec::verify
