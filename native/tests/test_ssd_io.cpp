// Both ways to do I/O, held to one contract; and rings that are refused, at once, in part or later.
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cstddef>

#include "harness.h"
#include "ssd_setting.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint64_t MIB = 1 << 20;
constexpr uint64_t SEGMENT_BYTES = 8 * MIB;

// An arena of two slices, the second one short, over two files.
struct IoSetting {
  explicit IoSetting(bool wants_direct) {
    files = SsdFiles::open(directory.file("tier"), SEGMENT_BYTES, 2, wants_direct).files;
    arena = Mapping::create("test-arena", 64 * MIB, false).mapping;
  }

  [[nodiscard]] std::string segment(int number) const {
    return directory.file("tier/segment-00000" + std::to_string(number) + ".kvs");
  }

  const ScratchDirectory directory;
  std::shared_ptr<SsdFiles> files;
  std::shared_ptr<Mapping> arena;
};

std::unique_ptr<SsdIo> make_io(const IoSetting& setting, IoKind kind) {
  if (kind == IoKind::CALLS) {
    return make_call_io(setting.files);
  }
  std::unique_ptr<SsdIo> io = make_ring_io(setting.files, setting.arena).io;
  while (kind == IoKind::REGISTERED_RING && io->register_next()) {
  }
  EXPECT(io->is_ring());
  EXPECT(io->has_registered_all() == (kind == IoKind::REGISTERED_RING));
  EXPECT(io->register_error() == 0);
  return io;
}

void fill(uint8_t* bytes, uint64_t size, uint64_t number) {
  std::mt19937_64 random(number);
  for (uint64_t at = 0; at < size; at += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(bytes + at, &word, sizeof(word));
  }
}

// Writes parts that lie anywhere, reads them back somewhere else, and compares with what the file holds.
void expect_right_bytes(SsdIo& io, const IoSetting& setting, uint64_t source, uint64_t target, uint64_t size) {
  alignas(PAGE_BYTES) static SsdPage page;
  fill(page.data(), page.size(), source);
  fill(setting.arena->data() + source, size, target);
  const SsdPage header = page;
  const std::vector<uint8_t> payload(setting.arena->data() + source, setting.arena->data() + source + size);
  iovec from[] = {{page.data(), page.size()}, {setting.arena->data() + source, size}};
  EXPECT(io.write(SEGMENT_BYTES + MIB, from, 2) == 0);
  page.fill(0);
  std::memset(setting.arena->data() + target, 0, size);
  iovec to[] = {{page.data(), page.size()}, {setting.arena->data() + target, size}};
  EXPECT(io.read(SEGMENT_BYTES + MIB, to, 2) == 0);
  EXPECT(page == header);
  EXPECT(std::memcmp(setting.arena->data() + target, payload.data(), size) == 0);
  std::vector<uint8_t> found(size);
  const int fd = open(setting.segment(1).c_str(), O_RDONLY);
  EXPECT(pread(fd, found.data(), size, static_cast<off_t>(MIB + page.size())) == static_cast<ssize_t>(size));
  EXPECT(found == payload);
  // The same range again, other bytes, in steps.
  fill(setting.arena->data() + source, size, target + 1);
  const auto go_on = [](uint64_t) { return true; };
  EXPECT(io.write_long(SEGMENT_BYTES + MIB, {setting.arena->data() + source, size}, 64 * PAGE_BYTES, go_on) == 0);
  EXPECT(pread(fd, found.data(), size, static_cast<off_t>(MIB)) == static_cast<ssize_t>(size));
  EXPECT(std::memcmp(found.data(), setting.arena->data() + source, size) == 0);
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
  queue.register_arena();
  const SsdHeader header = setting.header(0);
  EXPECT(queue.write({{setting.file_offset(0), setting.arena_offset(0), header}}) != 0);
  EXPECT(wait_for_outcomes(queue, 1).at(0).status == SsdStatus::OK);
  setting.wipe(0);
  EXPECT(queue.read({{setting.file_offset(0), setting.arena_offset(0), header}}, SsdUrgency::DEMAND) != 0);
  EXPECT(wait_for_outcomes(queue, 1).at(0).status == SsdStatus::OK);
  EXPECT(setting.is_right(0));
  wait_until([&] {
    const SsdQueueIo io = queue.io();
    return io.register_error != 0 || io.registered == io.rings;
  });
  EXPECT(queue.stop(std::chrono::minutes(1)));
  return queue.io();
}

}  // namespace

TEST(a_long_range_is_written_whole_in_steps_and_ends_where_it_is_told) {
  for_each_io([](IoKind kind) {
    const IoSetting setting(true);
    const std::unique_ptr<SsdIo> io = make_io(setting, kind);
    // Across the border of two slices, in steps that do not divide it.
    const uint64_t source = 60 * MIB;
    const uint64_t size = 3 * MIB + 5 * PAGE_BYTES;
    fill(setting.arena->data() + source, size, 7);
    std::vector<uint64_t> ends;
    EXPECT(io->write_long(SEGMENT_BYTES, {setting.arena->data() + source, size}, 768 << 10, [&](uint64_t end) {
      ends.push_back(end);
      return true;
    }) == 0);
    EXPECT(std::is_sorted(ends.begin(), ends.end()));
    EXPECT(ends.back() == size);
    std::memset(setting.arena->data(), 0, size);
    iovec part{setting.arena->data(), size};
    EXPECT(io->read(SEGMENT_BYTES, &part, 1) == 0);
    EXPECT(std::memcmp(setting.arena->data(), setting.arena->data() + source, size) == 0);
    uint64_t handed_over = 0;
    EXPECT(io->write_long(0, {setting.arena->data() + source, size}, MIB, [&](uint64_t end) {
      handed_over = end;
      return false;
    }) == 0);
    EXPECT(handed_over <= MIB);
  });
}

TEST(what_is_written_is_read_whole_wherever_it_lies) {
  for (const bool wants_direct : {true, false}) {
    for_each_io([wants_direct](IoKind kind) {
      const IoSetting setting(wants_direct);
      const auto io = make_io(setting, kind);
      expect_right_bytes(*io, setting, 0, 4 * MIB, PAGE_BYTES);
      expect_right_bytes(*io, setting, 61 * MIB, 60 * MIB, 2 * MIB);
      expect_right_bytes(*io, setting, 10 * MIB, 60 * MIB, 4 * MIB);
      expect_right_bytes(*io, setting, 62 * MIB, 61 * MIB + PAGE_BYTES, 2 * MIB);
    });
  }
}

TEST(slices_are_used_as_soon_as_they_are_registered) {
  for_each_io([](IoKind kind) {
    if (kind == IoKind::RING) {
      const IoSetting setting(true);
      const auto io = make_io(setting, kind);
      EXPECT(io->register_next());
      EXPECT(!io->has_registered_all());
      expect_right_bytes(*io, setting, 61 * MIB, 60 * MIB, 3 * MIB);
      EXPECT(!io->register_next());
      EXPECT(io->has_registered_all());
      expect_right_bytes(*io, setting, 61 * MIB, 60 * MIB, 3 * MIB);
    }
  });
}

TEST(more_parts_than_fit_at_once_go_in_rounds) {
  for_each_io([](IoKind kind) {
    const IoSetting setting(true);
    const auto io = make_io(setting, kind);
    constexpr int COUNT = 30;
    constexpr uint64_t SIZE = 4 * PAGE_BYTES;
    std::vector<iovec> parts(COUNT);
    for (int number = 0; number < COUNT; ++number) {
      uint8_t* const page = setting.arena->data() + static_cast<uint64_t>(number) * 2 * SIZE;
      std::memset(page, number + 1, SIZE);
      parts[static_cast<size_t>(number)] = {page, SIZE};
    }
    EXPECT(io->write(0, parts.data(), COUNT) == 0);
    iovec all{setting.arena->data() + 2 * MIB, COUNT * SIZE};
    EXPECT(io->read(0, &all, 1) == 0);
    for (uint64_t number = 0; number < COUNT; ++number) {
      const uint8_t* const page = setting.arena->data() + 2 * MIB + number * SIZE;
      EXPECT(page[0] == number + 1 && page[SIZE - 1] == number + 1);
    }
  });
}

TEST(a_file_that_was_cut_short_has_no_more_bytes) {
  for (const off_t size : {off_t{0}, off_t{PAGE_BYTES}, off_t{3 * PAGE_BYTES}, off_t{PAGE_BYTES + 512}, off_t{5001}}) {
    for (const bool wants_direct : {true, false}) {
      for_each_io([=](IoKind kind) {
        const IoSetting setting(wants_direct);
        const auto io = make_io(setting, kind);
        EXPECT(truncate(setting.segment(0).c_str(), size) == 0);
        iovec parts[] = {{setting.arena->data(), PAGE_BYTES}, {setting.arena->data() + MIB, MIB}};
        EXPECT(io->read(0, parts, 2) == SsdIo::NO_MORE_BYTES);
      });
    }
  }
}

TEST(what_the_kernel_refuses_is_said) {
  for_each_io([](IoKind kind) {
    const IoSetting setting(true);
    const auto io = make_io(setting, kind);
    void* const closed = mmap(nullptr, MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    iovec parts[] = {{setting.arena->data(), MIB}, {closed, MIB}};
    EXPECT(io->read(0, parts, 2) == EFAULT);
    iovec source[] = {{setting.arena->data(), MIB}, {closed, MIB}};
    EXPECT(io->write(0, source, 2) == EFAULT);
    munmap(closed, MIB);
    expect_right_bytes(*io, setting, 0, 4 * MIB, MIB);
  });
}

TEST(a_filter_that_refuses_rings_leaves_plain_calls) {
  for (const long call : {SYS_io_uring_setup, SYS_io_uring_enter}) {
    if (can_have_rings()) {
      in_child([call] {
        refuse(call);
        const SsdQueueIo io = use_queue();
        EXPECT(io.threads == 2 && io.rings == 0 && io.ring_error == EPERM);
        EXPECT(io.registered == 0 && io.register_error == 0);
      });
    }
  }
}

TEST(a_ring_that_is_refused_later_is_replaced_by_plain_calls) {
  if (can_have_rings()) {
    in_child([] {
      const IoSetting setting(true);
      const auto io = make_io(setting, IoKind::REGISTERED_RING);
      expect_right_bytes(*io, setting, 0, 4 * MIB, MIB);
      refuse(SYS_io_uring_enter);
      expect_right_bytes(*io, setting, 2 * MIB, 61 * MIB, 2 * MIB);
      EXPECT(!io->is_ring());
      expect_right_bytes(*io, setting, 0, 4 * MIB, MIB);
    });
  }
}

TEST(a_low_limit_of_locked_memory_leaves_rings_without_registered_buffers) {
  if (can_have_rings()) {
    in_child([] {
      lose_right_to_lock();
      const SsdQueueIo io = use_queue();
      EXPECT(io.rings == 2 || io.ring_error == ENOMEM);  // old kernels count the ring itself
      EXPECT(io.registered == 0);
      EXPECT(io.rings == 0 || io.register_error == ENOMEM);
    });
  }
}

TEST(a_queue_registers_the_arena_in_every_ring) {
  if (can_have_rings() && can_register()) {
    const SsdQueueIo io = use_queue();
    EXPECT(io.threads == 2 && io.rings == 2 && io.ring_error == 0);
    EXPECT(io.registered == 2 && io.register_error == 0);
  }
}
