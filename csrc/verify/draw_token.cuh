// A token from a row's filtered distribution (sampling.h), drawn by a whole cluster. Three ways, by what is left to
// find:
//
// 1. The row's maximum, and a lower bound of its k best entries: the least, over the blocks, of the block's (k /
// blocks)-th
//    largest thread maximum. Reads the row from memory.
// 2. With top-k or top-p: entries from that bound on, some more than k, go to a list in shared memory, in order of ids;
//    thresholds and draw are found in the list by one warp. Reads the row again, from L2. Nearly always the end.
// 3. Where the list is too small (a nucleus of hundreds of tokens, masses of ties): thresholds by bisection over
//    keys, one pass over the row a bit; then, or without such filters at once, the weights are added up stretch by
//    stretch and the warp whose stretch the draw falls into looks for it there.
#pragma once

#include "verify/cluster_row.cuh"
#include "verify/sampling.h"

namespace specdec {

constexpr int kListCapacity = 1024;  // entries a row's list holds
constexpr int kFoundCapacity = 128;  // of which a warp may find
constexpr int kNucleusGuess = 192;   // entries listed for top-p without top-k

struct DrawStorage {  // in shared memory
  struct Found {
    uint32_t key;
    int32_t id;
  };
  struct Entry {
    uint64_t weight;
    uint32_t key;
    int32_t id;
  };
  Found found[kRowWarps][kFoundCapacity];
  Entry list[kListCapacity];
  int32_t token;
};

// What low bits of a key say nothing, for a type whose floats have fewer bits.
template <class T>
constexpr int kKeyShift = 0;
template <>
inline constexpr int kKeyShift<BFloat16> = 16;
template <>
inline constexpr int kKeyShift<Half> = 13;

template <class T, bool kAdjusted>
class TokenDraw {
 public:
  __device__ TokenDraw(const LogitRow<T>& row, int64_t vocab, const Sampler& sampler, Exchange& exchange,
                       DrawStorage& storage)
      : row_(row, vocab), sampler_(sampler), exchange_(exchange), s_(storage) {}

  // The token for that absolute position, or -1 where nothing is above -inf. The same in every thread of the cluster.
  __device__ int32_t token(uint32_t position) {
    if (!find_max()) return kNone;
    const uint64_t random = noise(sampler_.seed, NoiseUse::kToken, position, 0).u64();
    if (!sampler_.filters_by_key()) return from_row(0, random);
    const int32_t token = from_list(random);
    return token != kNotListed ? token : from_row(threshold(), random);
  }

 private:
  static constexpr int32_t kNone = -1, kNotListed = -2;
  static constexpr int kItems = RowStretch<T>::kItems;
  static constexpr int kShift = kAdjusted ? 0 : kKeyShift<T>;

  __device__ static uint32_t key_of(float x) { return order_key(x) >> kShift; }
  __device__ bool keeps(uint32_t threshold, uint32_t key, float x) const {
    return key >= threshold && scale_.exponent(x) >= sampler_.least;
  }

  // Way 1.
  __device__ bool find_max() {
    float mine = -INFINITY;
    row_.template each<kAdjusted>([&](int, const auto& x) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) mine = fmaxf(mine, x[i]);
    });
    const uint32_t key = order_key(mine);
    const uint32_t bound = sampler_.filters_by_key() ? block_bound(key >> 16) : 0;
    const uint32_t block_max = __reduce_max_sync(kFullMask, key);
    const uint64_t* numbers = exchange_.all(static_cast<uint64_t>(block_max) << 32 | bound);
    uint32_t max = 0, least = ~0u;
    for (int i = lane_id(); i < row_warps(); i += kWarp) {
      max = ::max(max, static_cast<uint32_t>(numbers[i] >> 32));
      least = ::min(least, static_cast<uint32_t>(numbers[i]));
    }
    max_key_ = __reduce_max_sync(kFullMask, max);
    bound_ = __reduce_min_sync(kFullMask, least) << 16;
    scale_ = {key_float(max_key_), sampler_.scale};
    return max_key_ > kKeyOfMinusInf;
  }

  // The largest key (its upper half) that as many of the block's thread maxima reach as this block owes the list.
  __device__ uint32_t block_bound(uint32_t key) const {
    const int wanted = sampler_.top_k > 0 ? static_cast<int>(min(sampler_.top_k, int64_t{1} << 20)) : kNucleusGuess;
    const int owed = (wanted + static_cast<int>(Cluster::size()) - 1) / static_cast<int>(Cluster::size());
    if (owed > kRowThreads) return 0;
    return last_key(0, 1u << 16, [&](uint32_t bound) { return __syncthreads_count(key >= bound) >= owed; });
  }

  // Way 2. kNotListed where the list does not hold every token kept.
  __device__ int32_t from_list(uint64_t random) {
    uint64_t weight = 0;  // of the whole row, where top-p needs it
    const int found = find_entries(weight);
    const uint64_t* counts = exchange_.all(found);

    int total = 0, most = 0;  // entries of all warps, of the fullest
    for (int first = 0; first < row_warps(); first += kWarp) {
      const int count = first + lane_id() < row_warps() ? static_cast<int>(counts[first + lane_id()]) : 0;
      most = ::max(most, static_cast<int>(__reduce_max_sync(kFullMask, count)));
      if (most > kFoundCapacity) break;
      const int offset = total + static_cast<int>(warp_inclusive_sum(count)) - count;
      for (int source = warp_id(); source < kWarp; source += kRowWarps)
        copy_found(first + source, __shfl_sync(kFullMask, offset, source), __shfl_sync(kFullMask, count, source));
      total += __reduce_add_sync(kFullMask, count);
    }
    if (sampler_.top_k == 0) weight = exchange_.sum(weight);
    if (most > kFoundCapacity || total > kListCapacity) return kNotListed;
    __syncthreads();  // the list is complete
    if (warp_id() == 0) {
      const int32_t token = draw_from_list(total, weight, random);
      if (lane_id() == 0) s_.token = token;
    }
    __syncthreads();  // the token is known; it is written again only after the cluster has met
    return s_.token;
  }

  // Writes the stretch's entries from the bound on to s_.found, in order of ids; how many there are, written or not.
  __device__ int find_entries(uint64_t& weight) {
    const float bound = bound_ > kKeyOfMinusInf ? key_float(bound_) : -INFINITY;
    const unsigned lanes_before = (1u << lane_id()) - 1;
    DrawStorage::Found* found = s_.found[warp_id()];
    int count = 0;
    row_.template each<kAdjusted>([&](int id, const auto& x) {
      unsigned mine = 0;
#pragma unroll
      for (int i = 0; i < kItems; ++i) mine |= (x[i] >= bound && x[i] > -INFINITY ? 1u : 0u) << i;
      if (sampler_.top_k == 0) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) weight += scale_.weight(x[i]);
      }
      if (!__any_sync(kFullMask, mine != 0)) return;
      int place = count;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {  // ids of one lane follow each other, so lanes count before items
        place += __popc(__ballot_sync(kFullMask, mine >> i & 1) & lanes_before);
        count += __popc(__ballot_sync(kFullMask, mine >> i & 1));
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (!(mine >> i & 1)) continue;
        if (place < kFoundCapacity) found[place] = {order_key(x[i]), id + i};
        ++place;
      }
    });
    return count;
  }

  // One warp copies what warp `source` of the cluster found to the list.
  __device__ void copy_found(int source, int offset, int count) {
    if (count == 0 || offset + count > kListCapacity) return;
    const auto* found = Cluster::at(&s_.found[0][0], source / kRowWarps) + source % kRowWarps * kFoundCapacity;
    for (int i = lane_id(); i < count; i += kWarp) {
      const DrawStorage::Found entry = found[i];
      s_.list[offset + i] = {scale_.weight(key_float(entry.key)), entry.key >> kShift, entry.id};
    }
  }

  // One warp; every lane gets the token.
  __device__ int32_t draw_from_list(int n, uint64_t row_weight, uint64_t random) {
    const uint32_t low = bound_ >> kShift, high = (max_key_ >> kShift) + 1;
    uint32_t threshold = low;
    if (sampler_.top_k > 0 && n > sampler_.top_k)
      threshold = last_key(low, high, [&](uint32_t key) { return list_count(n, key) >= sampler_.top_k; });
    if (sampler_.top_p < 1) {
      const uint64_t listed = list_weight(n, threshold);
      const uint64_t wanted = top_p_weight(sampler_.top_p, sampler_.top_k > 0 ? listed : row_weight);
      if (listed < wanted) return kNotListed;
      threshold = last_key(threshold, high, [&](uint32_t key) { return list_weight(n, key) >= wanted; });
    }
    // Each lane adds up a stretch of the list; the one the draw falls into looks for it.
    const int each = (n + kWarp - 1) / kWarp, first = lane_id() * each, end = min(first + each, n);
    const auto kept = [&](int i) {
      const DrawStorage::Entry& e = s_.list[i];
      return keeps(threshold, e.key, unshifted(e.key)) ? e.weight : 0;
    };
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

  // The float behind a shifted key: the bits shifted out are 0, or 1 for a negative number.
  __device__ static float unshifted(uint32_t key) {
    const uint32_t whole = key << kShift;
    return key_float(whole & 0x80000000u ? whole : whole | ((1u << kShift) - 1));
  }

  __device__ int list_count(int n, uint32_t key) const {
    int count = 0;
    for (int i = lane_id(); i < n; i += kWarp) count += s_.list[i].key >= key;
    return __reduce_add_sync(kFullMask, count);
  }
  __device__ uint64_t list_weight(int n, uint32_t key) const {
    uint64_t weight = 0;
    for (int i = lane_id(); i < n; i += kWarp) weight += s_.list[i].key >= key ? s_.list[i].weight : 0;
    return warp_sum(weight);
  }

  // Way 3: the threshold of top-k and top-p.
  __device__ uint32_t threshold() {
    const uint32_t high = (max_key_ >> kShift) + 1;
    uint32_t threshold = 0;
    if (sampler_.top_k > 0)
      threshold = last_key(0, high, [&](uint32_t key) { return row_count(key) >= sampler_.top_k; });
    if (sampler_.top_p < 1) {
      const uint64_t wanted = top_p_weight(sampler_.top_p, row_weight(threshold));
      threshold = last_key(threshold, high, [&](uint32_t key) { return row_weight(key) >= wanted; });
    }
    return threshold;
  }

  __device__ int64_t row_count(uint32_t least) {
    int count = 0;
    row_.template each<kAdjusted>([&](int, const auto& x) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) count += key_of(x[i]) >= least;
    });
    return static_cast<int64_t>(exchange_.sum(count));
  }
  __device__ uint64_t row_weight(uint32_t least) {
    uint64_t weight = 0;
    row_.template each<kAdjusted>([&](int, const auto& x) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) weight += key_of(x[i]) >= least ? scale_.weight(x[i]) : 0;
    });
    return exchange_.sum(weight);
  }

  // Way 3: the draw among the tokens whose keys reach `threshold`.
  __device__ int32_t from_row(uint32_t threshold, uint64_t random) {
    const auto kept = [&](float x) { return keeps(threshold, key_of(x), x) ? scale_.weight(x) : 0; };
    uint64_t mine = 0;
    row_.template each<kAdjusted>([&](int, const auto& x) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) mine += kept(x[i]);
    });
    const uint64_t stretch = warp_sum(mine);
    const uint64_t* weights = exchange_.all(stretch);
    uint64_t before = 0, total = 0;
    for (int i = lane_id(); i < row_warps(); i += kWarp) {
      total += weights[i];
      if (i < row_warp()) before += weights[i];
    }
    total = warp_sum(total);
    before = warp_sum(before);
    const uint64_t drawn = mul_high(random, total);

    int32_t token = kNone;
    if (drawn >= before && drawn < before + stretch) {
      uint64_t sum = before;  // of what comes before the tile
      row_.template each<kAdjusted>([&](int id, const auto& x) {
        uint64_t vector = 0;
#pragma unroll
        for (int i = 0; i < kItems; ++i) vector += kept(x[i]);
        const uint64_t tile = warp_sum(vector);
        if (drawn >= sum && drawn < sum + tile) {
          uint64_t through = sum + warp_inclusive_sum(vector) - vector;
#pragma unroll
          for (int i = 0; i < kItems; ++i) {
            const uint64_t weight = kept(x[i]);
            if (drawn >= through && drawn < through + weight) token = id + i;
            through += weight;
          }
        }
        sum += tile;
      });
    }
    const uint64_t chosen = exchange_.max(static_cast<uint64_t>(token + 1));
    return static_cast<int32_t>(chosen) - 1;
  }

  RowStretch<T> row_;
  const Sampler& sampler_;
  Exchange& exchange_;
  DrawStorage& s_;
  uint32_t max_key_ = 0, bound_ = 0;  // whole keys
  RowScale scale_{};
};

}  // namespace specdec
