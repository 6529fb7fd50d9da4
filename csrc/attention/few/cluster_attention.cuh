// tree_attention where requests are few (compute capability 9.0): a thread-block cluster for each
// request, KV head and tile of 16, 64 or 128 rows. Its blocks read even shares of the KV and merge what they have
// summed through each other's shared memory, so that neither a walk of all work nor the workspace stands between the
// lengths and the result. Of fewer tiles of 16 rows than find multiprocessors some clusters share each, where its KV is
// long, and the last one of them to leave its sums in the workspace writes the rows. Four producer warps, of which two
// may widen, and four consumer warps a block, eight for 128 rows. Grid: [clusters of a tile x their blocks, KV heads,
// requests x row tiles], at most two blocks a multiprocessor, half of its room for each: the next call's blocks start
// while this one's run, and find out what to copy first; or one of 128 rows. Bytes: the KV of each request once per row
// tile.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "attention/few/mma_share.cuh"
#include "attention/few/wgmma_share.cuh"
#include "attention/launch.h"

namespace specdec::few {

// Query rows of T, pools of Kv. kMayShare: clusters may share a tile's KV, which costs code.
template <class T, class Kv, int D, int kRows, bool kMayShare_>
class ClusterAttention {
 public:
  static constexpr bool kMayShare = kMayShare_;
  static constexpr bool kWidens = std::is_same_v<Kv, Float8> && kRows > 16;
  static constexpr int kConsumers = kRows == 128 ? 8 : 4;
  static constexpr int kBlocks = kRows == 128 ? 1 : 2;  // on a multiprocessor
  // mma.sync gets pools of 8 bits as they are: in tiles of 128 tokens, which have the bytes of 64 of 16 bits.
  using Stream =
      std::conditional_t<kWidens, WidenedShare<D, 256 / D, 256 / D, (kRows == 128 ? 1024 : 256) / D, kConsumers>,
                         ShareStream<128 / sizeof(Kv), sizeof(Kv) * D, (kRows == 128 ? 640 : 384) / D, kConsumers>>;
  using Summer = std::conditional_t<kRows == 16, MmaShare<T, Kv, D, Stream>, WgmmaShare<T, Kv, D, Stream>>;
  static constexpr int kWarps = kConsumers + 4, kThreads = kWarps * kWarp;  // the last ones produce or widen
  static constexpr int kWriters = kMayShare ? kConsumers : kWarps;  // the first warps: what is written twice is code
  static constexpr int kConsumerRegisters = kRows == 128 ? 208 : 168, kProducerRegisters = 88;
  static constexpr bool kPartsInStages = Summer::kPartsInStages;
  using Parts = few::Parts<D, kRows>;

  struct Shared {
    typename Summer::Queries queries;
    typename Stream::Shared stream;
    typename Summer::Shared summer;
    std::conditional_t<kPartsInStages, char, Parts> parts;
    Mbarrier parts_there;

    // By one thread, before the block's first barrier.
    __device__ void init() {
      stream.init();
      parts_there.init(1);
      Cluster::show_barriers();
    }
  };
  static_assert(sizeof(Shared) <= (228 / kBlocks - 1) * 1024);  // of a multiprocessor's 228 KB each block costs one

  __device__ ClusterAttention(Shared& shared, const TreeAttentionParams& p, const Cut& cut)
      : shared_(shared), p_(p), cut_(cut) {
    s_.head = static_cast<int>(blockIdx.y);
    s_.first_row = static_cast<int>(blockIdx.z) % cut.lanes * kRows;
    s_.request = request_of(p, request_);  // as long as kernels before run, only what it is likely to be
  }

  // Whether a block has nothing to do, and may go before the next call's come: its request is short, as it looks before
  // kernels before have finished, and as it is then. By all of the block's threads.
  __device__ bool is_idle() const {
    const bool other = !is_first() && p_.cu_seqlens_q == nullptr;
    if (!__syncthreads_and(other && !is_shared(p_, cut_, s_.request, s_.first_row))) return false;
    let_next_kernel_start();
    wait_for_kernels_before();
    return !is_shared(p_, cut_, request_of(p_, request_), s_.first_row);
  }

  // A producer warp's whole life.
  __device__ void produce() {
    typename Stream::Narrow stream(shared_.stream, p_, cut_, s_);
    Summer summer(shared_.queries, shared_.stream, shared_.summer, p_, cut_, s_);
    if constexpr (!kPartsInStages) Cluster::arrive_relaxed();
    stream.copy_first();
    wait_if_idle();
    while (has_rows()) {
      if constexpr (kPartsInStages)
        Cluster::arrive_relaxed();
      else
        sync();
      Cluster::wait();
      if constexpr (!kPartsInStages) summer.template put<kThreads>(parts(), shared_.parts_there);
      finish<!kMayShare>();
      if (has_rows()) stream.copy();
    }
  }

  // A widening warp's.
  __device__ void widen() {
    static_assert(kPartsInStages);
    typename Stream::Widener widener(shared_.stream);
    shared_.stream.known.wait(0);
    s_.request = shared_.stream.request;
    wait_if_idle();
    while (has_rows()) {
      widener.widen(share_of(p_, cut_, s_.request, s_.first_row));
      Cluster::arrive_relaxed();
      Cluster::wait();
      finish<!kMayShare>();
    }
  }

  // A consumer warp's.
  __device__ void consume() {
    Summer summer(shared_.queries, shared_.stream, shared_.summer, p_, cut_, s_);
    if constexpr (!kPartsInStages) Cluster::arrive_relaxed();
    if constexpr (kBlocks > 1) ask_for_queries();
    wait_for_kernels_before();
    summer.ask_for_q();
    const Request truth = request_of(p_, request_);
    if (threadIdx.x == 0) {
      shared_.stream.request = truth;
      shared_.stream.known.arrive();
    }
    summer.take_q();
    if (!(truth == s_.request)) {
      s_.request = truth;
      summer.ask_for_q();
      summer.take_q();
    }
    if (blockIdx.x == 0 && blockIdx.y == 0 && s_.first_row == 0 && threadIdx.x == 0 && s_.request.status != 0)
      set_status(p_.status, s_.request.slot, s_.request.status);
    wait_if_idle();
    while (has_rows()) {
      summer.sum(share_of(p_, cut_, s_.request, s_.first_row));
      if (threadIdx.x == 0)
        shared_.parts_there.arrive_expecting(
            Parts::bytes(min(kRows, s_.request.valid_rows * cut_.group.divisor - s_.first_row)));
      if constexpr (kPartsInStages)
        Cluster::arrive_relaxed();
      else
        sync();
      Cluster::wait();
      if constexpr (kPartsInStages)
        summer.put(parts(), shared_.parts_there);
      else
        summer.template put<kThreads>(parts(), shared_.parts_there);
      finish<true>();
      if (!has_rows()) break;
      summer.ask_for_q();
      summer.take_q();
    }
    if (p_.cu_seqlens_q != nullptr) write_rows_behind<T, D, kConsumers>(p_, cut_);
  }

 private:
  // Asks the tile's rows of q, and the masks, into the L2, by the consumers: whoever writes them meets them there.
  __device__ void ask_for_queries() const {
    constexpr int kLines = 2 * D / 128, kThreadsHere = kConsumers * kWarp;
    for (int n = threadIdx.x; n < kRows * kLines; n += kThreadsHere)
      if (const T* row = q_row<T>(p_, cut_, s_, s_.first_row + n / kLines)) prefetch(row + n % kLines * 64);
    if (p_.mask != nullptr)
      for (int64_t n = threadIdx.x * 16; n < s_.request.valid_rows * p_.mask_words; n += kThreadsHere * 16)
        prefetch(p_.mask + s_.request.flat_row * p_.mask_words + n);
  }

  // Of the request, from the tile on, and of them a part for this cluster; the same in all its threads.
  __device__ bool has_rows() const {
    return s_.first_row < s_.request.rows * cut_.group.divisor &&
           (!kMayShare || is_first() || is_shared(p_, cut_, s_.request, s_.first_row));
  }
  // Of the clusters of its tile.
  __device__ bool is_first() const { return static_cast<int>(blockIdx.x) < cut_.cluster; }

  // For what has been begun with nothing to follow.
  __device__ void wait_if_idle() const {
    if constexpr (!kPartsInStages)
      if (!has_rows()) Cluster::wait();
  }

  // When all parts are where they belong; goes to the next tile of rows that are this cluster's. Parts may be put again
  // when all have finished.
  template <bool kWrites>
  __device__ void finish() {
    shared_.parts_there.wait(parity_);
    parity_ ^= 1;
    if constexpr (kMayShare && kWrites) {
      s_.parts = s_.workers = is_shared(p_, cut_, s_.request, s_.first_row) ? cut_.parts : 1;
      s_.first_part = (request_ * static_cast<int>(p_.kv_heads) + s_.head) * cut_.parts;
      s_.part = s_.first_part + static_cast<int>(blockIdx.x) / cut_.cluster;
    }
    if constexpr (kWrites) parts().template finish<T, kWriters, kMayShare>(p_, cut_, s_);
    s_.first_row += cut_.lanes * kRows;
    if (!has_rows()) return;
    if constexpr (kPartsInStages)
      Cluster::sync();
    else
      Cluster::arrive();
  }

  __device__ static void sync() { asm volatile("bar.sync 2, %0;" ::"n"(kThreads) : "memory"); }

  __device__ Parts& parts() const {
    if constexpr (kPartsInStages) {
      static_assert(sizeof(Parts) <= Stream::kStageBytes);
      return reinterpret_cast<Parts&>(shared_.stream);  // which begins with the stages
    } else {
      return shared_.parts;
    }
  }

  Shared& shared_;
  const TreeAttentionParams& p_;
  const Cut& cut_;
  const int request_ = static_cast<int>(blockIdx.z) / cut_.lanes;
  Segment s_;
  unsigned parity_ = 0;  // of the tile's parts
};

template <class Attention>
__global__ void __launch_bounds__(Attention::kThreads, Attention::kBlocks)
    cluster_attention_kernel(const __grid_constant__ TreeAttentionParams p, const __grid_constant__ Cut cut) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Attention::Shared*>(memory);
  if (threadIdx.x == 0) shared.init();
  if constexpr (Attention::kMayShare) {
    if (Attention(shared, p, cut).is_idle()) return;
  } else {
    __syncthreads();
  }
  if (threadIdx.x / kWarp < Attention::kConsumers) {
    cutlass::arch::warpgroup_reg_alloc<Attention::kConsumerRegisters>();
    Attention(shared, p, cut).consume();
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Attention::kProducerRegisters>();
    if constexpr (Attention::kWidens)
      if (threadIdx.x / kWarp >= Attention::kConsumers + Attention::Stream::kProducers)
        return Attention(shared, p, cut).widen();
    Attention(shared, p, cut).produce();
  }
#endif
}

template <class T, class Kv, int D, int kRows, bool kMayShare = false>
void start_cluster_attention(const TreeAttentionParams& p, const Cut& cut, Stream stream) {
  using Attention = ClusterAttention<T, Kv, D, kRows, kMayShare>;
  const auto kernel = cluster_attention_kernel<Attention>;
  const auto size = static_cast<unsigned>(cut.cluster);
  const LaunchShape shape{.grid = dim3(size * static_cast<unsigned>(cut.parts), static_cast<unsigned>(p.kv_heads),
                                       static_cast<unsigned>(p.batch * cut.lanes)),
                          .threads = Attention::kThreads,
                          .shared_bytes = sizeof(typename Attention::Shared),
                          .cluster = size};
  allow_shared_bytes(kernel, shape.shared_bytes);
  launch("tree_attention", kernel, shape, stream, p, cut);
}

// Of one head dimension; defined in a file of its own for each, so that they compile side by side.
template <int D>
void cluster_attention_of(const TreeAttentionParams& p, const Cut& cut, Stream stream) {
  with_16_bit_types(p, [&]<class T, class Kv>() {
    if (cut.parts > 1) return start_cluster_attention<T, Kv, D, 16, true>(p, cut, stream);
    if (cut.rows == 16) return start_cluster_attention<T, Kv, D, 16>(p, cut, stream);
    if (cut.rows == 64) return start_cluster_attention<T, Kv, D, 64>(p, cut, stream);
    start_cluster_attention<T, Kv, D, 128>(p, cut, stream);
  });
}

}  // namespace specdec::few
