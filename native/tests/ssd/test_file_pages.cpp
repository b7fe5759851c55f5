// Pages of a mapped file: loaded while the file has them, an error where reading them would end the process.
#include <unistd.h>

#include <fstream>

#include "ssd/file_pages.h"
#include "tests/harness.h"
#include "tests/ssd/ssd_setting.h"

using namespace kvpool;
using namespace kvpool::testing;

TEST(pages_are_loaded_and_those_that_a_file_has_lost_are_an_error) {
  const ScratchDirectory scratch;
  const std::string path = scratch.file("mapped");
  { std::ofstream(path) << std::string(4 * PAGE_BYTES, 'x'); }
  const auto opened = FilePages::open(path);
  EXPECT(opened.pages != nullptr);
  EXPECT(opened.pages->load(1) == 0);
  EXPECT(opened.pages->load(4 * PAGE_BYTES) == 0);
  EXPECT(opened.pages->load(1ULL << 40) == 0);  // as much as the file had
  EXPECT(truncate(path.c_str(), 2 * PAGE_BYTES) == 0);
  EXPECT(opened.pages->load(2 * PAGE_BYTES) == 0);
  EXPECT(opened.pages->load(3 * PAGE_BYTES) == EIO);
}

TEST(what_cannot_be_mapped_is_an_error) {
  const ScratchDirectory scratch;
  EXPECT(FilePages::open(scratch.file("absent")).error == ENOENT);
  { std::ofstream(scratch.file("empty")) << ""; }
  EXPECT(FilePages::open(scratch.file("empty")).error == EINVAL);
  std::filesystem::create_symlink("/etc/passwd", scratch.file("link"));
  EXPECT(FilePages::open(scratch.file("link")).error == ELOOP);
}
