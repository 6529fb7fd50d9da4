// A lock that a fork waits for.
#pragma once

#include <shared_mutex>

namespace specdec {

// A shared_mutex that is free in a forked child: a fork waits until it has all of them. Otherwise a child would find
// one held for good by a thread that it does not have, and what that guards half written. None is made, or goes, while
// another one is held.
class ForkMutex : public std::shared_mutex {
 public:
  ForkMutex();
  ~ForkMutex();
};

}  // namespace specdec
