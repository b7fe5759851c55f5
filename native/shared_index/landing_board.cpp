#include "shared_index/landing_board.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

#include "shared_index/index_words.h"
#include "base/check.h"

namespace kvpool {

LandingBoard::LandingBoard(std::shared_ptr<const Mapping> index)
    : index_(std::move(index)),
      header_(reinterpret_cast<IndexHeader*>(index_->data())),
      shape_{header_->slots, header_->arena_bytes} {
  KVPOOL_CHECK(index_->is_writable());
  KVPOOL_CHECK(header_->version == INDEX_VERSION);
  KVPOOL_CHECK(index_->size() >= shape_.total_bytes());
}

void LandingBoard::land(uint64_t arena_offset, uint32_t first, const uint32_t* checksums, uint32_t count) noexcept {
  auto* words = reinterpret_cast<uint32_t*>(index_->data() + shape_.checksums_offset());
  const uint64_t slot_words = arena_offset / PAGE_BYTES * CHECKSUMS_PER_PAGE;
  KVPOOL_CHECK(slot_words + first + count <= shape_.page_count() * CHECKSUMS_PER_PAGE);
  for (uint32_t index = 0; index < count; ++index) {
    store_release(words[slot_words + first + index], checksums[index]);
  }
  tell(arena_offset, first + count);
}

void LandingBoard::fail(uint64_t arena_offset) noexcept { tell(arena_offset, LANDING_FAILED); }

void LandingBoard::tell(uint64_t arena_offset, uint32_t word) noexcept {
  KVPOOL_CHECK(arena_offset / PAGE_BYTES < shape_.page_count());
  auto* words = reinterpret_cast<uint32_t*>(index_->data() + shape_.landings_offset());
  uint32_t& told = words[arena_offset / PAGE_BYTES];
  store_release(told, word);
  static_cast<void>(syscall(SYS_futex, &told, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0));
}

}  // namespace kvpool
