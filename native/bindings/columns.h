// What bindings share: packed columns, keys, and the checks of ids. Little endian.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "base/check.h"
#include "directory/directory.h"

namespace kvpool {

static_assert(std::endian::native == std::endian::little);

template <typename Word>
[[nodiscard]] inline nanobind::bytes pack(const std::vector<Word>& words) {
  return nanobind::bytes(words.data(), words.size() * sizeof(Word));
}

// REQUIRES: whole words.
template <typename Word>
[[nodiscard]] inline std::vector<Word> unpacked(const nanobind::bytes& packed) {
  std::vector<Word> words(packed.size() / sizeof(Word));
  if (!words.empty()) {
    std::memcpy(words.data(), packed.data(), packed.size());
  }
  return words;
}

// The words themselves, as long as the object lives. REQUIRES: whole words.
template <typename Word>
[[nodiscard]] inline std::span<const Word> words_in(const nanobind::bytes& packed) {
  const auto* const words = static_cast<const Word*>(packed.data());
  KVPOOL_CHECK(reinterpret_cast<uintptr_t>(words) % alignof(Word) == 0);  // Python aligns the bytes of an object to 16
  return {words, packed.size() / sizeof(Word)};
}

// Statistics by name: numbers alone, or anything.
using Counts = nanobind::typed<nanobind::dict, nanobind::str, int>;
using Fields = nanobind::typed<nanobind::dict, nanobind::str, nanobind::any>;

// What `reserve` and `promote` answer.
struct Reserved {
  HoldId id;
  nanobind::bytes states;
  nanobind::bytes offsets;
  nanobind::bytes generations;
  nanobind::bytes slots;
};

[[nodiscard]] inline Reserved reserved(const Reservation& answer) {
  return {answer.id, pack(answer.states), pack(answer.offsets), pack(answer.generations), pack(answer.slots)};
}

// A row for each chunk of holds, by column.
struct HoldColumns {
  nanobind::bytes offsets;
  nanobind::bytes generations;
  nanobind::bytes levels;
  nanobind::bytes slots;
};

[[nodiscard]] inline HoldColumns packed_columns(const Columns& columns) {
  return {pack(columns.offsets), pack(columns.generations), pack(columns.levels), pack(columns.slots)};
}

[[nodiscard]] inline const uint8_t* packed_keys(const nanobind::bytes& keys) {
  if (keys.size() % KEY_BYTES != 0) {
    throw nanobind::value_error("keys must be a multiple of 32 bytes");
  }
  return static_cast<const uint8_t*>(keys.data());
}

[[nodiscard]] inline ChunkKey one_key(const nanobind::bytes& key) {
  if (key.size() != KEY_BYTES) {
    throw nanobind::value_error("a key must be 32 bytes");
  }
  return ChunkKey::from_bytes(static_cast<const uint8_t*>(key.data()));
}

// No bytes: the root.
[[nodiscard]] inline std::optional<ChunkKey> key_or_none(const nanobind::bytes& key) {
  return key.size() == 0 ? std::nullopt : std::optional(one_key(key));
}

[[nodiscard]] inline NamespaceId known_namespace(const Directory& directory, uint32_t owner) {
  if (owner >= directory.namespaces()) {
    throw nanobind::index_error("unknown namespace");
  }
  return NamespaceId(owner);
}

[[nodiscard]] inline Tier known_tier(uint32_t level) {
  if (level >= MAX_TIERS) {
    throw nanobind::value_error("level must be 0 to 7");
  }
  return static_cast<Tier>(level);
}

[[nodiscard]] inline std::vector<int32_t> token_ids(const nanobind::bytes& packed) {
  if (packed.size() % sizeof(int32_t) != 0 || packed.size() / sizeof(int32_t) > TOKEN_IDS_MAX) {
    throw nanobind::value_error("token ids must be 4 bytes each, 4096 for each chunk at most");
  }
  std::vector<int32_t> ids(packed.size() / sizeof(int32_t));
  std::copy_n(static_cast<const uint8_t*>(packed.data()), packed.size(), reinterpret_cast<uint8_t*>(ids.data()));
  return ids;
}

// No bytes: a seed of the process's own.
[[nodiscard]] inline HashSeed seed_of(const nanobind::bytes& seed) {
  if (seed.size() == 0) {
    return HashSeed::random();
  }
  if (seed.size() != sizeof(HashSeed)) {
    throw nanobind::value_error("seed must be 16 bytes");
  }
  HashSeed chosen{};
  std::memcpy(&chosen, seed.data(), sizeof(chosen));
  return chosen;
}

inline void require_known(bool known) {
  if (!known) {
    throw nanobind::key_error("unknown hold or reservation");
  }
}

}  // namespace kvpool
