#include "round/apply_commands.h"

#include <algorithm>
#include <limits>

#include "round/clock.h"
#include "round/shared_memory.h"

namespace specdec::round {

void apply_commands(CallStream stream, const TensorView& commands, const TensorView& num_applied,
                    const TensorView& started_at, const TensorView& seq_lens, const TensorView& root_tokens,
                    const TensorView& remaining, const TensorView& stop_tokens, const TensorView& temperature,
                    const TensorView& top_k, const TensorView& top_p, const TensorView& min_p, const TensorView& seeds,
                    const TensorView& stops_from, const TensorView& num_logprobs, const TensorView& max_nodes,
                    const TensorView& finish_reasons, const TensorView& status, const TensorView& out_slots,
                    const TensorView& out_given_back) {
  Check check("apply_commands");
  Dim R{"num_slots"}, M{"max_stops"}, B{"max_batch"}, D{"depth"}, W{"words"};
  check.output("num_applied", num_applied, {1}, kInt64);
  check.output("started_at", started_at, {1}, kInt64);
  check.output("seq_lens", seq_lens, {R}, kInt32);
  check.output("root_tokens", root_tokens, {R}, kInt32);
  check.output("remaining", remaining, {R}, kInt32);
  check.output("stop_tokens", stop_tokens, {R, M}, kInt32);
  check.output("temperature", temperature, {R}, kFloat32);
  check.output("top_k", top_k, {R}, kInt32);
  check.output("top_p", top_p, {R}, kFloat32);
  check.output("min_p", min_p, {R}, kFloat32);
  check.output("seeds", seeds, {R}, kInt64);
  check.output("stops_from", stops_from, {R}, kInt32);
  check.output("num_logprobs", num_logprobs, {R}, kInt32);
  check.output("max_nodes", max_nodes, {R}, kInt32);
  check.output("finish_reasons", finish_reasons, {R}, kInt32);
  check.output("status", status, {R}, kInt32);
  check.output("out_slots", out_slots, {B}, kInt32);
  check.output("out_given_back", out_given_back, {R}, kInt32);
  const CommandLayout layout{.max_batch = B, .num_slots = R, .max_stops = M};
  W.value = layout.words();
  Check ring("apply_commands");
  ring.output("commands", commands, {D, W}, kInt32);
  ring.range("depth", D, 1, std::numeric_limits<int32_t>::max());

  const ApplyCommandsParams params{
      .commands = shared_words(check, "commands", commands),
      .num_applied = num_applied.data<int64_t>(),
      .started_at = started_at.data<int64_t>(),
      .seq_lens = seq_lens.data<int32_t>(),
      .root_tokens = root_tokens.data<int32_t>(),
      .remaining = remaining.data<int32_t>(),
      .stop_tokens = stop_tokens.data<int32_t>(),
      .temperature = temperature.data<float>(),
      .top_k = top_k.data<int32_t>(),
      .top_p = top_p.data<float>(),
      .min_p = min_p.data<float>(),
      .seeds = seeds.data<int64_t>(),
      .stops_from = stops_from.data<int32_t>(),
      .num_logprobs = num_logprobs.data<int32_t>(),
      .max_nodes = max_nodes.data<int32_t>(),
      .finish_reasons = finish_reasons.data<int32_t>(),
      .status = status.data<int32_t>(),
      .slots = out_slots.data<int32_t>(),
      .given_back = out_given_back.data<int32_t>(),
      .depth = D,
      .layout = layout,
  };
  SD_DISPATCH(check, stream, apply_commands, params);
}

void apply_commands_cpu(const ApplyCommandsParams& p) {
  const CommandLayout& layout = p.layout;
  const int64_t number = *p.num_applied;
  int32_t* record = p.commands + ring_row(number, p.depth) * layout.words();
  *p.started_at = nanoseconds();

  std::copy_n(record + CommandLayout::kSlots, layout.max_batch, p.slots);
  std::copy_n(record + layout.given_back(), layout.num_slots, p.given_back);
  for (int64_t i = 0; i < layout.num_slots; ++i) {
    const int64_t slot = slot_of(p.given_back, i, layout.num_slots);
    if (slot >= 0) reset_slot(p, slot);
  }
  const int64_t num_activated = std::min<int64_t>(record[CommandLayout::kNumActivated], layout.num_slots);
  for (int64_t i = 0; i < num_activated; ++i) {
    const int32_t* words = record + layout.activation(i);
    const int64_t slot = slot_of(words + CommandLayout::kSlot, 0, layout.num_slots);
    if (slot < 0) continue;
    activate_slot(p, slot, words);
    std::copy_n(words + CommandLayout::kStops, layout.max_stops, p.stop_tokens + slot * layout.max_stops);
  }
  *p.num_applied = number + 1;
  record[CommandLayout::kApplied] = done_mark(number);
}

}  // namespace specdec::round
