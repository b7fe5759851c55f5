// What is remembered of chunks that were evicted: how often they were used, when last, and in which queue they stood.
//
// What it is: a table of 16 bytes a chunk, in buckets of eight; a full bucket forgets the one that was used longest ago.
// What it is not: exact. It grows with the tier up to the size given to it, and then forgets what would stand elsewhere: that
// is before the tier is full, when little has been evicted. Its memory is the system's zeros until it is used, and
// may outlive the process (kept_region.h): a ghost that a kill has left half written is of nobody, or as good as another.
// Threads: the control thread only. O(1) per operation.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>
#include <utility>

#include "base/types.h"

namespace kvpool {

struct Ghost {
  uint64_t tag = 0;
  uint32_t used_tick = 0;  // last use
  uint8_t touches = 0;     // 0: the place is free
  uint8_t queue = 0;
  uint8_t turn = 0;    // as in the record
  uint8_t unused = 0;
};
static_assert(sizeof(Ghost) == 16);

class GhostTable {
 public:
  // Of how many places a table is at most that remembers so many chunks.
  [[nodiscard]] static constexpr uint64_t places_for(uint64_t chunks_max) noexcept {
    return std::max(BUCKET, std::bit_ceil(chunks_max));
  }
  // In zeroed memory of `places_for(chunks_max)` ghosts that lives as long; in its own where that is nullptr. REQUIRES: chunks_max > 0.
  explicit GhostTable(uint64_t chunks_max, Ghost* memory = nullptr)
      : places_max_(places_for(chunks_max)),
        ghosts_(memory != nullptr ? memory : static_cast<Ghost*>(std::calloc(places_max_, sizeof(Ghost))),
                memory != nullptr ? [](void*) {} : &std::free) {
    if (ghosts_ == nullptr) {
      throw std::bad_alloc();
    }
  }

  // Has room for at least so many, as far as it may grow.
  void make_room(uint64_t chunks) noexcept {
    places_ = std::max(places_, std::min(places_max_, std::bit_ceil(chunks)));
  }

  // Asks the cache for the bucket of a key: two lines.
  void prefetch(const ChunkKey& key) const noexcept {
    const Ghost* const bucket = bucket_of(tag_of(key));
    __builtin_prefetch(bucket, 1);
    __builtin_prefetch(bucket + BUCKET / 2, 1);
  }

  // Remembers what a former table did, as far as there is room. `ghosts` may say anything: any value in range might have been.
  void restore(std::span<const Ghost> ghosts, uint8_t queues) noexcept {
    for (const Ghost& ghost : ghosts) {
      if (ghost.touches != 0 && ghost.queue < queues) {
        insert(ghost);
      }
    }
  }

  // REQUIRES: ghost.touches > 0.
  void add(const ChunkKey& key, Ghost ghost) noexcept {
    ghost.tag = tag_of(key);
    insert(ghost);
  }

  // The chunk's ghost, which is then forgotten; `touches` 0 where there is none.
  [[nodiscard]] Ghost take(const ChunkKey& key) noexcept {
    const uint64_t tag = tag_of(key);
    Ghost* bucket = bucket_of(tag);
    for (uint64_t place = 0; place < BUCKET; ++place) {
      if (bucket[place].touches != 0 && bucket[place].tag == tag) {
        return std::exchange(bucket[place], Ghost{});
      }
    }
    return {};
  }

 private:
  static constexpr uint64_t BUCKET = 8;
  static constexpr uint64_t PLACES_MIN = 4096;  // 64 KiB

  // Keys are hashes already.
  [[nodiscard]] static uint64_t tag_of(const ChunkKey& key) noexcept { return key.words[0]; }
  [[nodiscard]] Ghost* bucket_of(uint64_t tag) const noexcept {
    return &ghosts_.get()[tag & (places_ - 1) & ~(BUCKET - 1)];
  }

  void insert(const Ghost& ghost) noexcept {
    Ghost* bucket = bucket_of(ghost.tag);
    Ghost* target = bucket;
    for (uint64_t place = 0; place < BUCKET; ++place) {
      Ghost& other = bucket[place];
      if (other.touches == 0 || other.tag == ghost.tag) {
        target = &other;
        break;
      }
      target = static_cast<int32_t>(other.used_tick - target->used_tick) < 0 ? &other : target;
    }
    *target = ghost;
  }

  const uint64_t places_max_;
  uint64_t places_ = std::min(places_max_, PLACES_MIN);
  std::unique_ptr<Ghost, void (*)(void*)> ghosts_;
};

}  // namespace kvpool
