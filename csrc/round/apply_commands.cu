// One block. Every word of the record is read at once, some hundred bytes over the bus: one trip to host memory is the
// cost, about a microsecond, and the launch.
#include "core/cuda.cuh"
#include "round/apply_commands.h"
#include "round/clock.h"

namespace specdec {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) apply_commands_kernel(ApplyCommandsParams p) {
  begin_kernel();
  const CommandLayout& layout = p.layout;
  const int64_t number = *p.num_applied, thread = threadIdx.x;
  volatile int32_t* record = p.commands + ring_row(number, p.depth) * layout.words();  // the host writes it: no cache
  if (thread == 0) *p.started_at = nanoseconds();

  __shared__ int32_t words[CommandLayout::kStops];
  if (thread < CommandLayout::kStops) words[thread] = record[thread];
  for (int64_t i = thread; i < layout.max_batch; i += kThreads) p.slots[i] = record[layout.slots() + i];
  for (int64_t i = thread; i < layout.num_slots; i += kThreads) {
    const int32_t given_back = record[layout.given_back() + i];
    p.given_back[i] = given_back;
    const int64_t slot = slot_of(&given_back, 0, layout.num_slots);
    if (slot >= 0) reset_slot(p, slot);
  }
  __syncthreads();  // the slot to activate may have been given back by this very record

  const int64_t slot = slot_of(words + CommandLayout::kSlot, 0, layout.num_slots);
  if (slot >= 0) {
    if (thread == 0) activate_slot(p, slot, words);
    for (int64_t i = thread; i < layout.max_stops; i += kThreads)
      p.stop_tokens[slot * layout.max_stops + i] = record[CommandLayout::kStops + i];
  }
  __syncthreads();  // the record has been read: the host may have it back
  if (thread == 0) {
    *p.num_applied = number + 1;
    record[CommandLayout::kApplied] = done_mark(number);
  }
}

}  // namespace

void apply_commands_cuda(const ApplyCommandsParams& p, Stream stream) {
  launch("apply_commands", apply_commands_kernel, {.grid = 1, .threads = kThreads}, stream, p);
}

}  // namespace specdec
