// build_tree_kernel_efficient on a GPU: one block per request, one thread per node.
//
// Each thread searches for its node's parent among the candidates in smem; then links and ancestors are bitsets
// (tree/tree_nodes.cuh). Reads 8 bytes per node, writes 32 bytes per node and its mask. Latency bound, except for full
// masks of large batches, whose rows start after the prefixes of all earlier rows.
#include <cub/block/block_reduce.cuh>

#include "compat/linked_trees.h"
#include "tree/tree_nodes.cuh"

namespace specdec::compat {
namespace {

constexpr int kThreads = 256;
static_assert(kThreads >= kMaxLinkedNodes);

// Return the sum of the prefixes before row b to thread 0. Called by every thread of the block.
__device__ int64_t prefixes_before(const LinkedTrees& out, int64_t b) {
  using Sum = cub::BlockReduce<int64_t, kThreads>;
  __shared__ typename Sum::TempStorage storage;
  int64_t sum = 0;
  for (int64_t other = threadIdx.x; other < b; other += kThreads) sum += prefix_of(out, other);
  return Sum(storage).Sum(sum);
}

template <int kWords>
__device__ void write_mask(const BuildTreeKernelEfficientParams& p, int64_t b, int64_t prefixes,
                           const tree::TreeNodes<kWords>& s) {
  const auto n = static_cast<int>(p.out.nodes);
  const int64_t prefix = prefix_of(p.out, b);
  if (p.layout == kPackedMaskRows) {
    const int i = static_cast<int>(threadIdx.x);
    const int64_t at = i < n ? p.mask_row(b, i, 0, 0) : -1;
    for (int64_t byte = 0; at >= 0 && byte < p.packed_bytes(); ++byte)
      p.mask[at + byte] = static_cast<uint8_t>(s.ancestors[0][i] >> 8 * byte);
    return;
  }
  for (int cell = static_cast<int>(threadIdx.x); cell < n * n; cell += kThreads) {
    const int i = cell / n, j = cell % n;
    const int64_t at = p.mask_row(b, i, prefixes, prefix);
    if (at >= 0) p.mask[at + j] = static_cast<uint8_t>(s.ancestors[j / 64][i] >> j % 64 & 1);
  }
}

template <int kWords>
__global__ void __launch_bounds__(kThreads) build_kernel(BuildTreeKernelEfficientParams p) {
  begin_kernel();
  __shared__ tree::TreeNodes<kWords> s;
  __shared__ int64_t selected[kMaxLinkedNodes];
  __shared__ int64_t prefixes;
  const int64_t b = blockIdx.x;
  const auto n = static_cast<int32_t>(p.out.nodes), i = static_cast<int32_t>(threadIdx.x);
  clear_nodes(s);
  if (i > 0 && i < n) selected[i] = p.selected_index[b * (n - 1) + i - 1];
  const int64_t before = p.layout == kFullMaskRows ? prefixes_before(p.out, b) : 0;
  if (i == 0) prefixes = before;
  __syncthreads();

  const int64_t candidate = i > 0 && i < n ? p.parent_candidate(b, selected[i]) : -2;
  int32_t parent = candidate == -1 ? 0 : -1;
  for (int32_t j = 1; candidate >= 0 && j < i && parent < 0; ++j)
    if (selected[j] == candidate) parent = j;
  if (i < n) s.up[i] = parent >= 0 ? parent : i;
  if (parent >= 0) {
    auto* half_words = reinterpret_cast<uint32_t*>(s.children[parent]);
    atomicOr(half_words + i / 32, 1u << i % 32);
  }
  __syncthreads();

  int32_t child = -1, sibling = -1;
  if (i < n) {
    child = tree::next_bit(s.children[i], i);
    if (parent >= 0) sibling = tree::next_bit(s.children[parent], i);
  }
  uint64_t bits[kWords];
  for (int w = 0; w < kWords; ++w) bits[w] = own_bit(i, w);
  find_ancestors(s, i, n, bits);
  int depth = -1;
  for (int w = 0; w < kWords; ++w) depth += count_bits(bits[w]);
  if (i < n) p.out.write(b, i, depth, child, sibling);
  bits[0] |= 1;     // also for a node without a parent
  __syncthreads();  // `ancestors` overwrites the children
  for (int w = 0; w < kWords && i < n; ++w) s.ancestors[w][i] = bits[w];
  __syncthreads();
  write_mask(p, b, prefixes, s);
}

}  // namespace

void build_tree_kernel_efficient_cuda(const BuildTreeKernelEfficientParams& p, Stream stream) {
  constexpr const char* kOp = "build_tree_kernel_efficient";
  const LaunchShape shape{.grid = grid_x(kOp, p.out.batch), .threads = kThreads};
  if (p.out.nodes <= 64)
    launch(kOp, build_kernel<1>, shape, stream, p);
  else
    launch(kOp, build_kernel<kMaxLinkedNodes / 64>, shape, stream, p);
}

}  // namespace specdec::compat
