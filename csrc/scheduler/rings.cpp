#include "scheduler/rings.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <iterator>

namespace specdec::scheduler {
namespace {

int32_t load(int32_t& word) { return std::atomic_ref(word).load(std::memory_order_acquire); }

// Copies values to `out` and pads them with -1 to `size`.
void write_padded(int32_t* out, std::span<const int32_t> values, int64_t size) {
  std::fill(std::ranges::copy(values, out).out, out + size, -1);
}

}  // namespace

bool CommandRing::is_free(int64_t number) const {
  const int64_t before = number - memory_.depth;
  return before < 0 || load(memory_.row(number)[round::CommandLayout::kApplied]) == round::done_mark(before);
}

void CommandRing::write(int64_t number, const Commands& commands) const {
  using Layout = round::CommandLayout;
  int32_t* record = memory_.row(number);
  write_padded(record + Layout::kSlots, commands.slots, layout_.max_batch);
  write_padded(record + layout_.given_back(), commands.given_back, layout_.num_slots);
  record[Layout::kNumActivated] = static_cast<int32_t>(commands.activated.size());
  int32_t* words = record + layout_.activation(0);
  for (const Request* request : commands.activated) {
    words[Layout::kSlot] = request->slot;
    words[Layout::kSeqLen] = static_cast<int32_t>(request->seq_len());
    words[Layout::kRoot] = request->text.back();
    words[Layout::kRemaining] = static_cast<int32_t>(request->remaining);
    const Sampling& sampling = request->sampling;
    words[Layout::kTemperature] = std::bit_cast<int32_t>(sampling.temperature);
    words[Layout::kTopK] = sampling.top_k;
    words[Layout::kTopP] = std::bit_cast<int32_t>(sampling.top_p);
    words[Layout::kMinP] = std::bit_cast<int32_t>(sampling.min_p);
    const auto seed = static_cast<uint64_t>(sampling.seed);
    words[Layout::kSeed] = static_cast<int32_t>(static_cast<uint32_t>(seed));
    words[Layout::kSeed + 1] = static_cast<int32_t>(static_cast<uint32_t>(seed >> 32));
    words[Layout::kStopsFrom] = request->stops_from;
    words[Layout::kNumLogprobs] = request->num_logprobs;
    words[Layout::kMaxNodes] = request->max_nodes;
    write_padded(words + Layout::kStops, request->stop_tokens, layout_.max_stops);
    words += Layout::kStops + layout_.max_stops;
  }
}

bool ResultRing::is_published(int64_t number) const {
  return load(memory_.row(number)[round::ResultLayout::kNumber]) == round::done_mark(number);
}

RowResult ResultRing::row(int64_t number, int64_t b) const {
  const int32_t *record = memory_.row(number), *words = record + layout_.row(b);
  const int32_t* scores = record + layout_.scores(b, memory_.width);
  return {.num_valid = words[round::ResultLayout::kNumValid],
          .finish_reason = words[round::ResultLayout::kFinishReason],
          .status = words[round::ResultLayout::kStatus],
          .num_nodes = words[round::ResultLayout::kNumNodes],
          .tokens = words + round::ResultLayout::kTokens,
          .logprobs = scores,
          .top_ids = scores + layout_.top_ids(),
          .top_logprobs = scores + layout_.top_logprobs(),
          .top_n = layout_.top_n};
}

LevelResult ResultRing::levels(int64_t number) const {
  const int32_t* record = memory_.row(number);
  LevelResult levels{.requests = record[round::ResultLayout::kNumContinuing], .predicted = {}, .observed = {}};
  for (int64_t r = 0; r < layout_.num_levels; ++r) {
    levels.predicted.push_back(std::bit_cast<float>(record[round::ResultLayout::kPredicted + r]));
    levels.observed.push_back(record[layout_.observed() + r]);
  }
  return levels;
}

void RowResult::add_scores(int64_t count, int64_t num_logprobs, Scores& scores) const {
  const auto as_float = [](int32_t word) { return std::bit_cast<float>(word); };
  std::transform(logprobs, logprobs + count, std::back_inserter(scores.logprobs), as_float);
  for (int64_t j = 0; j < count; ++j) {
    const int32_t *ids = top_ids + j * top_n, *of_ids = top_logprobs + j * top_n;
    scores.top_ids.insert(scores.top_ids.end(), ids, ids + num_logprobs);
    std::transform(of_ids, of_ids + num_logprobs, std::back_inserter(scores.top_logprobs), as_float);
  }
}

int64_t ResultRing::time(int64_t number, int64_t word) const {
  int64_t time;
  std::memcpy(&time, memory_.row(number) + word, sizeof time);
  return time;
}

}  // namespace specdec::scheduler
