// Classes, ghosts and when to learn. See class_queue_policy.h.
#include "kvpool/class_queue_policy.h"

#include <algorithm>

namespace kvpool {
namespace {

// Requests from one learning to the next.
constexpr uint64_t LEARN_EVERY = 100;
// Measured on traces: one ghost for each chunk is too few to tell what comes again.
constexpr uint64_t GHOSTS_PER_CHUNK = 4;
constexpr uint8_t MAX_TOUCHES = 255;

[[nodiscard]] uint8_t touch_class(uint8_t touches) noexcept {
  return touches >= 5 ? 3 : touches >= 3 ? 2 : touches == 2 ? 1 : 0;
}

}  // namespace

std::unique_ptr<EvictionPolicy> make_policy(PolicyKind kind, uint32_t max_chunks) {
  if (kind == PolicyKind::LRU) {
    return std::make_unique<LruPolicy>();
  }
  return std::make_unique<ClassQueuePolicy>(max_chunks);
}

ClassQueuePolicy::ClassQueuePolicy(uint32_t max_chunks)
    : learned_(model_), ghosts_(GHOSTS_PER_CHUNK * max_chunks), duel_(max_chunks, learned_) {}

uint8_t ClassQueuePolicy::queue_of(const ChunkRecord& record) noexcept {
  return static_cast<uint8_t>(touch_class(record.touches) * CHAIN_SHARES + record.chain_share);
}

double ClassQueuePolicy::worth(uint8_t queue, uint64_t last_access_ns, uint64_t now_ns) const noexcept {
  return duel_.is_by_age() ? static_cast<double>(last_access_ns) : learned_.worth(queue, last_access_ns, now_ns);
}

void ClassQueuePolicy::note_reuse(const ChunkRecord& record, uint64_t now_ns) noexcept {
  if (record.holds == 0) {
    model_.note_end(queue_of(record), now_ns - record.last_access_ns);
    ++learned_uses_;
  }
}

void ClassQueuePolicy::note_new(ChunkRecord& record, uint64_t now_ns) noexcept {
  const Ghost ghost = ghosts_.take(record.key);
  if (ghost.touches != 0) {
    model_.note_end(ghost.queue, uint64_t{tick_of(now_ns) - ghost.used_tick} << TICK_SHIFT);
    ++learned_uses_;
    record.touches = std::max(record.touches, static_cast<uint8_t>(std::min(ghost.touches + 1, int{MAX_TOUCHES})));
  }
}

void ClassQueuePolicy::note_evicted(const ChunkRecord& record) {
  Ghost ghost;
  ghost.used_tick = tick_of(record.last_access_ns);
  ghost.touches = std::max(record.touches, uint8_t{1});
  ghost.queue = queue_of(record);
  ghosts_.add(record.key, ghost);
}

void ClassQueuePolicy::note_uses(ChunkRecords& records, const std::vector<RecordId>& chain, uint64_t now_ns) {
  sampled_.clear();
  bool is_use = false;
  for (const RecordId id : chain) {
    ChunkRecord& record = records[id];
    if (record.is_used) {
      is_use = true;
      record.queue = queue_of(record);
      model_.note_start(record.queue);
    }
    if (duel_.is_sampled(record.key)) {
      sampled_.push_back({record.key, record.queue, record.is_used});
    }
    record.is_used = false;
  }
  if (!is_use) {
    return;
  }
  ghosts_.make_room(GHOSTS_PER_CHUNK * records.alive());
  duel_.note_uses(sampled_, records.alive(), now_ns);
  if (++requests_ % LEARN_EVERY == 0) {
    model_.learn(now_ns);
  }
}

PolicyCounts ClassQueuePolicy::counts() const noexcept {
  return {duel_.is_by_age(), duel_.switches(), learned_uses_};
}

}  // namespace kvpool
