// Releasing and acquiring the GIL, safely during interpreter shutdown.
//
// A daemon thread may be in a call without the GIL when Python shuts down. Python before 3.14 ends a thread that then
// acquires the GIL by unwinding it, which noexcept destructors turn into an abort. So after shutdown starts, other
// threads block here instead of acquiring the GIL, and Python continues when those that acquired it earlier have
// released it, or after ten seconds.
#pragma once

#include <Python.h>

namespace specdec::python {

// Releases the GIL for a scope.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Holds the GIL for a scope.
class WithGil {
 public:
  WithGil();
  ~WithGil();
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// Start shutdown: block all other threads that acquire the GIL from now on. Called by the thread that shuts Python
// down, with the GIL.
void block_other_threads();

}  // namespace specdec::python
