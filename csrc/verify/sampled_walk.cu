// verify_tree on a GPU for sampled candidates: one cluster per request walks down its tree (sampled_walk.h); all
// threads of all blocks walk together and share rows of logits (cluster_row.cuh).
//
// A node with one sampled child reads the target's row and the draft's row twice (maxima, then sums), and once or twice
// more if the child is rejected (residual, then the draw). All reads but the first hit L1 or L2. top-k and top-p add
// TokenDraw's threshold search (draw_token.cuh). A request's temperature enters in sampler_of() (sampling.h), which the
// kernel below calls for the target and, through draft_sampler_of(), for the draft.
#include "verify/draw_token.cuh"
#include "verify/sampled_walk.h"

namespace specdec::verify {
namespace {

constexpr int kBlocksPerSm = 1;

// Rows of SampledWalk on a GPU. Every thread of the cluster gets the same results. The passes are noinline functions
// because the walk calls each in several places.
template <class T, bool kAdjusted>
class ClusterRows {
 public:
  // `mapped`, in smem, has a bit for each target token that is in the draft's vocabulary; null without an id_map.
  __device__ ClusterRows(const VerifyTreeParams& p, int64_t b, int64_t slot, const Sampler& sampler,
                         const Sampler& draft_sampler, const uint32_t* mapped, Exchange& exchange,
                         DrawStorage& draw_storage)
      : p_(p),
        b_(b),
        slot_(slot),
        sampler_(sampler),
        draft_sampler_(draft_sampler),
        mapped_(mapped),
        exchange_(exchange),
        draw_storage_(draw_storage),
        target_row_(logit_row<T>(p, b, slot, 0)),
        draft_row_(draft_logit_row<T>(p, b, 0)),
        target_(target_row_, p.vocab),
        draft_(draft_row_, p.drafts.vocab) {}

  __device__ __noinline__ int32_t token(int32_t node, uint32_t position) {
    const TiledRow<T> row(logit_row<T>(p_, b_, slot_, node), p_.vocab);
    Held held;
    row.begin(held);
    const int32_t token =
        sampler_.greedy
            ? largest_id<T, kAdjusted>(row, held, exchange_)
            : TokenDraw<T, kAdjusted>(row, held, sampler_, exchange_, draw_storage_, progress_).token(position);
    if (threadIdx.x == 0) draw_storage_.token = token;
    __syncthreads();
    return draw_storage_.token;
  }

  __device__ __noinline__ bool open(int32_t node, int32_t draft_row) {
    target_row_ = logit_row<T>(p_, b_, slot_, node);
    draft_row_ = draft_logit_row<T>(p_, b_, draft_row);
    target_ = TiledRow<T>(target_row_, p_.vocab);
    draft_ = TiledRow<T>(draft_row_, p_.drafts.vocab);

    Held target_held, draft_held;
    target_.begin(target_held);
    draft_.begin(draft_held);
    int tile;
    const auto [target_key, draft_key] = largest_keys(order_key(target_.template largest<kAdjusted>(target_held, tile)),
                                                      order_key(draft_.template largest<false>(draft_held, tile)));
    target_scale_ = {key_float(target_key), sampler_.scale};
    // A draft row without tokens gets a maximum of infinity, so that all of its tokens weigh 0.
    draft_scale_ = {draft_key > kKeyOfMinusInf ? key_float(draft_key) : INFINITY, draft_sampler_.scale};
    same_tiles_ = !p_.drafts.id_map && target_.id_of(0) == draft_.id_of(0);
    target_total_ = draft_total_ = 0;
    if (target_key <= kKeyOfMinusInf) return false;

    threshold_ = sampler_.filters_by_key() ? threshold() : -INFINITY;
    uint64_t target = 0, draft = 0;
    target_.for_each_tile([&](int tile, const uint4& raw) {
      if (!any_kept(tile, raw)) return;
      float x[kItems];
      target_.template items<kAdjusted>(tile, raw, x);
#pragma unroll
      for (int i = 0; i < kItems; ++i) target += kept(x[i]);
    });
    draft_.for_each_tile([&](int tile, const uint4& raw) {
      float x[kItems];
      draft_.template items<false>(tile, raw, x);
#pragma unroll
      for (int i = 0; i < kItems; ++i) draft += draft_scale_.weight(x[i]);
    });
    sum_totals(target, draft);
    return true;
  }
  __device__ uint64_t target_total() const { return target_total_; }
  __device__ uint64_t draft_total() const { return draft_total_; }

  __device__ TokenPair pair(int32_t token) {
    if (token < 0 || token >= p_.vocab) return {};
    int64_t d = token;
    if (p_.drafts.id_map) {
      d = find_draft_id(token);
      if (d < 0) return {};
    }
    const float x = to_float(draft_row_.logits[d]);
    return {kept(target_row_[token]), draft_scale_.weight(x)};
  }

  __device__ __noinline__ uint64_t set_residual(float scale) {
    scale_ = scale;
    drafted_residual_ = other_residual_ = 0;
    for_each_drafted([&](int, const uint64_t (&residual)[kItems]) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) drafted_residual_ += residual[i];
    });
    if (mapped_)
      for_each_other([&](int, const uint64_t (&residual)[kItems]) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) other_residual_ += residual[i];
      });
    return residual_total_ = exchange_.sum(drafted_residual_ + other_residual_);
  }

  __device__ __noinline__ int32_t draw(uint64_t random) {
    int32_t token = -1;
    PrefixHit hit = find_segment(drafted_residual_, mul_high(random, residual_total_));
    if (hit.index >= 0) {
      if (hit.index == row_warp()) {
        const int d = find_in_segment<T>(hit, draft_, [&](auto&& f) { for_each_drafted(f); });
        token = d < 0 ? -1 : p_.drafts.id_map ? p_.drafts.id_map[d] : d;
      }
    } else if (mapped_) {
      hit = find_segment(other_residual_, hit.target - hit.total);
      if (hit.index == row_warp()) token = find_in_segment<T>(hit, target_, [&](auto&& f) { for_each_other(f); });
    }
    return static_cast<int32_t>(exchange_.max(static_cast<uint64_t>(token + 1))) - 1;
  }

 private:
  static constexpr int kItems = TiledRow<T>::kItems;
  using Items = const float (&)[kItems];
  using Held = typename TiledRow<T>::Held;

  struct Keys {
    uint32_t target, draft;
  };
  __device__ Keys largest_keys(uint32_t target, uint32_t draft) {
    target = __reduce_max_sync(kFullMask, target);
    draft = __reduce_max_sync(kFullMask, draft);
    const uint64_t* keys = exchange_.all_gather(static_cast<uint64_t>(target) << 32 | draft);
    for (int i = lane_id(); i < row_warps(); i += kWarp) {
      target = ::max(target, static_cast<uint32_t>(keys[i] >> 32));
      draft = ::max(draft, static_cast<uint32_t>(keys[i]));
    }
    return {__reduce_max_sync(kFullMask, target), __reduce_max_sync(kFullMask, draft)};
  }

  __device__ uint64_t kept(float x) const {
    return x >= threshold_ ? sampler_.after_min_p(target_scale_.weight(x)) : 0;
  }

  __device__ __noinline__ float threshold() {
    Held held;
    target_.begin(held);
    return TokenDraw<T, kAdjusted>(target_, held, sampler_, exchange_, draw_storage_, progress_).lowest_kept();
  }

  // Sum both totals over the threads' parts.
  __device__ void sum_totals(uint64_t target, uint64_t draft) {
    target = warp_sum(target);
    draft = warp_sum(draft);
    const uint64_t* sums = exchange_.all_gather(lane_id() < kWarp / 2 ? target : draft, 2);
    target = draft = 0;
    for (int i = lane_id(); i < row_warps(); i += kWarp) {
      target += sums[2 * i];
      draft += sums[2 * i + 1];
    }
    target_total_ = warp_sum(target);
    draft_total_ = warp_sum(draft);
  }

  // Return the lowest draft id of a token, or -1.
  __device__ __noinline__ int32_t find_draft_id(int32_t token) {
    uint32_t found = 0;
    const int threads = kRowWarps * kWarp * static_cast<int>(Cluster::size());
    for (int d = static_cast<int>(Cluster::rank()) * kRowThreads + threadIdx.x; d < p_.drafts.vocab; d += threads)
      if (p_.drafts.id_map[d] == token) found = ::max(found, ~static_cast<uint32_t>(d));
    const uint64_t lowest = exchange_.max(found);
    return lowest == 0 ? -1 : static_cast<int32_t>(~static_cast<uint32_t>(lowest));
  }

  // Return whether top-k and top-p keep any token of the warp's tile of the target's row (rarely true).
  __device__ bool any_kept(int tile, const uint4& raw) const {
    return __any_sync(kFullMask, target_.template largest_of<kAdjusted>(tile, raw) >= threshold_);
  }
  __device__ bool any_kept(Items x) const {
    float most = x[0];
#pragma unroll
    for (int i = 1; i < kItems; ++i) most = fmaxf(most, x[i]);
    return __any_sync(kFullMask, most >= threshold_);
  }

  // Call f(tile, residual weights) for the draft ids of this warp's segment, skipping tiles whose residual is zero.
  template <class F>
  __device__ void for_each_drafted(F&& f) const {
    draft_.for_each_tile([&](int tile, const uint4& raw) {
      float x[kItems], y[kItems];
      if (same_tiles_)
        target_.template items<kAdjusted>(tile, target_.read(tile), x);
      else
        gather(draft_.id_of(tile), x);
      if (!any_kept(x)) return;
      draft_.template items<false>(tile, raw, y);
      uint64_t residual[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) residual[i] = residual_weight(kept(x[i]), draft_scale_.weight(y[i]), scale_);
      f(tile, residual);
    });
  }
  // Gather the target's logits of the draft ids from `first` on; -inf where the id or the token does not exist.
  __device__ void gather(int first, float (&x)[kItems]) const {
    int token[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int d = first + i;
      const bool there = d >= 0 && d < p_.drafts.vocab;
      token[i] = !there ? -1 : p_.drafts.id_map ? p_.drafts.id_map[d] : d;
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) x[i] = token[i] >= 0 && token[i] < p_.vocab ? target_row_[token[i]] : -INFINITY;
  }
  // Call f(tile, residual weights) for the target tokens that are not in the draft's vocabulary.
  template <class F>
  __device__ void for_each_other(F&& f) const {
    target_.for_each_tile([&](int tile, const uint4& raw) {
      if (!any_kept(tile, raw)) return;
      float x[kItems];
      target_.template items<kAdjusted>(tile, raw, x);
      uint64_t residual[kItems];
      const int first = target_.id_of(tile);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int v = first + i;
        const bool other = v >= 0 && v < p_.vocab && !(mapped_[v >> 5] >> (v & 31) & 1);
        residual[i] = other ? kept(x[i]) : 0;
      }
      f(tile, residual);
    });
  }

  // Find the segment that contains the target position; `mine` is this thread's part of its warp's sum.
  __device__ PrefixHit find_segment(uint64_t mine, uint64_t target) {
    return find_in_prefix_sums(exchange_.all_gather(warp_sum(mine)), row_warps(), [=](uint64_t) { return target; });
  }

  // Find, with one warp, the id in its segment of `row` at the target position. The lane that owns it returns it, the
  // others -1.
  template <class U, class Each>
  __device__ static int find_in_segment(const PrefixHit& hit, const TiledRow<U>& row, Each&& each) {
    uint64_t before = hit.before;
    int found = -1;
    each([&](int tile, const uint64_t (&residual)[kItems]) {
      uint64_t lane = 0;
#pragma unroll
      for (int i = 0; i < kItems; ++i) lane += residual[i];
      const uint64_t through = before + sum_up_to_lane(lane);
      uint64_t sum = through - lane;
      if (hit.target >= sum && hit.target < through) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          if (hit.target >= sum && hit.target < sum + residual[i]) found = row.id_of(tile) + i;
          sum += residual[i];
        }
      }
      before = __shfl_sync(kFullMask, through, kWarp - 1);
    });
    return found;
  }

  const VerifyTreeParams& p_;
  const int64_t b_, slot_;
  const Sampler &sampler_, &draft_sampler_;
  const uint32_t* mapped_;
  Exchange& exchange_;
  DrawStorage& draw_storage_;
  DrawProgress progress_;

  LogitRow<T> target_row_, draft_row_;
  TiledRow<T> target_, draft_;
  bool same_tiles_ = false;  // both rows' tiles cover the same ids
  RowScale target_scale_{}, draft_scale_{};
  float threshold_ = 0, scale_ = 0;
  uint64_t target_total_ = 0, draft_total_ = 0;
  uint64_t residual_total_ = 0, drafted_residual_ = 0, other_residual_ = 0;  // residual: total, and this thread's parts
};

// Set, in smem, the bits of the target tokens that are in the draft's vocabulary.
__device__ void map_tokens(const VerifyTreeParams& p, uint32_t* mapped) {
  for (int i = threadIdx.x; i < (p.vocab + 31) / 32; i += kRowThreads) mapped[i] = 0;
  __syncthreads();
  for (int d = threadIdx.x; d < p.drafts.vocab; d += kRowThreads) {
    const int v = p.drafts.id_map[d];
    if (v >= 0 && v < p.vocab) atomicOr(&mapped[v >> 5], 1u << (v & 31));
  }
  __syncthreads();
}

template <class T, bool kAdjusted>
__global__ void __launch_bounds__(kRowThreads, kBlocksPerSm)
    verify_sampled_kernel(const __grid_constant__ VerifyTreeParams p) {
  extern __shared__ uint32_t shared_mapped[];
  __shared__ Exchange::Storage exchange_storage;
  __shared__ DrawStorage draw_storage;
  begin_kernel();

  const int64_t b = blockIdx.x >> Cluster::size_log2();
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  const bool leads = Cluster::rank() == 0 && threadIdx.x == 0;
  EmittedRow out = emitted_row(p, b);
  int32_t bits = 0;
  const int32_t size = slot < 0 ? 0 : walked_size(p, b, bits);

  if (size > 0) {
    const Sampler sampler = sampler_of(p.sampling, slot, p.vocab), draft_sampler = draft_sampler_of(p, slot);
    const bool drafts_sampled = !sampler.greedy && !draft_sampler.greedy;
    uint32_t* mapped = p.drafts.id_map ? shared_mapped : nullptr;
    TokenDraw<T, kAdjusted>::init(draw_storage);
    Exchange exchange(exchange_storage);
    if (mapped && drafts_sampled) map_tokens(p, mapped);
    exchange.join();
    using Rows = ClusterRows<T, kAdjusted>;
    Rows rows(p, b, slot, sampler, draft_sampler, mapped, exchange, draw_storage);
    bits |= SampledWalk<Rows>(p, b, size, sampler, drafts_sampled, rows, out, leads).run();
  }
  if (leads) finish_walk(p, b, slot, bits, out);
}

template <class T, bool kAdjusted>
void start(const VerifyTreeParams& p, Stream stream) {
  const unsigned cluster = cluster_size("verify_tree", p.batch, kBlocksPerSm, p.vocab / TiledRow<T>::kIdsPerBlock);
  const size_t bits = p.drafts.id_map ? static_cast<size_t>(p.vocab + 31) / 32 * sizeof(uint32_t) : 0;
  auto* kernel = verify_sampled_kernel<T, kAdjusted>;
  if (bits > 0)
    SD_CUDA_CHECK("verify_tree",
                  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bits)));
  launch("verify_tree", kernel,
         {.grid = grid_x("verify_tree", p.batch * cluster),
          .threads = kRowThreads,
          .shared_bytes = bits,
          .cluster = cluster},
         stream, p);
}

}  // namespace

void verify_sampled_cuda(const VerifyTreeParams& p, Stream stream) {
  with_float_type(p.logits_dtype, [&]<class T>() {
    p.logit_bias || p.vocab_mask ? start<T, true>(p, stream) : start<T, false>(p, stream);
  });
}

}  // namespace specdec::verify
