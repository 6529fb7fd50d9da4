// Pauses the loop between two turns, with nothing in flight, while another thread changes state that rounds use.
#include <stdexcept>

#include "scheduler/scheduler.h"

namespace specdec::scheduler {

// --- any thread

void Scheduler::pause(bool restart, int64_t request_id) {
  std::unique_lock lock(mutex_);
  state_changed_.wait(lock, [this] { return !pause_.requested || finished_; });  // a pause requested before
  if (!finished_) {
    pause_.requested = true;
    pause_.restart = restart;
    pause_.request_id = request_id;
    state_changed_.notify_all();
    state_changed_.wait(lock, [this] { return pause_.reached || finished_; });
  }
  if (finished_) {
    pause_.requested = false;
    throw std::runtime_error("pause: the scheduler has been stopped, expected one that runs");
  }
}

void Scheduler::resume() {
  const std::lock_guard lock(mutex_);
  pause_.requested = pause_.reached = false;
  state_changed_.notify_all();
}

std::optional<Held> Scheduler::held(int64_t request_id) const {
  const Request* request = slots_.find(request_id);
  if (request == nullptr || !request->running()) return std::nullopt;
  return Held{request->slot, request->text};
}

void Scheduler::reset_rounds() {
  if (!in_flight_.empty()) throw std::runtime_error("reset_rounds: rounds are in flight, expected none");
  num_sent_ = num_launched_ = 0;
}

// --- the loop

// Returns whether a pause is requested and its request, if any, runs or has ended.
bool Scheduler::must_pause() const {
  const std::lock_guard lock(mutex_);
  if (!pause_.requested) return false;
  if (pause_.request_id < 0 || !live_ids_.contains(pause_.request_id)) return true;
  const Request* request = slots_.find(pause_.request_id);
  return request != nullptr && request->running();
}

void Scheduler::pause_if_requested() {
  if (!must_pause()) return;
  read_all_rounds();
  if (pause_.restart) {
    while (!slots_.empty()) retract_last();
    empty_cache();
  }
  flush();
  std::unique_lock lock(mutex_);
  pause_.reached = true;
  state_changed_.notify_all();
  state_changed_.wait(lock, [this] { return !pause_.reached; });
}

}  // namespace specdec::scheduler
