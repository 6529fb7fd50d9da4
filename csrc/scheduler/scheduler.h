// Continuous batching: who waits, who runs, what was produced. loop.cpp has the turns; this is what they work on.
//
// Threads. submit, cancel, abort_all, the counters and the waits may be called from any thread, also from inside an
// executor call. step and run_until_idle are the loop: one thread at a time, not from inside an executor call.
//
// Exceptions. Whatever an executor call throws leaves step() unchanged, and the requests of that call end:
//
// - begin, prefill, activate: every request of the call, with kError.
// - launch: every request of the round, or that was to be activated, with kError; the round's tokens are unknown and
//   dropped. (A record that only gives back slots has no requests.) The next step() asks the device how far it came,
//   and goes on from there.
// - busy: as launch, for the round waited for.
// - emit: every request of the call that goes on, with kError; all tokens of the call count as emitted.
// - deactivate: nobody; the slots count as given back.
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

#include "scheduler/config.h"
#include "scheduler/executor.h"
#include "scheduler/ladder.h"
#include "scheduler/recorder.h"
#include "scheduler/rings.h"
#include "scheduler/slots.h"

namespace specdec::scheduler {

// What a request is submitted with, besides its prompt.
struct SubmitOptions {
  int64_t max_new_tokens;
  std::vector<int64_t> stop_tokens = {};
  Sampling sampling = {};
  bool streams = true;
  int64_t min_new_tokens = 0;  // no stop token comes before
  int64_t num_logprobs = -1;   // as in Request
};

class Scheduler {
 public:
  // The rings are as round/records.h has them; that of the results is deeper than rounds_in_flight.
  Scheduler(const Config& config, Executor& executor, const RingMemory& commands, const RingMemory& results,
            bool traces);

  // Queues a request and returns its id. Ids rise. Throws ValueError before anything is queued.
  int64_t submit(const std::vector<int64_t>& prompt, const SubmitOptions& options);
  // True if the request had not ended. It ends with kCancelled at the start of the next turn, or with the reason that a
  // round already read brings.
  bool cancel(int64_t request_id);
  void abort_all();

  // Times a round of every batch size and number of nodes, without requests, and from then on chooses the number of
  // each round's nodes by that. Part of the loop, before any request has a slot; what an executor call throws leaves
  // it.
  void measure_rounds();

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
  const Recorder& recorder() const { return recorder_; }
  const Ladder& ladder() const { return ladder_; }

 private:
  // A round that was launched and not yet read.
  struct Round {
    struct Row {
      int32_t slot;
      int64_t request_id;
    };
    int64_t number;
    size_t size, rung;  // of config.batch_sizes, of config.nodes
    size_t shown;       // the highest rung of which it shows what it brings
    std::vector<Row> rows;
    bool follows;  // nothing but a round lies between it and the one before
  };

  // --- the turn (loop.cpp)
  bool turn();
  void recover();
  void read_mail();
  void make_room();
  void admit();
  void give_slots();
  bool prefill();
  void activate();
  bool launch_round();
  void read_rounds();
  void read_oldest_round();
  bool read_row(const RowResult& result, size_t shown_rung, Request& request);
  void send(const Commands& commands, int64_t batch = 0, int64_t num_nodes = 0);
  int64_t time_round(int64_t batch, int64_t num_nodes);
  void await(const Round& round);
  void wait_until(const std::function<bool()>& done);
  std::vector<Request*> still_held(const Round& round) const;
  template <class Call>
  void call_for(const std::vector<Request*>& requests, Call&& call);
  bool settled() const;

  // --- its bookkeeping (scheduler.cpp). What the executor is to be told is noted, and told by deliver().
  void finish(Request& request, FinishReason reason, int32_t status = 0);
  void finish_held(Request& request, FinishReason reason, int32_t status = 0);
  void note_tokens(Request& request, FinishReason reason, int32_t status);
  void end_with_error(int64_t request_id);
  void retract_newest();
  void publish();
  void deliver();
  void emit();

  class LoopGuard;

  const Config config_;
  Executor& executor_;
  const CommandRing commands_;
  const ResultRing results_;
  Recorder recorder_;
  Ladder ladder_;

  // Owned by the loop.
  std::deque<std::unique_ptr<Request>> waiting_;  // by id: retracted requests are older than all that wait
  Slots slots_;
  std::vector<int32_t> leaving_;            // slots to be deactivated
  std::vector<int32_t> given_back_;         // deactivated slots of which the device does not know yet
  Emissions emissions_, emitting_;          // for the next emit; of the last one, whose memory the next one takes
  std::deque<Round> in_flight_;             // oldest first
  int64_t num_sent_ = 0;                    // command records
  int64_t num_launched_ = 0;                // rounds
  uint64_t turn_number_ = 0;                // of turns that launched a round
  size_t last_rung_;                        // of the last round launched
  std::vector<std::vector<int64_t>> took_;  // ns, by the last round of each size and rung
  int64_t began_ = 0;                       // when the oldest round in flight did; 0: that is not known
  bool other_work_ = false;                 // something else than a round went to the device since the last round
  bool stuck_ = false;                      // no slot of the round read last went on
  bool unsure_ = false;                     // a launch threw: the device may or may not have come to it

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
