#include "ngram/ngram_index.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "core/slots.h"

namespace specdec {
namespace {

constexpr int kPiece = 64;       // tokens hashed and prefetched together
constexpr int64_t kTurn = 1024;  // tokens inserted before others get their turn
constexpr int64_t kMaxTokens = int64_t{1} << 30;
constexpr int64_t kMaxSlots = int64_t{1} << 16;
constexpr int64_t kMaxThreads = 256;
constexpr int64_t kNoRow = -1;

void check_tokens(Check& check, const int32_t* tokens, int64_t count, int64_t row) {
  const int32_t* negative = std::find_if(tokens, tokens + count, [](int32_t t) { return t < 0; });
  if (negative == tokens + count) return;
  const std::string where = " at index " + std::to_string(negative - tokens);
  check.that(false, "tokens",
             "has " + std::to_string(*negative) + where + (row == kNoRow ? "" : " of row " + std::to_string(row)),
             "token ids of 0 or more");
}

NgramSlot empty_stream(uint32_t number, uint32_t scope) {
  return {.request = 0,
          .live = 0,
          .length = 0,
          .stream = number,
          .block = kNgramNone,
          .scope = scope,
          .group = kNgramGlobal,
          .tail = {}};
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

NgramIndex::Config NgramIndex::checked_config(Check check, int64_t max_tokens, std::optional<int64_t> num_blocks,
                                              int64_t num_slots, int64_t max_len, int64_t num_threads) {
  check.range("max_tokens", max_tokens, 1, kMaxTokens);
  check.range("num_slots", num_slots, 1, kMaxSlots);
  check.range("max_len", max_len, 1, INT32_MAX);
  check.range("num_threads", num_threads, 1, kMaxThreads);
  // A block more for each slot: the last block of a running stream is not full.
  const int64_t blocks = num_blocks.value_or((max_tokens + kNgramBlockTokens - 1) / kNgramBlockTokens + num_slots);
  NgramSizes sizes{
      // Two entries a token: text has 1.4 to 2 different n-grams of these orders for each of its tokens.
      .num_sets = static_cast<uint32_t>((2 * max_tokens + kNgramWays - 1) / kNgramWays),
      .num_blocks = static_cast<uint32_t>(blocks),
      .num_slots = static_cast<uint32_t>(num_slots),
      .block_bits = static_cast<uint32_t>(std::bit_width(static_cast<uint32_t>(blocks - 1))),
  };
  return {max_tokens, max_len, num_threads, sizes};
}

NgramIndex::NgramIndex(int64_t max_tokens, int64_t num_slots, int64_t max_len, int64_t num_threads)
    : NgramIndex(checked_config(Check("ngram_index"), max_tokens, {}, num_slots, max_len, num_threads)) {}

NgramIndex::NgramIndex(const Config& config)
    : config_(config),
      memory_(config.sizes.bytes()),
      view_(ngram_view(config.sizes, memory_.data())),
      workers_(config.num_threads) {}

void NgramIndex::clear() {
  const std::lock_guard lock(mutex_);
  std::memset(memory_.data(), 0, memory_.bytes());
}

NgramStatistics NgramIndex::statistics() const {
  const std::lock_guard lock(mutex_);
  return {*view_.header, uint64_t{view_.num_sets} * kNgramWays};
}

uint64_t ngram_checksum(const std::byte* from, const std::byte* to, uint64_t hash) {
  for (uint64_t word; from < to; from += sizeof word) {
    std::memcpy(&word, from, sizeof word);
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 32;
  }
  return hash;
}

uint64_t NgramIndex::digest() const {
  const std::shared_lock lock(mutex_);
  const std::byte* const start = memory_.data();
  const uint64_t hash = ngram_checksum(start, start + offsetof(NgramHeader, drafts), 0);
  return ngram_checksum(start + view_.sets_at(), start + view_.bytes(), hash);
}

// What writes looks at everything first: a refused call changes nothing.

int64_t NgramIndex::begin(int64_t slot, int64_t group, bool is_private, std::optional<int64_t> request) {
  Check check("ngram_begin");
  check.range("slot", slot, 0, view_.num_slots - 1);
  check.range("group", group, 0, INT32_MAX);
  if (request) check.range("request", *request, 0, INT64_MAX);

  const std::lock_guard lock(mutex_);
  NgramSlot& stream = view_.slots[slot];
  stream.live = 0;
  const uint64_t name = request ? static_cast<uint64_t>(*request) + 1 : 0;
  NgramSlot* const end = view_.slots + view_.num_slots;
  NgramSlot* const ended = std::find_if(view_.slots, request ? end : view_.slots, [&](const NgramSlot& s) {
    const bool same_scope = s.group == group && (s.scope >= kNgramPrivate) == is_private;
    return s.request == name && !s.live && same_scope;
  });
  if (!request || ended == end) {
    stream = next_stream(static_cast<uint32_t>(group), is_private);
    stream.request = name;
    return 0;
  }
  std::swap(stream, *ended);  // what the slot held may be resumed as well
  stream.live = 1;
  return stream.length;
}

NgramSlot NgramIndex::next_stream(uint32_t group, bool is_private) {
  uint32_t& number = view_.header->streams;
  number = number % (kNgramPrivate - 1) + 1;  // 0 is the documents' number
  NgramSlot stream = empty_stream(number, is_private ? kNgramPrivate | number : group);
  stream.live = 1;
  stream.group = group;
  return stream;
}

NgramSlot& NgramIndex::running(int64_t slot) {
  NgramSlot& stream = view_.slots[slot];
  if (!stream.live) stream = next_stream(kNgramGlobal, false);
  return stream;
}

void NgramIndex::insert(const TensorView& tokens, std::optional<int64_t> slot, int64_t group) {
  Check check("ngram_insert");
  Dim T{"tokens"};
  check.tensor("tokens", tokens, {T}, kInt32);
  check.require_cpu();
  if (slot) check.range("slot", *slot, 0, view_.num_slots - 1);
  check.range("group", group, 0, INT32_MAX);
  if (slot && group != 0) check.that(false, "group", "is " + std::to_string(group) + " with a slot", "that of `begin`");
  const auto* data = tokens.data<const int32_t>();
  check_tokens(check, data, T, kNoRow);

  std::unique_lock lock(mutex_);
  if (slot) check_length(check, *slot, T);
  NgramSlot document = empty_stream(0, static_cast<uint32_t>(group));
  for (int64_t done = 0; done < T; done += kTurn) {
    if (done > 0) {
      lock.unlock();
      lock.lock();
    }
    append(data + done, std::min<int64_t>(kTurn, T - done), slot ? running(*slot) : document);
  }
}

void NgramIndex::extend(const TensorView& tokens, const TensorView& lengths, const OptTensor& slots,
                        const OptTensor& match_len) {
  Check check("ngram_extend");
  Dim B{"batch"}, W{"accept_width"}, S{"num_slots", view_.num_slots};
  check.tensor("tokens", tokens, {B, W}, kInt32);
  check.require_cpu();
  check.tensor("lengths", lengths, {B}, kInt32);
  check.slots(slots, B, S);
  check.tensor("match_len", match_len, {B}, kInt32);
  const auto* rows = tokens.data<const int32_t>();
  const auto* counts = lengths.data<const int32_t>();
  const auto* row_slots = data_or_null<const int32_t>(slots);
  const auto* matches = data_or_null<const int32_t>(match_len);

  const std::lock_guard lock(mutex_);
  std::vector<int64_t> added(view_.num_slots);  // by the rows so far, which may name a slot twice
  for (int64_t b = 0; b < B; ++b) {
    const int64_t slot = slot_of(row_slots, b, S);
    if (slot < 0) continue;
    const auto refuse = [&](const char* name, int32_t value, const std::string& expected) {
      check.that(false, name, "has " + std::to_string(value) + " in row " + std::to_string(b), expected);
    };
    if (counts[b] < 0 || counts[b] > W) refuse("lengths", counts[b], "0 to accept_width=" + std::to_string(W));
    if (matches && (matches[b] < 0 || matches[b] > kNgramMaxMatch))
      refuse("match_len", matches[b], "0 to " + std::to_string(kNgramMaxMatch));
    check_tokens(check, rows + b * W, counts[b], b);
    added[slot] += counts[b];
    check_length(check, slot, added[slot]);
  }
  for (int64_t b = 0; b < B; ++b) {
    const int64_t slot = slot_of(row_slots, b, S);
    if (slot < 0 || counts[b] == 0) continue;
    append(rows + b * W, counts[b], running(slot));
    if (matches == nullptr) continue;
    ++view_.header->rounds_by_match[matches[b]];
    view_.header->accepted_by_match[matches[b]] += counts[b] - 1;
  }
}

void NgramIndex::check_length(Check& check, int64_t slot, int64_t added) const {
  const NgramSlot& stream = view_.slots[slot];
  const int64_t length = (stream.live ? int64_t{stream.length} : 0) + added;
  if (length <= config_.max_len) return;
  check.that(false, "tokens", "takes slot " + std::to_string(slot) + " to " + std::to_string(length) + " tokens",
             "at most max_len=" + std::to_string(config_.max_len));
}

void NgramIndex::release(int64_t slot) {
  Check("ngram_release").range("slot", slot, 0, view_.num_slots - 1);
  const std::lock_guard lock(mutex_);
  view_.slots[slot].live = 0;
}

NgramBlock* NgramIndex::take_block(NgramSlot& stream) {
  NgramHeader& header = *view_.header;
  const uint32_t index_mask = (1u << view_.block_bits) - 1;
  if (header.blocks_taken == 0) header.next_block = 1u << view_.block_bits;  // turn 1: a zeroed block has turn 0
  const uint32_t id = header.next_block, index = id & index_mask;
  header.next_block = (index + 1 < view_.num_blocks ? id + 1 : (id | index_mask) + 1) & kNgramIdMask;

  NgramBlock& block = view_.blocks[index];
  if (header.blocks_taken++ >= view_.num_blocks)
    header.held -= std::count_if(block.tokens, block.tokens + kNgramBlockTokens, [](int32_t t) { return t >= 0; });
  block.id = id;
  block.owner = stream.stream;
  block.scope = stream.scope;
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

  view_.header->inserted += count;
  view_.header->held += count;
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
      uint64_t hash = ngram_hash_seed(s.scope);
      for (int n = 1, order = 0; n <= kNgramLongest; ++n) {
        hash = ngram_hash_step(hash, window[kNgramLongest + i - n]);
        if (n != 1 << order) continue;
        keys[i][order] = ngram_key(hash, order);
        __builtin_prefetch(view_.sets + ngram_set_of(view_, keys[i][order]), 1);
        ++order;
      }
    }
    // A known n-gram's older positions lie in another line than its tag.
    for (int i = 0; i < piece; ++i)
      for (const uint64_t key : keys[i]) {
        const NgramSet& set = view_.sets[ngram_set_of(view_, key)];
        if (const int way = ngram_find(set, ngram_tag(key)); way >= 0) __builtin_prefetch(set.older[way], 1);
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
#pragma GCC unroll 8
    for (int i = kNgramOlder - 1; i > 0; --i) older[i] = older[i - 1];
    older[0] = set.newest[way];
    set.newest[way] = position;
    if ((set.meta[way] & 0xff) < 0xff) ++set.meta[way];
    return;
  }
  int victim = 0;
  uint32_t oldest = 0;
  for (int w = 0; w < kNgramWays; ++w) {
    if ((set.meta[w] & 0xff) == 0) {
      victim = w;
      break;
    }
    const uint32_t age = ngram_age(view_, set.newest[w], position);
    if (age > oldest) {
      oldest = age;
      victim = w;
    }
  }
  ++((set.meta[victim] & 0xff) == 0 ? view_.header->entries : view_.header->evictions);
  set.meta[victim] = tag | 1;
  set.newest[victim] = position;
}

}  // namespace specdec
