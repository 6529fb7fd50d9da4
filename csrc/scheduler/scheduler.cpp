#include "scheduler/scheduler.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/check.h"
#include "round/clock.h"
#include "scheduler/admission.h"

namespace specdec::scheduler {
namespace {

// For a request of a large call; see Scheduler::queue.
constexpr int64_t kTurns = 2;

std::vector<int32_t> checked_tokens(Check& check, const char* name, const std::vector<int64_t>& tokens) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  for (size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] < 0 || tokens[i] > kMost)
      check.range(std::string(name).append("[").append(std::to_string(i)).append("]").c_str(), tokens[i], 0, kMost);
  return {tokens.begin(), tokens.end()};
}

}  // namespace

Scheduler::Scheduler(const Config& config, Executor& executor, const RingMemory& commands, const RingMemory& results,
                     bool traces)
    : config_((check_config(config), config)),
      executor_(executor),
      commands_(commands, {config.max_batch(), config.num_slots, config.max_stops}),
      results_(results, {config.accept_width, config.num_levels(), config.max_logprobs}),
      recorder_(traces, config.all_rows()),
      budget_(config.batch_sizes, config.rows, config.accept_width, config.max_idle_rounds, {}, config.drafted),
      slots_(config.num_slots),
      prefix_(config.prefix_cache ? config.num_pages : 0, config.page_size, config.num_snapshots, config.lookahead),
      last_batch_(config.max_batch()),
      last_rows_(config.rows.back().back()),
      free_pages_(config.num_pages) {
  for (const auto& each : config.all_rows()) last_round_ns_.emplace_back(each.size());
}

// --- any thread

int64_t Scheduler::submit(const Submission& submission) {
  auto request = make_request("submit", submission);
  return queue("submit", {&request, 1});
}

std::vector<int64_t> Scheduler::submit_many(std::span<const Submission> submissions) {
  std::vector<std::unique_ptr<Request>> requests;
  requests.reserve(submissions.size());
  for (size_t i = 0; i < submissions.size(); ++i) {
    const std::string op = "submit_many: requests[" + std::to_string(i) + "]";
    requests.push_back(make_request(op.c_str(), submissions[i]));
  }
  std::vector<int64_t> ids(requests.size());
  std::iota(ids.begin(), ids.end(), queue("submit_many", requests));
  return ids;
}

std::unique_ptr<Request> Scheduler::make_request(const char* op, const Submission& submission) const {
  Check check(op);
  const std::vector<int64_t>& prompt = submission.prompt;
  check.that(!prompt.empty(), "prompt", "is empty", "at least 1 token");
  // At least one more token must be possible. A prompt that is short enough also fits the pool, by check_config.
  check.that(static_cast<int64_t>(prompt.size()) < config_.max_len, "prompt", {"has ", prompt.size(), " tokens"},
             {"at most ", config_.max_len - 1, " (max_len - 1)"});
  auto request = std::make_unique<Request>();
  request->text = checked_tokens(check, "prompt", prompt);
  request->emitted = static_cast<int64_t>(prompt.size());
  check.that(submission.max_new_tokens >= 1, "max_new_tokens", {"is ", submission.max_new_tokens}, "at least 1");
  // The device holds an int32. max_len ends the request before a larger limit does.
  request->remaining = std::min(submission.max_new_tokens, config_.max_len);
  request->stop_tokens = checked_tokens(check, "stop_tokens", submission.stop_tokens);
  check.that(static_cast<int64_t>(submission.stop_tokens.size()) <= config_.max_stops, "stop_tokens",
             {"has ", submission.stop_tokens.size(), " entries"}, {"at most ", config_.max_stops});
  request->sampling = submission.sampling;
  request->streams = submission.streams;
  check.that(submission.min_new_tokens >= 0 && submission.min_new_tokens <= submission.max_new_tokens, "min_new_tokens",
             {"is ", submission.min_new_tokens}, "0 to max_new_tokens");
  if (submission.min_new_tokens > 0)  // max_len may end the request earlier
    request->stops_from = static_cast<int32_t>(
        std::min(request->emitted + std::min(submission.min_new_tokens, config_.max_len), config_.max_len));
  check.range("num_logprobs", submission.num_logprobs, -1, config_.max_logprobs);
  request->num_logprobs = static_cast<int32_t>(submission.num_logprobs);
  if (submission.num_logprobs >= 0) request->scores = std::make_unique<Scores>();
  check.range("ngram_group", submission.ngram_group, 0, std::numeric_limits<int32_t>::max());
  request->ngram_group = static_cast<int32_t>(submission.ngram_group);
  request->extra = submission.extra;
  request->constrained = submission.constrained;
  request->migrated = submission.migrated;
  request->cacheable = submission.cacheable;
  request->shares_prefix = submission.shares_prefix;
  constexpr int32_t kLeast = std::numeric_limits<int32_t>::min(), kMost = std::numeric_limits<int32_t>::max();
  check.range("priority", submission.priority, kLeast, kMost);
  request->priority = static_cast<int32_t>(submission.priority);
  request->client = submission.client;
  const int64_t now = round::nanoseconds();
  check.range("timeout_ns", submission.timeout_ns, 0, kNoDeadline - now);
  if (submission.timeout_ns > 0) request->deadline = now + submission.timeout_ns;
  check.range("max_nodes", submission.max_nodes, 0, kMost);
  request->max_nodes = submission.max_nodes > 0 ? static_cast<int32_t>(submission.max_nodes) : kMost;
  return request;
}

// Queues requests and returns the id of the first. The turn of a request is the number of those that had left the queue
// when it came; that of each further one of a call is kTurns later. So among requests of other calls, which come while
// those of a large call wait, every kTurns-th slot is the large call's. The requests of a client queue in the same way,
// whatever their calls, by how many of them wait: one whose requests always wait owes nothing for those that ran.
int64_t Scheduler::queue(const char* op, std::span<std::unique_ptr<Request>> requests) {
  const std::lock_guard lock(mutex_);
  if (stopping_)
    throw std::runtime_error(std::string(op).append(": the scheduler has been stopped, expected one that runs"));
  const int64_t first = next_id_;
  turn_ = std::max(turn_, first - (static_cast<int64_t>(live_ids_.size()) - num_held_));
  int64_t turn = turn_;
  for (auto& request : requests) {
    if (request->client == 0) {
      request->turn = std::exchange(turn, turn + kTurns);
    } else {
      request->tail = tail_of(request->client);
      const int64_t num_before = request->tail.use_count() - 1;
      request->turn = *request->tail = std::max(turn_ + kTurns * num_before, *request->tail);
    }
    live_ids_.insert(request->id = next_id_++);
    submitted_.push_back(std::move(request));
  }
  state_changed_.notify_all();
  return first;
}

// Returns the turn of a client's last request, which its waiting requests share. Called under the lock.
std::shared_ptr<int64_t> Scheduler::tail_of(int64_t client) {
  std::shared_ptr<int64_t> tail = tails_[client].lock();
  if (!tail) {
    std::erase_if(tails_, [](const auto& other) { return other.second.expired(); });
    tails_[client] = tail = std::make_shared<int64_t>(turn_);
  }
  return tail;
}

bool Scheduler::cancel(int64_t request_id) {
  const std::lock_guard lock(mutex_);
  if (!live_ids_.contains(request_id)) return false;
  cancelled_.insert(request_id);
  return true;
}

void Scheduler::stop() {
  const std::lock_guard lock(mutex_);
  stopping_ = true;
  cancelled_.insert(live_ids_.begin(), live_ids_.end());
  state_changed_.notify_all();
}

void Scheduler::clear_cache() {
  std::unique_lock lock(mutex_);
  prefix_.clear_requested = true;
  state_changed_.notify_all();
  state_changed_.wait(lock, [this] { return !prefix_.clear_requested || stopping_ || !loop_running_; });
}

int64_t Scheduler::num_waiting() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(live_ids_.size()) - num_held_;
}

bool Scheduler::all_ended() const {
  const std::lock_guard lock(mutex_);
  return live_ids_.empty();
}

// --- the loop's bookkeeping

void Scheduler::queue_update(Request& request, FinishReason reason, int32_t status, std::exception_ptr error) {
  const int64_t num_tokens = request.take_tokens(updates_.tokens);
  updates_.each.push_back(
      {request.id, num_tokens, reason, status, request.counts, request.take_scores(), std::move(error)});
}

void Scheduler::finish(Request& request, FinishReason reason, int32_t status, std::exception_ptr error) {
  release_prefix(request);
  release_snapshots(request);
  queue_update(request, reason, status, std::move(error));
  const std::lock_guard lock(mutex_);
  live_ids_.erase(request.id);
}

void Scheduler::finish_held(Request& request, FinishReason reason, int32_t status, std::exception_ptr error) {
  if (reason != FinishReason::kError) cache_pages(request);
  release_prefix(request);
  to_deactivate_.push_back(request.slot);
  const auto released = slots_.release(request, RequestState::kFinished);
  update_counters();
  finish(*released, reason, status, std::move(error));
}

void Scheduler::enqueue(std::unique_ptr<Request> request) {
  next_deadline_ = std::min(next_deadline_, request->deadline);
  const auto rank = [](const auto& other) { return other->rank(); };
  waiting_.insert(std::ranges::upper_bound(waiting_, request->rank(), {}, rank), std::move(request));
}

void Scheduler::retract_last() {
  Request& last = slots_.last();
  cache_pages(last);
  release_prefix(last);
  release_snapshots(last);
  to_deactivate_.push_back(last.slot);
  enqueue(slots_.release(last, RequestState::kQueued));
  ++num_retractions_;
  update_counters();
}

void Scheduler::update_counters() {
  num_held_ = slots_.size();
  prefix_.num_pages = prefix_.cache.size();
  prefix_.num_shared_pages = prefix_.cache.num_locked();
  prefix_.num_snapshots = prefix_.cache.num_snapshots();
  prefix_.num_evicted_snapshots = prefix_.cache.num_evicted_snapshots();
  free_pages_ = config_.num_pages - pages_needed(config_, slots_.holders(), 0) - prefix_.cache.size();
}

// Deactivates slots and publishes the updates of a turn, even if the executor throws.
void Scheduler::flush() {
  try {
    if (!to_deactivate_.empty()) {
      const auto slots = std::exchange(to_deactivate_, {});
      given_back_.insert(given_back_.end(), slots.begin(), slots.end());
      executor_.deactivate(slots);
    }
    if (!given_back_.empty() && !slots_.any_running()) send({});  // else the next round's record does
  } catch (...) {
    publish_updates();
    throw;
  }
  publish_updates();
}

void Scheduler::publish_updates() {
  if (updates_.each.empty()) return;
  const Span span(recorder_, Work::kEmit);
  update_queue_.push(updates_);
}

}  // namespace specdec::scheduler
