// A reservation as the hold table has it: which chunks a writer holds, and how far it has come. A plain value; the control thread's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/types.h"

namespace kvpool {

struct ReservationState {
  size_t ancestors = 0;       // records before the first key's
  size_t first_reserved = 0;  // leading keys that had records already
  size_t writing = 0;         // not stored yet, those that were dropped meanwhile among them
  bool is_uncertain = false;  // a record before the next one was still on its way from another tier
  bool is_compared = false;   // with the other chunks that its holder holds
  uint64_t counts = 0;        // how often its holder's account had been corrected when it was opened
  size_t found = 0;           // leading records that had been acquired since they were stored
  uint64_t taken_bytes = 0;   // by each record
  uint32_t extents = 0;
  bool expired = false;
  size_t unexpired = 0;       // once expired: leading records that may not be out of sight yet
  NamespaceId owner;
  ClassId size_class;
  HolderId holder;
  std::vector<RecordId> records;  // ancestors; of the keys what is present, others write, or is reserved; once expired: the zombies
  std::vector<uint32_t> written;  // places in `records` of what is reserved, rising; once expired: all
};

}  // namespace kvpool
