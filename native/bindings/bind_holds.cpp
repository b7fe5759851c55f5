// Bindings of holds and reservations. No logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "columns.h"
#include "directory/directory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

// The packed keys from `first` on.
const uint8_t* keys_from(const nb::bytes& keys, size_t first) {
  const uint8_t* const packed = packed_keys(keys);
  if (first > keys.size() / KEY_BYTES) {
    throw nb::value_error("first must be within the keys");
  }
  return packed + first * KEY_BYTES;
}

Reserved reserve(Directory& directory, uint32_t owner, uint32_t size_class, const nb::bytes& parent, const nb::bytes& keys,
                  uint64_t now_ns, std::optional<uint32_t> holder, size_t first, size_t limit, bool may_wait, bool is_kept) {
  if (size_class >= directory.arena().class_count()) {
    throw nb::index_error("unknown size class");
  }
  const uint8_t* const packed = keys_from(keys, first);
  return reserved(directory.reserve(known_namespace(directory, owner), ClassId(size_class), key_or_none(parent), packed,
                                         keys.size() / KEY_BYTES - first, now_ns, holder ? HolderId(*holder) : HolderId(),
                                         {limit, may_wait, false, is_kept}));
}

Reserved reserve_more(Directory& directory, HoldId reservation, const nb::bytes& keys, uint64_t now_ns, size_t first,
                       size_t limit, bool may_wait, bool is_run) {
  const uint8_t* const packed = keys_from(keys, first);
  return reserved(
      directory.reserve_more(reservation, packed, keys.size() / KEY_BYTES - first, now_ns, {limit, may_wait, is_run}));
}

nb::bytes commit(Directory& directory, HoldId reservation, size_t first, const nb::bytes& checksums, uint64_t now_ns,
                 const nb::bytes& tokens, const nb::bytes& sources, uint8_t source_level, const nb::bytes& scope, size_t row,
                 size_t rows) {
  const auto extents = directory.holds().extents_of(reservation);
  require_known(extents.has_value());
  const size_t chunk_bytes = *extents * sizeof(uint32_t);
  if (checksums.size() % chunk_bytes != 0) {
    throw nb::value_error("checksums must be 4 bytes for each extent of each chunk");
  }
  const size_t all = checksums.size() / chunk_bytes;
  if (all == 0 ? tokens.size() != 0 : tokens.size() % (all * sizeof(int32_t)) != 0) {
    throw nb::value_error("tokens must be as many for each chunk");
  }
  const size_t ids_bytes = all == 0 ? 0 : tokens.size() / all;  // of a chunk
  if (scope.size() % sizeof(int32_t) != 0 || ids_bytes + scope.size() > TOKEN_IDS_MAX * sizeof(int32_t)) {
    throw nb::value_error("tokens must be 4096 at most for each chunk, with the scope's words");
  }
  if (sources.size() != 0 && sources.size() != all * sizeof(uint64_t)) {
    throw nb::value_error("sources must be none, or 8 bytes for each chunk");
  }
  if (row > all) {
    throw nb::value_error("row must be within the columns");
  }
  const size_t count = std::min(rows, all - row);
  const auto generations = words_in<uint64_t>(sources);
  return pack(directory.commit(reservation, first, count, words_in<uint32_t>(checksums).data() + row * *extents, now_ns,
                               {words_in<uint8_t>(tokens).subspan(row * ids_bytes, count * ids_bytes), words_in<uint8_t>(scope)},
                               {known_tier(source_level), generations.empty() ? generations : generations.subspan(row, count)}));
}

bool land_saved(Directory& directory, HoldId reservation, size_t first, size_t count, uint32_t first_extent,
                const nb::bytes& checksums) {
  if (count == 0 || checksums.size() % (count * sizeof(uint32_t)) != 0) {
    throw nb::value_error("checksums must be 4 bytes for each extent of each chunk");
  }
  return directory.land_saved(reservation, first, count, first_extent, unpacked<uint32_t>(checksums));
}

std::vector<HeldSet> hold_each(Directory& directory, const std::vector<uint32_t>& owners, const std::vector<nb::bytes>& keys,
                               const std::vector<std::vector<uint32_t>>& places, std::optional<uint32_t> holder, uint64_t now_ns) {
  if (keys.size() != owners.size() || places.size() != owners.size()) {
    throw nb::value_error("keys and places must be as many as the namespaces");
  }
  std::vector<SetPart> parts;
  for (size_t index = 0; index < owners.size(); ++index) {
    const uint8_t* const packed = packed_keys(keys[index]);
    if (keys[index].size() != places[index].size() * KEY_BYTES) {
      throw nb::value_error("places must be one for each key");
    }
    parts.push_back({known_namespace(directory, owners[index]), {packed, keys[index].size()}, places[index]});
  }
  return directory.hold_each(parts, holder ? HolderId(*holder) : HolderId(), now_ns);
}

JoinedSet join_sets(Directory& directory, const std::vector<std::vector<HeldSet>>& ranks, size_t count, bool is_last_newest, uint64_t now_ns) {
  for (const auto& of_rank : ranks) {
    std::vector<bool> is_named(count);
    for (const HeldSet& part : of_rank) {
      const auto* const held = directory.holds().find_hold(part.hold);
      require_known(held != nullptr && held->size() == part.places.size());
      for (const uint32_t place : part.places) {
        if (place >= count || is_named[place]) {
          throw nb::value_error("each place must be below count, and named once");
        }
        is_named[place] = true;
      }
    }
  }
  return directory.join_sets(ranks, count, is_last_newest, now_ns);
}

void bind_held(nb::module_& module) {
  nb::class_<HeldSet>(module, "HeldSet", "A hold on chunks of a set.")
      .def_ro("id", &HeldSet::hold, "Ends by `release`; 0: nothing is held.")
      .def_ro("places", &HeldSet::places, "Of its chunks, which of the set's keys each is.");
  nb::class_<JoinedSet>(module, "JoinedSet", "A hold on each rank on the same chunks of a set.")
      .def_ro("holds", &JoinedSet::holds, "Each ends by `release`; none where nothing is held.")
      .def_ro("places", &JoinedSet::places, "Of their chunks, in their order, which of the set's keys each is.");
  nb::class_<Hold>(module, "Held", "A hold on leading chunks of a chain.")
      .def_ro("id", &Hold::id, "Ends by `release`; 0: nothing is held.")
      .def_ro("chunks", &Hold::chunks, "How many are held.");
  nb::class_<HoldColumns>(module, "HoldColumns", "A row for each chunk of holds or pins, by column.")
      .def_ro("offsets", &HoldColumns::offsets, "Of the slots, u64.")
      .def_ro("generations", &HoldColumns::generations, "Of the slots, u64.")
      .def_ro("levels", &HoldColumns::levels, "Of the fastest tier that has the chunk, u8; 255: the chunk was dropped.")
      .def_ro("slots", &HoldColumns::slots,
              "u64: the region in the upper half, the slot's number there in the lower; none where no client looks into the tier.");
}

}  // namespace

void bind_holds(nb::module_& module, nb::class_<Directory>& directory) {
  bind_held(module);
  directory
      .def(
          "acquire",
          [](Directory& self, uint32_t owner, const nb::bytes& keys, uint64_t now_ns,
             const nb::bytes& parent) {
            const uint8_t* first = packed_keys(keys);
            const NamespaceId known = known_namespace(self, owner);
            return self.acquire(known, first, keys.size() / KEY_BYTES, now_ns, key_or_none(parent));
          },
          "namespace"_a, "keys"_a, "now_ns"_a = 0, "parent"_a = nb::bytes(""),
          "Holds the longest stored prefix; behind a parent that the caller holds: of what follows it, and of that alone.")
      .def(
          "extend",
          [](Directory& self, HoldId hold, const nb::bytes& keys, uint64_t now_ns) {
            return self.extend(hold, packed_keys(keys), keys.size() / KEY_BYTES, now_ns);
          },
          "hold"_a, "keys"_a, "now_ns"_a = 0, "Adds what is stored of the keys behind a hold's last chunk to it: how many chunks.")
      .def(
          "count_whole", [](const Directory& self, const std::vector<HoldId>& holds) { return self.holds().count_whole(holds); },
          "holds"_a, "How many leading chunks of each hold are not dropped.")
      .def("shorten", &Directory::shorten, "hold"_a, "chunks"_a, "now_ns"_a, "Leaves a hold its leading chunks.")
      .def(
          "hold_chain",
          [](Directory& self, const std::vector<uint32_t>& owners, const nb::bytes& leaves, size_t chunks, std::optional<uint32_t> holder,
             uint64_t now_ns) {
            const std::span keys(packed_keys(leaves), leaves.size());
            if (owners.empty() || keys.size() != owners.size() * KEY_BYTES) {
              throw nb::value_error("leaves must be one key of 32 bytes for each rank");
            }
            std::vector<HitRun> runs;
            for (const uint32_t owner : owners) {
              runs.push_back({known_namespace(self, owner), keys.subspan(runs.size() * KEY_BYTES, KEY_BYTES), chunks, true});
            }
            std::vector<HoldId> ids;
            for (const Hold& hold : self.hold_hit(runs, holder ? HolderId(*holder) : HolderId(), now_ns)) {
              ids.push_back(hold.id);
            }
            return ids;
          },
          "namespaces"_a, "leaves"_a, "chunks"_a, "holder"_a.none(), "now_ns"_a,
          "Holds, on each rank, the chain of so many chunks that ends in its key of `leaves`, counted for a holder; none unless all of\n"
          "them are here whole, and allowed.")
      .def("hold_each", &hold_each, "namespaces"_a, "keys"_a, "places"_a, "holder"_a.none(), "now_ns"_a,
           "A hold on what is here of these parts of a set, each a column of keys of one namespace, with the place of each in the set,\n"
           "counted for a holder. What it may not protect of all parts together is left out, the last places first.")
      .def("join_sets", &join_sets, "ranks"_a, "count"_a, "is_last_newest"_a, "now_ns"_a,
           "One hold on each rank in place of those of parts of a set of so many keys: on what all ranks hold and nobody has dropped\n"
           "since; the rest is released. Released together, the last key of them is used last if `is_last_newest`, else the first one.")
      .def(
          "join_holds",
          [](Directory& self, const std::vector<HoldId>& holds) {
            const HoldId joined = self.join_holds(holds);
            require_known(joined != 0);
            return joined;
          },
          "holds"_a, "One hold in place of several on chunks without a parent, of one namespace; it counts for whom the first one does.")
      .def(
          "duplicate",
          [](Directory& self, const std::vector<HoldId>& holds) {
            const auto made = self.duplicate(holds);
            require_known(made.has_value());
            return *made;
          },
          "holds"_a, "A new hold on the same chunks for each of these.")
      .def(
          "columns",
          [](const Directory& self, const std::vector<HoldId>& holds) -> HoldColumns {
            const auto columns = self.columns(holds);
            require_known(columns.has_value());
            return packed_columns(*columns);
          },
          "holds"_a, "Where the chunks of holds and pins lie, of one after the other.")
      .def(
          "copies",
          [](const Directory& self, const std::vector<HoldId>& holds) -> HoldColumns {
            const auto columns = self.copies(holds);
            require_known(columns.has_value());
            return packed_columns(*columns);
          },
          "holds"_a, "Where their copies lie, in the memory of a device; generation 0 and level 255: there is none.")
      .def(
          "key_of",
          [](const Directory& self, HoldId hold, size_t position) {
            const auto key = self.holds().key_of(hold, position);
            require_known(key.has_value());
            return nb::bytes(key->words, KEY_BYTES);
          },
          "hold"_a, "position"_a, "The key of one chunk of a hold.")
      .def("release", &Directory::release, "hold"_a, "now_ns"_a, "Ends a hold; False where it is unknown.")
      .def("release_part", &Directory::release_part, "hold"_a, "limit"_a, "now_ns"_a,
           "The same for its last `limit` chunks: how many they are; fewer: it has ended.");
}

void bind_reservations(nb::module_& module, nb::class_<Directory>& directory) {
  nb::class_<Reserved>(module, "Reserved", "Answer to a reservation: a row for each key that was looked at, by column.")
      .def_ro("id", &Reserved::id, "Of the reservation, or of a promotion's hold; 0: there is nothing to end.")
      .def_ro("states", &Reserved::states, "What became of each key, u8: a `SaveState`.")
      .def_ro("offsets", &Reserved::offsets, "Of the slots, u64; 0 where declined.")
      .def_ro("generations", &Reserved::generations, "Of the slots, u64; 0 where declined.")
      .def_ro("slots", &Reserved::slots, "As in `HoldColumns`, u64; anything where declined.");
  directory
      .def("reserve", &reserve, "namespace"_a, "size_class"_a, "parent"_a, "keys"_a, "now_ns"_a,
           "holder"_a.none() = nb::none(), "first"_a = 0, "limit"_a = SIZE_MAX, "may_wait"_a = false, "is_kept"_a = false,
           "Slots for the keys from `first` on; parent b\"\" is the root. `holder`: whom it counts for, see `affordable`. Fewer\n"
           "states than keys: the `limit` was reached, or (`may_wait`) the next chunk would be NOT_READY; then `reserve_more`\n"
           "goes on. `is_kept`: what is there stays held until the reservation is ended, though nothing is to be written.")
      .def("reserve_more", &reserve_more, "reservation"_a, "keys"_a, "now_ns"_a, "first"_a = 0, "limit"_a = SIZE_MAX,
           "may_wait"_a = false, "is_run"_a = false, 
           "The same for keys that follow a reservation's last chunk. `is_run`: no other reservation's chunk is to be between those\n"
           "of this one: it is pending without a slot, and ends the run.")
      .def("commit", &commit, "reservation"_a, "first"_a, "checksums"_a, "now_ns"_a = 0,
           "tokens"_a = nb::bytes(""), "sources"_a = nb::bytes(""), "source_level"_a = static_cast<uint8_t>(Tier::DRAM),
           "scope"_a = nb::bytes(""), "row"_a = 0, "rows"_a = SIZE_MAX,
           "States u8 per chunk; `first` counts reserved chunks; checksums u32 [chunk][extent]; token ids i32\n"
           "[chunk][token], or none; `sources`, of a lower tier or copies: the generations u64 that the tier of\n"
           "`source_level`, from which the chunks were copied, must still have. `scope`: stored behind the ids of each. Of the\n"
           "columns those `rows` from `row` on.")
      .def("land_saved", &land_saved, "reservation"_a, "first"_a, "count"_a, "first_extent"_a, "checksums"_a,
           "Further extents of reserved chunks lie in their slots, for who follows them: u32 [chunk][extent]. False where the\n"
           "reservation is unknown or has expired.")
      .def(
          "follow_saves",
          [](Directory& self, uint32_t owner, const nb::bytes& parent, const nb::bytes& keys) -> HoldColumns {
            const uint8_t* const first = packed_keys(keys);
            return packed_columns(self.follow_saves(known_namespace(self, owner), key_or_none(parent), first, keys.size() / KEY_BYTES));
          },
          "namespace"_a, "parent"_a, "keys"_a,
          "Where the chunks lie that are being saved after a parent, to be followed; nothing is held.")
      .def("end_reservation", &Directory::end_reservation, "reservation"_a, "now_ns"_a)
      .def("end_part", &Directory::end_part, "reservation"_a, "limit"_a, "now_ns"_a,
           "The same as end_reservation for `limit` chunks; whether it has ended.")
      .def("expire_part", &Directory::expire_part, "reservation"_a, "limit"_a, "now_ns"_a,
           "Takes `limit` chunks out of sight, whose slots nobody gets before the reservation ends; whether all of them are.")
      .def_prop_ro("used_bytes", &Directory::used_bytes, "Payload of all slots in use; `stats` has it too, with all else.");
}

}  // namespace kvpool
