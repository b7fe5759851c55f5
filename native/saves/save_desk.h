// Save desk: plain saves, each of their requests served in one call: slots for the chunks of one run, which are a chain or each alone, and
// the publication of the next ones.
//
// What it is: the path of an ordinary reserve and commit. What it is not: who waits for room, joins what several connections write, or
// copies from staging, which is done part by part; where a request is of that kind, or may have to wait, the desk changes nothing, and
// says so. Only where room runs out that it had seen, it gives back what it took.
//
// Threads: the control thread only. O(1) for a chunk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "directory/directory.h"
#include "eviction/reuse_distances.h"
#include "saves/plain_saves.h"

namespace kvpool {

// A group's chunks as a session writes them.
struct WriterGroup {
  bool is_chain = true;
  NamespaceId owner;
  ClassId size_class;
  uint32_t extents = 0;       // of a chunk
  uint32_t chunk_tokens = 0;
  uint64_t chunk_bytes = 0;
};

// A session of one rank, as the desk knows it.
struct SaveWriter {
  uint32_t connection = 0;
  std::vector<WriterGroup> groups;  // one where it has no groups
};

// The answer to a reservation. `save` 0: nothing to write.
struct MadeSave {
  uint64_t save = 0;
  uint32_t group = 0;
  Reservation slots;
};

// The answer to a commit: a state for each chunk.
struct CommittedChunks {
  uint32_t group = 0;
  std::vector<uint8_t> states;
};

class SaveDesk {
 public:
  struct Bounds {
    uint64_t saves_max;   // of one connection
    uint64_t chunks_max;  // of one request: they bound its time
  };

  // `reuse`: counts what is saved; may be absent. `keeps_tokens`: token ids are stored. REQUIRES: all live as long as the desk.
  SaveDesk(Directory& directory, PlainSaves& saves, ReuseDistances* reuse, Bounds bounds, bool keeps_tokens)
      : directory_(directory), saves_(saves), reuse_(reuse), bounds_(bounds), keeps_tokens_(keeps_tokens) {}
  SaveDesk(const SaveDesk&) = delete;
  SaveDesk& operator=(const SaveDesk&) = delete;

  // Whether changes wait to be recorded.
  [[nodiscard]] bool is_behind() const noexcept { return directory_.reports().are_waiting(); }
  // Slots for all chunks of the one run that a request names. `runs`: u32 [run][7] as requests have them; `keys`: packed, the parent's before those of
  // a chain behind one. Nothing where it is no plain save, is not allowed, or must wait.
  [[nodiscard]] std::optional<MadeSave> reserve(const SaveWriter& writer, std::span<const uint8_t> runs, std::span<const uint8_t> keys,
                                                uint64_t now_ns);
  // Publishes the next chunks of a plain save: as many as there are rows of `checksums`, u32 [chunk][extent]; `tokens`: i32 [chunk][token],
  // or none, and their scope. Nothing where the save is not here, its time is over, or the columns do not fit it.
  [[nodiscard]] std::optional<CommittedChunks> commit(const SaveWriter& writer, uint64_t save, std::span<const uint8_t> checksums,
                                                      std::span<const uint8_t> tokens, std::span<const uint8_t> scope, uint64_t now_ns);

 private:
  Directory& directory_;
  PlainSaves& saves_;
  ReuseDistances* const reuse_;
  const Bounds bounds_;
  const bool keeps_tokens_;
  [[nodiscard]] Reservation reserve_run(const SaveWriter& writer, const WriterGroup& group, const std::optional<ChunkKey>& parent,
                                        std::span<const uint8_t> keys, PlainSave& save, uint64_t now_ns);
  [[nodiscard]] std::vector<uint8_t> publish(const PlainSave& save, size_t count, size_t extents, PackedIds ids, uint64_t now_ns);
  void end_slots(std::span<const HoldId> holders, bool is_last_newest, uint64_t now_ns);

  std::vector<uint32_t> sums_;  // of the request that is served
};

}  // namespace kvpool
