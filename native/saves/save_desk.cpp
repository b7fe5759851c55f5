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
constexpr uint32_t ROOT = 1, BEHIND = 2;

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
  if ((run.form != ROOT && !is_behind) || run.share != std::array<uint32_t, 4>{} || run.group >= writer.groups.size()) {
    return std::nullopt;
  }
  const WriterGroup& group = writer.groups[run.group];
  if (!group.is_chain || run.chunks == 0 || run.chunks > bounds_.chunks_max ||
      keys.size() != (run.chunks + (is_behind ? size_t{1} : 0)) * KEY_BYTES || saves_.count_of(writer.connection) >= bounds_.saves_max ||
      !directory_.has_room_for(group.size_class, run.chunks)) {
    return std::nullopt;
  }
  const auto parent = is_behind ? std::optional(ChunkKey::from_bytes(keys.data())) : std::nullopt;
  const auto own = keys.subspan(is_behind ? KEY_BYTES : 0);
  MadeSave made{0, run.group,
                directory_.reserve(group.owner, group.size_class, parent, own.data(), run.chunks, now_ns, HolderId(writer.connection),
                                   {run.chunks, true})};
  if (made.slots.states.size() < run.chunks) {
    directory_.end_reservation(made.slots.id, now_ns);  // the next chunk has to wait for room
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
  const auto reserved = std::count(made.slots.states.begin(), made.slots.states.end(), static_cast<uint8_t>(SaveState::RESERVED));
  if (reserved > 0) {
    made.save = saves_.add({0, writer.connection, run.group, made.slots.id, static_cast<uint64_t>(reserved), 0, 0}, now_ns);
  } else if (made.slots.id != 0) {
    directory_.end_reservation(made.slots.id, now_ns);  // what is present was merely touched
  }
  return made;
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
  if (!tokens.empty() && (tokens.size() != count * group.chunk_tokens * sizeof(int32_t) ||
                          group.chunk_tokens + scope.size() / sizeof(int32_t) > TOKEN_IDS_MAX)) {
    return std::nullopt;
  }
  sums_.resize(count * group.extents);
  std::memcpy(sums_.data(), checksums.data(), checksums.size());
  const HoldId holder = found->holder;
  CommittedChunks made{found->group, directory_.commit(holder, found->committed, count, sums_.data(), now_ns, {tokens, scope})};
  const bool is_last = found->committed + count == found->chunks;
  saves_.note_committed(save, count);
  if (is_last) {
    directory_.end_reservation(holder, now_ns);
  }
  return made;
}

}  // namespace kvpool
