// tree_attention with one thread-block cluster per request, KV head and row tile of 16, 64 or 128 rows (compute
// capability 9.0), for few such tiles.
//
// The blocks of a cluster read even shares of the KV, derived from one request's lengths, and merge their partial
// results through distributed shared memory: neither a walk of all work nor the workspace delays the result. With fewer
// tiles of 16 rows than fill the GPU and long KV, several clusters share a tile; the last one to store its partial
// result in the workspace writes the rows.
//
// A block has four producer warps (two may dequantize) and four consumer warps, or eight for 128 rows. Grid:
// [sharing_clusters x cluster_blocks, KV heads, requests x row_tiles]. Two blocks fit on an SM, with half of its shared
// memory each, so that the next call's blocks start while this one's run and look up what to copy first; blocks of 128
// rows, or with head_dim 256, take a whole SM. Traffic: the KV of each request once per row tile.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "attention/common/launch.cuh"
#include "attention/sm90/cluster_mma.cuh"
#include "attention/sm90/cluster_wgmma.cuh"

namespace specdec::attention {

// T: type of query rows. Kv: type of the pools. kSharing: clusters may share a row tile, which costs code size.
template <class T, class Kv, int D, int kRows, bool kSharing_>
class ClusterAttention {
 public:
  static constexpr bool kSharing = kSharing_;
  static constexpr bool kDequantizes = std::is_same_v<Kv, Float8> && kRows > 16;
  static constexpr int kConsumers = kRows == 128 ? 8 : 4;
  static constexpr int kBlocksPerSm = kRows == 128 || D == 256 ? 1 : 2;
  static constexpr int kStages = (D == 256 ? 768 : kRows == 128 ? 640 : 384) / D;
  // mma.sync takes FP8 pools as stored, in tiles of 128 tokens, which have the bytes of 64 tokens in 16 bits.
  using Ring = std::conditional_t<kDequantizes,
                                  ClusterDequantRing<D, 256 / D, 256 / D, (kRows == 128 ? 1024 : 256) / D, kConsumers>,
                                  ClusterRing<128 / sizeof(Kv), sizeof(Kv) * D, kStages, kConsumers>>;
  using Accumulator = std::conditional_t<kRows == 16, ClusterMma<T, Kv, D, Ring>, ClusterWgmma<T, Kv, D, Ring>>;
  static constexpr int kWarps = kConsumers + 4, kThreads = kWarps * kWarp;  // the last warps produce or dequantize
  // The first warps write: code that more warps run is fetched more often.
  static constexpr int kWriters = kSharing ? kConsumers : kWarps;
  static constexpr int kConsumerRegisters = D == 256 ? 240 : kRows == 128 ? 208 : 168, kProducerRegisters = 88;
  static constexpr bool kPartialsInStages = Accumulator::kPartialsInStages;
  using Partials = ClusterPartials<D, kRows>;

  struct Shared {
    typename Accumulator::Queries queries;
    typename Ring::Shared ring;
    typename Accumulator::Shared accumulator;
    std::conditional_t<kPartialsInStages, char, Partials> partials;
    Mbarrier partials_arrived;

    // Initialize the barriers. Call from one thread, before the block's first __syncthreads().
    __device__ void init() {
      ring.init();
      partials_arrived.init(1);
      Cluster::fence_barrier_init();
    }
  };
  // The system reserves 1 KB of an SM's 228 KB for each block.
  static_assert(sizeof(Shared) <= (228 / kBlocksPerSm - 1) * 1024);

  __device__ ClusterAttention(Shared& shared, const TreeAttentionParams& p, const DevicePlan& plan)
      : shared_(shared), p_(p), plan_(plan) {
    s_.kv_head = static_cast<int>(blockIdx.y);
    s_.first_row = static_cast<int>(blockIdx.z) % plan.row_tiles * kRows;
    s_.request = load_request(p, request_);  // speculative while the preceding kernels run
  }

  // Return whether the block has nothing to do and may exit, so that the next call's blocks find room. Its request must
  // be short both by the lengths read before the preceding kernels have finished and by those read afterwards. Call
  // from all threads of the block.
  __device__ bool is_idle() const {
    const bool other = !is_first_cluster() && p_.cu_seqlens_q == nullptr;
    if (!__syncthreads_and(other && !is_split_across_clusters(p_, plan_, s_.request, s_.first_row))) return false;
    let_next_kernel_start();
    wait_for_kernels_before();
    return !is_split_across_clusters(p_, plan_, load_request(p_, request_), s_.first_row);
  }

  // Run a producer warp from start to end.
  __device__ void produce() {
    typename Ring::Quantized ring(shared_.ring, p_, plan_, s_);
    Accumulator accumulator(shared_.queries, shared_.ring, shared_.accumulator, p_, plan_, s_);
    if constexpr (!kPartialsInStages) Cluster::arrive_relaxed();
    ring.copy_first_share();
    wait_if_idle();
    while (has_rows()) {
      if constexpr (kPartialsInStages)
        Cluster::arrive_relaxed();
      else
        sync();
      Cluster::wait();
      if constexpr (!kPartialsInStages) accumulator.template send<kThreads>(partials(), shared_.partials_arrived);
      finish<!kSharing>();
      if (has_rows()) ring.copy();
    }
  }

  // Run a dequantizer warp from start to end.
  __device__ void dequantize() {
    static_assert(kPartialsInStages);
    typename Ring::Dequantizer dequantizer(shared_.ring);
    shared_.ring.request_full.wait(0);
    s_.request = shared_.ring.request;
    wait_if_idle();
    while (has_rows()) {
      dequantizer.dequantize(share_of(p_, plan_, s_.request, s_.first_row));
      Cluster::arrive_relaxed();
      Cluster::wait();
      finish<!kSharing>();
    }
  }

  // Run a consumer warp from start to end.
  __device__ void consume() {
    Accumulator accumulator(shared_.queries, shared_.ring, shared_.accumulator, p_, plan_, s_);
    if constexpr (!kPartialsInStages) Cluster::arrive_relaxed();
    if constexpr (kBlocksPerSm > 1) prefetch_queries();
    wait_for_kernels_before();
    accumulator.begin_load_q();
    const Request actual = load_request(p_, request_);
    if (threadIdx.x == 0) {
      shared_.ring.request = actual;
      shared_.ring.request_full.arrive();
    }
    accumulator.finish_load_q();
    if (!(actual == s_.request)) {
      s_.request = actual;
      accumulator.begin_load_q();
      accumulator.finish_load_q();
    }
    if (blockIdx.x == 0 && blockIdx.y == 0 && s_.first_row == 0 && threadIdx.x == 0 && s_.request.status != 0)
      set_status(p_.status, s_.request.slot, s_.request.status);
    wait_if_idle();
    while (has_rows()) {
      accumulator.accumulate(share_of(p_, plan_, s_.request, s_.first_row));
      if (threadIdx.x == 0)
        shared_.partials_arrived.arrive_expecting(
            Partials::bytes(min(kRows, s_.request.valid_rows * plan_.gqa_group.divisor - s_.first_row)));
      if constexpr (kPartialsInStages)
        Cluster::arrive_relaxed();
      else
        sync();
      Cluster::wait();
      if constexpr (kPartialsInStages)
        accumulator.send(partials(), shared_.partials_arrived);
      else
        accumulator.template send<kThreads>(partials(), shared_.partials_arrived);
      finish<true>();
      if (!has_rows()) break;
      accumulator.begin_load_q();
      accumulator.finish_load_q();
    }
    if (p_.cu_seqlens_q != nullptr) write_padding_rows<T, D, kConsumers>(p_, plan_);
  }

 private:
  // Prefetch the row tile's queries and masks into the L2; call from the consumers. A preceding kernel that still
  // writes them also writes to the L2.
  __device__ void prefetch_queries() const {
    constexpr int kLines = 2 * D / 128, kThreadsHere = kConsumers * kWarp;
    for (int n = threadIdx.x; n < kRows * kLines; n += kThreadsHere)
      if (const T* row = q_row<T>(p_, plan_, s_, s_.first_row + n / kLines)) prefetch(row + n % kLines * 64);
    if (p_.mask != nullptr)
      for (int64_t n = threadIdx.x * 16; n < s_.request.valid_rows * p_.mask_words; n += kThreadsHere * 16)
        prefetch(p_.mask + s_.request.flat_row * p_.mask_words + n);
  }

  // Return whether the request has rows from the tile on, and KV for this cluster. Uniform over the cluster.
  __device__ bool has_rows() const {
    return s_.first_row < s_.request.rows * plan_.gqa_group.divisor &&
           (!kSharing || is_first_cluster() || is_split_across_clusters(p_, plan_, s_.request, s_.first_row));
  }
  // Return whether this is the first of the clusters that share the tile.
  __device__ bool is_first_cluster() const { return static_cast<int>(blockIdx.x) < plan_.cluster_blocks; }

  // Complete a cluster barrier that this block has arrived at, if no work follows.
  __device__ void wait_if_idle() const {
    if constexpr (!kPartialsInStages)
      if (!has_rows()) Cluster::wait();
  }

  // Write the rows once all partial results have arrived, and advance to the cluster's next row tile. Partial results
  // may be sent again only after all blocks have finished.
  template <bool kWrites>
  __device__ void finish() {
    shared_.partials_arrived.wait(parity_);
    parity_ ^= 1;
    if constexpr (kSharing && kWrites) {
      s_.splits = s_.workers =
          is_split_across_clusters(p_, plan_, s_.request, s_.first_row) ? plan_.sharing_clusters : 1;
      s_.first_partial = (request_ * static_cast<int>(p_.kv_heads) + s_.kv_head) * plan_.sharing_clusters;
      s_.partial = s_.first_partial + static_cast<int>(blockIdx.x) / plan_.cluster_blocks;
    }
    if constexpr (kWrites) partials().template finish<T, kWriters, kSharing>(p_, plan_, s_);
    s_.first_row += plan_.row_tiles * kRows;
    if (!has_rows()) return;
    if constexpr (kPartialsInStages)
      Cluster::sync();
    else
      Cluster::arrive();
  }

  __device__ static void sync() { asm volatile("bar.sync 2, %0;" ::"n"(kThreads) : "memory"); }

  __device__ Partials& partials() const {
    if constexpr (kPartialsInStages) {
      static_assert(sizeof(Partials) <= Ring::kStageBytes);
      return reinterpret_cast<Partials&>(shared_.ring);  // the ring begins with the stages
    } else {
      return shared_.partials;
    }
  }

  Shared& shared_;
  const TreeAttentionParams& p_;
  const DevicePlan& plan_;
  const int request_ = static_cast<int>(blockIdx.z) / plan_.row_tiles;
  Segment s_;
  unsigned parity_ = 0;  // of `partials_arrived`
};

template <class Attention>
__global__ void __launch_bounds__(Attention::kThreads, Attention::kBlocksPerSm)
    cluster_kernel(const __grid_constant__ TreeAttentionParams p, const __grid_constant__ DevicePlan plan) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Attention::Shared*>(memory);
  if (threadIdx.x == 0) shared.init();
  if constexpr (Attention::kSharing) {
    if (Attention(shared, p, plan).is_idle()) return;
  } else {
    __syncthreads();
  }
  if (threadIdx.x / kWarp < Attention::kConsumers) {
    cutlass::arch::warpgroup_reg_alloc<Attention::kConsumerRegisters>();
    Attention(shared, p, plan).consume();
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Attention::kProducerRegisters>();
    if constexpr (Attention::kDequantizes)
      if (threadIdx.x / kWarp >= Attention::kConsumers + Attention::Ring::kProducers)
        return Attention(shared, p, plan).dequantize();
    Attention(shared, p, plan).produce();
  }
#endif
}

template <class T, class Kv, int D, int kRows, bool kSharing = false>
void launch_cluster(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream) {
  using Attention = ClusterAttention<T, Kv, D, kRows, kSharing>;
  const auto kernel = cluster_kernel<Attention>;
  const auto size = static_cast<unsigned>(plan.cluster_blocks);
  const LaunchShape shape{
      .grid = dim3(size * static_cast<unsigned>(plan.sharing_clusters), static_cast<unsigned>(p.kv_heads),
                   static_cast<unsigned>(p.batch * plan.row_tiles)),
      .threads = Attention::kThreads,
      .shared_bytes = sizeof(typename Attention::Shared),
      .cluster = size};
  allow_shared_bytes(kernel, shape.shared_bytes);
  launch("tree_attention", kernel, shape, stream, p, plan);
}

// Instantiated by instantiations/, one file per head dimension, so that they compile in parallel.
template <int D>
void cluster_attention(const TreeAttentionParams& p, const DevicePlan& plan, Stream stream) {
  if constexpr (D == 256) {
    with_16_bit_type(p.dtype, [&]<class T>() {
      if (plan.tile_rows == 16) return launch_cluster<T, T, D, 16>(p, plan, stream);
      launch_cluster<T, T, D, 64>(p, plan, stream);
    });
  } else {
    with_16_bit_types(p, [&]<class T, class Kv>() {
      if (plan.sharing_clusters > 1) return launch_cluster<T, Kv, D, 16, true>(p, plan, stream);
      if (plan.tile_rows == 16) return launch_cluster<T, Kv, D, 16>(p, plan, stream);
      if (plan.tile_rows == 64) return launch_cluster<T, Kv, D, 64>(p, plan, stream);
      launch_cluster<T, Kv, D, 128>(p, plan, stream);
    });
  }
}

}  // namespace specdec::attention
