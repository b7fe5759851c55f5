// Holds: acquire, duplicate, columns, release. See directory.h, invariants 1 to 3.
#include <algorithm>

#include "kvpool/check.h"
#include "kvpool/directory.h"

namespace kvpool {
namespace {

// As in index_view.cpp; records are larger, but their reading is spread over a second pass.
constexpr size_t PREFETCH_AHEAD = 12;

}  // namespace

// Two passes: the first finds records and asks the cache for them, the second reads them.
size_t Directory::find_prefix(NamespaceId owner, const uint8_t* keys, size_t n, std::vector<RecordId>& out) const {
  out.clear();
  out.reserve(n);
  for (size_t index = 0; index < std::min(n, PREFETCH_AHEAD); ++index) {
    table_.prefetch(ChunkKey::from_bytes(keys + index * KEY_BYTES));
  }
  for (size_t index = 0; index < n; ++index) {
    if (index + PREFETCH_AHEAD < n) {
      table_.prefetch(ChunkKey::from_bytes(keys + (index + PREFETCH_AHEAD) * KEY_BYTES));
    }
    const auto entry = table_.find(ChunkKey::from_bytes(keys + index * KEY_BYTES));
    if (!entry || entry->tiers == 0 || !entry->record.valid()) {
      break;
    }
    records_.prefetch(entry->record);
    out.push_back(entry->record);
  }
  RecordId parent;
  size_t length = 0;
  while (length < out.size() && records_[out[length]].owner == owner && records_[out[length]].parent == parent &&
         has_bytes(records_[out[length]].state)) {
    parent = out[length++];
  }
  out.resize(length);
  return length;
}

void Directory::add_hold(RecordId id) noexcept {
  ChunkRecord& record = records_[id];
  KVPOOL_CHECK(record.holds < UINT32_MAX);
  if (record.holds == 0) {
    make_busy(id);
    ++stats_.held;
    ++namespaces_[record.owner.value()].held;
  }
  ++record.holds;
}

void Directory::note_reuse(const std::vector<RecordId>& records, uint64_t now_ns) noexcept {
  latest_ns_ = std::max(latest_ns_, now_ns);
  policy_->note_reuses(records_, records, latest_ns_);
  const uint8_t kind = chain_kind_of(records_[records.back()].turn, records.size());  // until the request stores some more
  for (const RecordId id : records) {
    ChunkRecord& record = records_[id];
    stats_.reuse_gaps.add(record.holds == 0 ? latest_ns_ - record.last_access_ns : 0);
    record.chain_kind = kind;
    record.is_reused = true;
    record.is_used = true;
    if (faster_ != nullptr) {
      record.retained_tick = tick_of(latest_ns_);  // a use on its way up
    }
    record.touches = static_cast<uint8_t>(std::min(record.touches + 1, UINT8_MAX));
  }
}

Hold Directory::make_hold(std::vector<RecordId> records) {
  KVPOOL_CHECK(!records.empty());
  for (const RecordId id : records) {
    add_hold(id);
  }
  const size_t chunks = records.size();
  holds_.emplace(++last_id_, std::move(records));
  return {last_id_, chunks};
}

// From the leaf to the root: invariant 3. What others still hold was used now as well, so that whoever releases it last puts
// it behind the children that become idle here.
void Directory::end_holds(const std::vector<RecordId>& records, uint64_t now_ns) noexcept {
  latest_ns_ = std::max(latest_ns_, now_ns);
  policy_->note_uses(records_, records, latest_ns_);
  for (auto id = records.rbegin(); id != records.rend(); ++id) {
    ChunkRecord& record = records_[*id];
    KVPOOL_CHECK(record.holds > 0);
    record.was_below = false;
    if (--record.holds > 0) {
      // Its last holder may end without a use; this one's counts then, as it does for what follows the chunk.
      record.last_access_ns = std::max({record.last_access_ns, latest_ns_, now_ns});
      continue;
    }
    --stats_.held;
    if (record.state == ChunkState::ZOMBIE) {
      --stats_.zombies;
      free_slot(*id);
    } else {
      --namespaces_[record.owner.value()].held;
      make_idle(*id, now_ns);
    }
  }
}

void Directory::append_chain(RecordId leaf, std::vector<RecordId>& records) const {
  const auto first = static_cast<std::ptrdiff_t>(records.size());
  for (RecordId id = leaf; id.valid(); id = records_[id].parent) {
    records.push_back(id);
  }
  std::reverse(records.begin() + first, records.end());
}

Hold Directory::acquire(NamespaceId owner, const uint8_t* keys, size_t n, uint64_t now_ns) {
  std::vector<RecordId> records;
  if (find_prefix(owner, keys, n, records) == 0) {
    return {};
  }
  note_reuse(records, now_ns);
  return make_hold(std::move(records));
}

std::vector<Hold> Directory::acquire_ranks(const std::vector<NamespaceId>& owners, const uint8_t* keys, size_t n,
                                           uint64_t now_ns) {
  std::vector<std::vector<RecordId>> ranks(owners.size());
  size_t shortest = n;
  for (size_t rank = 0; rank < owners.size() && shortest > 0; ++rank) {
    shortest = find_prefix(owners[rank], keys + rank * n * KEY_BYTES, shortest, ranks[rank]);
  }
  std::vector<Hold> holds(owners.size());
  for (size_t rank = 0; rank < owners.size() && shortest > 0; ++rank) {
    ranks[rank].resize(shortest);
    note_reuse(ranks[rank], now_ns);
    holds[rank] = make_hold(std::move(ranks[rank]));
  }
  return holds;
}

std::vector<RecordId> Directory::whole_chain(NamespaceId owner, const uint8_t* leaf, size_t n) const {
  const auto entry = table_.find(ChunkKey::from_bytes(leaf));
  std::vector<RecordId> chain;
  if (entry && entry->record.valid() && records_[entry->record].owner == owner &&
      has_bytes(records_[entry->record].state)) {
    chain.reserve(n);
    append_chain(entry->record, chain);
  }
  if (chain.size() != n) {
    chain.clear();
  }
  return chain;
}

std::vector<Hold> Directory::acquire_leaves(const std::vector<NamespaceId>& owners, const uint8_t* leaves, size_t n,
                                            uint64_t now_ns) {
  std::vector<std::vector<RecordId>> ranks;
  for (size_t rank = 0; rank < owners.size(); ++rank) {
    ranks.push_back(whole_chain(owners[rank], leaves + rank * KEY_BYTES, n));
    if (ranks.back().empty()) {
      return std::vector<Hold>(owners.size());
    }
  }
  std::vector<Hold> holds;
  for (std::vector<RecordId>& records : ranks) {
    note_reuse(records, now_ns);
    holds.push_back(make_hold(std::move(records)));
  }
  return holds;
}

std::optional<Hold> Directory::duplicate(HoldId hold) {
  const auto found = holds_.find(hold);
  if (found == holds_.end()) {
    return std::nullopt;
  }
  return make_hold(std::vector<RecordId>(found->second));
}

std::optional<Columns> Directory::columns(HoldId hold) const {
  const auto found = holds_.find(hold);
  if (found == holds_.end()) {
    return std::nullopt;
  }
  const std::vector<RecordId>& records = found->second;
  Columns columns{std::vector<uint64_t>(records.size()), std::vector<uint64_t>(records.size()),
                  std::vector<uint8_t>(records.size(), NO_LEVEL)};
  for (size_t index = 0; index < records.size(); ++index) {
    const ChunkRecord& record = records_[records[index]];
    columns.offsets[index] = uint64_t{record.page.value()} * PAGE_BYTES;
    columns.generations[index] = record.generation;
    if (record.state == ChunkState::READY) {
      columns.levels[index] = static_cast<uint8_t>(tier_);
    } else if (record.state == ChunkState::PROMOTING) {
      columns.levels[index] = static_cast<uint8_t>(Tier::SSD);
    }
  }
  return columns;
}

std::optional<RecordId> Directory::record_of(HoldId hold, size_t position) const {
  const auto found = holds_.find(hold);
  if (found == holds_.end() || position >= found->second.size()) {
    return std::nullopt;
  }
  return found->second[position];
}

std::optional<ChunkKey> Directory::key_of(HoldId hold, size_t position) const {
  const auto record = record_of(hold, position);
  return record ? std::optional(records_[*record].key) : std::nullopt;
}

std::vector<ChunkKey> Directory::sampled_keys(HoldId hold, size_t& chunks) const {
  std::vector<ChunkKey> keys;
  const auto found = holds_.find(hold);
  chunks = found == holds_.end() ? 0 : found->second.size();
  for (size_t index = 0; index < chunks; ++index) {
    const ChunkRecord& record = records_[found->second[index]];
    if (record.is_sampled) {
      keys.push_back(record.key);
    }
  }
  return keys;
}

bool Directory::release(HoldId hold, uint64_t now_ns) {
  const auto found = holds_.find(hold);
  if (found == holds_.end()) {
    return false;
  }
  const std::vector<RecordId> records = std::move(found->second);
  holds_.erase(found);
  for (const RecordId id : records) {
    // What nobody else holds and never landed is not going to.
    if (records_[id].state == ChunkState::PROMOTING && records_[id].holds == 1) {
      departure_ = Cause::LANDING_FAILED;
      remove_subtree(id);
    }
  }
  end_holds(records, now_ns);
  return true;
}

}  // namespace kvpool
