// NgramIndex: argument checks, locking, writes, statistics (ngram_index.h).
#include "ngram/ngram_index.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#include "core/errors.h"
#include "core/slots.h"
#include "ngram/append.h"
#include "ngram/bulk_append.h"
#include "ngram/ngram_insert.h"

namespace specdec::ngram {
namespace {

constexpr int kPiece = 64;       // tokens hashed and prefetched together
constexpr int64_t kTurn = 1024;  // tokens inserted per lock; bulk inserts take more
constexpr int64_t kMaxTokens = int64_t{1} << 30;
constexpr int64_t kMaxSlots = int64_t{1} << 16;
constexpr int64_t kMaxThreads = 256;
constexpr int64_t kNoRow = -1;

void check_tokens(Check& check, const int32_t* tokens, int64_t count, int64_t row) {
  const int32_t* negative = std::find_if(tokens, tokens + count, [](int32_t t) { return t < 0; });
  if (negative == tokens + count) return;
  const std::string of_row = row == kNoRow ? "" : " of row " + std::to_string(row);
  check.that(false, "tokens", {"has ", *negative, " at index ", negative - tokens, of_row}, "token ids of 0 or more");
}

// GPU-only operations. Builds without kernels cannot create an index on a GPU.
#ifdef SPECDEC_WITH_CUDA
void zero(const Check& check, void* memory, size_t bytes) {
  DeviceGuard guard(check.device().device_id);
  ngram_zero_cuda(memory, bytes, static_cast<Stream>(check.stream({})));
}
void copy(const Check& check, void* to, const void* from, size_t bytes, bool wait) {
  DeviceGuard guard(check.device().device_id);
  ngram_copy_cuda(to, from, bytes, wait, static_cast<Stream>(check.stream({})));
}
#else
void zero(const Check& check, void*, size_t) { throw_no_cuda(check); }
void copy(const Check& check, void*, const void*, size_t, bool) { throw_no_cuda(check); }
#endif

size_t work_at(const NgramSizes& sizes) { return (sizes.bytes() + 255) / 256 * 256; }

}  // namespace

ZeroedMemory::ZeroedMemory(size_t bytes) : bytes_(bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(p, bytes, MADV_HUGEPAGE);  // random access causes fewer TLB misses; failure costs only speed
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
  // One more block per slot: the last block of a running stream is not full.
  const int64_t blocks = num_blocks.value_or((max_tokens + kNgramBlockTokens - 1) / kNgramBlockTokens + num_slots);
  NgramSizes sizes{
      // One entry per token. Text has 1.4 to 2 different n-grams of these orders per token, and most never recur.
      .num_sets = static_cast<uint32_t>((max_tokens + kNgramWays - 1) / kNgramWays),
      .num_blocks = static_cast<uint32_t>(blocks),
      .num_slots = static_cast<uint32_t>(num_slots),
      .block_bits = static_cast<uint32_t>(std::bit_width(static_cast<uint32_t>(blocks - 1))),
  };
  return {max_tokens, max_len, num_threads, sizes};
}

NgramIndex::NgramIndex(int64_t max_tokens, int64_t num_slots, int64_t max_len, int64_t num_threads,
                       const OptTensor& memory)
    : NgramIndex(checked_config(Check("ngram_index"), max_tokens, {}, num_slots, max_len, num_threads), memory) {
  if (memory) zero(index_check("ngram_index"), device_.data<void>(), config_.sizes.bytes());
}

NgramIndex::NgramIndex(const Config& config, const OptTensor& memory)
    : config_(config),
      host_(memory ? nullptr : std::make_unique<ZeroedMemory>(config.sizes.bytes())),
      device_(memory.value_or(TensorView{})),
      view_(ngram_view(config.sizes, memory ? memory->data<void>() : host_->data())),
      workers_(memory ? 1 : config.num_threads) {
  if (!memory) return;
  Check check("ngram_index");
  Dim words{"words", device_words()};
  check.output("memory", *memory, {words}, kInt64);
  check.that(check.on_cuda(), "memory", "is on the cpu", "a cuda tensor");
  check.that(reinterpret_cast<uintptr_t>(device_.data<void>()) % 256 == 0, "memory", "starts anywhere",
             "a multiple of 256");
  zero(check, device_.data<std::byte>() + work_at(view_), kNgramWorkBytes);
  static int64_t no_size = 0;  // replaces the shape, which belongs to the caller
  device_.dl.shape = &no_size;
  device_.dl.strides = nullptr;
}

int64_t NgramIndex::device_words() const {
  return static_cast<int64_t>((work_at(config_.sizes) + kNgramWorkBytes) / sizeof(int64_t));
}

Check NgramIndex::index_check(const char* op) const {
  Check check(op);
  if (on_cuda()) check.tensor("the index", device_, {0}, kInt64);
  return check;
}

void NgramIndex::require_own_device(const Check& check) const {
  if (!on_cuda()) check.require_cpu();
}

void NgramIndex::read(void* to, const void* from, size_t bytes, const char* op) const {
  if (on_cuda())
    ngram::copy(index_check(op), to, from, bytes, true);
  else
    std::memcpy(to, from, bytes);
}

std::unique_ptr<NgramIndex> NgramIndex::copy(const OptTensor& memory) const {
  std::unique_ptr<NgramIndex> other(new NgramIndex(config_, memory));  // before the lock, as ForkMutex requires
  const std::lock_guard lock(mutex_);
  const size_t bytes = config_.sizes.bytes();
  if (memory)
    ngram::copy(other->index_check("ngram_copy"), other->view_.header, view_.header, bytes, true);
  else
    read(other->view_.header, view_.header, bytes, "ngram_copy");
  return other;
}

void NgramIndex::clear() {
  const std::lock_guard lock(mutex_);
  if (on_cuda())
    zero(index_check("ngram_clear"), view_.header, config_.sizes.bytes());
  else
    std::memset(view_.header, 0, config_.sizes.bytes());
}

NgramStatistics NgramIndex::statistics() const {
  const std::lock_guard lock(mutex_);
  NgramStatistics statistics{{}, uint64_t{view_.num_sets} * kNgramWays};
  read(&statistics.header, view_.header, sizeof(NgramHeader), "ngram_statistics");
  return statistics;
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
  if (on_cuda()) return copy({})->digest();
  const std::lock_guard lock(mutex_);  // drafts record in their slots what the next one follows
  const std::byte* const start = host_->data();
  const uint64_t hash = ngram_checksum(start, start + offsetof(NgramHeader, drafts), 0);
  return ngram_checksum(start + view_.sets_at(), start + view_.bytes(), hash);
}

// Writes check all arguments first: a rejected call changes nothing.

void NgramIndex::begin(int64_t slot, int64_t group, bool is_private, std::optional<int64_t> request) {
  Check check = index_check("ngram_begin");
  check.range("slot", slot, 0, view_.num_slots - 1);
  check.range("group", group, 0, INT32_MAX);
  if (request) check.range("request", *request, 0, INT64_MAX);
  const NgramBeginParams params{
      .index = view_,
      .slot = slot,
      .name = request ? static_cast<uint64_t>(*request) + 1 : 0,
      .group = static_cast<uint32_t>(group),
      .is_private = is_private,
  };
  const std::lock_guard lock(mutex_);
  SD_DISPATCH(check, CallStream{}, ngram_begin, params);
}

void ngram_begin_cpu(const NgramBeginParams& p) {
  const NgramView& v = p.index;
  int64_t ended = p.name == 0 ? v.num_slots : 0;
  const auto continues = [&](const NgramSlot& s) {
    return ngram_resumes(s, p.name, p.group, p.is_private) && (!s.live || &s == v.slots + p.slot);
  };
  while (ended < v.num_slots && !continues(v.slots[ended])) ++ended;
  ngram_begin(v, p.slot, ended < v.num_slots ? ended : -1, p.name, p.group, p.is_private);
}

int64_t NgramIndex::length(int64_t slot) const {
  Check("ngram_length").range("slot", slot, 0, view_.num_slots - 1);
  const std::lock_guard lock(mutex_);
  NgramSlot stream;
  read(&stream, view_.slots + slot, sizeof stream, "ngram_length");
  return stream.live ? stream.length : 0;
}

void NgramIndex::insert(const TensorView& tokens, std::optional<int64_t> slot, int64_t group,
                        std::optional<int64_t> start) {
  Check check = index_check("ngram_insert");
  Dim T{"tokens"};
  check.tensor("tokens", tokens, {T}, kInt32);
  require_own_device(check);
  if (slot) check.range("slot", *slot, 0, view_.num_slots - 1);
  check.range("group", group, 0, INT32_MAX);
  check.that(!slot || group == 0, "group", {"is ", group, " with a slot"}, "that of `begin`");
  if (start) check.range("start", *start, 0, slot ? config_.max_len : 0);
  const auto* data = tokens.data<const int32_t>();
  const auto scope = static_cast<uint32_t>(group);
  if (on_cuda())
    insert_on_device(check, data, T, slot, scope, start.value_or(-1));
  else
    insert_on_host(check, data, T, slot, scope, start.value_or(-1));
}

void NgramIndex::insert_on_host(Check& check, const int32_t* tokens, int64_t count, std::optional<int64_t> slot,
                                uint32_t group, int64_t start) {
  check_tokens(check, tokens, count, kNoRow);
  std::unique_lock lock(mutex_);
  if (slot && start >= 0) {
    const NgramSlot& stream = view_.slots[*slot];
    const int64_t length = stream.live ? stream.length : 0;
    check.range("start", start, 0, length);
    const int64_t held = std::min(length - start, count);
    tokens += held;
    count -= held;
  }
  if (slot) check_length(check, *slot, count);
  NgramSlot document = ngram_empty_stream(0, group);
  const bool in_bulk = config_.num_threads > 1 && count > kTurn;
  std::optional<NgramBulk> bulk;
  if (in_bulk) bulk.emplace();
  const int64_t most = in_bulk ? NgramBulk::kTokens : kTurn;
  for (int64_t done = 0; done < count; done += most) {
    if (done > 0) {
      lock.unlock();
      lock.lock();
    }
    const int64_t turn = std::min(most, count - done);
    NgramSlot& stream = slot ? ngram_running_stream(view_, *slot) : document;
    if (in_bulk)
      bulk->append(view_, tokens + done, static_cast<int>(turn), stream, workers_);
    else
      ngram_append<kPiece>(view_, tokens + done, turn, stream);
  }
}

void NgramIndex::insert_on_device(const Check& check, const int32_t* tokens, int64_t count, std::optional<int64_t> slot,
                                  uint32_t group, int64_t start) const {
  const std::lock_guard lock(mutex_);
  for (int64_t done = 0; done < count; done += kNgramMaxTokens) {
    [[maybe_unused]] const NgramInsertParams params{
        .index = view_,
        .work = device_.data<std::byte>() + work_at(view_),
        .max_len = config_.max_len,
        .tokens = tokens + done,
        .lengths = nullptr,
        .slots = nullptr,
        .match_len = nullptr,
        .rows = 1,
        .width = std::min(kNgramMaxTokens, count - done),
        .first_slot = slot.value_or(0),
        .is_document = !slot,
        .is_first = done == 0,
        .group = group,
        .start = slot && start >= 0 ? start + done : -1,
        .left = count - done,
    };
    SD_RUN_CUDA(check, CallStream{}, ngram_insert, params)
  }
}

void NgramIndex::extend(const TensorView& tokens, const TensorView& num_valid, const OptTensor& slots,
                        const OptTensor& match_len) {
  Check check = index_check("ngram_extend");
  Dim B{"batch"}, W{"accept_width"}, S{"num_slots", view_.num_slots};
  check.tensor("tokens", tokens, {B, W}, kInt32);
  require_own_device(check);
  check.tensor("num_valid", num_valid, {B}, kInt32);
  check.slots(slots, B, S);
  check.tensor("match_len", match_len, {B}, kInt32);
  const auto* rows = tokens.data<const int32_t>();
  const auto* counts = num_valid.data<const int32_t>();
  const auto* row_slots = data_or_null<const int32_t>(slots);
  const auto* matches = data_or_null<const int32_t>(match_len);

  const std::lock_guard lock(mutex_);
  if (on_cuda()) {
    check.that(W <= kNgramMaxTokens, "tokens", {"has rows of ", W}, {"at most ", kNgramMaxTokens});
    const int64_t rows_together = W > 0 ? std::min(kNgramMaxRows, kNgramMaxTokens / W) : 0;
    for (int64_t b = 0; W > 0 && b < B; b += rows_together) {
      [[maybe_unused]] const NgramInsertParams params{
          .index = view_,
          .work = device_.data<std::byte>() + work_at(view_),
          .max_len = config_.max_len,
          .tokens = rows + b * W,
          .lengths = counts + b,
          .slots = row_slots ? row_slots + b : nullptr,
          .match_len = matches ? matches + b : nullptr,
          .rows = std::min(rows_together, B - b),
          .width = W,
          .first_slot = row_slots ? 0 : b,
          .is_document = false,
          .is_first = false,
          .group = kNgramGlobalScope,
          .start = -1,
          .left = 0,
      };
      SD_RUN_CUDA(check, CallStream{}, ngram_insert, params)
    }
    return;
  }
  std::vector<int64_t> added(view_.num_slots);  // by the rows so far, which may repeat a slot
  for (int64_t b = 0; b < B; ++b) {
    const int64_t slot = slot_of(row_slots, b, S);
    if (slot < 0) continue;
    check.that(counts[b] >= 0 && counts[b] <= W, "num_valid", {"has ", counts[b], " in row ", b},
               {"0 to accept_width=", W});
    if (matches)
      check.that(matches[b] >= 0 && matches[b] <= kNgramMaxMatch, "match_len", {"has ", matches[b], " in row ", b},
                 {"0 to ", kNgramMaxMatch});
    check_tokens(check, rows + b * W, counts[b], b);
    added[slot] += counts[b];
    check_length(check, slot, added[slot]);
  }
  for (int64_t b = 0; b < B; ++b) {
    const int64_t slot = slot_of(row_slots, b, S);
    if (slot < 0 || counts[b] == 0) continue;
    ngram_append<kPiece>(view_, rows + b * W, counts[b], ngram_running_stream(view_, slot));
    if (matches == nullptr) continue;
    ++view_.header->rounds_by_match[matches[b]];
    view_.header->accepted_by_match[matches[b]] += counts[b] - 1;
  }
}

void NgramIndex::check_length(Check& check, int64_t slot, int64_t added) const {
  const NgramSlot& stream = view_.slots[slot];
  const int64_t length = (stream.live ? int64_t{stream.length} : 0) + added;
  check.that(length <= config_.max_len, "tokens", {"takes slot ", slot, " to ", length, " tokens"},
             {"at most max_len=", config_.max_len});
}

void NgramIndex::release(int64_t slot) {
  Check check = index_check("ngram_release");
  check.range("slot", slot, 0, view_.num_slots - 1);
  const std::lock_guard lock(mutex_);
  const NgramReleaseParams params{view_, slot};
  SD_DISPATCH(check, CallStream{}, ngram_release, params);
}

void ngram_release_cpu(const NgramReleaseParams& p) { p.index.slots[p.slot].live = 0; }

}  // namespace specdec::ngram
