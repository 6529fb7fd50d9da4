// Threads that share the work of a call with the thread that makes it.
#pragma once

#include <cstdint>
#include <functional>

namespace specdec {

class WorkerPool {
 public:
  // With the caller's own, so 1 starts none.
  explicit WorkerPool(int64_t threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // work(i) for every i below `count`, and returns when all are done; `work` does not throw. A second call at the same
  // time, or one in a forked child, where the threads are not, works alone.
  void run(int64_t count, const std::function<void(int64_t)>& work);

 private:
  struct State;
  State* state_ = nullptr;  // null: no threads
};

}  // namespace specdec
