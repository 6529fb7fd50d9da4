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
      budget_(config.batch_sizes, config.rows, config.accept_width, config.max_idle_rounds),
      slots_(config.num_slots),
      cache_(config.prefix_cache ? config.num_pages : 0, config.page_size),
      last_batch_(config.max_batch()),
      last_rows_(config.rows.back().back()),
      free_pages_(config.num_pages) {
  for (const auto& each : config.all_rows()) took_.emplace_back(each.size());
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
  // One token at least must still be possible. What is short enough also fits the pool: check_config saw to that.
  check.that(static_cast<int64_t>(prompt.size()) < config_.max_len, "prompt", {"has ", prompt.size(), " tokens"},
             {"at most ", config_.max_len - 1, " (max_len - 1)"});
  auto request = std::make_unique<Request>();
  request->text = checked_tokens(check, "prompt", prompt);
  request->emitted = static_cast<int64_t>(prompt.size());
  check.that(submission.max_new_tokens >= 1, "max_new_tokens", {"is ", submission.max_new_tokens}, "at least 1");
  // A larger budget than the device's int32 can hold is no budget: max_len ends the request first.
  request->remaining = std::min(submission.max_new_tokens, config_.max_len);
  request->stop_tokens = checked_tokens(check, "stop_tokens", submission.stop_tokens);
  check.that(static_cast<int64_t>(submission.stop_tokens.size()) <= config_.max_stops, "stop_tokens",
             {"has ", submission.stop_tokens.size(), " entries"}, {"at most ", config_.max_stops});
  request->sampling = submission.sampling;
  request->streams = submission.streams;
  check.that(submission.min_new_tokens >= 0 && submission.min_new_tokens <= submission.max_new_tokens, "min_new_tokens",
             {"is ", submission.min_new_tokens}, "0 to max_new_tokens");
  if (submission.min_new_tokens > 0)  // what max_len cuts off needs no minimum
    request->stops_from = static_cast<int32_t>(
        std::min(request->emitted + std::min(submission.min_new_tokens, config_.max_len), config_.max_len));
  check.range("num_logprobs", submission.num_logprobs, -1, config_.max_logprobs);
  request->num_logprobs = static_cast<int32_t>(submission.num_logprobs);
  if (submission.num_logprobs >= 0) request->scores = std::make_unique<Scores>();
  check.range("ngram_group", submission.ngram_group, 0, std::numeric_limits<int32_t>::max());
  request->ngram_group = static_cast<int32_t>(submission.ngram_group);
  request->extra = submission.extra;
  request->constrained = submission.constrained;
  request->written = submission.written;
  constexpr int32_t kLeast = std::numeric_limits<int32_t>::min(), kMost = std::numeric_limits<int32_t>::max();
  check.range("priority", submission.priority, kLeast, kMost);
  request->priority = static_cast<int32_t>(submission.priority);
  const int64_t now = round::nanoseconds();
  check.range("timeout_ns", submission.timeout_ns, 0, kNoDeadline - now);
  if (submission.timeout_ns > 0) request->deadline = now + submission.timeout_ns;
  check.range("max_nodes", submission.max_nodes, 0, kMost);
  request->max_nodes = submission.max_nodes > 0 ? static_cast<int32_t>(submission.max_nodes) : kMost;
  return request;
}

// Returns the id of the first.
int64_t Scheduler::queue(const char* op, std::span<std::unique_ptr<Request>> requests) {
  const std::lock_guard lock(mutex_);
  if (stopping_)
    throw std::runtime_error(std::string(op).append(": the scheduler has been stopped, expected one that runs"));
  const int64_t first = next_id_;
  for (auto& request : requests) {
    alive_.insert(request->id = next_id_++);
    submitted_.push_back(std::move(request));
  }
  changed_.notify_all();
  return first;
}

bool Scheduler::cancel(int64_t request_id) {
  const std::lock_guard lock(mutex_);
  if (!alive_.contains(request_id)) return false;
  cancelled_.insert(request_id);
  return true;
}

void Scheduler::stop() {
  const std::lock_guard lock(mutex_);
  stopping_ = true;
  cancelled_.insert(alive_.begin(), alive_.end());
  changed_.notify_all();
}

void Scheduler::clear_cache() {
  std::unique_lock lock(mutex_);
  clearing_ = true;
  changed_.notify_all();
  changed_.wait(lock, [this] { return !clearing_ || stopping_ || !looping_; });
}

int64_t Scheduler::num_waiting() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(alive_.size()) - num_held_;
}

bool Scheduler::settled() const {
  const std::lock_guard lock(mutex_);
  return alive_.empty();
}

// --- the loop's bookkeeping

void Scheduler::note_tokens(Request& request, FinishReason reason, int32_t status, std::exception_ptr error) {
  const int64_t num_tokens = request.take_tokens(emissions_.tokens);
  emissions_.each.push_back(
      {request.id, num_tokens, reason, status, request.counts, request.take_scores(), std::move(error)});
}

void Scheduler::finish(Request& request, FinishReason reason, int32_t status, std::exception_ptr error) {
  leave_prefix(request);
  note_tokens(request, reason, status, std::move(error));
  const std::lock_guard lock(mutex_);
  alive_.erase(request.id);
}

void Scheduler::finish_held(Request& request, FinishReason reason, int32_t status, std::exception_ptr error) {
  if (reason != FinishReason::kError) cache_pages(request);
  leave_prefix(request);
  leaving_.push_back(request.slot);
  const auto released = slots_.release(request, RequestState::kFinished);
  publish();
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
  leave_prefix(last);
  leaving_.push_back(last.slot);
  enqueue(slots_.release(last, RequestState::kQueued));
  ++num_retractions_;
  publish();
}

void Scheduler::publish() {
  num_held_ = slots_.size();
  num_cached_pages_ = cache_.size();
  num_shared_pages_ = cache_.num_locked();
  free_pages_ = config_.num_pages - pages_needed(config_, slots_.holders(), 0) - cache_.size();
}

// Carries out what a turn has noted: gives back slots and hands out what requests have gained, whatever the executor
// throws.
void Scheduler::deliver() {
  try {
    if (!leaving_.empty()) {
      const auto slots = std::exchange(leaving_, {});
      given_back_.insert(given_back_.end(), slots.begin(), slots.end());
      executor_.deactivate(slots);
    }
    if (!given_back_.empty() && !slots_.any_running()) send({});  // else the next round takes them along
  } catch (...) {
    emit();
    throw;
  }
  emit();
}

void Scheduler::emit() {
  if (emissions_.each.empty()) return;
  const Span span(recorder_, Work::kEmit);
  outbox_.put(emissions_);
}

}  // namespace specdec::scheduler
