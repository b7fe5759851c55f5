// Probes, and the shift that closes gaps. See key_map.h.
#include "records/key_map.h"

#include <algorithm>

#include "base/check.h"

namespace kvpool {
namespace {

[[nodiscard]] uint64_t slots_for(uint32_t keys) noexcept { return std::max<uint64_t>(16, uint64_t{keys} * 10 / 7 + 1); }

}  // namespace

KeyMap::KeyMap(uint32_t max_keys, const ChunkRecords& records, const HashSeed& seed)
    : records_(records),
      seed_(seed),
      max_keys_(max_keys),
      slots_(slots_for(max_keys)),
      tags_(slots_),
      ids_(slots_) {}

std::optional<uint64_t> KeyMap::position_of(const ChunkKey& key) const noexcept {
  const uint8_t tag = tag_of(key);
  for (uint64_t position = home(key); tags_[position] != 0; position = behind(position)) {
    if (tags_[position] == tag && records_[RecordId(ids_[position])].key == key) {
      return position;
    }
  }
  return std::nullopt;
}

RecordId KeyMap::find(const ChunkKey& key) const noexcept {
  const auto position = position_of(key);
  return position ? RecordId(ids_[*position]) : RecordId();
}

uint64_t KeyMap::prefetch(const ChunkKey& key) const noexcept {
  const uint64_t position = home(key);
  __builtin_prefetch(&tags_[position]);
  __builtin_prefetch(&ids_[position]);
  return position;
}

void KeyMap::insert(RecordId id) noexcept {
  KVPOOL_CHECK(has_room());
  const ChunkKey& key = records_[id].key;
  uint64_t position = home(key);
  while (tags_[position] != 0) {
    position = behind(position);
  }
  tags_[position] = tag_of(key);
  ids_[position] = id.value();
  ++count_;
}

void KeyMap::erase(const ChunkKey& key) noexcept {
  const auto position = position_of(key);
  KVPOOL_CHECK(position.has_value());
  uint64_t hole = *position;
  for (uint64_t next = behind(hole); tags_[next] != 0; next = behind(next)) {
    // The entry may move back to the hole unless that is before its home, in probe order.
    if (distance(home(records_[RecordId(ids_[next])].key), next) >= distance(hole, next)) {
      tags_[hole] = tags_[next];
      ids_[hole] = ids_[next];
      hole = next;
    }
  }
  tags_[hole] = 0;
  --count_;
}

std::vector<std::string> KeyMap::verify() const {
  std::vector<std::string> broken;
  uint64_t entries = 0;
  for (uint64_t position = 0; position < slots_; ++position) {
    if (tags_[position] == 0) {
      continue;
    }
    ++entries;
    if (ids_[position] >= records_.end()) {
      broken.push_back("key map slot " + std::to_string(position) + " names no record");
    } else if (position_of(records_[RecordId(ids_[position])].key) != position) {
      broken.push_back("key map slot " + std::to_string(position) + " is not where its key is found");
    }
  }
  if (entries != count_ || count_ > max_keys_) {
    broken.push_back("key map counts " + std::to_string(count_) + " keys and holds " + std::to_string(entries));
  }
  return broken;
}

}  // namespace kvpool
