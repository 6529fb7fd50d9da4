// Uses one block. A trip to host memory takes about a microsecond, and concurrent requests of several warps for a line
// are served one after the other. So each word is read once, by warps that own whole lines, and all at once: one trip,
// and one more if slots are activated (one warp per slot).
#include "core/cuda.cuh"
#include "round/apply_commands.h"
#include "round/clock.h"

namespace specdec::round {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kWords = 4;  // loads in flight per thread
static_assert(CommandLayout::kStops <= kWarp);

__global__ void __launch_bounds__(kThreads) apply_commands_kernel(ApplyCommandsParams p) {
  begin_kernel();
  using Layout = CommandLayout;
  const Layout& layout = p.layout;
  const int64_t number = *p.num_applied, thread = threadIdx.x;
  // The load bypasses the caches, because the host writes this memory.
  volatile int32_t* record = p.commands + ring_row(number, p.depth) * layout.words();
  if (thread == kThreads - 1) *p.started_at = nanoseconds();

  __shared__ int64_t num_activated;
  const int64_t end = layout.activation(0);
  const auto begin_of_line = -static_cast<int64_t>(reinterpret_cast<uintptr_t>(record) / sizeof(int32_t) % kWarp);
  for (int64_t first = begin_of_line + thread; first < end; first += kWords * kThreads) {
    int32_t words[kWords];
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const int64_t i = first + j * kThreads;
      words[j] = i >= Layout::kNumActivated && i < end ? record[i] : -1;
    }
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const int64_t i = first + j * kThreads;
      if (i == Layout::kNumActivated) num_activated = min(static_cast<int64_t>(words[j]), layout.num_slots);
      if (i >= Layout::kSlots && i < layout.given_back()) p.slots[i - Layout::kSlots] = words[j];
      if (i >= layout.given_back() && i < end) {
        p.given_back[i - layout.given_back()] = words[j];
        const int64_t slot = slot_of(&words[j], 0, layout.num_slots);
        if (slot >= 0) reset_slot(p, slot);
      }
    }
  }
  __syncthreads();  // this record may also give back a slot that it activates

  __shared__ int32_t words[kWarps][Layout::kStops];
  const int64_t warp = thread / kWarp, lane = thread % kWarp, size = layout.activation(1) - layout.activation(0);
  for (int64_t i = warp; i < num_activated; i += kWarps) {
    volatile int32_t* activation = record + layout.activation(i);
    int64_t slot = -1;
    for (int64_t first = 0; first < size; first += kWarp) {
      const int64_t j = first + lane;
      const int32_t word = j < size ? activation[j] : -1;
      if (first == 0) {
        const int32_t named = __shfl_sync(kFullMask, word, Layout::kSlot);
        slot = slot_of(&named, 0, layout.num_slots);
      }
      if (j < Layout::kStops)
        words[warp][j] = word;
      else if (j < size && slot >= 0)
        p.stop_tokens[slot * layout.max_stops + j - Layout::kStops] = word;
    }
    __syncwarp();
    if (lane == 0 && slot >= 0) activate_slot(p, slot, words[warp]);
    __syncwarp();  // the words may be overwritten
  }
  __syncthreads();  // the record has been read: the host may overwrite it
  if (thread == 0) {
    *p.num_applied = number + 1;
    record[Layout::kApplied] = done_mark(number);
  }
}

}  // namespace

void apply_commands_cuda(const ApplyCommandsParams& p, Stream stream) {
  launch("apply_commands", apply_commands_kernel, {.grid = 1, .threads = kThreads}, stream, p);
}

}  // namespace specdec::round
