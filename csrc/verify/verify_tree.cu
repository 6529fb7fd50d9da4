// One cluster a request walks down its tree; its blocks share a row of logits (cluster_row.cuh) and all of them follow
// the walk, so that a node costs one barrier of the cluster when it is greedy. Clusters are as large as the batch
// leaves room for: 8 blocks at batch 1 to 32, 4 at 64, 1 from 256 on (2 blocks of 512 threads an SM).
//
// Reads the rows of visited nodes alone, once for a greedy request (2 or 4 bytes x vocab a node) and once more, from
// L2, for a sampled one. Where all rows together are few bytes they are fetched to L2 while the root is worked on: a
// walk is a chain of memory latencies otherwise.
#include "verify/draw_token.cuh"
#include "verify/verify_tree.h"

namespace specdec {
namespace {

constexpr int kBlocksPerSm = 2;
constexpr int64_t kPrefetchBytes = 16 << 20;  // of logits in all, at most a third of the L2 of an H100

// Asks for all rows but the root's, each thread a part.
template <class T>
__device__ void prefetch_rows(const VerifyTreeParams& p, int64_t b, int32_t size) {
#if __CUDA_ARCH__ >= 900
  constexpr int64_t kPart = 2048;
  const int64_t parts =
      (p.vocab * static_cast<int64_t>(sizeof(T)) - 16) / kPart;  // whole ones, wherever 16 bytes align
  for (int64_t i = Cluster::rank() * kRowThreads + threadIdx.x; i < (size - 1) * parts;
       i += Cluster::size() * kRowThreads) {
    const auto row = reinterpret_cast<uintptr_t>(logit_row<T>(p, b, 0, 1 + i / parts).logits);
    const uintptr_t part = (row + 15) / 16 * 16 + i % parts * kPart;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(part), "r"(static_cast<uint32_t>(kPart)));
  }
#endif
}

template <class T, bool kAdjusted, bool kSampled>
__global__ void __launch_bounds__(kRowThreads, kBlocksPerSm) verify_tree_kernel(VerifyTreeParams p, bool prefetch) {
  extern __shared__ TreeNode shared_nodes[];  // [num_nodes]
  __shared__ Exchange::Storage exchange_storage;
  __shared__ typename std::conditional_t<kSampled, DrawStorage, char> draw_storage;
  begin_kernel();

  const int64_t b = blockIdx.x / Cluster::size();
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  const bool leads = Cluster::rank() == 0 && threadIdx.x == 0;
  EmittedRow out = emitted_row(p, b);
  int32_t bits = 0;
  const int32_t size = slot < 0 ? 0 : tree_size(p.tree_sizes[b], p.links.num_nodes, bits);

  if (size > 0) {
    if (prefetch) prefetch_rows<T>(p, b, size);
    for (int i = threadIdx.x; i < size; i += kRowThreads) shared_nodes[i] = read_node(p.links, b, i);
    const auto nodes = [](int32_t i) { return shared_nodes[i]; };
    Exchange exchange(exchange_storage);
    Sampler sampler;
    if (kSampled) sampler = sampler_of(p.sampling, slot, p.vocab);
    Cluster::sync();  // every block has begun, and the tree is in shared memory

    for (int32_t node = 0; node >= 0;) {
      const LogitRow<T> row = logit_row<T>(p, b, slot, node);
      int32_t token;
      if constexpr (kSampled) {
        token = sampler.greedy ? largest_id<T, kAdjusted>(RowStretch<T>(row, p.vocab), exchange)
                               : TokenDraw<T, kAdjusted>(row, p.vocab, sampler, exchange, draw_storage)
                                     .token(position_after(p, b, node));
      } else {
        token = largest_id<T, kAdjusted>(RowStretch<T>(row, p.vocab), exchange);
      }
      if (token < 0) bits |= kBadLogits;
      if (token < 0 || !out.emit(token, node, leads)) break;
      node = find_child(nodes, size, node, token);
      if (node == kMalformed) bits |= kBadTree;
    }
    if (kSampled) Cluster::sync();  // no block leaves while another reads its list
  }
  if (leads) {
    if (bits) set_status(p.status, slot, bits);
    out.finish();
    p.out_len[b] = static_cast<int32_t>(out.len);
  }
}

template <class T, bool kAdjusted, bool kSampled>
void start(const VerifyTreeParams& p, Stream stream) {
  constexpr int64_t kUseful = kRowThreads * RowStretch<T>::kItems;  // ids that keep a block busy
  const unsigned cluster = cluster_size("verify_tree", p.batch, kBlocksPerSm, p.vocab / kUseful);
  const int64_t row_bytes = p.vocab * static_cast<int64_t>(sizeof(T));
  launch("verify_tree", verify_tree_kernel<T, kAdjusted, kSampled>,
         {.grid = grid_x("verify_tree", p.batch * cluster),
          .threads = kRowThreads,
          .shared_bytes = static_cast<size_t>(p.links.num_nodes) * sizeof(TreeNode),
          .cluster = cluster},
         stream, p, p.batch * p.links.num_nodes * row_bytes <= kPrefetchBytes);
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
