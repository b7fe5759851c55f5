// The format of the remote index: its header, its buckets, and how an entry is packed.
//
// What it is: fixed layouts, little endian. What it is not: how they are written (remote_index.h) or read (remote_view.h).
//
//   offset 0       RemoteHeader, one page
//   4096           RemoteBucket[buckets], one cache line of eight entries each
//   behind them    a word for each owner: its pace, 0 for an unknown one
//
// A pace says how long chunks of an owner take: the upper half microseconds until the first byte, the lower half nanoseconds for each
// MiB, 1 at least.
//
// An entry is one word, and says that one node has one chunk:
//
//   63         28 27    16 15     0
//   | tag, 36 bits | owner | age |         0: empty. Owners begin at 1.
//
// A chunk's fingerprint is a 64-bit hash of its key under the table's seed. It names two buckets, in either of which its entries
// stand, and the tag by which they are known there. Two keys with one tag in one bucket are taken for each other: of 16 entries
// that a probe looks at one is wrongly right for once in 4 * 10^9 absent keys.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"
#include "hash/keyed_hash.h"

namespace kvpool {

inline constexpr char REMOTE_MAGIC[8] = {'K', 'V', 'P', 'R', 'M', 'O', 'T', 'E'};
inline constexpr uint32_t REMOTE_VERSION = 1;
inline constexpr uint64_t MIN_REMOTE_BUCKETS = 8;
inline constexpr uint64_t MAX_REMOTE_BUCKETS = uint64_t{1} << 28;
inline constexpr uint32_t BUCKET_ENTRIES = 8;
inline constexpr uint32_t OWNER_NUMBERS = 4096;  // 0 is none
inline constexpr uint32_t OWNER_SHIFT = 16;
inline constexpr uint32_t TAG_SHIFT = 28;

struct alignas(64) RemoteHeader {
  char magic[8];
  uint32_t version;
  uint32_t reserved;
  uint64_t buckets;
  uint64_t epoch[2];  // of the daemon
  HashSeed seed;
  alignas(64) uint64_t live[OWNER_NUMBERS / 64];  // a bit for each owner; entries of others count for nothing
};
static_assert(offsetof(RemoteHeader, buckets) == 16);
static_assert(offsetof(RemoteHeader, epoch) == 24);
static_assert(offsetof(RemoteHeader, seed) == 40);
static_assert(offsetof(RemoteHeader, live) == 64);
static_assert(sizeof(RemoteHeader) <= PAGE_BYTES);

struct alignas(64) RemoteBucket {
  uint64_t entries[BUCKET_ENTRIES];
};
static_assert(sizeof(RemoteBucket) == 64);

// How long chunks of an owner take; all 0 where that is not known.
struct RemotePace {
  uint32_t latency_us;
  uint32_t ns_per_mib;
  friend bool operator==(const RemotePace&, const RemotePace&) noexcept = default;
};

[[nodiscard]] constexpr uint64_t pace_word(RemotePace pace) noexcept {
  return uint64_t{pace.latency_us} << 32 | pace.ns_per_mib;
}
[[nodiscard]] constexpr RemotePace pace_in(uint64_t word) noexcept {
  return {static_cast<uint32_t>(word >> 32), static_cast<uint32_t>(word)};
}

// Where the entries of a chunk stand, and the tag that they have, in its place in the word.
struct RemotePlace {
  uint64_t buckets[2];
  uint64_t tag;
};

[[nodiscard]] constexpr uint32_t owner_of(uint64_t entry) noexcept {
  return static_cast<uint32_t>(entry >> OWNER_SHIFT) % OWNER_NUMBERS;
}
[[nodiscard]] constexpr bool has_tag(uint64_t entry, uint64_t tag) noexcept { return (entry ^ tag) >> TAG_SHIFT == 0; }

// REQUIRES: buckets is in range.
[[nodiscard]] inline RemotePlace remote_place(const ChunkKey& key, const HashSeed& seed, uint64_t buckets) noexcept {
  const uint64_t fingerprint = keyed_hash(key, seed);
  const uint64_t first = (fingerprint >> 32) * buckets >> 32;
  const uint64_t second = (fingerprint * 0x9E3779B97F4A7C15U >> 32) * buckets >> 32;
  return {{first, second != first ? second : (first + 1) % buckets}, fingerprint << TAG_SHIFT};
}

[[nodiscard]] constexpr uint64_t paces_at(uint64_t buckets) noexcept { return PAGE_BYTES + buckets * sizeof(RemoteBucket); }

[[nodiscard]] constexpr uint64_t remote_bytes(uint64_t buckets) noexcept {
  return (paces_at(buckets) + OWNER_NUMBERS * sizeof(uint64_t) + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

}  // namespace kvpool
