// Maps slots to requests. A request keeps its slot; the holders of slots are ordered by rank.
#pragma once

#include <memory>
#include <vector>

#include "scheduler/request.h"

namespace specdec::scheduler {

class Slots {
 public:
  explicit Slots(int64_t num_slots);

  bool empty() const { return holders_.empty(); }
  bool full() const { return free_.empty(); }
  int64_t size() const { return static_cast<int64_t>(holders_.size()); }

  // Gives the request the lowest free slot.
  Request& hold(std::unique_ptr<Request> request);
  // Takes the request out of its slot and puts it into state `next`.
  std::unique_ptr<Request> release(Request& request, RequestState next);

  // Returns the holder of a slot, or the holder with this id; null if there is none.
  Request* at(int32_t slot) const { return by_slot_[slot]; }
  Request* find(int64_t id) const;
  // Returns whether any request takes part in rounds.
  bool any_running() const;
  Request& last() const { return *holders_.back(); }
  // Returns the holders by rank. Invalidated by hold and release.
  const std::vector<std::unique_ptr<Request>>& holders() const { return holders_; }

 private:
  std::vector<std::unique_ptr<Request>> holders_;
  std::vector<Request*> by_slot_;
  std::vector<int32_t> free_;  // decreasing, so that the lowest is last
};

}  // namespace specdec::scheduler
