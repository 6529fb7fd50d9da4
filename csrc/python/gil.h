// Leaving the GIL and taking it, also when the interpreter ends.
//
// A daemon thread may be in a call without the GIL when Python ends. Pythons before 3.14 end a thread that then asks
// for the GIL by unwinding it, which destructors do not allow: the process aborts. So from the moment that Python
// begins to end, every other thread that comes for the GIL waits here for the end of the process, and Python goes on
// when those that came before have let it go, or after ten seconds.
#pragma once

#include <Python.h>

namespace specdec::python {

// While it lives, this thread has no GIL.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// While it lives, this thread has the GIL.
class WithGil {
 public:
  WithGil();
  ~WithGil();
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// Python begins to end, by this thread, which has the GIL.
void keep_other_threads_out();

}  // namespace specdec::python
