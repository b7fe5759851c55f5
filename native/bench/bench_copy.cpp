// Gathers and scatters of paged KV with checksum, against plain memcpy of the same pieces.
//
//     make setup && .venv/bin/cmake --build build/native --target bench_copy
//     build/native/bench_copy [region_mib] [block_plane_kib]
//
// Both sides lie in DRAM: regions must be several times the last-level cache, hence 1 GiB each by default. One thread;
// rates are by its CPU time, so that a busy neighbour shows as spread and not as a slower copy. The ways alternate in
// rounds over the same bytes and medians are compared: absolutes of two runs are not comparable.
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "copy/copy_tuning.h"
#include "checksum/crc32c.h"
#include "copy/extent_copy.h"

using namespace kvpool;

namespace {

constexpr size_t ROUNDS = 11;
constexpr size_t EXTENT_BYTES = 1 << 20;

double cpu_seconds() {
  timespec used{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
}

// Zeroed memory; a region of the arena is a memfd's, as in the daemon.
uint8_t* region(size_t size, bool is_arena) {
  const int fd = is_arena ? memfd_create("kvpool-bench", 0) : -1;
  if (is_arena && ftruncate(fd, static_cast<off_t>(size)) != 0) {
    std::perror("ftruncate");
    std::exit(1);
  }
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, is_arena ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, fd, 0);
  if (data == MAP_FAILED) {
    std::perror("mmap");
    std::exit(1);
  }
  auto* bytes = static_cast<uint8_t*>(data);
  for (size_t i = 0; i < size; i += sizeof(uint64_t)) {
    const uint64_t word = i * 0x9E3779B97F4A7C15U;
    std::memcpy(bytes + i, &word, sizeof(word));
  }
  return bytes;
}

struct Setting {
  CacheView view;
  uint8_t* arena;
  std::vector<int64_t> ids;  // a permutation of the engine's blocks
  size_t extent_blocks;      // blocks of one extent of a chunk

  [[nodiscard]] size_t extents() const { return ids.size() / extent_blocks; }
  [[nodiscard]] std::span<const int64_t> extent_ids(size_t i) const { return {&ids[i * extent_blocks], extent_blocks}; }
  [[nodiscard]] uint8_t* extent(size_t i) const { return arena + i * EXTENT_BYTES; }
};

enum class Way { GATHER_MEMCPY, GATHER, SCATTER_MEMCPY, SCATTER };

void plain(const Setting& setting, size_t number, bool is_gather) {
  const CacheView& view = setting.view;
  uint8_t* extent = setting.extent(number);
  for (uint32_t plane = 0; plane < view.planes; ++plane) {
    for (const int64_t id : setting.extent_ids(number)) {
      uint8_t* block = view.block(0, plane, id);
      std::memcpy(is_gather ? extent : block, is_gather ? block : extent, view.plane_block_bytes);
      extent += view.plane_block_bytes;
    }
  }
}

// GB per CPU second over `count` extents from `first` on.
double rate(const Setting& setting, Way way, size_t first, size_t count) {
  uint32_t mixed = 0;
  const double start = cpu_seconds();
  for (size_t i = first; i < first + count; ++i) {
    const size_t extent = i % setting.extents();
    switch (way) {
      case Way::GATHER:
        mixed ^= gather_payload(setting.view, 0, setting.extent_ids(extent), setting.extent(extent));
        break;
      case Way::SCATTER:
        mixed ^= scatter_payload(setting.view, 0, setting.extent_ids(extent), setting.extent(extent));
        break;
      default:
        plain(setting, extent, way == Way::GATHER_MEMCPY);
    }
  }
  const double seconds = cpu_seconds() - start;
  if (mixed == 1) {
    std::puts("");  // keeps the checksums alive
  }
  return static_cast<double>(count * EXTENT_BYTES) / seconds / 1e9;
}

void report(const char* name, std::vector<double>& rates, double baseline) {
  std::printf("%-16s %6.2f GB/s by CPU time (%.2f to %.2f)  ratio %.2f\n", name, rates[ROUNDS / 2], rates.front(),
              rates.back(), rates[ROUNDS / 2] / baseline);
}

}  // namespace

int main(int count, char** arguments) {
  const size_t region_bytes = (count > 1 ? std::stoul(arguments[1]) : 1024) << 20;
  const size_t plane_bytes = (count > 2 ? std::stoul(arguments[2]) : 32) << 10;
  const size_t blocks = region_bytes / (2 * plane_bytes);
  Setting setting{.view = {}, .arena = region(region_bytes, true), .ids = std::vector<int64_t>(blocks),
                  .extent_blocks = EXTENT_BYTES / (2 * plane_bytes)};
  setting.view.bases = {region(region_bytes, false)};
  setting.view.planes = 2;
  setting.view.blocks = blocks;
  setting.view.plane_block_bytes = plane_bytes;
  setting.view.plane_stride = blocks * plane_bytes;
  setting.view.block_stride = plane_bytes;
  std::iota(setting.ids.begin(), setting.ids.end(), int64_t{0});
  std::shuffle(setting.ids.begin(), setting.ids.end(), std::mt19937_64(1));

  tune_copies(plane_bytes);
  const size_t part = setting.extents() / 4;
  std::vector<double> rates[4];
  for (size_t round = 0; round < ROUNDS; ++round) {
    for (size_t way = 0; way < 4; ++way) {
      // Each way of a round starts elsewhere, so that none finds what the one before it left in a cache.
      rates[way].push_back(rate(setting, static_cast<Way>(way), (round + way) * part, part));
    }
  }
  for (auto& of_way : rates) {
    std::sort(of_way.begin(), of_way.end());
  }
  std::printf("saves by %s, loads by %s\n", COPY_VARIANTS[copy_variant(CopyKind::SAVE, plane_bytes)].name,
              COPY_VARIANTS[copy_variant(CopyKind::LOAD, plane_bytes)].name);
  std::printf("checksum path %s, regions of %zu MiB, pieces of %zu KiB\n", crc32c_path(), region_bytes >> 20,
              plane_bytes >> 10);
  report("gather memcpy", rates[0], rates[0][ROUNDS / 2]);
  report("gather+crc", rates[1], rates[0][ROUNDS / 2]);
  report("scatter memcpy", rates[2], rates[2][ROUNDS / 2]);
  report("scatter+crc", rates[3], rates[2][ROUNDS / 2]);
  return 0;
}
