// Continuous batching: which requests wait, which run, and what they have produced. loop.cpp has the turns.
//
// Threads. submit, submit_many, cancel, stop, the update queue and the counters may be called from any thread, also
// from inside an executor call. run and step are the loop: one thread at a time, not from inside an executor call.
//
// Exceptions. If an executor call throws, its requests end with kError and carry the exception:
//
// - begin, prefill, activate: every request of the call.
// - launch: every request of the round, or that was to be activated; the round's tokens are unknown and dropped. The
//   next turn asks the device how far it came, and continues from there.
// - busy: as launch, for the round waited for.
// - deactivate, and the launch of a record that only gives back slots: no request; the slots count as given back, or
// are
//   given back by the next record.
// - assign_pages: no request; the prefix cache is emptied, and this turn or the next throws the exception after that.
// - progress, or kMaxFailedLaunches launches in a row: every request, present and future, since the device is gone.
//
// These requests still get their `deactivate`, in the next turn. All others continue as if nothing had happened. step()
// throws every exception; run() continues, and throws those that no request carries.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>

#include "scheduler/budget.h"
#include "scheduler/config.h"
#include "scheduler/executor.h"
#include "scheduler/prefix_cache.h"
#include "scheduler/recorder.h"
#include "scheduler/rings.h"
#include "scheduler/slots.h"
#include "scheduler/update_queue.h"

namespace specdec::scheduler {

// The parameters of a request.
struct Submission {
  std::vector<int64_t> prompt;
  int64_t max_new_tokens;
  std::vector<int64_t> stop_tokens = {};
  Sampling sampling = {};
  bool streams = true;
  int64_t min_new_tokens = 0;        // no stop token ends the request before
  int64_t num_logprobs = -1;         // as in Request
  int64_t ngram_group = 0;           // as in AdmittedRequest
  int64_t max_nodes = 0;             // as in Request; 0: as many as pay off
  std::shared_ptr<void> extra = {};  // as in AdmittedRequest
  bool constrained = false;          // as in Request
  bool migrated = false;             // as in Request
  bool cacheable = true;             // as in Request
  bool shares_prefix = true;         // as in Request
  int64_t priority = 0;              // lower values come first
  int64_t timeout_ns = 0;            // from now on; 0: none
  int64_t client = 0;                // its waiting requests queue as those of one call do; 0: no client
};

// A running request: its slot, and its text, whose last token is the root.
struct Held {
  int32_t slot;
  std::vector<int32_t> text;
};

class Scheduler {
 public:
  // The rings are those of round/records.h; the result ring is deeper than rounds_in_flight.
  Scheduler(const Config& config, Executor& executor, const RingMemory& commands, const RingMemory& results,
            bool traces);

  // Queues a request and returns its id. Ids increase. Throws ValueError before anything is queued, and runtime_error
  // after `stop`.
  int64_t submit(const Submission& submission);
  // Queues all of them, or none: one turn of the loop finds them together. Throws as `submit`, for the first that is
  // refused. Their ids are consecutive. A request whose time is up ends with kTimeout at the start of a turn.
  std::vector<int64_t> submit_many(std::span<const Submission> submissions);
  // Cancels a request, and returns true if it had not ended. It ends with kCancelled at the start of the next turn, or
  // with the reason given by a round that was already read.
  bool cancel(int64_t request_id);
  // Cancels all requests, admits no more, and lets `run` return when they have ended.
  void stop();

  // Times rounds of these batch sizes (the smallest and the largest among them) at every budget level, and chooses the
  // level of each round by these costs from then on. The rounds have requests of their own, of one token each, since
  // empty rounds have other costs. Costs of sizes in between are interpolated; the cost of KV is learned as rounds run.
  // Also times how long a draft takes to catch up, if it can be idle. Part of the loop, before any request has a slot;
  // exceptions of executor calls pass through. Throws ValueError.
  void measure_rounds(const std::vector<int64_t>& batches);
  // Sets costs that were measured before, with the same batch sizes and levels. Throws as measure_rounds.
  void set_costs(RoundCosts costs);

  // Makes turns while there is work, and waits while there is none, until `stop`; then closes the update queue. May be
  // called again after an exception, which loses nothing.
  void run();
  // Makes one turn, for callers that drive the loop by hand. Returns false if nothing is left to do.
  bool step();
  // Empties the prefix cache before any request that is submitted later begins; waits for that while the loop runs.
  // Requests that share its pages keep them.
  void clear_cache();
  // Waits until the rounds in flight that no request takes part in have been read. Does not wait while there are
  // requests.
  void settle();

  // --- pausing (pausing.cpp): the loop sees what another thread does between these two

  // Waits until the running loop is between two turns with nothing in flight, and keeps it there until `resume`. Waits
  // for its turn if another thread has paused the loop. With a request: not before that request runs or has ended. With
  // `restart`, requests that held slots are back in the queue then, and the prefix cache is empty: nothing that rounds
  // have computed is used again. Not from inside an executor call. Throws runtime_error after `stop`.
  void pause(bool restart, int64_t request_id = -1);
  void resume();
  // Returns a running request. Only while the loop is paused.
  std::optional<Held> held(int64_t request_id) const;
  // Resets the counts of records and rounds, after the rings and the device were reset. Only while the loop is paused
  // or has not run.
  void reset_rounds();

  UpdateQueue& updates() { return update_queue_; }

  int64_t num_running() const { return num_held_; }  // requests that hold a slot
  int64_t num_waiting() const;                       // requests that do not
  int64_t num_free_pages_estimate() const { return free_pages_; }
  int64_t num_retractions() const { return num_retractions_; }
  int64_t num_cached_pages() const { return prefix_.num_pages; }         // in the prefix cache
  int64_t num_shared_pages() const { return prefix_.num_shared_pages; }  // cached pages that requests use
  int64_t num_prefix_hits() const { return prefix_.num_hits; }           // requests that began with cached pages
  int64_t num_cached_tokens() const { return prefix_.num_tokens; }       // rows that these did not prefill
  int64_t num_snapshots() const { return prefix_.num_snapshots; }        // taken, for cached prefixes or by requests
  int64_t num_saved_snapshots() const { return prefix_.num_saved_snapshots; }        // so far
  int64_t num_evicted_snapshots() const { return prefix_.num_evicted_snapshots; }    // so far
  int64_t num_restored_snapshots() const { return prefix_.num_restored_snapshots; }  // so far
  const Recorder& recorder() const { return recorder_; }
  const Budget& budget() const { return budget_; }

 private:
  class RoundTimer;  // of measure_rounds
  // A round that was launched and not yet read.
  struct Round {
    struct Row {
      int32_t slot;
      int64_t request_id;
    };
    int64_t number = 0;
    size_t size, level = 0;  // indices of config.batch_sizes, config.rows[size]
    size_t observed = 0;     // the highest level whose observed gain it reports
    size_t predicted = 0;    // the highest level whose predicted gain it reports
    size_t kind = 0;         // index of config.all_rows()[size]
    int64_t kv_rows = 0;     // of all its requests
    std::vector<Row> rows = {};
    bool follows = false;   // launched while the round before was in flight, with no other work in between
    bool is_first = false;  // of requests that begin: no measure of any other round
  };
  // The prefix cache, and what the loop and other threads know about it.
  struct Prefix {
    Prefix(int64_t num_places, int64_t page_size, int64_t num_snapshots, int64_t lookahead)
        : cache(num_places, page_size, num_snapshots, lookahead) {}
    PrefixCache cache;
    bool pages_unknown = false;    // places may hold pages that the cache does not know
    std::exception_ptr error;      // what assign_pages threw then
    bool clear_requested = false;  // shared with other threads, under the lock
    std::atomic<int64_t> num_pages = 0, num_shared_pages = 0, num_hits = 0, num_tokens = 0;
    std::atomic<int64_t> num_snapshots = 0, num_saved_snapshots = 0, num_evicted_snapshots = 0,
                         num_restored_snapshots = 0;
  };
  // A pause that another thread asks for; shared with other threads, under the lock.
  struct Pause {
    bool requested = false;   // a thread wants the loop to pause, or has paused it
    bool restart = false;     // then no request may hold a slot
    int64_t request_id = -1;  // then this request runs or has ended; -1: any
    bool reached = false;     // the loop is paused
  };

  // --- submitting (scheduler.cpp); messages name this op
  std::unique_ptr<Request> make_request(const char* op, const Submission& submission) const;
  int64_t queue(const char* op, std::span<std::unique_ptr<Request>> requests);
  std::shared_ptr<int64_t> tail_of(int64_t client);

  // --- the turn (loop.cpp)
  bool turn();
  bool must_pause() const;
  void pause_if_requested();
  bool wait_for_work(bool again);
  void recover();
  void fail_all();
  void receive_requests();
  void enqueue(std::unique_ptr<Request> request);
  void end_cancelled_and_expired(const std::unordered_set<int64_t>& cancelled);
  void make_room();
  void admit();
  void assign_slots();
  bool prefill();
  void activate();
  bool launch_first_rounds();
  bool launch_round();
  size_t size_for(const std::vector<Request*>& requests) const;
  void launch(Round round, std::vector<Request*> requests, int64_t rows, int64_t max_kv_len);
  void read_all_rounds();
  void read_oldest_round();
  void update_budget(const Round& round);
  bool read_row(const RowResult& result, Request& request, bool is_first);
  void send(const Commands& commands, int64_t batch = 0, int64_t rows = 0, int64_t max_kv_len = 0,
            bool constrained = false);
  void constrain(const Round& round, int64_t rows, int64_t max_kv_len);
  void wait_for_round(const Round& round);
  int64_t agree(const Round& round);
  void wait_until(const std::function<bool()>& done);
  std::vector<Request*> live_requests(const Round& round) const;
  template <class Call>
  void call_for(const std::vector<Request*>& requests, Call&& call);
  bool all_ended() const;

  // --- bookkeeping (scheduler.cpp); executor calls and updates that follow from it are carried out by flush()
  void finish(Request& request, FinishReason reason, int32_t status = 0, std::exception_ptr error = {});
  void finish_held(Request& request, FinishReason reason, int32_t status = 0, std::exception_ptr error = {});
  void queue_update(Request& request, FinishReason reason, int32_t status = 0, std::exception_ptr error = {});
  void retract_last();
  void begin(Request& request);
  void update_counters();
  void flush();
  void publish_updates();

  // --- the prefix cache (sharing.cpp)
  bool waits_for_prefix(const Request& request) const;
  void share_prefix(Request& request);
  int64_t validated_rows(const Request& request) const;
  void cache_pages(Request& request);
  void release_prefix(Request& request);
  std::vector<int32_t> shared_entries(const Request& request) const;
  int64_t rows_to_snapshot(const Request& request) const;
  int32_t take_snapshot(Request& request);
  std::vector<Request*> take_due_snapshots(const std::vector<Request*>& requests);
  void keep_snapshots(Request& request);
  void release_snapshots(Request& request);
  void evict_pages_for(int64_t count);
  void release_places(std::vector<int32_t> places);
  void assign_pages(Entries sources, Entries destinations);
  std::vector<int32_t> forget_cached_pages();
  void empty_cache();

  class LoopGuard;

  const Config config_;
  Executor& executor_;
  const CommandRing commands_;
  const ResultRing results_;
  Recorder recorder_;
  Budget budget_;

  // Owned by the loop.
  std::deque<std::unique_ptr<Request>> waiting_;  // by rank
  int64_t next_deadline_ = kNoDeadline;           // no request has an earlier one
  Slots slots_;
  Prefix prefix_;
  std::vector<int32_t> to_deactivate_;               // slots
  std::vector<int32_t> given_back_;                  // deactivated slots that no command record has given back yet
  RequestUpdates updates_;                           // of this turn
  std::deque<Round> in_flight_;                      // oldest first
  int64_t num_sent_ = 0;                             // command records
  int64_t num_launched_ = 0;                         // rounds
  uint64_t round_number_ = 0;                        // of the last round launched, from 1 on
  int64_t last_batch_, last_rows_;                   // of the last round launched
  std::vector<std::vector<int64_t>> last_round_ns_;  // duration of the last round of each size and kind
  int64_t round_started_ns_ = 0;                     // when the oldest round in flight started; 0: unknown
  bool other_work_since_round_ = false;              // the device got other work since the last round was launched
  bool no_progress_ = false;                         // every slot stalled in the round read last
  bool launch_unknown_ = false;                      // a launch threw: the device may or may not have got it
  int failed_launches_ = 0;                          // in a row
  std::exception_ptr launch_error_;                  // of the last of these
  std::exception_ptr device_error_;                  // why the device is gone
  bool exception_delivered_ = false;                 // requests carry the exception of this turn

  // Read by other threads.
  std::atomic<int64_t> num_held_ = 0, free_pages_, num_retractions_ = 0;
  std::atomic<bool> loop_running_ = false;

  // Shared with other threads, under the lock.
  mutable std::mutex mutex_;
  std::condition_variable state_changed_;
  std::deque<std::unique_ptr<Request>> submitted_;  // not yet seen by the loop
  std::unordered_set<int64_t> cancelled_;           // not yet seen by the loop
  std::unordered_set<int64_t> live_ids_;            // of requests that have not ended
  bool idle_ = true;                                // the last turn of `run` left nothing to do
  bool stopping_ = false;
  bool finished_ = false;  // `run` has returned for good
  Pause pause_;
  int64_t turn_ = 0;                                           // of a request that comes now; see queue
  std::unordered_map<int64_t, std::weak_ptr<int64_t>> tails_;  // by client: the turn of its last waiting request
  int64_t next_id_ = 0;

  UpdateQueue update_queue_;
};

class Scheduler::LoopGuard {
 public:
  explicit LoopGuard(Scheduler& scheduler) : loop_running_(scheduler.loop_running_) {
    if (loop_running_.exchange(true))
      throw std::runtime_error("step: the loop is running already, expected one at a time");
  }
  ~LoopGuard() { loop_running_ = false; }
  LoopGuard(const LoopGuard&) = delete;
  LoopGuard& operator=(const LoopGuard&) = delete;

 private:
  std::atomic<bool>& loop_running_;
};

}  // namespace specdec::scheduler
