// Bindings of the directory. Columns cross as packed little-endian bytes, once per request. No logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "bindings.h"
#include "columns.h"
#include "directory/directory.h"
#include "directory/former_life.h"
#include "released_gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

void require_index(const Mapping& index, const DirectoryGeometry& geometry, const nb::bytes& epoch) {
  if (epoch.size() != 16) {
    throw nb::value_error("epoch must be 16 bytes");
  }
  if (!index.is_writable() || index.size() < geometry.index.total_bytes()) {
    throw nb::value_error("index region is read-only or smaller than planned");
  }
  if (reinterpret_cast<const IndexHeader*>(index.data())->version != 0) {
    throw nb::value_error("index region is in use");
  }
}

PolicyKind policy_named(const std::string& name) {
  if (name == "lru") {
    return PolicyKind::LRU;
  }
  if (name != "class-queues") {
    throw nb::value_error("policy must be lru or class-queues");
  }
  return PolicyKind::CLASS_QUEUES;
}

Directory* make_directory(std::shared_ptr<Mapping> arena, std::shared_ptr<Mapping> index,
                          const DirectoryGeometry& geometry, const nb::bytes& epoch, const std::string& policy,
                          const nb::bytes& seed, std::shared_ptr<Mapping> records) {
  require_index(*index, geometry, epoch);
  if (records != nullptr) {
    if (!records->is_writable() || records->size() < KeptRegion::bytes(geometry.kept())) {
      throw nb::value_error("records region is read-only or smaller than planned");
    }
    if (reinterpret_cast<const KeptHead*>(records->data())->version != 0) {
      throw nb::value_error("records region is in use");
    }
  }
  if (arena != nullptr && (!arena->is_writable() || arena->size() < geometry.arena.total_bytes())) {
    throw nb::value_error("arena region is read-only or smaller than planned");
  }
  return new Directory(std::move(arena), std::move(index), geometry, static_cast<const uint8_t*>(epoch.data()), Tier::DRAM,
                       policy_named(policy), seed_of(seed), std::move(records));
}

// The directory of a tier whose bytes are elsewhere: in files.
Directory* make_file_directory(const DirectoryGeometry& geometry, const std::string& policy, uint8_t level) {
  if (geometry.arena.max_run_segments != 1) {
    throw nb::value_error("geometry is not planned for files");
  }
  return new Directory(nullptr, nullptr, geometry, nullptr, known_tier(level), policy_named(policy));
}

Directory* make_directory_of_copies(Directory& originals, const DirectoryGeometry& geometry, const std::string& policy,
                                    const nb::bytes& seed) {
  if (const char* refusal = CopyLink::why_refused(originals, geometry)) {
    throw nb::value_error(refusal);
  }
  return new Directory(originals, geometry, policy_named(policy), seed_of(seed));
}

struct StoredRecord {
  nb::bytes key;
  uint64_t offset;
  uint64_t generation;
  uint64_t chunk_bytes;
  uint32_t extents;
  uint32_t owner;
};

struct PinnedRecords {
  uint32_t next;
  HoldId pin;
  std::vector<StoredRecord> records;
};

PinnedRecords records(Directory& directory, uint32_t cursor, uint32_t limit, uint32_t end) {
  const RecordPage page = directory.records(cursor, limit, end);
  PinnedRecords answer{page.next, page.pin, {}};
  for (const RecordId id : page.records) {
    const ChunkRecord& record = directory.record(id);
    const SizeClass& geometry = directory.arena().size_class(record.size_class);
    answer.records.push_back({nb::bytes(record.key.words, KEY_BYTES), uint64_t{record.page.value()} * PAGE_BYTES,
                              record.generation, geometry.chunk_bytes, geometry.extents, record.owner.value()});
  }
  return answer;
}

void bind_records(nb::module_& module, nb::class_<Directory>& directory) {
  nb::class_<StoredRecord>(module, "StoredRecord", "A chunk that is stored, as of when it was asked for.")
      .def_ro("key", &StoredRecord::key)
      .def_ro("offset", &StoredRecord::offset, "Of its slot, in the tier's memory or files.")
      .def_ro("generation", &StoredRecord::generation, "Of its slot.")
      .def_ro("chunk_bytes", &StoredRecord::chunk_bytes)
      .def_ro("extents", &StoredRecord::extents)
      .def_ro("namespace", &StoredRecord::owner);
  nb::class_<PinnedRecords>(module, "PinnedRecords", "A page of a directory's chunks, which have a pin.")
      .def_ro("next", &PinnedRecords::next, "The cursor to go on from; 0: the end was reached.")
      .def_ro("pin", &PinnedRecords::pin, "Ends by `unpin`; 0: there are no records.")
      .def_ro("records", &PinnedRecords::records);
  directory.def("records", &records, "cursor"_a, "limit"_a, "end"_a = UINT32_MAX,
                "A page of the chunks that are stored, from a cursor on, pinned.");
}

nb::tuple histogram(const TimeHistogram& times) {
  nb::list counts;
  for (const uint64_t count : times.counts()) {
    counts.append(count);
  }
  return nb::make_tuple(counts, times.sum_s());
}

// Counts by reason: evictions, what no lower tier has taken, promotions that did not come.
void add_reasons(Fields& result, const DirectoryStats& counts) {
  const char* reasons[EVICTIONS] = {"own_class", "other_class", "index_full"};
  for (size_t reason = 0; reason < EVICTIONS; ++reason) {
    result[(std::string("evicted_") + reasons[reason]).c_str()] = counts.evictions[reason];
  }
  const char* declined[DECLINED] = {"unlikely", "used_once", "no_budget", "written_before", "unready"};
  for (size_t reason = 0; reason < DECLINED; ++reason) {
    result[(std::string("declined_") + declined[reason]).c_str()] = counts.declined[reason];
  }
  const char* faults[LOAD_FAULTS] = {"landings_failed_source", "landings_failed_path", "landings_failed_memory"};
  for (size_t fault = 0; fault < LOAD_FAULTS; ++fault) {
    result[faults[fault]] = counts.failed_landings[fault];
  }
}

Fields stats_of_directory(const Directory& directory) {
  const DirectoryStats counts = directory.stats();
  Fields result;
  result["chunks"] = counts.chunks;
  result["entries"] = directory.places();
  result["writing"] = counts.writing;
  result["zombies"] = counts.zombies;
  result["held"] = counts.held;
  result["holds"] = counts.holds;
  result["pinned"] = counts.pinned;
  result["pins"] = counts.pins;
  result["reservations"] = counts.reservations;
  result["used_bytes"] = counts.used_bytes;
  result["idle_bytes"] = counts.idle_bytes;
  result["token_id_bytes"] = counts.token_id_bytes;
  result["token_ids_left_out"] = counts.token_ids_left_out;
  result["stored_chunks"] = counts.stored_chunks;
  result["promoting"] = counts.promoting;
  result["waiting_runs"] = counts.waiting_runs;
  result["withheld"] = counts.withheld;
  result["withheld_bytes"] = counts.withheld_bytes;
  result["promoted_chunks"] = counts.promoted_chunks;
  result["evicted_chunks"] = counts.evicted_chunks;
  result["shed_chunks"] = counts.shed_chunks;
  result["flushed_chunks"] = counts.flushed_chunks;
  result["dropped_chunks"] = counts.dropped_chunks;
  result["withdrawn_chunks"] = counts.withdrawn_chunks;
  result["aborted_chunks"] = counts.aborted_chunks;
  const std::pair<SaveState, const char*> names[] = {
      {SaveState::PRESENT, "answered_present"},   {SaveState::RESERVED, "answered_reserved"},
      {SaveState::PENDING, "answered_pending"},   {SaveState::NO_PARENT, "answered_no_parent"},
      {SaveState::FULL, "answered_full"},         {SaveState::NOT_READY, "answered_not_ready"},
      {SaveState::FOREIGN, "answered_foreign"},   {SaveState::TOO_LONG, "answered_too_long"},
      {SaveState::QUOTA, "answered_quota"}};
  for (const auto& [state, name] : names) {
    result[name] = counts.answers[static_cast<size_t>(state)];
  }
  add_reasons(result, counts);
  result["retained_chunks"] = counts.retention.chunks;
  result["retained_bytes"] = counts.retention.bytes;
  result["retention_clipped_chunks"] = counts.retention.clipped;
  result["retention_expired_chunks"] = counts.retention.expired;
  result["policy_by_age"] = counts.policy.is_by_age;
  result["policy_switches"] = counts.policy.switches;
  result["policy_learned_uses"] = counts.policy.learned_uses;
  result["reuse_gaps"] = histogram(counts.reuse_gaps);
  result["lifetimes"] = histogram(counts.lifetimes);
  const SlotArena& arena = directory.arena();
  result["segments"] = arena.shape().segments;
  result["ready_segments"] = arena.ready_segments();
  result["free_segments"] = arena.free_segments();
  nb::list classes;
  for (uint32_t index = 0; index < arena.class_count(); ++index) {
    nb::dict row;
    const SizeClass& geometry = arena.size_class(ClassId(index));
    row["chunk_bytes"] = geometry.chunk_bytes;
    row["extents"] = geometry.extents;
    row["slot_bytes"] = geometry.slot_bytes;
    row["slots_used"] = arena.used_slots(ClassId(index));
    row["slots"] = arena.lent_slots(ClassId(index));
    row["runs"] = arena.lent_runs(ClassId(index));
    classes.append(row);
  }
  result["classes"] = classes;
  return result;
}

void bind_geometry(nb::module_& module) {
  nb::class_<DirectoryGeometry>(module, "DirectoryGeometry", "Sizes of a directory, before memory is mapped.")
      .def_static(
          "plan",
          [](uint64_t capacity, uint64_t segment_bytes, uint32_t max_chunks, uint32_t further_entries, const DirectoryGeometry* device) {
            const auto planned = DirectoryGeometry::plan(capacity, segment_bytes, max_chunks, further_entries, device);
            if (!planned) {
              throw nb::value_error("capacity, segment_bytes or max_chunks is out of range");
            }
            return *planned;
          },
          "capacity"_a, "segment_bytes"_a, "max_chunks"_a, "further_entries"_a = 0, "device"_a.none() = nb::none(),
          "Of a tier whose slots clients map. `device`: the geometry of the copies whose slots' words its index has too.")
      .def_static(
          "plan_device",
          [](uint64_t capacity, uint64_t segment_bytes, uint32_t max_chunks) {
            const auto planned = DirectoryGeometry::plan_device(capacity, segment_bytes, max_chunks);
            if (!planned) {
              throw nb::value_error("capacity or max_chunks is out of range, or segment_bytes no multiple of 2 MiB");
            }
            return *planned;
          },
          "capacity"_a, "segment_bytes"_a, "max_chunks"_a,
          "Of copies in the memory of a device: whole segments of this size, which are `arena_bytes` together, no more than the capacity.")
      .def_static(
          "plan_files",
          [](uint64_t segment_bytes, uint32_t segments, uint32_t max_chunks) {
            const auto planned = DirectoryGeometry::plan_files(segment_bytes, segments, max_chunks);
            if (!planned) {
              throw nb::value_error("segment_bytes, segments or max_chunks is out of range");
            }
            return *planned;
          },
          "segment_bytes"_a, "segments"_a, "max_chunks"_a)
      .def_ro("capacity", &DirectoryGeometry::capacity)
      .def_ro("max_chunks", &DirectoryGeometry::max_chunks)
      .def_prop_ro("segment_bytes", [](const DirectoryGeometry& g) { return g.arena.segment_bytes; })
      .def_prop_ro("segments", [](const DirectoryGeometry& g) { return g.arena.segments; })
      .def_prop_ro("arena_bytes", [](const DirectoryGeometry& g) { return g.arena.total_bytes(); })
      .def_prop_ro("index_bytes", [](const DirectoryGeometry& g) { return g.index.total_bytes(); })
      .def_prop_ro("records_bytes", [](const DirectoryGeometry& g) { return KeptRegion::bytes(g.kept()); },
                   "Of the region for records that are to outlive the process.");
}

void bind_removal(nb::class_<Directory>& directory) {
  directory
      .def(
          "drop",
          [](Directory& self, const nb::bytes& key, uint64_t generation) { return self.drop(one_key(key), generation); },
          "key"_a, "generation"_a,
          "Takes a bad chunk and its descendants out, where it has this generation and has landed; returns how many went.")
      .def(
          "discard", [](Directory& self, const nb::bytes& key) { return self.discard(one_key(key)); }, "key"_a,
          "Takes a good chunk and its descendants out, counted as flushed; returns how many went.");
}

void bind_checks(nb::class_<Directory>& directory) {
  nb::class_<CopyRoom>(directory, "CopyRoom", "Room for a copy of records: see `copy_for_child`.")
      .def(
          "__init__",
          [](CopyRoom* self, uint32_t max_chunks, uint32_t places) {
            new (self) CopyRoom(max_chunks);
            const nb::gil_scoped_release released;
            self->populate(places);
          },
          "max_chunks"_a, "places"_a, "With pages for so many records, of so many that there may be. Any thread.");
  directory
      .def(
          "verify",
          [](Directory& self, bool with_shared) {
            if (!with_shared) {
              self.use_copy();
            }
            return self.verify(with_shared);
          },
          "with_shared"_a = true, "One line per broken invariant. Without what clients map, which a forked child does not have.")
      .def("copy_for_child", &Directory::copy_for_child, "room"_a = nb::none(),
           "Copies records that are kept, which a child that is forked next does not have: its `verify` looks at the copy.")
      .def("forget_copy", &Directory::forget_copy, "Ends the copy of `copy_for_child`, in the parent.")
      .def(
          "verify_shared",
          [](const Directory& self, uint64_t cursor, uint32_t limit) -> std::tuple<uint64_t, std::vector<std::string>> {
            std::vector<std::string> broken;
            const uint64_t next = self.verify_shared(cursor, std::max(limit, 1U), broken);
            return {next, std::move(broken)};
          },
          "cursor"_a, "limit"_a, "(cursor to go on from or 0, lines): what clients map, a part at once.");
}

// What one holder of a former life may still write to.
struct Withheld {
  uint32_t holder;
  uint64_t slots;
  uint64_t bytes;
};

void bind_former(nb::module_& module, nb::class_<Directory>& directory) {
  nb::class_<Withheld>(module, "Withheld", "Slots that a holder of a former life may still write to.")
      .def_ro("holder", &Withheld::holder, "0: the former daemon itself; 2**32 - 1: several, or nobody in particular.")
      .def_ro("slots", &Withheld::slots)
      .def_ro("bytes", &Withheld::bytes);
  nb::class_<FormerCounts>(module, "FormerCounts", "What became of the chunks of a former life, each counted once.")
      .def_ro("taken", &FormerCounts::taken, "Chunks that are stored here now.")
      .def_ro("taken_bytes", &FormerCounts::taken_bytes)
      .def_ro("withheld", &FormerCounts::withheld, "Slots that somebody may still write to.")
      .def_ro("withheld_bytes", &FormerCounts::withheld_bytes)
      .def_ro("unfinished", &FormerCounts::unfinished, "Were not stored yet, or no more, and nobody writes to their slots.")
      .def_ro("damaged", &FormerCounts::damaged, "The record, or the run of its slot, is not what it was.")
      .def_ro("unpublished", &FormerCounts::unpublished, "Their slots' words in the index say otherwise.")
      .def_ro("unknown", &FormerCounts::unknown, "Of a namespace that is not known here.")
      .def_ro("orphaned", &FormerCounts::orphaned, "What precedes them was not taken.")
      .def_ro("unplaced", &FormerCounts::unplaced, "Their slot or key is taken, or there is no room.");
  module.def(
      "why_former_refused",
      [](const std::shared_ptr<Mapping>& index, const std::shared_ptr<Mapping>& records, const DirectoryGeometry& geometry) {
        const char* const refusal = FormerLife::why_refused(index, records, geometry);
        return std::string(refusal == nullptr ? "" : refusal);
      },
      "index"_a, "records"_a, "geometry"_a, "Why a directory of this geometry cannot go on with a former life's; \"\" where it can.");
  directory
      .def(
          "restore_former",
          [](Directory& self, const std::shared_ptr<Mapping>& index, const std::shared_ptr<Mapping>& records,
             const std::vector<std::optional<uint32_t>>& namespaces, uint64_t now_ns) {
            if (const char* const refusal = FormerLife::why_refused(index, records, self.geometry())) {
              throw nb::value_error(refusal);
            }
            if (self.places() != 0 || !self.has_words() || self.tier() != Tier::DRAM) {
              throw nb::value_error("only an empty directory that clients look into goes on with a former life");
            }
            std::vector<NamespaceId> known;
            for (const auto& number : namespaces) {
              known.push_back(number ? known_namespace(self, *number) : NamespaceId());
            }
            const ReleasedGil released;
            return self.restore_former(FormerLife(index, records, self.geometry()), known, now_ns);
          },
          "index"_a, "records"_a, "namespaces"_a, "now_ns"_a,
          "Takes over what a former life has left in the same arena: chunks, and slots that somebody may still write to.\n"
          "`namespaces[former number]`: the number here, or None. GIL released.")
      .def(
          "withheld",
          [](const Directory& self) {
            std::vector<Withheld> rows;
            for (const auto& [holder, share] : self.withheld().by_holder()) {
              rows.push_back({holder, share.records.size(), share.bytes});
            }
            return rows;
          },
          "What writers of a former life may still write to, by holder.")
      .def(
          "release_withheld", [](Directory& self, uint32_t holder) { return self.release_withheld(HolderId(holder)); }, "holder"_a,
          "The writers of a holder of a former life have ended; returns how many slots are free again.")
      .def(
          "rename_withheld",
          [](Directory& self, uint32_t holder, uint32_t instead) { self.rename_withheld(HolderId(holder), HolderId(instead)); }, "holder"_a,
          "instead"_a, "What is withheld for a holder is withheld for another one from now on.");
}

}  // namespace

void bind_directory(nb::module_& module) {
  module.attr("DEFAULT_PRIORITY") = DEFAULT_PRIORITY;
  module.attr("TOKEN_IDS_MAX") = TOKEN_IDS_MAX;
  module.attr("ARENA_BYTES_MAX") = ARENA_BYTES_MAX;
  module.attr("FILES_BYTES_MAX") = FILES_BYTES_MAX;
  bind_geometry(module);
  nb::class_<Directory> directory(module, "Directory", "What is stored, where, for whom. Control thread only.");
  directory
      .def(nb::new_(&make_directory), "arena"_a.none(), "index"_a, "geometry"_a, "epoch"_a, "policy"_a = "lru",
           "seed"_a = nb::bytes(""), "records"_a.none() = nb::none())
      .def_static("of_files", &make_file_directory, "geometry"_a, "policy"_a = "lru",
                  "level"_a = static_cast<uint8_t>(Tier::SSD), nb::rv_policy::take_ownership,
                  "The directory of a tier in files, which no client looks into; `level`: of that tier.")
      .def_static("of_copies", &make_directory_of_copies, "originals"_a, "geometry"_a, "policy"_a = "lru", "seed"_a = nb::bytes(""),
                  nb::rv_policy::take_ownership, nb::keep_alive<0, 1>(),
                  "Copies in the memory of a device (level 0) of chunks that another directory has READY. They are reserved and committed\n"
                  "here, by `sources` of that directory; a chunk that leaves it takes its copy along, and a use of it there is one here.\n"
                  "The other's geometry was planned with this one. The same namespaces are to be added to both.")
      .def_prop_ro("level", [](const Directory& self) { return static_cast<uint8_t>(self.tier()); }, "The number of its tier.")
      .def(
          "add_class",
          [](Directory& self, uint64_t chunk_bytes, uint32_t extents, bool has_place_below, std::optional<uint32_t> instead) {
            if (instead && (*instead >= self.arena().class_count() || self.arena().used_slots(ClassId(*instead)) != 0)) {
              throw nb::value_error("no such size class, or it has chunks");
            }
            const ClassId taken = instead ? ClassId(*instead) : ClassId();
            const auto added = self.add_class(chunk_bytes, extents, has_place_below, taken);
            if (!added) {
              throw nb::value_error("a slot for it, with words for each extent, does not fit the arena");
            }
            return added->value();
          },
          "chunk_bytes"_a, "extents"_a, "has_place_below"_a = true, "instead"_a = nb::none(),
          "The size class of such chunks, new or not. `instead`: a class without chunks that becomes it.")
      .def("add_namespace", [](Directory& self) { return self.add_namespace().value(); })
      .def(
          "set_chunk_tokens",
          [](Directory& self, uint32_t owner, uint32_t tokens) { self.set_chunk_tokens(known_namespace(self, owner), tokens); },
          "namespace"_a, "tokens"_a, "How many token ids each chunk of a namespace has, which `runs_of` reports.")
      .def(
          "mark_segment_ready",
          [](Directory& self, uint32_t segment) {
            if (segment >= self.geometry().arena.segments) {
              throw nb::index_error("no such segment");
            }
            self.mark_segment_ready(segment);
          },
          "segment"_a)
      .def(
          "tokens_of",
          [](const Directory& self, const nb::bytes& key) {
            const auto tokens = self.tokens_of(one_key(key));
            return nb::bytes(tokens.data(), tokens.size_bytes());
          },
          "key"_a, "Token ids of a chunk, i32; empty where none are known here.")
      .def("limit_token_ids", &Directory::limit_token_ids, "bytes"_a,
           "At most so many bytes of token ids from now on; chunks beyond that are stored without them, and counted.")
      .def("stats", &stats_of_directory)
      .def_prop_ro("evicted_chunks", &Directory::evicted_chunks, "How many have left the pool; `stats` has it too, with all else.")
      .def("bound_chains", &Directory::bound_chains, "chunks"_a, "No chain gets more chunks than this from now on.");
  bind_records(module, directory);
  bind_checks(directory);
  bind_holds(module, directory);
  bind_reservations(module, directory);
  bind_removal(directory);
  bind_former(module, directory);
  bind_tiers(module, directory);
  bind_retention(directory);
  bind_shares(module, directory);
  bind_changes(module, directory);
}

}  // namespace kvpool
