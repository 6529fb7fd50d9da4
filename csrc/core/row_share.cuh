// A block's share of a row of floats, read with 16-byte loads that are all under way at once.
//
// The row may start anywhere and have any length: of its first and last vector, only the elements that are the row's
// are read.
#pragma once

#include <algorithm>

#include "core/cuda.cuh"
#include "core/floats.h"

namespace specdec {

// With kById, vectors start at ids that are multiples of their length, which noise by id asks for; those of a row that
// does not start at a multiple of 16 bytes are then read element by element.
template <class T, int kThreads, int kVectors, bool kById = false>
class RowShare {
 public:
  static constexpr int kItems = sizeof(uint4) / sizeof(T);

  // Share `part` of `parts` about equal ones.
  __device__ RowShare(const T* row, int64_t vocab, int part, int parts) : vocab_(static_cast<uint32_t>(vocab)) {
    const auto misaligned = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row) % sizeof(uint4) / sizeof(T));
    lead_ = kById ? 0 : misaligned;
    by_vectors_ = !kById || misaligned == 0;
    base_ = row - lead_;
    const uint32_t vectors = num_vectors(lead_ + vocab), each = (vectors + parts - 1) / parts;
    first_ = min(each * part, vectors);
    end_ = min(first_ + each, vectors);
  }

  static __host__ __device__ uint32_t num_vectors(int64_t items) {
    return static_cast<uint32_t>((items + kItems - 1) / kItems);
  }

  // The share is read in tiles of kVectors vectors a thread; there is always a first.
  __device__ uint32_t num_tiles() const { return max(1u, (end_ - first_ + kTile - 1) / kTile); }
  // Threads that have any element: the first ones.
  __device__ int busy_threads() const { return min(end_ - first_, static_cast<uint32_t>(kThreads)); }

  __device__ void seek(uint32_t tile) { start_ = first_ + tile * kTile + threadIdx.x; }
  __device__ void load(uint32_t tile) {
    seek(tile);
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      if (present(i)) vectors_[i] = read(start_ + i * kThreads);
  }

  // Whether this thread has a vector i in the tile that was loaded. The same for nearly all threads of a warp.
  __device__ bool present(int i) const { return start_ + i * kThreads < end_; }

  // f(x) for each element of this thread in the tile, NaN as it is; what is not the row's counts as -inf.
  template <class F>
  __device__ void for_each(F f) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!present(i)) break;
      const Items items{vectors_[i]};
#pragma unroll
      for (int j = 0; j < kItems; ++j) f(to_float(items.at[j]));
    }
  }

  // f(id, x) for each four consecutive elements of this thread in the tile, x those of ids id to id + 3, id a multiple
  // of 4. What is beyond the row counts as -inf.
  template <class F>
  __device__ void for_each_four(F f) const {
    static_assert(kById);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!present(i)) break;
      const Items items{vectors_[i]};
#pragma unroll
      for (int j = 0; j < kItems; j += 4) {
        const float x[4] = {to_float(items.at[j]), to_float(items.at[j + 1]), to_float(items.at[j + 2]),
                            to_float(items.at[j + 3])};
        f(id_of(start_ + i * kThreads) + j, x);
      }
    }
  }

  // As for_each_four, the elements of the warp's lane `lane`: all lanes of the warp call this and share the work.
  template <class F>
  __device__ void for_each_four_of(int lane, F f) const {
    static_assert(kById);
    constexpr int kFours = kItems / 4;
    const int mine = threadIdx.x % kWarp;
    const uint32_t vector = start_ - mine + lane + mine / kFours * kThreads;
    if (mine >= kVectors * kFours || vector >= end_) return;
    const uint32_t id = id_of(vector) + mine % kFours * 4;
    float x[4];
    for (int j = 0; j < 4; ++j) x[j] = id + j < vocab_ ? to_float(base_[id + j]) : -INFINITY;
    f(id, x);
  }

  // f(x, id) for each element of this thread in the tile that is not below `least`, NaN included.
  template <class F>
  __device__ void for_each_from(float least, F f) const {
    uint64_t hits = 0;
    int bit = 0;
    for_each([&](float x) { hits |= static_cast<uint64_t>(!(x < least)) << bit++; });
    for (; hits != 0; hits &= hits - 1) {  // few: read again, since registers have no addresses
      bit = __ffsll(static_cast<long long>(hits)) - 1;
      const uint32_t vector = start_ + bit / kItems * kThreads, id = id_of(vector) + bit % kItems;
      if (id < vocab_) f(to_float(base_[static_cast<int64_t>(vector) * kItems + bit % kItems]), id);
    }
  }

 private:
  static constexpr uint32_t kTile = kThreads * kVectors;
  static_assert(kVectors * kItems <= 64, "a bit for each element of a thread");
  union Items {
    uint4 bits;
    T at[kItems];
    __device__ explicit Items(uint4 b) : bits(b) {}
  };

  // The id of a vector's first element; that of the first vector may be below 0, which wraps and is beyond the row.
  __device__ uint32_t id_of(uint32_t vector) const { return vector * kItems - lead_; }

  __device__ uint4 read(uint32_t vector) const {
    const uint32_t id = id_of(vector);
    const T* at = base_ + static_cast<int64_t>(vector) * kItems;
    if (by_vectors_ && id < vocab_ && vocab_ - id >= kItems) return *reinterpret_cast<const uint4*>(at);
    Items items{uint4{}};
    for (int j = 0; j < kItems; ++j) items.at[j] = id + j < vocab_ ? at[j] : from_float<T>(-INFINITY);
    return items.bits;
  }

  const T* base_;
  bool by_vectors_;
  uint32_t lead_, vocab_, first_, end_, start_ = 0;
  uint4 vectors_[kVectors];
};

}  // namespace specdec
