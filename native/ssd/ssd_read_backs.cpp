#include "ssd/ssd_read_backs.h"

namespace kvpool {

bool SsdReadBacks::wants_next() {
  const bool is_chosen = !has_begun_ || is_distrusted_ || random_() % SAMPLE == 0;
  has_begun_ = true;
  return is_chosen;
}

void SsdReadBacks::begin(uint64_t job, const SsdOutcome& written) { under_way_.emplace(job, written); }

std::optional<SsdOutcome> SsdReadBacks::end(const SsdOutcome& read) {
  const auto found = under_way_.find(read.job);
  if (found == under_way_.end()) {
    return std::nullopt;
  }
  SsdOutcome written = std::move(found->second);
  under_way_.erase(found);
  const bool is_other = read.status != SsdStatus::OK && read.status != SsdStatus::IO_ERROR && read.status != SsdStatus::CANCELLED;
  written.status = is_other ? SsdStatus::BAD_WRITE : read.status;
  is_distrusted_ = is_distrusted_ || is_other;
  return written;
}

}  // namespace kvpool
