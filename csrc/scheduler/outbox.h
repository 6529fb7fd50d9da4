// What requests have gained, on its way out of the loop: the loop's thread puts it here and goes on, whoever hands it
// out takes it. So the loop neither waits for Python nor runs code of those who read.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "scheduler/request.h"

namespace specdec::scheduler {

// Some new tokens of one request, possibly none; the last emission of a request is the one with a finish reason.
struct Emission {
  int64_t request_id, num_tokens;
  FinishReason reason = FinishReason::kRunning;
  int32_t status = 0;  // StatusBits, where the reason is kError; 0 where an executor call threw
  RoundCounts counts;
  std::unique_ptr<const Scores> scores;  // of the tokens; null where they were not asked for
  std::exception_ptr error;              // what the executor call threw
};

// What one turn or several have to report. The tokens stand together: a round of many requests is copied once.
struct Emissions {
  std::vector<Emission> each;
  std::vector<int32_t> tokens;  // of each, one after another
};

class Outbox {
 public:
  // Appends the emissions to the box, and leaves the argument empty.
  void put(Emissions& emissions);
  // Takes all that is there, which may be nothing.
  Emissions take();
  // Waits until there is something to take. False when the box is empty and closed.
  bool wait();
  void close();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  Emissions emissions_;
  bool closed_ = false;
};

}  // namespace specdec::scheduler
