// Continuous batching: who waits, who runs, what was produced. loop.cpp has the turns; this is what they work on.
//
// Threads. submit, cancel, abort_all, the counters and the waits may be called from any thread, also from inside an
// executor call. step and run_until_idle are the loop: one thread at a time, not from inside an executor call.
//
// Exceptions. Whatever an executor call throws leaves step() unchanged, and the requests of that call end:
//
// - begin, prefill, activate: that request, with kError.
// - round: every request of the round, with kError; the round's tokens are unknown and dropped.
// - emit: that request, with kError, unless this was its last emission; the tokens count as emitted.
// - deactivate: nobody; the slot counts as given back, and the next `begin` on it finds what was left there.
//
// They still get their `deactivate` and their last `emit`: the next step() makes those calls first. All other requests
// go on as if nothing had happened.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <unordered_set>
#include <variant>

#include "scheduler/config.h"
#include "scheduler/executor.h"
#include "scheduler/slots.h"

namespace specdec::scheduler {

class Scheduler {
 public:
  Scheduler(const Config& config, Executor& executor, const RoundResults& results);

  // Queues a request and returns its id. Ids rise. Throws ValueError before anything is queued.
  int64_t submit(const std::vector<int64_t>& prompt, int64_t max_new_tokens, const std::vector<int64_t>& stop_tokens);
  // True if the request had not ended. It ends with kCancelled at the start of the next turn, or with the reason that a
  // round already made brings.
  bool cancel(int64_t request_id);
  void abort_all();

  // One turn. False when nothing is left to do.
  bool step();
  // Turns until nothing is left; `between_turns` may throw to stop earlier, which loses nothing.
  void run_until_idle(const std::function<void()>& between_turns);

  // Waits until there is something to do, or until every request has had its last emission. False if the time is over.
  bool wait_for_work(std::chrono::duration<double> timeout);
  bool drain(std::chrono::duration<double> timeout);

  int64_t num_running() const { return num_held_; }  // requests that hold a slot
  int64_t num_waiting() const;                       // requests that do not
  int64_t num_free_pages_estimate() const { return free_pages_; }
  int64_t num_retractions() const { return num_retractions_; }

 private:
  // --- the turn (loop.cpp)
  bool turn();
  void read_mail();
  void make_room();
  void admit();
  void prefill_one_chunk();
  void launch_round();
  void read_results();
  bool read_row(int64_t row, Request& request);
  void activate(Request& request);
  template <class Call>
  void call_for(const std::vector<Request*>& requests, Call&& call);
  bool settled() const;

  // --- its bookkeeping (scheduler.cpp). What the executor is to be told is noted, and told by deliver().
  void finish(const Request& request, FinishReason reason, std::vector<int32_t> tokens = {}, int32_t status = 0);
  void finish_held(Request& request, FinishReason reason, std::vector<int32_t> tokens = {}, int32_t status = 0);
  void retract_newest();
  void publish();

  void deliver();

  class LoopGuard;

  const Config config_;
  Executor& executor_;
  const RoundResults results_;

  // Owned by the loop.
  struct Deactivation {
    int32_t slot;
    int64_t request_id;
  };
  std::deque<std::unique_ptr<Request>> waiting_;  // by id: retracted requests are older than all that wait
  Slots slots_;
  std::deque<std::variant<Deactivation, Emission>> notices_;  // in order; each is removed just before its call
  std::vector<Request*> round_;                               // the rows of the round to be read
  uint64_t round_number_ = 0;

  // What other threads see of it.
  std::atomic<int64_t> num_held_ = 0, free_pages_, num_retractions_ = 0;
  std::atomic<bool> looping_ = false;

  // Shared with them, under the lock.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Request>> submitted_;  // not yet seen by the loop
  std::unordered_set<int64_t> cancelled_;           // likewise
  std::unordered_set<int64_t> alive_;               // neither ended nor refused
  int64_t unsettled_ = 0;                           // submitted, and the last emission not yet made
  int64_t next_id_ = 0;
};

}  // namespace specdec::scheduler
