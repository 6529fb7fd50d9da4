// verify_tree with sampled candidates: one cluster a request walks down its tree (sampled_walk.h), all threads of all
// blocks together; what they share are rows of logits (cluster_row.cuh).
//
// A node with one sampled child reads the target's row and the draft's twice (largest logits, sums), and once or twice
// more where the child is rejected (what is left, the draw), all but the first time from L1 or L2. top-k and top-p cost
// what TokenDraw takes to find their threshold.
#include "verify/draw_token.cuh"
#include "verify/sampled_walk.h"

namespace specdec::verify {
namespace {

constexpr int kBlocksPerSm = 1;

// Rows of SampledWalk. Every thread of the cluster gets the same answers. The passes are functions of their own: the
// walk has each in several places.
template <class T, bool kAdjusted>
class ClusterRows {
 public:
  // `mapped`, in shared memory, has a bit for each token of the target's that the draft has; null without an id_map.
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
    // A draft row without tokens has a maximum of infinity, beside which all of its tokens weigh nothing.
    draft_scale_ = {draft_key > kKeyOfMinusInf ? key_float(draft_key) : INFINITY, draft_sampler_.scale};
    same_tiles_ = !p_.drafts.id_map && target_.id_of(0) == draft_.id_of(0);
    target_total_ = draft_total_ = 0;
    if (target_key <= kKeyOfMinusInf) return false;

    threshold_ = sampler_.filters_by_key() ? threshold() : -INFINITY;
    uint64_t target = 0, draft = 0;
    target_.each([&](int tile, const uint4& raw) {
      if (!any_kept(tile, raw)) return;
      float x[kItems];
      target_.template items<kAdjusted>(tile, raw, x);
#pragma unroll
      for (int i = 0; i < kItems; ++i) target += kept(x[i]);
    });
    draft_.each([&](int tile, const uint4& raw) {
      float x[kItems];
      draft_.template items<false>(tile, raw, x);
#pragma unroll
      for (int i = 0; i < kItems; ++i) draft += draft_scale_.weight(x[i]);
    });
    add_up(target, draft);
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

  __device__ __noinline__ uint64_t leave(float scale) {
    scale_ = scale;
    drafted_ = others_ = 0;
    each_drafted([&](int, const uint64_t (&left)[kItems]) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) drafted_ += left[i];
    });
    if (mapped_)
      each_other([&](int, const uint64_t (&left)[kItems]) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) others_ += left[i];
      });
    return left_ = exchange_.sum(drafted_ + others_);
  }

  __device__ __noinline__ int32_t draw(uint64_t random) {
    int32_t token = -1;
    Place place = stretch_of(drafted_, mul_high(random, left_));
    if (place.index >= 0) {
      if (place.index == row_warp()) {
        const int d = find_in<T>(place, draft_, [&](auto&& f) { each_drafted(f); });
        token = d < 0 ? -1 : p_.drafts.id_map ? p_.drafts.id_map[d] : d;
      }
    } else if (mapped_) {
      place = stretch_of(others_, place.place - place.total);
      if (place.index == row_warp()) token = find_in<T>(place, target_, [&](auto&& f) { each_other(f); });
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
    const uint64_t* keys = exchange_.all(static_cast<uint64_t>(target) << 32 | draft);
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

  // Adds up both totals from each thread's part.
  __device__ void add_up(uint64_t target, uint64_t draft) {
    target = warp_sum(target);
    draft = warp_sum(draft);
    const uint64_t* sums = exchange_.all(lane_id() < kWarp / 2 ? target : draft, 2);
    target = draft = 0;
    for (int i = lane_id(); i < row_warps(); i += kWarp) {
      target += sums[2 * i];
      draft += sums[2 * i + 1];
    }
    target_total_ = warp_sum(target);
    draft_total_ = warp_sum(draft);
  }

  // The lowest draft id of a token, or -1.
  __device__ __noinline__ int32_t find_draft_id(int32_t token) {
    uint32_t found = 0;
    const int threads = kRowWarps * kWarp * static_cast<int>(Cluster::size());
    for (int d = static_cast<int>(Cluster::rank()) * kRowThreads + threadIdx.x; d < p_.drafts.vocab; d += threads)
      if (p_.drafts.id_map[d] == token) found = ::max(found, ~static_cast<uint32_t>(d));
    const uint64_t lowest = exchange_.max(found);
    return lowest == 0 ? -1 : static_cast<int32_t>(~static_cast<uint32_t>(lowest));
  }

  // Whether top-k and top-p keep a token of the warp's tile of the target's row. Such a filter seldom does.
  __device__ bool any_kept(int tile, const uint4& raw) const {
    return __any_sync(kFullMask, target_.template largest_of<kAdjusted>(tile, raw) >= threshold_);
  }
  __device__ bool any_kept(Items x) const {
    float most = x[0];
#pragma unroll
    for (int i = 1; i < kItems; ++i) most = fmaxf(most, x[i]);
    return __any_sync(kFullMask, most >= threshold_);
  }

  // Calls f(tile, what is left of the tokens) for the draft's ids in this warp's stretch, but for tiles of which
  // nothing can be left.
  template <class F>
  __device__ void each_drafted(F&& f) const {
    draft_.each([&](int tile, const uint4& raw) {
      float x[kItems], y[kItems];
      if (same_tiles_)
        target_.template items<kAdjusted>(tile, target_.read(tile), x);
      else
        gather(draft_.id_of(tile), x);
      if (!any_kept(x)) return;
      draft_.template items<false>(tile, raw, y);
      uint64_t left[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) left[i] = left_weight(kept(x[i]), draft_scale_.weight(y[i]), scale_);
      f(tile, left);
    });
  }
  // The target's logits of the draft's ids from `first` on; -inf where there is no such id or token.
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
  // Calls f in the same way for the tokens of the target that the draft does not have.
  template <class F>
  __device__ void each_other(F&& f) const {
    target_.each([&](int tile, const uint4& raw) {
      if (!any_kept(tile, raw)) return;
      float x[kItems];
      target_.template items<kAdjusted>(tile, raw, x);
      uint64_t left[kItems];
      const int first = target_.id_of(tile);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int v = first + i;
        const bool other = v >= 0 && v < p_.vocab && !(mapped_[v >> 5] >> (v & 31) & 1);
        left[i] = other ? kept(x[i]) : 0;
      }
      f(tile, left);
    });
  }

  // The stretch that holds the place; `mine` is this thread's part of its warp's sum.
  __device__ Place stretch_of(uint64_t mine, uint64_t place) {
    return find_place(exchange_.all(warp_sum(mine)), row_warps(), [=](uint64_t) { return place; });
  }

  // One warp: the id within its stretch of `row` that the place falls on, in the lane that has it; -1 in the others.
  template <class U, class Each>
  __device__ static int find_in(const Place& place, const TiledRow<U>& row, Each&& each) {
    uint64_t before = place.before;
    int found = -1;
    each([&](int tile, const uint64_t (&left)[kItems]) {
      uint64_t lane = 0;
#pragma unroll
      for (int i = 0; i < kItems; ++i) lane += left[i];
      const uint64_t through = before + sum_up_to_lane(lane);
      uint64_t sum = through - lane;
      if (place.place >= sum && place.place < through) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          if (place.place >= sum && place.place < sum + left[i]) found = row.id_of(tile) + i;
          sum += left[i];
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
  bool same_tiles_ = false;  // both rows' tiles hold the same ids
  RowScale target_scale_{}, draft_scale_{};
  float threshold_ = 0, scale_ = 0;
  uint64_t target_total_ = 0, draft_total_ = 0;
  uint64_t left_ = 0, drafted_ = 0, others_ = 0;  // what is left: of all, and this thread's part
};

// Sets, in shared memory, the bits of the target's tokens that the draft has.
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
  const unsigned cluster = cluster_size("verify_tree", p.batch, kBlocksPerSm, p.vocab / TiledRow<T>::kUseful);
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
