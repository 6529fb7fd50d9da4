// ForkMutex: a shared mutex that is safe across fork().
#pragma once

#include <shared_mutex>

namespace specdec {

// A shared_mutex that is unlocked in a forked child: fork() waits until it holds all of them. Otherwise a child could
// inherit a mutex that is locked forever by a thread that it does not have, and half-written data. Do not construct or
// destroy one while holding another.
class ForkMutex : public std::shared_mutex {
 public:
  ForkMutex();
  ~ForkMutex();
};

}  // namespace specdec
