// The header page of a slot on disk, which may hold anything: it decodes to what encodes to the same page, or to a reason.
#include "fuzz_input.h"
#include "checksum/crc32c.h"
#include "ssd/ssd_format.h"

using namespace kvpool;
using kvpool::fuzzing::Input;

namespace {

// Half of the inputs get a magic, a version and a checksum that fit, so that the fields behind them are reached.
SsdPage page_of(Input& input) {
  SsdPage page{};
  const bool is_sealed = input.number<uint8_t>() % 2 == 0;
  const auto bytes = input.bytes(page.size());
  std::copy(bytes.begin(), bytes.end(), page.begin());
  if (is_sealed) {
    SsdHeaderFields fields;
    std::memcpy(&fields, page.data(), sizeof(fields));
    std::memcpy(fields.magic, SSD_MAGIC, sizeof(fields.magic));
    fields.version = SSD_FORMAT_VERSION;
    fields.header_crc = 0;
    std::memcpy(page.data(), &fields, sizeof(fields));
    fields.header_crc = crc32c(0, page.data(), page.size());
    std::memcpy(page.data(), &fields, sizeof(fields));
  }
  return page;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  const SsdPage page = page_of(input);
  SsdHeader header{};
  if (decode_ssd_header(page.data(), header) != SsdStatus::OK) {
    return 0;
  }
  FUZZ_EXPECT(!header.layer_crcs.empty());
  FUZZ_EXPECT(header.layer_crcs.size() + header.tokens.size() <= SSD_LAYERS_MAX);
  FUZZ_EXPECT(header.chunk_bytes() / header.layer_crcs.size() == header.layer_bytes);
  SsdPage again;
  encode_ssd_header(header, again.data());
  SsdHeader found{};
  FUZZ_EXPECT(decode_ssd_header(again.data(), found) == SsdStatus::OK);
  FUZZ_EXPECT(compare_ssd_headers(found, header) == SsdStatus::OK);
  FUZZ_EXPECT(found.layer_crcs == header.layer_crcs);
  FUZZ_EXPECT(found.tokens == header.tokens);
  return 0;
}
