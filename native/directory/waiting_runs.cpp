#include "directory/waiting_runs.h"

#include <numeric>

namespace kvpool {

std::vector<std::string> WaitingRuns::verify(const ChunkRecords& records, const HoldTable& holds) const {
  std::vector<std::string> broken;
  uint64_t waiting = 0;
  size_t following = 0;
  for (uint32_t index = 0; index < records.end(); ++index) {
    const ChunkRecord& record = records[RecordId(index)];
    waiting += record.is_waiting() ? 1U : 0U;
    following += record.is_following ? 1U : 0U;
  }
  const uint64_t in_runs = std::accumulate(runs_.begin(), runs_.end(), uint64_t{0}, [&holds](uint64_t sum, const auto& run) {
    return sum + holds.chain_of(run.second.hold).size();
  });
  if (following != following_) {
    broken.push_back("chunks behind others' that are written: " + std::to_string(following) + ", counted " + std::to_string(following_));
  }
  if (waiting != in_runs) {
    broken.push_back("chunks that wait for the one before them: " + std::to_string(waiting) + ", in runs " + std::to_string(in_runs));
  }
  return broken;
}

}  // namespace kvpool
