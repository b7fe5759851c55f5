// Commit, end and expiry of reservations. See directory.h.
#include <algorithm>

#include "base/check.h"
#include "directory/directory.h"

namespace kvpool {

std::vector<uint8_t> Directory::commit(HoldId reservation, size_t first, size_t count, const uint32_t* checksums,
                                       uint64_t now_ns, std::span<const int32_t> tokens, CopySources sources) {
  KVPOOL_CHECK(count == 0 || tokens.size() % count == 0);
  KVPOOL_CHECK(sources.generations.empty() || sources.generations.size() == count);
  const size_t chunk_tokens = count == 0 ? 0 : tokens.size() / count;
  latest_ns_ = std::max(latest_ns_, now_ns);
  std::vector<uint8_t> answers(count, static_cast<uint8_t>(SaveState::EXPIRED));
  ReservationState* const found = holds_.find_reservation(reservation);
  if (found == nullptr || found->expired) {
    return answers;
  }
  ReservationState& state = *found;
  const size_t before = state.ancestors + state.first_reserved;
  const size_t reserved = state.records.size() - before;
  for (size_t index = 0; index < count && first < reserved && index < reserved - first; ++index) {
    const RecordId id = state.records[before + first + index];
    ChunkRecord& record = records_[id];
    if (record.state == ChunkState::ZOMBIE) {
      continue;
    }
    if (record.state == ChunkState::WRITING) {
      if (record.parent.valid() && !has_bytes(records_[record.parent].state)) {
        answers[index] = static_cast<uint8_t>(SaveState::NO_PARENT);
        continue;
      }
      const uint64_t source = sources.generations.empty() ? 0 : sources.generations[index];
      if (const auto refusal = why_unpublishable(record, sources.tier, source)) {
        answers[index] = static_cast<uint8_t>(*refusal);
        continue;
      }
      if (!has_landed_as(record, checksums + index * state.layers)) {
        answers[index] = static_cast<uint8_t>(SaveState::CHECKSUM);
        continue;
      }
      tokens_.store(id, tokens.subspan(index * chunk_tokens, chunk_tokens));
      // Before its tiers are set: who finds the key finds its generation.
      table_.publish(record.page, checksums + index * state.layers, state.layers, record.generation);
      --stats_.writing;
      --namespaces_[record.owner.value()].writing;
      --state.writing;
      record.has_writer = false;
      shares_.note_stored(state);
      ++stats_.stored_chunks;
      become_ready(record);
      if (originals_ != nullptr) {
        begin_copy(id);
      }
      report(record, ChangeKind::ARRIVED, Cause::STORED);
    }
    answers[index] = static_cast<uint8_t>(SaveState::STORED);
  }
  return answers;
}

void Directory::abort_writing(RecordId id) noexcept {
  KVPOOL_CHECK(records_[id].holds == 1);
  if (records_[id].touches > 1) {
    --records_[id].touches;  // it was not stored: what was remembered of it is remembered again
    policy_->note_evicted(records_[id]);
  }
  hide(id);
  holds_.unhold(id);
  ++stats_.aborted_chunks;
  free_slot(id);
}

bool Directory::end_reservation(HoldId reservation, uint64_t now_ns) {
  return holds_.find_reservation(reservation) != nullptr && end_part(reservation, SIZE_MAX, now_ns);
}

// From the leaf to the root, as holds end.
bool Directory::end_part(HoldId reservation, size_t limit, uint64_t now_ns) {
  ReservationState* const found = holds_.find_reservation(reservation);
  if (found == nullptr) {
    return true;
  }
  ReservationState& state = *found;
  const HolderBytes before = HolderShares::bytes_of(state);
  const size_t left = state.records.size() - std::min(limit, state.records.size());
  const auto cut = state.records.begin() + static_cast<std::ptrdiff_t>(left);
  std::vector<RecordId> ending(cut, state.records.end());
  state.records.erase(cut, state.records.end());
  for (auto id = ending.rbegin(); id != ending.rend(); ++id) {
    if (records_[*id].state == ChunkState::WRITING) {
      abort_writing(*id);
      --state.writing;
    }
  }
  state.writing = std::min(state.writing, left);  // what was dropped meanwhile counts in it too
  shares_.shorten(reservation, state, before, ending.size());
  std::erase_if(ending, [this](RecordId id) { return records_[id].state == ChunkState::FREE; });
  end_holds(ending, now_ns);
  if (left > 0) {
    state.ancestors = std::min(state.ancestors, left);
    state.first_reserved = std::min(state.first_reserved, left - state.ancestors);
    state.unexpired = std::min(state.unexpired, left);
    return false;
  }
  holds_.close_reservation(reservation);
  return true;
}

bool Directory::expire_reservation(HoldId reservation, uint64_t now_ns) {
  const ReservationState* const found = holds_.find_reservation(reservation);
  return found != nullptr && !found->expired && expire_part(reservation, SIZE_MAX, now_ns);
}

bool Directory::expire_part(HoldId reservation, size_t limit, uint64_t now_ns) {
  ReservationState* const found = holds_.find_reservation(reservation);
  if (found == nullptr || (found->expired && found->unexpired == 0)) {
    return true;
  }
  ReservationState& state = *found;
  const HolderBytes before = HolderShares::bytes_of(state);
  if (!state.expired) {
    state.expired = true;
    state.unexpired = state.records.size();
  }
  const size_t first = state.unexpired - std::min(limit, state.unexpired);
  while (state.unexpired > first) {
    const RecordId id = state.records[--state.unexpired];
    if (records_[id].state == ChunkState::WRITING) {
      make_zombie(id);
      ++stats_.aborted_chunks;
    }
  }
  if (first == 0) {
    const auto is_zombie = [this](RecordId id) { return records_[id].state == ChunkState::ZOMBIE; };
    const auto split = std::stable_partition(state.records.begin(), state.records.end(), is_zombie);
    end_holds(std::vector<RecordId>(split, state.records.end()), now_ns);
    state.records.erase(split, state.records.end());
    state.ancestors = state.first_reserved = 0;
  }
  shares_.change(state, before);
  return first == 0;
}

}  // namespace kvpool
