// Classes, ghosts and when to learn. See class_queue_policy.h.
#include "eviction/class_queue_policy.h"

#include <algorithm>
#include <array>
#include <utility>

namespace kvpool {
namespace {

// Measured on traces: with four, which chunks happened to be forgotten moved the hits by up to two points.
constexpr uint64_t GHOSTS_PER_CHUNK = 8;
constexpr uint8_t MAX_TOUCHES = 255;
// In kept memory the model comes first, then the duel, then the ghosts.
constexpr uint64_t DUEL_OFFSET = round_up(sizeof(SurvivalModel::Memory), PAGE_BYTES);
[[nodiscard]] uint64_t ghosts_offset(uint32_t max_chunks) noexcept { return round_up(DUEL_OFFSET + PolicyDuel::bytes(max_chunks), PAGE_BYTES); }

// The first queue of each number of touches.
constexpr auto QUEUES_BY_TOUCHES = [] {
  std::array<uint8_t, size_t{MAX_TOUCHES} + 1> queues{};
  for (size_t touches = 0; touches < queues.size(); ++touches) {
    queues[touches] = static_cast<uint8_t>(count_class(touches) * CHAIN_KINDS);
  }
  return queues;
}();

}  // namespace

std::unique_ptr<EvictionPolicy> make_policy(PolicyKind kind, uint32_t max_chunks, const HashSeed& seed, uint8_t* kept) {
  if (kind == PolicyKind::LRU) {
    return std::make_unique<LruPolicy>();
  }
  return std::make_unique<ClassQueuePolicy>(max_chunks, seed, kept);
}

uint64_t learned_bytes(uint32_t max_chunks) noexcept {
  return round_up(ghosts_offset(max_chunks) + GhostTable::places_for(GHOSTS_PER_CHUNK * max_chunks) * sizeof(Ghost), PAGE_BYTES);
}

ClassQueuePolicy::ClassQueuePolicy(uint32_t max_chunks, const HashSeed& seed, uint8_t* kept)
    : model_(reinterpret_cast<SurvivalModel::Memory*>(kept)),
      learned_(model_),
      ghosts_(GHOSTS_PER_CHUNK * max_chunks, kept == nullptr ? nullptr : reinterpret_cast<Ghost*>(kept + ghosts_offset(max_chunks))),
      duel_(max_chunks, learned_, seed, kept == nullptr ? nullptr : reinterpret_cast<PolicyDuel::Memory*>(kept + DUEL_OFFSET)) {}

// Reading ghosts that were never written would take memory for them.
void ClassQueuePolicy::restore(const KeptRegion& former, uint64_t chunks) {
  model_.restore(*reinterpret_cast<const SurvivalModel::Memory*>(former.learned()));
  duel_.restore(*reinterpret_cast<const PolicyDuel::Memory*>(former.learned() + DUEL_OFFSET));
  ghosts_.make_room(GHOSTS_PER_CHUNK * chunks);
  const Mapping& mapping = former.mapping();
  const uint64_t first = static_cast<uint64_t>(former.learned() - mapping.data()) + ghosts_offset(former.shape().max_chunks);
  const uint64_t last = first + GhostTable::places_for(GHOSTS_PER_CHUNK * former.shape().max_chunks) * sizeof(Ghost);
  for (Stretch pages = mapping.next_pages(first); pages.begin < std::min(pages.end, last); pages = mapping.next_pages(pages.end)) {
    const auto* const ghosts = reinterpret_cast<const Ghost*>(mapping.data() + pages.begin);
    ghosts_.restore({ghosts, (std::min(pages.end, last) - pages.begin) / sizeof(Ghost)}, QUEUES);
  }
}

uint8_t ClassQueuePolicy::queue_of(const ChunkRecord& record) noexcept {
  return static_cast<uint8_t>(QUEUES_BY_TOUCHES[record.touches] + record.chain_kind);
}

double ClassQueuePolicy::worth(uint8_t queue, uint64_t last_access_ns, uint64_t now_ns) const noexcept {
  return duel_.is_by_age() ? static_cast<double>(last_access_ns) : learned_.worth(queue, last_access_ns, now_ns);
}

void ClassQueuePolicy::note_reuse(uint8_t learned_class, uint64_t last_access_ns, uint32_t chunks, uint64_t now_ns) noexcept {
  model_.note_end(learned_class, now_ns - last_access_ns, chunks);
  learned_uses_ += chunks;
}

void ClassQueuePolicy::note_new(ChunkRecord& record, uint64_t now_ns) noexcept {
  const Ghost ghost = ghosts_.take(record.key);
  if (ghost.touches != 0) {
    model_.note_end(ghost.queue, uint64_t{tick_of(now_ns) - ghost.used_tick} << TICK_SHIFT);
    ++learned_uses_;
    record.turn = ghost.turn;
    record.touches = std::max(record.touches, static_cast<uint8_t>(std::min(ghost.touches + 1, int{MAX_TOUCHES})));
  }
}

void ClassQueuePolicy::note_evicted(const ChunkRecord& record) {
  Ghost ghost;
  ghost.used_tick = tick_of(record.last_access_ns);
  ghost.touches = std::max(record.touches, uint8_t{1});
  ghost.queue = record.learned_class;
  ghost.turn = record.turn;
  ghosts_.add(record.key, ghost);
}

void ClassQueuePolicy::note_uses(ChunkRecords& records, std::span<const RecordId> chain, uint64_t now_ns) {
  sampled_.clear();
  bool is_use = false;
  uint8_t begun_class = 0;  // of intervals that begin, which a chain has mostly in one class: counted together
  uint32_t begun = 0;
  RecordId parent = chain.empty() ? RecordId() : records[chain.front()].parent;
  for (const RecordId id : chain) {
    ChunkRecord& record = records[id];
    if (record.state == ChunkState::WRITING || record.state == ChunkState::ZOMBIE || record.parent != parent) {
      break;  // not stored yet; dropped meanwhile, as is what follows; or the holder of several chains, which is no request
    }
    parent = id;
    const uint8_t own_class = queue_of(record);
    if (record.is_used) {
      is_use = true;
      if (own_class != begun_class) {
        model_.note_start(begun_class, std::exchange(begun, 0));
        begun_class = own_class;
      }
      ++begun;
    } else if (own_class != record.learned_class) {
      model_.move_start(record.learned_class, own_class);  // the request that had used it has stored some more
    }
    if (record.is_used || own_class != record.learned_class) {
      record.queue = own_class;
      record.learned_class = own_class;
    }
    if (duel_.is_sampled(record.key)) {
      sampled_.push_back({record.key, record.queue, record.is_used});
    }
    record.is_used = false;
  }
  model_.note_start(begun_class, begun);
  if (!is_use) {
    return;
  }
  ghosts_.make_room(GHOSTS_PER_CHUNK * records.alive());
  duel_.note_uses(sampled_, records.alive(), now_ns);
  if (model_.count_request() >= SurvivalModel::LEARN_EVERY) {
    model_.learn(now_ns);
  }
}

PolicyCounts ClassQueuePolicy::counts() const noexcept {
  return {duel_.is_by_age(), duel_.switches(), learned_uses_};
}

}  // namespace kvpool
