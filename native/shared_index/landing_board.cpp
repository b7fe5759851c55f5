#include "shared_index/landing_board.h"

#include "base/check.h"
#include "shared_index/landing_wait.h"

namespace kvpool {

LandingBoard::LandingBoard(std::shared_ptr<const Mapping> index) : index_(std::move(index)) {
  KVPOOL_CHECK(index_->is_writable());
  FoundIndex found;
  KVPOOL_CHECK(read_index_header(index_->data(), index_->size(), found));
  for (const RegionHeader& region : found.layout.regions) {
    regions_.push_back(words_of(*index_, region));
  }
}

SlotWords& LandingBoard::words_of_slot(SlotAddress slot) const noexcept {
  KVPOOL_CHECK(slot.region < regions_.size());
  SlotWords* const words = regions_[slot.region].find(slot.number);
  KVPOOL_CHECK(words != nullptr);
  return *words;
}

void LandingBoard::land(SlotAddress slot, uint32_t first, const uint32_t* checksums, uint32_t count) noexcept {
  SlotWords& words = words_of_slot(slot);
  if (words.landed != first) {  // out of order: readers would take what lies between for landed
    publish(words, LANDING_FAILED);
    return;
  }
  uint32_t* const sums = regions_[slot.region].find_checksums(words, uint64_t{first} + count);
  KVPOOL_CHECK(sums != nullptr);
  for (uint32_t index = 0; index < count; ++index) {
    store_release(sums[first + index], checksums[index]);
  }
  publish(words, first + count);
}

void LandingBoard::fail(SlotAddress slot) noexcept { publish(words_of_slot(slot), LANDING_FAILED); }

void LandingBoard::publish(SlotWords& slot, uint32_t word) noexcept {
  store_release(slot.landed, word);
  wake_landing(slot.landed);
}

}  // namespace kvpool
