// A token from a row's filtered distribution (sampling.h), drawn by a whole cluster. Three ways, by what is left to
// find:
//
// 1. The row's maximum, and with it a lower bound of its k best entries: the k-th largest of a few hundred maxima, each
//    over a part of the row. Reads the row from memory.
// 2. With top-k or top-p: the entries from that bound on, some more than k, go to a list in the shared memory of every
//    block, in order of ids; one warp finds the thresholds and draws. Reads the row again, from L1 or L2. Nearly always
//    the end.
// 3. Where the list is too short (a nucleus of hundreds of tokens, masses of ties): thresholds by bisection over keys,
//    one pass over the row a bit. Then, or at once where there is no such filter, the weights are added up stretch by
//    stretch, and the block whose stretch the draw falls into looks for the tile and the token.
#pragma once

#include "verify/cluster_row.cuh"
#include "verify/sampling.h"

namespace specdec {

constexpr int kListCapacity = 1024;  // entries a row's list holds
constexpr int kFoundCapacity = 128;  // of which a warp may find
constexpr int kNucleusGuess = 160;   // entries listed for top-p without top-k

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
  uint64_t tile_weights[kRowWarps];
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
  }

  // The token for that absolute position, or -1 where nothing is above -inf. The same in every thread of the cluster.
  __device__ int32_t token(uint32_t position) {
    const uint64_t random = noise(sampler_.seed, NoiseUse::kToken, position, 0).u64();
    if (!find_max()) return kNone;
    if (!sampler_.filters_by_key()) return from_row(-INFINITY, random);
    const int32_t token = from_list(random);
    return token != kNotListed ? token : from_row(threshold(), random);
  }

 private:
  static constexpr int32_t kNone = -1, kNotListed = -2;
  static constexpr int kItems = TiledRow<T>::kItems;
  static constexpr int kShift = kAdjusted ? 0 : kKeyShift<T>;
  using Items = const float (&)[kItems];

  // The least logit with that key or a larger one.
  __device__ static float bound_of(uint32_t key) { return key > kKeyOfMinusInf ? key_float(key) : -INFINITY; }

  // Way 1.
  __device__ bool find_max() {
    int tile;
    uint32_t key = order_key(row_.template largest<kAdjusted>(tile));
    const int wanted = sampler_.top_k > 0 ? static_cast<int>(min(sampler_.top_k, int64_t{1} << 20)) : kNucleusGuess;
    int each = 1;  // maxima from a warp: a quarter more than are wanted, so that the list does not get long
    if (sampler_.filters_by_key())
      while (each < kWarp && each * row_warps() < 1024 && 4 * each * row_warps() < 5 * wanted) each *= 2;
    for (int d = 1; d < kWarp / each; d *= 2) key = ::max(key, __shfl_xor_sync(kFullMask, key, d));

    const uint32_t* maxima = exchange_.all(key, each);
    const int n = each * row_warps();
    uint32_t most = 0, least = ~0u;
    for (int i = lane_id(); i < n; i += kWarp) {
      most = ::max(most, maxima[i]);
      least = ::min(least, maxima[i]);
    }
    max_key_ = __reduce_max_sync(kFullMask, most);
    scale_ = {key_float(max_key_), sampler_.scale};
    bound_ = 0;
    if (sampler_.filters_by_key() && n >= wanted) {
      least = __reduce_min_sync(kFullMask, least);
      bound_ = last_key(least >> 16, (max_key_ >> 16) + 1,
                        [&](uint32_t bound) {
                          int count = 0;
#pragma unroll 4
                          for (int i = lane_id(); i < n; i += kWarp) count += maxima[i] >> 16 >= bound;
                          return __reduce_add_sync(kFullMask, count) >= wanted;
                        })
               << 16;
    }
    return max_key_ > kKeyOfMinusInf;
  }

  // Way 2. kNotListed where the list does not hold every token kept.
  __device__ int32_t from_list(uint64_t random) {
    uint64_t weight = 0;  // of the whole row, where top-p needs it
    const int found = find_entries(weight);
    const uint32_t* counts = exchange_.all(static_cast<uint32_t>(found));
    uint32_t before = 0, total = 0, most = 0;  // found by the warps before this one, by all, by one of them
    for (int i = lane_id(); i < row_warps(); i += kWarp) {
      before += i < row_warp() ? counts[i] : 0;
      total += counts[i];
      most = ::max(most, counts[i]);
    }
    before = __reduce_add_sync(kFullMask, before);
    total = __reduce_add_sync(kFullMask, total);
    most = __reduce_max_sync(kFullMask, most);
    if (sampler_.top_k == 0) weight = exchange_.sum(weight);
    if (most > kFoundCapacity || total > kListCapacity) return kNotListed;

    share_found(found, before, total);
    if (warp_id() == 0) {
#if __CUDA_ARCH__ >= 900
      Exchange::wait(s_.list_barrier, list_phase_);
#endif
      const int32_t token = draw_from_list(total, weight, random);
      if (lane_id() == 0) s_.token = token;
    }
    list_phase_ ^= 1;
    __syncthreads();  // the token is known; it is written again only after all warps have spoken to each other
    return s_.token;
  }

  // Writes the stretch's entries from the bound on to s_.found, in order of ids, as far as there is room. Returns how
  // many there are.
  __device__ int find_entries(uint64_t& weight) {
    const float bound = bound_ > kKeyOfMinusInf ? bound_of(bound_) : bits_float(0xff7fffffu);  // -inf is no entry
    const unsigned lanes_before = (1u << lane_id()) - 1;
    const bool weighs = sampler_.top_k == 0;
    DrawStorage::Found* found = s_.found[warp_id()];
    int count = 0;
    row_.template each<kAdjusted>([&](int tile, Items x) {
      float most = x[0];
#pragma unroll
      for (int i = 1; i < kItems; ++i) most = fmaxf(most, x[i]);
      if (weighs) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) weight += scale_.weight(x[i]);
      }
      if (!__any_sync(kFullMask, most >= bound)) return;
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
      if (mine == 0) return;
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
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) Exchange::expect_bytes(s_.list_barrier, total * static_cast<int>(sizeof(DrawStorage::Entry)));
#endif
    __syncwarp();  // the warp's entries are written
    for (int i = lane_id(); i < found; i += kWarp) {
      const auto [key, id] = s_.found[warp_id()][i];
      const uint64_t weight = scale_.weight(key_float(key));
#if __CUDA_ARCH__ >= 900
      const uint4 entry = {static_cast<uint32_t>(weight), static_cast<uint32_t>(weight >> 32), key >> kShift,
                           static_cast<uint32_t>(id)};
      for (unsigned rank = 0; rank < Cluster::size(); ++rank)
        Exchange::send(reinterpret_cast<uint4*>(&s_.list[before + i]), entry, s_.list_barrier, rank);
#else
      s_.list[before + i] = {weight, key >> kShift, id};
#endif
    }
#if !(__CUDA_ARCH__ >= 900)
    __syncthreads();  // the list is complete
#endif
  }

  // One warp; every lane gets the token.
  __device__ int32_t draw_from_list(int n, uint64_t row_weight, uint64_t random) const {
    const uint32_t high = (max_key_ >> kShift) + 1;
    uint32_t threshold = bound_ >> kShift;
    if (sampler_.top_k > 0 && n > sampler_.top_k)
      threshold = last_key(threshold, high, [&](uint32_t key) { return list_count(n, key) >= sampler_.top_k; });
    if (sampler_.top_p < 1) {
      const uint64_t listed = list_weight(n, threshold);
      const uint64_t wanted = top_p_weight(sampler_.top_p, sampler_.top_k > 0 ? listed : row_weight);
      if (listed < wanted) return kNotListed;
      threshold = last_key(threshold, high, [&](uint32_t key) { return list_weight(n, key) >= wanted; });
    }
    // Each lane adds up a stretch of the list; the one the draw falls into looks for it.
    const int each = (n + kWarp - 1) / kWarp, first = min(lane_id() * each, n), end = min(first + each, n);
    const auto kept = [&](int i) { return s_.list[i].key >= threshold ? sampler_.after_min_p(s_.list[i].weight) : 0; };
    uint64_t mine = 0;
    for (int i = first; i < end; ++i) mine += kept(i);
    const uint64_t through = warp_inclusive_sum(mine);
    const uint64_t drawn = mul_high(random, __shfl_sync(kFullMask, through, kWarp - 1));
    int32_t token = kNone;
    if (drawn < through && drawn >= through - mine) {
      uint64_t sum = through - mine;
      for (int i = first; token == kNone && i < end; ++i)
        if ((sum += kept(i)) > drawn) token = s_.list[i].id;
    }
    return __reduce_max_sync(kFullMask, token);
  }

  __device__ int list_count(int n, uint32_t key) const {
    int count = 0;
#pragma unroll 4
    for (int i = lane_id(); i < n; i += kWarp) count += s_.list[i].key >= key;
    return __reduce_add_sync(kFullMask, count);
  }
  __device__ uint64_t list_weight(int n, uint32_t key) const {
    uint64_t weight = 0;
#pragma unroll 4
    for (int i = lane_id(); i < n; i += kWarp) weight += s_.list[i].key >= key ? s_.list[i].weight : 0;
    return warp_sum(weight);
  }

  // Way 3: the lowest logit that top-k and top-p keep.
  __device__ float threshold() {
    const uint32_t high = (max_key_ >> kShift) + 1;
    uint32_t threshold = 0;
    if (sampler_.top_k > 0)
      threshold = last_key(0, high, [&](uint32_t key) { return row_count(bound_of(key << kShift)) >= sampler_.top_k; });
    if (sampler_.top_p < 1) {
      const uint64_t wanted = top_p_weight(sampler_.top_p, row_weight(bound_of(threshold << kShift)));
      threshold =
          last_key(threshold, high, [&](uint32_t key) { return row_weight(bound_of(key << kShift)) >= wanted; });
    }
    return bound_of(threshold << kShift);
  }

  __device__ int64_t row_count(float bound) {
    uint32_t count = 0;
    row_.template each<kAdjusted>([&](int, Items x) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) count += x[i] >= bound;
    });
    return static_cast<int64_t>(exchange_.sum(count));
  }
  __device__ uint64_t row_weight(float bound) {
    uint64_t weight = 0;
    row_.template each<kAdjusted>([&](int, Items x) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) weight += x[i] >= bound ? scale_.weight(x[i]) : 0;
    });
    return exchange_.sum(weight);
  }

  // Way 3: the draw among the tokens whose logits reach `bound`.
  __device__ int32_t from_row(float bound, uint64_t random) {
    const auto lane_weight = [&](Items x) {
      uint64_t weight = 0;
#pragma unroll
      for (int i = 0; i < kItems; ++i) weight += kept(x[i], bound);
      return weight;
    };
    uint64_t mine = 0;
    row_.template each<kAdjusted>([&](int, Items x) { mine += lane_weight(x); });
    const uint64_t* weights = exchange_.all(warp_sum(mine));

    // The stretch the draw falls into: each lane adds up a few.
    const int few = (row_warps() + kWarp - 1) / kWarp;
    uint64_t lanes = 0;
    for (int i = 0; i < few; ++i) lanes += stretch_weight(weights, lane_id() * few + i);
    const uint64_t through = warp_inclusive_sum(lanes);
    const uint64_t drawn = mul_high(random, __shfl_sync(kFullMask, through, kWarp - 1));
    const unsigned behind = __ballot_sync(kFullMask, drawn < through);
    const int lane = behind == 0 ? 0 : __ffs(static_cast<int>(behind)) - 1;
    uint64_t before = __shfl_sync(kFullMask, through - lanes, lane);
    int owner = lane * few;
    while (owner + 1 < row_warps() && drawn >= before + weights[owner]) before += weights[owner++];

    if (owner / kRowWarps == static_cast<int>(Cluster::rank())) look_up(owner, before, drawn, lane_weight, bound);
    const uint64_t found = exchange_.max(owner / kRowWarps == static_cast<int>(Cluster::rank()) ? s_.token + 1 : 0);
    return static_cast<int32_t>(found) - 1;
  }

  __device__ uint64_t kept(float x, float bound) const {
    return x >= bound ? sampler_.after_min_p(scale_.weight(x)) : 0;
  }
  __device__ static uint64_t stretch_weight(const uint64_t* weights, int i) { return i < row_warps() ? weights[i] : 0; }

  // One block: the token, to s_.token, that the draw falls on in the stretch of warp `owner`, before which the weights
  // add up to `before`.
  template <class F>
  __device__ void look_up(int owner, uint64_t before, uint64_t drawn, const F& lane_weight, float bound) {
    __syncthreads();  // s_.token has been read
    if (threadIdx.x == 0) s_.token = kNone;
    const int end = row_.first_of(owner + 1);
    for (int first = row_.first_of(owner); first < end; first += kRowWarps) {
      const int tile = first + warp_id();
      float x[kItems];
      uint64_t weight = 0;
      if (tile < end) {
        row_.template read<kAdjusted>(tile, x);
        weight = lane_weight(x);
      }
      const uint64_t all = warp_sum(weight);
      if (lane_id() == 0) s_.tile_weights[warp_id()] = all;
      __syncthreads();  // the tiles' weights are known
      for (int i = 0; i < warp_id(); ++i) before += s_.tile_weights[i];
      if (tile < end && drawn >= before && drawn < before + all) {
        uint64_t sum = before + warp_inclusive_sum(weight) - weight;
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const uint64_t one = kept(x[i], bound);
          if (drawn >= sum && drawn < sum + one) s_.token = row_.id_of(tile) + i;
          sum += one;
        }
      }
      for (int i = warp_id(); i < kRowWarps; ++i) before += s_.tile_weights[i];
      __syncthreads();  // the tiles' weights have been read, and the token is known to the block
    }
  }

  TiledRow<T> row_;
  const Sampler& sampler_;
  Exchange& exchange_;
  DrawStorage& s_;
  unsigned& list_phase_;
  uint32_t max_key_ = 0, bound_ = 0;  // whole keys
  RowScale scale_{};
};

}  // namespace specdec
