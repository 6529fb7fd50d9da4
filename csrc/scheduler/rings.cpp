#include "scheduler/rings.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>

namespace specdec::scheduler {
namespace {

int32_t load(int32_t& word) { return std::atomic_ref(word).load(std::memory_order_acquire); }

// Copies values to `out` and fills up with -1 to `size`.
void write_padded(int32_t* out, std::span<const int32_t> values, int64_t size) {
  std::fill(std::ranges::copy(values, out).out, out + size, -1);
}

}  // namespace

bool CommandRing::is_free(int64_t number) const {
  const int64_t before = number - memory_.depth;
  return before < 0 || load(memory_.row(number)[CommandLayout::kApplied]) == done_mark(before);
}

void CommandRing::write(int64_t number, const Commands& commands) const {
  using Layout = CommandLayout;
  int32_t* words = memory_.row(number);
  if (const Request* request = commands.activated) {
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
    write_padded(words + Layout::kStops, request->stop_tokens, layout_.max_stops);
  } else {
    words[Layout::kSlot] = -1;
  }
  write_padded(words + layout_.slots(), commands.slots, layout_.max_batch);
  write_padded(words + layout_.given_back(), commands.given_back, layout_.num_slots);
}

bool ResultRing::is_published(int64_t number) const {
  return load(memory_.row(number)[ResultLayout::kNumber]) == done_mark(number);
}

RowResult ResultRing::row(int64_t number, int64_t b) const {
  const int32_t* words = memory_.row(number) + layout_.row(b);
  return {words[ResultLayout::kOutLen],   words[ResultLayout::kFinishReason], words[ResultLayout::kStatus],
          words[ResultLayout::kNumNodes], words + ResultLayout::kTokens,      words + layout_.path()};
}

int64_t ResultRing::time(int64_t number, int64_t word) const {
  int64_t time;
  std::memcpy(&time, memory_.row(number) + word, sizeof time);
  return time;
}

}  // namespace specdec::scheduler
