// Plain saves: those under way of whole chunks of one run, which their client writes in place. Requests find them here.
//
//   OPEN ──commit of the last chunk──► ended
//     └──deadline, end, anything but a plain commit──► taken out: it is whoever's who asked for it, from then on
//
// What it is: records by number, owner and deadline. What it is not: the slots, which the directory's reservation has; a clock; or the
// record of other saves, of which it knows the numbers given and how many each owner has.
//
// Invariants (recounted by `verify`):
//   1. Each save is in the order of deadlines once, and among those of its owner.
//   2. An owner exists while it has a save, or others were counted.
//   3. A save has a chunk that is not committed, and a holder for each chunk or for all of them.
// Threads: the control thread only. O(log saves) for each call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/types.h"

namespace kvpool {

struct PlainSave {
  uint64_t id = 0;
  uint32_t owner = 0;
  uint32_t group = 0;
  std::vector<HoldId> holders = {};  // the directory's reservations: of a chain one, else one of each chunk
  bool is_chain = true;
  uint64_t chunks = 0;
  uint64_t committed = 0;  // the first of them are published
  uint64_t deadline_ns = 0;
};

class PlainSaves {
 public:
  // REQUIRES: `ttl_ns` is positive.
  explicit PlainSaves(uint64_t ttl_ns) : ttl_ns_(ttl_ns) {}
  PlainSaves(const PlainSaves&) = delete;
  PlainSaves& operator=(const PlainSaves&) = delete;

  // The time to live of saves that begin from now on.
  void change_ttl(uint64_t ttl_ns) noexcept { ttl_ns_ = ttl_ns; }
  // The number of a new save, of any kind.
  [[nodiscard]] uint64_t new_id() noexcept { return ++last_id_; }
  // Takes a save in, numbers it and sets its deadline: its number. REQUIRES: chunks that are not committed.
  uint64_t add(PlainSave save, uint64_t now_ns);
  // The save, where it is here and the owner's; nullptr otherwise. Good until the next change.
  [[nodiscard]] const PlainSave* find(uint64_t id, uint32_t owner) const noexcept;
  // So many more chunks are published; it is ended with the last one. REQUIRES: it is here, and has as many.
  void note_committed(uint64_t id, uint64_t chunks);
  // Takes a save out; nothing where it is not here, or not the owner's.
  [[nodiscard]] std::optional<PlainSave> take(uint64_t id, uint32_t owner);
  // The same of all of an owner's, and of all that have expired; the oldest first.
  [[nodiscard]] std::vector<PlainSave> take_owner(uint32_t owner);
  [[nodiscard]] std::vector<PlainSave> take_expired(uint64_t now_ns);

  // So many saves of an owner's are elsewhere, more or less. REQUIRES: no less than none is left.
  void count_others(uint32_t owner, int64_t saves);
  // Saves of an owner, here and elsewhere; and all owners with theirs.
  [[nodiscard]] size_t count_of(uint32_t owner) const noexcept;
  [[nodiscard]] std::vector<std::pair<uint32_t, size_t>> owners() const;
  [[nodiscard]] std::vector<HoldId> holders() const;
  [[nodiscard]] size_t size() const noexcept { return saves_.size(); }
  // Recounts everything; one line per broken invariant.
  [[nodiscard]] std::vector<std::string> verify() const;

 private:
  struct Owner {
    std::unordered_set<uint64_t> saves;
    size_t others = 0;
  };
  using Saves = std::unordered_map<uint64_t, PlainSave>;

  PlainSave take(Saves::iterator save);
  void forget_idle(std::unordered_map<uint32_t, Owner>::iterator owner);

  uint64_t ttl_ns_;
  uint64_t last_id_ = 0;
  Saves saves_;
  std::set<std::pair<uint64_t, uint64_t>> order_;  // by deadline
  std::unordered_map<uint32_t, Owner> owners_;
};

}  // namespace kvpool
