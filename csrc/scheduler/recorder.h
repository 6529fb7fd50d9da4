// Records where the time goes: totals for each kind of work, NVTX ranges, and on request a trace of every span.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace specdec::scheduler {

// The work of the loop's thread. A turn contains the others: `kAdmit` admits and ends requests, `kPrefill` is the
// executor's begin, prefill and activate, `kPlan` chooses a round, with its command record (`kCommands`) and its launch
// (`kLaunch`), `kWait` waits for the device, `kRead` applies a round's results, `kEmit` publishes the requests'
// updates.
enum class Work { kTurn, kAdmit, kPrefill, kPlan, kCommands, kLaunch, kWait, kRead, kEmit };
constexpr int kNumWorks = 9;

class Recorder {
 public:
  // `rows[i]` are the rows that rounds of batch size i may have.
  Recorder(bool traces, const std::vector<std::vector<int64_t>>& rows);

  void add(Work work, int64_t begin, int64_t end);
  // Records a round of this many requests that verified rows[size][kind] nodes, in ns of the device's clock, and was
  // read now. `follows`: it was launched while the round before was in flight, with no other work in between, so the
  // device should have started it at once.
  void add_round(int64_t started_at, int64_t ended_at, int64_t requests, size_t size, size_t kind, bool follows);

  // Records the first round of this many requests in the trace, but in no total.
  void add_first_round(int64_t started_at, int64_t ended_at, int64_t requests);

  // Forgets everything recorded.
  void reset();

  // Totals in nanoseconds, except for the counts of rounds and of requests in them. `host` is the loop's time without
  // `wait` and `prefill`. `totals` may be called from any thread.
  struct Totals {
    int64_t rounds, requests, host, wait, prefill, device, following, gaps;
  };
  Totals totals() const;
  std::vector<std::vector<int64_t>> rounds_by_rows() const;  // [size][kind]

  // Writes the trace in the format of chrome://tracing and Perfetto. May be called from any thread.
  void write_trace(const std::string& path) const;

 private:
  struct Event {
    Work work;
    int64_t begin, end;
  };
  struct Round {
    int64_t started_at, ended_at, read_at, requests, nodes;  // 0 nodes: a first round
  };
  static constexpr size_t kMaxEvents = 1 << 20;  // then the trace ends
  void trace(const Round& round);

  const bool traces_;
  const std::vector<std::vector<int64_t>> rows_;
  mutable std::mutex mutex_;  // guards events_ and rounds_
  std::vector<Event> events_;
  std::vector<Round> rounds_;
  int64_t last_ended_at_ = 0;
  std::array<std::atomic<int64_t>, kNumWorks> nanoseconds_{};
  std::atomic<int64_t> num_rounds_ = 0, num_requests_ = 0, device_ = 0, following_ = 0, gaps_ = 0;
  std::vector<std::vector<std::atomic<int64_t>>> by_rows_;
};

// Records work from here to the end of the scope.
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
