#include "ngram/ngram_index.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <vector>

#include "core/slots.h"

namespace specdec {
namespace {

constexpr int kPiece = 64;  // tokens hashed and prefetched together
constexpr int64_t kMaxTokens = int64_t{1} << 30;
constexpr int64_t kMaxSlots = int64_t{1} << 16;
constexpr int64_t kNoRow = -1;

void check_tokens(Check& check, const int32_t* tokens, int64_t count, int64_t row) {
  const int32_t* negative = std::find_if(tokens, tokens + count, [](int32_t t) { return t < 0; });
  if (negative == tokens + count) return;
  const std::string where = " at index " + std::to_string(negative - tokens);
  check.that(false, "tokens",
             "has " + std::to_string(*negative) + where + (row == kNoRow ? "" : " of row " + std::to_string(row)),
             "token ids of 0 or more");
}

NgramSlot empty_stream(uint32_t number) {
  return {.length = 0, .stream = number, .block = kNgramNone, .unused = 0, .tail = {}};
}

}  // namespace

ZeroedMemory::ZeroedMemory(size_t bytes) : bytes_(bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(p, bytes, MADV_HUGEPAGE);  // random access misses the TLB less; a refusal costs only speed
#endif
  data_ = static_cast<std::byte*>(p);
}

ZeroedMemory::~ZeroedMemory() { munmap(data_, bytes_); }

NgramIndex::Layout::Layout(int64_t max_tokens, int64_t num_slots, int64_t max_len) : view{} {
  Check check("ngram_index");
  check.range("max_tokens", max_tokens, 1, kMaxTokens);
  check.range("num_slots", num_slots, 1, kMaxSlots);
  check.range("max_len", max_len, 1, INT32_MAX);
  // Two entries a token: text has 1.4 to 2 different n-grams of these orders for each of its tokens.
  view.num_sets = static_cast<uint32_t>((2 * max_tokens + kNgramWays - 1) / kNgramWays);
  // A block more for each slot: the last block of a running stream is not full.
  view.num_blocks = static_cast<uint32_t>((max_tokens + kNgramBlockTokens - 1) / kNgramBlockTokens + num_slots);
  view.num_slots = static_cast<uint32_t>(num_slots);
  view.block_bits = std::bit_width(view.num_blocks - 1);
  blocks_at = view.num_sets * sizeof(NgramSet);
  slots_at = blocks_at + view.num_blocks * sizeof(NgramBlock);
  bytes = slots_at + view.num_slots * sizeof(NgramSlot);
}

NgramIndex::NgramIndex(int64_t max_tokens, int64_t num_slots, int64_t max_len)
    : layout_(max_tokens, num_slots, max_len), max_len_(max_len), memory_(layout_.bytes), view_(layout_.view) {
  view_.sets = reinterpret_cast<NgramSet*>(memory_.data());
  view_.blocks = reinterpret_cast<NgramBlock*>(memory_.data() + layout_.blocks_at);
  view_.slots = reinterpret_cast<NgramSlot*>(memory_.data() + layout_.slots_at);
  next_block_ = 1u << view_.block_bits;  // turn 1: a zeroed block has an id of turn 0
}

void NgramIndex::clear() {
  const std::lock_guard lock(mutex_);
  std::memset(memory_.data(), 0, memory_.bytes());
  next_block_ = 1u << view_.block_bits;
  streams_ = 0;
  statistics_ = {};
}

NgramStatistics NgramIndex::statistics() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

uint64_t NgramIndex::digest() const {
  const std::lock_guard lock(mutex_);
  uint64_t hash = 0;
  for (size_t i = 0; i < memory_.bytes(); i += 4) {
    int32_t word;
    std::memcpy(&word, memory_.data() + i, 4);
    hash = ngram_hash_step(hash, word);
  }
  return hash;
}

// insert and extend look at everything before they write anything: a refused call changes nothing.
void NgramIndex::insert(const TensorView& tokens, std::optional<int64_t> slot) {
  Check check("ngram_insert");
  Dim T{"tokens"};
  check.tensor("tokens", tokens, {T}, kInt32);
  check.require_cpu();
  if (slot) check.range("slot", *slot, 0, view_.num_slots - 1);
  const auto* data = tokens.data<const int32_t>();
  check_tokens(check, data, T, kNoRow);

  const std::lock_guard lock(mutex_);
  if (slot) {
    check_length(check, *slot, view_.slots[*slot].length + T);
    continue_stream(*slot, data, T);
  } else {
    NgramSlot document = empty_stream(0);
    append(data, T, document);
  }
}

void NgramIndex::extend(const TensorView& tokens, const TensorView& lengths, const OptTensor& slots) {
  Check check("ngram_extend");
  Dim B{"batch"}, W{"accept_width"}, S{"num_slots", view_.num_slots};
  check.tensor("tokens", tokens, {B, W}, kInt32);
  check.require_cpu();
  check.tensor("lengths", lengths, {B}, kInt32);
  check.slots(slots, B, S);
  const auto* rows = tokens.data<const int32_t>();
  const auto* counts = lengths.data<const int32_t>();
  const auto* row_slots = data_or_null<const int32_t>(slots);

  const std::lock_guard lock(mutex_);
  std::vector<int64_t> added(view_.num_slots);  // by the rows so far, which may name a slot twice
  for (int64_t b = 0; b < B; ++b) {
    const int64_t slot = slot_of(row_slots, b, S);
    if (slot < 0) continue;
    if (counts[b] < 0 || counts[b] > W)
      check.that(false, "lengths", "has " + std::to_string(counts[b]) + " in row " + std::to_string(b),
                 "0 to accept_width=" + std::to_string(W));
    check_tokens(check, rows + b * W, counts[b], b);
    added[slot] += counts[b];
    check_length(check, slot, view_.slots[slot].length + added[slot]);
  }
  for (int64_t b = 0; b < B; ++b)
    if (const int64_t slot = slot_of(row_slots, b, S); slot >= 0) continue_stream(slot, rows + b * W, counts[b]);
}

void NgramIndex::check_length(Check& check, int64_t slot, int64_t length) const {
  if (length <= max_len_) return;
  check.that(false, "tokens", "takes slot " + std::to_string(slot) + " to " + std::to_string(length) + " tokens",
             "at most max_len=" + std::to_string(max_len_));
}

void NgramIndex::continue_stream(int64_t slot, const int32_t* tokens, int64_t count) {
  if (count == 0) return;
  NgramSlot& stream = view_.slots[slot];
  if (stream.length == 0) {
    if (++streams_ == 0) ++streams_;  // 0 is the documents' number
    stream = empty_stream(streams_);
  }
  append(tokens, count, stream);
}

void NgramIndex::release(int64_t slot) {
  Check("ngram_release").range("slot", slot, 0, view_.num_slots - 1);
  const std::lock_guard lock(mutex_);
  view_.slots[slot] = NgramSlot{};
}

NgramBlock* NgramIndex::take_block(NgramSlot& stream) {
  const uint32_t id = next_block_, index_mask = (1u << view_.block_bits) - 1;
  const uint32_t index = id & index_mask;
  next_block_ = (index + 1 < view_.num_blocks ? id + 1 : (id | index_mask) + 1) & kNgramIdMask;

  NgramBlock& block = view_.blocks[index];
  block.id = id;
  block.owner = stream.stream;
  block.prev = block.next = kNgramNone;
  std::fill_n(block.tokens, kNgramBlockTokens, -1);
  // After the overwriting, which may have hit the stream's own last block.
  NgramBlock* last = ngram_block(view_, stream.block);
  if (last && last->owner == stream.stream) {
    block.prev = stream.block;
    last->next = id;
  }
  stream.block = id;
  return &block;
}

// Writes the tokens and indexes each under the n-grams before it: a position enters the table when its token is known,
// so the end of a stream, which has no continuation, is never a candidate.
void NgramIndex::append(const int32_t* tokens, int64_t count, NgramSlot& s) {
  int32_t window[kNgramLongest + kPiece];  // the piece, behind the tokens before it
  uint32_t position[kPiece];
  uint64_t keys[kPiece][kNgramOrders];

  statistics_.tokens += count;
  for (int64_t done = 0; done < count; done += kPiece) {
    const int piece = static_cast<int>(std::min<int64_t>(kPiece, count - done));
    const uint32_t start = s.length;
    for (int j = 1; j <= kNgramLongest; ++j) window[kNgramLongest - j] = s.tail[(start - j) % kNgramMaxMatch];

    uint32_t offset = start % kNgramBlockTokens;
    NgramBlock* last = ngram_block(view_, s.block);
    NgramBlock* block = last && last->owner == s.stream && offset > 0 ? last : nullptr;
    for (int i = 0; i < piece; ++i) {
      if (block == nullptr) block = take_block(s);
      const int32_t token = tokens[done + i];
      block->tokens[offset] = window[kNgramLongest + i] = s.tail[(start + i) % kNgramMaxMatch] = token;
      position[i] = s.block << kNgramOffsetBits | offset;
      if (++offset == kNgramBlockTokens) {
        offset = 0;
        block = nullptr;
      }
    }
    s.length += piece;

    for (int i = 0; i < piece; ++i) {
      uint64_t hash = 0;
      for (int n = 1, order = 0; n <= kNgramLongest; ++n) {
        hash = ngram_hash_step(hash, window[kNgramLongest + i - n]);
        if (n != 1 << order) continue;
        keys[i][order] = ngram_key(hash, order);
        __builtin_prefetch(view_.sets + ngram_set_of(view_, keys[i][order]), 1);
        ++order;
      }
    }
    for (int i = 0; i < piece; ++i)
      for (int order = 0; order < kNgramOrders && start + i >= 1u << order; ++order)
        update(keys[i][order], position[i]);
  }
}

// A known n-gram takes the position as its newest. A new one takes the first empty entry of its set, else the one whose
// newest position is oldest (the first of those).
void NgramIndex::update(uint64_t key, uint32_t position) {
  NgramSet& set = view_.sets[ngram_set_of(view_, key)];
  const uint32_t tag = ngram_tag(key);
  if (const int way = ngram_find(set, tag); way >= 0) {
    uint32_t* older = set.older[way];
    std::memmove(older + 1, older, (kNgramOlder - 1) * sizeof *older);
    older[0] = set.newest[way];
    set.newest[way] = position;
    if ((set.meta[way] & 0xff) < 0xff) ++set.meta[way];
    return;
  }
  const uint32_t end = next_block_ << kNgramOffsetBits;  // ages are counted back from here
  int victim = 0;
  uint32_t oldest = 0;
  for (int w = 0; w < kNgramWays; ++w) {
    if ((set.meta[w] & 0xff) == 0) {
      victim = w;
      break;
    }
    const uint32_t age = end - set.newest[w];
    if (age > oldest) {
      oldest = age;
      victim = w;
    }
  }
  ++((set.meta[victim] & 0xff) == 0 ? statistics_.entries : statistics_.evictions);
  set.meta[victim] = tag | 1;
  set.newest[victim] = position;
}

}  // namespace specdec
