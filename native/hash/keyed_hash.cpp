// The seeds of hashes. See keyed_hash.h.
#include "hash/keyed_hash.h"

#include <random>

namespace kvpool {

HashSeed HashSeed::random() {
  std::random_device source;
  const auto word = [&source] { return uint64_t{source()} << 32 | source(); };
  return {{word(), word()}};
}

}  // namespace kvpool
