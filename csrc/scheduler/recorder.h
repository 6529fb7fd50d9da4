// Where the time goes: totals for each kind of work, NVTX ranges, and on request a trace of every piece.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace specdec::scheduler {

// What the loop's thread does. A turn contains the others: `kAdmit` is who joins and who leaves, `kPrefill` the
// executor's begin, prefill and activate, `kPlan` the choice of a round, with its record of commands (`kCommands`) and
// its launch (`kLaunch`), `kWait` waiting for the device, `kRead` what a round's results change, `kEmit` the hand-over
// of what requests have gained.
enum class Work { kTurn, kAdmit, kPrefill, kPlan, kCommands, kLaunch, kWait, kRead, kEmit };
constexpr int kNumWorks = 9;

class Recorder {
 public:
  // `rows`: of each batch size those of its rounds.
  Recorder(bool traces, const std::vector<std::vector<int64_t>>& rows);

  void add(Work work, int64_t begin, int64_t end);
  // A round of so many requests that verified rows[size][kind] nodes, in ns of the device's clock, that was read now.
  // `follows`: the one before it was in flight when it was launched, and nothing else was in between, so that the
  // device should have gone from one to the other at once.
  void add_round(int64_t started_at, int64_t ended_at, int64_t requests, size_t size, size_t kind, bool follows);

  // The first round of so many requests, which is in no total: the trace alone shows it.
  void add_first_round(int64_t started_at, int64_t ended_at, int64_t requests);

  // Forgets all that was recorded.
  void reset();

  // May be called from any thread. All but the counts of rounds and requests in them are nanoseconds. `host` is the
  // loop's time without `wait` and `prefill`.
  struct Totals {
    int64_t rounds, requests, host, wait, prefill, device, following, gaps;
  };
  Totals totals() const;
  std::vector<std::vector<int64_t>> rounds_by_rows() const;  // of each batch size

  // Returns the trace in the format of chrome://tracing and Perfetto. May be called from any thread.
  void write_trace(const std::string& path) const;

 private:
  struct Event {
    Work work;
    int64_t begin, end;
  };
  struct Round {
    int64_t started_at, ended_at, read_at, requests, nodes;  // of a first round 0 nodes
  };
  static constexpr size_t kMostEvents = 1 << 20;  // then a trace ends
  void trace(const Round& round);

  const bool traces_;
  const std::vector<std::vector<int64_t>> rows_;
  mutable std::mutex mutex_;  // of what is traced
  std::vector<Event> events_;
  std::vector<Round> rounds_;
  int64_t last_ended_at_ = 0;
  std::array<std::atomic<int64_t>, kNumWorks> nanoseconds_{};
  std::atomic<int64_t> num_rounds_ = 0, num_requests_ = 0, device_ = 0, following_ = 0, gaps_ = 0;
  std::vector<std::vector<std::atomic<int64_t>>> by_rows_;
};

// A piece of work, from here to the end of the scope.
class Span {
 public:
  Span(Recorder& recorder, Work work);
  ~Span();
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  Recorder& recorder_;
  const Work work_;
  const int64_t begin_;
};

}  // namespace specdec::scheduler
