// Any sequence of requests to the directory, with any keys and ids, while a lower tier is restored: the invariants of both hold,
// and nothing stays held.
#include "tests/directory_pool.h"
#include "fuzz_input.h"
#include "directory/flush_walk.h"

using namespace kvpool;
using kvpool::fuzzing::Input;
using kvpool::testing::CHUNK;
using kvpool::testing::Pool;

namespace {

constexpr uint32_t FILE_SEGMENTS = 3;
constexpr uint64_t FILE_SLOTS = 8;  // of a segment
constexpr uint32_t FILE_CHUNKS = 20;

class Requests {
 public:
  explicit Requests(Input& input)
      : input_(input),
        pool_((8 + input.up_to(40)) * CHUNK, static_cast<uint32_t>(4 + input.up_to(60)), input.up_to(3) != 0, 4 * CHUNK,
              input.up_to(1) != 0 ? PolicyKind::CLASS_QUEUES : PolicyKind::LRU, FILE_CHUNKS),
        files_geometry_(*DirectoryGeometry::plan_files(FILE_SLOTS * CHUNK, FILE_SEGMENTS, FILE_CHUNKS)),
        files_(nullptr, nullptr, files_geometry_, nullptr, Tier::SSD),
        tiers_({&pool_.directory, &files_}) {
    other_ = pool_.directory.add_namespace();
    for (uint32_t index = 0; index < 2; ++index) {
      static_cast<void>(files_.add_namespace());
    }
    static_cast<void>(files_.add_class(CHUNK, kvpool::testing::EXTENTS));
    for (uint32_t segment = 0; segment < FILE_SEGMENTS; ++segment) {
      files_.mark_segment_ready(segment);
    }
  }

  void run() {
    for (int step = 0; step < 400 && !input_.is_empty(); ++step) {
      request();
      if (step % 16 == 0) {
        FUZZ_EXPECT(is_sound());
      }
    }
    for (const HoldId id : ids_) {
      pool_.directory.end_reservation(id, ++pool_.now);
      pool_.directory.release(id, ++pool_.now);
      pool_.directory.unpin(id);
    }
    FUZZ_EXPECT(is_sound());
    const DirectoryStats stats = pool_.directory.stats();
    FUZZ_EXPECT(stats.held == 0);
    FUZZ_EXPECT(stats.holds == 0);
    FUZZ_EXPECT(stats.pins == 0);
    FUZZ_EXPECT(stats.pinned == 0);
    FUZZ_EXPECT(stats.reservations == 0);
    FUZZ_EXPECT(stats.zombies == 0);
    FUZZ_EXPECT(stats.writing == 0);
    for (const HoldId made : ids_below_) {
      files_.end_reservation(made, ++pool_.now);
      files_.release(made, ++pool_.now);
    }
    static_cast<void>(flush(pool_.directory, std::nullopt, UINT64_MAX));
    FUZZ_EXPECT(pool_.directory.stats().used_bytes == 0);
    FUZZ_EXPECT(files_.stats().held == 0);
    static_cast<void>(flush(files_, std::nullopt, UINT64_MAX));
    FUZZ_EXPECT(files_.stats().used_bytes == 0);
  }

 private:
  void request() {
    switch (input_.up_to(15)) {
      case 0:
      case 1:
        return reserve();
      case 2:
      case 3:
        return commit();
      case 4:
        return acquire();
      case 5:
        if (input_.up_to(3) == 0) {
          pool_.directory.unpin(id());
        }
        pool_.directory.release_part(id(), input_.up_to(9) + 1, ++pool_.now);
        return;
      case 6:
        pool_.directory.end_part(id(), input_.up_to(6), time());
        return;
      case 7:
        pool_.directory.expire_part(id(), input_.up_to(6), time());
        return;
      case 8:
        return remove();
      case 9:
        return look();
      case 10:
        return remember(pool_.directory.duplicate({id()}).value_or(std::vector<HoldId>{0}).front());
      case 11:
        return retain();
      case 12:
      case 13:
        return restore();
      case 14:
        return look_below();
      default:
        return prepare();
    }
  }

  // Few keys, so that they meet; some of them share the bucket where their probes begin.
  ChunkKey key() {
    const auto number = input_.number<uint8_t>();
    return number < 128 ? kvpool::testing::key_of(number % 32) : ChunkKey{{number % 4U, number, 1, 1}};
  }

  std::vector<uint8_t> keys(size_t count) {
    std::vector<uint8_t> packed(count * KEY_BYTES);
    const auto first = input_.number<uint8_t>();
    for (size_t index = 0; index < count; ++index) {
      // A chain of neighbours most of the time: it can be stored and acquired whole.
      const ChunkKey one = first < 192 ? kvpool::testing::key_of((first + index) % 32) : key();
      std::memcpy(&packed[index * KEY_BYTES], one.words, KEY_BYTES);
    }
    return packed;
  }

  // One that was given, or one that never is: those of runs that wait are the directory's own, and nobody is given them.
  HoldId id() {
    return ids_.empty() || input_.up_to(7) == 0 ? input_.awkward() | HoldId{1} << 40 : ids_[input_.up_to(ids_.size() - 1)];
  }
  uint64_t time() { return input_.up_to(7) == 0 ? input_.awkward() >> 1 : ++pool_.now; }
  NamespaceId owner() { return input_.up_to(4) == 0 ? other_ : pool_.owner; }

  void remember(HoldId made) {
    if (made != 0) {
      ids_.push_back(made);
    }
  }
  void remember_below(HoldId made) {
    if (made != 0) {
      ids_below_.push_back(made);
    }
  }
  HoldId id_below() { return ids_below_.empty() ? 0 : ids_below_[input_.up_to(ids_below_.size() - 1)]; }

  bool is_sound() {
    const auto broken = files_.verify();
    for (const auto& line : broken) {
      std::printf("  files: %s\n", line.c_str());
    }
    return pool_.is_sound() && broken.empty();
  }

  // Rows that an earlier life may have left, and others.
  void restore() {
    for (uint64_t row = input_.up_to(6); row > 0; --row) {
      std::optional<ChunkKey> parent;
      if (input_.up_to(2) != 0) {
        parent = key();
      }
      const auto place = input_.up_to(3) == 0 ? input_.awkward() : input_.up_to(FILE_SEGMENTS * FILE_SLOTS) * (CHUNK / PAGE_BYTES);
      const Retention kept{static_cast<uint8_t>(input_.up_to(MAX_PRIORITY)), static_cast<uint32_t>(input_.up_to(3))};
      static_cast<void>(files_.restore(owner(), ClassId(0), parent, key(), PageIndex(place),
                                       1 + input_.up_to(1000), kept, pool_.now));
    }
  }

  void look_below() {
    const auto count = input_.up_to(6);
    switch (input_.up_to(5)) {
      case 0:
        return remember_below(files_.acquire(owner(), keys(count).data(), count).id);
      case 1:
        files_.release(id_below(), ++pool_.now);
        return;
      case 2:
        static_cast<void>(kvpool::testing::drop(files_, key()));
        return;
      case 3:
        static_cast<void>(flush(files_, std::nullopt, time()));
        return;
      case 4:
        static_cast<void>(files_.release_part(id_below(), 1, ++pool_.now));
        return;
      default:
        return remember_below(files_.reserve(pool_.owner, ClassId(0), std::nullopt, keys(count).data(), count, ++pool_.now).id);
    }
  }

  void retain() {
    const auto count = input_.up_to(6);
    const Retention retention{static_cast<uint8_t>(input_.up_to(MAX_PRIORITY)), static_cast<uint32_t>(input_.up_to(3))};
    const NamespaceId asking = owner();
    const auto states = pool_.directory.retention().retain(asking, keys(count).data(), std::vector<Retention>(count, retention), time());
    FUZZ_EXPECT(states.size() == count);
  }

  void reserve() {
    const auto count = input_.up_to(12);
    std::optional<ChunkKey> parent;
    if (input_.up_to(2) == 0) {
      parent = key();
    }
    const ClassId size_class(static_cast<uint32_t>(input_.up_to(pool_.directory.arena().class_count() - 1)));
    const NamespaceId asking = owner();
    const ReserveBounds bounds{input_.up_to(3) == 0 ? input_.up_to(6) : SIZE_MAX, input_.up_to(3) == 0};
    const auto more = input_.up_to(4);
    const HoldId reservation = id();
    const Reservation further = pool_.directory.reserve_more(reservation, keys(more).data(), more, time(), bounds);
    FUZZ_EXPECT(further.states.size() <= more && further.offsets.size() == further.states.size());
    const Reservation made =
        pool_.directory.reserve(asking, size_class, parent, keys(count).data(), count, time(), {}, bounds);
    FUZZ_EXPECT(made.states.size() <= count && made.generations.size() == made.states.size());
    const bool reserved = std::count(made.states.begin(), made.states.end(), 1) > 0;
    FUZZ_EXPECT(made.id != 0 || !reserved);
    FUZZ_EXPECT(made.id == 0 || reserved || made.states.size() < count);
    remember(made.id);
  }

  void commit() {
    const HoldId reservation = id();
    const auto extents = pool_.directory.holds().extents_of(reservation);
    const auto count = input_.up_to(14);
    const std::vector<uint32_t> sums(count * extents.value_or(1), 9);
    const auto states = pool_.directory.commit(reservation, input_.awkward(), count, sums.data());
    FUZZ_EXPECT(states.size() == count);
    const auto again = pool_.directory.commit(reservation, 0, count, sums.data());
    FUZZ_EXPECT(extents.has_value() || kvpool::testing::all_are(again, SaveState::EXPIRED));
  }

  void acquire() {
    const auto count = input_.up_to(12);
    if (input_.up_to(1) == 0) {
      return remember(pool_.directory.acquire(owner(), keys(count).data(), count).id);
    }
    const HoldId hold = id();
    switch (input_.up_to(2)) {
      case 0:
        return static_cast<void>(pool_.directory.shorten(hold, input_.up_to(12), time()));
      case 1:
        return static_cast<void>(pool_.directory.extend(hold, keys(count).data(), count, time()));
      default:
        return remember(pool_.directory.acquire(owner(), keys(count).data(), count, 0, key()).id);
    }
  }

  void remove() {
    if (input_.up_to(3) != 0) {
      static_cast<void>(kvpool::testing::drop(pool_.directory, key()));
    } else {
      std::optional<NamespaceId> only;
      if (input_.up_to(1) == 0) {
        only = owner();
      }
      static_cast<void>(flush(pool_.directory, only, time()));
    }
  }

  void look() {
    const HoldId hold = id();
    const auto columns = pool_.directory.columns({hold});
    const auto position = input_.awkward();
    const auto found = pool_.directory.holds().key_of(hold, position);
    FUZZ_EXPECT(!found || (columns && position < columns->offsets.size()));
    const RecordPage page =
        pool_.directory.records(static_cast<uint32_t>(input_.awkward()), static_cast<uint32_t>(1 + input_.up_to(9)));
    remember(page.pin);
    static_cast<void>(pool_.directory.namespace_counts(NamespaceId(static_cast<uint32_t>(input_.awkward()))));
    FUZZ_EXPECT(pool_.directory.stats().used_bytes <= pool_.geometry.capacity);
  }

  void prepare() {
    if (input_.up_to(1) == 0) {
      pool_.directory.mark_segment_ready(static_cast<uint32_t>(input_.up_to(pool_.geometry.arena.segments - 1)));
    } else {
      static_cast<void>(pool_.directory.add_class(input_.awkward(), static_cast<uint32_t>(input_.awkward())));
    }
  }

  Input& input_;
  Pool pool_;
  DirectoryGeometry files_geometry_;
  Directory files_;
  TierSet tiers_;
  NamespaceId other_;
  std::vector<HoldId> ids_;
  std::vector<HoldId> ids_below_;  // of the second directory
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  Requests(input).run();
  return 0;
}
