#include "scheduler/recorder.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <memory>
#include <stdexcept>

#include "round/clock.h"

#if defined(SPECDEC_WITH_CUDA) && __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define SD_NVTX(call) call
#else
#define SD_NVTX(call) (void)0
#endif

namespace specdec::scheduler {
namespace {

const char* name_of(Work work) {
  constexpr const char* kNames[kNumWorks] = {"turn",   "admit", "prefill", "plan", "commands",
                                             "launch", "wait",  "read",    "emit"};
  return kNames[static_cast<int>(work)];
}

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

}  // namespace

Recorder::Recorder(bool traces, const std::vector<std::vector<int64_t>>& rows) : traces_(traces), rows_(rows) {
  for (const auto& each : rows_) by_rows_.emplace_back(each.size());
}

void Recorder::add(Work work, int64_t begin, int64_t end) {
  nanoseconds_[static_cast<int>(work)] += end - begin;
  if (!traces_) return;
  const std::lock_guard lock(mutex_);
  if (events_.size() < kMaxEvents) events_.push_back({work, begin, end});
}

void Recorder::add_round(int64_t started_at, int64_t ended_at, int64_t requests, size_t size, size_t kind,
                         bool follows) {
  num_rounds_ += 1;
  by_rows_[size][kind] += 1;
  num_requests_ += requests;
  device_ += ended_at - started_at;
  if (follows) {
    following_ += ended_at - started_at;
    gaps_ += std::max<int64_t>(started_at - last_ended_at_, 0);
  }
  last_ended_at_ = ended_at;
  trace({started_at, ended_at, round::nanoseconds(), requests, rows_[size][kind]});
}

void Recorder::add_first_round(int64_t started_at, int64_t ended_at, int64_t requests) {
  trace({started_at, ended_at, round::nanoseconds(), requests, 0});
}

void Recorder::trace(const Round& round) {
  if (!traces_) return;
  const std::lock_guard lock(mutex_);
  if (rounds_.size() < kMaxEvents) rounds_.push_back(round);
}

void Recorder::reset() {
  for (auto& nanoseconds : nanoseconds_) nanoseconds = 0;
  const std::lock_guard lock(mutex_);
  events_.clear();
}

Recorder::Totals Recorder::totals() const {
  const auto of = [&](Work work) { return nanoseconds_[static_cast<int>(work)].load(); };
  return {.rounds = num_rounds_,
          .requests = num_requests_,
          .host = of(Work::kTurn) - of(Work::kWait) - of(Work::kPrefill),
          .wait = of(Work::kWait),
          .prefill = of(Work::kPrefill),
          .device = device_,
          .following = following_,
          .gaps = gaps_};
}

std::vector<std::vector<int64_t>> Recorder::rounds_by_rows() const {
  std::vector<std::vector<int64_t>> rounds;
  for (const auto& each : by_rows_) rounds.emplace_back(each.begin(), each.end());
  return rounds;
}

void Recorder::write_trace(const std::string& path) const {
  const std::unique_ptr<std::FILE, CloseFile> file(std::fopen(path.c_str(), "w"));
  if (!file) throw std::runtime_error("trace: cannot write " + path);

  const std::lock_guard lock(mutex_);
  // The device has another clock; the round that was read soonest after its end gives the offset.
  int64_t offset = std::numeric_limits<int64_t>::max(), first = offset;
  for (const Round& round : rounds_) offset = std::min(offset, round.read_at - round.ended_at);
  for (const Event& event : events_) first = std::min(first, event.begin);

  std::fprintf(file.get(), "{\"traceEvents\": [\n");
  for (int thread = 0; thread < 2; ++thread)
    std::fprintf(file.get(),
                 "{\"name\": \"thread_name\", \"ph\": \"M\", \"pid\": 0, \"tid\": %d, \"args\": {\"name\": \"%s\"}},\n",
                 thread, thread == 0 ? "loop" : "device");
  const auto write = [&](const char* name, int thread, int64_t begin, int64_t end) {
    std::fprintf(file.get(), "{\"name\": \"%s\", \"ph\": \"X\", \"pid\": 0, \"tid\": %d, \"ts\": %.3f, \"dur\": %.3f",
                 name, thread, 1e-3 * static_cast<double>(begin - first), 1e-3 * static_cast<double>(end - begin));
  };
  for (const Event& event : events_) {
    write(name_of(event.work), 0, event.begin, event.end);
    std::fprintf(file.get(), "},\n");
  }
  for (const Round& round : rounds_) {
    write(round.nodes > 0 ? "round" : "first round", 1, round.started_at + offset, round.ended_at + offset);
    std::fprintf(file.get(), ", \"args\": {\"requests\": %lld, \"nodes\": %lld}},\n",
                 static_cast<long long>(round.requests), static_cast<long long>(round.nodes));
  }
  std::fprintf(file.get(), "{\"name\": \"end\", \"ph\": \"M\", \"pid\": 0}\n]}\n");
  if (std::fflush(file.get()) != 0 || std::ferror(file.get()))  // for example, the disk is full
    throw std::runtime_error("trace: cannot write " + path);
}

Span::Span(Recorder& recorder, Work work) : recorder_(recorder), work_(work), begin_(round::nanoseconds()) {
  SD_NVTX(nvtxRangePushA(name_of(work)));
}

Span::~Span() {
  SD_NVTX(nvtxRangePop());
  recorder_.add(work_, begin_, round::nanoseconds());
}

}  // namespace specdec::scheduler
