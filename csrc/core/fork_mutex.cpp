#include "core/fork_mutex.h"

#include <pthread.h>

#include <mutex>
#include <new>
#include <unordered_set>

namespace specdec {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_set<std::shared_mutex*> all;

  Registry();
};

// Return the registry of all mutexes. It is never destroyed, because threads may run until the process ends.
Registry& registry() {
  static auto* const registry = new Registry;
  return *registry;
}

void before_fork() {
  registry().mutex.lock();
  for (std::shared_mutex* mutex : registry().all) mutex->lock();
}

void after_fork() {
  for (std::shared_mutex* mutex : registry().all) mutex->unlock();
  registry().mutex.unlock();
}

// Construct new locks: pthread_rwlock_unlock requires the thread that locked, and the child's thread has another id.
void after_fork_in_child() {
  for (std::shared_mutex* mutex : registry().all) new (mutex) std::shared_mutex;
  registry().mutex.unlock();
}

Registry::Registry() { pthread_atfork(before_fork, after_fork, after_fork_in_child); }

}  // namespace

ForkMutex::ForkMutex() {
  const std::lock_guard lock(registry().mutex);
  registry().all.insert(this);
}

ForkMutex::~ForkMutex() {
  const std::lock_guard lock(registry().mutex);
  registry().all.erase(this);
}

}  // namespace specdec
