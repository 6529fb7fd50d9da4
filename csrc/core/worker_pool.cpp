#include "core/worker_pool.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace specdec {

struct WorkerPool::State {
  const pid_t process = getpid();
  std::mutex one_call;  // held by the call that uses the workers
  std::mutex mutex;     // guards what follows
  std::condition_variable wake, done;
  uint64_t call = 0;   // index of the current call
  bool open = false;   // a worker that wakes too late finds its call closed; the call does not wait for it
  int64_t inside = 0;  // workers currently working
  bool stop = false;
  const std::function<void(int64_t)>* work = nullptr;
  int64_t count = 0;
  std::atomic<int64_t> next{0};
  std::vector<std::thread> threads;

  void take_all() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) (*work)(i);
  }

  void serve() {
    std::unique_lock lock(mutex);
    for (uint64_t seen = 0;;) {
      wake.wait(lock, [&] { return stop || (open && call != seen); });
      if (stop) return;
      seen = call;
      ++inside;
      lock.unlock();
      take_all();
      lock.lock();
      if (--inside == 0) done.notify_one();
    }
  }
};

WorkerPool::WorkerPool(int64_t threads) {
  if (threads <= 1) return;
  state_ = new State;
  for (int64_t i = 1; i < threads; ++i) state_->threads.emplace_back(&State::serve, state_);
}

WorkerPool::~WorkerPool() {
  if (state_ == nullptr || state_->process != getpid())
    return;  // a forked child has no threads to join: leak the state
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->wake.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
  delete state_;
}

void WorkerPool::run(int64_t count, const std::function<void(int64_t)>& work) {
  std::unique_lock<std::mutex> mine;
  if (state_ != nullptr && count > 1 && state_->process == getpid())
    mine = std::unique_lock(state_->one_call, std::try_to_lock);
  if (!mine.owns_lock()) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  State& s = *state_;
  {
    const std::lock_guard lock(s.mutex);
    s.work = &work;
    s.count = count;
    s.next.store(0, std::memory_order_relaxed);
    s.open = true;
    ++s.call;
  }
  s.wake.notify_all();
  s.take_all();
  std::unique_lock lock(s.mutex);
  s.open = false;
  s.done.wait(lock, [&] { return s.inside == 0; });
}

}  // namespace specdec
