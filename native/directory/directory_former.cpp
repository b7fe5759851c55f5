// A directory that goes on with the arena of a former life. See former_life.h and directory.h.
#include <algorithm>
#include <compare>
#include <numeric>

#include "base/check.h"
#include "directory/directory.h"
#include "hash/sampling.h"

namespace kvpool {
namespace {

constexpr uint32_t NONE = UINT32_MAX;
// Chunks whose records and table places are asked of the memory before they are restored.
constexpr size_t RECORDS_AHEAD = 16;

// A chunk of the former life that can be taken over if what precedes it is.
struct Candidate {
  uint64_t used_ns;
  uint32_t id;      // of its record then
  uint32_t parent;  // a candidate; NONE: it is the first
  uint32_t depth;
  FormerRun run;
  RecordId restored;
  bool is_whole;  // all that precede it are candidates
};

// What candidates are sorted by, kept together.
struct Place {
  uint64_t age;  // the most recent has the least
  uint32_t depth;
  uint32_t number;

  friend auto operator<=>(const Place&, const Place&) = default;
};

// By counting: depths are small numbers.
std::vector<uint32_t> roots_first(const std::vector<Candidate>& candidates) {
  uint32_t deepest = 0;
  for (const Candidate& one : candidates) {
    deepest = std::max(deepest, one.depth);
  }
  std::vector<uint32_t> starts(size_t{deepest} + 2);
  for (const Candidate& one : candidates) {
    ++starts[one.depth + 1];
  }
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  std::vector<uint32_t> sorted(candidates.size());
  for (uint32_t number = 0; number < candidates.size(); ++number) {
    sorted[starts[candidates[number].depth]++] = number;
  }
  return sorted;
}

// The most recent first, ancestors before what follows them: a chunk counts as used when a descendant was. Those that are not whole are
// left out.
std::vector<Place> order_of(std::vector<Candidate>& candidates) {
  const std::vector<uint32_t> sorted = roots_first(candidates);
  for (const uint32_t number : sorted) {
    Candidate& one = candidates[number];
    one.is_whole = one.parent == NONE ? one.depth == 0
                                      : candidates[one.parent].is_whole && candidates[one.parent].depth + 1 == one.depth;
  }
  for (auto number = sorted.rbegin(); number != sorted.rend(); ++number) {
    const Candidate& one = candidates[*number];
    if (one.is_whole && one.parent != NONE) {
      candidates[one.parent].used_ns = std::max(candidates[one.parent].used_ns, one.used_ns);
    }
  }
  std::vector<Place> places;
  places.reserve(candidates.size());
  for (const uint32_t number : sorted) {
    if (candidates[number].is_whole) {
      places.push_back({UINT64_MAX - candidates[number].used_ns, candidates[number].depth, number});
    }
  }
  std::sort(places.begin(), places.end());
  return places;
}

// The runs of a former life as classes here, each looked up once.
class FormerRuns {
 public:
  FormerRuns(Directory& directory, const FormerLife& former) : directory_(directory), former_(former) {}

  // Nothing where the page's run is not whole, or no class here is as it was.
  [[nodiscard]] std::optional<FormerRun> find(PageIndex page) {
    const auto entry = former_.run_at(page);
    if (!entry) {
      return std::nullopt;
    }
    if (known_.segments.segments == 0 || known_.segments.first != entry->first || known_.segments.segments != entry->segments) {
      const auto size_class = directory_.add_class(entry->chunk_bytes, entry->extents, entry->has_place_below != 0);
      if (!size_class) {
        return std::nullopt;
      }
      known_ = {{entry->first, entry->segments}, *size_class};
    }
    return known_;
  }

 private:
  Directory& directory_;
  const FormerLife& former_;
  FormerRun known_;  // the last one
};

}  // namespace

FormerCounts Directory::restore_former(const FormerLife& former, std::span<const NamespaceId> namespaces, uint64_t now_ns) {
  KVPOOL_CHECK(records_.alive() == 0 && originals_ == nullptr && !is_lower() && table_.has_words());
  latest_ns_ = std::max(latest_ns_, now_ns);
  last_generation_ = std::max({last_generation_, former.generations_end(), uint64_t{1}});
  records_.note_generation(last_generation_);
  FormerCounts counts;
  FormerRuns runs(*this, former);
  std::vector<Candidate> candidates;
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
      const auto slot = run ? arena_.words_in(run->size_class, run->segments, record.page) : std::nullopt;
      if (!slot) {
        ++counts.damaged;
      } else if (!former.published(record, *slot, arena_.size_class(run->size_class).extents)) {
        ++counts.unpublished;
      } else {
        by_id.resize(std::max<size_t>(by_id.size(), size_t{id} + 1), NONE);
        by_id[id] = static_cast<uint32_t>(candidates.size());
        // What somebody held was in use until the end.
        const uint64_t used_ns = record.holds > 0 ? latest_ns_ : std::min(record.last_access_ns, latest_ns_);
        candidates.push_back({used_ns, id, former.seal(id).parent, record.depth, *run, RecordId(), false});
      }
    }
  });
  // First of all: what is written to belongs to nobody else, whatever the records say.
  for (const uint32_t id : writers) {
    const ChunkRecord& record = former.record(id);
    const NamespaceId known = namespace_of(record);
    const auto run = runs.find(record.page);
    const FormerChunk chunk{record, run.value_or(FormerRun{}), HolderId(former.seal(id).holder), 0, {}, {}};
    if (!run || namespaces_.empty() || !withhold(chunk, known.valid() ? known : NamespaceId(0), last_generation_)) {
      ++counts.damaged;
    }
  }
  counts.withheld = withheld_.count();
  counts.withheld_bytes = withheld_.bytes();
  for (Candidate& one : candidates) {
    // A parent is sealed into what follows it with its generation: the one that is there is the right one.
    one.parent = one.parent < by_id.size() ? by_id[one.parent] : NONE;
  }
  const std::vector<Place> order = order_of(candidates);
  counts.orphaned = candidates.size() - order.size();
  const auto record_of = [&](size_t at) -> const ChunkRecord& { return former.record(candidates[order[at].number].id); };
  for (size_t at = 0; at < order.size(); ++at) {
    if (at + RECORDS_AHEAD < order.size()) {
      former.prefetch(candidates[order[at + RECORDS_AHEAD].number].id);
      table_.prefetch(record_of(at + RECORDS_AHEAD / 2).key);
    }
    Candidate& one = candidates[order[at].number];
    const ChunkRecord& record = former.record(one.id);
    const RecordId above = one.parent == NONE ? RecordId() : candidates[one.parent].restored;
    if (one.parent != NONE && !above.valid()) {
      ++counts.orphaned;
      continue;
    }
    const auto slot = arena_.words_in(one.run.size_class, one.run.segments, record.page);
    const auto checksums = former.published(record, *slot, arena_.size_class(one.run.size_class).extents);
    const FormerChunk chunk{record, one.run, HolderId(), one.used_ns, *checksums, former.tokens(one.id)};
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

}  // namespace kvpool
