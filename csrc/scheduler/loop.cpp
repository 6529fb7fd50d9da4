// The loop: one turn of continuous batching, from top to bottom.
//
// This loop is synchronous: a round has been read before the next one is launched, so the number of rounds in flight is
// 0 wherever pages are counted. Overlapping rounds changes this file and what it keeps of a round (`round_`).
#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "core/slots.h"
#include "scheduler/admission.h"
#include "scheduler/scheduler.h"

namespace specdec::scheduler {
namespace {

constexpr int64_t kInFlight = 0;

}  // namespace

// One executor call on behalf of these holders of slots: if it throws, they end, and the exception goes on its way.
template <class Call>
void Scheduler::call_for(const std::vector<Request*>& requests, Call&& call) {
  try {
    call();
  } catch (...) {
    for (Request* request : requests) finish_held(*request, FinishReason::kError);
    throw;
  }
}

bool Scheduler::turn() {
  deliver();  // what an exception of the turn before left over
  read_mail();
  make_room();
  deliver();  // slots are given back before they are given away
  admit();
  prefill_one_chunk();
  launch_round();
  read_results();
  deliver();
  return !settled();
}

// New requests join the queue; cancelled ones end, wherever they are.
void Scheduler::read_mail() {
  std::unordered_set<int64_t> cancelled;
  {
    const std::lock_guard lock(mutex_);
    std::ranges::move(submitted_, std::back_inserter(waiting_));
    submitted_.clear();
    cancelled.swap(cancelled_);
  }
  if (cancelled.empty()) return;

  std::vector<Request*> running;
  for (const auto& holder : slots_.holders())
    if (cancelled.contains(holder->id)) running.push_back(holder.get());
  for (Request* request : running) finish_held(*request, FinishReason::kCancelled);

  std::erase_if(waiting_, [&](const auto& request) {
    if (!cancelled.contains(request->id)) return false;
    finish(*request, FinishReason::kCancelled);
    return true;
  });
}

// Every slot must be sure of its pages in the next round; until then the newest request goes back to the queue. The
// oldest is never alone in want: the pool holds one sequence of any length.
void Scheduler::make_room() {
  while (!round_fits(config_, slots_.holders(), kInFlight)) retract_newest();
}

// First come, first served: whoever does not fit holds up those behind. A request that make_room has just retracted
// does not fit again yet, since admission asks for more than a round.
void Scheduler::admit() {
  while (!waiting_.empty() && !slots_.full() && request_fits(config_, slots_.holders(), *waiting_.front(), kInFlight)) {
    Request& request = slots_.hold(std::move(waiting_.front()));
    waiting_.pop_front();
    publish();
    call_for({&request}, [&] { executor_.begin(request.slot, request.id, request.text); });
    if (request.seq_len() == 0) activate(request);
  }
}

// One chunk of the oldest prefill, so that no decoding request waits for more than that between its rounds.
void Scheduler::prefill_one_chunk() {
  const auto oldest = std::ranges::find(slots_.holders(), RequestState::kPrefilling, &Request::state);
  if (oldest == slots_.holders().end()) return;

  Request& request = **oldest;
  const int64_t start = request.prefilled;
  const int64_t count = std::min(config_.prefill_chunk, request.seq_len() - start);
  const bool is_last = start + count == request.seq_len();
  call_for({&request},
           [&] { executor_.prefill(request.slot, Tokens(request.text).subspan(start, count), start, is_last); });
  request.prefilled += count;
  if (is_last) activate(request);
}

void Scheduler::activate(Request& request) {
  call_for({&request}, [&] {
    executor_.activate(request.slot, request.id, request.seq_len(), request.text.back(), request.remaining,
                       request.stop_tokens);
  });
  request.start_running();
}

// All running requests, or those who have waited longest where a round has fewer rows.
void Scheduler::launch_round() {
  round_.clear();
  for (const auto& holder : slots_.holders())
    if (holder->running()) round_.push_back(holder.get());
  if (round_.empty()) return;
  if (std::ssize(round_) > config_.max_batch) {
    std::ranges::stable_sort(round_, {}, &Request::last_round);
    round_.resize(config_.max_batch);
  }

  ++round_number_;
  std::vector<int32_t> slots;
  for (Request* request : round_) {
    request->last_round = round_number_;
    slots.push_back(request->slot);
  }
  call_for(round_, [&] { executor_.round(slots); });
}

void Scheduler::read_results() {
  if (round_.empty()) return;
  bool progress = false;
  for (size_t row = 0; row < round_.size(); ++row) progress |= read_row(static_cast<int64_t>(row), *round_[row]);
  publish();

  // Every slot stalled, although its pages were counted: somebody else holds some. Retracting would only admit the
  // same request again, so the newest ends, and gives the others its pages.
  if (!progress) finish_held(**std::ranges::max_element(round_, {}, &Request::id), FinishReason::kError, {}, kStalled);
}

// What the round did for one request. False when it stalled; then its state is as before the round.
bool Scheduler::read_row(int64_t row, Request& request) {
  const int32_t* tokens = results_.out_tokens + row * config_.accept_width;
  const int64_t count = results_.out_len[row];
  const auto reason = static_cast<FinishReason>(results_.finish_reasons[row]);
  const bool goes_on = reason == FinishReason::kNone;
  int32_t status = results_.status[row] & ~kStalled;

  // The limits are the device's to keep. Arrays that break them are as little use as a broken slot.
  const int64_t room = std::min({config_.accept_width, request.remaining, config_.max_len - std::ssize(request.text)});
  const bool in_range =
      count >= 0 && count <= room && reason >= FinishReason::kNone && reason <= FinishReason::kContext;
  if (!in_range || std::any_of(tokens, tokens + count, [](int32_t token) { return token < 0; })) status |= kBadLength;
  if (status != 0) {
    finish_held(request, FinishReason::kError, {}, status);
    return true;
  }
  if (count == 0 && goes_on) return false;

  if (count > 0) request.accept(tokens, count, results_.num_nodes[row]);
  std::vector<int32_t> produced(tokens, tokens + count);
  if (goes_on)
    notices_.push_back(Emission{request.id, std::move(produced), reason, request.counts});
  else
    finish_held(request, reason, std::move(produced));
  return true;
}

// --- running it

class Scheduler::LoopGuard {
 public:
  explicit LoopGuard(Scheduler& scheduler) : looping_(scheduler.looping_) {
    if (looping_.exchange(true)) throw std::runtime_error("step: the loop is running already, expected one at a time");
  }
  ~LoopGuard() { looping_ = false; }
  LoopGuard(const LoopGuard&) = delete;
  LoopGuard& operator=(const LoopGuard&) = delete;

 private:
  std::atomic<bool>& looping_;
};

bool Scheduler::step() {
  const LoopGuard guard(*this);
  return turn();
}

void Scheduler::run_until_idle(const std::function<void()>& between_turns) {
  const LoopGuard guard(*this);
  while (turn()) between_turns();
}

}  // namespace specdec::scheduler
