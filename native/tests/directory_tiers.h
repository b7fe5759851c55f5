// What the tests of two tiers share: a pool of memory over a tier of files, and the moves between them.
#pragma once

#include "directory_pool.h"
#include "harness.h"

namespace kvpool::testing {

inline constexpr uint64_t FILE_SLOT = CHUNK + PAGE_BYTES;

// A pool of memory over a tier of files, both for one size of chunks.
struct Tiers {
  Tiers(uint32_t memory_chunks, uint32_t file_chunks, PolicyKind policy = PolicyKind::LRU)
      : memory(memory_chunks * CHUNK, 2000, true, 64 << 20, policy),
        file_geometry(*DirectoryGeometry::plan_files(8 * FILE_SLOT, (file_chunks + 7) / 8, 1000)),
        file_index(Mapping::create("files", file_geometry.index.total_bytes(), false).mapping),
        files(nullptr, file_index, file_geometry, EPOCH, Tier::SSD) {
    memory.directory.attach_slower(files);
    EXPECT(files.add_namespace() == memory.owner);
    in_files = *files.add_class(FILE_SLOT, LAYERS);
    for (uint32_t segment = 0; segment < file_geometry.arena.segments; ++segment) {
      files.mark_segment_ready(segment);
    }
  }

  // Writes the coldest chain that the files lack; how many chunks they took.
  size_t demote(bool succeeds = true, bool newest_first = false) {
    size_t saved = 0;
    const Hold hold = memory.directory.hold_unsaved(64, newest_first, saved);
    if (hold.id == 0) {
      return 0;
    }
    std::vector<uint8_t> keys;
    for (size_t position = 0; position < hold.chunks; ++position) {
      const ChunkKey key = *memory.directory.key_of(hold.id, position);
      keys.insert(keys.end(), reinterpret_cast<const uint8_t*>(key.words), reinterpret_cast<const uint8_t*>(key.words + 4));
    }
    std::optional<ChunkKey> parent;
    if (saved > 0) {
      parent = ChunkKey::from_bytes(&keys[(saved - 1) * KEY_BYTES]);
    }
    const size_t count = hold.chunks - saved;
    const Reservation made =
        files.reserve(memory.owner, in_files, parent, &keys[saved * KEY_BYTES], count, ++memory.now);
    const auto taken = static_cast<size_t>(std::count(made.states.begin(), made.states.end(),
                                                      static_cast<uint8_t>(SaveState::RESERVED)));
    if (made.id != 0) {
      if (succeeds) {
        const std::vector<uint32_t> sums(taken * LAYERS);
        EXPECT(all_are(files.commit(made.id, 0, taken, sums.data()), SaveState::STORED));
      }
      EXPECT(files.end_reservation(made.id, memory.now));
    }
    EXPECT(memory.directory.release_untouched(hold.id));
    return succeeds ? taken : 0;
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
      const Reservation made = memory.directory.promote(memory.owner, memory.small, parent, pack(rest).data(),
                                                        rest.size(), ++memory.now);
      for (size_t index = 0; index < rest.size(); ++index) {
        if (made.states[index] > static_cast<uint8_t>(SaveState::RESERVED)) {
          break;
        }
        ++chunks;
        if (made.states[index] == static_cast<uint8_t>(SaveState::RESERVED)) {
          EXPECT(!lands || view_generation(made.offsets[index]) == made.generations[index]);
          if (lands) {
            EXPECT(memory.directory.landed(key_of(rest[index]), made.generations[index]));
          } else {
            memory.directory.fail_landing(key_of(rest[index]), made.generations[index]);
          }
        }
      }
      EXPECT(made.id == 0 || memory.directory.release(made.id, ++memory.now));
    }
    EXPECT(below.id == 0 || files.release(below.id, ++memory.now));
    EXPECT(here.id == 0 || memory.directory.release(here.id, ++memory.now));
    return chunks;
  }

  [[nodiscard]] uint64_t view_generation(uint64_t offset) const { return memory.view->generation_at(offset); }

  [[nodiscard]] bool is_sound() const {
    const auto broken = files.verify();
    for (const auto& line : broken) {
      std::printf("  files: %s\n", line.c_str());
    }
    return memory.is_sound() && broken.empty();
  }

  Pool memory;
  DirectoryGeometry file_geometry;
  std::shared_ptr<Mapping> file_index;
  Directory files;
  ClassId in_files;
};

}  // namespace kvpool::testing
