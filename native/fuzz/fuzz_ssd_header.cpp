// The header page of a slot on disk, which may hold anything: it decodes to what encodes to the same page, or to a reason.
#include <algorithm>

#include "fuzz_input.h"
#include "checksum/crc32c.h"
#include "ssd/ssd_format.h"

using namespace kvpool;
using kvpool::fuzzing::Input;

namespace {

// Numbers that mostly fit, so that what they are compared with is reached.
void fit_table(Input& input, SsdHeaderFields& fields, SsdPage& page) {
  const auto extents = static_cast<uint32_t>(1 + input.up_to(1100));
  fields.extents = input.number<uint8_t>() < 200 ? extents : fields.extents;
  fields.extent_bytes = input.number<uint8_t>() < 200 ? fields.extent_bytes % (uint64_t{1} << 34) : fields.extent_bytes;
  fields.tokens = input.number<uint8_t>() < 200 ? static_cast<uint32_t>(input.up_to(1100)) : fields.tokens;
  const SsdTableFields table{static_cast<uint32_t>(ssd_header_bytes(extents)), sizeof(SsdEntry), {}};
  std::memcpy(page.data() + sizeof(fields), &table, sizeof(table));
  const SsdEntry entry{input.number<uint32_t>(), static_cast<uint32_t>(fields.extent_bytes)};
  for (uint32_t extent = 0; extent < extents; ++extent) {
    std::memcpy(page.data() + sizeof(fields) + sizeof(table) + extent * sizeof(entry), &entry, sizeof(entry));
  }
}

// Half of the inputs get a magic, a version and a checksum that fit, so that the fields behind them are reached.
SsdPage page_of(Input& input) {
  SsdPage page{};
  const bool is_sealed = input.number<uint8_t>() % 2 == 0;
  const auto bytes = input.bytes(SSD_HEADER_BYTES);
  std::copy(bytes.begin(), bytes.end(), page.begin());
  if (is_sealed) {
    SsdHeaderFields fields;
    std::memcpy(&fields, page.data(), sizeof(fields));
    std::memcpy(fields.magic, SSD_MAGIC, sizeof(fields.magic));
    fields.version = SSD_FORMAT_VERSION;
    fit_table(input, fields, page);
    fields.header_crc = 0;
    std::memcpy(page.data(), &fields, sizeof(fields));
    fields.header_crc = crc32c(0, page.data(), std::max(SSD_HEADER_BYTES, ssd_header_length(page.data())));
    std::memcpy(page.data(), &fields, sizeof(fields));
  }
  return page;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  const SsdPage page = page_of(input);
  const uint64_t size_of_part = PAGE_BYTES * (1 + input.up_to(page.size() / PAGE_BYTES - 1));
  SsdHeader header{};
  if (decode_ssd_header(page.data(), size_of_part, header) != SsdStatus::OK) {
    return 0;
  }
  FUZZ_EXPECT(!header.extent_crcs.empty());
  FUZZ_EXPECT(header.header_bytes() <= size_of_part);
  FUZZ_EXPECT(header.tokens.size() <= ssd_words_beside(header.extent_crcs.size()));
  FUZZ_EXPECT(header.chunk_bytes() / header.extent_crcs.size() == header.extent_bytes);
  SsdPage again;
  encode_ssd_header(header, again.data());
  SsdHeader found{};
  FUZZ_EXPECT(decode_ssd_header(again.data(), header.header_bytes(), found) == SsdStatus::OK);
  FUZZ_EXPECT(compare_ssd_headers(found, header) == SsdStatus::OK);
  FUZZ_EXPECT(found.extent_crcs == header.extent_crcs);
  FUZZ_EXPECT(found.tokens == header.tokens);
  return 0;
}
