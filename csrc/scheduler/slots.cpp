#include "scheduler/slots.h"

#include <algorithm>
#include <functional>

namespace specdec::scheduler {

Slots::Slots(int64_t num_slots) : by_slot_(num_slots) {
  for (int64_t slot = num_slots - 1; slot >= 0; --slot) free_.push_back(static_cast<int32_t>(slot));
  holders_.reserve(num_slots);
}

Request& Slots::hold(std::unique_ptr<Request> request) {
  request->take_slot(free_.back());
  free_.pop_back();
  by_slot_[request->slot] = request.get();
  const auto place = std::ranges::upper_bound(holders_, request->rank(), {}, &Request::rank);
  return **holders_.insert(place, std::move(request));
}

std::unique_ptr<Request> Slots::release(Request& request, RequestState next) {
  const auto it = std::ranges::find(holders_, &request, &std::unique_ptr<Request>::get);
  std::unique_ptr<Request> released = std::move(*it);
  holders_.erase(it);
  by_slot_[request.slot] = nullptr;
  free_.insert(std::ranges::upper_bound(free_, request.slot, std::greater<>()), request.slot);
  released->leave_slot(next);
  return released;
}

Request* Slots::find(int64_t id) const {
  const auto it = std::ranges::find(holders_, id, &Request::id);
  return it == holders_.end() ? nullptr : it->get();
}

bool Slots::any_running() const { return std::ranges::any_of(holders_, &Request::running); }

}  // namespace specdec::scheduler
