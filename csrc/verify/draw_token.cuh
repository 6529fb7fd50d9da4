// Draw a token from a row's filtered distribution (sampling.h) with a whole cluster. The request's temperature arrives
// as Sampler::scale, which RowScale multiplies into (logit - max). Three steps, as far as needed:
//
// 1. Find the row's maximum and a lower bound of its k best entries: the k-th largest of a few hundred maxima, each
// over a part of the row. Reads the row from memory.
// 2. With top-k or top-p: put the entries above that bound, a few more than k, into a list in every block's smem, in
// any order. Each entry counts the entries ahead of it, their weight, and those with a lower id. From these it knows
// whether it is kept, and its position in the prefix sum of the draw. Entries come from registers if they hold the row,
// else from L1 or L2. The draw nearly always ends here.
// 3. If the list is too short (a nucleus of hundreds of tokens, many ties): find the thresholds by bisection over keys,
// with one pass over the row per bit. Then, or at once without such filters, sum the weights segment by segment; the
// block whose segment contains the draw finds the tile and the token.
#pragma once

#include "verify/cluster_row.cuh"
#include "verify/sampling.h"

namespace specdec::verify {

// Blocks per SM: with two, the registers of a sampling kernel would spill.
constexpr int blocks_per_sm(bool sampled) { return sampled ? 1 : 2; }

constexpr int kListCapacity = kRowThreads;  // entries of a row's list: at most one per thread
constexpr int kSentCapacity = 1024;         // entries that the blocks send; an equal part each, at most kListCapacity
constexpr int kNucleusGuess = 50;           // entries listed for top-p without top-k
constexpr int kMaxMaxima = kRowThreads;     // maxima among which the bound is searched

struct DrawStorage {  // in smem
  struct alignas(16) Entry {
    uint64_t weight;
    uint32_t key;
    int32_t id;
  };
  struct Kept {                       // in order of ids
    uint64_t weights[kListCapacity];  // 0: not kept
    int32_t ids[kListCapacity];
    uint32_t keys[kListCapacity];
  };
  // The two may share memory: the blocks exchange words between the last use of one and the first write of the other.
  union {
    Entry sent[kSentCapacity];  // each block writes its own part
    Kept kept;
  };
  struct {
    float x;
    int32_t id;
  } found[kListCapacity];  // by this block
  Entry list[kListCapacity];
  Mbarrier list_barrier;  // counts the bytes sent in
  uint64_t kept_weight;
  uint64_t tile_weights[kRowWarps];
  uint32_t bounds[kRowWarps];
  unsigned num_found;  // by this block, over all rows so far
  int32_t token;
};

// Counters over the draws of successive rows, equal in every thread of a block.
struct DrawProgress {
  unsigned list_phase = 0;  // of the list's barrier
  unsigned found = 0;       // num_found
};

// Low bits of a key that are always equal because the type has fewer bits than float.
template <class T>
constexpr int kKeyShift = 0;
template <>
inline constexpr int kKeyShift<BFloat16> = 16;
template <>
inline constexpr int kKeyShift<Half> = 13;

template <class T, bool kAdjusted>
class TokenDraw {
 public:
  using Row = TiledRow<T>;
  static constexpr int32_t kNone = -1;

  // `held` has been passed to the row's begin().
  __device__ TokenDraw(const Row& row, typename Row::Held& held, const Sampler& sampler, Exchange& exchange,
                       DrawStorage& storage, DrawProgress& progress)
      : row_(row), held_(held), sampler_(sampler), exchange_(exchange), s_(storage), progress_(progress) {}

  // Must be called before the Exchange is constructed.
  __device__ static void init(DrawStorage& storage) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) storage.list_barrier.init(1);
#endif
    if (threadIdx.x == 0) storage.num_found = 0;
  }

  // Return the token for an absolute position, or -1 if nothing is above -inf; valid in the first warp of each block
  // only. A block barrier must come before the next row. If the draw needs bisection and `kIfTooLong` is given, return
  // that instead.
  template <int32_t kIfTooLong = kNone>
  __device__ int32_t token(uint32_t position) {
    const uint64_t random = noise(sampler_.seed, NoiseUse::kToken, position, 0).u64();
    if (!find_max()) return kNone;
    float bound = -INFINITY;
    if (sampler_.filters_by_key()) {
      if (cut_list()) {
        if (warp_id() != 0) return kNone;
        const PrefixHit drawn =
            find_in_prefix_sums(s_.kept.weights, listed_, [=](uint64_t all) { return mul_high(random, all); });
        return s_.kept.ids[drawn.index];
      }
      if constexpr (kIfTooLong != kNone) return kIfTooLong;
      bound = threshold();
    }
    return from_row(bound, random);
  }

  // Return the lowest logit that top-k and top-p keep, for a row with a token and a request with such a filter.
  __device__ float lowest_kept() {
    find_max();
    if (!cut_list()) return threshold();
    uint32_t key = ~0u;
    for (int i = lane_id(); i < listed_; i += kWarp)
      if (s_.kept.weights[i] > 0) key = ::min(key, s_.kept.keys[i]);
    return bound_of(__reduce_min_sync(kFullMask, key) << kShift);
  }

 private:
  static constexpr int kItems = Row::kItems;
  static constexpr int kShift = kAdjusted ? 0 : kKeyShift<T>;
  using Items = const float (&)[kItems];
  enum class Sum { kWeights, kCount };

  // Return the smallest logit with that key or a larger one.
  __device__ static float bound_of(uint32_t key) { return key > kKeyOfMinusInf ? key_float(key) : -INFINITY; }

  // Step 1.
  __device__ bool find_max() {
    const bool listed = sampler_.filters_by_key();
    int tile;
    best_ = row_.template largest<kAdjusted>(held_, tile);
    uint32_t key = order_key(best_);
    const int wanted = sampler_.top_k > 0 ? static_cast<int>(min(sampler_.top_k, int64_t{1} << 20)) : kNucleusGuess;
    int each = 1;  // maxima per warp: well above the number wanted, which keeps the list short
    while (listed && each < kWarp && 2 * each * row_warps() <= kMaxMaxima && each * row_warps() < 5 * wanted / 2)
      each *= 2;
    for (int d = 1; d < kWarp / each; d *= 2) key = ::max(key, __shfl_xor_sync(kFullMask, key, d));

    const uint64_t* maxima = exchange_.all_gather(key, each);
    const int n = each * row_warps();
    uint32_t most = 0;
    for (int i = lane_id(); i < n; i += kWarp) most = ::max(most, static_cast<uint32_t>(maxima[i]));
    max_key_ = __reduce_max_sync(kFullMask, most);
    scale_ = {key_float(max_key_), sampler_.scale};
    bound_ = listed && n >= wanted ? nth_largest(maxima, n, wanted) : 0;  // otherwise the list would overflow
    return max_key_ > kKeyOfMinusInf;
  }

  // Return a key that at least `nth` of n keys reach, and no more unless some are equal. n is a power of two, 16 to
  // 512; the threads available per key share the counting of larger keys.
  __device__ uint32_t nth_largest(const uint64_t* keys, int n, int nth) {
    const int threads_log2 = __clz(n) - __clz(kRowThreads), threads = 1 << threads_log2;
    const auto key = static_cast<uint32_t>(keys[threadIdx.x >> threads_log2]);
    int larger = 0;
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x) & (threads - 1); i < n; i += threads)
      larger += static_cast<uint32_t>(keys[i]) > key;
    for (int d = 1; d < threads; d *= 2) larger += __shfl_xor_sync(kFullMask, larger, d);
    const uint32_t least = __reduce_min_sync(kFullMask, larger < nth ? key : ~0u);
    if (lane_id() == 0) s_.bounds[warp_id()] = least;
    __syncthreads();  // every warp's bound is known
    return __reduce_min_sync(kFullMask, s_.bounds[lane_id() % kRowWarps]);
  }

  // Step 2: fill the list and filter it. Return false if it does not hold every kept token.
  __device__ bool cut_list() {
    if (bound_ == 0) return false;
    const float bound = bound_ > kKeyOfMinusInf ? bound_of(bound_) : bits_float(0xff7fffffu);  // -inf is no entry
    const int room = min(kListCapacity, kSentCapacity >> Cluster::size_log2());                // per block
    if (best_ >= bound)
      row_.template for_each_at_least<kAdjusted>(bound, held_, [&](int id, float x) {
        const auto place = static_cast<int>(atomicAdd(&s_.num_found, 1u) - progress_.found);
        if (place < room) s_.found[place] = {x, id};
      });
    __syncthreads();  // the block's entries are found
    const auto found = static_cast<int>(s_.num_found - progress_.found);
    progress_.found += static_cast<unsigned>(found);
    share_found(min(found, room));
    const uint64_t* counts = exchange_.gather_blocks(static_cast<uint64_t>(found));

    int total = 0, sent = 0, mine = kNone;  // found, sent, and the entry that this thread copies to the list
    bool fits = true;
    for (int rank = 0; rank < static_cast<int>(Cluster::size()); ++rank) {
      const auto count = static_cast<int>(counts[rank]);
      if (static_cast<int>(threadIdx.x) >= total) mine = rank * room + static_cast<int>(threadIdx.x) - total;
      total += count;
      sent += min(count, room);
      fits = fits && count <= room;
    }
    listed_ = total;
    if (static_cast<int>(threadIdx.x) >= total) mine = kNone;
    const uint64_t row_weight = sampler_.top_k > 0 ? 0 : row_sum(-INFINITY, Sum::kWeights);
#if __CUDA_ARCH__ >= 900
    if (Cluster::size() > 1) {
      if (threadIdx.x == 0) s_.list_barrier.arrive_expecting(static_cast<unsigned>(sent * sizeof(DrawStorage::Entry)));
      s_.list_barrier.wait_for_cluster(progress_.list_phase);
      progress_.list_phase ^= 1;
    }
#endif
    if (!fits || total > kListCapacity) return false;
    if (mine >= 0) s_.list[threadIdx.x] = s_.sent[mine];
    __syncthreads();  // the list is complete
    return cut(total, row_weight);
  }

  // Send the first `count` found entries to all blocks, one thread per entry and block.
  __device__ void share_found(int count) {
    const int log2 = Cluster::size_log2(), first = static_cast<int>(Cluster::rank()) * (kSentCapacity >> log2);
    for (int i = threadIdx.x; i < count << log2; i += kRowThreads) {
      const auto [x, id] = s_.found[i >> log2];
      const DrawStorage::Entry entry{scale_.weight(x), order_key(x) >> kShift, id};
#if __CUDA_ARCH__ >= 900
      if (log2 > 0) {
        Exchange::send(reinterpret_cast<uint4*>(&s_.sent[first + (i >> log2)]), reinterpret_cast<const uint4&>(entry),
                       s_.list_barrier, i & ((1 << log2) - 1));
        continue;
      }
#endif
      s_.sent[i] = entry;
    }
  }

  // Decide which of the list's n entries are kept, in order of ids. The threads of an entry split the list and count
  // together.
  __device__ bool cut(int n, uint64_t row_weight) {
    // Threads per entry: 512 / n, rounded down to a power of two, at most 32.
    const int threads_log2 = min(5, __clz(n - 1) - __clz(kRowThreads - 1));
    const int threads = 1 << threads_log2;
    const int mine = static_cast<int>(threadIdx.x) >> threads_log2;
    const bool there = mine < n, writes = there && (threadIdx.x & (threads - 1)) == 0;
    const DrawStorage::Entry entry = there ? s_.list[mine] : DrawStorage::Entry{0, 0, kNone};
    const int top_k = sampler_.top_k > 0 ? static_cast<int>(min(sampler_.top_k, static_cast<int64_t>(n))) : n;

    // Entries with a larger key, an equal key, a lower id: three counts of up to 512 packed into a word.
    constexpr uint32_t kEqual = 1u << 10, kLower = 1u << 20;
    uint32_t counts = 0;
    uint64_t weight_ahead = 0;
    if (there) {
#pragma unroll 4
      for (int i = static_cast<int>(threadIdx.x) & (threads - 1); i < n; i += threads) {
        const DrawStorage::Entry other = s_.list[i];
        if (other.key > entry.key) weight_ahead += other.weight;
        counts += other.key > entry.key ? 1 : 0;
        counts += other.key == entry.key ? kEqual : 0;
        counts += other.id < entry.id ? kLower : 0;
      }
    }
    for (int d = 1; d < threads; d *= 2) {
      counts += __shfl_xor_sync(kFullMask, counts, d);
      weight_ahead += __shfl_xor_sync(kFullMask, weight_ahead, d);
    }
    const auto ahead = static_cast<int>(counts % kEqual), equal = static_cast<int>(counts / kEqual % kEqual);
    if (writes && ahead < top_k && ahead + equal >= top_k)
      s_.kept_weight = weight_ahead + static_cast<uint64_t>(equal) * entry.weight;  // equal keys have equal weights
    __syncthreads();  // kept_weight has the weight of top-k's tokens

    bool kept = ahead < top_k;
    if (sampler_.top_p < 1) {
      const uint64_t wanted = top_p_weight(sampler_.top_p, sampler_.top_k > 0 ? s_.kept_weight : row_weight);
      if (s_.kept_weight < wanted) return false;
      kept = kept && weight_ahead < wanted;
    }
    if (writes) {
      const uint32_t place = counts / kLower;
      s_.kept.weights[place] = kept ? sampler_.after_min_p(entry.weight) : 0;
      s_.kept.ids[place] = entry.id;
      s_.kept.keys[place] = entry.key;
    }
    __syncthreads();  // the kept entries are known
    return true;
  }

  // Step 3: return the lowest logit that top-k and top-p keep.
  __device__ float threshold() {
    const uint32_t high = (max_key_ >> kShift) + 1;
    uint32_t threshold = 0;
    if (sampler_.top_k > 0) threshold = last_reaching(0, high, static_cast<uint64_t>(sampler_.top_k), Sum::kCount);
    if (sampler_.top_p < 1) {
      const uint64_t weight = row_sum(bound_of(threshold << kShift), Sum::kWeights);
      threshold = last_reaching(threshold, high, top_p_weight(sampler_.top_p, weight), Sum::kWeights);
    }
    return bound_of(threshold << kShift);
  }

  // Return the largest key above which the row's logits sum up to `wanted`.
  __device__ uint32_t last_reaching(uint32_t low, uint32_t high, uint64_t wanted, Sum what) {
    return last_key(low, high, [&](uint32_t key) { return row_sum(bound_of(key << kShift), what) >= wanted; });
  }

  // Return the weight of this lane's logits that reach the bound and weigh at least `min_weight`, or their count.
  // noinline: it is long and has three callers.
  __device__ __noinline__ static uint64_t segment_sum(Row row, RowScale scale, float bound, uint64_t min_weight,
                                                      Sum what) {
    uint64_t sum = 0;
    row.for_each_tile([&](int tile, const uint4& raw) {
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
    return exchange_.sum(segment_sum(row_, scale_, bound, 0, what));
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

  // Step 3: draw among the tokens whose logits reach `bound`.
  __device__ int32_t from_row(float bound, uint64_t random) {
    const uint64_t* weights =
        exchange_.all_gather(warp_sum(segment_sum(row_, scale_, bound, sampler_.min_weight, Sum::kWeights)));
    const PrefixHit drawn =
        find_in_prefix_sums(weights, row_warps(), [=](uint64_t all) { return mul_high(random, all); });
    const bool ours = drawn.index / kRowWarps == static_cast<int>(Cluster::rank());
    if (ours) look_up(drawn.index, drawn.before, drawn.target, bound);
    return static_cast<int32_t>(exchange_.max(ours ? static_cast<uint64_t>(s_.token + 1) : 0)) - 1;
  }

  // Find, with one block, the drawn token in the segment of warp `owner`, before which the weights sum up to `before`.
  // Write it to s_.token. One warp per tile.
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
        sum += sum_up_to_lane(weight) - weight;
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const uint64_t one = kept(x[i], scale_, bound, sampler_.min_weight);
          if (drawn >= sum && drawn < sum + one) s_.token = row_.id_of(tile) + i;
          sum += one;
        }
      }
      __syncthreads();  // the tiles' weights have been read, and the block knows the token
    }
  }

  const Row& row_;
  typename Row::Held& held_;
  const Sampler& sampler_;
  Exchange& exchange_;
  DrawStorage& s_;
  DrawProgress& progress_;
  float best_ = 0;                    // the lane's largest logit
  uint32_t max_key_ = 0, bound_ = 0;  // full keys
  int listed_ = 0;                    // entries in the list
  RowScale scale_{};
};

}  // namespace specdec::verify
