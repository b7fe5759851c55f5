// CRC-32C: the published value, every way against the table on odd lengths, offsets and continuations, and copies of what
// another process is writing.
#include "checksum/crc32c.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <initializer_list>
#include <vector>

#include "tests/harness.h"
#include "base/copy_variants.h"
#include "tests/arena/racing_writer.h"

using namespace kvpool;

namespace {
constexpr std::initializer_list<size_t> SIZES = {0, 1, 7, 8, 63, 64, 255, 256, 257, 511, 512, 1000, 4096, 32768, 33333};
constexpr std::initializer_list<CrcPath> PATHS = {CrcPath::TABLE, CrcPath::SSE42, CrcPath::AVX512, CrcPath::ARM_CRC,
                                                  CrcPath::ARM_PMULL};
constexpr size_t RACED_COPIES = 4'000;
constexpr size_t RACED_COPIES_MAX = 100'000;

size_t variants_of(CrcPath path) { return has_copy_variants(path) ? COPY_VARIANTS.size() : 1; }

}  // namespace

TEST(published_value) {
  const char* digits = "123456789";
  EXPECT(crc32c(0, reinterpret_cast<const uint8_t*>(digits), 9) == 0xE3069283U);
}

TEST(every_path_and_variant_equals_the_table) {
  std::mt19937_64 random(testing::seed());
  std::vector<uint8_t> data(40000);
  for (uint8_t& byte : data) {
    byte = static_cast<uint8_t>(random());
  }
  for (const CrcPath path : PATHS) {
    if (!crc32c_supports(path)) {
      std::printf("  way %d is not on this machine\n", static_cast<int>(path));
      continue;
    }
    for (const size_t size : SIZES) {
      for (const size_t offset : std::initializer_list<size_t>{0, 1, 3, 64, 100}) {
        const auto start = static_cast<uint32_t>(random());
        const uint32_t expected = crc32c_with(CrcPath::TABLE, start, &data[offset], size);
        EXPECT(crc32c_with(path, start, &data[offset], size) == expected);
        for (size_t variant = 0; variant < variants_of(path); ++variant) {
          std::vector<uint8_t> target(size + 256, 0xAA);
          uint8_t* to = &target[random() % 70];
          const uint8_t* next = &data[random() % (data.size() - size)];
          const uint32_t copied = copy_crc32c_with(path, variant, start, to, &data[offset], size, next);
          copy_fence();
          EXPECT(copied == expected);
          EXPECT(std::memcmp(to, &data[offset], size) == 0);
          EXPECT(to[size] == 0xAA);
        }
      }
    }
  }
}

TEST(a_prefetch_behind_the_end_of_memory_reads_nothing) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* mapped = mmap(nullptr, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EXPECT(mapped != MAP_FAILED);
  auto* bytes = static_cast<uint8_t*>(mapped);
  EXPECT(mprotect(bytes + 2 * page, page, PROT_NONE) == 0);
  std::vector<uint8_t> target(2 * page);
  for (size_t variant = 0; variant < COPY_VARIANTS.size(); ++variant) {
    const uint32_t copied = copy_crc32c_with(crc32c_best_path(), variant, 0, target.data(), bytes, 2 * page, bytes + 2 * page);
    EXPECT(copied == crc32c(0, bytes, 2 * page));
  }
  munmap(mapped, 3 * page);
}

TEST(a_checksum_is_of_the_stored_bytes_though_the_source_changes) {
  std::mt19937_64 random(testing::seed());
  const testing::RacingWriter writer;
  std::vector<uint8_t> target(testing::RacingWriter::BYTES + 300);
  for (const CrcPath path : PATHS) {
    if (!crc32c_supports(path)) {
      continue;
    }
    for (size_t variant = 0; variant < variants_of(path); ++variant) {
      size_t changed = 0;
      size_t wrong = 0;
      // Until the writer has been met often, which takes a second core: where there is none, for a bounded number of copies.
      for (size_t copies = 0; copies < RACED_COPIES_MAX && changed < RACED_COPIES; ++copies) {
        const size_t size = random() % 900;
        const size_t from = random() % 120;
        uint8_t* const to = &target[random() % 300];
        const uint32_t before = crc32c(0, writer.bytes() + from, size);
        const uint32_t copied = copy_crc32c_with(path, variant, 0, to, writer.bytes() + from, size, writer.bytes());
        copy_fence();
        changed += static_cast<size_t>(copied != before);
        wrong += static_cast<size_t>(copied != crc32c(0, to, size));
      }
      std::printf("  way %d, %s: %zu copies of bytes that changed, %zu wrong\n", static_cast<int>(path),
                  COPY_VARIANTS[variant].name, changed, wrong);
      EXPECT(wrong == 0);
    }
  }
}

TEST(a_checksum_may_be_continued) {
  std::vector<uint8_t> data(5000, 3);
  const uint32_t whole = crc32c(0, data.data(), data.size());
  EXPECT(crc32c(crc32c(0, data.data(), 777), data.data() + 777, data.size() - 777) == whole);
}

TEST(a_checksum_of_words_is_that_of_their_bytes) {
  const std::array<uint64_t, 3> words{0x0123456789ABCDEF, 0, UINT64_MAX};
  EXPECT(crc32c_of(words) == crc32c(0, reinterpret_cast<const uint8_t*>(words.data()), sizeof(words)));
  EXPECT(crc32c_of(words) == crc32c_with(CrcPath::TABLE, 0, reinterpret_cast<const uint8_t*>(words.data()), sizeof(words)));
}

TEST(a_flipped_bit_changes_the_checksum) {
  std::vector<uint8_t> data(4096, 7);
  const uint32_t before = crc32c(0, data.data(), data.size());
  for (size_t bit = 0; bit < data.size() * 8; bit += 37) {
    data[bit / 8] ^= static_cast<uint8_t>(1U << (bit % 8));
    EXPECT(crc32c(0, data.data(), data.size()) != before);
    data[bit / 8] ^= static_cast<uint8_t>(1U << (bit % 8));
  }
}
