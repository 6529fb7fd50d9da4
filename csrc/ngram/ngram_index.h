// NgramIndex: drafts from text seen before. Hash of the last {1, 2, 4, 8} tokens -> the most recent places they stood.
//
// All state is one block of bytes (layout.h). Calls from several threads are safe: drafts run side by side, and what
// writes does so alone; a long insert lets others in between. Equal bytes need an order of the writing calls, so one
// thread should make them.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <shared_mutex>

#include "core/check.h"
#include "core/worker_pool.h"
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
  NgramWeights weights;
};

// Drafts the rows from `begin` to `end`.
void ngram_draft_cpu(const NgramDraftParams& p, int64_t begin, int64_t end);

// Of bytes whose number is a multiple of 8, on from `hash`.
uint64_t ngram_checksum(const std::byte* from, const std::byte* to, uint64_t hash);

struct NgramStatistics {
  NgramHeader header;
  uint64_t capacity;  // entries of the table
};

class NgramIndex {
 public:
  NgramIndex(int64_t max_tokens, int64_t num_slots, int64_t max_len, int64_t num_threads);
  // From what `save` wrote. No stream is running then.
  static std::unique_ptr<NgramIndex> load(int fd, std::optional<int64_t> num_slots, std::optional<int64_t> max_len,
                                          int64_t num_threads);
  // Returns 0, or what errno said.
  int save(int fd) const;

  // How many tokens of its stream the index holds: 0, or where the stream of the same request had ended.
  int64_t begin(int64_t slot, int64_t group, bool is_private, std::optional<int64_t> request);
  void insert(const TensorView& tokens, std::optional<int64_t> slot, int64_t group);
  void extend(const TensorView& tokens, const TensorView& lengths, const OptTensor& slots, const OptTensor& match_len);
  void release(int64_t slot);
  void draft(const OptTensor& slots, const TensorView& seq_lens, int64_t num_draft_tokens, bool chain, double min_prob,
             int64_t min_match, double own_weight, double group_weight, double global_weight, double recency,
             const TensorView& out_tokens, const TensorView& out_parents, const TensorView& out_positions,
             const TensorView& out_first_child, const TensorView& out_next_sibling, const TensorView& out_mask,
             const TensorView& out_num_nodes, const TensorView& out_scores, const TensorView& out_match_len);
  void clear();

  int64_t num_bytes() const { return static_cast<int64_t>(memory_.bytes()); }
  NgramStatistics statistics() const;
  // Of every byte but the counts of what was drafted.
  uint64_t digest() const;

 private:
  struct Config {
    int64_t max_tokens, max_len, num_threads;
    NgramSizes sizes;
  };
  explicit NgramIndex(const Config& config);
  static Config checked_config(Check check, int64_t max_tokens, std::optional<int64_t> num_blocks, int64_t num_slots,
                               int64_t max_len, int64_t num_threads);

  void check_length(Check& check, int64_t slot, int64_t added) const;
  NgramSlot next_stream(uint32_t group, bool is_private);
  NgramSlot& running(int64_t slot);  // its stream, or a new one that everybody sees
  void append(const int32_t* tokens, int64_t count, NgramSlot& stream);
  NgramBlock* take_block(NgramSlot& stream);
  void update(uint64_t key, uint32_t position);

  const Config config_;
  const ZeroedMemory memory_;
  const NgramView view_;
  mutable std::shared_mutex mutex_;
  mutable WorkerPool workers_;
};

}  // namespace specdec
