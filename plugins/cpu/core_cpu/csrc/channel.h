// Messages between the processes of a group through memory that all of them map.
//
// Each process writes into slots of its own and reads those of the others. Message n lies in slot n % 2: whoever writes
// message n has read all of n - 1, which its peers wrote after they had read n - 2. So two slots are enough, and nobody
// tells that it has read.
#pragma once

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <mutex>
#include <set>
#include <string>

namespace core_cpu {

// What one process tells the others. A segment begins as zeros.
struct alignas(64) Flag {
  std::atomic<uint32_t> posted;  // the number of its newest message; it wraps around
  std::atomic<uint32_t> sleepers;  // peers that sleep until it posts
  std::atomic<uint32_t> failed;  // whether it has given up
  std::atomic<int> core;  // where it ran when it posted
  std::atomic<uint64_t> kinds[2];  // of its newest two messages
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);
static_assert(sizeof(Flag) == 64);

constexpr int MOST_SPINS = 2048;  // some 40 us
constexpr int FEWEST_SPINS = 32;
constexpr int YIELDS = 2048;  // a millisecond, where nobody else wants the core
constexpr int64_t NAP_NS = 50'000'000;  // between two looks whether the others still run
constexpr int64_t PAGE = 4096;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The files of this process's channels. Each holds a lock that tells the peers that the process lives. A process that
// is forked closes its copies, and gets no copy of the mappings: both would hold the lock too.
struct Files {
  std::mutex mutex;
  std::set<int> held;
  int num_forks = 0;

  static Files& all() {
    static Files& files = *new Files;  // channels end after it, with the process
    static const int registered = pthread_atfork([] { all().mutex.lock(); }, [] { all().mutex.unlock(); }, [] {
      ++all().num_forks;
      std::for_each(all().held.begin(), all().held.end(), close);
      all().held.clear();
      all().mutex.unlock();
    });
    (void)registered;
    return files;
  }
};

class Channel {
 public:
  using Describe = std::string (*)(uint64_t kind);

  // fd: a file of `bytes(size, slot)` zeros, which each process has opened for itself; the channel closes it.
  // slot: bytes of a message at most, a multiple of PAGE. describe: says what a kind of message is.
  Channel(std::string group, int fd, int rank, int size, int64_t slot, double timeout_s, Describe describe)
      : group_(std::move(group)), fd_(fd), rank_(rank), size_(size), slot_(slot), timeout_s_(timeout_s),
        describe_(describe) {
    void* base = mmap(nullptr, bytes(size, slot), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    const bool locked = base != MAP_FAILED && lock(F_OFD_SETLK, rank) == F_UNLCK;
    if (!locked) {
      const int error = errno;
      if (base != MAP_FAILED) {
        munmap(base, bytes(size, slot));
      }
      close(fd);
      TORCH_CHECK(false, "core_cpu: memory of group ", group_, " can't be had: ", std::strerror(error));
    }
    base_ = static_cast<char*>(base);
    madvise(base_, bytes(size, slot), MADV_DONTFORK);
    std::memset(slot_of(rank, 0), 0, 2 * slot);  // the system takes pages near to whoever writes them first
    const std::lock_guard<std::mutex> guard(Files::all().mutex);
    Files::all().held.insert(fd);
    forks_ = Files::all().num_forks;
  }

  ~Channel() {
    const std::lock_guard<std::mutex> guard(Files::all().mutex);
    if (forks_ == Files::all().num_forks) {
      munmap(base_, bytes(size_, slot_));
      Files::all().held.erase(fd_);
      close(fd_);
    }
  }

  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  static int64_t bytes(int size, int64_t slot) {
    return (size * static_cast<int64_t>(sizeof(Flag)) + PAGE - 1) / PAGE * PAGE + size * 2 * slot;
  }

  int fd() const { return fd_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  int64_t slot() const { return slot_; }
  std::mutex& mutex() { return mutex_; }

  // Raise unless this process may send messages.
  void check_usable() const {
    TORCH_CHECK(forks_ == Files::all().num_forks, "core_cpu: group ", group_,
                " was joined before this process was forked. Join a group of its own in the forked process.");
    TORCH_CHECK(broken_.empty(), broken_, " The group can't be used any more: start all of its processes anew.");
  }

  // This process's memory for its next message.
  char* next() { return slot_of(rank_, number_ + 1); }

  // Send what lies in `next()`, and wait until everybody's message of that number is there.
  void exchange(uint64_t kind) {
    Flag& own = flag(rank_);
    own.kinds[++number_ % 2].store(kind, std::memory_order_relaxed);
    own.core.store(sched_getcpu(), std::memory_order_relaxed);
    // Sequentially consistent, as are `sleepers` and the look at `posted` after it: one of the two sees the other.
    own.posted.store(number_);
    if (own.sleepers.load() != 0) {
      futex(own.posted, FUTEX_WAKE, INT_MAX, nullptr);
    }
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) {
        await(peer);
        check_kind(peer, kind);
      }
    }
  }

  // A peer's message of the newest number, after `exchange`.
  const char* message(int peer) const { return slot_of(peer, number_); }

 private:
  Flag& flag(int rank) const { return reinterpret_cast<Flag*>(base_)[rank]; }

  char* slot_of(int rank, uint32_t number) const {
    return base_ + bytes(size_, slot_) - (2 * (size_ - rank) - number % 2) * slot_;
  }

  static void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* time) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, time, nullptr, 0);
  }

  bool reached(int peer) const {
    return static_cast<int32_t>(flag(peer).posted.load(std::memory_order_acquire) - number_) >= 0;
  }

  void await(int peer) {
    if (reached(peer)) {
      return;
    }
    // A peer that shares this core runs when this process sleeps. To yield is not enough: the system may choose the
    // process again that yielded.
    if (flag(peer).core.load(std::memory_order_relaxed) != sched_getcpu() && comes(peer)) {
      return;
    }
    sleep_until(peer);
  }

  // Whether a message comes without sleep.
  bool comes(int peer) {
    for (int i = 0; i < spins_; ++i) {
      pause();
      if (reached(peer)) {
        spins_ = std::min(2 * spins_, MOST_SPINS);
        return true;
      }
    }
    // Perhaps somebody else has the peer's core, or wants this one.
    spins_ = std::max(spins_ / 2, FEWEST_SPINS);
    for (int i = 0; i < YIELDS; ++i) {
      sched_yield();
      if (reached(peer)) {
        return true;
      }
    }
    return false;
  }

  void sleep_until(int peer) {
    using Clock = std::chrono::steady_clock;
    const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s_);
    const timespec nap{NAP_NS / 1'000'000'000, NAP_NS % 1'000'000'000};
    Flag& awaited = flag(peer);
    std::string wrong;
    awaited.sleepers.fetch_add(1);
    while (wrong.empty()) {
      const uint32_t seen = awaited.posted.load();
      if (reached(peer)) {
        break;
      }
      futex(awaited.posted, FUTEX_WAIT, seen, &nap);
      const bool late = Clock::now() > deadline;
      wrong = lost(late ? "it did not come within " + std::to_string(static_cast<int64_t>(timeout_s_)) +
                              " s. It hangs, or calls other collectives."
                        : "",
                   peer);
    }
    awaited.sleepers.fetch_sub(1);
    if (!wrong.empty()) {
      fail(wrong);
    }
  }

  // Why a message will never come, "" where it may; otherwise: what to say of `peer` where nothing else is wrong.
  std::string lost(const std::string& otherwise, int peer) const {
    for (int other = 0; other < size_; ++other) {
      if (other == rank_) {
        continue;
      }
      // In this order: whoever posts and ends has posted.
      const bool gone = lock(F_OFD_GETLK, other) == F_UNLCK, failed = flag(other).failed.load() != 0;
      if ((gone || failed) && !reached(other)) {
        return about(other, gone ? "its process has ended, or left the group." : "it gave up with its own error.");
      }
    }
    return otherwise.empty() || reached(peer) ? "" : about(peer, otherwise);
  }

  std::string about(int peer, const std::string& what) const {
    const uint64_t kind = flag(rank_).kinds[number_ % 2].load(std::memory_order_relaxed);
    return "core_cpu: rank " + std::to_string(rank_) + " of " + std::to_string(size_) + " in group " + group_ +
        " waits in " + describe_(kind) + " for rank " + std::to_string(peer) + ": " + what;
  }

  void check_kind(int peer, uint64_t kind) {
    const uint64_t found = flag(peer).kinds[number_ % 2].load(std::memory_order_relaxed);
    if (found != kind) {
      fail(about(peer, "it called " + describe_(found) + ". All must call the same collectives in one order."));
    }
  }

  [[noreturn]] void fail(const std::string& why) {
    broken_ = why;
    flag(rank_).failed.store(1);
    futex(flag(rank_).posted, FUTEX_WAKE, INT_MAX, nullptr);
    check_usable();
    TORCH_CHECK(false, why);  // not reached
  }

  // Take the lock of a rank, or ask who has it; return F_UNLCK where this succeeds, or where nobody has it. The system
  // takes the lock from a process that ends, however it does.
  int lock(int command, int rank) const {
    struct flock range {};
    range.l_type = F_WRLCK;
    range.l_whence = SEEK_SET;
    range.l_start = rank;
    range.l_len = 1;
    if (fcntl(fd_, command, &range) != 0) {
      return -1;
    }
    return command == F_OFD_SETLK ? F_UNLCK : range.l_type;
  }

  const std::string group_;
  const int fd_, rank_, size_;
  const int64_t slot_;
  const double timeout_s_;
  const Describe describe_;
  int forks_ = 0;
  char* base_ = nullptr;
  uint32_t number_ = 0;
  int spins_ = MOST_SPINS;
  std::string broken_;
  std::mutex mutex_;
};

}  // namespace core_cpu
