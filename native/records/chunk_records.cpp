// Record memory, tree links and list links. See chunk_records.h.
#include "records/chunk_records.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <utility>

#include "base/check.h"
#include "checksum/crc32c.h"

namespace kvpool {
// Its depth follows from its parent's, and a generation names one chunk alone.
uint32_t seal_of(const ChunkRecord& record, RecordId id, uint64_t parent_generation) noexcept {
  const ChunkKey& key = record.key;
  const uint32_t crc = crc32c_of(std::array{key.words[0], key.words[1], key.words[2], key.words[3], record.generation, parent_generation,
                                            record.page.value(), uint64_t{record.owner.value()} << 32 | id.value()});
  return crc + (crc == 0 ? 1U : 0U);
}

ChunkRecords::ChunkRecords(uint32_t capacity, ChunkRecord* memory) : capacity_(capacity), records_(memory), seals_(nullptr), generations_end_(UINT64_MAX) {
  KVPOOL_CHECK(capacity_ > 0);
  if (records_ == nullptr) {
    own_.emplace(capacity_);
    records_ = &(*own_)[0];
  }
}

ChunkRecords::ChunkRecords(std::shared_ptr<const Mapping> kept, const KeptShape& shape)
    : capacity_(shape.max_chunks),
      kept_(kept == nullptr ? std::nullopt : std::optional<KeptRegion>(std::in_place, std::move(kept), shape)),
      seals_(kept_ ? kept_->seals() : nullptr),
      generations_end_(kept_ ? 0 : UINT64_MAX) {
  KVPOOL_CHECK(capacity_ > 0);
  if (kept_) {
    KVPOOL_CHECK(shape.record_bytes == sizeof(ChunkRecord));
    kept_->format();
    records_ = reinterpret_cast<ChunkRecord*>(kept_->records());
  } else {
    own_.emplace(capacity_);
    records_ = &(*own_)[0];
  }
}

void ChunkRecords::write_seal(RecordId id, HolderId writer) noexcept {
  const ChunkRecord& record = records_[id.value()];
  RecordSeal& seal = seals_[id.value()];
  const uint64_t above = record.parent.valid() ? records_[record.parent.value()].generation : 0;
  seal.holder = writer.value();
  seal.parent = record.parent.value();
  keep_order();
  seal.crc = seal_of(record, id, above);
}

void ChunkRecords::raise_generations_end(uint64_t generation) noexcept {
  generations_end_ = std::min(generation + GENERATIONS_STEP, GENERATION_END);
  KVPOOL_CHECK(generation < generations_end_);
  kept_->set_generations_end(generations_end_);
}

bool ChunkRecords::is_sealed(RecordId id) const noexcept {
  const ChunkRecord& record = records_[id.value()];
  const RecordSeal& seal = seals_[id.value()];
  const uint64_t above = record.parent.valid() ? records_[record.parent.value()].generation : 0;
  return seal.parent == record.parent.value() && seal.crc == seal_of(record, id, above);
}

void ChunkRecords::copy_for_child(std::shared_ptr<LazyArray<ChunkRecord>> room) {
  if (kept_ && end_ > 0) {
    copy_ = room != nullptr && room->count() >= end_ ? std::move(room) : std::make_shared<LazyArray<ChunkRecord>>(end_);
    std::memcpy(static_cast<void*>(&(*copy_)[0]), records_, end_ * sizeof(ChunkRecord));
  }
}

void ChunkRecords::use_copy() noexcept {
  if (copy_) {
    records_ = &(*copy_)[0];
  }
}

void ChunkRecords::prefetch(RecordId id) const noexcept { __builtin_prefetch(&records_[id.value()], 1); }

void ChunkRecords::prefetch_whole(RecordId id) const noexcept {
  prefetch(id);
  __builtin_prefetch(&records_[id.value()].key, 1);
}

RecordId ChunkRecords::allocate() noexcept {
  KVPOOL_CHECK(!is_full());
  ++alive_;
  const RecordId id = first_free_.valid() ? first_free_ : RecordId(end_);
  if (seals_ != nullptr) {
    seals_[id.value()].crc = 0;
    keep_order();
  }
  if (id == first_free_) {
    ChunkRecord& record = records_[id.value()];
    KVPOOL_CHECK(record.state == ChunkState::FREE);
    first_free_ = record.newer;
    record = ChunkRecord{};
  } else {
    new (&records_[end_++]) ChunkRecord{};
  }
  return id;
}

void ChunkRecords::release(RecordId id) noexcept {
  ChunkRecord& record = records_[id.value()];
  KVPOOL_CHECK(!record.parent.valid());
  KVPOOL_CHECK(!record.first_child.valid());
  KVPOOL_CHECK(record.holds == 0);
  KVPOOL_CHECK(record.pins == 0);
  record.state = ChunkState::FREE;
  keep_order();
  record = ChunkRecord{};
  record.newer = first_free_;
  first_free_ = id;
  --alive_;
}

void ChunkRecords::attach_child(RecordId parent, RecordId child) noexcept {
  ChunkRecord& above = records_[parent.value()];
  ChunkRecord& below = records_[child.value()];
  KVPOOL_CHECK(!below.parent.valid());
  below.parent = parent;
  below.depth = above.depth + 1;
  below.next_sibling = above.first_child;
  if (above.first_child.valid()) {
    records_[above.first_child.value()].previous_sibling = child;
  }
  above.first_child = child;
}

void ChunkRecords::detach(RecordId child) noexcept {
  ChunkRecord& below = records_[child.value()];
  if (!below.parent.valid()) {
    return;
  }
  if (below.previous_sibling.valid()) {
    records_[below.previous_sibling.value()].next_sibling = below.next_sibling;
  } else {
    KVPOOL_CHECK(records_[below.parent.value()].first_child == child);
    records_[below.parent.value()].first_child = below.next_sibling;
  }
  if (below.next_sibling.valid()) {
    records_[below.next_sibling.value()].previous_sibling = below.previous_sibling;
  }
  below.parent = RecordId();
  below.next_sibling = RecordId();
  below.previous_sibling = RecordId();
}

void ChunkRecords::link_run_behind(ChunkList& list, std::span<const RecordId> run, RecordId older) noexcept {
  RecordId& before = older.valid() ? records_[older.value()].newer : list.oldest;
  RecordId newer = before;
  before = run.back();
  (newer.valid() ? records_[newer.value()].older : list.newest) = run.front();
  for (size_t index = 0; index < run.size(); ++index) {
    ChunkRecord& record = records_[run[index].value()];
    KVPOOL_DCHECK(!record.older.valid() && !record.newer.valid());
    record.newer = newer;
    record.older = index + 1 < run.size() ? run[index + 1] : older;
    newer = run[index];
  }
  list.length += run.size();
}

void ChunkRecords::unlink_run(ChunkList& list, std::span<const RecordId> run) noexcept {
  KVPOOL_CHECK(list.length >= run.size());
  const RecordId newer = records_[run.front().value()].newer;
  const RecordId older = records_[run.back().value()].older;
  (older.valid() ? records_[older.value()].newer : list.oldest) = newer;
  (newer.valid() ? records_[newer.value()].older : list.newest) = older;
  bool has_hand = false;
  for (const RecordId id : run) {
    ChunkRecord& record = records_[id.value()];
    has_hand = has_hand || list.hand == id;
    record.older = RecordId();
    record.newer = RecordId();
  }
  if (has_hand) {
    list.hand = older.valid() ? older : newer;
  }
  list.length -= run.size();
}

}  // namespace kvpool
