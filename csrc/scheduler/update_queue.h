// Queues updates of requests on their way out of the loop: the loop's thread pushes them and goes on; another thread
// takes them and notifies the requests' readers. So the loop neither waits for Python nor runs readers' code.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "scheduler/request.h"

namespace specdec::scheduler {

// New tokens of one request, possibly none. The last update of a request has a finish reason.
struct RequestUpdate {
  int64_t request_id, num_tokens;
  FinishReason reason = FinishReason::kRunning;
  int32_t status = 0;  // StatusBits if the reason is kError; 0 if an executor call threw
  RoundCounts counts;
  std::unique_ptr<const Scores> scores;  // of the tokens; null if the request wants none
  std::exception_ptr error;              // what the executor call threw
};

// The updates of one turn or several. Their tokens are contiguous: a round of many requests is copied once.
struct RequestUpdates {
  std::vector<RequestUpdate> each;
  std::vector<int32_t> tokens;  // of each, one after another
};

class UpdateQueue {
 public:
  // Appends updates, and leaves the argument empty.
  void push(RequestUpdates& updates);
  // Takes all updates there are, possibly none.
  RequestUpdates take();
  // Waits for an update. Returns false if the queue is empty and closed.
  bool wait();
  void close();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  RequestUpdates updates_;
  bool closed_ = false;
};

}  // namespace specdec::scheduler
