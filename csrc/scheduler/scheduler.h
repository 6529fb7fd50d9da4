// Continuous batching: who waits, who runs, what was produced. loop.cpp has the turns; this is what they work on.
//
// Threads. submit, submit_many, cancel, stop, the outbox and the counters may be called from any thread, also from
// inside an executor call. run and step are the loop: one thread at a time, not from inside an executor call.
//
// Exceptions. The requests of an executor call that throws end with kError, and carry what it threw:
//
// - begin, prefill, activate: every request of the call.
// - launch: every request of the round, or that was to be activated; the round's tokens are unknown and dropped. The
//   next turn asks the device how far it came, and goes on from there.
// - busy: as launch, for the round waited for.
// - deactivate, and the launch of a record that only gives back slots: nobody; the slots count as given back, or are
//   given back by the next record.
// - assign_pages: nobody; the prefix cache is emptied, and the exception comes out then, of this turn or the next.
// - progress, or launches that fail time after time: every request there is and is to come, for the device is gone.
//
// They still get their `deactivate`, in the next turn. All other requests go on as if nothing had happened. step()
// throws all of it; run() goes on, and throws what no request has been told.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <unordered_set>

#include "scheduler/budget.h"
#include "scheduler/config.h"
#include "scheduler/executor.h"
#include "scheduler/outbox.h"
#include "scheduler/prefix_cache.h"
#include "scheduler/recorder.h"
#include "scheduler/rings.h"
#include "scheduler/slots.h"

namespace specdec::scheduler {

// What a request is submitted with.
struct Submission {
  std::vector<int64_t> prompt;
  int64_t max_new_tokens;
  std::vector<int64_t> stop_tokens = {};
  Sampling sampling = {};
  bool streams = true;
  int64_t min_new_tokens = 0;        // no stop token comes before
  int64_t num_logprobs = -1;         // as in Request
  int64_t ngram_group = 0;           // as in Admitted
  int64_t max_nodes = 0;             // as in Request; 0: as many as pay
  std::shared_ptr<void> extra = {};  // as in Admitted
  bool constrained = false;          // as in Request
  bool written = false;              // as in Request
  int64_t priority = 0;              // lower numbers come first
  int64_t timeout_ns = 0;            // from now on, in which it has to end; 0: any
};

// A request that runs: its slot, and its text, whose last token is the root.
struct Held {
  int32_t slot;
  std::vector<int32_t> text;
};

class Scheduler {
 public:
  // The rings are as round/records.h has them; that of the results is deeper than rounds_in_flight.
  Scheduler(const Config& config, Executor& executor, const RingMemory& commands, const RingMemory& results,
            bool traces);

  // Queues a request and returns its id. Ids rise. Throws ValueError before anything is queued, and runtime_error after
  // `stop`.
  int64_t submit(const Submission& submission);
  // Queues all of them, or none: one turn of the loop finds them together. Throws as `submit`, of the first that is
  // refused. Their ids follow one another. A request whose time is over ends with kTimeout at the start of a turn.
  std::vector<int64_t> submit_many(std::span<const Submission> submissions);
  // Returns true if the request had not ended. It ends with kCancelled at the start of the next turn, or with the
  // reason that a round which was already read gives.
  bool cancel(int64_t request_id);
  // Cancels all requests, admits no more, and lets `run` return when they have ended.
  void stop();

  // Times rounds of these batch sizes, the smallest and the largest among them, with every number of rows, and from
  // then on chooses each round's rows by that. They have requests of their own, of one token each, since a round
  // without any says little of one with some. What a size between two of them takes lies between, too; what KV takes is
  // seen as rounds run. So is the time in which a draft catches up, where it rests. Part of the loop, before any
  // request has a slot; what an executor call throws leaves it. Throws ValueError.
  void measure_rounds(const std::vector<int64_t>& batches);
  // Takes what was measured before of rounds with these batch sizes and rows. Throws as measure_rounds.
  void set_costs(RoundCosts costs);

  // Turns while there is something to do, and waits while there is not, until `stop`; closes the outbox then. May be
  // called again after an exception, which loses nothing.
  void run();
  // Makes one turn, for callers that drive the loop by hand. Returns false when nothing is left to do.
  bool step();
  // Empties the prefix cache before any request that is submitted later begins; waits for it while the loop runs.
  // Requests that share pages with it keep them.
  void clear_cache();
  // Waits until the rounds in flight have been read in which no request takes part any more. Does not wait while there
  // are requests.
  void settle();

  // --- standing still (pausing.cpp): what another thread does between these two the loop finds done

  // Waits until the loop, which runs, stands between two turns with nothing in flight, and keeps it there until
  // `resume`; who comes while another thread has it there waits for that one. With a request, not before that one runs
  // or has ended. With `restart` requests that held slots are back in the queue then, and the prefix cache is empty:
  // nothing that rounds have computed is used again. Not from inside an executor call. Throws runtime_error after
  // `stop`.
  void pause(bool restart, int64_t request_id = -1);
  void resume();
  // A request that runs. While the loop stands still.
  std::optional<Held> held(int64_t request_id) const;
  // The rings are as new, and the device has counted nothing yet. While the loop stands still, or has not run.
  void forget_rounds();

  Outbox& outbox() { return outbox_; }

  int64_t num_running() const { return num_held_; }  // requests that hold a slot
  int64_t num_waiting() const;                       // requests that do not
  int64_t num_free_pages_estimate() const { return free_pages_; }
  int64_t num_retractions() const { return num_retractions_; }
  int64_t num_cached_pages() const { return num_cached_pages_; }    // in the prefix cache
  int64_t num_shared_pages() const { return num_shared_pages_; }    // of them, those that requests hold on to
  int64_t num_prefix_hits() const { return num_prefix_hits_; }      // requests that began with some of them
  int64_t num_cached_tokens() const { return num_cached_tokens_; }  // rows that these did not prefill
  const Recorder& recorder() const { return recorder_; }
  const Budget& budget() const { return budget_; }

 private:
  class Trial;  // of measure_rounds
  // A round that was launched and not yet read.
  struct Round {
    struct Row {
      int32_t slot;
      int64_t request_id;
    };
    int64_t number = 0;
    size_t size, level = 0;  // of config.batch_sizes, of config.rows[size]
    size_t shown = 0;        // the highest level of which it shows what it brings
    size_t scored = 0;       // and the highest of which its drafts say what they promise
    size_t kind = 0;         // of config.all_rows()[size]
    int64_t kv_rows = 0;     // of all its requests
    std::vector<Row> rows = {};
    bool follows = false;   // nothing but a round lies between it and the one before
    bool is_first = false;  // of requests that begin: it is no measure of any other
  };
  // --- submitting (scheduler.cpp), for this op
  std::unique_ptr<Request> make_request(const char* op, const Submission& submission) const;
  int64_t queue(const char* op, std::span<std::unique_ptr<Request>> requests);

  // --- the turn (loop.cpp)
  bool turn();
  bool must_pause() const;
  void stand_still();
  bool wait_for_work(bool again);
  void recover();
  void give_up();
  void read_mail();
  void enqueue(std::unique_ptr<Request> request);
  void end_early(const std::unordered_set<int64_t>& cancelled);
  void make_room();
  void admit();
  void give_slots();
  bool prefill();
  void activate();
  bool launch_first_rounds();
  bool launch_round();
  size_t size_for(const std::vector<Request*>& requests) const;
  void launch(Round round, std::vector<Request*> requests, int64_t rows, int64_t max_kv_len);
  void read_rounds();
  void read_oldest_round();
  void update_budget(const Round& round);
  bool read_row(const RowResult& result, Request& request, bool is_first);
  void send(const Commands& commands, int64_t batch = 0, int64_t rows = 0, int64_t max_kv_len = 0,
            bool constrained = false);
  void constrain(const Round& round, int64_t rows, int64_t max_kv_len);
  void await(const Round& round);
  void wait_until(const std::function<bool()>& done);
  std::vector<Request*> still_held(const Round& round) const;
  template <class Call>
  void call_for(const std::vector<Request*>& requests, Call&& call);
  bool settled() const;

  // --- its bookkeeping (scheduler.cpp). What the executor is to be told is noted, and told by deliver().
  void finish(Request& request, FinishReason reason, int32_t status = 0, std::exception_ptr error = {});
  void finish_held(Request& request, FinishReason reason, int32_t status = 0, std::exception_ptr error = {});
  void note_tokens(Request& request, FinishReason reason, int32_t status = 0, std::exception_ptr error = {});
  void retract_last();
  void begin(Request& request);

  // --- the prefix cache (sharing.cpp)
  bool awaits_prefix(const Request& request) const;
  void share_prefix(Request& request);
  int64_t sound_rows(const Request& request) const;
  void cache_pages(Request& request);
  void leave_prefix(Request& request);
  std::vector<int32_t> shared_entries(const Request& request) const;
  void make_pages(int64_t count);
  void drop_places(std::vector<int32_t> places);
  void assign_pages(Entries sources, Entries destinations);
  std::vector<int32_t> forget_pages();
  void empty_cache();
  void publish();
  void deliver();
  void emit();

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
  PrefixCache cache_;
  std::vector<int32_t> leaving_;            // slots to be deactivated
  std::vector<int32_t> given_back_;         // deactivated slots of which the device does not know yet
  Emissions emissions_;                     // of this turn
  std::deque<Round> in_flight_;             // oldest first
  int64_t num_sent_ = 0;                    // command records
  int64_t num_launched_ = 0;                // rounds
  uint64_t round_number_ = 0;               // of the last round launched, from 1 on
  int64_t last_batch_, last_rows_;          // of the last round launched
  std::vector<std::vector<int64_t>> took_;  // ns, by the last round of each size and kind
  int64_t began_ = 0;                       // when the oldest round in flight did; 0: that is not known
  bool other_work_ = false;                 // something else than a round went to the device since the last round
  bool stuck_ = false;                      // no slot of the round read last went on
  bool unsure_ = false;                     // a launch threw: the device may or may not have come to it
  int failed_launches_ = 0;                 // in a row
  std::exception_ptr failure_;              // of the last of them
  std::exception_ptr broken_;               // why the device is gone
  bool cache_lost_ = false;                 // places may hold pages that the cache does not know
  std::exception_ptr cache_failure_;        // what assign_pages threw then
  bool told_ = false;                       // the exception of this turn has ended requests, which carry it

  // What other threads see of it.
  std::atomic<int64_t> num_held_ = 0, free_pages_, num_retractions_ = 0;
  std::atomic<int64_t> num_cached_pages_ = 0, num_shared_pages_ = 0, num_prefix_hits_ = 0, num_cached_tokens_ = 0;
  std::atomic<bool> looping_ = false;

  // Shared with them, under the lock.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Request>> submitted_;  // not yet seen by the loop
  std::unordered_set<int64_t> cancelled_;           // likewise
  std::unordered_set<int64_t> alive_;               // neither ended nor refused
  bool at_rest_ = true;                             // the last turn of `run` left nothing to do
  bool stopping_ = false;
  bool clearing_ = false;      // the cache is to be emptied
  bool pausing_ = false;       // somebody wants the loop to stand still, or has it so
  bool restarting_ = false;    // and nobody to hold a slot then
  int64_t awaited_ = -1;       // and this request to run by then; -1: none
  bool stands_still_ = false;  // it does
  bool over_ = false;          // `run` has returned for good
  int64_t next_id_ = 0;

  Outbox outbox_;
};

class Scheduler::LoopGuard {
 public:
  explicit LoopGuard(Scheduler& scheduler) : looping_(scheduler.looping_) {
    if (looping_.exchange(true)) throw std::runtime_error("step: the loop is running already, expected one at a time");
  }
  ~LoopGuard() { looping_ = false; }
  LoopGuard(const LoopGuard&) = delete;
  LoopGuard& operator=(const LoopGuard&) = delete;

 private:
  std::atomic<bool>& looping_;
};

}  // namespace specdec::scheduler
