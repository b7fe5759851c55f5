// Commit, end and expiry of reservations. See directory.h.
//
// A chunk that is committed behind one that another reservation still writes waits, out of sight and held, and is published with that
// one; when that one is given up, it goes with it.
#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "directory/directory.h"

namespace kvpool {
namespace {

// Records that are asked of the memory before they are published, and what they name half as long before.
constexpr size_t RECORDS_AHEAD = 8;

}  // namespace

std::vector<uint8_t> Directory::commit(HoldId reservation, size_t first, size_t count, const uint32_t* checksums,
                                       uint64_t now_ns, PackedIds ids, CopySources sources) {
  KVPOOL_CHECK(count == 0 || ids.tokens.size() % count == 0);
  KVPOOL_CHECK(sources.generations.empty() || sources.generations.size() == count);
  const size_t ids_bytes = count == 0 ? 0 : ids.tokens.size() / count;  // of a chunk
  latest_ns_ = std::max(latest_ns_, now_ns);
  std::vector<uint8_t> answers(count, static_cast<uint8_t>(SaveState::EXPIRED));
  ReservationState* const found = holds_.find_reservation(reservation);
  if (found == nullptr || found->expired) {
    return answers;
  }
  ReservationState& state = *found;
  const size_t reserved = state.written.size();
  std::vector<RecordId> waiting;
  std::vector<uint32_t> sums;
  const size_t end = first < reserved ? std::min(count, reserved - first) : 0;
  const auto id_at = [&](size_t index) { return state.records[state.written[first + index]]; };
  size_t stored = 0;
  for (size_t index = 0; index < end; ++index) {
    const RecordId id = id_at(index);
    if (index + RECORDS_AHEAD < end) {
      records_.prefetch_whole(id_at(index + RECORDS_AHEAD));
      prefetch_chunk(id_at(index + RECORDS_AHEAD / 2));
    }
    ChunkRecord& record = records_[id];
    if (record.state == ChunkState::ZOMBIE) {
      if (has_clients()) {
        answers[index] = static_cast<uint8_t>(SaveState::NO_PARENT);  // it was dropped with what precedes it
      }
      continue;
    }
    if (record.state == ChunkState::WRITING && record.has_writer) {
      const bool has_parent = !record.parent.valid() || records_[record.parent].has_bytes();
      const bool is_own = first + index > 0 && state.records[state.written[first + index - 1]] == record.parent;
      if (!has_parent && (!may_follow(records_[record.parent]) || (is_own && records_[record.parent].has_writer))) {
        answers[index] = static_cast<uint8_t>(SaveState::NO_PARENT);  // the one before it is to be committed first
        continue;
      }
      const uint64_t source = sources.generations.empty() ? 0 : sources.generations[index];
      if (const auto refusal = why_unpublishable(record, sources.tier, source)) {
        answers[index] = static_cast<uint8_t>(*refusal);
        continue;
      }
      if (!has_landed_as(record, checksums + index * state.extents)) {
        answers[index] = static_cast<uint8_t>(SaveState::CHECKSUM);
        continue;
      }
      tokens_.store(id, {ids.tokens.subspan(index * ids_bytes, ids_bytes), ids.scope});
      --state.writing;
      record.has_writer = false;
      ++stored;
      if (has_parent) {
        publish(id, checksums + index * state.extents);
        publish_waiting(id, now_ns);
      } else {
        if (!waiting.empty() && waiting.back() != record.parent) {
          keep_waiting(waiting, sums, state.holder);  // another's chunk is in between
        }
        waiting.push_back(id);
        sums.insert(sums.end(), checksums + index * state.extents, checksums + (index + 1) * state.extents);
      }
    }
    answers[index] = static_cast<uint8_t>(record.is_waiting() ? SaveState::PART : SaveState::STORED);
  }
  shares_.note_stored(state, stored);
  keep_waiting(waiting, sums, state.holder);
  return answers;
}

// Holds a run of chunks, each the parent of the next, until the chunk before them can be found. Leaves both arguments empty.
void Directory::keep_waiting(std::vector<RecordId>& run, std::vector<uint32_t>& checksums, HolderId holder) {
  if (run.empty()) {
    return;
  }
  const RecordId leading = run.front();
  const HoldId hold = make_hold(std::exchange(run, {})).id;
  shares_.charge({hold}, holder);
  waiting_.add_run(leading, {hold, std::exchange(checksums, {})});
}

// REQUIRES: nobody writes the chunk any more, and the one before it can be found.
void Directory::publish(RecordId id, const uint32_t* checksums) noexcept {
  ChunkRecord& record = records_[id];
  waiting_.end_following(record);
  // Before its tiers are set: who finds the key finds its generation.
  table_.publish(record.page, checksums, arena_.size_class(record.size_class).extents, record.generation);
  --stats_.writing;
  --namespaces_[record.owner.value()].writing;
  ++stats_.stored_chunks;
  become_ready(record);
  if (originals_ != nullptr) {
    originals_->begin_copy(id);
  }
  reports_.report(record, ChangeKind::ARRIVED, Cause::STORED);
}

// What waits for this chunk, and for that in turn.
void Directory::publish_waiting(RecordId parent, uint64_t now_ns) {
  if (waiting_.count() == 0) {
    return;
  }
  std::vector<RecordId> published{parent};
  std::vector<HoldId> ended;
  for (size_t next = 0; next < published.size() && waiting_.count() > 0; ++next) {
    for (RecordId child = records_[published[next]].first_child; child.valid(); child = records_[child].next_sibling) {
      const auto run = waiting_.take_run(child);
      if (!run) {
        continue;
      }
      const HoldTable::Records& records = *holds_.find_hold(run->hold);
      for (size_t index = 0; index < records.size(); ++index) {
        publish(records[index], run->checksums.data() + index * (run->checksums.size() / records.size()));
      }
      published.insert(published.end(), records.begin(), records.end());
      ended.push_back(run->hold);
    }
  }
  for (auto hold = ended.rbegin(); hold != ended.rend(); ++hold) {
    release(*hold, now_ns);
  }
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
  for (; !state.written.empty() && state.written.back() >= left; state.written.pop_back()) {
    const RecordId id = ending[state.written.back() - left];
    if (!records_[id].has_writer) {
      continue;
    }
    if (records_[id].state == ChunkState::WRITING) {
      --state.writing;
      if (records_[id].holds == 1 && !records_[id].first_child.valid()) {
        abort_writing(id);
        continue;
      }
      remove_subtree(id);  // others wait for it
    }
    end_writer(id);
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
  std::vector<uint32_t> written(state.written.begin(), std::ranges::lower_bound(state.written, state.unexpired));
  while (state.unexpired > first) {
    const RecordId id = state.records[--state.unexpired];
    if (written.empty() || written.back() != state.unexpired) {
      continue;
    }
    written.pop_back();
    if (records_[id].state == ChunkState::WRITING && records_[id].has_writer) {
      remove_subtree(id);
    }
  }
  if (first == 0) {
    std::vector<RecordId> left;
    for (const uint32_t place : state.written) {
      if (records_[state.records[place]].state == ChunkState::ZOMBIE) {
        left.push_back(std::exchange(state.records[place], RecordId()));
      }
    }
    std::erase_if(state.records, [](RecordId id) { return !id.valid(); });
    end_holds(std::exchange(state.records, std::move(left)), now_ns);
    state.written.resize(state.records.size());
    std::iota(state.written.begin(), state.written.end(), 0U);
    state.ancestors = state.first_reserved = 0;
  }
  shares_.change(state, before);
  return first == 0;
}

}  // namespace kvpool
