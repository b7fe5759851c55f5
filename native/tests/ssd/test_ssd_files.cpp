// Segment files: made whole, kept private, opened once, never resized.
#include "tests/harness.h"
#include "tests/ssd/ssd_setting.h"

using namespace kvpool;
using namespace kvpool::testing;

TEST(files_are_made_whole_and_private_and_found_again) {
  const ScratchDirectory scratch;
  const std::string path = scratch.file("tier");
  {
    const auto made = SsdFiles::open(path, 65536, 3, true);
    EXPECT(made.files != nullptr);
    struct stat found{};
    EXPECT(stat((path + "/segment-000002.kvs").c_str(), &found) == 0);
    EXPECT(found.st_size == 65536 && found.st_blocks * 512 >= 65536);
    EXPECT((found.st_mode & 07777) == 0600);
    EXPECT(stat(path.c_str(), &found) == 0 && (found.st_mode & 07777) == 0700);
    std::vector<uint8_t> page(PAGE_BYTES * 2);
    auto* aligned = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uint64_t>(page.data()), PAGE_BYTES));
    std::memset(aligned, 0x5A, PAGE_BYTES);
    EXPECT(make_call_io(made.files)->write(2 * 65536 + PAGE_BYTES, aligned, PAGE_BYTES) == 0);
    EXPECT(made.files->sync() == 0);
    EXPECT(made.files->contains(65536, 65536));
    EXPECT(!made.files->contains(65536, 65537));
    EXPECT(!made.files->contains(3 * 65536, 1));
  }
  const auto again = SsdFiles::open(path, 65536, 3, false);
  EXPECT(again.files != nullptr && !again.files->is_direct());
  std::vector<uint8_t> page(PAGE_BYTES);
  EXPECT(make_call_io(again.files)->read(2 * 65536 + PAGE_BYTES, page.data(), page.size()) == 0);
  EXPECT(page[0] == 0x5A && page[PAGE_BYTES - 1] == 0x5A);
}

TEST(a_directory_serves_one_daemon_at_a_time) {
  const ScratchDirectory scratch;
  const auto first = SsdFiles::open(scratch.file("tier"), 4096, 1, true);
  const auto second = SsdFiles::open(scratch.file("tier"), 4096, 1, true);
  EXPECT(first.files != nullptr);
  EXPECT(second.files == nullptr && second.error == EWOULDBLOCK);
}

TEST(a_file_that_is_no_segment_of_ours_is_refused_and_left_alone) {
  const ScratchDirectory scratch;
  const std::string path = scratch.file("tier");
  EXPECT(SsdFiles::open(path, 8192, 1, true).files != nullptr);
  const auto other = SsdFiles::open(path, 4096, 1, true);
  EXPECT(other.files == nullptr && other.detail.find("8192 bytes, expected 4096") != std::string::npos);
  std::filesystem::remove(path + "/segment-000000.kvs");
  std::filesystem::create_symlink("/etc/passwd", path + "/segment-000000.kvs");
  const auto link = SsdFiles::open(path, 8192, 1, true);
  EXPECT(link.files == nullptr && link.detail.find("no regular file") != std::string::npos);
  std::filesystem::permissions(path, std::filesystem::perms::all);
  EXPECT(SsdFiles::open(path, 8192, 1, true).error == EPERM);
}

TEST(a_missing_parent_directory_is_named) {
  const ScratchDirectory scratch;
  const auto absent = SsdFiles::open(scratch.file("a/b"), 4096, 1, true);
  EXPECT(absent.error == ENOENT && absent.detail.find("a/b") != std::string::npos);
}

TEST(a_file_with_holes_is_given_all_its_bytes_and_keeps_those_it_has) {
  const ScratchDirectory scratch;
  const std::string path = scratch.file("tier");
  constexpr off_t SIZE = 1 << 20;
  EXPECT(SsdFiles::open(path, SIZE, 1, true).files != nullptr);
  const std::string file = path + "/segment-000000.kvs";
  EXPECT(truncate(file.c_str(), 0) == 0 && truncate(file.c_str(), SIZE) == 0);
  const int fd = open(file.c_str(), O_RDWR);
  EXPECT(pwrite(fd, "kept", 4, SIZE / 2) == 4);
  close(fd);
  struct stat found{};
  EXPECT(stat(file.c_str(), &found) == 0 && found.st_blocks * 512 < SIZE);
  const auto opened = SsdFiles::open(path, SIZE, 1, false);
  EXPECT(opened.files != nullptr);
  EXPECT(stat(file.c_str(), &found) == 0 && found.st_blocks * 512 >= SIZE);
  std::vector<uint8_t> page(PAGE_BYTES);
  EXPECT(make_call_io(opened.files)->read(SIZE / 2, page.data(), page.size()) == 0);
  EXPECT(std::memcmp(page.data(), "kept", 4) == 0);
}
