// What the tests of two tiers share: a pool of memory over a tier of files, and the moves between them.
#pragma once

#include "tests/directory_pool.h"
#include "base/check.h"
#ifndef FUZZ_EXPECT  // a fuzz target has a main of its own
#include "tests/harness.h"
#endif

namespace kvpool::testing {

inline constexpr uint64_t FILE_SLOT = CHUNK + PAGE_BYTES;

// A pool of memory over a tier of files, both for one size of chunks.
struct Tiers {
  // `lowest`: one more tier under the files, made by the caller. `device`: of copies, which the caller makes too.
  Tiers(uint32_t memory_chunks, uint32_t file_chunks, PolicyKind policy = PolicyKind::LRU, Directory* lowest = nullptr,
        const DirectoryGeometry* device = nullptr)
      : memory(memory_chunks * CHUNK, std::max(2000U, memory_chunks + file_chunks), true, 64 << 20, policy, 0, device),
        file_geometry(*DirectoryGeometry::plan_files(8 * FILE_SLOT, (file_chunks + 7) / 8, std::max(1000U, file_chunks))),
        files(nullptr, nullptr, file_geometry, nullptr, Tier::SSD),
        set(lowest == nullptr ? std::vector<Directory*>{&memory.directory, &files}
                              : std::vector<Directory*>{&memory.directory, &files, lowest}) {
    KVPOOL_CHECK(files.add_namespace() == memory.owner);
    in_files = *files.add_class(FILE_SLOT, EXTENTS);
    for (uint32_t segment = 0; segment < file_geometry.arena.segments; ++segment) {
      files.mark_segment_ready(segment);
    }
  }

  // Writes the coldest chain that the files lack; how many chunks they took.
  size_t demote(bool succeeds = true, bool newest_first = false) {
    return demote(memory.directory.pin_unsaved(64, newest_first ? WriteOrder::NEWEST : WriteOrder::COLDEST), succeeds);
  }
  // Writes down as much of what is pinned as the files take.
  size_t write(const Hold& pin, bool succeeds = true) {
    std::vector<uint8_t> keys;
    for (size_t position = 0; position < pin.chunks; ++position) {
      const ChunkKey key = *memory.directory.holds().key_of(pin.id, position);
      keys.insert(keys.end(), reinterpret_cast<const uint8_t*>(key.words), reinterpret_cast<const uint8_t*>(key.words + 4));
    }
    const Reservation made = files.reserve(memory.owner, in_files, memory.directory.holds().parent_key_of(pin.id), keys.data(),
                                           pin.chunks, ++memory.now);
    const auto taken = static_cast<size_t>(std::count(made.states.begin(), made.states.end(),
                                                      static_cast<uint8_t>(SaveState::RESERVED)));
    if (made.id != 0) {
      if (succeeds) {
        const std::vector<uint32_t> sums(taken * EXTENTS);
        KVPOOL_CHECK(all_are(files.commit(made.id, 0, taken, sums.data()), SaveState::STORED));
      }
      KVPOOL_CHECK(files.end_reservation(made.id, memory.now));
    }
    return succeeds ? taken : 0;
  }
  // Ends the writing of what was pinned.
  size_t demote(const Hold& pin, bool succeeds = true) {
    if (pin.id == 0) {
      return 0;
    }
    const size_t written = write(pin, succeeds);
    KVPOOL_CHECK(memory.directory.unpin(pin.id));
    return written;
  }
  // Writes all that the files lack as far as they take it. What they refuse stays pinned meanwhile.
  size_t demote_all() {
    std::vector<HoldId> refused;
    size_t written = 0;
    for (Hold pin; (pin = memory.directory.pin_unsaved(64, WriteOrder::COLDEST)).id != 0;) {
      if (const size_t taken = write(pin); taken > 0) {
        written += taken;
        KVPOOL_CHECK(memory.directory.unpin(pin.id));
      } else {
        refused.push_back(pin.id);
      }
    }
    for (const HoldId pin : refused) {
      KVPOOL_CHECK(memory.directory.unpin(pin));
    }
    return written;
  }

  // Leases what both tiers have of a prompt; the chunks that are read back land or fail. Returns the chunks leased.
  size_t load(const std::vector<uint64_t>& ids, bool lands = true) {
    const Hold here = memory.acquire(ids);
    const Hold below = files.acquire(memory.owner, pack(ids).data(), ids.size());
    size_t chunks = here.chunks;
    if (below.chunks > here.chunks) {
      std::optional<ChunkKey> parent;
      if (here.chunks > 0) {
        parent = key_of(ids[here.chunks - 1]);
      }
      const std::vector<uint64_t> rest(ids.begin() + static_cast<std::ptrdiff_t>(here.chunks),
                                       ids.begin() + static_cast<std::ptrdiff_t>(below.chunks));
      const Reservation made = memory.directory.promotions().promote(memory.owner, memory.small, parent, pack(rest).data(),
                                                        rest.size(), ++memory.now);
      for (size_t index = 0; index < rest.size(); ++index) {
        if (made.states[index] > static_cast<uint8_t>(SaveState::RESERVED)) {
          break;
        }
        ++chunks;
        if (made.states[index] == static_cast<uint8_t>(SaveState::RESERVED)) {
          KVPOOL_CHECK(!lands || view_generation(made.slots[index]) == made.generations[index]);
          if (lands) {
            KVPOOL_CHECK(memory.directory.promotions().landed(key_of(rest[index]), made.generations[index]));
          } else {
            static_cast<void>(memory.directory.promotions().fail_landing(key_of(rest[index]), made.generations[index], LoadFault::PATH));
          }
        }
      }
      KVPOOL_CHECK(made.id == 0 || memory.directory.release(made.id, ++memory.now));
    }
    KVPOOL_CHECK(below.id == 0 || files.release(below.id, ++memory.now));
    KVPOOL_CHECK(here.id == 0 || memory.directory.release(here.id, ++memory.now));
    return chunks;
  }

  [[nodiscard]] uint64_t view_generation(uint64_t slot) const {
    return memory.view->generation_at(SlotAddress::unpacked(slot));
  }

  [[nodiscard]] bool is_sound() const {
    const auto broken = files.verify();
    for (const auto& line : broken) {
      std::printf("  files: %s\n", line.c_str());
    }
    return memory.is_sound() && broken.empty();
  }

  Pool memory;
  DirectoryGeometry file_geometry;
  Directory files;
  TierSet set;
  ClassId in_files;
};

// The same over a store, which is a tier of files too.
struct Store {
  explicit Store(uint32_t chunks)
      : geometry(*DirectoryGeometry::plan_files(8 * FILE_SLOT, (chunks + 7) / 8, std::max(1000U, chunks))),
        store(nullptr, nullptr, geometry, nullptr, Tier::PEER) {
    static_cast<void>(store.add_namespace());
    static_cast<void>(store.add_class(FILE_SLOT, EXTENTS));
    for (uint32_t segment = 0; segment < geometry.arena.segments; ++segment) {
      store.mark_segment_ready(segment);
    }
  }
  DirectoryGeometry geometry;
  Directory store;
};
struct TiersOverStore : Store, Tiers {
  TiersOverStore(uint32_t memory_chunks, uint32_t file_chunks, PolicyKind policy, const DirectoryGeometry* device = nullptr)
      : Store(file_chunks), Tiers(memory_chunks, file_chunks, policy, &store, device) {}
  [[nodiscard]] bool is_sound() const { return Tiers::is_sound() && store.verify().empty(); }
};

}  // namespace kvpool::testing
