// The writer of the remote index. See remote_index.h for the layout and the argument.
#include "remote_index/remote_index.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace kvpool {
namespace {

// As in the shared index (guess).
constexpr size_t REMOTE_AHEAD = 8;

constexpr uint64_t owner_bits(RemoteOwner owner) noexcept { return uint64_t{owner} << OWNER_SHIFT; }

// Entries of one chunk and owner differ in their age alone.
constexpr bool is_pair(uint64_t entry, uint64_t pair) noexcept { return (entry ^ pair) >> OWNER_SHIFT == 0; }

}  // namespace

RemoteIndex::RemoteIndex(std::shared_ptr<const Mapping> mapping, uint64_t buckets, const uint8_t epoch[16],
                         const HashSeed& seed)
    : mapping_(std::move(mapping)),
      bucket_count_(buckets),
      tick_(std::max<uint64_t>(1, buckets * BUCKET_ENTRIES / AGE_TICKS)),
      seed_(seed),
      header_(reinterpret_cast<RemoteHeader*>(mapping_->data())),
      buckets_(reinterpret_cast<RemoteBucket*>(mapping_->data() + PAGE_BYTES)),
      paces_(reinterpret_cast<uint64_t*>(mapping_->data() + paces_at(buckets))) {
  KVPOOL_CHECK(buckets >= MIN_REMOTE_BUCKETS);
  KVPOOL_CHECK(buckets <= MAX_REMOTE_BUCKETS);
  KVPOOL_CHECK(mapping_->is_writable());
  KVPOOL_CHECK(mapping_->size() >= remote_bytes(buckets));
  KVPOOL_CHECK(header_->version == 0);
  std::memcpy(header_->magic, REMOTE_MAGIC, sizeof(REMOTE_MAGIC));
  header_->version = REMOTE_VERSION;
  header_->buckets = buckets;
  std::memcpy(header_->epoch, epoch, sizeof(header_->epoch));
  header_->seed = seed_;
}

uint64_t RemoteIndex::buckets_for(uint64_t pairs) noexcept {
  const uint64_t most = MAX_REMOTE_BUCKETS * BUCKET_ENTRIES;
  const uint64_t entries = std::min(pairs, most) / 4 * 5 + 5;  // filled to 0.8
  return std::clamp((entries + BUCKET_ENTRIES - 1) / BUCKET_ENTRIES, MIN_REMOTE_BUCKETS, MAX_REMOTE_BUCKETS);
}

std::optional<RemoteOwner> RemoteIndex::add_owner() noexcept {
  RemoteOwner owner = last_given_;
  for (uint32_t step = 1; step < OWNER_NUMBERS; ++step) {
    owner = owner % (OWNER_NUMBERS - 1) + 1;
    if (!is_live_[owner] && count_of_[owner] == 0) {
      is_live_[owner] = true;
      store_release(paces_[owner], uint64_t{0});
      uint64_t& word = header_->live[owner / 64];
      store_release(word, word | uint64_t{1} << owner % 64);
      last_given_ = owner;
      return owner;
    }
  }
  return std::nullopt;
}

void RemoteIndex::retire(RemoteOwner owner) noexcept {
  KVPOOL_CHECK(is_live(owner));
  uint64_t& word = header_->live[owner / 64];
  store_release(word, word & ~(uint64_t{1} << owner % 64));
  is_live_[owner] = false;
  dead_ += count_of_[owner];
}

void RemoteIndex::set_pace(RemoteOwner owner, RemotePace pace) noexcept {
  KVPOOL_CHECK(is_live(owner));
  KVPOOL_CHECK(pace.ns_per_mib != 0);
  store_release(paces_[owner], pace_word(pace));
}

void RemoteIndex::store(uint64_t& entry, uint64_t word) noexcept {
  if (entry != 0) {
    const RemoteOwner before = owner_of(entry);
    --count_of_[before];
    --count_;
    dead_ -= is_live_[before] ? 0U : 1U;
  }
  if (word != 0) {
    ++count_of_[owner_of(word)];
    ++count_;
  }
  store_release(entry, word);
}

RemotePlace RemoteIndex::prefetched(const uint8_t* key) const noexcept {
  const RemotePlace place = remote_place(ChunkKey::from_bytes(key), seed_, bucket_count_);
  __builtin_prefetch(&buckets_[place.buckets[0]], 1);
  __builtin_prefetch(&buckets_[place.buckets[1]], 1);
  return place;
}

void RemoteIndex::insert(RemoteOwner owner, const uint8_t* keys, size_t n) noexcept {
  KVPOOL_CHECK(is_live(owner));
  std::array<RemotePlace, REMOTE_AHEAD> places;
  for (size_t index = 0; index < n + REMOTE_AHEAD; ++index) {
    RemotePlace& place = places[index % REMOTE_AHEAD];
    if (index >= REMOTE_AHEAD) {
      insert_one(owner, place);
    }
    if (index < n) {
      place = prefetched(keys + index * KEY_BYTES);
    }
  }
}

void RemoteIndex::remove(RemoteOwner owner, const uint8_t* keys, size_t n) noexcept {
  KVPOOL_CHECK(is_live(owner));
  std::array<RemotePlace, REMOTE_AHEAD> places;
  for (size_t index = 0; index < n + REMOTE_AHEAD; ++index) {
    RemotePlace& place = places[index % REMOTE_AHEAD];
    if (index >= REMOTE_AHEAD) {
      remove_one(owner, place);
    }
    if (index < n) {
      place = prefetched(keys + index * KEY_BYTES);
    }
  }
}

uint64_t* RemoteIndex::find(RemoteOwner owner, const RemotePlace& place) const noexcept {
  const uint64_t pair = place.tag | owner_bits(owner);
  for (const uint64_t bucket : place.buckets) {
    for (uint64_t& entry : buckets_[bucket].entries) {
      if (is_pair(entry, pair)) {
        return &entry;
      }
    }
  }
  return nullptr;
}

// The place of an owner in this table's order of them: the lowest is liked best.
uint64_t RemoteIndex::rank_of(RemoteOwner owner) const noexcept {
  return keyed_hash(ChunkKey{{owner}}, seed_);
}

// The entry that a new pair gets: of too many owners that of the one that is liked least, or none where that is the new one; else a free
// one of the emptier bucket, else its owner's oldest, else the oldest.
uint64_t* RemoteIndex::place_for(RemoteOwner owner, const RemotePlace& place) const noexcept {
  uint64_t* free[2] = {nullptr, nullptr};
  uint32_t free_count[2] = {0, 0};
  uint64_t* oldest = nullptr;
  uint64_t* oldest_own = nullptr;
  std::array<uint64_t*, 2 * BUCKET_ENTRIES> of_chunk;
  size_t owners = 0;
  const auto older = [this](uint64_t* one, uint64_t& other) {
    return one == nullptr || age_of(other) > age_of(*one) ? &other : one;
  };
  for (size_t side = 0; side < 2; ++side) {
    for (uint64_t& entry : buckets_[place.buckets[side]].entries) {
      if (!is_live_[owner_of(entry)]) {
        free[side] = &entry;
        ++free_count[side];
        continue;
      }
      oldest = older(oldest, entry);
      if (owner_of(entry) == owner) {
        oldest_own = older(oldest_own, entry);
      }
      if (has_tag(entry, place.tag)) {
        of_chunk[owners++] = &entry;
      }
    }
  }
  if (owners >= OWNERS_PER_CHUNK) {
    uint64_t* const least = *std::max_element(of_chunk.begin(), of_chunk.begin() + owners, [this](const uint64_t* a, const uint64_t* b) {
      return rank_of(owner_of(*a)) < rank_of(owner_of(*b));
    });
    return rank_of(owner) < rank_of(owner_of(*least)) ? least : nullptr;
  }
  uint64_t* const found = free[free_count[1] > free_count[0] ? 1 : 0];
  return found != nullptr ? found : oldest_own != nullptr ? oldest_own : oldest;
}

void RemoteIndex::insert_one(RemoteOwner owner, const RemotePlace& place) noexcept {
  ++inserts_;
  sweep_bucket(buckets_[hand_]);
  hand_ = hand_ + 1 == bucket_count_ ? 0 : hand_ + 1;
  const uint64_t word = place.tag | owner_bits(owner) | now();
  uint64_t* entry = find(owner, place);
  if (entry == nullptr) {
    entry = place_for(owner, place);
    if (entry == nullptr) {
      return;
    }
    evicted_ += is_live_[owner_of(*entry)] ? 1U : 0U;
  }
  store(*entry, word);
}

void RemoteIndex::remove_one(RemoteOwner owner, const RemotePlace& place) noexcept {
  uint64_t* const entry = find(owner, place);
  if (entry != nullptr) {
    store(*entry, 0);
  }
}

size_t RemoteIndex::owners_at(const RemotePlace& place, Owners& owners) const noexcept {
  size_t count = 0;
  for (const uint64_t bucket : place.buckets) {
    for (const uint64_t entry : buckets_[bucket].entries) {
      if (has_tag(entry, place.tag) && is_live_[owner_of(entry)]) {
        owners[count++] = owner_of(entry);
      }
    }
  }
  return count;
}

std::vector<RemoteRun> RemoteIndex::runs(const uint8_t* keys, size_t n) const {
  std::vector<RemoteRun> runs;
  std::array<RemotePlace, REMOTE_AHEAD> places;
  for (size_t index = 0; index < std::min(n, REMOTE_AHEAD); ++index) {
    places[index] = prefetched(keys + index * KEY_BYTES);
  }
  Owners owners;
  bool is_growing = true;
  for (size_t index = 0; index < n && is_growing; ++index) {
    RemotePlace& place = places[index % REMOTE_AHEAD];
    const size_t count = owners_at(place, owners);
    if (index + REMOTE_AHEAD < n) {
      place = prefetched(keys + (index + REMOTE_AHEAD) * KEY_BYTES);
    }
    for (size_t number = 0; index == 0 && number < count; ++number) {
      runs.push_back({owners[number], 0});
    }
    is_growing = false;
    for (RemoteRun& run : runs) {
      if (run.chunks == index && std::find(owners.begin(), owners.begin() + count, run.owner) != owners.begin() + count) {
        ++run.chunks;
        is_growing = true;
      }
    }
  }
  std::stable_sort(runs.begin(), runs.end(), [](const RemoteRun& a, const RemoteRun& b) { return a.chunks > b.chunks; });
  return runs;
}

std::vector<RemoteKeys> RemoteIndex::keys_by_owner(const uint8_t* keys, size_t n) const {
  std::vector<RemoteKeys> found;
  std::array<RemotePlace, REMOTE_AHEAD> places;
  for (size_t index = 0; index < std::min(n, REMOTE_AHEAD); ++index) {
    places[index] = prefetched(keys + index * KEY_BYTES);
  }
  Owners owners;
  for (size_t index = 0; index < n; ++index) {
    RemotePlace& place = places[index % REMOTE_AHEAD];
    const size_t count = owners_at(place, owners);
    if (index + REMOTE_AHEAD < n) {
      place = prefetched(keys + (index + REMOTE_AHEAD) * KEY_BYTES);
    }
    for (size_t number = 0; number < count; ++number) {
      const RemoteOwner owner = owners[number];
      auto of_owner = std::find_if(found.begin(), found.end(), [owner](const RemoteKeys& one) { return one.owner == owner; });
      if (of_owner == found.end()) {
        of_owner = found.insert(found.end(), {owner, {}});
      }
      if (of_owner->keys.empty() || of_owner->keys.back() != index) {
        of_owner->keys.push_back(static_cast<uint32_t>(index));
      }
    }
  }
  return found;
}

bool RemoteIndex::sweep(uint64_t buckets) noexcept {
  for (; buckets > 0 && dead_ > 0; --buckets) {
    sweep_bucket(buckets_[hand_]);
    hand_ = hand_ + 1 == bucket_count_ ? 0 : hand_ + 1;
  }
  return dead_ > 0;
}

void RemoteIndex::sweep_bucket(RemoteBucket& bucket) noexcept {
  for (uint64_t& entry : bucket.entries) {
    if (entry == 0) {
      continue;
    }
    if (!is_live_[owner_of(entry)]) {
      store(entry, 0);
    } else if (age_of(entry) > AGE_MAX) {
      const uint64_t age = static_cast<uint16_t>(now() - AGE_MAX);
      store_release(entry, entry >> OWNER_SHIFT << OWNER_SHIFT | age);
    }
  }
}

std::vector<std::string> RemoteIndex::verify() const {
  std::vector<std::string> broken;
  std::vector<uint32_t> counts(OWNER_NUMBERS, 0);
  uint64_t position = 0;
  do {
    position = count_part(position, bucket_count_, counts, broken);
  } while (position != 0);
  uint64_t count = 0;
  uint64_t dead = 0;
  for (RemoteOwner owner = 0; owner < OWNER_NUMBERS; ++owner) {
    count += counts[owner];
    dead += is_live_[owner] ? 0 : counts[owner];
    if (counts[owner] != count_of_[owner]) {
      broken.push_back("remote index counts " + std::to_string(count_of_[owner]) + " chunks of owner " +
                       std::to_string(owner) + " and holds " + std::to_string(counts[owner]));
    }
    if ((header_->live[owner / 64] >> owner % 64 & 1) != (is_live_[owner] ? 1U : 0U)) {
      broken.push_back("remote index shows readers another life of owner " + std::to_string(owner));
    }
  }
  if (count != count_ || dead != dead_) {
    broken.push_back("remote index counts " + std::to_string(count_) + " entries, " + std::to_string(dead_) +
                     " of ended owners, and holds " + std::to_string(count) + " and " + std::to_string(dead));
  }
  return broken;
}

uint64_t RemoteIndex::verify_part(uint64_t position, uint64_t limit, std::vector<std::string>& broken) const {
  std::vector<uint32_t> counts(OWNER_NUMBERS, 0);
  return count_part(position, limit, counts, broken);
}

uint64_t RemoteIndex::count_part(uint64_t position, uint64_t limit, std::vector<uint32_t>& counts,
                                 std::vector<std::string>& broken) const {
  const uint64_t at = PAGE_BYTES + position * sizeof(RemoteBucket);
  const Stretch pages = mapping_->next_pages(at);
  const uint64_t begin = std::max(pages.begin, at);
  const uint64_t end = std::min(pages.end, PAGE_BYTES + bucket_count_ * sizeof(RemoteBucket));
  if (begin >= end) {
    return 0;
  }
  position = (begin - PAGE_BYTES) / sizeof(RemoteBucket);
  const uint64_t last = (end - PAGE_BYTES) / sizeof(RemoteBucket);
  for (limit = std::min(limit, last - position); limit > 0; --limit) {
    verify_bucket(buckets_[position], position, counts, broken);
    ++position;
  }
  return position < bucket_count_ ? position : 0;
}

void RemoteIndex::verify_bucket(const RemoteBucket& bucket, uint64_t number, std::vector<uint32_t>& counts,
                                std::vector<std::string>& broken) const {
  for (uint32_t index = 0; index < BUCKET_ENTRIES; ++index) {
    const uint64_t entry = bucket.entries[index];
    if (entry == 0) {
      continue;
    }
    ++counts[owner_of(entry)];
    const auto is_same = [entry](uint64_t other) { return is_pair(entry, other); };
    if (owner_of(entry) == 0 || std::find_if(bucket.entries, bucket.entries + index, is_same) != bucket.entries + index) {
      broken.push_back("remote bucket " + std::to_string(number) + " has an entry without an owner, or twice");
    }
  }
}

}  // namespace kvpool
