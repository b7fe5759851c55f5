#include "directory/change_runs.h"

#include <algorithm>

#include "base/check.h"
#include "directory/directory.h"

namespace kvpool {
namespace {

RunKind kind_of(uint8_t before, uint8_t after) {
  if (before == 0) {
    return RunKind::STORED;
  }
  return after != 0 ? RunKind::UPDATED : RunKind::REMOVED;
}

uint8_t tiers_before(const Change& change) {
  const auto bit = static_cast<uint8_t>(1U << change.level);
  switch (change.kind) {
    case ChangeKind::ARRIVED:
      return static_cast<uint8_t>(change.tiers & ~bit);
    case ChangeKind::LEFT:
      return static_cast<uint8_t>(change.tiers | bit);
    case ChangeKind::PRIORITY:
      break;
  }
  return change.tiers;
}

bool have_same_traits(const Change& a, const Change& b) {
  return a.owner == b.owner && a.tiers == b.tiers && a.cause == b.cause && a.priority == b.priority &&
         a.priority_before == b.priority_before;
}

}  // namespace

ChangeRuns cut_runs(std::span<const Change> rows, const Directory& memory, size_t payload_max) {
  ChangeRuns found;
  found.ids.resize(rows.size());
  size_t payload = 0;
  for (size_t index = 0; index < rows.size(); ++index) {
    const Change& row = rows[index];
    ScopedIds& ids = found.ids[index];
    if (row.kind == ChangeKind::ARRIVED) {
      KVPOOL_CHECK(row.owner < memory.namespaces());
      ids = split_scope(memory.tokens_of(row.key, RecordId(row.record)), memory.chunk_tokens(NamespaceId(row.owner)));
    }
    const uint8_t before = tiers_before(row);
    const RunKind kind = kind_of(before, row.tiers);
    const size_t bytes = KEY_BYTES + ids.tokens.size_bytes();
    const auto joins = [&](const ChangeRun& run) {
      const ScopedIds& last = found.ids[index - 1];
      return kind == run.kind && kind != RunKind::UPDATED && before == run.tiers_before &&
             have_same_traits(row, rows[run.first]) && payload + bytes <= payload_max &&
             std::ranges::equal(ids.scope, last.scope) &&
             (kind == RunKind::REMOVED || (row.parent == rows[index - 1].key && ids.tokens.size() == last.tokens.size()));
    };
    if (found.runs.empty() || !joins(found.runs.back())) {
      found.runs.push_back({index, index, kind, before});
      payload = 0;
    }
    found.runs.back().end = index + 1;
    payload += bytes;
  }
  return found;
}

}  // namespace kvpool
