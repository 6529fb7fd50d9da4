#include "scheduler/outbox.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace specdec::scheduler {

void Outbox::put(Emissions& emissions) {
  const std::lock_guard lock(mutex_);
  if (emissions_.each.empty()) {
    std::swap(emissions_, emissions);
  } else {
    std::ranges::move(emissions.each, std::back_inserter(emissions_.each));
    emissions_.tokens.insert(emissions_.tokens.end(), emissions.tokens.begin(), emissions.tokens.end());
  }
  emissions.each.clear();
  emissions.tokens.clear();
  changed_.notify_all();
}

Emissions Outbox::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(emissions_, {});
}

bool Outbox::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return closed_ || !emissions_.each.empty(); });
  return !emissions_.each.empty();
}

void Outbox::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

}  // namespace specdec::scheduler
