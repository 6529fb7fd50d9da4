// One block a row. Pass 1 finds max and sum of exponents, then k passes each take the best entry after the last one
// in the order (value descending, id ascending). Reads the row k + 1 times, all but the first mostly from L2.
#include <cub/block/block_reduce.cuh>

#include "core/cuda.cuh"
#include "core/floats.h"
#include "draft/select_topk.h"

namespace specdec {
namespace {

constexpr int kThreads = 256;

// An entry of a row; `a before b` is the order in which top-k lists them.
struct Entry {
  float value;
  int32_t id;
};
__device__ __forceinline__ bool before(Entry a, Entry b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}
struct First {
  __device__ Entry operator()(Entry a, Entry b) const { return before(b, a) ? b : a; }
};

// max and sum of exp(x - max), mergeable.
struct Softmax {
  float max, sum;
};
struct Merge {
  __device__ Softmax operator()(Softmax a, Softmax b) const {
    const float max = fmaxf(a.max, b.max);
    if (max == -INFINITY) return {max, 0.0f};
    return {max, a.sum * expf(below_max(a.max, max)) + b.sum * expf(below_max(b.max, max))};
  }
};

template <class T>
__device__ __forceinline__ float load(const T* row, int64_t v) {
  const float x = to_float(row[v]);
  return isnan(x) ? -INFINITY : x;
}

template <class T>
__global__ void __launch_bounds__(kThreads) select_topk_kernel(SelectTopkParams p) {
  using ReduceEntry = cub::BlockReduce<Entry, kThreads>;
  using ReduceSoftmax = cub::BlockReduce<Softmax, kThreads>;
  __shared__ union {
    typename ReduceEntry::TempStorage entry;
    typename ReduceSoftmax::TempStorage softmax;
  } temp;
  __shared__ Softmax total;
  __shared__ Entry last;

  const int64_t r = blockIdx.x;
  const T* row = static_cast<const T*>(p.logits) + r * p.logits_stride;

  Softmax mine{-INFINITY, 0.0f};
  for (int64_t v = threadIdx.x; v < p.vocab; v += kThreads) mine = Merge()(mine, {load(row, v), 1.0f});
  const Softmax sum = ReduceSoftmax(temp.softmax).Reduce(mine, Merge());
  if (threadIdx.x == 0) total = sum;

  for (int64_t j = 0; j < p.k; ++j) {
    __syncthreads();
    Entry best{-INFINITY, INT32_MAX};
    for (int64_t v = threadIdx.x; v < p.vocab; v += kThreads) {
      const Entry e{load(row, v), static_cast<int32_t>(v)};
      if ((j == 0 || before(last, e)) && before(e, best)) best = e;
    }
    const Entry first = ReduceEntry(temp.entry).Reduce(best, First());
    if (threadIdx.x == 0) {
      last = first;
      p.out_ids[r * p.k + j] = p.id_map ? p.id_map[first.id] : first.id;
      p.out_logprobs[r * p.k + j] =
          first.value == -INFINITY ? -INFINITY : fminf(below_max(first.value, total.max) - logf(total.sum), 0.0f);
    }
  }
}

}  // namespace

void select_topk_cuda(const SelectTopkParams& p, Stream stream) {
  with_float_type(p.logits_dtype,
                  [&]<class T>() { select_topk_kernel<T><<<grid_x("select_topk", p.rows), kThreads, 0, stream>>>(p); });
  SD_LAUNCH_CHECK("select_topk");
}

}  // namespace specdec
