// Bindings of what passes between tiers: promotions, pins, restored chunks. Columns cross as packed little-endian bytes. No logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>

#include "bindings.h"
#include "columns.h"
#include "rows.h"
#include "directory/directory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

std::optional<ChunkKey> parent_of(const nb::bytes& parent) {
  return parent.size() == 0 ? std::nullopt : std::optional(one_key(parent));
}

// A column of `count` words, or none.
template <typename Word>
std::vector<Word> words_of(const nb::bytes& packed, size_t count, const char* name) {
  if (packed.size() != 0 && packed.size() != count * sizeof(Word)) {
    throw nb::value_error((std::string(name) + " must be none, or as many as the chunks have").c_str());
  }
  return unpacked<Word>(packed);
}

// None where no levels are named: the uppermost tiers. REQUIRES: `checksums` live as long as what is returned.
std::vector<PromotionSource> sources_of(const nb::bytes& levels, const std::vector<uint64_t>& generations,
                                        const std::vector<uint32_t>& checksums, size_t n, bool is_external) {
  if (levels.size() == 0 ? !generations.empty() || !checksums.empty() : levels.size() != n) {
    throw nb::value_error("source_levels must be one for each chunk, or none and nothing else of the sources");
  }
  std::vector<PromotionSource> sources;
  const size_t extents = n == 0 ? 0 : checksums.size() / n;
  for (size_t index = 0; index < levels.size(); ++index) {
    sources.push_back({known_tier(static_cast<const uint8_t*>(levels.data())[index]),
                       generations.empty() ? 0 : generations[index], std::span(checksums).subspan(index * extents, extents), is_external});
  }
  return sources;
}

Reserved promote(Directory& directory, uint32_t owner, uint32_t size_class, const nb::bytes& parent,
                          const nb::bytes& keys, uint64_t now_ns, const nb::bytes& levels, const nb::bytes& generations,
                          const nb::bytes& checksums, bool is_external, bool are_alone) {
  if (size_class >= directory.arena().class_count()) {
    throw nb::index_error("unknown size class");
  }
  const uint8_t* const packed = packed_keys(keys);
  const size_t n = keys.size() / KEY_BYTES;
  const auto sums = words_of<uint32_t>(checksums, n * directory.arena().size_class(ClassId(size_class)).extents, "checksums");
  const auto sources = sources_of(levels, words_of<uint64_t>(generations, n, "source_generations"), sums, n, is_external);
  if (are_alone && parent.size() != 0) {
    throw nb::value_error("chunks that are alone have no parent");
  }
  const Reservation answer = directory.promotions().promote(known_namespace(directory, owner), ClassId(size_class), parent_of(parent),
                                                            packed, n, now_ns, sources, are_alone);
  return reserved(answer);
}

void fail_landing(Directory& directory, const nb::bytes& key, uint64_t generation, uint32_t fault) {
  if (fault >= LOAD_FAULTS) {
    throw nb::value_error("fault must be 0 (source), 1 (path) or 2 (memory)");
  }
  directory.promotions().fail_landing(one_key(key), generation, static_cast<LoadFault>(fault));
}

struct Pinned {
  HoldId id;
  size_t chunks;
  nb::bytes parent;
  uint32_t owner;
};

Pinned describe(const Directory& directory, Hold pin) {
  const auto record = pin.id == 0 ? std::nullopt : directory.holds().record_of(pin.id, 0);
  const ChunkRecord first = record ? directory.record(*record) : ChunkRecord{};
  const auto parent = directory.holds().parent_key_of(pin.id);
  return {pin.id, pin.chunks, parent ? nb::bytes(parent->words, KEY_BYTES) : nb::bytes(""), first.owner.value()};
}

nb::bytes keys_of(const Directory& directory, const std::vector<HoldId>& holds) {
  const auto keys = directory.holds().keys_of(holds);
  return nb::bytes(keys.data(), keys.size() * KEY_BYTES);
}

// A priority out of range is the default, for good.
Retention retention_of(uint32_t priority, uint32_t duration_ms) {
  return priority > MAX_PRIORITY ? Retention{} : Retention{static_cast<uint8_t>(priority), duration_ms};
}

bool restore_row(Directory& directory, const RestoreRow& row, uint64_t now_ns) {
  const bool has_parent = std::any_of(row.parent, row.parent + KEY_BYTES, [](uint8_t byte) { return byte != 0; });
  const uint64_t page = row.offset / PAGE_BYTES;
  if (row.owner >= directory.namespaces() || row.size_class >= directory.arena().class_count() ||
      row.offset % PAGE_BYTES != 0 || page >= directory.geometry().arena.total_bytes() / PAGE_BYTES) {
    return false;
  }
  return directory.restore(NamespaceId(row.owner), ClassId(row.size_class),
                           has_parent ? std::optional(ChunkKey::from_bytes(row.parent)) : std::nullopt,
                           ChunkKey::from_bytes(row.key), PageIndex(page), row.generation,
                           retention_of(row.priority, row.duration_ms), now_ns);
}

nb::bytes restore(Directory& directory, const nb::bytes& rows, uint64_t now_ns) {
  if (rows.size() % sizeof(RestoreRow) != 0) {
    throw nb::value_error("rows must be 96 bytes each");
  }
  std::vector<uint8_t> is_restored(rows.size() / sizeof(RestoreRow));
  for (size_t index = 0; index < is_restored.size(); ++index) {
    RestoreRow row;
    std::memcpy(&row, static_cast<const uint8_t*>(rows.data()) + index * sizeof(row), sizeof(row));
    is_restored[index] = restore_row(directory, row, now_ns) ? 1 : 0;
  }
  return pack(is_restored);
}

void bind_pins(nb::module_& module, nb::class_<Directory>& directory) {
  nb::class_<Pinned>(module, "Pinned", "Chunks of one chain that have a pin, so that they stay while they are written to a lower tier.")
      .def_ro("id", &Pinned::id, "Ends by `unpin`; 0: nothing is pinned.")
      .def_ro("chunks", &Pinned::chunks,
              "How many are pinned; without a pin how many were found to be evicted from the lower tier with those before them:\n"
              "there may be others behind.")
      .def_ro("parent", &Pinned::parent, "The key before the first of them; b\"\": the root.")
      .def_ro("namespace", &Pinned::owner);
  directory
      .def(
          "pin_unsaved",
          [](Directory& self, uint32_t scan, uint8_t order) {
            if (order > static_cast<uint8_t>(WriteOrder::WORTHIEST)) {
              throw nb::value_error("order must be 0 (coldest), 1 (newest) or 2 (worthiest)");
            }
            return describe(self, self.pin_unsaved(scan, static_cast<WriteOrder>(order)));
          },
          "scan"_a, "order"_a,
          "Pins chunks of one chain that every lower tier lacks, ending in one of the first `scan` chunks; order 0: the coldest\n"
          "first, 1: the newest, 2: the worthiest.")
      .def(
          "pin_unsaved_prefix",
          [](Directory& self, uint32_t owner, const nb::bytes& keys, const nb::bytes& parent) {
            const uint8_t* first = packed_keys(keys);
            const NamespaceId known = known_namespace(self, owner);
            return describe(self, self.pin_unsaved_prefix(known, first, keys.size() / KEY_BYTES, key_or_none(parent)));
          },
          "namespace"_a, "keys"_a, "parent"_a = nb::bytes(""),
          "The same of the longest stored prefix, or of what follows a parent; worth it or not.")
      .def(
          "pin_unsaved_hold",
          [](Directory& self, HoldId hold, size_t position) { return describe(self, self.pin_unsaved_hold(hold, position)); }, "hold"_a,
          "position"_a, "The same of one chunk of a hold or a reservation, and what precedes it; none where it is unknown.")
      .def("last_unsaved", &Directory::last_unsaved, "hold"_a, "end"_a = SIZE_MAX,
           "Where a hold or a reservation has its last stored chunk before `end` that every lower tier lacks.")
      .def("unsaved_holders", &Directory::unsaved_holders, "The holds and reservations of chunks that every lower tier lacks.")
      .def(
          "pin_chunk", [](Directory& self, HoldId hold, size_t position) { return self.pin_chunk(hold, position).value_or(0); },
          "hold"_a, "position"_a, "Pins one chunk of a hold; 0 where it is gone.")
      .def(
          "pin_key",
          [](Directory& self, uint32_t owner, const nb::bytes& key) {
            return self.pin_key(known_namespace(self, owner), one_key(key)).value_or(0);
          },
          "namespace"_a, "key"_a, "Pins a chunk of a namespace; 0 where it is not stored here. Does not count as a use.")
      .def(
          "pin_keys",
          [](Directory& self, uint32_t owner, const nb::bytes& keys) {
            return self.pin_keys(known_namespace(self, owner), {packed_keys(keys), keys.size()}).value_or(0);
          },
          "namespace"_a, "keys"_a, "One such pin on all of these that are stored here; 0 where none is.")
      .def("unpin", &Directory::unpin, "pin"_a, "Ends a pin: its chunks count as unused. False where it is unknown.");
}

}  // namespace

void bind_tier_set(nb::module_& module) {
  nb::class_<TierSet>(module, "TierSet", "Directories of one pool in order of speed, which report to one another what they hold while this lives.")
      .def(
          "__init__",
          [](TierSet* self, const nb::typed<nb::tuple, Directory, nb::ellipsis>& tiers) {
            std::vector<Directory*> directories;
            for (const nb::handle tier : tiers) {
              directories.push_back(nb::cast<Directory*>(tier));
            }
            if (const char* refusal = TierSet::why_refused(directories)) {
              throw nb::value_error(refusal);
            }
            new (self) TierSet(std::move(directories));
          },
          "tiers"_a, nb::keep_alive<1, 2>(), "The first one has the table that clients read. All must be empty.")
      .def(
          "tiers_of", [](const TierSet& self, const nb::bytes& key) { return self.tiers_of(one_key(key)); }, "key"_a,
          "The tiers that can be read for a chunk, a bit a level.");
}

void bind_tiers(nb::module_& module, nb::class_<Directory>& directory) {
  directory
      .def("promote", &promote, "namespace"_a, "size_class"_a, "parent"_a, "keys"_a, "now_ns"_a, "source_levels"_a = nb::bytes(""),
           "source_generations"_a = nb::bytes(""), "checksums"_a = nb::bytes(""), "is_external"_a = false,
           "are_alone"_a = false,
           "Slots to read lower tiers' chunks into; RESERVED ones are to be\n"
           "read. The hold ends by `release`. Of each chunk, where named: the level u8 that it comes from, its generation u64\n"
           "there, and u32 [chunk][extent] what its extents must be; else the uppermost tier that has it. `is_external`: the levels\n"
           "are of tiers without a directory here, such as a peer's: whether they have a chunk is known when it has come.\n"
           "Chunks that `are_alone` have no parent, and each is answered for itself.")
      .def(
          "landed",
          [](Directory& self, const nb::bytes& key, uint64_t generation, const nb::bytes& tokens) {
            return self.promotions().landed(one_key(key), generation, token_ids(tokens));
          },
          "key"_a, "generation"_a, "tokens"_a = nb::bytes(""),
          "Makes a promoted chunk an ordinary one; False where it has gone meanwhile. `tokens`: its token ids, i32.")
      .def(
          "name_tokens",
          [](Directory& self, uint32_t owner, const nb::bytes& keys, const nb::bytes& tokens) {
            const size_t count = keys.size() / KEY_BYTES;
            const std::vector<int32_t> ids = unpacked<int32_t>(tokens);
            if (count == 0 || tokens.size() % (count * sizeof(int32_t)) != 0 || ids.size() / count > TOKEN_IDS_MAX) {
              throw nb::value_error("tokens must be as many for each key, 4096 at most");
            }
            const NamedTokens named = self.promotions().name_tokens(known_namespace(self, owner), packed_keys(keys), count, ids);
            return nb::typed<nb::tuple, size_t, bool>(nb::make_tuple(named.done, named.is_waiting));
          },
          "namespace"_a, "keys"_a, "tokens"_a,
          "Gives consecutive chunks that came without their token ids these, i32, and reports them as arrived once more:\n"
          "(done, is_waiting), how many leading ones have them now, and whether the next one is on its way.")
      .def(
          "has_landed",
          [](const Directory& self, const nb::bytes& key, uint64_t generation) { return self.promotions().has_landed(one_key(key), generation); },
          "key"_a, "generation"_a,
          "Whether all extents of a promoted chunk have landed; True also for a chunk that is not being promoted, and in a tier\n"
          "without memory.")
      .def("fail_landing", &fail_landing, "key"_a, "generation"_a, "fault"_a,
           "Takes a promoted chunk that did not come out, with what follows it. `fault`: 0 the source's, which alone drops it\n"
           "there too, 1 of the way to it, 2 of the memory here.")
      .def(
          "admit",
          [](Directory& self, uint32_t admitted, double least_chance) {
            if (admitted > static_cast<uint32_t>(Admitted::NOTHING)) {
              throw nb::value_error("admitted must be 0 to 3");
            }
            self.demotion().admit(static_cast<Admitted>(admitted), least_chance);
          },
          "admitted"_a, "least_chance"_a = 0.0,
          "These chunks are written to the lower tier from now on (0 all, 1 those with at least this chance of a use and those\n"
          "touched twice, 2 those touched twice, 3 none), with what precedes them; others may be evicted unsaved.")
      .def(
          "knows_chances", [](Directory& self) { return self.demotion().knows_chances(); },
          "Whether the policy has learned how likely chunks are to be used again.")
      .def(
          "forget_written", [](Directory& self, uint32_t cursor, uint32_t looks) { return self.demotion().forget_written(cursor, looks); },
          "cursor"_a, "looks"_a,
          "What was evicted from the lower tier since its last use may be written there once more: of the records from the\n"
          "cursor (0: the start) on, no more than `looks`. Where to go on, 0 at the end.")
      .def(
          "remember_evicted",
          [](Directory& self, uint32_t chunks) {
            if (chunks == 0) {
              throw nb::value_error("chunks must be positive");
            }
            self.demotion().remember_evicted(chunks);
          },
          "chunks"_a, "Remembers evicted chunks, about so many: one that comes again counts as touched before. To be called once.")
      .def_prop_ro("unsaved_bytes", &Directory::unsaved_bytes,
                   "Bytes in use that cannot be evicted without a write before: not those of idle chunks that are saved or being saved.")
      .def("count_unsaved", &Directory::count_unsaved, "Stored chunks that every lower tier lacks.")
      .def("keys_of", &keys_of, "holds"_a, "The keys of holds and pins, of one after the other, packed.")
      .def(
          "protect_unsaved", [](Directory& self, bool is_protected) { self.room().protect_unsaved(is_protected); }, "is_protected"_a,
          "While True nothing is evicted that no other tier has: NOT_READY instead.")
      .def("restore", &restore, "rows"_a, "now_ns"_a = 0,
           "Rows in the format of `RESTORE_ROW`, ancestors first, the most recent first. A column of u8: 1 where the chunk was restored.")
      .def("finish_restore", &Directory::finish_restore, "generation"_a = 0,
           "Generations go on behind this one, or behind the greatest that was restored.")
      .def("begin_count", &Directory::begin_count, "`counted` counts from now on.")
      .def_prop_ro("counted", &Directory::counted, "Chunks here that were reserved since the last `begin_count`.")
      .def(
          "take_departed",
          [](Directory& self) {
            const auto keys = self.take_departed();
            return nb::bytes(keys.data(), keys.size() * KEY_BYTES);
          },
          "The keys that left this lower tier since the last call, packed.");
  bind_pins(module, directory);
}

}  // namespace kvpool
