// A directory that goes on with the arena of a former life. See former_life.h and directory.h.
#include <algorithm>

#include "base/check.h"
#include "base/pages_ahead.h"
#include "directory/directory.h"
#include "directory/former_order.h"
#include "hash/sampling.h"

namespace kvpool {
namespace {

// Chunks whose records and table places are asked of the memory before they are restored.
constexpr size_t RECORDS_AHEAD = 16;

// The runs of a former life as classes here, by the numbers of segments, each of which is looked at once.
class FormerRuns {
 public:
  FormerRuns(Directory& directory, const FormerLife& former) : directory_(directory), former_(former), runs_(former.segments()) {}

  // Nothing where the page's run is not whole, or no class here is as it was.
  [[nodiscard]] std::optional<uint32_t> find(PageIndex page) {
    const std::optional<uint32_t> segment = former_.segment_of(page);
    if (!segment) {
      return std::nullopt;
    }
    std::optional<FormerRun>& run = runs_[*segment];
    if (!run) {
      const auto entry = former_.run_at(*segment);
      const auto size_class =
          entry ? directory_.add_class(entry->chunk_bytes, entry->extents, entry->has_place_below != 0) : std::nullopt;
      run = size_class ? FormerRun{{entry->first, entry->segments}, *size_class} : FormerRun{};
    }
    return run->segments.segments == 0 ? std::nullopt : segment;
  }
  // REQUIRES: it was found.
  [[nodiscard]] const FormerRun& operator[](uint32_t segment) const noexcept { return *runs_[segment]; }

 private:
  Directory& directory_;
  const FormerLife& former_;
  std::vector<std::optional<FormerRun>> runs_;
};

}  // namespace

FormerCounts Directory::restore_former(const FormerLife& former, std::span<const NamespaceId> namespaces, uint64_t now_ns) {
  KVPOOL_CHECK(records_.alive() == 0 && originals_ == nullptr && !is_lower() && table_.has_words());
  latest_ns_ = std::max(latest_ns_, now_ns);
  last_generation_ = std::max({last_generation_, former.generations_end(), uint64_t{1}});
  records_.note_generation(last_generation_);
  FormerCounts counts;
  const PagesAhead of_table(table_.shared().pages_for(former.entries()));
  FormerRuns runs(*this, former);
  std::vector<FormerCandidate> candidates;
  candidates.reserve(std::min<uint64_t>(former.entries(), former.max_chunks()));
  std::vector<uint32_t> writers;
  std::vector<uint32_t> by_id;  // candidates; grown on demand
  const auto namespace_of = [&](const ChunkRecord& record) {
    return record.owner.value() < namespaces.size() ? namespaces[record.owner.value()] : NamespaceId();
  };
  former.visit_records([&](uint32_t id) {
    const ChunkRecord& record = former.record(id);
    if (record.state == ChunkState::FREE) {
      return;
    }
    if (record.has_writer && record.page.valid() && former.seal(id).crc != 0) {
      writers.push_back(id);
    } else if (record.state != ChunkState::READY) {
      ++counts.unfinished;
    } else if (!former.is_sealed(id)) {
      ++counts.damaged;
    } else if (!namespace_of(record).valid()) {
      ++counts.unknown;
    } else {
      const auto run = runs.find(record.page);
      const auto slot = run ? arena_.words_in(runs[*run].size_class, runs[*run].segments, record.page) : std::nullopt;
      if (!slot) {
        ++counts.damaged;
      } else if (!former.published(record, *slot, arena_.size_class(runs[*run].size_class).extents)) {
        ++counts.unpublished;
      } else {
        by_id.resize(std::max<size_t>(by_id.size(), size_t{id} + 1), FormerCandidate::NONE);
        by_id[id] = static_cast<uint32_t>(candidates.size());
        // What somebody held was in use until the end.
        const uint64_t used_ns = record.holds > 0 ? latest_ns_ : std::min(record.last_access_ns, latest_ns_);
        const uint32_t parent = former.seal(id).parent;
        candidates.push_back({.used_ns = used_ns, .id = id, .parent = parent, .depth = record.depth, .run = *run, .slot = *slot});
      }
    }
  });
  const PagesAhead of_records(records_.pages_for(candidates.size(), former.used_token_bytes()));
  // First of all: what is written to belongs to nobody else, whatever the records say.
  for (const uint32_t id : writers) {
    const ChunkRecord& record = former.record(id);
    const NamespaceId known = namespace_of(record);
    const auto run = runs.find(record.page);
    const FormerChunk chunk{record, run ? runs[*run] : FormerRun{}, HolderId(former.seal(id).holder), 0, {}, {}};
    if (!run || namespaces_.empty() || !withhold(chunk, known.valid() ? known : NamespaceId(0), last_generation_)) {
      ++counts.damaged;
    }
  }
  counts.withheld = withheld_.count();
  counts.withheld_bytes = withheld_.bytes();
  for (FormerCandidate& one : candidates) {
    // A parent is sealed into what follows it with its generation: the one that is there is the right one.
    if (one.parent != FormerCandidate::NONE) {
      one.parent = one.parent < by_id.size() ? by_id[one.parent] : FormerCandidate::NONE;
    }
  }
  const std::vector<uint32_t> order = restoring_order(candidates);
  counts.orphaned = candidates.size() - order.size();
  for (size_t at = 0; at < order.size(); ++at) {
    if (at + RECORDS_AHEAD < order.size()) {
      former.prefetch(candidates[order[at + RECORDS_AHEAD]].id);
      table_.prefetch(former.record(candidates[order[at + RECORDS_AHEAD / 2]].id).key);
    }
    FormerCandidate& one = candidates[order[at]];
    const ChunkRecord& record = former.record(one.id);
    const RecordId above = one.parent == FormerCandidate::NONE ? RecordId() : candidates[one.parent].restored;
    if (one.parent != FormerCandidate::NONE && !above.valid()) {
      ++counts.orphaned;
      continue;
    }
    const FormerRun& run = runs[one.run];
    const auto checksums = former.published(record, one.slot, arena_.size_class(run.size_class).extents);
    const FormerChunk chunk{record, run, HolderId(), one.used_ns, *checksums, former.tokens(one.id)};
    one.restored = restore_former_chunk(chunk, namespace_of(record), above);
    ++(one.restored.valid() ? counts.taken : counts.unplaced);
    counts.taken_bytes += one.restored.valid() ? chunk_bytes(records_[one.restored]) : 0;
  }
  policy_->restore(former.region(), records_.alive());
  finish_restore(former.generations_end());
  return counts;
}

// Everything of the record that has no seal is taken as far as it is in range.
RecordId Directory::restore_former_chunk(const FormerChunk& chunk, NamespaceId owner, RecordId above) {
  const ChunkRecord& former = chunk.record;
  const ClassId size_class = chunk.run.size_class;
  if (stats_.used_bytes + arena_.size_class(size_class).chunk_bytes > geometry_.capacity) {
    return RecordId();
  }
  const RecordId id = begin_restore(owner, size_class, above, former.key, former.generation);
  if (!id.valid() || !arena_.claim(size_class, chunk.run.segments, former.page, id)) {
    if (id.valid()) {
      records_.release(id);
    }
    return RecordId();
  }
  ChunkRecord& record = records_[id];
  record.page = former.page;
  record.last_access_ns = chunk.used_ns;
  record.touches = former.touches;
  record.turn = former.turn;
  record.is_reused = former.is_reused;
  if (std::max(former.queue, former.learned_class) < EvictionPolicy::QUEUES && former.chain_kind < CHAIN_KINDS) {
    record.queue = former.queue;
    record.learned_class = former.learned_class;
    record.chain_kind = former.chain_kind;
  }
  table_.open_slot(record.page);
  table_.publish(record.page, chunk.checksums.data(), arena_.size_class(size_class).extents, record.generation);
  enter_restored(id, above);
  record.stored_tick = former.stored_tick;
  records_.seal(id, HolderId());
  tokens_.store(id, {packed_words(chunk.tokens), {}});
  if (lower_bits_ != 0 && former.was_below && !former.is_below) {
    standings_.set_written(record, true);  // what a lower tier has still, it will say itself
  }
  const Retention retention{former.priority, former.duration_ms};
  if (retention.priority <= MAX_PRIORITY && retention.priority != DEFAULT_PRIORITY) {
    const uint64_t retained_ago = uint64_t{tick_of(latest_ns_) - former.retained_tick} << TICK_SHIFT;
    retention_.restore(id, retention, latest_ns_ - std::min(latest_ns_, retained_ago));
  }
  list_restored(id);
  return id;
}

// A record that keeps the slot from everybody else. False where there is no such slot, or it is withheld already.
bool Directory::withhold(const FormerChunk& chunk, NamespaceId owner, uint64_t generation) {
  const ClassId size_class = chunk.run.size_class;
  const uint64_t bytes = arena_.size_class(size_class).chunk_bytes;
  if (records_.is_full() || stats_.used_bytes + bytes > geometry_.capacity) {
    return false;
  }
  const RecordId id = records_.allocate();
  if (!arena_.claim(size_class, chunk.run.segments, chunk.record.page, id)) {
    records_.release(id);
    return false;
  }
  ChunkRecord& record = records_[id];
  record.key = chunk.record.key;
  record.is_sampled = is_in_sample(record.key);
  record.owner = owner;
  record.size_class = size_class;
  record.generation = generation;
  record.page = chunk.record.page;
  record.state = ChunkState::ZOMBIE;
  record.has_writer = true;
  records_.seal(id, chunk.writer);
  stats_.used_bytes += bytes;
  ++stats_.zombies;
  ++namespaces_[owner.value()].zombies;
  shares_.protect(size_class);
  withheld_.add(chunk.writer, id, bytes);
  return true;
}

size_t Directory::release_withheld(HolderId holder) {
  const std::vector<RecordId> released = withheld_.take(holder);
  for (const RecordId id : released) {
    end_writer(id);
  }
  return released.size();
}

void Directory::rename_withheld(HolderId holder, HolderId instead) {
  for (const RecordId id : withheld_.take(holder)) {
    records_.seal(id, instead);
    withheld_.add(instead, id, chunk_bytes(records_[id]));
  }
}

}  // namespace kvpool
