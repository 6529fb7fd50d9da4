// The loop stands still between two turns, with nothing in flight, while another thread works on what rounds work on.
#include <stdexcept>

#include "scheduler/scheduler.h"

namespace specdec::scheduler {

// --- any thread

void Scheduler::pause(bool restart, int64_t request_id) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !pausing_ || over_; });  // whoever came before
  if (!over_) {
    pausing_ = true;
    restarting_ = restart;
    awaited_ = request_id;
    changed_.notify_all();
    changed_.wait(lock, [this] { return stands_still_ || over_; });
  }
  if (over_) {
    pausing_ = false;
    throw std::runtime_error("pause: the scheduler has been stopped, expected one that runs");
  }
}

void Scheduler::resume() {
  const std::lock_guard lock(mutex_);
  pausing_ = stands_still_ = false;
  changed_.notify_all();
}

std::optional<Held> Scheduler::held(int64_t request_id) const {
  const Request* request = slots_.find(request_id);
  if (request == nullptr || !request->running()) return std::nullopt;
  return Held{request->slot, request->text};
}

void Scheduler::forget_rounds() {
  if (!in_flight_.empty()) throw std::runtime_error("forget_rounds: rounds are in flight, expected none");
  num_sent_ = num_launched_ = 0;
}

// --- the loop

// Whether somebody waits for the loop to stand still, and it is time to.
bool Scheduler::must_pause() const {
  const std::lock_guard lock(mutex_);
  if (!pausing_) return false;
  if (awaited_ < 0 || !alive_.contains(awaited_)) return true;
  const Request* request = slots_.find(awaited_);
  return request != nullptr && request->running();
}

void Scheduler::stand_still() {
  if (!must_pause()) return;
  read_rounds();
  if (restarting_) {
    while (!slots_.empty()) retract_last();
    empty_cache();
  }
  deliver();
  std::unique_lock lock(mutex_);
  stands_still_ = true;
  changed_.notify_all();
  changed_.wait(lock, [this] { return !stands_still_; });
}

}  // namespace specdec::scheduler
