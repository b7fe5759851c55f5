#include "ssd/ssd_read_backs.h"

namespace kvpool {

bool SsdReadBacks::wants_next() {
  const bool is_chosen = !has_begun_ || is_distrusted_ || random_() % SAMPLE == 0;
  has_begun_ = true;
  return is_chosen;
}

SsdStatus SsdReadBacks::verdict(SsdStatus read) {
  if (read == SsdStatus::OK || read == SsdStatus::IO_ERROR || read == SsdStatus::CANCELLED) {
    return read;
  }
  is_distrusted_ = true;
  return SsdStatus::BAD_WRITE;
}

}  // namespace kvpool
