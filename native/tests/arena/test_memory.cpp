// Mapping: sealed regions, attach, pre-fault.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tests/harness.h"
#include "base/memory.h"

using kvpool::Mapping;
using kvpool::PAGE_BYTES;

TEST(create_maps_zeroed_writable_memory_that_cannot_be_resized) {
  const auto made = Mapping::create("test", 4 * PAGE_BYTES, false);
  EXPECT(made.error == 0);
  EXPECT(made.mapping->size() == 4 * PAGE_BYTES);
  EXPECT(made.mapping->data()[PAGE_BYTES] == 0);
  made.mapping->data()[PAGE_BYTES] = 7;
  EXPECT(ftruncate(made.mapping->fd(), 0) != 0);
  EXPECT(errno == EPERM);
  struct stat status = {};
  EXPECT(fstat(made.mapping->fd(), &status) == 0);
  EXPECT((status.st_mode & 0777) == 0600);
}

TEST(create_refuses_sizes_that_are_not_pages) {
  EXPECT(Mapping::create("test", 0, false).error == EINVAL);
  EXPECT(Mapping::create("test", PAGE_BYTES + 1, false).error == EINVAL);
  EXPECT(Mapping::create("test", PAGE_BYTES, true).error == EINVAL);
}

TEST(attach_shares_bytes_and_outlives_the_creator) {
  auto made = Mapping::create("test", 2 * PAGE_BYTES, false);
  const auto reader = Mapping::attach(made.mapping->fd(), 2 * PAGE_BYTES, false);
  EXPECT(reader.error == 0);
  EXPECT(!reader.mapping->is_writable());
  std::strcpy(reinterpret_cast<char*>(made.mapping->data()), "hello");
  made.mapping.reset();
  EXPECT(std::strcmp(reinterpret_cast<const char*>(reader.mapping->data()), "hello") == 0);
}

TEST(attach_refuses_what_could_fault) {
  const auto made = Mapping::create("test", PAGE_BYTES, false);
  EXPECT(Mapping::attach(made.mapping->fd(), 2 * PAGE_BYTES, false).error == EINVAL);
  EXPECT(Mapping::attach(made.mapping->fd(), 0, false).error == EINVAL);
  EXPECT(Mapping::attach(-1, PAGE_BYTES, false).error == EBADF);
  const int unsealed = memfd_create("unsealed", MFD_CLOEXEC);
  EXPECT(ftruncate(unsealed, PAGE_BYTES) == 0);
  EXPECT(Mapping::attach(unsealed, PAGE_BYTES, false).error == EPERM);
  close(unsealed);
}

TEST(seal_read_only_keeps_the_owner_writing_and_nobody_else) {
  const auto made = Mapping::create("test", PAGE_BYTES, false);
  EXPECT(made.mapping->seal_read_only() == 0);
  EXPECT(Mapping::attach(made.mapping->fd(), PAGE_BYTES, true).error == EPERM);
  const auto reader = Mapping::attach(made.mapping->fd(), PAGE_BYTES, false);
  EXPECT(reader.error == 0);
  EXPECT(mprotect(reader.mapping->data(), PAGE_BYTES, PROT_READ | PROT_WRITE) != 0);
  made.mapping->data()[0] = 9;
  EXPECT(reader.mapping->data()[0] == 9);
  EXPECT(pwrite(made.mapping->fd(), "x", 1, 0) == -1);
}

TEST(populate_brings_pages_in_without_changing_them) {
  const uint64_t size = 64 * PAGE_BYTES;
  const auto made = Mapping::create("test", size, false);
  made.mapping->data()[5 * PAGE_BYTES] = 42;
  EXPECT(made.mapping->populate(0, size) == 0);
  EXPECT(made.mapping->populate(0, 0) == 0);
  EXPECT(made.mapping->data()[5 * PAGE_BYTES] == 42);
  struct stat status = {};
  EXPECT(fstat(made.mapping->fd(), &status) == 0);
  EXPECT(static_cast<uint64_t>(status.st_blocks) * 512 == size);
  const auto reader = Mapping::attach(made.mapping->fd(), size, false);
  EXPECT(reader.mapping->populate(PAGE_BYTES, size - PAGE_BYTES) == 0);
  static_cast<void>(made.mapping->collapse(0, size));
  EXPECT(made.mapping->data()[5 * PAGE_BYTES] == 42);
}

TEST(contains_does_not_overflow) {
  const auto made = Mapping::create("test", 2 * PAGE_BYTES, false);
  EXPECT(made.mapping->contains(0, 2 * PAGE_BYTES));
  EXPECT(made.mapping->contains(2 * PAGE_BYTES, 0));
  EXPECT(!made.mapping->contains(1, 2 * PAGE_BYTES));
  EXPECT(!made.mapping->contains(UINT64_MAX, 2));
  EXPECT(!made.mapping->contains(PAGE_BYTES, UINT64_MAX));
}
