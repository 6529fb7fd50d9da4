// NgramIndex: drafts from text seen before. The hash of the last {1, 2, 4, 8} tokens leads to their most recent
// occurrences.
//
// All state is one block of bytes (layout.h), in host memory of its own or in a caller's GPU memory. On the host, calls
// from several threads are safe: drafts run concurrently, writes run exclusively, and a long insert yields to others in
// between. Reproducible bytes need a fixed order of the writing calls and of a slot's drafts (a draft records in the
// slot what the next one follows), so one thread should make them. On a GPU, calls are ordered by their streams, and
// calls that return a number wait.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include "core/dispatch.h"
#include "core/fork_mutex.h"
#include "core/worker_pool.h"
#include "ngram/layout.h"

namespace specdec::ngram {

// Zeroed host memory of a fixed size, committed on first use; on huge pages if the kernel grants them.
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

// Return the checksum of bytes, a multiple of 8, continued from `hash`.
uint64_t ngram_checksum(const std::byte* from, const std::byte* to, uint64_t hash);

struct NgramStatistics {
  NgramHeader header;
  uint64_t capacity;  // table entries
};

class NgramIndex {
 public:
  NgramIndex(int64_t max_tokens, int64_t num_slots, int64_t max_len, int64_t num_threads, const OptTensor& memory);
  // Return the int64 words of GPU memory that an index of this size needs: the index and the workspace of writes.
  int64_t device_words() const;
  // Copy the index, streams included, to the host or a GPU.
  std::unique_ptr<NgramIndex> copy(const OptTensor& memory) const;
  // Load what `save` wrote. No stream is running then.
  static std::unique_ptr<NgramIndex> load(int fd, std::optional<int64_t> num_slots, std::optional<int64_t> max_len,
                                          int64_t num_threads);
  // Return 0 or errno.
  int save(int fd) const;

  void begin(int64_t slot, int64_t group, bool is_private, std::optional<int64_t> request);
  int64_t length(int64_t slot) const;  // of the slot's stream
  void insert(const TensorView& tokens, std::optional<int64_t> slot, int64_t group, std::optional<int64_t> start);
  void extend(const TensorView& tokens, const TensorView& num_valid, const OptTensor& slots,
              const OptTensor& match_len);
  void release(int64_t slot);
  void draft(const OptTensor& slots, const TensorView& seq_lens, int64_t num_nodes, bool chain, double min_prob,
             int64_t min_match, double own_weight, double group_weight, double global_weight, double recency,
             const TensorView& out_tokens, const TensorView& out_parents, const TensorView& out_positions,
             const TensorView& out_first_child, const TensorView& out_next_sibling, const TensorView& out_mask,
             const TensorView& out_num_nodes, const TensorView& out_scores, const TensorView& out_match_len);
  void clear();

  int64_t num_bytes() const { return static_cast<int64_t>(config_.sizes.bytes()); }
  NgramStatistics statistics() const;
  // Return a checksum of every byte except the draft statistics.
  uint64_t digest() const;

 private:
  struct Config {
    int64_t max_tokens, max_len, num_threads;
    NgramSizes sizes;
  };
  NgramIndex(const Config& config, const OptTensor& memory);
  static Config checked_config(Check check, int64_t max_tokens, std::optional<int64_t> num_blocks, int64_t num_slots,
                               int64_t max_len, int64_t num_threads);

  bool on_cuda() const { return !host_; }
  // Return a Check with the index's device, which tensors must share, and its current stream; no device yet on the
  // host.
  Check index_check(const char* op) const;
  void require_own_device(const Check& check) const;
  void read(void* to, const void* from, size_t bytes, const char* op) const;  // from the index to the host

  void check_length(Check& check, int64_t slot, int64_t added) const;
  void insert_on_host(Check& check, const int32_t* tokens, int64_t count, std::optional<int64_t> slot, uint32_t group,
                      int64_t start);
  void insert_on_device(const Check& check, const int32_t* tokens, int64_t count, std::optional<int64_t> slot,
                        uint32_t group, int64_t start) const;

  const Config config_;
  const std::unique_ptr<ZeroedMemory> host_;  // null on a GPU
  TensorView device_;                         // the caller's GPU memory, without its shape
  const NgramView view_;
  mutable ForkMutex mutex_;
  mutable WorkerPool workers_;
};

}  // namespace specdec::ngram
