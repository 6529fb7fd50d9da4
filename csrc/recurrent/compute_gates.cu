// Decays and betas of a recurrence.
//
// One thread per element of a row; a block has several rows if they are short. Everything is read and written once: 10
// bytes per head of a gated delta net in bfloat16, so few rows are bound by launch latency. Parameters are loaded while
// the kernel before still runs.
#include <algorithm>

#include "core/cuda.cuh"
#include "recurrent/compute_gates.h"

namespace specdec::recurrent {
namespace {

constexpr int kThreads = 128;

template <class T, class Bias>
__global__ void __launch_bounds__(kThreads) compute_gates_kernel(ComputeGatesParams p) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const unsigned i = blockIdx.y * blockDim.x + threadIdx.x, channels = static_cast<unsigned>(p.channels);
  const unsigned head = i / channels, channel = i % channels;
  const bool has_element = row < p.rows && head < p.heads;
  float decay = 0, bias = 0;
  if (has_element) {
    decay = p.decay[head];
    bias = to_float(static_cast<const Bias*>(p.dt_bias)[i]);
  }
  begin_kernel();
  if (!has_element) return;
  const float a = to_float(static_cast<const T*>(p.a)[row * p.a_row + head * p.a_head + channel]);
  float beta = 0;
  if (channel == 0 && p.b != nullptr) beta = to_float(static_cast<const T*>(p.b)[row * p.b_row + head]);
  const float dt = time_step(p, a + bias);
  p.g[row * p.heads * p.channels + i] = decay * dt;
  if (channel == 0) p.beta[row * p.heads + head] = p.b != nullptr ? sigmoid(beta) : dt;
}

}  // namespace

void compute_gates_cuda(const ComputeGatesParams& p, Stream stream) {
  constexpr const char* op = "compute_gates";
  const int64_t width = p.heads * p.channels;
  const int64_t threads = std::min<int64_t>((width + kWarp - 1) / kWarp * kWarp, kThreads), rows = kThreads / threads;
  const dim3 grid(grid_x(op, (p.rows + rows - 1) / rows), static_cast<unsigned>((width + threads - 1) / threads));
  const dim3 block(static_cast<unsigned>(threads), static_cast<unsigned>(rows));
  with_gate_types(p, [&]<class T, class Bias>() {
    launch(op, compute_gates_kernel<T, Bias>, {.grid = grid, .threads = block}, stream, p);
  });
}

}  // namespace specdec::recurrent
