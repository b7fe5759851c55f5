// Two shadows and who leads. See policy_duel.h.
#include "eviction/policy_duel.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <unordered_set>

#include "base/check.h"
#include "checksum/crc32c.h"

namespace kvpool {
namespace {

// A tier of no more chunks is not sampled; of a larger one a shadow holds about so many as SAMPLED_CHUNKS.
constexpr uint32_t WHOLE_CHUNKS = 8192;
constexpr uint32_t SAMPLED_CHUNKS = 4096;
// A shadow forgets as many chunks as it gets, and what stands behind one in the map is looked at then: it is never half full.
constexpr uint32_t PLACES_PER_CHUNK = 2;
// Of a request's hits this much counts after the next one.
constexpr double HITS_DECAY = 0.998;
// The other one must lead by this much, or a tie would be decided anew all the time.
constexpr double LEAD = 0.01;
// And by so many standard deviations of what chance would have made of as many requests: one long prompt is no proof.
constexpr double DEVIATIONS = 1.5;
const ClassId ONLY_CLASS(0);

[[nodiscard]] uint32_t crc_of(const PolicyDuel::Score& score) noexcept {
  constexpr size_t BEGIN = offsetof(PolicyDuel::Score, crc) + sizeof(score.crc);
  return crc32c(0, reinterpret_cast<const uint8_t*>(&score) + BEGIN, sizeof(score) - BEGIN);
}

[[nodiscard]] bool is_whole(const PolicyDuel::Score& score) noexcept {
  return score.requests != 0 && score.crc == crc_of(score) && std::isfinite(score.oldest_hits) && std::isfinite(score.cheapest_hits) &&
         score.variance >= 0;
}

[[nodiscard]] uint64_t mask_for(uint32_t max_chunks) noexcept {
  return max_chunks <= WHOLE_CHUNKS ? 0 : std::bit_floor(std::max(1U, max_chunks / SAMPLED_CHUNKS)) - 1;
}

// What a shadow of a tier holds at most.
[[nodiscard]] uint32_t shadow_chunks(uint32_t max_chunks) noexcept {
  return static_cast<uint32_t>(max_chunks / (mask_for(max_chunks) + 1) + 1);
}

}  // namespace

PolicyShadow::PolicyShadow(uint32_t chunks_max, const EvictionPolicy& policy, ChunkRecord* memory)
    : chunks_max_(chunks_max),
      records_(chunks_max, memory),
      queues_(records_, policy),
      places_(PLACES_PER_CHUNK * chunks_max, records_) {
  queues_.add_class();
}

// What has no whole chain above it is left out, and all but one of those with the same key.
void PolicyShadow::restore(const ChunkRecord* former) {
  std::unordered_set<uint64_t> words;
  std::vector<uint32_t> last;  // where chains were used up to: those that nothing follows which was used then or later
  std::vector<bool> is_here(chunks_max_), is_followed(chunks_max_);
  for (uint32_t id = 0; id < chunks_max_; ++id) {
    const ChunkRecord& record = former[id];
    is_here[id] = record.size_class == ONLY_CLASS && record.queue < EvictionPolicy::QUEUES && words.insert(record.key.words[0]).second;
  }
  const auto is_behind = [&](uint32_t id, uint32_t above) {
    return above < chunks_max_ && is_here[above] && former[above].depth + 1 == former[id].depth;
  };
  for (uint32_t id = 0; id < chunks_max_; ++id) {
    if (const uint32_t above = former[id].parent.value(); is_here[id] && is_behind(id, above)) {
      is_followed[above] = is_followed[above] || former[id].last_access_ns >= former[above].last_access_ns;
    }
  }
  for (uint32_t id = 0; id < chunks_max_; ++id) {
    if (is_here[id] && !is_followed[id]) {
      last.push_back(id);
    }
  }
  std::ranges::sort(last, {}, [&](uint32_t id) { return former[id].last_access_ns; });
  std::vector<SampledUse> chain;
  for (const uint32_t leaf : last) {
    chain.clear();
    uint32_t id = leaf;
    for (; former[id].depth != 0 && is_behind(id, former[id].parent.value()); id = former[id].parent.value()) {
      chain.push_back({former[id].key, former[id].queue});
    }
    chain.push_back({former[id].key, former[id].queue});
    std::ranges::reverse(chain);
    if (former[id].depth == 0) {
      static_cast<void>(use(chain, chunks_max_, former[leaf].last_access_ns));
    }
  }
}

void PolicyShadow::evict(RecordId id) noexcept {
  queues_.remove(id);
  places_.erase(records_[id].key);
  records_.detach(id);
  records_.release(id);
}

// Takes a chunk and all that follows it out, where it is here: it has come again behind another parent.
void PolicyShadow::forget(const ChunkKey& key) noexcept {
  const RecordId top = places_.find(key);
  if (!top.valid()) {
    return;
  }
  for (RecordId id = top, parent;; id = parent) {
    while (records_[id].first_child.valid()) {
      id = records_[id].first_child;
    }
    parent = records_[id].parent;
    evict(id);
    if (id == top) {
      return;
    }
  }
}

// The chunk with this key that follows `parent`; unset where there is none. Most have one child: that needs no search.
RecordId PolicyShadow::behind(RecordId parent, const ChunkKey& key) const noexcept {
  if (parent.valid()) {
    const RecordId child = records_[parent].first_child;
    if (!child.valid() || records_[child].key == key) {
      return child;
    }
  }
  const RecordId found = places_.find(key);
  return found.valid() && records_[found].parent == parent ? found : RecordId();
}

// `chain_` is a path from the root, and exactly what is out of the queues meanwhile: a victim's child always stands in one.
uint64_t PolicyShadow::use(const std::vector<SampledUse>& chain, uint32_t limit, uint64_t now_ns) {
  uint64_t hits = 0;
  chain_.clear();
  for (const SampledUse& use : chain) {
    const RecordId found = behind(chain_.empty() ? RecordId() : chain_.back(), use.key);
    if (!found.valid()) {
      break;  // nor is what follows: a shadow holds whole prefixes
    }
    chain_.push_back(found);
    hits += use.counts ? 1U : 0U;
  }
  queues_.remove_all(chain_);  // what is being used is nobody's victim
  for (size_t index = chain_.size(); index < chain.size(); ++index) {
    forget(chain[index].key);
    while (records_.is_full() || records_.alive() >= limit) {
      const RecordId victim = queues_.victim(ONLY_CLASS, now_ns);
      if (!victim.valid()) {
        break;
      }
      evict(victim);
    }
    if (records_.is_full() || records_.alive() >= limit) {
      break;
    }
    const RecordId fresh = records_.allocate();
    records_[fresh].key = chain[index].key;
    records_[fresh].size_class = ONLY_CLASS;
    if (!chain_.empty()) {
      records_.attach_child(chain_.back(), fresh);
    }
    places_.insert(fresh);
    chain_.push_back(fresh);
  }
  for (size_t index = 0; index < chain_.size(); ++index) {
    ChunkRecord& record = records_[chain_[index]];
    record.last_access_ns = now_ns;
    record.queue = chain[index].queue;
  }
  queues_.add_all(chain_);
  return hits;
}

PolicyDuel::PolicyDuel(uint32_t max_chunks, const EvictionPolicy& learned, const HashSeed& seed, Memory* memory)
    : max_chunks_(max_chunks),
      mask_(mask_for(max_chunks)),
      memory_(memory),
      oldest_(shadow_chunks(max_chunks), by_age_, memory == nullptr ? nullptr : memory->shadows()),
      cheapest_(shadow_chunks(max_chunks), learned, memory == nullptr ? nullptr : memory->shadows() + shadow_chunks(max_chunks)) {
  score_.seed = seed;
}

uint64_t PolicyDuel::bytes(uint32_t max_chunks) noexcept {
  return sizeof(Memory) + uint64_t{2} * shadow_chunks(max_chunks) * sizeof(ChunkRecord);
}

void PolicyDuel::restore(const Memory& former) {
  for (const Score& score : former.scores) {
    if (is_whole(score) && score.requests > score_.requests) {
      score_ = score;
    }
  }
  if (score_.requests != 0) {  // their chunks are of its sample
    oldest_.restore(former.shadows());
    cheapest_.restore(former.shadows() + shadow_chunks(max_chunks_));
    keep_score();
  }
}

void PolicyDuel::keep_score() noexcept {
  if (memory_ != nullptr) {
    score_.crc = crc_of(score_);
    memory_->scores[score_.requests % 2] = score_;
  }
}

void PolicyDuel::note_uses(const std::vector<SampledUse>& chain, uint64_t chunks, uint64_t now_ns) {
  const auto limit = static_cast<uint32_t>(std::max<uint64_t>(1, chunks / (mask_ + 1)));
  const auto by_age = static_cast<double>(oldest_.use(chain, limit, now_ns));
  const auto by_worth = static_cast<double>(cheapest_.use(chain, limit, now_ns));
  auto& [crc, is_by_age, requests, seed, oldest_hits, cheapest_hits, variance] = score_;
  oldest_hits = oldest_hits * HITS_DECAY + by_age;
  cheapest_hits = cheapest_hits * HITS_DECAY + by_worth;
  variance = variance * HITS_DECAY + (by_age - by_worth) * (by_age - by_worth);
  const double lead = is_by_age != 0 ? cheapest_hits - oldest_hits : oldest_hits - cheapest_hits;
  const double needed = LEAD * (is_by_age != 0 ? oldest_hits : cheapest_hits);
  const bool is_overtaken = lead > needed && lead > DEVIATIONS * std::sqrt(variance);
  if (is_overtaken) {
    is_by_age ^= 1U;
    ++switches_;
  }
  ++requests;
  keep_score();
}

}  // namespace kvpool
