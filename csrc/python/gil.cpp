#include "python/gil.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace specdec::python {
namespace {

std::atomic<bool> ending = false;
std::atomic<std::thread::id> ends_it;
std::atomic<int> busy = 0;  // threads that take the GIL right now, or have it by WithGil
thread_local int inside = 0;

// A forked child has none of those threads.
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { busy = inside; });

// Who comes for the GIL has either been counted before Python asked for the number, or sees that it ends.
void enter() {
  ++busy;
  if (!ending || inside > 0 || ends_it.load() == std::this_thread::get_id()) return;
  --busy;
  while (true) pause();
}

}  // namespace

WithoutGil::WithoutGil() : state_(PyEval_SaveThread()) {}

WithoutGil::~WithoutGil() {
  enter();
  PyEval_RestoreThread(state_);
  --busy;
}

WithGil::WithGil() {
  enter();
  state_ = PyGILState_Ensure();
  ++inside;
}

WithGil::~WithGil() {
  --inside;
  PyGILState_Release(state_);
  --busy;
}

void keep_other_threads_out() {
  using namespace std::chrono_literals;
  ends_it = std::this_thread::get_id();
  ending = true;
  PyThreadState* const state = PyEval_SaveThread();
  // What they call in Python may wait for what this thread holds.
  const auto latest = std::chrono::steady_clock::now() + 10s;
  while (busy > inside && std::chrono::steady_clock::now() < latest) std::this_thread::sleep_for(100us);
  PyEval_RestoreThread(state);
}

}  // namespace specdec::python
