// A token from a row's filtered distribution (sampling.h), drawn by a whole cluster. Three ways, by what is left to
// find:
//
// 1. The row's maximum, and with it a lower bound of its k best entries: the k-th largest of a few hundred maxima, each
//    over a part of the row. Reads the row from memory.
// 2. With top-k or top-p: the entries from that bound on, some more than k, go to a list in the shared memory of every
//    block, in order of ids. Each entry counts who is ahead of it and what they weigh: with that it knows whether it is
//    kept, and then whether the draw falls on it. Reads the row again, from L1 or L2. Nearly always the
//    end.
// 3. Where the list is too short (a nucleus of hundreds of tokens, masses of ties): thresholds by bisection over keys,
//    one pass over the row a bit. Then, or at once where there is no such filter, the weights are added up stretch by
//    stretch, and the block whose stretch the draw falls into looks for the tile and the token.
#pragma once

#include "verify/cluster_row.cuh"
#include "verify/sampling.h"

namespace specdec {

constexpr int kListCapacity = kRowThreads;  // entries a row's list holds: at most one a thread
constexpr int kFoundCapacity = 128;         // of which a warp may find
constexpr int kNucleusGuess = 50;           // entries wanted for top-p without top-k
constexpr int kMaxMaxima = kRowThreads;     // among which the bound is looked for

struct DrawStorage {  // in shared memory
  struct Found {
    uint32_t key;
    int32_t id;
  };
  struct alignas(16) Entry {
    uint64_t weight;
    uint32_t key;
    int32_t id;
  };
  Found found[kRowWarps][kFoundCapacity];
  Entry list[kListCapacity];
  uint64_t list_barrier;  // counts the entries in
  uint64_t kept_weight;
  uint64_t tile_weights[kRowWarps];
  uint32_t bound;  // 0 between rows
  int32_t token;
};

// Low bits that say nothing in the keys of a type with fewer bits than float.
template <class T>
constexpr int kKeyShift = 0;
template <>
inline constexpr int kKeyShift<BFloat16> = 16;
template <>
inline constexpr int kKeyShift<Half> = 13;

template <class T, bool kAdjusted>
class TokenDraw {
 public:
  // `list_phase` is the phase of the list's barrier, carried from row to row.
  __device__ TokenDraw(const LogitRow<T>& row, int64_t vocab, const Sampler& sampler, Exchange& exchange,
                       DrawStorage& storage, unsigned& list_phase)
      : row_(row, vocab), sampler_(sampler), exchange_(exchange), s_(storage), list_phase_(list_phase) {}

  // Before the Exchange is made.
  __device__ static void init(DrawStorage& storage) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) Exchange::init_barrier(storage.list_barrier);
#endif
    if (threadIdx.x == 0) storage.bound = 0;
  }

  // The token for that absolute position, or -1 where nothing is above -inf. The same in every thread of the cluster.
  __device__ int32_t token(uint32_t position) {
    const uint64_t random = noise(sampler_.seed, NoiseUse::kToken, position, 0).u64();
    if (!find_max()) return kNone;
    float bound = -INFINITY;
    if (sampler_.filters_by_key()) {
      const int32_t token = from_list(random);
      if (token != kNotListed) return token;
      bound = threshold();
    }
    return from_row(bound, random);
  }

  // The lowest logit that top-k and top-p keep, for a row that has a token and a request that has such a filter.
  __device__ float lowest_kept() {
    find_max();
    if (from_list(0) == kNotListed) return threshold();
    uint32_t key = ~0u;
    for (int i = lane_id(); i < listed_; i += kWarp)
      if (s_.list[i].weight > 0) key = ::min(key, s_.list[i].key);
    return bound_of(__reduce_min_sync(kFullMask, key) << kShift);
  }

 private:
  static constexpr int32_t kNone = -1, kNotListed = -2;
  static constexpr int kItems = TiledRow<T>::kItems;
  static constexpr int kShift = kAdjusted ? 0 : kKeyShift<T>;
  using Items = const float (&)[kItems];
  enum class Sum { kWeights, kCount };

  // The least logit with that key or a larger one.
  __device__ static float bound_of(uint32_t key) { return key > kKeyOfMinusInf ? key_float(key) : -INFINITY; }

  // Way 1.
  __device__ bool find_max() {
    const bool listed = sampler_.filters_by_key();
    int tile;
    uint32_t key = order_key(row_.template largest<kAdjusted>(tile));
    const int wanted = sampler_.top_k > 0 ? static_cast<int>(min(sampler_.top_k, int64_t{1} << 20)) : kNucleusGuess;
    int each = 1;  // maxima from a warp: many more than are wanted, so that the list does not get long
    while (listed && each < kWarp && 2 * each * row_warps() <= kMaxMaxima && each * row_warps() < 5 * wanted / 2)
      each *= 2;
    for (int d = 1; d < kWarp / each; d *= 2) key = ::max(key, __shfl_xor_sync(kFullMask, key, d));

    const uint64_t* maxima = exchange_.all(key, each);
    const int n = each * row_warps();
    uint32_t most = 0;
    for (int i = lane_id(); i < n; i += kWarp) most = ::max(most, static_cast<uint32_t>(maxima[i]));
    max_key_ = __reduce_max_sync(kFullMask, most);
    scale_ = {key_float(max_key_), sampler_.scale};
    bound_ = listed && n >= wanted ? nth_largest(maxima, n, wanted) : 0;
    return max_key_ > kKeyOfMinusInf;
  }

  // A number that at least `nth` of n numbers reach, and no more unless some are equal. n is a power of two, 16 to 512;
  // as many threads as there are for each number count the larger ones.
  __device__ uint32_t nth_largest(const uint64_t* numbers, int n, int nth) {
    const int threads_log2 = __clz(n) - __clz(kRowThreads), threads = 1 << threads_log2;
    const int mine = static_cast<int>(threadIdx.x) >> threads_log2;
    const auto number = numbers[mine];
    const ulonglong2* pairs = reinterpret_cast<const ulonglong2*>(numbers);
    int larger = 0;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x) & (threads - 1); i < n / 2; i += threads)
      larger += (pairs[i].x > number) + (pairs[i].y > number);
    for (int d = 1; d < threads; d *= 2) larger += __shfl_xor_sync(kFullMask, larger, d);
    const uint32_t best = __reduce_max_sync(kFullMask, larger >= nth - 1 ? static_cast<uint32_t>(number) : 0);
    if (lane_id() == 0) atomicMax(&s_.bound, best);
    __syncthreads();  // the bound is known
    return s_.bound;
  }

  // Way 2. kNotListed where the list does not hold every token kept.
  __device__ int32_t from_list(uint64_t random) {
    const int found = find_entries();
    const uint64_t* counts = exchange_.all(found);
    uint32_t before = 0, total = 0, most = 0;  // found by the warps before this one, by all, by one of them
    for (int i = lane_id(); i < row_warps(); i += kWarp) {
      const auto count = static_cast<uint32_t>(counts[i]);
      before += i < row_warp() ? count : 0;
      total += count;
      most = ::max(most, count);
    }
    before = __reduce_add_sync(kFullMask, before);
    total = __reduce_add_sync(kFullMask, total);
    most = __reduce_max_sync(kFullMask, most);
    if (most > kFoundCapacity || total > kListCapacity) return kNotListed;

    if (threadIdx.x == 0) s_.bound = 0;  // for the next row
    share_found(found, before, total);
    const uint64_t row_weight = sampler_.top_k > 0 ? 0 : row_sum(-INFINITY, Sum::kWeights);
#if __CUDA_ARCH__ >= 900
    if (Cluster::size() > 1) Exchange::wait(s_.list_barrier, list_phase_);
    list_phase_ ^= 1;
#endif
    if (Cluster::size() == 1) __syncthreads();  // the list is complete
    listed_ = static_cast<int>(total);
    return draw_from_list(listed_, row_weight, random);
  }

  // Writes the stretch's entries from the bound on to s_.found, in order of ids, as far as there is room. Returns how
  // many there are.
  __device__ int find_entries() {
    const float bound = bound_ > kKeyOfMinusInf ? bound_of(bound_) : bits_float(0xff7fffffu);  // -inf is no entry
    const unsigned lanes_before = (1u << lane_id()) - 1;
    DrawStorage::Found* found = s_.found[warp_id()];
    int count = 0;
    row_.each([&](int tile, const uint4& raw) {
      if (!__any_sync(kFullMask, row_.template largest_of<kAdjusted>(tile, raw) >= bound)) return;
      float x[kItems];
      row_.template items<kAdjusted>(tile, raw, x);
      unsigned mine = 0;
#pragma unroll
      for (int i = 0; i < kItems; ++i) mine += x[i] >= bound;
      int place = count;
#pragma unroll
      for (int bit = 0; bit < 4; ++bit) {  // mine is at most 8
        const unsigned lanes = __ballot_sync(kFullMask, mine >> bit & 1);
        place += __popc(lanes & lanes_before) << bit;
        count += __popc(lanes) << bit;
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (!(x[i] >= bound)) continue;
        if (place < kFoundCapacity) found[place] = {order_key(x[i]), row_.id_of(tile) + i};
        ++place;
      }
    });
    return count;
  }

  // Sends what this warp found to the list of every block.
  __device__ void share_found(int found, int before, int total) {
    const bool alone = Cluster::size() == 1;
#if __CUDA_ARCH__ >= 900
    if (!alone && threadIdx.x == 0)
      Exchange::expect_bytes(s_.list_barrier, total * static_cast<int>(sizeof(DrawStorage::Entry)));
#endif
    __syncwarp();  // the warp's entries are written
    for (int i = lane_id(); i < found; i += kWarp) {
      const auto [key, id] = s_.found[warp_id()][i];
      const DrawStorage::Entry entry{scale_.weight(key_float(key)), key >> kShift, id};
      if (alone) s_.list[before + i] = entry;
#if __CUDA_ARCH__ >= 900
      for (unsigned rank = 0; !alone && rank < Cluster::size(); ++rank)
        Exchange::send(reinterpret_cast<uint4*>(&s_.list[before + i]), reinterpret_cast<const uint4&>(entry),
                       s_.list_barrier, rank);
#endif
    }
  }

  // The threads of an entry count together, each over a part of the list.
  __device__ int32_t draw_from_list(int n, uint64_t row_weight, uint64_t random) {
    // As many for each as there are: 512 over n, rounded down to a power of two, at most 32.
    const int threads_log2 = min(5, __clz(n - 1) - __clz(kRowThreads - 1));
    const int threads = 1 << threads_log2;
    const int mine = static_cast<int>(threadIdx.x) >> threads_log2,
              part = static_cast<int>(threadIdx.x) & (threads - 1);
    const bool there = mine < n, writes = there && part == 0;
    const DrawStorage::Entry entry = there ? s_.list[mine] : DrawStorage::Entry{0, 0, kNone};
    const int top_k = sampler_.top_k > 0 ? static_cast<int>(min(sampler_.top_k, static_cast<int64_t>(n))) : n;

    int ahead = 0, equal = 0;
    uint64_t weight_ahead = 0;
#pragma unroll 2
    for (int i = part; i < n; i += threads) {
      const DrawStorage::Entry other = s_.list[i];
      ahead += other.key > entry.key;
      equal += other.key == entry.key;
      weight_ahead += other.key > entry.key ? other.weight : 0;
    }
    for (int d = 1; d < threads; d *= 2) {
      ahead += __shfl_xor_sync(kFullMask, ahead, d);
      equal += __shfl_xor_sync(kFullMask, equal, d);
      weight_ahead += __shfl_xor_sync(kFullMask, weight_ahead, d);
    }
    const uint64_t weight_through =
        weight_ahead + static_cast<uint64_t>(equal) * entry.weight;  // equals weigh the same
    if (writes && ahead < top_k && ahead + equal >= top_k) s_.kept_weight = weight_through;
    __syncthreads();  // what top-k keeps weighs kept_weight

    bool kept = ahead < top_k;
    if (sampler_.top_p < 1) {
      const uint64_t wanted = top_p_weight(sampler_.top_p, sampler_.top_k > 0 ? s_.kept_weight : row_weight);
      if (s_.kept_weight < wanted) return kNotListed;
      kept = kept && weight_ahead < wanted;
    }
    const uint64_t weight = kept ? sampler_.after_min_p(entry.weight) : 0;
    if (writes) s_.list[mine].weight = weight;
    if (threadIdx.x == 0) s_.token = kNone;
    __syncthreads();  // the list holds what is kept

    uint64_t before = 0, total = 0;  // in order of ids
#pragma unroll 2
    for (int i = part; i < n; i += threads) {
      total += s_.list[i].weight;
      if (i < mine) before += s_.list[i].weight;
    }
    for (int d = 1; d < threads; d *= 2) {
      before += __shfl_xor_sync(kFullMask, before, d);
      total += __shfl_xor_sync(kFullMask, total, d);
    }
    const uint64_t drawn = mul_high(random, total);
    if (writes && drawn >= before && drawn < before + weight) s_.token = entry.id;
    __syncthreads();  // the token is known; all warps speak to each other before it is written again
    return s_.token;
  }

  // Way 3: the lowest logit that top-k and top-p keep.
  __device__ float threshold() {
    const uint32_t high = (max_key_ >> kShift) + 1;
    uint32_t threshold = 0;
    if (threadIdx.x == 0) s_.bound = 0;  // for the next row
    if (sampler_.top_k > 0) threshold = last_reaching(0, high, static_cast<uint64_t>(sampler_.top_k), Sum::kCount);
    if (sampler_.top_p < 1) {
      const uint64_t weight = row_sum(bound_of(threshold << kShift), Sum::kWeights);
      threshold = last_reaching(threshold, high, top_p_weight(sampler_.top_p, weight), Sum::kWeights);
    }
    return bound_of(threshold << kShift);
  }

  // The largest key from which on the row's logits add up to `wanted`.
  __device__ uint32_t last_reaching(uint32_t low, uint32_t high, uint64_t wanted, Sum what) {
    return last_key(low, high, [&](uint32_t key) { return row_sum(bound_of(key << kShift), what) >= wanted; });
  }

  // What this lane's logits from the bound on weigh together, where each weighs at least `min_weight`; or how many
  // there are. Called, not inlined: it is long, and has three users.
  __device__ __noinline__ static uint64_t stretch_sum(TiledRow<T> row, RowScale scale, float bound, uint64_t min_weight,
                                                      Sum what) {
    uint64_t sum = 0;
    row.each([&](int tile, const uint4& raw) {
      float x[kItems];
      row.template items<kAdjusted>(tile, raw, x);
      if (what == Sum::kWeights) {
        sum += lane_weight(x, scale, bound, min_weight);
      } else {
#pragma unroll
        for (int i = 0; i < kItems; ++i) sum += x[i] >= bound;
      }
    });
    return sum;
  }
  __device__ uint64_t row_sum(float bound, Sum what) {
    return exchange_.sum(stretch_sum(row_, scale_, bound, 0, what));
  }
  __device__ static uint64_t lane_weight(Items x, const RowScale& scale, float bound, uint64_t min_weight) {
    uint64_t weight = 0;
    if (bound == -INFINITY && min_weight == 0 && scale.max < INFINITY) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) weight += exp2_weight(mul(sub(x[i], scale.max), scale.scale));
    } else {
#pragma unroll
      for (int i = 0; i < kItems; ++i) weight += kept(x[i], scale, bound, min_weight);
    }
    return weight;
  }
  __device__ static uint64_t kept(float x, const RowScale& scale, float bound, uint64_t min_weight) {
    const uint64_t weight = x >= bound ? scale.weight(x) : 0;
    return weight >= min_weight ? weight : 0;
  }

  // Way 3: the draw among the tokens whose logits reach `bound`.
  __device__ int32_t from_row(float bound, uint64_t random) {
    const uint64_t* weights =
        exchange_.all(warp_sum(stretch_sum(row_, scale_, bound, sampler_.min_weight, Sum::kWeights)));

    // The stretch the draw falls into: each lane adds up a few.
    const int few = (row_warps() + kWarp - 1) / kWarp;
    uint64_t lanes = 0;
    for (int i = lane_id() * few; i < min((lane_id() + 1) * few, row_warps()); ++i) lanes += weights[i];
    const uint64_t through = warp_inclusive_sum(lanes);
    const uint64_t drawn = mul_high(random, __shfl_sync(kFullMask, through, kWarp - 1));
    const unsigned behind = __ballot_sync(kFullMask, drawn < through);
    const int lane = behind == 0 ? 0 : __ffs(static_cast<int>(behind)) - 1;
    uint64_t before = __shfl_sync(kFullMask, through - lanes, lane);
    int owner = lane * few;
    while (owner + 1 < row_warps() && drawn >= before + weights[owner]) before += weights[owner++];

    const bool ours = owner / kRowWarps == static_cast<int>(Cluster::rank());
    if (ours) look_up(owner, before, drawn, bound);
    return static_cast<int32_t>(exchange_.max(ours ? static_cast<uint64_t>(s_.token + 1) : 0)) - 1;
  }

  // One block: the token, to s_.token, that the draw falls on in the stretch of warp `owner`, before which the weights
  // add up to `before`. A warp a tile.
  __device__ void look_up(int owner, uint64_t before, uint64_t drawn, float bound) {
    __syncthreads();  // s_.token has been read
    if (threadIdx.x == 0) s_.token = kNone;
    const int end = row_.first_of(owner + 1);
    for (int first = row_.first_of(owner); first < end; first += kRowWarps) {
      const int tile = first + warp_id();
      float x[kItems];
      uint64_t weight = 0;
      if (tile < end) {
        row_.template items<kAdjusted>(tile, row_.read(tile), x);
        weight = lane_weight(x, scale_, bound, sampler_.min_weight);
      }
      const uint64_t all = warp_sum(weight);
      if (lane_id() == 0) s_.tile_weights[warp_id()] = all;
      __syncthreads();  // the tiles' weights are known
      uint64_t sum = before;
      for (int i = 0; i < kRowWarps; ++i) {
        before += s_.tile_weights[i];
        if (i < warp_id()) sum = before;
      }
      if (tile < end && drawn >= sum && drawn < sum + all) {
        sum += warp_inclusive_sum(weight) - weight;
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const uint64_t one = kept(x[i], scale_, bound, sampler_.min_weight);
          if (drawn >= sum && drawn < sum + one) s_.token = row_.id_of(tile) + i;
          sum += one;
        }
      }
      __syncthreads();  // the tiles' weights have been read, and the token is known to the block
    }
  }

  TiledRow<T> row_;
  const Sampler& sampler_;
  Exchange& exchange_;
  DrawStorage& s_;
  unsigned& list_phase_;
  uint32_t max_key_ = 0, bound_ = 0;  // whole keys
  int listed_ = 0;                    // entries of the list
  RowScale scale_{};
};

}  // namespace specdec
