// A life that is killed at every single one of its stores: what a later one makes of what then stands in memory.
//
// The processor stops after each instruction (the trap flag of x86-64), and what is kept is copied whenever it has changed. Each copy is
// what a kill there would have left: a process's stores are seen in the order in which it made them. Other processors see the end of
// each request alone.
#include <sys/mman.h>

#include <csignal>

#include "tests/directory/random_life.h"
#include "tests/harness.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

// What stood in the kept memory after each store of one request.
class Stores {
 public:
  static constexpr size_t MOST = 4096;

  Stores(const Mapping& index, const Mapping& records) : index_(index), records_(records), size_(index.size() + records.size()) {
    copies_ = static_cast<uint8_t*>(
        mmap(nullptr, MOST * size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    take();
  }
  ~Stores() { munmap(copies_, MOST * size_); }
  Stores(const Stores&) = delete;
  Stores& operator=(const Stores&) = delete;

  template <typename Request>
  void watch(const Request& request) {
    count_ = 0;
    take();
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
    watching_ = this;
    struct sigaction action = {};
    struct sigaction before = {};
    action.sa_handler = [](int) { watching_->take_changed(); };
    sigaction(SIGTRAP, &action, &before);
    constexpr unsigned long long TRAP_FLAG = 0x100;
    __builtin_ia32_writeeflags_u64(__builtin_ia32_readeflags_u64() | TRAP_FLAG);
    request();
    __builtin_ia32_writeeflags_u64(__builtin_ia32_readeflags_u64() & ~TRAP_FLAG);
    sigaction(SIGTRAP, &before, nullptr);
#else
    request();
#endif
    take_changed();
  }

  [[nodiscard]] size_t count() const { return count_; }
  [[nodiscard]] std::shared_ptr<Mapping> index(size_t at) const { return copy_of(copies_ + at * size_, index_.size()); }
  [[nodiscard]] std::shared_ptr<Mapping> records(size_t at) const { return copy_of(copies_ + at * size_ + index_.size(), records_.size()); }

 private:
  void take() {
    uint8_t* const to = copies_ + count_ * size_;
    std::memcpy(to, index_.data(), index_.size());
    std::memcpy(to + index_.size(), records_.data(), records_.size());
    ++count_;
  }
  void take_changed() {
    const uint8_t* const last = copies_ + (count_ - 1) * size_;
    const bool is_same = std::memcmp(last, index_.data(), index_.size()) == 0 &&
                         std::memcmp(last + index_.size(), records_.data(), records_.size()) == 0;
    if (!is_same && count_ < MOST) {
      take();
    }
  }

  static inline Stores* watching_ = nullptr;
  const Mapping& index_;
  const Mapping& records_;
  const uint64_t size_;
  uint8_t* copies_;
  size_t count_ = 0;
};

// Chunks that were READY before and after a request are there, whenever it ended; of the others some, none that was neither. The same
// of slots that somebody writes to.
void expect_between(const KeptState& before, const KeptState& after, Pool& pool, const FormerCounts& counts) {
  const KeptState is = state_of(pool);
  for (const auto& [id, kept] : before.ready) {
    const auto later = after.ready.find(id);
    EXPECT(later == after.ready.end() || later->second.generation != kept.generation || is.ready.contains(id));
  }
  for (const auto& [id, kept] : is.ready) {
    const auto was = before.ready.find(id);
    const auto will_be = after.ready.find(id);
    EXPECT((was != before.ready.end() && was->second == kept) || (will_be != after.ready.end() && will_be->second == kept));
    EXPECT(kept.checksums == RandomLife::sums_of(id, RandomLife::extents_of(id)));
    EXPECT(std::ranges::equal(pool.directory.tokens_of(key_of(id)), RandomLife::tokens_of(id)));
  }
  for (const uint64_t page : before.written) {
    EXPECT(!after.written.contains(page) || is.written.contains(page));
  }
  for (const uint64_t page : is.written) {
    EXPECT(before.written.contains(page) || after.written.contains(page));
  }
  EXPECT(counts.damaged == 0 && counts.unplaced == 0 && counts.unknown == 0);
  EXPECT(counts.taken == is.ready.size() && counts.withheld == is.written.size());
}

void run_lives(uint64_t seed, PolicyKind policy, int steps) {
  const DirectoryGeometry geometry = *DirectoryGeometry::plan(16 * CHUNK, 4 * CHUNK, 24);
  const auto former = new_life(geometry, nullptr, policy);
  make_ready(*former);
  RandomLife life(*former, seed);
  Stores stores(*former->index, *former->records);
  size_t kills = 0;
  const int failed = failures();
  for (int step = 0; step < steps && failures() == failed; ++step) {
    const KeptState before = state_of(*former);
    stores.watch([&] { life.step(); });
    const KeptState after = state_of(*former);
    EXPECT(stores.count() < Stores::MOST);
    for (size_t at = 0; at < stores.count() && failures() == failed; ++at) {
      const auto pool = new_life(geometry, former->arena, policy);
      const FormerCounts counts = take_over(*pool, stores.index(at), stores.records(at), former->now);
      expect_between(before, after, *pool, counts);
      EXPECT(pool->is_sound());
      ++kills;
      if (failures() != failed) {
        std::printf("  at store %zu of step %d\n", at, step);
      }
    }
  }
  std::printf("  %zu kills\n", kills);
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
  EXPECT(kills > static_cast<size_t>(4 * steps));
#endif
}

}  // namespace

TEST(a_life_that_is_killed_at_any_store_leaves_what_was_there) { run_lives(kvpool::testing::seed(), PolicyKind::LRU, 120); }

TEST(the_same_with_queues_by_class) { run_lives(kvpool::testing::seed(), PolicyKind::CLASS_QUEUES, 80); }

TEST(lives_follow_one_another) {
  const uint64_t seed = kvpool::testing::seed();
  const DirectoryGeometry geometry = *DirectoryGeometry::plan(48 * CHUNK, 4 * CHUNK, 64);
  auto pool = new_life(geometry);
  const int failed = failures();
  for (uint64_t number = 0; number < 100 && failures() == failed; ++number) {
    make_ready(*pool);
    {
      RandomLife life(*pool, seed + number);
      for (int step = 0; step < 100; ++step) {
        life.step();
      }
    }
    const KeptState was = state_of(*pool);
    auto next = new_life(geometry, pool->arena);
    const FormerCounts counts = take_over(*next, *pool);
    EXPECT(state_of(*next).ready == was.ready && state_of(*next).written == was.written);
    EXPECT(next->directory.stats().token_id_bytes == was.ready.size() * RandomLife::tokens_of(1).size() * sizeof(int32_t));
    EXPECT(next->directory.stats().token_ids_left_out == 0);
    EXPECT(counts.taken == was.ready.size() && counts.withheld == was.written.size());
    EXPECT(next->is_sound());
    if (number % 3 == 2) {  // otherwise they are withheld in the next life too
      while (!next->directory.withheld().by_holder().empty()) {
        EXPECT(next->directory.release_withheld(HolderId(next->directory.withheld().by_holder().begin()->first)) > 0);
      }
      EXPECT(next->is_sound());
    }
    pool = std::move(next);
  }
}
