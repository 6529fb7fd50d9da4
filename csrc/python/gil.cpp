#include "python/gil.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace specdec::python {
namespace {

std::atomic<bool> shutting_down = false;
std::atomic<std::thread::id> shutdown_thread;
std::atomic<int> busy = 0;  // threads that are acquiring the GIL, or hold it through WithGil
thread_local int inside = 0;

// A forked child does not have the other threads.
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { busy = inside; });

// PyGILState_Check() is also true after Python has deleted its thread states. Py_IsInitialized() is false by then.
bool holds_gil() { return PyGILState_Check() != 0 && Py_IsInitialized() != 0; }

// Count a thread that acquires the GIL, or block it during shutdown. The count comes before the check, so a thread is
// either counted before shutdown reads `busy`, or sees that shutdown has started. A thread that holds the GIL already,
// as one whose list of submissions is freed, goes on: blocked, it would keep the GIL.
void enter() {
  ++busy;
  if (!shutting_down || inside > 0 || holds_gil()) return;
  if (shutdown_thread.load() == std::this_thread::get_id()) return;
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

void block_other_threads() {
  using namespace std::chrono_literals;
  shutdown_thread = std::this_thread::get_id();
  shutting_down = true;
  PyThreadState* const state = PyEval_SaveThread();
  // Bounded, because their Python code may wait for something that this thread holds.
  const auto deadline = std::chrono::steady_clock::now() + 10s;
  while (busy > inside && std::chrono::steady_clock::now() < deadline) std::this_thread::sleep_for(100us);
  PyEval_RestoreThread(state);
}

}  // namespace specdec::python
