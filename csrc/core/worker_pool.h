// WorkerPool: threads that share the work of a call with the calling thread.
#pragma once

#include <cstdint>
#include <functional>

namespace specdec {

class WorkerPool {
 public:
  // `threads` includes the caller's, so 1 starts none.
  explicit WorkerPool(int64_t threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Call work(i) for every i below `count` and return when all are done; `work` must not throw. A concurrent second
  // call runs on its own thread alone, as does a call in a forked child, which has no workers.
  void run(int64_t count, const std::function<void(int64_t)>& work);

 private:
  struct State;
  State* state_ = nullptr;  // null: no threads
};

}  // namespace specdec
