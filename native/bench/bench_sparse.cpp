// Summaries and recall against the time that reading their bytes takes.
//
//     make setup && .venv/bin/cmake --build build/native --target bench_sparse
//     build/native/bench_sparse [layers] [rounds] [blocks] [path]
//
// One layer and step at 8 KV heads of 128 and groups of 4. Records of many layers are used in turn, so that no cache holds them
// when they come again. The floor is a sum over the same records on as many threads, in the same round. Printed: median, and the
// quickest tenth.
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "base/types.h"
#include "sparse/block_summary.h"
#include "sparse/recall.h"
#include "sparse/sparse_path.h"

using namespace kvpool;

namespace {

constexpr uint32_t DIM = 128;
constexpr uint32_t KV_HEADS = 8;
constexpr uint32_t GROUP = 4;
constexpr uint32_t TOKENS = 128;
constexpr size_t CHUNK_BLOCKS = 2;
constexpr uint64_t STRIDE = KV_HEADS * DIM * 2;

double timed_us(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

struct Times {
  std::vector<double> us;

  void print(const char* what, double bytes) {
    std::sort(us.begin(), us.end());
    const double median = us[us.size() / 2];
    const double tenth = us[us.size() / 10];
    std::printf("%-36s median %9.1f us, quickest tenth %9.1f us (%.1f GB/s)\n", what, median, tenth, bytes / tenth * 1e-3);
  }
};

std::vector<uint16_t> some_kv(size_t tokens, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> kv(tokens * KV_HEADS * DIM);
  for (uint16_t& number : kv) {
    const float value = normal(random);
    number = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
  }
  return kv;
}

// Huge pages, as an arena has them where the machine gives them.
struct HugeBytes {
  explicit HugeBytes(size_t bytes)
      : size_(bytes), data_(static_cast<uint8_t*>(std::aligned_alloc(HUGE_PAGE_BYTES, round_up(bytes, HUGE_PAGE_BYTES)))) {
    ::madvise(data_, round_up(bytes, HUGE_PAGE_BYTES), MADV_HUGEPAGE);
  }
  HugeBytes(HugeBytes&& other) noexcept : size_(other.size_), data_(std::exchange(other.data_, nullptr)) {}
  ~HugeBytes() { std::free(data_); }
  [[nodiscard]] uint8_t* data() const { return data_; }
  [[nodiscard]] size_t size() const { return size_; }

 private:
  size_t size_;
  uint8_t* data_;
};

// Where the records of a layer lie, one behind the other in each chunk.
struct Layer {
  std::vector<const uint8_t*> chunks;
  std::vector<const uint8_t*> records;
};

// Summaries as an arena has them: chunks of two blocks, those of all layers behind one another in a whole number of MiB.
struct Summaries {
  HugeBytes bytes;
  std::vector<Layer> layers;
};

uint64_t sum_words(const uint8_t* from, size_t size) {
  uint64_t sums[8] = {};
  for (size_t at = 0; at + 64 <= size; at += 64) {
    for (size_t i = 0; i < 8; ++i) {
      uint64_t word;
      std::memcpy(&word, from + at + i * 8, 8);
      sums[i] += word;
    }
  }
  return sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7];
}

void measure_building(size_t rounds, std::mt19937& random) {
  constexpr size_t BLOCKS = 64;
  const auto keys = some_kv(BLOCKS * TOKENS, random);
  const auto values = some_kv(BLOCKS * TOKENS, random);
  std::vector<uint8_t> record(summary_bytes(SummaryForm::CLUSTERS7, DIM));
  Times times;
  for (size_t round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < 2 * KV_HEADS; ++i) {  // all heads of a block, as a job builds them
      const size_t block = (2 * round + i / KV_HEADS) % BLOCKS;
      const uint64_t at = block * TOKENS * KV_HEADS * DIM + i % KV_HEADS * DIM;
      times.us.push_back(timed_us([&] {
        build_summary(SummaryForm::CLUSTERS7, KvType::BFLOAT16, DIM, reinterpret_cast<const uint8_t*>(keys.data() + at),
                      reinterpret_cast<const uint8_t*>(values.data() + at), STRIDE, TOKENS, record.data());
      }));
    }
  }
  times.print("build, of a block and KV head", 2.0 * TOKENS * DIM * 2);
}

Summaries some_layers(size_t count, size_t blocks, std::mt19937& random) {
  const uint64_t record_bytes = summary_bytes(SummaryForm::CLUSTERS7, DIM);
  const size_t made = 32;  // different blocks; their records are repeated
  const auto keys = some_kv(made * TOKENS, random);
  const auto values = some_kv(made * TOKENS, random);
  std::vector<uint8_t> records(made * KV_HEADS * record_bytes);
  for (size_t i = 0; i < made * KV_HEADS; ++i) {
    const uint64_t at = i / KV_HEADS * TOKENS * KV_HEADS * DIM + i % KV_HEADS * DIM;
    build_summary(SummaryForm::CLUSTERS7, KvType::BFLOAT16, DIM, reinterpret_cast<const uint8_t*>(keys.data() + at),
                  reinterpret_cast<const uint8_t*>(values.data() + at), STRIDE, TOKENS, records.data() + i * record_bytes);
  }
  const size_t run = CHUNK_BLOCKS * KV_HEADS * record_bytes;
  const size_t stride = round_up(count * run, size_t{1} << 20);
  Summaries all{HugeBytes(blocks / CHUNK_BLOCKS * stride), std::vector<Layer>(count)};
  for (size_t i = 0; i < count; ++i) {
    for (size_t chunk = 0; chunk < blocks / CHUNK_BLOCKS; ++chunk) {
      uint8_t* to = all.bytes.data() + chunk * stride + i * run;
      all.layers[i].chunks.push_back(to);
      for (size_t block = 0; block < CHUNK_BLOCKS; ++block, to += KV_HEADS * record_bytes) {
        std::memcpy(to, records.data() + random() % made * KV_HEADS * record_bytes, KV_HEADS * record_bytes);
        all.layers[i].records.push_back(to);
      }
    }
  }
  return all;
}

void measure_recall(unsigned threads, size_t rounds, const std::vector<Layer>& layers, std::mt19937& random) {
  const size_t run = CHUNK_BLOCKS * KV_HEADS * summary_bytes(SummaryForm::CLUSTERS7, DIM);
  WorkerTeam team(threads);
  Recall recall({SummaryForm::CLUSTERS7, DIM, KV_HEADS, GROUP});
  const auto blocks = static_cast<uint32_t>(layers[0].records.size());
  const uint32_t take = (blocks + 19) / 20;
  std::normal_distribution<float> normal;
  std::vector<float> query(KV_HEADS * GROUP * DIM);
  std::vector<int32_t> chosen(KV_HEADS * take);
  std::vector<uint8_t> is_dense(KV_HEADS);
  std::vector<float> kept(KV_HEADS * GROUP), loose(KV_HEADS * GROUP), logits(KV_HEADS * GROUP), values(query.size());
  Times floor, alone, whole;
  uint64_t sink = 0;
  for (size_t round = 0; round < rounds * layers.size(); ++round) {
    const Layer& layer = layers[round % layers.size()];
    for (float& number : query) {
      number = normal(random);
    }
    const RecallAnswer answer{chosen.data(), is_dense.data(), kept.data(), loose.data(), nullptr, nullptr};
    RecallAnswer with_tail = answer;
    with_tail.tail_logits = logits.data();
    with_tail.tail_values = values.data();
    switch (round / layers.size() % 3) {
      case 0:
        floor.us.push_back(timed_us([&] {
          std::vector<uint64_t> sums(layer.chunks.size());
          team.run(static_cast<uint32_t>(sums.size()), [&](uint32_t chunk) { sums[chunk] = sum_words(layer.chunks[chunk], run); });
          for (const uint64_t sum : sums) {
            sink += sum;
          }
        }));
        break;
      case 1:
        alone.us.push_back(timed_us([&] { recall.run(team, layer.records, query.data(), take, answer); }));
        break;
      default:
        whole.us.push_back(timed_us([&] { recall.run(team, layer.records, query.data(), take, with_tail); }));
    }
  }
  const auto bytes = static_cast<double>(run * layers[0].chunks.size());
  std::printf("%u threads, %u blocks, 5 %% taken (%llx)\n", threads, blocks, static_cast<unsigned long long>(sink & 0xF));
  floor.print("  read floor", bytes);
  alone.print("  scores and choice", bytes);
  whole.print("  scores, choice and tail", bytes);
}

}  // namespace

int main(int argc, char** argv) {
  const size_t layers = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 32;
  const size_t rounds = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 12;
  const size_t blocks = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1024;
  std::mt19937 random(7);
  const auto all = some_layers(layers, blocks, random);
  for (const SparsePath path : {SparsePath::PORTABLE, SparsePath::AVX2, SparsePath::AVX512}) {
    if (sparse_supports(path) && (argc < 5 || std::strcmp(argv[4], sparse_path_name(path)) == 0)) {
      choose_sparse_path(path);
      std::printf("%s\n", sparse_path_name(path));
      measure_building(rounds, random);
      for (const unsigned threads : {1U, 2U}) {
        measure_recall(threads, rounds, all.layers, random);
      }
    }
  }
  return 0;
}
