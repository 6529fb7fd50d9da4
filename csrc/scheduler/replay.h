// Replay: one rank decides, the others make the same executor calls in the same order.
//
// A model that is divided among processes of one host has a rank in each of them. Rank 0 has the scheduler. It writes
// every executor call as a record to memory that all ranks share; the other ranks read the records and make the calls.
// Each of them also publishes there what its rounds gave, and rank 0 compares that with its own results before it uses
// them. In a steady round the ranks exchange nothing else on the host.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "round/records.h"
#include "scheduler/executor.h"
#include "scheduler/rings.h"

namespace specdec::scheduler {

// Sizes of the shared memory, the same on all ranks.
struct ReplaySizes {
  int64_t num_ranks;
  int64_t capacity;      // bytes of the ring of records; a longer record passes in pieces
  int64_t depth, words;  // rounds whose results are kept for the comparison, and the most words of one
};

// The parts of a round that one record launches.
enum class RoundPart : int64_t { kAll, kForward, kRest };

struct LaunchRecord {
  RoundPart part;
  int64_t number;  // of the command record, whose words follow; none follow for kRest
  int64_t batch, rows, max_kv_len;
};

// The shared memory as one rank sees it. Rank 0 writes, from one thread at a time; each other rank reads with one
// thread. A failure of any rank is seen by all: `expect_alive` and all waits throw its reason from then on.
class ReplayChannel {
 public:
  static int64_t bytes(const ReplaySizes& sizes);
  // Uses memory that is aligned to 64 bytes and zeroed before the first rank takes it.
  ReplayChannel(std::byte* memory, const ReplaySizes& sizes, int64_t rank);
  virtual ~ReplayChannel();
  ReplayChannel(const ReplayChannel&) = delete;
  ReplayChannel& operator=(const ReplayChannel&) = delete;

  int64_t rank() const { return rank_; }
  const ReplaySizes& sizes() const { return sizes_; }

  // --- rank 0
  // Writes a record of a call, which this rank makes next; waits while the slowest rank has to read before there is
  // room. The name is for errors.
  void write(std::string_view record, std::string_view name);
  void write(const LaunchRecord& launch, std::span<const int32_t> words);
  // Forgets what the other ranks have published: rounds start with 0 again. They have published all rounds before.
  void reset_rounds();
  // Lets the other ranks end once they have read all records.
  void close();
  // Waits until all other ranks have published round `number`, and compares their words from `first` on with these.
  // Where they differ, fails with a reason in which `name_of` says what a word is. Returns the longest duration of the
  // round on another rank in nanoseconds.
  int64_t compare(int64_t number, std::span<const int32_t> words, int64_t first,
                  const std::function<std::string(int64_t)>& name_of);

  // --- other ranks
  struct Record {
    std::optional<LaunchRecord> launch;
    std::string bytes;           // of a record that is no launch
    std::vector<int32_t> words;  // of a launch
  };
  bool has_record() const;
  bool closed() const;
  Record read();
  void publish(int64_t number, std::span<const int32_t> words);

  // --- all ranks
  // Says which call this rank is about to make, and that it has made all calls that were recorded so far.
  void enter(std::string_view name);
  void made();
  // Fails all ranks for this reason, unless one has failed before.
  void fail(const std::string& reason);
  // Does the same for an exception of this rank, which may be the consequence of another rank's end: waits a moment for
  // the watch to find that.
  void fail_unless_others(const std::string& reason);
  // Returns why a rank has failed; empty if none has.
  std::string failure() const;
  void expect_alive() const;
  // Watches the other ranks' processes from a thread of its own until the channel is destroyed: rank 0 all of them, the
  // others rank 0. A process that ends before `close`, or that does not run for some seconds, is a failure; so is a
  // rank that has not made a call, or not finished a round, long after another one has: it waits in a collective that
  // the other has not entered. After a failure, a rank other than 0 that does not end by itself is ended. Call it when
  // all ranks have their channels.
  void watch(std::chrono::milliseconds most_delay = std::chrono::seconds(30));
  // Lets the watch fail with "rank N (process P) <what>" once a word of the host is 1 + N; it is 0 until then. The word
  // stays until the channel is destroyed. Call it once.
  void watch_alarm(const uint32_t* alarm, const std::string& what);
  int64_t process(int64_t rank) const;

 private:
  struct Header;
  struct RankWords;
  struct Pace;
  Header& header() const;
  RankWords& of_rank(int64_t rank) const;
  int32_t* published(int64_t rank, int64_t number) const;
  std::byte* ring() const;
  std::string called(int64_t rank) const;
  void wait_until(const std::function<bool()>& done) const;
  void expect_pace(std::vector<Pace>& paces, int64_t RankWords::* count, const char* what,
                   std::chrono::milliseconds most_delay);
  void put(const void* data, int64_t size);
  void get(void* data, int64_t size);
  void run_watch(std::chrono::milliseconds most_delay);

  std::byte* const memory_;
  const ReplaySizes sizes_;
  const int64_t rank_;
  std::mutex fail_mutex_;
  std::thread watch_;
  std::atomic<bool> stops_ = false;
  int64_t num_records_ = 0;  // written, or read
  std::string alarm_reason_;
  std::atomic<const uint32_t*> alarm_ = nullptr;  // set after its reason
};

// Rank 0's part of a launch: writes the record, with the words of the command record that the launch applies.
class LaunchWriter {
 public:
  LaunchWriter(ReplayChannel& channel, const RingMemory& commands, const round::CommandLayout& command_layout,
               const RingMemory& results, const round::ResultLayout& result_layout)
      : channel_(channel),
        commands_(commands),
        results_(results),
        command_layout_(command_layout),
        result_layout_(result_layout) {}

  void write(RoundPart part, int64_t batch, int64_t rows, int64_t max_kv_len);
  // Compares a round of `batch` rows, as ReplayChannel::compare. `name_of_row` names the request of a row.
  int64_t compare(int64_t number, int64_t batch, const std::function<std::string(int64_t)>& name_of_row);
  // Starts with record 0 and round 0 again.
  void reset() {
    number_ = 0;
    channel_.reset_rounds();
  }
  ReplayChannel& channel() { return channel_; }

 private:
  ReplayChannel& channel_;
  const RingMemory commands_, results_;
  const round::CommandLayout command_layout_;
  const round::ResultLayout result_layout_;
  int64_t number_ = 0;  // of the next command record
};

// Another rank's side: launches the rounds that rank 0 launches, and publishes their results.
class Replayer {
 public:
  Replayer(ReplayChannel& channel, Executor& executor, const RingMemory& commands, const RingMemory& results,
           const round::ResultLayout& result_layout)
      : channel_(channel),
        executor_(executor),
        commands_(commands),
        results_memory_(results),
        results_(results, result_layout),
        result_layout_(result_layout) {}

  // Launches rounds until there is a record of another kind, and returns its bytes; nothing once rank 0 has closed the
  // channel. Throws when a rank has failed.
  std::optional<std::string> next();
  // Starts with round 0 again.
  void reset();

 private:
  void launch(const ReplayChannel::Record& record);
  bool publish();

  ReplayChannel& channel_;
  Executor& executor_;
  const RingMemory commands_, results_memory_;
  const ResultRing results_;
  const round::ResultLayout result_layout_;
  int64_t num_launched_ = 0;       // rounds
  std::deque<int64_t> in_flight_;  // batch sizes of rounds that are not published yet
};

}  // namespace specdec::scheduler
