// Convolve every path of a tree, or a chain, depthwise.
//
// One block per request and 32 channels, eight rows at a time (threadIdx.y). Each thread keeps its channel's weights
// and window in registers. Rows of a tree gather their ancestors' inputs through the L1; rows of a chain are cut into
// eight runs, whose taps slide through registers. Reads each input once from memory, and the window; writes outputs,
// records and the window.
#include "recurrent/block_tree.cuh"
#include "recurrent/tree_conv1d.h"

namespace specdec::recurrent {
namespace {

constexpr int kChannels = 32, kRuns = 8, kThreads = kChannels * kRuns;
constexpr int kAhead = 8;  // rows of a run whose inputs are loaded together

template <class T>
__device__ void convolve_tree(const TreeConv1dParams& p, const Request& request, int64_t channel, const T* window,
                              const float* weight, float bias) {
  const T* x = static_cast<const T*>(p.x) + channel;
  T* out = static_cast<T*>(p.out) + channel;
  T* records = static_cast<T*>(p.layer.records) +
               first_record(p.pending, 1 - request.path.buffer, request.path.slot) * p.layer.channels + channel;
  for (int32_t i = threadIdx.y; i < request.rows; i += kRuns) {
    const int64_t row = request.first + i;
    out[row * p.out_stride] = from_float<T>(convolve(p, request, i, channel, window, weight, bias));
    records[i * p.layer.channels] = x[row * p.x_stride];
  }
}

// Convolve one of the kRuns runs of a chain.
template <class T, int kTaps>
__device__ void convolve_run(const TreeConv1dParams& p, const Request& request, int64_t channel, const T* window,
                             const float* weight, float bias) {
  const T* x = static_cast<const T*>(p.x) + request.first * p.x_stride + channel;
  T* out = static_cast<T*>(p.out) + request.first * p.out_stride + channel;
  const int taps = static_cast<int>(p.layer.taps);
  const int64_t per_run = (request.rows + kRuns - 1) / kRuns;
  const int64_t begin = threadIdx.y * per_run, end = begin + per_run < request.rows ? begin + per_run : request.rows;
  float seen[kTaps - 1];  // inputs before the current row, the newest first
#pragma unroll
  for (int t = 0; t < kTaps - 1; ++t) {
    const int64_t row = begin - 1 - t;
    seen[t] = 0;
    if (row >= 0 && begin < end && t < taps - 1) seen[t] = to_float(x[row * p.x_stride]);
#pragma unroll
    for (int w = 0; w < kTaps - 1; ++w)
      if (row < 0 && t < taps - 1 && w == taps - 1 + row) seen[t] = to_float(window[w]);
  }
  for (int64_t first = begin; first < end; first += kAhead) {
    T inputs[kAhead];
#pragma unroll
    for (int r = 0; r < kAhead; ++r)
      if (first + r < end) inputs[r] = x[(first + r) * p.x_stride];
#pragma unroll
    for (int r = 0; r < kAhead; ++r) {
      if (first + r >= end) break;
      const float input = to_float(inputs[r]);
      float sum = bias + weight[0] * input;
#pragma unroll
      for (int t = 0; t < kTaps - 1; ++t) sum += weight[t + 1] * seen[t];
#pragma unroll
      for (int t = kTaps - 2; t > 0; --t) seen[t] = seen[t - 1];
      seen[0] = input;
      out[(first + r) * p.out_stride] = from_float<T>(p.silu ? sum / (1 + expf(-sum)) : sum);
    }
  }
}

template <class T, int kTaps>
__global__ void __launch_bounds__(kThreads) tree_conv1d_kernel(TreeConv1dParams p, unsigned channel_blocks) {
  begin_kernel();
  const int64_t b = blockIdx.x / channel_blocks;
  const int64_t channel = int64_t{blockIdx.x % channel_blocks} * kChannels + threadIdx.x;
  const int thread = static_cast<int>(threadIdx.y) * kChannels + static_cast<int>(threadIdx.x);
  const Request request = load_request(p.pending, p.rows, b);
  const int32_t slot = request.path.slot;
  const bool is_bad = is_bad_tree(p.pending, &p.rows, request.path, &request, thread);
  const int32_t bits = request.path.bits | (is_bad ? kBadTree : 0);
  if (slot >= 0 && bits && blockIdx.x % channel_blocks == 0 && thread == 0) set_status(p.pending.status, slot, bits);
  const bool has_channel = channel < p.layer.channels;
  if (slot < 0 || bits) {
    if (has_channel)
      for (int64_t i = threadIdx.y; i < request.rows; i += kRuns)
        static_cast<T*>(p.out)[(request.first + i) * p.out_stride + channel] = T{};
    return;
  }
  if (request.rows == 0) return;

  T window[kMaxTaps - 1] = {};
  if (has_channel) {
    float weight[kMaxTaps];
    const float bias = load_weight<T>(p, channel, weight);
    load_window(p.pending, p.layer, request.path, request.is_fresh, channel, window);
    if (p.rows.mask != nullptr)
      convolve_tree(p, request, channel, window, weight, bias);
    else
      convolve_run<T, kTaps>(p, request, channel, window, weight, bias);
  }
  __syncthreads();  // all runs have loaded the window
  if (!has_channel || threadIdx.y != 0) return;
  if (p.rows.mask != nullptr)
    store_window(p.layer, slot, channel, window);
  else
    store_window_after_chain(p, request, channel, window);
}

template <class T>
__global__ void __launch_bounds__(kThreads) commit_conv1d_kernel(CommitConv1dParams p, unsigned channel_blocks) {
  begin_kernel();
  const int64_t b = blockIdx.x / channel_blocks;
  const int64_t channel = int64_t{blockIdx.x % channel_blocks} * kThreads + threadIdx.x;
  const PendingPath path = load_pending(p.pending, b);
  const bool is_bad = is_bad_tree(p.pending, nullptr, path, nullptr, static_cast<int>(threadIdx.x));
  const int32_t bits = path.bits | (is_bad ? kBadTree : 0);
  if (path.slot < 0) return;
  if (bits && blockIdx.x % channel_blocks == 0 && threadIdx.x == 0) set_status(p.pending.status, path.slot, bits);
  if (bits || path.count == 0 || channel >= p.layer.channels) return;
  T window[kMaxTaps - 1] = {};
  load_window(p.pending, p.layer, path, false, channel, window);
  store_window(p.layer, path.slot, channel, window);
}

// Call f.template operator()<kTaps>() with the number of taps, or kMaxTaps for more than 4.
template <class F>
void with_taps(int64_t taps, F&& f) {
  if (taps == 4) return f.template operator()<4>();
#ifndef SPECDEC_COMPILE_CHECK
  if (taps == 2) return f.template operator()<2>();
  if (taps == 3) return f.template operator()<3>();
  f.template operator()<kMaxTaps>();
#endif
}

}  // namespace

void tree_conv1d_cuda(const TreeConv1dParams& p, Stream stream) {
  const int64_t blocks = (p.layer.channels + kChannels - 1) / kChannels;
  const unsigned grid = grid_x("tree_conv1d", (p.pending.batch + 1) * blocks);
  with_float_type(p.layer.dtype, [&]<class T>() {
    with_taps(p.layer.taps, [&]<int kTaps>() {
      launch("tree_conv1d", tree_conv1d_kernel<T, kTaps>, {.grid = grid, .threads = dim3(kChannels, kRuns)}, stream, p,
             static_cast<unsigned>(blocks));
    });
  });
}

void commit_conv1d_cuda(const CommitConv1dParams& p, Stream stream) {
  const int64_t blocks = (p.layer.channels + kThreads - 1) / kThreads;
  const unsigned grid = grid_x("commit_conv1d", p.pending.batch * blocks);
  with_float_type(p.layer.dtype, [&]<class T>() {
    launch("commit_conv1d", commit_conv1d_kernel<T>, {.grid = grid, .threads = kThreads}, stream, p,
           static_cast<unsigned>(blocks));
  });
}

}  // namespace specdec::recurrent
