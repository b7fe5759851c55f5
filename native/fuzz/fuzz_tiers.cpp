// Any sequence of moves between three tiers and into a device, with keys that a client chooses: the invariants of all hold, and nothing
// stays held.
#include "fuzz_input.h"

#include "tests/directory/directory_tiers.h"
#include "directory/flush_walk.h"

using namespace kvpool;
using kvpool::fuzzing::Input;
using kvpool::testing::TiersOverStore;

namespace {

// Half of the keys share one bucket, and are more than a probe looks at.
ChunkKey key_of(uint64_t number) { return number % 2 == 0 ? ChunkKey{{7, number, 1, 1}} : kvpool::testing::key_of(number); }

std::vector<uint8_t> keys_of(const std::vector<uint64_t>& numbers) {
  std::vector<uint8_t> packed(numbers.size() * KEY_BYTES);
  for (size_t index = 0; index < numbers.size(); ++index) {
    const ChunkKey key = key_of(numbers[index]);
    std::memcpy(&packed[index * KEY_BYTES], key.words, KEY_BYTES);
  }
  return packed;
}

// A device with copies of a few chunks.
const DirectoryGeometry& device_geometry() {
  static const DirectoryGeometry planned = *DirectoryGeometry::plan_device(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, 12);
  return planned;
}

// Demotions, copies and promotions under way.
struct Move {
  HoldId hold;
  HoldId other;  // the reservation below, or the hold there
  Directory* upper;
  Directory* lower;
  std::vector<ChunkKey> keys;
  std::vector<uint64_t> generations;
};

class Moves {
 public:
  explicit Moves(Input& input)
      : input_(input),
        tiers_(static_cast<uint32_t>(16 + 8 * input.up_to(40)), static_cast<uint32_t>(8 + input.up_to(40)),
               input.up_to(1) != 0 ? PolicyKind::CLASS_QUEUES : PolicyKind::LRU, &device_geometry()),
        memory_(tiers_.memory.directory) {
    if (input_.up_to(1) != 0) {
      device_.emplace(memory_, device_geometry());
      FUZZ_EXPECT(device_->add_namespace() == tiers_.memory.owner);
      FUZZ_EXPECT(device_->add_class(kvpool::testing::CHUNK, kvpool::testing::EXTENTS) == tiers_.in_files);
      device_->mark_segment_ready(0);
    }
    for (uint64_t number = 0; input_.up_to(1) != 0 && number < MAX_PROBE; ++number) {
      save({1000 + 2 * number});
    }
  }

  void run() {
    for (int step = 0; step < 200 && !input_.is_empty(); ++step) {
      move();
      if (step % 16 == 0) {
        FUZZ_EXPECT(tiers_.is_sound() && (!device_ || device_->verify().empty()));
      }
    }
    while (!downwards_.empty()) {
      publish();
    }
    while (!upwards_.empty()) {
      land();
    }
    for (const HoldId id : holds_) {
      memory_.release(id, now());
      memory_.end_reservation(id, now());
    }
    FUZZ_EXPECT(tiers_.is_sound());
    for (const Directory* directory : {&memory_, &tiers_.files, &tiers_.store, device_ ? &*device_ : &memory_}) {
      const DirectoryStats stats = directory->stats();
      FUZZ_EXPECT(stats.held == 0 && stats.holds == 0 && stats.reservations == 0 && stats.pins == 0 && stats.pinned == 0);
      FUZZ_EXPECT(stats.zombies == 0 && stats.writing == 0 && stats.promoting == 0);
    }
    static_cast<void>(flush(memory_, std::nullopt, UINT64_MAX));
    static_cast<void>(flush(tiers_.files, std::nullopt, UINT64_MAX));
    static_cast<void>(flush(tiers_.store, std::nullopt, UINT64_MAX));
    FUZZ_EXPECT(memory_.stats().used_bytes == 0 && tiers_.files.stats().used_bytes == 0 && tiers_.store.stats().used_bytes == 0);
    FUZZ_EXPECT(!device_ || (device_->stats().used_bytes == 0 && device_->verify().empty()));
    FUZZ_EXPECT(tiers_.is_sound());
  }

 private:
  uint64_t now() { return ++tiers_.memory.now; }

  std::vector<uint64_t> chain() {
    const uint64_t first = input_.up_to(3) * 16 + (input_.up_to(7) == 0 ? 1000 : 0);
    std::vector<uint64_t> numbers(1 + input_.up_to(9));
    for (size_t index = 0; index < numbers.size(); ++index) {
      numbers[index] = first + index;
    }
    return numbers;
  }

  ChunkKey any_key() { return key_of(chain().back()); }
  Directory& any_lower() { return input_.up_to(1) != 0 ? tiers_.files : tiers_.store; }

  void move() {
    switch (input_.up_to(17)) {
      case 0:
      case 1:
        return save(chain());
      case 2:
        return lease();
      case 3:
        return demote();
      case 4:
      case 5:
        return publish();
      case 6:
        return read_back();
      case 7:
      case 8:
        return land();
      case 9:
        static_cast<void>(kvpool::testing::drop(memory_, any_key()));
        return;
      case 10:
        static_cast<void>(kvpool::testing::drop(any_lower(), any_key()));
        return;
      case 11:
        return end_one();
      case 12:
        memory_.room().protect_unsaved(input_.up_to(1) != 0);
        return;
      case 13:
        return copy_further();
      case 14:
      case 15:
        return copy_to_device();
      case 16:
        if (device_) {
          static_cast<void>(input_.up_to(1) != 0 ? kvpool::testing::drop(*device_, any_key())
                                                 : flush(*device_, std::nullopt, UINT64_MAX).chunks);
        }
        return;
      default:
        static_cast<void>(flush((input_.up_to(1) != 0 ? memory_ : any_lower()), std::nullopt, UINT64_MAX));
    }
  }

  void save(const std::vector<uint64_t>& numbers) {
    const auto keys = keys_of(numbers);
    const Reservation made =
        memory_.reserve(tiers_.memory.owner, tiers_.memory.small, std::nullopt, keys.data(), numbers.size(), now());
    if (made.id == 0) {
      return;
    }
    const auto reserved = static_cast<size_t>(
        std::count(made.states.begin(), made.states.end(), static_cast<uint8_t>(SaveState::RESERVED)));
    const std::vector<uint32_t> sums(reserved * kvpool::testing::EXTENTS);
    static_cast<void>(memory_.commit(made.id, 0, reserved, sums.data()));
    if (input_.up_to(3) == 0) {
      holds_.push_back(made.id);
    } else {
      FUZZ_EXPECT(memory_.end_reservation(made.id, now()));
    }
  }

  void lease() {
    const auto numbers = chain();
    const Hold hold = memory_.acquire(tiers_.memory.owner, keys_of(numbers).data(), numbers.size());
    if (hold.id != 0) {
      holds_.push_back(hold.id);
    }
  }

  void end_one() {
    if (holds_.empty()) {
      return;
    }
    const HoldId id = holds_[input_.up_to(holds_.size() - 1)];
    const bool is_ended = input_.up_to(1) != 0;
    if (!memory_.release(id, now())) {
      static_cast<void>(is_ended ? memory_.end_reservation(id, now()) : memory_.expire_part(id, SIZE_MAX, now()));
    }
  }

  void demote() {
    const auto numbers = chain();
    const auto keys = keys_of(numbers);
    const Hold pin = input_.up_to(1) == 0 ? memory_.pin_unsaved(16, static_cast<WriteOrder>(input_.up_to(2)))
                                          : memory_.pin_unsaved_prefix(tiers_.memory.owner, keys.data(), numbers.size());
    if (pin.id == 0) {
      return;
    }
    start_writing(memory_, any_lower(), pin);
  }

  // Demotes chunks from the files to the store.
  void copy_further() {
    const auto numbers = chain();
    const Hold hold = tiers_.files.acquire(tiers_.memory.owner, keys_of(numbers).data(), numbers.size());
    if (hold.id != 0) {
      start_writing(tiers_.files, tiers_.store, hold);
    }
  }

  // Copies chunks of memory to the device.
  void copy_to_device() {
    const auto numbers = chain();
    const Hold hold = memory_.acquire(tiers_.memory.owner, keys_of(numbers).data(), numbers.size());
    if (hold.id != 0) {
      start_writing(memory_, device_ ? *device_ : tiers_.files, hold);
    }
  }

  void start_writing(Directory& upper, Directory& lower, const Hold& read) {
    const Columns columns = *upper.columns({read.id});
    std::vector<uint8_t> keys(read.chunks * KEY_BYTES);
    for (size_t index = 0; index < read.chunks; ++index) {
      std::memcpy(&keys[index * KEY_BYTES], upper.holds().key_of(read.id, index)->words, KEY_BYTES);
    }
    const Reservation made = lower.reserve(tiers_.memory.owner, tiers_.in_files, upper.holds().parent_key_of(read.id), keys.data(),
                                           read.chunks, now());
    Move written{read.id, made.id, &upper, &lower, {}, {}};
    for (size_t index = 0; index < read.chunks; ++index) {
      if (made.states[index] == static_cast<uint8_t>(SaveState::RESERVED)) {
        written.generations.push_back(columns.generations[index]);
      }
    }
    downwards_.push_back(std::move(written));
  }

  void publish() {
    if (downwards_.empty()) {
      return;
    }
    const Move written = std::move(downwards_.back());
    downwards_.pop_back();
    const std::vector<uint32_t> sums(written.generations.size() * kvpool::testing::EXTENTS);
    const bool names_sources = input_.up_to(1) != 0;
    const Tier source = written.upper == &memory_ ? Tier::DRAM : Tier::SSD;
    const auto states =
        written.lower->commit(written.other, 0, written.generations.size(), sums.data(), now(), {},
                              names_sources ? CopySources{source, written.generations} : CopySources{});
    FUZZ_EXPECT(states.size() == written.generations.size());
    written.lower->end_reservation(written.other, now());
    FUZZ_EXPECT(written.upper->unpin(written.hold) || written.upper->release(written.hold, now()));
  }

  void read_back() {
    const auto numbers = chain();
    const auto keys = keys_of(numbers);
    const Hold here = memory_.acquire(tiers_.memory.owner, keys.data(), numbers.size());
    Directory& lower = any_lower();
    const Hold below = lower.acquire(tiers_.memory.owner, keys.data(), numbers.size());
    if (below.chunks > here.chunks) {
      std::optional<ChunkKey> parent;
      if (here.chunks > 0) {
        parent = key_of(numbers[here.chunks - 1]);
      }
      std::vector<PromotionSource> sources;
      const bool names_sources = input_.up_to(1) != 0;
      for (size_t index = here.chunks; names_sources && index < below.chunks; ++index) {
        sources.push_back({input_.up_to(7) == 0 ? Tier::PEER : lower.tier(), lower.columns({below.id})->generations[index]});
      }
      const Reservation made = memory_.promotions().promote(tiers_.memory.owner, tiers_.memory.small, parent,
                                               &keys[here.chunks * KEY_BYTES], below.chunks - here.chunks, now(), sources);
      Move read{made.id, below.id, &memory_, &lower, {}, {}};
      for (size_t index = 0; index < made.states.size(); ++index) {
        if (made.states[index] == static_cast<uint8_t>(SaveState::RESERVED)) {
          read.keys.push_back(key_of(numbers[here.chunks + index]));
          read.generations.push_back(made.generations[index]);
        }
      }
      upwards_.push_back(std::move(read));
    } else if (below.id != 0) {
      FUZZ_EXPECT(lower.release(below.id, now()));
    }
    if (here.id != 0) {
      FUZZ_EXPECT(memory_.release(here.id, now()));
    }
  }

  // Each chunk lands, fails, or (`neither`) is never reported.
  void land() {
    if (upwards_.empty()) {
      return;
    }
    const Move read = std::move(upwards_.back());
    upwards_.pop_back();
    for (size_t index = 0; index < read.keys.size(); ++index) {
      const uint64_t outcome = input_.up_to(3);
      if (outcome == 0) {
        const auto fault = static_cast<LoadFault>(input_.up_to(LOAD_FAULTS - 1));
        static_cast<void>(memory_.promotions().fail_landing(read.keys[index], read.generations[index], fault));
      } else if (outcome != 1) {
        memory_.promotions().landed(read.keys[index], read.generations[index]);
      }
    }
    memory_.release(read.hold, now());
    FUZZ_EXPECT(read.lower->release(read.other, now()));
  }

  Input& input_;
  TiersOverStore tiers_;
  Directory& memory_;
  std::optional<Directory> device_;  // of copies
  std::vector<Move> downwards_;
  std::vector<Move> upwards_;
  std::vector<HoldId> holds_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  Moves(input).run();
  return 0;
}
