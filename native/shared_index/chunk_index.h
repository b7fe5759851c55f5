// Index of a directory: the table that clients read, or, for a tier that no client looks into, a private map.
//
// What it is: one interface to both. What it is not: a copy: a private map has record ids alone, and the other fields of an entry are
// read from the chunk's record.
// Only a shared table has words of slots (generations, checksums, landings) and a limited reach for each key. A private map may have
// the words of its slots in a region of another directory's table; without them nothing is published. In it every key has room. The
// directory names a slot by its page, readers by its number: this class converts.
// Threads: the control thread only.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "arena/slot_arena.h"
#include "records/chunk_records.h"
#include "shared_index/chunk_table.h"
#include "records/key_map.h"

namespace kvpool {

// A region of a table, and the table; none where readers know no slots.
struct TableRegion {
  ChunkTable* table = nullptr;
  uint32_t number = DRAM_REGION;
};

class ChunkIndex {
 public:
  // `shared` unset: a private map of up to `max_chunks` keys, with the words of its slots in `region`. `tier`: of the chunks.
  // REQUIRES: `records`, `arena`, from which the slots of the region are cut, and the region's table live as long.
  ChunkIndex(std::shared_ptr<const Mapping> shared, IndexShape shape, const uint8_t epoch[16], Tier tier, uint32_t max_chunks,
             const ChunkRecords& records, const SlotArena& arena, TableRegion region = {})
      : records_(records), arena_(arena), tier_(tier), region_(region) {
    if (shared != nullptr) {
      table_.emplace(std::move(shared), std::move(shape), epoch);
      region_ = {&*table_, DRAM_REGION};
    } else {
      map_.emplace(max_chunks, records);
    }
  }
  ChunkIndex(const ChunkIndex&) = delete;
  ChunkIndex& operator=(const ChunkIndex&) = delete;

  [[nodiscard]] std::optional<TableEntry> find(const ChunkKey& key) const noexcept {
    return table_ ? table_->find(key) : described(map_->find(key));
  }
  // Prefetches what `find_from` and `look_from` look at first; the answer is their argument.
  uint64_t prefetch(const ChunkKey& key) const noexcept {
    return table_ ? table_->prefetch(key) : map_->prefetch(key);
  }
  [[nodiscard]] std::optional<TableEntry> find_from(uint64_t home, const ChunkKey& key) const noexcept {
    return table_ ? table_->find_from(home, key) : described(map_->find(key));
  }
  [[nodiscard]] TableLook look_from(uint64_t home, const ChunkKey& key) const noexcept {
    return table_ ? table_->look_from(home, key) : TableLook{described(map_->find(key)), true};
  }
  [[nodiscard]] bool has_room(const ChunkKey& key) const noexcept { return table_ ? table_->has_room(key) : map_->has_room(); }
  // Whether a key is absent, and `enter` would take it.
  [[nodiscard]] bool may_insert(const ChunkKey& key) const noexcept {
    return table_ ? table_->may_insert(key) : !map_->find(key).valid() && map_->has_room();
  }
  // See ChunkTable. REQUIRES, without a table: the record has its key, which is absent.
  [[nodiscard]] std::optional<uint8_t> enter(const ChunkKey& key, RecordId record, uint64_t generation, PageIndex page) noexcept {
    if (table_) {
      return table_->enter(key, record, generation, slot_of(page));
    }
    map_->insert(record);
    return uint8_t{0};
  }
  // See ChunkTable. REQUIRES: there is a table.
  void move(const ChunkKey& key, RecordId record, uint64_t generation, PageIndex page) noexcept {
    table_->move(key, record, generation, slot_of(page));
  }
  void erase(const ChunkKey& key) noexcept { table_ ? table_->erase(key) : map_->erase(key); }
  // The tiers of a chunk in a private map are those of its record.
  void set_tiers(const ChunkKey& key, uint8_t tiers) noexcept {
    if (table_) {
      table_->set_tiers(key, tiers);
    }
  }
  void add_tiers(const ChunkKey& key, uint8_t tiers) noexcept {
    if (table_) {
      table_->add_tiers(key, tiers);
    }
  }

  [[nodiscard]] bool is_in_reach(const ChunkKey& key) const noexcept { return !table_ || table_->is_in_reach(key); }

  // The address by which readers find the used slot at a page; unset where none can.
  [[nodiscard]] SlotAddress slot_of(PageIndex page) const noexcept {
    return has_words() && page.valid() ? SlotAddress{region_.number, arena_.words_of(page).number} : SlotAddress();
  }
  // See SlotArena::words_of.
  [[nodiscard]] SlotAddress slot_of(PageIndex page, LastRun& last) const noexcept {
    return has_words() && page.valid() ? SlotAddress{region_.number, arena_.words_of(page, last).number} : SlotAddress();
  }
  // The slot at the page is lent to a chunk: nothing can be read in it yet.
  void open_slot(PageIndex page) noexcept {
    if (has_words()) {
      const SlotNumbers words = arena_.words_of(page);
      region_.table->open_slot({region_.number, words.number}, words.first_checksum);
    }
  }
  void prefetch_words(PageIndex page) const noexcept {
    if (has_words() && page.valid()) {
      words().prefetch_words(slot_of(page));
    }
  }
  void set_generation(PageIndex page, uint64_t generation) noexcept {
    if (has_words()) {
      region_.table->set_generation(slot_of(page), generation);
    }
  }
  // The chunk that was being written into the slot at the page is given up: wakes who follows it.
  void end_landing(PageIndex page) noexcept {
    if (has_words()) {
      region_.table->end_landing(slot_of(page));
    }
  }
  // Publishes the chunk in the slot at the page: a reader that finds the generation finds the extents and checksums.
  void publish(PageIndex page, const uint32_t* checksums, uint32_t extents, uint64_t generation) noexcept {
    if (has_words()) {
      const SlotAddress slot = slot_of(page);
      region_.table->set_checksums(slot, checksums, extents);
      region_.table->set_landed(slot, extents);
      region_.table->set_generation(slot, generation);
    }
  }
  // Whether readers of the slot find this generation, if there are any.
  [[nodiscard]] bool has_generation(PageIndex page, uint64_t generation) const noexcept {
    return !has_words() || words().generation(slot_of(page)) == generation;
  }

  // Whether readers know its slots. REQUIRES of the others: they do.
  [[nodiscard]] bool has_words() const noexcept { return region_.table != nullptr; }
  [[nodiscard]] ChunkTable& words() noexcept { return *region_.table; }
  [[nodiscard]] const ChunkTable& words() const noexcept { return *region_.table; }
  // Slots of its region that have a generation.
  [[nodiscard]] uint64_t count_published() const noexcept { return words().count_published(region_.number); }

  [[nodiscard]] bool is_shared() const noexcept { return table_.has_value(); }
  // What only a table can do. REQUIRES: there is one.
  [[nodiscard]] ChunkTable& shared() noexcept { return *table_; }
  [[nodiscard]] const ChunkTable& shared() const noexcept { return *table_; }

  [[nodiscard]] uint64_t count() const noexcept { return table_ ? table_->count() : map_->count(); }
  [[nodiscard]] uint64_t count_placeless() const noexcept { return table_ ? table_->count_placeless() : 0; }
  [[nodiscard]] uint64_t count_in(uint8_t tiers) const noexcept { return table_ ? table_->count_in(tiers) : 0; }
  [[nodiscard]] std::vector<std::string> verify() const { return table_ ? table_->verify() : map_->verify(); }

 private:
  [[nodiscard]] std::optional<TableEntry> described(RecordId id) const noexcept {
    if (!id.valid()) {
      return std::nullopt;
    }
    const ChunkRecord& record = records_[id];
    const bool is_ready = record.state == ChunkState::READY;
    return TableEntry{id, record.generation, SlotAddress(), is_ready ? tier_bit(tier_) : uint8_t{0}};
  }

  const ChunkRecords& records_;
  const SlotArena& arena_;
  const Tier tier_;
  TableRegion region_;
  std::optional<ChunkTable> table_;
  std::optional<KeyMap> map_;
};

}  // namespace kvpool
