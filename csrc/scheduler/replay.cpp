#include "scheduler/replay.h"

#include <poll.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace specdec::scheduler {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds, std::chrono::milliseconds, std::chrono::seconds;

constexpr int64_t kLine = 64;  // bytes of a cache line
constexpr int64_t kReason = 16384;
// A wait polls without sleeping at first, naps briefly for a while, and then longer.
constexpr auto kSpin = microseconds(50), kNap = microseconds(20), kLongNap = microseconds(400);
constexpr auto kShortNaps = milliseconds(200);
// A rank that is this much later than rank 0, or whose process does not run for so long, counts as hanging.
constexpr auto kMostLag = seconds(8);
constexpr auto kTick = milliseconds(100);
// A round that has not finished after this long counts as waiting for ever, on any rank.
constexpr auto kMostRound = seconds(120);
constexpr size_t kName = 32;
// In this time a watch finds that a process has ended.
constexpr auto kWatchNotices = milliseconds(400);
// A rank ends itself if it is still there this long after a failure, or after rank 0 has closed and ended.
constexpr auto kGrace = seconds(1), kCloseGrace = seconds(20);

enum class Kind : int64_t { kBytes, kLaunch };
enum class Failure : int64_t { kNone, kWriting, kThere };

struct RecordHead {
  Kind kind;
  int64_t size;  // bytes after the head
  LaunchRecord launch;
};

template <class T>
T load(T& word) {
  return std::atomic_ref(word).load(std::memory_order_acquire);
}
template <class T>
void store(T& word, T value) {
  std::atomic_ref(word).store(value, std::memory_order_release);
}

int64_t in_lines(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

int open_process(int64_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0)); }

// Returns how a process ended, as far as its parent can know.
std::string end_of(int process) {
  siginfo_t info{};
  constexpr auto kPidfd = static_cast<idtype_t>(3);
  if (waitid(kPidfd, static_cast<id_t>(process), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0) {
    if (info.si_code == CLD_EXITED) return "exited with status " + std::to_string(info.si_status);
    return "was killed by signal " + std::to_string(info.si_status);
  }
  return "has ended";
}

}  // namespace

struct alignas(kLine) ReplayChannel::Header {
  int64_t written;  // bytes of records so far
  int64_t closed;
  int64_t failure;  // a Failure
  char reason[kReason];
};

struct alignas(kLine) ReplayChannel::RankWords {
  int64_t read;       // bytes of records so far
  int64_t published;  // number of the last round, plus 1; of rank 0, of the last that it has compared
  int64_t made;       // calls
  int64_t beats;      // of its watch
  int64_t process;
  char call[kName];  // that it makes
};

// The progress of a rank.
struct ReplayChannel::Pace {
  int64_t count = 0;
  int ticks = 0;  // since it has changed, while another rank had a larger count
};

int64_t ReplayChannel::bytes(const ReplaySizes& sizes) {
  const int64_t rounds = sizes.num_ranks * sizes.depth * in_lines(4 * sizes.words);
  return static_cast<int64_t>(sizeof(Header)) + sizes.num_ranks * static_cast<int64_t>(sizeof(RankWords)) + rounds +
         sizes.capacity;
}

ReplayChannel::ReplayChannel(std::byte* memory, const ReplaySizes& sizes, int64_t rank)
    : memory_(memory), sizes_(sizes), rank_(rank) {
  store(of_rank(rank).process, static_cast<int64_t>(getpid()));
}

ReplayChannel::~ReplayChannel() {
  stops_ = true;
  if (watch_.joinable()) watch_.join();
}

ReplayChannel::Header& ReplayChannel::header() const { return *reinterpret_cast<Header*>(memory_); }

ReplayChannel::RankWords& ReplayChannel::of_rank(int64_t rank) const {
  return reinterpret_cast<RankWords*>(memory_ + sizeof(Header))[rank];
}

int32_t* ReplayChannel::published(int64_t rank, int64_t number) const {
  std::byte* rounds = memory_ + sizeof(Header) + sizes_.num_ranks * sizeof(RankWords);
  const int64_t row = rank * sizes_.depth + round::ring_row(number, sizes_.depth);
  return reinterpret_cast<int32_t*>(rounds + row * in_lines(4 * sizes_.words));
}

std::byte* ReplayChannel::ring() const {
  return reinterpret_cast<std::byte*>(published(sizes_.num_ranks, 0));  // after the rounds of the last rank
}

int64_t ReplayChannel::process(int64_t rank) const { return load(of_rank(rank).process); }

std::string ReplayChannel::called(int64_t rank) const {
  return "rank " + std::to_string(rank) + " (process " + std::to_string(process(rank)) + ")";
}

void ReplayChannel::fail(const std::string& reason) {
  const std::lock_guard lock(fail_mutex_);
  int64_t before = static_cast<int64_t>(Failure::kNone);
  const std::atomic_ref failure(header().failure);
  if (!failure.compare_exchange_strong(before, static_cast<int64_t>(Failure::kWriting))) return;
  const size_t size = std::min<size_t>(reason.size(), kReason - 1);
  std::memcpy(header().reason, reason.data(), size);
  header().reason[size] = '\0';
  failure.store(static_cast<int64_t>(Failure::kThere), std::memory_order_release);
}

void ReplayChannel::fail_unless_others(const std::string& reason) {
  const auto end = Clock::now() + kWatchNotices;
  while (load(header().failure) == static_cast<int64_t>(Failure::kNone) && Clock::now() < end)
    std::this_thread::sleep_for(kNap);
  fail(reason);
}

std::string ReplayChannel::failure() const {
  if (load(header().failure) != static_cast<int64_t>(Failure::kThere)) return "";
  return header().reason;
}

void ReplayChannel::expect_alive() const {
  if (load(header().failure) == static_cast<int64_t>(Failure::kThere)) throw std::runtime_error(header().reason);
}

void ReplayChannel::wait_until(const std::function<bool()>& done) const {
  const auto start = Clock::now();
  while (!done()) {
    const auto waited = Clock::now() - start;
    if (waited < kSpin) continue;
    expect_alive();
    std::this_thread::sleep_for(waited < kShortNaps ? kNap : kLongNap);
  }
}

// --- records

void ReplayChannel::put(const void* data, int64_t size) {
  const auto* from = static_cast<const std::byte*>(data);
  int64_t written = header().written;
  while (size > 0) {
    int64_t room = 0;
    wait_until([&] {
      int64_t slowest = written;
      for (int64_t rank = 1; rank < sizes_.num_ranks; ++rank) slowest = std::min(slowest, load(of_rank(rank).read));
      room = sizes_.capacity - (written - slowest);
      return room > 0;
    });
    const int64_t begin = written % sizes_.capacity, count = std::min({size, room, sizes_.capacity - begin});
    std::memcpy(ring() + begin, from, static_cast<size_t>(count));
    from += count;
    size -= count;
    written += count;
    store(header().written, written);
  }
}

void ReplayChannel::get(void* data, int64_t size) {
  auto* to = static_cast<std::byte*>(data);
  int64_t& read = of_rank(rank_).read;
  while (size > 0) {
    int64_t there = 0;
    wait_until([&] {
      there = load(header().written) - read;
      return there > 0;
    });
    const int64_t begin = read % sizes_.capacity, count = std::min({size, there, sizes_.capacity - begin});
    std::memcpy(to, ring() + begin, static_cast<size_t>(count));
    to += count;
    size -= count;
    store(read, read + count);
  }
}

void ReplayChannel::enter(std::string_view name) {
  char* call = of_rank(rank_).call;
  const size_t size = std::min(name.size(), kName - 1);
  std::memcpy(call, name.data(), size);
  call[size] = '\0';
}

void ReplayChannel::made() { store(of_rank(rank_).made, num_records_); }

void ReplayChannel::write(std::string_view record, std::string_view name) {
  expect_alive();
  made();
  enter(name);
  ++num_records_;
  const RecordHead head{.kind = Kind::kBytes, .size = std::ssize(record), .launch = {}};
  put(&head, sizeof head);
  put(record.data(), head.size);
}

void ReplayChannel::write(const LaunchRecord& launch, std::span<const int32_t> words) {
  expect_alive();
  made();
  enter("launch");
  ++num_records_;
  const RecordHead head{.kind = Kind::kLaunch, .size = std::ssize(words) * 4, .launch = launch};
  put(&head, sizeof head);
  put(words.data(), head.size);
}

void ReplayChannel::close() { store(header().closed, int64_t{1}); }

bool ReplayChannel::has_record() const { return load(header().written) > of_rank(rank_).read; }

bool ReplayChannel::closed() const { return load(header().closed) != 0; }

ReplayChannel::Record ReplayChannel::read() {
  ++num_records_;
  RecordHead head;
  get(&head, sizeof head);
  Record record;
  if (head.kind == Kind::kLaunch) {
    record.launch = head.launch;
    record.words.resize(static_cast<size_t>(head.size / 4));
    get(record.words.data(), head.size);
  } else {
    record.bytes.resize(static_cast<size_t>(head.size));
    get(record.bytes.data(), head.size);
  }
  return record;
}

// --- rounds

void ReplayChannel::publish(int64_t number, std::span<const int32_t> words) {
  std::ranges::copy(words, published(rank_, number));
  store(of_rank(rank_).published, number + 1);
}

void ReplayChannel::reset_rounds() {
  for (int64_t rank = 0; rank < sizes_.num_ranks; ++rank) store(of_rank(rank).published, int64_t{0});
}

int64_t ReplayChannel::compare(int64_t number, std::span<const int32_t> words, int64_t first,
                               const std::function<std::string(int64_t)>& name_of) {
  using Layout = round::ResultLayout;
  int64_t longest = 0;
  const auto start = Clock::now();
  for (int64_t rank = 1; rank < sizes_.num_ranks; ++rank) {
    wait_until([&] {
      if (load(of_rank(rank).published) > number) return true;
      if (Clock::now() - start < kMostLag) return false;
      fail(called(rank) + " has not finished round " + std::to_string(number) + ", which rank 0 finished " +
           std::to_string(kMostLag.count()) + " s ago");
      return false;
    });
    const int32_t* others = published(rank, number);
    int64_t times[2];
    std::memcpy(&times[0], others + Layout::kStarted, sizeof times[0]);
    std::memcpy(&times[1], others + Layout::kEnded, sizeof times[1]);
    longest = std::max(longest, times[1] - times[0]);
    if (std::memcmp(others + first, words.data() + first, (words.size() - static_cast<size_t>(first)) * 4) == 0)
      continue;
    int64_t word = first;
    while (others[word] == words[static_cast<size_t>(word)]) ++word;
    fail("round " + std::to_string(number) + ": " + name_of(word) + " is " +
         std::to_string(words[static_cast<size_t>(word)]) + " on rank 0 and " + std::to_string(others[word]) + " on " +
         called(rank) + ", expected the same on all ranks");
    expect_alive();
  }
  store(of_rank(rank_).published, number + 1);
  return longest;
}

// --- watching

void ReplayChannel::watch(milliseconds most_delay) {
  if (!watch_.joinable()) watch_ = std::thread([this, most_delay] { run_watch(most_delay); });
}

void ReplayChannel::watch_alarm(const uint32_t* alarm, const std::string& what) {
  alarm_reason_ = what;
  alarm_ = alarm;
}

void ReplayChannel::expect_pace(std::vector<Pace>& paces, int64_t RankWords::* count, const char* what,
                                milliseconds most_delay) {
  const int64_t size = sizes_.num_ranks;
  int64_t first = 0;
  for (int64_t rank = 1; rank < size; ++rank)
    if (load(of_rank(rank).*count) > load(of_rank(first).*count)) first = rank;
  const int64_t most = load(of_rank(first).*count);
  for (int64_t rank = 0; rank < size; ++rank) {
    Pace& pace = paces[static_cast<size_t>(rank)];
    const int64_t now = load(of_rank(rank).*count);
    pace.ticks = now == pace.count && now < most ? pace.ticks + 1 : 0;
    pace.count = now;
    if (pace.ticks * kTick <= most_delay) continue;
    std::array<char, 16> delay{};
    std::snprintf(delay.data(), delay.size(), "%.0f", std::chrono::duration<double>(most_delay).count());
    fail(called(rank) + " has not finished " + what + " " + std::to_string(now) + " (it makes " + of_rank(rank).call +
         "), which rank " + std::to_string(first) + " finished " + delay.data() + " s ago");
  }
}

void ReplayChannel::run_watch(milliseconds most_delay) {
  std::vector<Pace> calls(static_cast<size_t>(sizes_.num_ranks)), rounds(calls);
  struct Watched {
    int64_t rank, beats;
    Clock::time_point last_tick;
    int ticks;  // of ours since it last ran; they stop where all processes are stopped
  };
  std::vector<Watched> watched;
  std::vector<pollfd> processes;
  for (int64_t rank = 0; rank < sizes_.num_ranks; ++rank) {
    if (rank == rank_ || (rank_ != 0 && rank != 0)) continue;
    watched.push_back({.rank = rank, .beats = 0, .last_tick = {}, .ticks = 0});
    processes.push_back({.fd = open_process(process(rank)), .events = POLLIN, .revents = 0});
  }
  constexpr auto kNever = Clock::time_point::max();
  Clock::time_point ends_at = kNever;
  for (int64_t beats = 1; !stops_; ++beats) {
    store(of_rank(rank_).beats, beats);
    // Sleeps for a tick where no process has ended.
    for (pollfd& process : processes) process.revents = 0;
    poll(processes.data(), processes.size(), static_cast<int>(kTick.count()));
    bool ended = false;
    for (size_t i = 0; i < watched.size(); ++i) {
      Watched& one = watched[i];
      const int64_t now = load(of_rank(one.rank).beats);
      // Rank 0 starts to beat when all ranks have their channels.
      one.ticks = now == one.beats && now > 0 ? one.ticks + 1 : 0;
      one.beats = now;
      if (processes[i].revents != 0) {
        ended = true;
        if (!closed())
          fail(called(one.rank) + " " + end_of(processes[i].fd));
        else
          ends_at = std::min(ends_at, Clock::now() + kCloseGrace);
      } else if (!closed() && one.ticks * kTick > kMostLag) {
        fail(called(one.rank) + " has not run for " + std::to_string(kMostLag.count()) + " s");
      }
    }
    if (rank_ == 0 && !closed()) {
      expect_pace(calls, &RankWords::made, "call", most_delay);
      expect_pace(rounds, &RankWords::published, "round", most_delay);
    }
    if (const uint32_t* alarm = alarm_) {
      const uint32_t word = *static_cast<const volatile uint32_t*>(alarm);  // a GPU writes it
      if (word != 0 && !closed()) fail(called(word - 1) + " " + alarm_reason_);
    }
    if (!failure().empty()) ends_at = std::min(ends_at, Clock::now() + kGrace);
    if (rank_ != 0 && Clock::now() >= ends_at) {
      const std::string line = "specdec_kernels: rank " + std::to_string(rank_) + " ends: " + failure() + "\n";
      [[maybe_unused]] const auto size = ::write(STDERR_FILENO, line.data(), line.size());
      _exit(1);
    }
    if (ended && !stops_) std::this_thread::sleep_for(kTick);  // poll returns at once for a process that has ended
  }
  for (const pollfd& process : processes)
    if (process.fd >= 0) ::close(process.fd);
}

// --- both sides of a launch

void LaunchWriter::write(RoundPart part, int64_t batch, int64_t rows, int64_t max_kv_len) {
  if (part == RoundPart::kRest) return channel_.write({part, number_ - 1, batch, rows, max_kv_len}, {});
  const int32_t* words = commands_.row(number_);
  const int64_t activated = std::max(words[round::CommandLayout::kNumActivated], 0);
  channel_.write({part, number_, batch, rows, max_kv_len},
                 {words, static_cast<size_t>(command_layout_.activation(activated))});
  ++number_;
}

int64_t LaunchWriter::compare(int64_t number, int64_t batch, const std::function<std::string(int64_t)>& name_of_row) {
  using Layout = round::ResultLayout;
  const auto name_of = [&](int64_t word) -> std::string {
    if (word < result_layout_.row(0)) return "word " + std::to_string(word) + " of the gains";
    const int64_t row = (word - result_layout_.row(0)) / result_layout_.row_words();
    const int64_t field = word - result_layout_.row(row);
    static constexpr std::array kFields = {"num_valid", "finish_reason", "status", "num_nodes"};
    const std::string name =
        field < Layout::kTokens ? kFields[field] : "tokens[" + std::to_string(field - Layout::kTokens) + "]";
    return name + " of " + name_of_row(row);
  };
  const std::span words(results_.row(number), static_cast<size_t>(result_layout_.row(batch)));
  return channel_.compare(number, words, Layout::kNumContinuing, name_of);
}

std::optional<std::string> Replayer::next() {
  const auto start = Clock::now();
  auto last = start;
  while (true) {
    channel_.made();
    if (publish()) last = Clock::now();
    if (channel_.has_record()) {
      ReplayChannel::Record record = channel_.read();
      if (!record.launch) return std::move(record.bytes);
      channel_.enter("launch");
      launch(record);
      last = Clock::now();
      continue;
    }
    if (channel_.closed() && !channel_.has_record()) return std::nullopt;
    const auto waited = Clock::now() - last;
    if (waited < kSpin) continue;
    channel_.expect_alive();
    if (!in_flight_.empty() && waited > kMostRound)
      throw std::runtime_error("round " + std::to_string(num_launched_ - std::ssize(in_flight_)) +
                               " has not finished within " + std::to_string(kMostRound.count()) + " s");
    std::this_thread::sleep_for(waited < kShortNaps ? kNap : kLongNap);
  }
}

void Replayer::launch(const ReplayChannel::Record& record) {
  const auto& [part, number, batch, rows, max_kv_len] = *record.launch;
  if (part == RoundPart::kRest) return executor_.constrain(number + 1, {}, batch, rows, max_kv_len);
  using Layout = round::CommandLayout;
  int32_t* words = commands_.row(number);
  // The device has applied the record that was in this row before, which took no longer than on rank 0 but for chance.
  const int64_t before = number - commands_.depth;
  while (before >= 0 &&
         std::atomic_ref(words[Layout::kApplied]).load(std::memory_order_acquire) != round::done_mark(before)) {
    channel_.expect_alive();
    publish();
    std::this_thread::sleep_for(kNap);
  }
  std::copy(record.words.begin() + Layout::kNumActivated, record.words.end(), words + Layout::kNumActivated);
  if (rows != kCatchUp) {
    ++num_launched_;
    in_flight_.push_back(batch);
  }
  if (part == RoundPart::kForward)
    executor_.forward(batch, rows, max_kv_len);
  else
    executor_.launch(batch, rows, max_kv_len);
}

// Publishes rounds that the device has finished. Returns false if there are none.
bool Replayer::publish() {
  bool any = false;
  while (!in_flight_.empty()) {
    const int64_t number = num_launched_ - std::ssize(in_flight_);
    if (!results_.is_published(number)) break;
    const auto count = static_cast<size_t>(result_layout_.row(in_flight_.front()));
    channel_.publish(number, {results_memory_.row(number), count});
    in_flight_.pop_front();
    any = true;
  }
  return any;
}

void Replayer::reset() {
  num_launched_ = 0;
  in_flight_.clear();
}

}  // namespace specdec::scheduler
