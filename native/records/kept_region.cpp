#include "records/kept_region.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "checksum/crc32c.h"

namespace kvpool {
namespace {

constexpr uint64_t LINE_BYTES = 64;

uint32_t crc_of(const KeptShape& shape) noexcept { return crc32c(0, reinterpret_cast<const uint8_t*>(&shape), sizeof(shape)); }

uint32_t crc_of(const GenerationMark& mark) noexcept {
  return crc32c(0, reinterpret_cast<const uint8_t*>(&mark.end), sizeof(mark.end));
}

bool is_whole(const GenerationMark& mark) noexcept { return mark.end != 0 && mark.end <= GENERATION_END && mark.crc == crc_of(mark); }

}  // namespace

uint32_t crc_of(const KeptRun& run, uint32_t segment) noexcept {
  return crc32c(segment, reinterpret_cast<const uint8_t*>(&run), offsetof(KeptRun, crc));
}

KeptRegion::KeptRegion(std::shared_ptr<const Mapping> mapping, const KeptShape& shape) noexcept
    : mapping_(std::move(mapping)), shape_(shape) {
  KVPOOL_CHECK(mapping_->size() >= bytes(shape_));
}

uint64_t KeptRegion::seals_offset(const KeptShape& shape) noexcept {
  return PAGE_BYTES + uint64_t{shape.max_chunks} * shape.record_bytes;
}

uint64_t KeptRegion::runs_offset(const KeptShape& shape) noexcept {
  return round_up(seals_offset(shape) + shape.max_chunks * sizeof(RecordSeal), LINE_BYTES);
}

uint64_t KeptRegion::tokens_offset(const KeptShape& shape) noexcept {
  return round_up(runs_offset(shape) + shape.segments * sizeof(KeptRun), PAGE_BYTES);
}

uint64_t KeptRegion::learned_offset(const KeptShape& shape) noexcept {
  return round_up(tokens_offset(shape) + shape.token_bytes, PAGE_BYTES);
}

uint64_t KeptRegion::bytes(const KeptShape& shape) noexcept { return round_up(learned_offset(shape) + shape.learned_bytes, PAGE_BYTES); }

std::optional<KeptRegion> KeptRegion::read(std::shared_ptr<const Mapping> mapping, const KeptShape& expected) noexcept {
  if (mapping == nullptr || mapping->size() < bytes(expected)) {
    return std::nullopt;
  }
  KeptHead head;
  std::memcpy(&head, mapping->data(), sizeof(head));
  const bool is_known = std::memcmp(head.magic, KEPT_MAGIC, sizeof(KEPT_MAGIC)) == 0 && head.version == KEPT_VERSION;
  if (!is_known || head.crc != crc_of(head.shape) || !(head.shape == expected)) {
    return std::nullopt;
  }
  return KeptRegion(std::move(mapping), expected);
}

void KeptRegion::format() const noexcept {
  KVPOOL_CHECK(head().version == 0);
  std::memcpy(head().magic, KEPT_MAGIC, sizeof(KEPT_MAGIC));
  head().shape = shape_;
  head().crc = crc_of(shape_);
  keep_order();
  head().version = KEPT_VERSION;
}

std::vector<WrittenSoon> KeptRegion::pages_for(uint64_t records, uint64_t token_bytes) const {
  std::vector<WrittenSoon> pages;
  const auto add = [&](uint64_t begin, uint64_t length) {
    if (length > 0) {
      pages.push_back({mapping_.get(), {begin, begin + length}});
    }
  };
  add(PAGE_BYTES, records * shape_.record_bytes);
  add(seals_offset(shape_), records * sizeof(RecordSeal));
  add(tokens_offset(shape_), token_bytes);
  return pages;
}

uint64_t KeptRegion::used_token_bytes() const noexcept {
  const uint64_t begin = tokens_offset(shape_), end = begin + shape_.token_bytes;
  uint64_t used = 0;
  for (Stretch pages = mapping_->next_pages(begin); pages.begin < std::min(pages.end, end); pages = mapping_->next_pages(pages.end)) {
    used += std::min(pages.end, end) - pages.begin;
  }
  return used;
}

uint64_t KeptRegion::generations_end() const noexcept {
  uint64_t end = 0;
  for (const GenerationMark& mark : head().marks) {
    const GenerationMark read = mark;
    end = is_whole(read) ? std::max(end, read.end) : end;
  }
  return end;
}

// Into the mark that says less, or nothing.
void KeptRegion::set_generations_end(uint64_t end) const noexcept {
  GenerationMark* const marks = head().marks;
  GenerationMark& mark = marks[0].end <= marks[1].end ? marks[0] : marks[1];
  mark.end = end;
  keep_order();
  mark.crc = crc_of(mark);
  keep_order();
}

}  // namespace kvpool
