// Both ways to do I/O, held to one contract; and rings that are refused, at once or later.
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstddef>

#include "tests/harness.h"
#include "tests/ssd/ssd_setting.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint64_t MIB = 1 << 20;
constexpr uint64_t SEGMENT_BYTES = 8 * MIB;

// Two files, and memory to write from and read into.
struct IoSetting {
  explicit IoSetting(bool wants_direct) {
    files = SsdFiles::open(directory.file("tier"), SEGMENT_BYTES, 2, wants_direct).files;
    memory = Mapping::create("test-memory", 2 * SEGMENT_BYTES, false).mapping;
  }

  [[nodiscard]] std::string segment(int number) const {
    return directory.file("tier/segment-00000" + std::to_string(number) + ".kvs");
  }

  const ScratchDirectory directory;
  std::shared_ptr<SsdFiles> files;
  std::shared_ptr<Mapping> memory;
};

std::unique_ptr<SsdIo> make_io(const IoSetting& setting, IoKind kind) {
  if (kind == IoKind::CALLS) {
    return make_call_io(setting.files);
  }
  std::unique_ptr<SsdIo> io = make_ring_io(setting.files).io;
  EXPECT(io->is_ring());
  return io;
}

void fill(uint8_t* bytes, uint64_t size, uint64_t number) {
  std::mt19937_64 random(number);
  for (uint64_t at = 0; at < size; at += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(bytes + at, &word, sizeof(word));
  }
}

// Each step comes from a place that is overwritten for the next one.
int write_in_steps(SsdIo& io, uint64_t offset, const uint8_t* source, uint64_t size, uint64_t step) {
  const auto places = Mapping::create("test-places", SsdIo::STEPS_AT_ONCE * step, false).mapping;
  return io.write_steps(offset, size, step, [&](unsigned place, uint64_t at, uint64_t length) {
    uint8_t* const target = places->data() + place * step;
    std::memcpy(target, source + at, length);
    return target;
  });
}

// Writes a range, whole and then in steps, reads it back somewhere else, and compares with what the file holds.
void expect_right_bytes(SsdIo& io, const IoSetting& setting, uint64_t size) {
  uint8_t* const source = setting.memory->data();
  uint8_t* const target = source + SEGMENT_BYTES;
  const int fd = open(setting.segment(1).c_str(), O_RDONLY);
  std::vector<uint8_t> found(size);
  const auto expect_written = [&] {
    std::memset(target, 0, size);
    EXPECT(io.read(SEGMENT_BYTES + MIB, target, size) == 0);
    EXPECT(std::memcmp(target, source, size) == 0);
    EXPECT(pread(fd, found.data(), size, static_cast<off_t>(MIB)) == static_cast<ssize_t>(size));
    EXPECT(std::memcmp(found.data(), source, size) == 0);
  };
  fill(source, size, size);
  EXPECT(io.write(SEGMENT_BYTES + MIB, source, size) == 0);
  expect_written();
  if (size > SSD_HEADER_BYTES) {
    alignas(PAGE_BYTES) static std::array<uint8_t, PAGE_BYTES> page;
    std::memset(target, 0, size);
    EXPECT(io.read_slot(SEGMENT_BYTES + MIB, page, target, size - page.size()) == 0);
    EXPECT(std::memcmp(page.data(), source, page.size()) == 0);
    EXPECT(std::memcmp(target, source + page.size(), size - page.size()) == 0);
  }
  fill(source, size, size + 1);
  EXPECT(write_in_steps(io, SEGMENT_BYTES + MIB, source, size, 64 * PAGE_BYTES) == 0);
  expect_written();
  close(fd);
}

// In a child, so that what it gives up is not given up here. Its failures count here.
template <typename Body>
void in_child(Body body) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    failures() = 0;
    body();
    std::fflush(stdout);
    _exit(failures() == 0 ? 0 : 1);
  }
  int status = -1;
  EXPECT(waitpid(child, &status, 0) == child);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// From now on the kernel answers EPERM to one system call, as a service manager's or a container's filter does.
void refuse(long call) {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(call), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{std::size(filter), filter};
  EXPECT(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  EXPECT(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

// As a plain user who may lock no memory.
void lose_right_to_lock() {
  const rlimit none{0, 0};
  EXPECT(setrlimit(RLIMIT_MEMLOCK, &none) == 0);
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct rights[2]{};
  EXPECT(syscall(SYS_capget, &header, rights) == 0);
  rights[0].effective &= ~(1U << CAP_IPC_LOCK);
  rights[0].permitted &= ~(1U << CAP_IPC_LOCK);
  rights[0].inheritable = 0;
  EXPECT(syscall(SYS_capset, &header, rights) == 0);
}

// Writes a chunk through a queue that wants rings, and reads it back; what the queue says of its I/O.
SsdQueueIo use_queue() {
  const SsdSetting setting(2, 4, 300'000);
  SsdQueue queue(setting.files, setting.arena, setting.board, 2, 8, true);
  const SsdHeader header = setting.header(0);
  EXPECT(queue.write({{setting.file_offset(0), setting.arena_offset(0), header}}) != 0);
  EXPECT(wait_for_outcomes(queue, 1).at(0).status == SsdStatus::OK);
  setting.wipe(0);
  EXPECT(queue.read({{setting.file_offset(0), setting.arena_offset(0), setting.address(0), header}}, SsdUrgency::DEMAND) != 0);
  EXPECT(wait_for_outcomes(queue, 1).at(0).status == SsdStatus::OK);
  EXPECT(setting.is_right(0));
  EXPECT(queue.stop(std::chrono::minutes(1)));
  return queue.io();
}

}  // namespace

TEST(a_range_is_written_whole_in_steps_and_ends_at_its_size) {
  for_each_io([](IoKind kind) {
    const IoSetting setting(true);
    const std::unique_ptr<SsdIo> io = make_io(setting, kind);
    const uint64_t size = 3 * MIB + 5 * PAGE_BYTES;
    fill(setting.memory->data(), size, 7);
    std::vector<uint64_t> ends;
    EXPECT(io->write_steps(SEGMENT_BYTES, size, 768 << 10, [&](unsigned place, uint64_t at, uint64_t length) {
      EXPECT(place < SsdIo::STEPS_AT_ONCE);
      ends.push_back(at + length);
      return setting.memory->data() + at;
    }) == 0);
    EXPECT(std::is_sorted(ends.begin(), ends.end()));
    EXPECT(ends.back() == size);
    EXPECT(io->read(SEGMENT_BYTES, setting.memory->data() + SEGMENT_BYTES, size) == 0);
    EXPECT(std::memcmp(setting.memory->data() + SEGMENT_BYTES, setting.memory->data(), size) == 0);
    unsigned steps = 0;
    EXPECT(io->write_steps(0, size, MIB, [&](unsigned, uint64_t at, uint64_t) {
      return ++steps < 2 ? setting.memory->data() + at : nullptr;
    }) == 0);
    EXPECT(steps == 2);
  });
}

TEST(a_written_range_is_read_back_whole) {
  for (const bool wants_direct : {true, false}) {
    for_each_io([wants_direct](IoKind kind) {
      const IoSetting setting(wants_direct);
      const auto io = make_io(setting, kind);
      for (const uint64_t size : {PAGE_BYTES, 60 * PAGE_BYTES, MIB, 4 * MIB, 6 * MIB + PAGE_BYTES}) {
        expect_right_bytes(*io, setting, size);
      }
    });
  }
}

TEST(a_file_that_was_cut_short_has_no_more_bytes) {
  for (const off_t size : {off_t{0}, off_t{PAGE_BYTES}, off_t{3 * PAGE_BYTES}, off_t{PAGE_BYTES + 512}, off_t{5001}}) {
    for (const bool wants_direct : {true, false}) {
      for_each_io([=](IoKind kind) {
        const IoSetting setting(wants_direct);
        const auto io = make_io(setting, kind);
        EXPECT(truncate(setting.segment(0).c_str(), size) == 0);
        EXPECT(io->read(0, setting.memory->data(), MIB) == SsdIo::NO_MORE_BYTES);
        EXPECT(io->read_slot(0, {setting.memory->data(), PAGE_BYTES}, setting.memory->data() + MIB, MIB) == SsdIo::NO_MORE_BYTES);
      });
    }
  }
}

TEST(what_the_kernel_refuses_is_reported) {
  for_each_io([](IoKind kind) {
    const IoSetting setting(true);
    const auto io = make_io(setting, kind);
    void* const closed = mmap(nullptr, MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT(io->read(0, static_cast<uint8_t*>(closed), MIB) == EFAULT);
    EXPECT(io->write(0, static_cast<uint8_t*>(closed), MIB) == EFAULT);
    EXPECT(io->write_steps(0, MIB, MIB, [&](unsigned, uint64_t, uint64_t) { return static_cast<uint8_t*>(closed); }) == EFAULT);
    munmap(closed, MIB);
    expect_right_bytes(*io, setting, MIB);
  });
}

TEST(a_filter_that_refuses_rings_leaves_plain_calls) {
  for (const long call : {SYS_io_uring_setup, SYS_io_uring_enter}) {
    if (can_have_rings()) {
      in_child([call] {
        refuse(call);
        const SsdQueueIo io = use_queue();
        EXPECT(io.threads == 2 && io.rings == 0 && io.ring_error == EPERM);
      });
    }
  }
}

TEST(a_ring_that_is_refused_later_is_replaced_by_plain_calls) {
  if (can_have_rings()) {
    in_child([] {
      const IoSetting setting(true);
      const auto io = make_io(setting, IoKind::RING);
      expect_right_bytes(*io, setting, MIB);
      refuse(SYS_io_uring_enter);
      expect_right_bytes(*io, setting, 2 * MIB);
      EXPECT(!io->is_ring());
      expect_right_bytes(*io, setting, MIB);
    });
  }
}

TEST(a_ring_works_with_a_low_limit_of_locked_memory) {
  if (can_have_rings()) {
    in_child([] {
      lose_right_to_lock();
      const SsdQueueIo io = use_queue();
      EXPECT(io.rings == 2 || io.ring_error == ENOMEM);  // old kernels count the ring itself
    });
  }
}

TEST(a_queue_has_a_ring_for_each_thread) {
  if (can_have_rings()) {
    const SsdQueueIo io = use_queue();
    EXPECT(io.threads == 2 && io.rings == 2 && io.ring_error == 0);
    EXPECT(!io.is_distrusted);
  }
}
