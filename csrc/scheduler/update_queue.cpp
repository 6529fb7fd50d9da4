#include "scheduler/update_queue.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace specdec::scheduler {

void UpdateQueue::push(RequestUpdates& updates) {
  const std::lock_guard lock(mutex_);
  if (updates_.each.empty()) {
    std::swap(updates_, updates);
  } else {
    std::ranges::move(updates.each, std::back_inserter(updates_.each));
    updates_.tokens.insert(updates_.tokens.end(), updates.tokens.begin(), updates.tokens.end());
  }
  updates.each.clear();
  updates.tokens.clear();
  changed_.notify_all();
}

RequestUpdates UpdateQueue::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(updates_, {});
}

bool UpdateQueue::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return closed_ || !updates_.each.empty(); });
  return !updates_.each.empty();
}

void UpdateQueue::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

}  // namespace specdec::scheduler
