// A reader of a remote index with arbitrary content: it may answer anything, but ends, and reads nothing outside.
#include <algorithm>

#include "fuzz_input.h"
#include "remote_index/remote_view.h"

using namespace kvpool;
using kvpool::fuzzing::Input;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  const uint64_t buckets = 8 + input.up_to(200);
  const bool is_right = input.number<uint8_t>() % 8 != 0;
  const auto region = Mapping::create("fuzz-remote", is_right ? remote_bytes(buckets) : (1 + input.up_to(4)) * PAGE_BYTES, false).mapping;
  FUZZ_EXPECT(region != nullptr);
  RemoteHeader header{};
  std::memcpy(header.magic, REMOTE_MAGIC, sizeof(REMOTE_MAGIC));
  header.version = is_right || input.number<uint8_t>() % 4 != 0 ? REMOTE_VERSION : input.number<uint32_t>();
  header.buckets = is_right ? buckets : input.awkward();
  header.seed = {{input.number<uint64_t>(), input.number<uint64_t>()}};
  const auto pattern = input.bytes(2048);
  if (!pattern.empty()) {
    for (uint64_t at = 0; at < region->size(); at += pattern.size()) {
      std::memcpy(region->data() + at, pattern.data(), std::min<uint64_t>(pattern.size(), region->size() - at));
    }
  }
  std::memcpy(region->data(), &header, offsetof(RemoteHeader, live));
  const auto view = RemoteView::attach(region);
  FUZZ_EXPECT(!is_right || view != nullptr);
  if (view == nullptr) {
    return 0;
  }
  FUZZ_EXPECT(remote_bytes(header.buckets) <= region->size());
  for (uint64_t look = 0; look < 64; ++look) {
    const ChunkKey key{{input.number<uint64_t>(), look, 3, 4}};
    RemotePlace place = view->place_of(key);
    FUZZ_EXPECT(place.buckets[0] < header.buckets && place.buckets[1] < header.buckets);
    FUZZ_EXPECT(place.buckets[0] != place.buckets[1]);
    static_cast<void>(view->has(place));
    const auto* const bucket = reinterpret_cast<const RemoteBucket*>(region->data() + PAGE_BYTES) + place.buckets[look % 2];
    place.tag = bucket->entries[look % BUCKET_ENTRIES] >> TAG_SHIFT << TAG_SHIFT;
    static_cast<void>(view->has(place));
    static_cast<void>(view->pace_of(place));
  }
  FUZZ_EXPECT(view->epoch().size() == 16);
  return 0;
}
