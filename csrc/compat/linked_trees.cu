// One block a request, one thread a node: the parent is looked for among the candidates in shared memory, or read off
// the mask, then links and ancestors are sets of bits (tree/tree_nodes.cuh). Reads 8 bytes a node and its mask, writes
// 32 and its mask; latency bound, but for full masks of large batches, whose rows begin behind all prefixes before
// them.
#include <cub/block/block_reduce.cuh>

#include "compat/linked_trees.h"
#include "tree/tree_nodes.cuh"

namespace specdec::compat {
namespace {

constexpr int kThreads = 256;
static_assert(kThreads >= kMaxLinkedNodes);

// The sum of the prefixes before row b, by every thread of the block, for its thread 0.
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
  bits[0] |= 1;     // also where a node has no parent
  __syncthreads();  // `ancestors` lie where the children were
  for (int w = 0; w < kWords && i < n; ++w) s.ancestors[w][i] = bits[w];
  __syncthreads();
  write_mask(p, b, prefixes, s);
}

__global__ void __launch_bounds__(kThreads) reconstruct_kernel(ReconstructIndicesFromTreeMaskParams p) {
  begin_kernel();
  constexpr int kWords = kMaxLinkedNodes / kWarp;
  __shared__ uint32_t rows[kMaxLinkedNodes][kWords + 1];  // bit j of row i: node i sees node j
  __shared__ int32_t parents[kMaxLinkedNodes];
  const int64_t b = blockIdx.x;
  const auto n = static_cast<int32_t>(p.out.nodes), i = static_cast<int32_t>(threadIdx.x);
  const int lane = i % kWarp, words = (n + kWarp - 1) / kWarp;
  for (int word = i / kWarp; word < n * words; word += kThreads / kWarp) {
    const int row = word / words, j = word % words * kWarp + lane;
    const unsigned bits = __ballot_sync(kFullMask, j < n && p.mask[(b * n + row) * n + j] != 0);
    if (lane == 0) rows[row][word % words] = bits;
  }
  __syncthreads();

  int32_t depth = 0, parent = -1;
  for (int w = 0; i < n && w < words; ++w) {
    const auto below = rows[i][w] & static_cast<uint32_t>(low_bits(i - w * kWarp));
    depth += __popc(below);
    if (below != 0) parent = w * kWarp + highest_bit(below);
  }
  if (i < n) parents[i] = parent;
  __syncthreads();
  if (i >= n) return;
  int32_t child = i + 1, sibling = i + 1;
  while (child < n && !(rows[child][i / kWarp] >> lane & 1)) ++child;
  while (sibling < n && (parent < 0 || parents[sibling] != parent)) ++sibling;
  p.out.write(b, i, depth, child < n ? child : -1, sibling < n ? sibling : -1);
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

void reconstruct_indices_from_tree_mask_cuda(const ReconstructIndicesFromTreeMaskParams& p, Stream stream) {
  constexpr const char* kOp = "reconstruct_indices_from_tree_mask";
  launch(kOp, reconstruct_kernel, {.grid = grid_x(kOp, p.out.batch), .threads = kThreads}, stream, p);
}

}  // namespace specdec::compat
