// NgramIndex: drafts from text seen before. Hash of the last {1, 2, 4, 8} tokens -> the most recent places they stood.
#pragma once

#include <cstddef>
#include <mutex>
#include <optional>

#include "core/check.h"
#include "ngram/layout.h"
#include "tree/tree_rows.h"

namespace specdec {

// Zeroed host memory of a fixed size, touched only where it is used; on huge pages where the kernel grants them.
class ZeroedMemory {
 public:
  explicit ZeroedMemory(size_t bytes);
  ~ZeroedMemory();
  ZeroedMemory(const ZeroedMemory&) = delete;
  ZeroedMemory& operator=(const ZeroedMemory&) = delete;
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_;
};

struct NgramDraftParams {
  NgramView index;
  const int32_t* slots;     // [batch] or null
  const int32_t* seq_lens;  // [batch]
  TreeOut out;
  float* out_scores;       // [batch, nodes]
  int32_t* out_match_len;  // [batch]
  int64_t batch;
  bool chain;
  double min_prob;
  int64_t min_match;
};

void ngram_draft_cpu(const NgramDraftParams& p);

struct NgramStatistics {
  int64_t tokens = 0;     // inserted
  int64_t entries = 0;    // of the table, in use
  int64_t evictions = 0;  // entries that gave way to a new n-gram
  int64_t drafts = 0;     // rows with a stream
  int64_t matches = 0;    // of those, with a candidate
  int64_t drafted = 0;    // nodes beyond the roots
};

// Thread-safe: one lock for each index.
class NgramIndex {
 public:
  NgramIndex(int64_t max_tokens, int64_t num_slots, int64_t max_len);

  void insert(const TensorView& tokens, std::optional<int64_t> slot);
  void extend(const TensorView& tokens, const TensorView& lengths, const OptTensor& slots);
  void release(int64_t slot);
  void draft(const OptTensor& slots, const TensorView& seq_lens, int64_t num_draft_tokens, bool chain, double min_prob,
             int64_t min_match, const TensorView& out_tokens, const TensorView& out_parents,
             const TensorView& out_positions, const TensorView& out_first_child, const TensorView& out_next_sibling,
             const TensorView& out_mask, const TensorView& out_num_nodes, const TensorView& out_scores,
             const TensorView& out_match_len);
  void clear();

  int64_t num_bytes() const { return static_cast<int64_t>(memory_.bytes()); }
  NgramStatistics statistics() const;
  // Of every byte of the table, the store and the slots.
  uint64_t digest() const;

 private:
  void check_length(Check& check, int64_t slot, int64_t length) const;
  void continue_stream(int64_t slot, const int32_t* tokens, int64_t count);
  void append(const int32_t* tokens, int64_t count, NgramSlot& stream);
  NgramBlock* take_block(NgramSlot& stream);
  void update(uint64_t key, uint32_t position);

  struct Layout {
    NgramView view;
    size_t blocks_at, slots_at, bytes;
    Layout(int64_t max_tokens, int64_t num_slots, int64_t max_len);
  };

  const Layout layout_;
  const int64_t max_len_;
  const ZeroedMemory memory_;
  NgramView view_;

  mutable std::mutex mutex_;
  uint32_t next_block_;  // id
  uint32_t streams_ = 0;
  NgramStatistics statistics_;
};

}  // namespace specdec
