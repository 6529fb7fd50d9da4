// NgramIndex::save and load: the index as a file: its bytes as in memory, after a header that identifies them.
//
// Only text and table are stored; streams end with the process that ran them. A file is recognized by its magic,
// version, sizes and two checksums; beyond that, every walk over the store is bounded, whatever the file contains.
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/errors.h"
#include "ngram/ngram_index.h"

namespace specdec::ngram {
namespace {

constexpr char kMagic[8] = {'s', 'd', 'n', 'g', 'r', 'a', 'm', '\n'};
constexpr uint32_t kVersion = 2;  // covers the layout and the hash

struct FileHeader {
  char magic[8];
  uint32_t version, unused;
  int64_t max_tokens, num_blocks, num_slots, max_len;
  uint64_t payload_checksum;
  uint64_t checksum;  // of the fields above
};

uint64_t checksum_of(const FileHeader& header) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(&header);
  return ngram_checksum(bytes, bytes + offsetof(FileHeader, checksum), 0);
}

int write_all(int fd, const void* data, size_t bytes) {
  for (const char* at = static_cast<const char*>(data); bytes > 0;) {
    const ssize_t done = write(fd, at, bytes);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return errno;
    at += done;
    bytes -= static_cast<size_t>(done);
  }
  return 0;
}

// Read until the end of the file; return the bytes read.
size_t read_all(int fd, void* data, size_t bytes) {
  size_t got = 0;
  while (got < bytes) {
    const ssize_t done = read(fd, static_cast<char*>(data) + got, bytes - got);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) break;
    got += static_cast<size_t>(done);
  }
  return got;
}

[[noreturn]] void reject(const std::string& is, const std::string& expected) {
  throw ValueError("ngram_load: file " + is + ", expected " + expected);
}

}  // namespace

int NgramIndex::save(int fd) const {
  if (on_cuda()) return copy({})->save(fd);
  const std::shared_lock lock(mutex_);
  const size_t bytes = view_.slots_at();
  // Without the draft statistics, which change during the write.
  NgramHeader header{};
  std::memcpy(static_cast<void*>(&header), view_.header, offsetof(NgramHeader, drafts));
  const auto* const start = reinterpret_cast<const std::byte*>(&header);
  const uint64_t of_header = ngram_checksum(start, start + sizeof header, 0);
  FileHeader file_header{
      .magic = {},
      .version = kVersion,
      .unused = 0,
      .max_tokens = config_.max_tokens,
      .num_blocks = view_.num_blocks,
      .num_slots = view_.num_slots,
      .max_len = config_.max_len,
      .payload_checksum = ngram_checksum(host_->data() + sizeof header, host_->data() + bytes, of_header),
      .checksum = 0,
  };
  std::memcpy(file_header.magic, kMagic, sizeof kMagic);
  file_header.checksum = checksum_of(file_header);
  if (const int error = write_all(fd, &file_header, sizeof file_header)) return error;
  if (const int error = write_all(fd, &header, sizeof header)) return error;
  return write_all(fd, host_->data() + sizeof header, bytes - sizeof header);
}

std::unique_ptr<NgramIndex> NgramIndex::load(int fd, std::optional<int64_t> num_slots, std::optional<int64_t> max_len,
                                             int64_t num_threads) {
  FileHeader file_header{};
  const size_t got = read_all(fd, &file_header, sizeof file_header);
  if (got < sizeof kMagic || std::memcmp(file_header.magic, kMagic, sizeof kMagic) != 0)
    reject("is no n-gram index", "one that `save` wrote");
  if (got < sizeof file_header) reject("has " + std::to_string(got) + " bytes", "more: it is truncated");
  if (file_header.version != kVersion)
    reject("has version " + std::to_string(file_header.version), "version " + std::to_string(kVersion));
  const std::string intact = "what `save` wrote: it is corrupt";
  if (file_header.checksum != checksum_of(file_header)) reject("has a header that does not match its checksum", intact);

  Check check("ngram_load");
  check.range("num_blocks", file_header.num_blocks, 1, kNgramIdMask / 2);
  const Config config =
      checked_config(check, file_header.max_tokens, file_header.num_blocks, num_slots.value_or(file_header.num_slots),
                     max_len.value_or(file_header.max_len), num_threads);
  const size_t bytes = config.sizes.slots_at();
  struct stat file{};
  const auto want = static_cast<int64_t>(sizeof file_header + bytes);
  if (fstat(fd, &file) == 0 && file.st_size != want)  // before any memory is allocated
    reject("has " + std::to_string(file.st_size) + " bytes",
           std::to_string(want) + (file.st_size < want ? ": it is truncated" : ": something follows"));

  std::unique_ptr<NgramIndex> index(new NgramIndex(config, {}));
  std::byte* const memory = index->host_->data();
  if (read_all(fd, memory, bytes) != bytes) reject("cannot be read", std::to_string(want) + " bytes");
  const NgramHeader& header = *index->view_.header;
  const bool valid = (header.next_block & ((1u << config.sizes.block_bits) - 1)) < config.sizes.num_blocks &&
                     header.next_block <= kNgramIdMask && header.streams < kNgramPrivateScope;
  if (!valid || file_header.payload_checksum != ngram_checksum(memory, memory + bytes, 0))
    reject("has content that does not match its checksum", intact);
  return index;
}

}  // namespace specdec::ngram
