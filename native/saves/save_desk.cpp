#include "saves/save_desk.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace kvpool {
namespace {

// A run as requests name it: a share of each chunk is written where one of the last four is not 0.
struct AskedRun {
  uint32_t group;
  uint32_t form;
  uint32_t chunks;
  std::array<uint32_t, 4> share;
};
static_assert(sizeof(AskedRun) == 28);

// Forms of a run.
constexpr uint32_t ALONE = 0, ROOT = 1, BEHIND = 2;

[[nodiscard]] bool is_scope(size_t bytes) {
  const size_t words = bytes / sizeof(int32_t);
  return bytes == 0 || (bytes % sizeof(int32_t) == 0 && words >= SCOPE_WORDS_MIN && words <= SCOPE_WORDS_MAX);
}

}  // namespace

std::optional<MadeSave> SaveDesk::reserve(const SaveWriter& writer, std::span<const uint8_t> runs, std::span<const uint8_t> keys,
                                          uint64_t now_ns) {
  AskedRun run;
  if (runs.size() != sizeof(run)) {
    return std::nullopt;
  }
  std::memcpy(&run, runs.data(), sizeof(run));
  const bool is_behind = run.form == BEHIND;
  if (run.form > BEHIND || run.share != std::array<uint32_t, 4>{} || run.group >= writer.groups.size()) {
    return std::nullopt;
  }
  const WriterGroup& group = writer.groups[run.group];
  if ((!group.is_chain && run.form != ALONE) || run.chunks == 0 || run.chunks > bounds_.chunks_max ||
      keys.size() != (run.chunks + (is_behind ? size_t{1} : 0)) * KEY_BYTES || saves_.count_of(writer.connection) >= bounds_.saves_max ||
      !directory_.has_room_for(group.size_class, run.chunks)) {
    return std::nullopt;
  }
  const auto parent = is_behind ? std::optional(ChunkKey::from_bytes(keys.data())) : std::nullopt;
  const auto own = keys.subspan(is_behind ? KEY_BYTES : 0);
  PlainSave save{0, writer.connection, run.group, {}, run.form != ALONE, 0, 0, 0};
  MadeSave made{0, run.group, reserve_run(writer, group, parent, own, save, now_ns)};
  if (made.slots.states.size() < run.chunks) {
    end_slots(save.holders, !group.is_chain, now_ns);  // the next chunk has to wait for room
    return std::nullopt;
  }
  if (reuse_ != nullptr) {
    std::vector<ChunkKey> sampled;
    for (size_t index = 0; index < run.chunks; ++index) {
      const ChunkKey key = ChunkKey::from_bytes(own.data() + index * KEY_BYTES);
      if (reuse_->is_sampled(key)) {
        sampled.push_back(key);
      }
    }
    reuse_->observe(sampled, run.chunks, group.chunk_bytes, now_ns);
  }
  if (save.chunks > 0) {
    made.save = saves_.add(std::move(save), now_ns);
  } else {
    end_slots(save.holders, !group.is_chain, now_ns);  // what is present was merely touched
  }
  return made;
}

// The rows of all chunks, or up to one that has to wait for room; and who holds what was reserved, in `save`.
Reservation SaveDesk::reserve_run(const SaveWriter& writer, const WriterGroup& group, const std::optional<ChunkKey>& parent,
                                  std::span<const uint8_t> keys, PlainSave& save, uint64_t now_ns) {
  const HolderId holder(writer.connection);
  const size_t chunks = keys.size() / KEY_BYTES;
  const auto is_reserved = [](uint8_t state) { return state == static_cast<uint8_t>(SaveState::RESERVED); };
  if (save.is_chain) {
    Reservation made = directory_.reserve(group.owner, group.size_class, parent, keys.data(), chunks, now_ns, holder, {chunks, true});
    save.chunks = static_cast<uint64_t>(std::count_if(made.states.begin(), made.states.end(), is_reserved));
    if (made.id != 0) {
      save.holders.push_back(made.id);
    }
    return made;
  }
  Reservation rows;
  std::vector<HoldId> present;  // held until all are placed: none is evicted for another one of the set
  for (size_t index = 0; index < chunks; ++index) {
    const Reservation made =
        directory_.reserve(group.owner, group.size_class, std::nullopt, keys.data() + index * KEY_BYTES, 1, now_ns, holder,
                           {.limit = 1, .may_wait = true, .is_kept = true});
    if (made.states.empty()) {
      break;
    }
    if (is_reserved(made.states.front())) {
      save.holders.push_back(made.id);
      ++save.chunks;
    } else if (made.id != 0) {
      present.push_back(made.id);
    }
    rows.states.push_back(made.states.front());
    rows.offsets.push_back(made.offsets.front());
    rows.generations.push_back(made.generations.front());
  }
  end_slots(present, !group.is_chain, now_ns);  // it was merely touched
  return rows;
}

// In the order of a set: the first one becomes the newest, or the last one.
void SaveDesk::end_slots(std::span<const HoldId> holders, bool is_last_newest, uint64_t now_ns) {
  const size_t count = holders.size();
  for (size_t index = 0; index < count; ++index) {
    directory_.end_reservation(holders[is_last_newest ? index : count - 1 - index], now_ns);
  }
}

std::optional<CommittedChunks> SaveDesk::commit(const SaveWriter& writer, uint64_t save, std::span<const uint8_t> checksums,
                                                std::span<const uint8_t> tokens, std::span<const uint8_t> scope, uint64_t now_ns) {
  const PlainSave* const found = saves_.find(save, writer.connection);
  if (found == nullptr || found->deadline_ns <= now_ns || found->group >= writer.groups.size()) {
    return std::nullopt;
  }
  const WriterGroup& group = writer.groups[found->group];
  const size_t row = group.extents * sizeof(uint32_t);
  const size_t count = checksums.size() / row;
  if (count == 0 || checksums.size() % row != 0 || count > found->chunks - found->committed || count > bounds_.chunks_max || !is_scope(scope.size())) {
    return std::nullopt;
  }
  if (!keeps_tokens_) {
    tokens = {};
  }
  if (!tokens.empty() && (!found->is_chain || tokens.size() != count * group.chunk_tokens * sizeof(int32_t) ||
                          group.chunk_tokens + scope.size() / sizeof(int32_t) > TOKEN_IDS_MAX)) {
    return std::nullopt;
  }
  sums_.resize(count * group.extents);
  std::memcpy(sums_.data(), checksums.data(), checksums.size());
  const bool is_last = found->committed + count == found->chunks;
  CommittedChunks made{found->group, publish(*found, count, group.extents, {tokens, scope}, now_ns)};
  if (is_last) {
    const PlainSave ended = *saves_.take(save, writer.connection);
    end_slots(ended.holders, !group.is_chain, now_ns);
  } else {
    saves_.note_committed(save, count);
  }
  return made;
}

std::vector<uint8_t> SaveDesk::publish(const PlainSave& save, size_t count, size_t extents, PackedIds ids, uint64_t now_ns) {
  if (save.is_chain) {
    return directory_.commit(save.holders.front(), save.committed, count, sums_.data(), now_ns, ids);
  }
  std::vector<uint8_t> states;
  for (size_t index = 0; index < count; ++index) {
    states.push_back(directory_.commit(save.holders[save.committed + index], 0, 1, sums_.data() + index * extents, now_ns).front());
  }
  return states;
}

}  // namespace kvpool
