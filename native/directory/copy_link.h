// Copy link: what a directory, the originals, and one of copies of its chunks in the memory of a device report to one another.
//
// The originals decide which chunks there are; the copies, which of them are near a device as well. What is evicted, flushed or found
// bad among the copies leaves the originals as they are. The other way round:
//   1. A chunk that is READY or being written among the copies is READY among the originals, of the same namespace and size, behind the
//      same chunk. When it leaves those, for any cause, it leaves here first. A copy that is pinned stays in its slot, out of sight.
//   2. READY among the copies is the same as `has_copy` of the original, as the bit of their tier in the shared entry, and as the
//      entry's residency in it.
//   3. A use of the original is one of its copy. So copies have their order and their worth from the uses that the originals see.
//   4. A copy has the priority of its original, as far as the share of its tier that may be retained has room, and its own no duration:
//      it expires with the original.
// Threads: the control thread only. Everything is O(1) for a chunk.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <span>
#include <vector>

#include "base/types.h"
#include "directory/directory_answers.h"
#include "directory/directory_geometry.h"
#include "records/change_feed.h"
#include "records/chunk_records.h"
#include "shared_index/chunk_index.h"

namespace kvpool {

class Directory;

class CopyLink {
 public:
  // When it ends, the copies are found no more, unreported. REQUIRES: `why_refused` is nullptr; both get the same namespaces and outlive
  // this.
  CopyLink(Directory& originals, Directory& copies) noexcept;
  [[nodiscard]] static const char* why_refused(const Directory& originals, const DirectoryGeometry& geometry) noexcept;
  ~CopyLink();
  CopyLink(const CopyLink&) = delete;
  CopyLink& operator=(const CopyLink&) = delete;

  [[nodiscard]] const Directory& originals() const noexcept { return originals_; }
  [[nodiscard]] Directory& copies() const noexcept { return copies_; }
  [[nodiscard]] uint8_t bit() const noexcept;  // of the copies' tier

  // Of the copies. Why none of a chunk can be made behind this parent; whether it is there still to be copied, with this generation (0:
  // any) in this tier. One has become READY, which nobody could find yet; one leaves.
  [[nodiscard]] std::optional<SaveState> why_not_copied(NamespaceId owner, ClassId size_class, RecordId parent,
                                                        const ChunkKey& key) const noexcept;
  [[nodiscard]] bool is_copied_from(const ChunkKey& key, Tier from, uint64_t generation) const noexcept;
  void begin_copy(RecordId copy) noexcept;
  void end_copy(const ChunkKey& key) noexcept { note_copy(key, {}); }
  void verify_copy(RecordId copy, std::vector<std::string>& broken) const;

  // Of the originals. One leaves, and what follows it has left; these, a part of one chain, have been used; the priority of one that has
  // a copy is this from now on.
  void withdraw(const ChunkKey& key, Cause cause) noexcept;
  void use_copies(std::span<const RecordId> originals, uint64_t now_ns) noexcept;
  void follow_retention(const ChunkKey& key, uint8_t priority) noexcept;
  // Where the copies of these lie, in the rows of those that have one.
  void locate(const std::vector<RecordId>& originals, Columns& columns) const;
  // All of them against the records of their copies, without a look at what clients read; how many clients find; one against what
  // they find.
  void verify(std::vector<std::string>& broken) const;
  void verify_counts(std::vector<std::string>& broken) const;
  void verify_original(RecordId original, std::vector<std::string>& broken) const;

 private:
  void note_copy(const ChunkKey& key, Residency copy) noexcept;
  [[nodiscard]] Residency residency_of(RecordId copy) const noexcept;

  Directory& originals_;
  Directory& copies_;
};

}  // namespace kvpool
