#include "directory/former_life.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "records/kept_tokens.h"

namespace kvpool {
namespace {

std::optional<RegionHeader> find_words(const Mapping& index, const DirectoryGeometry& geometry) {
  FoundIndex found;
  if (geometry.index.regions.empty() || !read_index_header(index.data(), index.size(), found) || found.layout.regions.empty()) {
    return std::nullopt;
  }
  const RegionHeader& region = found.layout.regions[DRAM_REGION];
  const RegionShape& expected = geometry.index.regions[DRAM_REGION];
  const bool is_alike = region.bytes == expected.bytes && region.slots == expected.slots && region.checksums == expected.checksums &&
                        region.words_offset % PART_ALIGNMENT == 0 && region.checksums_offset % PART_ALIGNMENT == 0;
  return is_alike ? std::optional(region) : std::nullopt;
}

}  // namespace

const char* FormerLife::why_refused(const std::shared_ptr<const Mapping>& index, const std::shared_ptr<const Mapping>& records,
                                    const DirectoryGeometry& geometry) {
  if (!KeptRegion::read(records, geometry.kept())) {
    return "its records have another format, or are of other sizes";
  }
  return index == nullptr || !find_words(*index, geometry) ? "its index has another format, or is of another arena" : nullptr;
}

FormerLife::FormerLife(std::shared_ptr<const Mapping> index, std::shared_ptr<const Mapping> records, const DirectoryGeometry& geometry)
    : index_(std::move(index)),
      kept_(std::move(records), geometry.kept()),
      records_(reinterpret_cast<const ChunkRecord*>(kept_.records())),
      generations_end_(kept_.generations_end()) {
  const auto region = find_words(*index_, geometry);
  KVPOOL_CHECK(region.has_value());
  words_ = words_of(*index_, *region);
}

uint64_t FormerLife::entries() const noexcept { return reinterpret_cast<const IndexHeader*>(index_->data())->count; }

bool FormerLife::is_sealed(uint32_t id) const noexcept {
  const ChunkRecord& of = records_[id];
  const RecordSeal seal = kept_.seals()[id];
  const bool has_parent = seal.parent != UINT32_MAX;
  if (of.generation == 0 || of.generation >= generations_end_ || !of.page.valid() || has_parent != (of.depth != 0) ||
      of.depth >= max_chunks() || (has_parent && seal.parent >= max_chunks())) {
    return false;
  }
  const uint64_t above = has_parent ? records_[seal.parent].generation : 0;
  return seal.crc == seal_of(of, RecordId(id), above);
}

std::optional<uint32_t> FormerLife::segment_of(PageIndex page) const noexcept {
  const uint64_t number = page.valid() ? page.value() / (kept_.shape().segment_bytes / PAGE_BYTES) : UINT64_MAX;
  return number < kept_.shape().segments ? std::optional(static_cast<uint32_t>(number)) : std::nullopt;
}

std::optional<KeptRun> FormerLife::run_at(uint32_t segment) const noexcept {
  const KeptRun run = kept_.runs()[segment];
  const bool is_whole = run.crc == crc_of(run, segment) && run.segments != 0 && run.first <= segment && segment - run.first < run.segments;
  return is_whole ? std::optional(run) : std::nullopt;
}

std::optional<std::span<const uint32_t>> FormerLife::published(const ChunkRecord& record, SlotNumbers slot,
                                                               uint32_t extents) const noexcept {
  const SlotWords* const words = words_.find(slot.number);
  if (words == nullptr || words->generation != record.generation || words->landed != extents ||
      words->first_checksum != slot.first_checksum) {
    return std::nullopt;
  }
  const uint32_t* const sums = words_.find_checksums(*words, extents);
  return sums == nullptr ? std::nullopt : std::optional(std::span(sums, extents));
}

std::span<const int32_t> FormerLife::tokens(uint32_t id) const noexcept {
  return read_cell(kept_.tokens(), kept_.shape().token_bytes, seal(id).tokens, records_[id].generation);
}

void FormerLife::prefetch(uint32_t id) const noexcept {
  __builtin_prefetch(&records_[id]);
  __builtin_prefetch(&records_[id].key);
}

}  // namespace kvpool
