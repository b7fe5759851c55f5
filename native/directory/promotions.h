// Promotions: chunks of other tiers that are read into slots of this one, and what happens when one does not land.
//
// Slots are given as for a save, but anybody may acquire the chunks at once, and read each extent when it has landed. A chunk comes from
// a lower tier, which must have it, or from a tier without a directory here, such as a peer's: that is found by the bit of its tier, which
// no directory sets, until the chunk has landed or gone.
//
// Invariant (recounted by the Directory's `verify`): each PROMOTING chunk is under way here, by its generation; one that was dropped on its
// way is too, until its reader has reported.
// Threads: the control thread only. O(1) for a chunk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "directory/directory_answers.h"
#include "records/chunk_records.h"

namespace kvpool {

class Directory;

class Promotions {
 public:
  // REQUIRES: the directory lives as long as this.
  explicit Promotions(Directory& directory) : of_(directory) {}
  Promotions(const Promotions&) = delete;
  Promotions& operator=(const Promotions&) = delete;

  // Slots for chunks to be read into; like `reserve`. The answer's id is a hold. `sources`: one a chunk, or none: the uppermost tiers
  // that have them. NO_PARENT: its source, if not an external one, has it no more. Chunks that `are_alone` have no parent, and each is
  // answered for itself.
  [[nodiscard]] Reservation promote(NamespaceId owner, ClassId size_class, const std::optional<ChunkKey>& parent, const uint8_t* keys,
                                    size_t n, uint64_t now_ns, std::span<const PromotionSource> sources = {}, bool are_alone = false);
  // Makes a chunk an ordinary one (`tokens`: its token ids, if known), unless its extents are not those expected: a bad source.
  bool landed(const ChunkKey& key, uint64_t generation, std::span<const int32_t> tokens = {});
  // False for a promoted chunk of which extents have not landed, where there is memory for them.
  [[nodiscard]] bool has_landed(const ChunkKey& key, uint64_t generation) const noexcept;
  // Takes a chunk and what follows it out of this tier; a bad source, and that alone, drops it (of the generation that was read) there
  // too.
  FailedLanding fail_landing(const ChunkKey& key, uint64_t generation, LoadFault fault);
  // Gives consecutive chunks that came from outside without their token ids these, and reports them as arrived once more, up to
  // the first that has not come yet, follows one without token ids, or is not here.
  NamedTokens name_tokens(NamespaceId owner, const uint8_t* keys, size_t n, std::span<const int32_t> tokens);

  // For the directory. The chunk in the tier that it is promoted from, with the generation that was named; nullptr where it is not there.
  // Whether a source names a tier outside, and no directory here has that tier.
  [[nodiscard]] const ChunkRecord* find_source(const ChunkKey& key, const PromotionSource& source) const noexcept;
  [[nodiscard]] bool is_outside(const PromotionSource& source) const noexcept;
  // A chunk has got its slot. It is retained as it is in the tier that it comes from; one from outside as any new chunk.
  void begin_promotion(RecordId id, const PromotionSource& source, const ChunkRecord* lower);
  // A chunk is found no more by the tier outside that it comes from. The bit of that tier; 0 for any other chunk.
  void leave_outside(const ChunkRecord& record) noexcept { mark_outside(record, false); }
  [[nodiscard]] uint8_t outside_bit(const ChunkRecord& record) const noexcept;
  // The slot is free, and no report of a landing has come.
  void forget_promotion(uint64_t generation) noexcept {
    if (!under_way_.empty()) {
      under_way_.erase(generation);
    }
  }
  [[nodiscard]] bool is_under_way(uint64_t generation) const noexcept { return under_way_.contains(generation); }
  [[nodiscard]] size_t count() const noexcept { return under_way_.size(); }

 private:
  struct Promotion {
    RecordId record;
    Tier tier;                        // that the chunk is read from
    uint64_t generation;              // there; 0: the tier has no directory here
    std::vector<uint32_t> checksums;  // what its extents must be; none: not known
  };

  void mark_outside(const ChunkRecord& record, bool is_coming) noexcept;
  [[nodiscard]] bool has_expected_extents(const ChunkRecord& record, const Promotion& promotion) const noexcept;

  Directory& of_;
  std::unordered_map<uint64_t, Promotion> under_way_;  // by the generation that the chunk has here
};

}  // namespace kvpool
