#include "leases/lease_desk.h"

#include <algorithm>
#include <utility>

namespace kvpool {

// The runs of a request, rank by rank, into `runs_`. False where the keys do not fit the layout.
bool LeaseDesk::find_runs(const Reader& reader, std::span<const uint8_t> keys, uint64_t chunks, HeldHit& hit) {
  const size_t ranks = reader.ranks.size();
  const size_t named = keys.size() / KEY_BYTES;
  if (keys.size() % KEY_BYTES != 0 || named == 0 || (chunks == 0 && (reader.has_groups || named % ranks != 0))) {
    return false;
  }
  hit.chunks = chunks == 0 ? named / ranks : chunks;
  if (hit.chunks > bounds_.rows_max) {
    return false;
  }
  size_t leaves = 0;
  hit.rows = 0;
  for (const ReaderGroup& group : reader.groups) {
    const uint64_t rows = std::min(hit.chunks, group.chunks_max);
    hit.rows += rows;
    leaves += group.is_chain ? 1 : rows;
  }
  const bool are_leaves = named == leaves * ranks;
  if (!are_leaves && (named != hit.rows * ranks || named > bounds_.named_max)) {
    return false;
  }
  if (hit.rows * ranks > bounds_.rows_max) {
    return false;
  }
  runs_.clear();
  for (size_t rank = 0; rank < ranks; ++rank) {
    size_t first = 0;
    for (const ReaderGroup& group : reader.groups) {
      const uint64_t rows = std::min(hit.chunks, group.chunks_max);
      const size_t count = group.is_chain && are_leaves ? 1 : rows;
      const auto of_rank = keys.subspan((first + rank * count) * KEY_BYTES, count * KEY_BYTES);
      runs_.push_back({group.namespaces[rank], of_rank, rows, group.is_chain});
      first += ranks * count;
    }
  }
  return true;
}

std::optional<HeldHit> LeaseDesk::hold_hit(const Reader& reader, std::span<const uint8_t> keys, uint64_t chunks, HolderId holder,
                                           uint64_t now_ns) {
  HeldHit hit;
  if (!find_runs(reader, keys, chunks, hit)) {
    return std::nullopt;
  }
  const std::vector<Hold> holds = directory_.hold_hit(runs_, holder, now_ns);
  if (holds.empty()) {
    return std::nullopt;
  }
  hit.holds.reserve(holds.size());
  std::transform(holds.begin(), holds.end(), std::back_inserter(hit.holds), [](const Hold& hold) { return hold.id; });
  return hit;
}

const Lease* LeaseDesk::lease_hit(const Reader& reader, std::span<const uint8_t> keys, uint64_t chunks, uint64_t now_ns) {
  if (!may_lease(reader)) {
    return nullptr;
  }
  std::optional<HeldHit> hit = hold_hit(reader, keys, chunks, reader.holder, now_ns);
  if (!hit) {
    return nullptr;
  }
  for (size_t index = 0; index < hit->holds.size(); ++index) {
    const size_t groups = reader.groups.size();
    note_hold(hit->holds[index], reader.groups[index % groups].chunk_bytes[index / groups], now_ns);
  }
  return &grant(reader, std::move(*hit), std::nullopt, now_ns);
}

std::optional<LeasedSet> LeaseDesk::lease_set(const Reader& reader, std::span<const uint8_t> keys, uint64_t group, uint64_t now_ns) {
  const size_t named = keys.size() / KEY_BYTES;
  if (keys.size() % KEY_BYTES != 0 || named == 0 || named > bounds_.named_max || group >= reader.groups.size() || reader.is_scheduler ||
      !bounds_.is_alone || !may_lease(reader)) {
    return std::nullopt;
  }
  const ReaderGroup& of = reader.groups[group];
  std::optional<HeldSet> held = directory_.hold_set(of.namespaces.front(), keys, reader.holder, !of.is_chain, now_ns);
  if (!held) {
    return std::nullopt;
  }
  if (held->hold == 0) {
    return LeasedSet();
  }
  note_hold(held->hold, of.chunk_bytes.front(), now_ns);
  const uint64_t chunks = held->places.size();
  const Lease& lease = grant(reader, {chunks, chunks, {held->hold}}, static_cast<uint32_t>(group), now_ns);
  return LeasedSet{&lease, std::move(held->places)};
}

bool LeaseDesk::may_lease(const Reader& reader) const noexcept {
  return leases_.count_of(reader.connection) < bounds_.leases_max && leases_.chunks_of(reader.connection) < bounds_.held_max;
}

const Lease& LeaseDesk::grant(const Reader& reader, HeldHit hit, std::optional<uint32_t> set_group, uint64_t now_ns) {
  Lease lease;
  lease.owner = reader.connection;
  lease.chunks = hit.chunks;
  lease.rows = hit.rows;
  lease.least_ttl_ns = reader.least_ttl_ns;
  lease.ranks = reader.ranks;
  lease.holds = std::move(hit.holds);
  lease.set_group = set_group;
  return leases_.grant(std::move(lease), now_ns);
}

void LeaseDesk::note_hold(HoldId hold, uint64_t chunk_bytes, uint64_t now_ns) {
  if (reuse_ == nullptr) {
    return;
  }
  size_t chunks = 0;
  const std::vector<ChunkKey> sampled = directory_.holds().sampled_keys({hold}, chunks);
  reuse_->observe(sampled, chunks, chunk_bytes, now_ns);
}

Columns LeaseDesk::columns_of(const Reader& reader, const Lease& lease) const {
  const size_t of_rank = lease.holds.size() / lease.ranks.size();
  Columns columns;
  for (size_t rank = 0; rank < lease.ranks.size(); ++rank) {
    const auto first = lease.holds.begin() + static_cast<std::ptrdiff_t>(rank * of_rank);
    auto of_this = directory_.columns({first, first + static_cast<std::ptrdiff_t>(of_rank)});
    KVPOOL_CHECK(of_this.has_value());
    if (rank == 0) {
      columns = std::move(*of_this);
      continue;
    }
    for (size_t row = 0; row < columns.levels.size(); ++row) {
      columns.levels[row] = std::max(columns.levels[row], of_this->levels[row]);
    }
  }
  return reader.is_scheduler ? Columns{{}, {}, std::move(columns.levels), {}} : columns;
}

Columns LeaseDesk::rows_by_key(const Reader& reader, const Lease* lease, std::span<const uint32_t> places, size_t named) const {
  const size_t numbers = reader.is_scheduler ? 0 : named;
  Columns columns{std::vector<uint64_t>(numbers), std::vector<uint64_t>(numbers), std::vector<uint8_t>(named, NO_LEVEL),
                  std::vector<uint64_t>(numbers)};
  if (lease == nullptr) {
    return columns;
  }
  const Columns rows = columns_of(reader, *lease);
  KVPOOL_CHECK(rows.levels.size() == places.size());
  const auto scatter = [&](const auto& column, auto& by_key) {
    for (size_t row = 0; row < column.size(); ++row) {
      by_key[places[row]] = column[row];
    }
  };
  scatter(rows.offsets, columns.offsets);
  scatter(rows.generations, columns.generations);
  scatter(rows.levels, columns.levels);
  scatter(rows.slots, columns.slots);  // none where no client looks into the tier
  return columns;
}

bool LeaseDesk::release_leases(const Reader& reader, std::span<const uint64_t> ids, uint64_t now_ns) {
  std::vector<HoldId> holds;
  for (const uint64_t id : ids) {
    const std::vector<HoldId> ended = leases_.end_lease(id, reader.connection);
    holds.insert(holds.end(), ended.begin(), ended.end());
  }
  return ending_.release_holds(holds, now_ns);
}

}  // namespace kvpool
