// RowShare: a block's part of a row of floats, read with 16-byte loads that are all in flight at once.
//
// The row may start at any address and have any length: elements before its first aligned 16-byte vector and after its
// last one belong to the first block, one each for its first threads.
#pragma once

#include <algorithm>

#include "core/cuda.cuh"
#include "core/floats.h"

namespace specdec {

template <class T, int kThreads, int kVectors>
class RowShare {
 public:
  static constexpr uint32_t kItems = sizeof(uint4) / sizeof(T);
  static constexpr uint32_t kElements = kVectors * kItems + 1;  // per thread and tile, the single one included
  static constexpr uint32_t kNone = ~0u;                        // no id

  // Take part `part` of 2^log2_parts roughly equal parts.
  __device__ RowShare(const T* row, int64_t vocab, int part, int log2_parts) : row_(row) {
    const auto misaligned = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row) % sizeof(uint4) / sizeof(T));
    const auto size = static_cast<uint32_t>(vocab);
    head_ = min((kItems - misaligned) % kItems, size);
    const uint32_t vectors = (size - head_) / kItems, each = (vectors + (1u << log2_parts) - 1) >> log2_parts;
    first_ = min(each * part, vectors);
    end_ = min(first_ + each, vectors);
    if (part == 0) {
      tail_start_ = head_ + vectors * kItems;
      tail_end_ = size;
      singles_ = head_;
    }
  }

  // Return the number of tiles (kVectors vectors per thread) of the share; at least 1.
  __device__ uint32_t num_tiles() const { return max(1u, (end_ - first_ + kTile - 1) / kTile); }

  __device__ bool has_elements() const { return threadIdx.x < end_ - first_ || single_of(threadIdx.x) != kNone; }
  __device__ bool all_have_elements() const { return end_ - first_ >= kThreads; }

  __device__ void load(uint32_t tile) {
    start_ = first_ + tile * kTile + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      if (start_ + i * kThreads < end_) vectors_[i] = body()[start_ + i * kThreads];
    single_id_ = tile == 0 ? single_of(threadIdx.x) : kNone;
    single_ = single_id_ == kNone ? -INFINITY : at(single_id_);
  }

  // Call f(x) for each element of this thread in the loaded tile, NaN included, and perhaps for one extra -inf.
  template <class F>
  __device__ void for_each(F f) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (start_ + i * kThreads >= end_) break;  // the same for nearly all threads of a warp
      const Items items{vectors_[i]};
#pragma unroll
      for (int j = 0; j < kItems; ++j) f(to_float(items.at[j]));
    }
    f(single_);
  }

  // Return this thread's largest element in the loaded tile, ignoring NaN.
  __device__ float largest() const {
    float largest = fmaxf(single_, -INFINITY);
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      if (start_ + i * kThreads < end_) largest = fmaxf(largest, largest_of(vectors_[i], T{}));
    return largest;
  }

  // Call f(x, id) for each element of this thread in the loaded tile that is not below `least`, NaN included.
  template <class F>
  __device__ void for_each_from(float least, F f) const {
    uint32_t hits = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      if (start_ + i * kThreads < end_ && !(largest_of(vectors_[i], T{}) < least)) hits |= 1u << i;
#pragma unroll 1
    for (; hits != 0; hits &= hits - 1) {
      const int hit = __ffs(hits) - 1;
      uint4 vector = vectors_[0];
#pragma unroll
      for (int i = 1; i < kVectors; ++i)
        if (i == hit) vector = vectors_[i];
      const Items items{vector};
      const uint32_t id = head_ + (start_ + hit * kThreads) * kItems;
#pragma unroll
      for (uint32_t j = 0; j < kItems; ++j) {
        const float x = to_float(items.at[j]);
        if (!(x < least)) f(x, id + j);
      }
    }
    if (single_id_ != kNone && !(single_ < least)) f(single_, single_id_);
  }

  // Call f(vector, id) for each vector of this thread in the loaded tile that has an element not below `least`, or only
  // NaN; id is that of its first element. Call g(x, id) for the single element if it is not below `least`.
  template <class F, class G>
  __device__ void for_each_vector_from(float least, F f, G g) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      if (start_ + i * kThreads < end_ && !(largest_of(vectors_[i], T{}) < least))
        f(vectors_[i], head_ + (start_ + i * kThreads) * kItems);
    if (single_id_ != kNone && !(single_ < least)) g(single_, single_id_);
  }

  // Read a tile's vectors again and call f(i, id, x) for each vector i of this thread with wanted(i); x[j] is the
  // element of id + j.
  template <class Wanted, class F>
  __device__ void for_each_vector(uint32_t tile, Wanted wanted, F f) const {
    const uint32_t start = first_ + tile * kTile + threadIdx.x;
#pragma unroll 1
    for (int i = 0; i < kVectors; ++i) {
      const uint32_t vector = start + i * kThreads;
      if (vector >= end_) break;
      if (!wanted(i)) continue;
      const Items items{body()[vector]};
      float x[kItems];
#pragma unroll
      for (int j = 0; j < kItems; ++j) x[j] = to_float(items.at[j]);
      f(i, head_ + vector * kItems, x);
    }
  }

  // Return the id of element e < kElements of a thread in a tile, or kNone.
  __device__ uint32_t id_of(uint32_t tile, uint32_t thread, uint32_t e) const {
    if (e == kElements - 1) return tile == 0 ? single_of(thread) : kNone;
    const uint32_t vector = first_ + tile * kTile + thread + e / kItems * kThreads;
    return vector < end_ ? head_ + vector * kItems + e % kItems : kNone;
  }

  __device__ float at(uint32_t id) const { return to_float(row_[id]); }

  // Return the id of the single element that a thread has in addition to its vectors, or kNone.
  __device__ uint32_t single_of(uint32_t thread) const {
    if (thread < singles_) return thread;
    const uint32_t id = tail_start_ + thread - kItems;
    return thread >= kItems && id < tail_end_ ? id : kNone;
  }

 private:
  static constexpr uint32_t kTile = kThreads * kVectors;
  union Items {
    uint4 bits;
    T at[kItems];
    __device__ explicit Items(uint4 b) : bits(b) {}
  };

  // Return the largest element of a vector, ignoring NaN; two elements at a time where the hardware can.
  static __device__ float largest_of(uint4 v, float) {
    return fmaxf(fmaxf(__uint_as_float(v.x), __uint_as_float(v.y)), fmaxf(__uint_as_float(v.z), __uint_as_float(v.w)));
  }
  static __device__ float largest_of(uint4 v, Half) { return largest_of_pairs<__half2>(v); }
  static __device__ float largest_of(uint4 v, BFloat16) { return largest_of_pairs<__nv_bfloat162>(v); }
  template <class Pair>
  static __device__ float largest_of_pairs(uint4 v) {
    const auto pair = [](const uint32_t& bits) { return reinterpret_cast<const Pair&>(bits); };
    const Pair m = __hmax2(__hmax2(pair(v.x), pair(v.y)), __hmax2(pair(v.z), pair(v.w)));
    return fmaxf(__low2float(m), __high2float(m));
  }

  __device__ const uint4* body() const { return reinterpret_cast<const uint4*>(row_ + head_); }

  const T* row_;
  uint32_t head_, first_, end_, start_ = 0;
  uint32_t singles_ = 0, tail_start_ = 0, tail_end_ = 0;
  float single_;
  uint32_t single_id_;
  uint4 vectors_[kVectors];
};

}  // namespace specdec
