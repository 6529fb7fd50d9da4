#include "scheduler/scheduler.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <string>

#include "core/check.h"
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

Scheduler::Scheduler(const Config& config, Executor& executor, const RoundResults& results)
    : config_((check_config(config), config)),
      executor_(executor),
      results_(results),
      slots_(config.num_slots),
      free_pages_(config.num_pages) {}

// --- any thread

int64_t Scheduler::submit(const std::vector<int64_t>& prompt, int64_t max_new_tokens,
                          const std::vector<int64_t>& stop_tokens) {
  Check check("submit");
  check.that(!prompt.empty(), "prompt", "is empty", "at least 1 token");
  // One token at least must still be possible. What is short enough also fits the pool: check_config saw to that.
  check.that(static_cast<int64_t>(prompt.size()) < config_.max_len, "prompt",
             "has " + std::to_string(prompt.size()) + " tokens",
             "at most " + std::to_string(config_.max_len - 1) + " (max_len - 1)");
  auto request = std::make_unique<Request>();
  request->text = checked_tokens(check, "prompt", prompt);
  check.that(max_new_tokens >= 1, "max_new_tokens", "is " + std::to_string(max_new_tokens), "at least 1");
  // A larger budget than the device's int32 can hold is no budget: max_len ends the request first.
  request->remaining = std::min(max_new_tokens, config_.max_len);
  request->stop_tokens = checked_tokens(check, "stop_tokens", stop_tokens);

  const std::lock_guard lock(mutex_);
  const int64_t id = request->id = next_id_++;
  alive_.insert(id);
  submitted_.push_back(std::move(request));
  ++unsettled_;
  changed_.notify_all();
  return id;
}

bool Scheduler::cancel(int64_t request_id) {
  const std::lock_guard lock(mutex_);
  if (!alive_.contains(request_id)) return false;
  cancelled_.insert(request_id);
  return true;
}

void Scheduler::abort_all() {
  const std::lock_guard lock(mutex_);
  cancelled_.insert(alive_.begin(), alive_.end());
}

bool Scheduler::wait_for_work(std::chrono::duration<double> timeout) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return unsettled_ > 0; });
}

bool Scheduler::drain(std::chrono::duration<double> timeout) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return unsettled_ == 0; });
}

int64_t Scheduler::num_waiting() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(alive_.size()) - num_held_;
}

bool Scheduler::settled() const {
  const std::lock_guard lock(mutex_);
  return unsettled_ == 0;
}

// --- the loop's bookkeeping

void Scheduler::finish(const Request& request, FinishReason reason, std::vector<int32_t> tokens, int32_t status) {
  notices_.push_back(Emission{request.id, std::move(tokens), reason, request.counts, status});
  const std::lock_guard lock(mutex_);
  alive_.erase(request.id);
}

void Scheduler::finish_held(Request& request, FinishReason reason, std::vector<int32_t> tokens, int32_t status) {
  notices_.push_back(Deactivation{request.slot, request.id});
  const auto released = slots_.release(request, RequestState::kFinished);
  publish();
  finish(*released, reason, std::move(tokens), status);
}

void Scheduler::retract_newest() {
  Request& newest = slots_.newest();
  notices_.push_back(Deactivation{newest.slot, newest.id});
  waiting_.push_front(slots_.release(newest, RequestState::kQueued));
  ++num_retractions_;
  publish();
}

void Scheduler::publish() {
  num_held_ = slots_.size();
  free_pages_ = config_.num_pages - pages_needed(config_, slots_.holders(), 0);
}

void Scheduler::deliver() {
  while (!notices_.empty()) {
    const auto notice = std::move(notices_.front());
    notices_.pop_front();
    if (const auto* slot = std::get_if<Deactivation>(&notice)) {
      executor_.deactivate(slot->slot, slot->request_id);
      continue;
    }
    const auto& emission = std::get<Emission>(notice);
    std::exception_ptr error;
    try {
      executor_.emit(emission);
    } catch (...) {
      error = std::current_exception();
    }
    if (emission.reason != FinishReason::kNone) {
      const std::lock_guard lock(mutex_);
      if (--unsettled_ == 0) changed_.notify_all();
    } else if (error) {
      finish_held(*slots_.find(emission.request_id), FinishReason::kError);
    }
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace specdec::scheduler
