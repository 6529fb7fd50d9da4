// One block a request walks down its tree: an argmax over the node's logits by the whole block, then one thread looks
// for the child. Reads accept_len rows of logits per request (2 or 4 bytes x vocab each), and of no other node.
#include <cub/block/block_reduce.cuh>

#include "core/cuda.cuh"
#include "core/floats.h"
#include "verify/verify_tree.h"

namespace specdec {
namespace {

constexpr int kThreads = 512;

struct Entry {
  float value;
  int32_t id;
};
struct Larger {
  __device__ Entry operator()(Entry a, Entry b) const {
    return b.value > a.value || (b.value == a.value && b.id < a.id) ? b : a;
  }
};

// One thread meets its ids in rising order, so > keeps the lowest of equals; NaN is never > anything.
template <class T>
__device__ __forceinline__ void take(Entry& best, T x, int64_t v) {
  const float value = to_float(x);
  if (value > best.value) best = {value, static_cast<int32_t>(v)};
}

template <class T>
union Vector {
  uint4 bits;
  T items[sizeof(uint4) / sizeof(T)];
  __device__ Vector(uint4 b) : bits(b) {}
};

// This thread's share of the row: single elements up to the first 16-byte boundary, vectors, single elements.
template <class T>
__device__ Entry largest_of_mine(const T* row, int64_t vocab) {
  constexpr int kItems = sizeof(uint4) / sizeof(T);
  const int64_t misaligned = reinterpret_cast<uintptr_t>(row) % sizeof(uint4) / sizeof(T);
  const int64_t head = min(misaligned == 0 ? 0 : kItems - misaligned, vocab);
  const int64_t vectors = (vocab - head) / kItems;
  const uint4* body = reinterpret_cast<const uint4*>(row + head);

  Entry best{-INFINITY, INT32_MAX};
  if (threadIdx.x < head) take(best, row[threadIdx.x], threadIdx.x);
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < vectors; i += kThreads) {
    const Vector<T> vector(body[i]);
#pragma unroll
    for (int j = 0; j < kItems; ++j) take(best, vector.items[j], head + i * kItems + j);
  }
  const int64_t tail = head + vectors * kItems + threadIdx.x;
  if (tail < vocab) take(best, row[tail], tail);
  return best;
}

template <class T>
__global__ void __launch_bounds__(kThreads) verify_tree_kernel(VerifyTreeParams p) {
  using Reduce = cub::BlockReduce<Entry, kThreads>;
  __shared__ typename Reduce::TempStorage temp;
  __shared__ int32_t next_node;  // -1: the walk is over

  const int64_t b = blockIdx.x;
  const int64_t slot = slot_of(p.slots, b, p.num_slots);
  const int32_t size = p.tree_sizes[b];
  const T* rows = static_cast<const T*>(p.logits) + b * p.logits_batch_stride;
  // Thread 0 owns the walk; the others only follow next_node.
  TreeWalk walk(p.links, b, size, p.accept_width, p.out_tokens + b * p.accept_width, p.out_path + b * p.accept_width);

  int32_t node = slot >= 0 && size > 0 ? 0 : -1;
  while (node >= 0) {
    const Entry best = Reduce(temp).Reduce(largest_of_mine(rows + node * p.logits_node_stride, p.vocab), Larger());
    if (threadIdx.x == 0) next_node = walk.step(best.value > -INFINITY ? best.id : -1) ? walk.node : -1;
    __syncthreads();  // next_node is written, and temp is free again
    node = next_node;
    __syncthreads();  // everyone has read next_node before thread 0 writes it again
  }
  if (threadIdx.x == 0) {
    if (walk.bits && slot >= 0) set_status(p.status, slot, walk.bits);
    walk.finish();
    p.out_len[b] = static_cast<int32_t>(walk.len);
  }
}

}  // namespace

void verify_tree_cuda(const VerifyTreeParams& p, Stream stream) {
  with_float_type(p.logits_dtype, [&]<class T>() {
    verify_tree_kernel<T><<<grid_x("verify_tree", p.batch), kThreads, 0, stream>>>(p);
  });
  SD_LAUNCH_CHECK("verify_tree");
}

}  // namespace specdec
