// One block. What every record has is read at once, some hundred bytes over the bus: one trip to host memory is the
// cost, about a microsecond, and the launch. Activations take one trip more, a warp each.
#include "core/cuda.cuh"
#include "round/apply_commands.h"
#include "round/clock.h"

namespace specdec {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;

__global__ void __launch_bounds__(kThreads) apply_commands_kernel(ApplyCommandsParams p) {
  begin_kernel();
  using Layout = CommandLayout;
  const Layout& layout = p.layout;
  const int64_t number = *p.num_applied, thread = threadIdx.x;
  volatile int32_t* record = p.commands + ring_row(number, p.depth) * layout.words();  // the host writes it: no cache
  if (thread == 0) *p.started_at = nanoseconds();

  const int64_t num_activated = min(static_cast<int64_t>(record[Layout::kNumActivated]), layout.num_slots);
  for (int64_t i = thread; i < max(layout.max_batch, layout.num_slots); i += kThreads) {
    // All words are on their way before the first is needed.
    const int32_t named = i < layout.max_batch ? record[Layout::kSlots + i] : -1;
    const int32_t given_back = i < layout.num_slots ? record[layout.given_back() + i] : -1;
    if (i < layout.max_batch) p.slots[i] = named;
    if (i < layout.num_slots) p.given_back[i] = given_back;
    const int64_t slot = slot_of(&given_back, 0, layout.num_slots);
    if (slot >= 0) reset_slot(p, slot);
  }
  __syncthreads();  // a slot to activate may have been given back by this very record

  __shared__ int32_t words[kWarps][Layout::kStops];
  const int64_t warp = thread / kWarp, lane = thread % kWarp;
  for (int64_t i = warp; i < num_activated; i += kWarps) {
    volatile int32_t* activation = record + layout.activation(i);
    if (lane < Layout::kStops) words[warp][lane] = activation[lane];
    __syncwarp();
    const int64_t slot = slot_of(words[warp] + Layout::kSlot, 0, layout.num_slots);
    if (slot >= 0) {
      if (lane == 0) activate_slot(p, slot, words[warp]);
      for (int64_t j = lane; j < layout.max_stops; j += kWarp)
        p.stop_tokens[slot * layout.max_stops + j] = activation[Layout::kStops + j];
    }
    __syncwarp();  // the words may be overwritten
  }
  __syncthreads();  // the record has been read: the host may have it back
  if (thread == 0) {
    *p.num_applied = number + 1;
    record[Layout::kApplied] = done_mark(number);
  }
}

}  // namespace

void apply_commands_cuda(const ApplyCommandsParams& p, Stream stream) {
  launch("apply_commands", apply_commands_kernel, {.grid = 1, .threads = kThreads}, stream, p);
}

}  // namespace specdec
