// The tiers of one pool in order of speed: which of them has a chunk, and what one reports to the others about it.
//
// What it is: the link between directories, each of which is complete on its own. What it is not: a mover of bytes, or a policy.
//
// The first tier owns the table that clients read. An entry there has a bit for each level that has the key; a key is found as
// long as any tier has it. Each other tier notes what it holds. A tier's records have `is_below` set while any lower tier has the
// chunk: one that leaves one lower tier while another lower tier has it is still below. The entry of a chunk of the first tier may
// have one bit more, of a directory of copies, which is in no set: a copy leaves before the chunk itself does (copy_link.h).
//
// Retention: a request reaches all tiers. When a chunk leaves a tier, each lower tier that has it takes over its priority and
// duration. Of the tiers that retain a chunk alike, the uppermost decides when its priority expires: then it expires in all.
//
// Invariants: the levels rise from tier to tier; the entries with a tier's bit are as many as its READY chunks; a key has one
// namespace in all tiers. Each tier's chunks are whole prefixes, which its own directory sees to.
// Threads: the control thread only. Everything is O(tiers) for a chunk.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "retention/retention.h"
#include "records/chunk_records.h"
#include "base/types.h"

namespace kvpool {

class Directory;

class TierSet {
 public:
  // REQUIRES: one tier at least; all are empty, in no other set and outlive this one; their levels rise. When the set ends, each
  // tier is on its own again.
  explicit TierSet(std::vector<Directory*> tiers) noexcept;
  // Which of these requirements tiers do not meet; nullptr where they meet them.
  [[nodiscard]] static const char* why_refused(const std::vector<Directory*>& tiers) noexcept;
  ~TierSet();
  TierSet(const TierSet&) = delete;
  TierSet& operator=(const TierSet&) = delete;

  [[nodiscard]] std::span<Directory* const> all() const noexcept { return tiers_; }
  // Which tiers can be read for a chunk: a bit a level, that of a copy too; none where no tier has it.
  [[nodiscard]] uint8_t tiers_of(const ChunkKey& key) const noexcept;

  // For the directories. Those above a tier and those below it, in order of speed.
  [[nodiscard]] std::span<Directory* const> above(const Directory& tier) const noexcept;
  [[nodiscard]] std::span<Directory* const> below(const Directory& tier) const noexcept;
  [[nodiscard]] Directory& owner() const noexcept { return *tiers_.front(); }
  [[nodiscard]] Directory* tier_at(Tier level) const noexcept;  // nullptr where there is none

  // A lower tier has a chunk from now on, or no more. REQUIRES, of one that comes: `can_enter`.
  void note(const Directory& tier, const ChunkKey& key, bool is_held) noexcept;
  // Whether the shared table has the key's entry, or room for it.
  [[nodiscard]] bool can_enter(const ChunkKey& key) const noexcept;
  // Whether another tier has the key for another namespace.
  [[nodiscard]] bool is_foreign(const Directory& tier, NamespaceId owner, const ChunkKey& key) const noexcept;
  // The READY chunk of this key in the uppermost of these tiers that has one; nullptr where none does.
  [[nodiscard]] static const ChunkRecord* uppermost(std::span<Directory* const> tiers, const ChunkKey& key) noexcept;
  // When an upper tier that retains the chunk alike lets it expire; nothing where none does.
  [[nodiscard]] std::optional<uint64_t> upper_expiry(const Directory& tier, const ChunkKey& key, Retention retention) const noexcept;

 private:
  std::vector<Directory*> tiers_;
};

}  // namespace kvpool
