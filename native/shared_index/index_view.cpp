// The readers' side of the shared index. See chunk_table.h for the layout and the argument.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "hash/key_hash.h"
#include "shared_index/chunk_table.h"

namespace kvpool {
namespace {

// Memory latency over the time of one probe that hits the cache: about 80 ns over 10 ns (guess).
constexpr size_t PREFETCH_AHEAD = 8;
// Names that are hashed before their keys are looked at: many lanes, on the stack.
constexpr size_t PROBED_AT_ONCE = 64;
static_assert(KEY_BYTES == HASH_BYTES);

enum class Look { FOUND, ABSENT, IN_FLUX };

// A further line, read word by word.
Residency read_residency(const StoredResidency& stored) noexcept {
  return {load_acquire(stored.generation), {load_acquire(stored.region), load_acquire(stored.number)}};
}

// Reads one slot, and has `take` read what is wanted of it where it is the key's. Returns IN_FLUX where the writer was at it: what was
// taken then may be of two entries. ABSENT where it is empty or another key's.
template <typename Take>
[[gnu::always_inline]] inline Look read_slot(const TableSlot& slot, const ChunkKey& key, bool& empty, const Take& take) noexcept {
  empty = false;
  const uint32_t seq = load_acquire(slot.seq);
  if (seq % 2 != 0) {
    return Look::IN_FLUX;
  }
  const uint64_t generation = load_acquire(slot.generation);
  const uint64_t difference =
      (load_acquire(slot.key.words[0]) ^ key.words[0]) | (load_acquire(slot.key.words[1]) ^ key.words[1]) |
      (load_acquire(slot.key.words[2]) ^ key.words[2]) | (load_acquire(slot.key.words[3]) ^ key.words[3]);
  if (difference == 0) {
    take(slot, generation);
  }
  if (load_acquire(slot.seq) != seq) {
    return Look::IN_FLUX;
  }
  empty = generation == 0;
  return empty || difference != 0 ? Look::ABSENT : Look::FOUND;
}

// One walk along the probe sequence.
template <typename Take>
[[gnu::always_inline]] inline Look look_once(const TableSlot* slots, uint64_t count, uint64_t home, const ChunkKey& key,
                                             const Take& take) noexcept {
  Look result = Look::ABSENT;
  uint64_t position = home;
  for (uint64_t step = 0; step < MAX_PROBE; ++step, position = position + 1 == count ? 0 : position + 1) {
    bool empty = false;
    const Look look = read_slot(slots[position], key, empty, take);
    if (look == Look::FOUND) {
      return look;
    }
    if (look == Look::IN_FLUX) {
      result = Look::IN_FLUX;
    }
    if (empty) {
      break;
    }
  }
  return result;
}

TableEntry entry_in(const TableSlot& slot, uint64_t generation) noexcept {
  const uint32_t number = load_acquire(slot.number);
  const uint8_t region = load_acquire(slot.region);
  return {RecordId(load_acquire(slot.record)), generation,
          number == UINT32_MAX ? SlotAddress() : SlotAddress{region, number}, load_acquire(slot.tiers)};
}

}  // namespace

std::shared_ptr<const IndexView> IndexView::attach(std::shared_ptr<const Mapping> mapping,
                                                   std::shared_ptr<const RemoteView> remote,
                                                   std::optional<IndexLife> life) {
  FoundIndex found;
  if (mapping == nullptr || !read_index_header(mapping->data(), mapping->size(), found)) {
    return nullptr;
  }
  return std::shared_ptr<const IndexView>(new IndexView(std::move(mapping), std::move(found), std::move(remote), std::move(life)));
}

IndexView::IndexView(std::shared_ptr<const Mapping> mapping, FoundIndex found, std::shared_ptr<const RemoteView> remote,
                     std::optional<IndexLife> life)
    : mapping_(std::move(mapping)),
      shape_(std::move(found.shape)),
      header_(reinterpret_cast<const IndexHeader*>(mapping_->data())),
      slots_(reinterpret_cast<const TableSlot*>(mapping_->data() + PAGE_BYTES)),
      further_(found.layout.further_offset == 0
                   ? nullptr
                   : reinterpret_cast<const FurtherSlot*>(mapping_->data() + found.layout.further_offset)),
      seed_(found.seed),
      remote_(std::move(remote)),
      life_(std::move(life)) {
  for (const RegionHeader& region : found.layout.regions) {
    regions_.push_back(words_of(*mapping_, region));
  }
}

std::optional<TableEntry> IndexView::find(const ChunkKey& key) const noexcept {
  return find_from(home_of(key, seed_, shape_.slots), key);
}

template <typename Take>
bool IndexView::find_with(uint64_t home, const ChunkKey& key, const Take& take) const noexcept {
  for (uint32_t look = 0; look < MAX_LOOKS; ++look) {
    const uint64_t moves = load_acquire(header_->moves);
    const Look result = look_once(slots_, shape_.slots, home, key, take);
    if (result == Look::FOUND) {
      return true;
    }
    if (result == Look::ABSENT && load_acquire(header_->moves) == moves) {
      return false;
    }
  }
  return false;
}

std::optional<TableEntry> IndexView::find_from(uint64_t home, const ChunkKey& key) const noexcept {
  TableEntry entry{};
  const bool is_found =
      find_with(home, key, [&](const TableSlot& slot, uint64_t generation) { entry = entry_in(slot, generation); });
  return is_found ? std::optional(entry) : std::nullopt;
}

[[gnu::noinline]] uint8_t IndexView::tiers_behind(uint64_t home, const uint8_t* packed) const noexcept {
  uint8_t tiers = 0;
  return find_with(home, ChunkKey::from_bytes(packed), [&](const TableSlot& slot, uint64_t) { tiers = load_acquire(slot.tiers); }) ? tiers : uint8_t{0};
}

// Most keys are met on the way from home: one walk finds them. All else, what is absent or in flux, is left to the whole search.
[[gnu::always_inline]] inline uint8_t IndexView::tiers_from(const TableSlot* slots, uint64_t home, const uint8_t* packed) const noexcept {
  const ChunkKey key = ChunkKey::from_bytes(packed);
  uint8_t tiers = 0;
  const uint64_t end = std::min<uint64_t>(home + MAX_PROBE, shape_.slots);
  for (uint64_t position = home; position < end; ++position) {
    bool empty = false;
    const Look look =
        read_slot(slots[position], key, empty, [&](const TableSlot& slot, uint64_t) { tiers = load_acquire(slot.tiers); });
    if (look == Look::FOUND) {
      return tiers;
    }
    if (look == Look::IN_FLUX || empty) {
      break;
    }
  }
  return tiers_behind(home, packed);
}

std::optional<Residency> IndexView::residency(const ChunkKey& key, Tier tier) const noexcept {
  const uint64_t home = home_of(key, seed_, shape_.slots);
  if (tier == shape_.regions.front().tier) {
    const auto entry = find_from(home, key);
    return entry && entry->slot.valid() ? std::optional(Residency{entry->generation, entry->slot}) : std::nullopt;
  }
  Residency found{};
  const auto level = static_cast<size_t>(tier);
  if (further_ == nullptr || level >= TIER_LEVELS ||
      !find_with(home, key, [&](const TableSlot& slot, uint64_t) { found = read_residency(further_[&slot - slots_].of_level[level]); })) {
    return std::nullopt;
  }
  return found.generation == 0 ? std::nullopt : std::optional(found);
}

bool IndexView::is_being_written(const ChunkKey& key) const noexcept {
  const auto entry = find(key);
  const bool has_arena_slot = entry && entry->slot.valid() && (entry->tiers & tier_bit(shape_.regions.front().tier)) == 0;
  return entry && (entry->tiers == 0 || has_arena_slot);
}

size_t IndexView::lookup(const uint8_t* keys, size_t n, uint8_t* levels) const noexcept {
  return remote_ == nullptr ? lookup_here(keys, n, levels) : lookup_anywhere(keys, n, levels);
}

// Most prompts are in this node's tiers to their end or not at all: the remote index is asked about one chunk behind those, and the
// line of the first chunk is on its way meanwhile.
size_t IndexView::lookup_anywhere(const uint8_t* keys, size_t n, uint8_t* levels) const noexcept {
  const auto key_at = [keys](size_t index) { return ChunkKey::from_bytes(keys + index * KEY_BYTES); };
  RemotePlace next{};
  if (n > 0) {
    next = remote_->place_of(key_at(0));
    remote_->prefetch(next);
  }
  const size_t here = lookup_here(keys, n, levels);
  if (here == n) {
    return n;
  }
  next = here == 0 ? next : remote_->place_of(key_at(here));
  if (!remote_->has(next)) {
    return here;
  }
  levels[here] = static_cast<uint8_t>(Tier::PEER);
  struct Places {
    uint64_t home;
    RemotePlace remote;
  };
  std::array<Places, PREFETCH_AHEAD> places{};
  const auto prefetch = [&](size_t index) {
    if (index < n) {
      Places& place = places[index % PREFETCH_AHEAD];
      place = {home_of(key_at(index), seed_, shape_.slots), remote_->place_of(key_at(index))};
      __builtin_prefetch(&slots_[place.home]);
      remote_->prefetch(place.remote);
    }
  };
  for (size_t index = here + 1; index <= here + PREFETCH_AHEAD; ++index) {
    prefetch(index);
  }
  for (size_t index = here + 1; index < n; ++index) {
    const Places place = places[index % PREFETCH_AHEAD];
    prefetch(index + PREFETCH_AHEAD);
    if (const uint8_t tiers = tiers_from(slots_, place.home, keys + index * KEY_BYTES); tiers != 0) {
      levels[index] = static_cast<uint8_t>(std::countr_zero(tiers));
    } else if (remote_->has(place.remote)) {
      levels[index] = static_cast<uint8_t>(Tier::PEER);
    } else {
      return index;
    }
  }
  return n;
}

size_t IndexView::lookup_here(const uint8_t* keys, size_t n, uint8_t* levels) const noexcept {
  std::array<uint64_t, PREFETCH_AHEAD> homes{};
  // In registers: behind each look into shared memory the compiler would read the members again.
  const HashSeed seed = seed_;
  const TableSlot* const slots = slots_;
  const uint64_t count = shape_.slots;
  const auto prefetch = [&](size_t index) {
    if (index < n) {
      const uint64_t home = home_of(ChunkKey::from_bytes(keys + index * KEY_BYTES), seed, count);
      homes[index % PREFETCH_AHEAD] = home;
      __builtin_prefetch(&slots[home]);
    }
  };
  for (size_t index = 0; index < PREFETCH_AHEAD; ++index) {
    prefetch(index);
  }
  for (size_t index = 0; index < n; ++index) {
    const uint64_t home = homes[index % PREFETCH_AHEAD];
    prefetch(index + PREFETCH_AHEAD);
    const uint8_t tiers = tiers_from(slots, home, keys + index * KEY_BYTES);
    if (tiers == 0) {
      return index;
    }
    levels[index] = static_cast<uint8_t>(std::countr_zero(tiers));
  }
  return n;
}

size_t IndexView::last_run(const uint8_t* keys, size_t end, size_t length, bool here, uint8_t* levels) const noexcept {
  const RemoteView* const remote = here ? nullptr : remote_.get();
  std::array<uint64_t, PREFETCH_AHEAD> homes{};
  const auto prefetch = [&](size_t index) {
    const uint64_t home = home_of(ChunkKey::from_bytes(keys + index * KEY_BYTES), seed_, shape_.slots);
    homes[index % PREFETCH_AHEAD] = home;
    __builtin_prefetch(&slots_[home]);
  };
  const size_t ahead = std::min({PREFETCH_AHEAD, length, end});
  for (size_t index = end; index > end - ahead; --index) {
    prefetch(index - 1);
  }
  size_t run_end = end;
  for (size_t next = end; next > 0 && run_end - next < length; --next) {
    const size_t index = next - 1;
    const uint64_t home = homes[index % PREFETCH_AHEAD];
    if (index >= ahead) {
      prefetch(index - ahead);
    }
    const uint8_t* const key = keys + index * KEY_BYTES;
    if (const uint8_t tiers = tiers_from(slots_, home, key); tiers != 0) {
      levels[index] = static_cast<uint8_t>(std::countr_zero(tiers));
    } else if (remote != nullptr && remote->has(remote->place_of(ChunkKey::from_bytes(key)))) {
      levels[index] = static_cast<uint8_t>(Tier::PEER);
    } else {
      run_end = index;
    }
  }
  return run_end;
}

void IndexView::probe(const uint8_t* keys, size_t n, uint8_t* levels) const noexcept {
  struct Places {
    uint64_t home;
    RemotePlace remote;
  };
  std::array<Places, PREFETCH_AHEAD> places{};
  const RemoteView* const remote = remote_.get();
  const auto prefetch = [&](size_t index) {
    if (index < n) {
      const ChunkKey key = ChunkKey::from_bytes(keys + index * KEY_BYTES);
      Places& place = places[index % PREFETCH_AHEAD];
      place.home = home_of(key, seed_, shape_.slots);
      __builtin_prefetch(&slots_[place.home]);
      if (remote != nullptr) {
        place.remote = remote->place_of(key);
        remote->prefetch(place.remote);
      }
    }
  };
  for (size_t index = 0; index < PREFETCH_AHEAD; ++index) {
    prefetch(index);
  }
  constexpr auto dram = static_cast<uint8_t>(Tier::DRAM);
  for (size_t index = 0; index < n; ++index) {
    const Places place = places[index % PREFETCH_AHEAD];
    prefetch(index + PREFETCH_AHEAD);
    const uint8_t tiers = tiers_from(slots_, place.home, keys + index * KEY_BYTES);
    const bool is_there = remote != nullptr && tiers == 0 && remote->has(place.remote);
    levels[index] = tiers != 0 ? std::max(dram, static_cast<uint8_t>(std::countr_zero(tiers)))  // copies are of what DRAM has
                               : static_cast<uint8_t>(is_there ? Tier::PEER : Tier{});
  }
}

void IndexView::probe_names(const uint8_t* roots, size_t ranks, const uint8_t* names, size_t n, uint8_t* levels) const noexcept {
  std::array<uint8_t, PROBED_AT_ONCE * KEY_BYTES> keys;
  std::array<uint8_t, PROBED_AT_ONCE> of_rank;
  for (size_t first = 0; first < n; first += PROBED_AT_ONCE) {
    const size_t count = std::min(PROBED_AT_ONCE, n - first);
    for (size_t rank = 0; rank < ranks; ++rank) {
      name_keys(roots + rank * HASH_BYTES, names + first * HASH_BYTES, count, keys.data());
      probe(keys.data(), count, of_rank.data());
      for (size_t index = 0; index < count; ++index) {
        uint8_t& level = levels[first + index];
        level = rank == 0 ? of_rank[index] : level == 0 || of_rank[index] == 0 ? uint8_t{0} : std::max(level, of_rank[index]);
      }
    }
  }
}

uint64_t IndexView::generation_at(SlotAddress slot) const noexcept {
  const SlotWords* const words = words_at(slot);
  const uint64_t generation = words == nullptr ? 0 : load_acquire(words->generation);
  // The life is read last: bytes that were read before were read in it.
  return is_taken_over() ? 0 : generation;
}

uint32_t IndexView::checksum_at(SlotAddress slot, uint32_t extent) const noexcept {
  const SlotWords* const words = words_at(slot);
  const uint32_t* const sums =
      words == nullptr ? nullptr : regions_[slot.region].find_checksums(*words, uint64_t{extent} + 1);
  return sums == nullptr ? 0 : load_acquire(sums[extent]);
}

uint32_t IndexView::landed_at(SlotAddress slot) const noexcept {
  const uint32_t* const word = landing_word(slot);
  return word == nullptr ? 0 : load_acquire(*word);
}

const uint32_t* IndexView::landing_word(SlotAddress slot) const noexcept {
  const SlotWords* const words = words_at(slot);
  return words == nullptr ? nullptr : &words->landed;
}

bool IndexView::covers(SlotAddress slot, uint32_t extents) const noexcept {
  const SlotWords* const words = words_at(slot);
  return words != nullptr && regions_[slot.region].find_checksums(*words, extents) != nullptr;
}

uint64_t IndexView::count() const noexcept { return load_acquire(header_->count); }

std::string IndexView::epoch() const {
  return {reinterpret_cast<const char*>(header_->epoch), sizeof(header_->epoch)};
}

}  // namespace kvpool
