// Frames about leases and plain saves with arbitrary content, and good ones with a number or a byte changed: whatever is served leaves
// every hold with a lease of its connection and every reservation with a save, consumes whole frames, and answers each request but a release
// once.
#include <algorithm>
#include <memory>

#include "directory/directory.h"
#include "fuzz_input.h"
#include "leases/lease_frames.h"

using namespace kvpool;
using kvpool::fuzzing::Input;

namespace {

constexpr uint8_t EPOCH[16] = {9};
constexpr uint64_t CHUNK = PAGE_BYTES;
constexpr size_t CHAIN = 8, ALONE = 4, LEASES_MAX = 6, SAVES_MAX = 4, SAVED_MAX = 12;
constexpr uint32_t TOKENS = 4;
constexpr LeaseKinds KINDS{10, 11, 62, 13, 4};
constexpr SaveKinds SAVE_KINDS{20, 21, 22, 23};
constexpr uint64_t TTL_NS = 1000;

void append(std::vector<uint8_t>& out, const std::vector<uint8_t>& more) { out.insert(out.end(), more.begin(), more.end()); }

std::vector<uint8_t> key_of(uint8_t number) {
  std::vector<uint8_t> key(KEY_BYTES, number);
  return key;
}

std::vector<uint8_t> keys_of(uint8_t first, size_t count) {
  std::vector<uint8_t> keys;
  for (size_t index = 0; index < count; ++index) {
    append(keys, key_of(static_cast<uint8_t>(first + index)));
  }
  return keys;
}

uint64_t standing_clock() { return 0; }

// A pool with a chain and some chunks without a parent, and a session whose layout has a full group and a window.
struct Setting {
  Setting()
      : geometry(*DirectoryGeometry::plan(64 * CHUNK, 64 * CHUNK, 64, 0, nullptr)),
        arena(Mapping::create("arena", geometry.arena.total_bytes(), false).mapping),
        index(Mapping::create("index", geometry.index.total_bytes(), false).mapping),
        directory(arena, index, geometry, EPOCH, Tier::DRAM, PolicyKind::LRU),
        size_class(*directory.add_class(CHUNK, 1)) {
    directory.mark_segment_ready(0);
    reader.connection = 7;
    reader.holder = HolderId(7);
    reader.ranks = {0};
    reader.has_groups = true;
    reader.groups = {{true, UINT64_MAX, {directory.add_namespace()}, {CHUNK}}, {false, ALONE, {directory.add_namespace()}, {CHUNK}}};
    writer.connection = 7;
    writer.groups = {{true, reader.groups[0].namespaces[0], size_class, 1, TOKENS, CHUNK},
                     {false, reader.groups[1].namespaces[0], size_class, 1, TOKENS, CHUNK}};
    store(reader.groups[0].namespaces[0], keys_of(1, CHAIN));
    for (uint8_t number = 0; number < ALONE; ++number) {
      store(reader.groups[1].namespaces[0], key_of(static_cast<uint8_t>(101 + number)));
    }
  }

  void store(NamespaceId owner, const std::vector<uint8_t>& keys) {
    const size_t count = keys.size() / KEY_BYTES;
    const std::vector<uint32_t> sums(count, 1);
    const Reservation made = directory.reserve(owner, size_class, std::nullopt, keys.data(), count, 1);
    static_cast<void>(directory.commit(made.id, 0, count, sums.data()));
    directory.end_reservation(made.id, 1);
  }

  DirectoryGeometry geometry;
  std::shared_ptr<Mapping> arena;
  std::shared_ptr<Mapping> index;
  Directory directory;
  ClassId size_class;
  Reader reader;
  LeaseTable leases{TTL_NS};
  EndingHolds ending{directory, 64, 4};
  LeaseDesk desk{directory, leases, ending, nullptr, {LEASES_MAX, 1000, 100, 20, true}};
  VerbTimes times{{10, 62, 13, 20, 22}, {1000}};
  PlainSaves saves{TTL_NS};
  SaveWriter writer;
  SaveDesk save_desk{directory, saves, nullptr, {SAVES_MAX, SAVED_MAX}, true};
  SaveFrames save_frames{save_desk, SAVE_KINDS};
  LeaseFrames frames{desk, times, save_frames, KINDS, {4096, 64, 2000}, standing_clock};
};

std::vector<uint8_t> bin(const std::vector<uint8_t>& bytes) {
  std::vector<uint8_t> packed{0xc5, static_cast<uint8_t>(bytes.size() >> 8), static_cast<uint8_t>(bytes.size())};
  append(packed, bytes);
  return packed;
}

// A Reserve of a chain from the root, behind the stored one, or behind a chunk that may be being saved; or of chunks that are each alone.
std::vector<uint8_t> reserve_of(Input& input) {
  const auto chunks = static_cast<uint32_t>(1 + input.up_to(SAVED_MAX));
  const auto form = static_cast<uint32_t>(input.up_to(2));
  uint32_t run[7] = {0, form, chunks, 0, 0, 0, 0};
  if (input.up_to(7) == 0) {
    run[input.up_to(6)] = static_cast<uint32_t>(input.up_to(3));
  }
  std::vector<uint8_t> packed(sizeof(run));
  std::memcpy(packed.data(), run, sizeof(run));
  std::vector<uint8_t> keys;
  if (form == 2) {
    keys = key_of(static_cast<uint8_t>(input.up_to(1) == 0 ? CHAIN : 20 + input.up_to(60)));
  }
  append(keys, keys_of(static_cast<uint8_t>(input.up_to(3) == 0 ? 1 : 20 + input.up_to(60)), chunks));
  std::vector<uint8_t> body{0x96, 20, 7};
  append(body, bin(packed));
  append(body, bin(keys));
  append(body, {0xc4, 0, 0xc4, 0});
  return body;
}

std::vector<uint8_t> commit_of(Input& input) {
  const size_t chunks = 1 + input.up_to(4);
  std::vector<uint8_t> body{0x96, 22, 8, static_cast<uint8_t>(1 + input.up_to(20))};
  append(body, bin(std::vector<uint8_t>(chunks * sizeof(uint32_t), 1)));
  append(body, bin(std::vector<uint8_t>(input.up_to(1) * chunks * TOKENS * sizeof(int32_t), 2)));
  append(body, bin(std::vector<uint8_t>(input.up_to(1) * 16, 3)));
  return body;
}

// A frame that is right but for what the input says.
std::vector<uint8_t> frame_of(Input& input) {
  std::vector<uint8_t> body;
  const auto choice = input.up_to(6);
  if (choice == 0) {
    append(body, {0x96, 10, 5});
    auto keys = keys_of(1, input.up_to(1) == 0 ? 1 : CHAIN);
    if (keys.size() == KEY_BYTES) {
      keys = key_of(CHAIN);
    }
    append(keys, keys_of(101, input.up_to(7) == 0 ? input.up_to(6) : ALONE));
    append(body, bin(keys));
    append(body, {static_cast<uint8_t>(input.up_to(7) == 0 ? input.up_to(127) : CHAIN), 0xa0, 0});
  } else if (choice == 6) {
    append(body, {0x96, 10, 5});
    auto keys = keys_of(static_cast<uint8_t>(input.up_to(1) == 0 ? 99 : 18 + input.up_to(60)), 1 + input.up_to(7));
    append(keys, input.up_to(3) == 0 ? keys : std::vector<uint8_t>());
    append(body, bin(keys));
    append(body, {static_cast<uint8_t>(input.up_to(7) == 0 ? 1 : 0), 0xa0, static_cast<uint8_t>(1 + input.up_to(2))});
  } else if (choice == 3) {
    body = input.bytes(input.up_to(60));
  } else if (choice == 4) {
    body = reserve_of(input);
  } else if (choice == 5) {
    body = commit_of(input);
  } else {
    append(body, {0x93, static_cast<uint8_t>(choice == 1 ? 62 : 13), 6});
    std::vector<uint8_t> numbers(8 * input.up_to(4));
    for (size_t at = 0; at < numbers.size(); at += 8) {
      numbers[at] = static_cast<uint8_t>(1 + input.up_to(12));
    }
    append(body, bin(numbers));
  }
  if (!body.empty() && input.up_to(3) == 0) {
    body[input.up_to(body.size() - 1)] = input.number<uint8_t>();
  }
  std::vector<uint8_t> frame{static_cast<uint8_t>(body.size()), static_cast<uint8_t>(body.size() >> 8), 0, 0};
  append(frame, body);
  if (input.up_to(15) == 0) {
    frame[input.up_to(3)] = input.number<uint8_t>();
  }
  return frame;
}

// How many whole frames these are. REQUIRES: nothing else.
size_t count_frames(const std::vector<uint8_t>& bytes, size_t end) {
  size_t count = 0;
  for (size_t at = 0; at < end; ++count) {
    FUZZ_EXPECT(at + sizeof(uint32_t) <= end);
    uint32_t length = 0;
    std::memcpy(&length, bytes.data() + at, sizeof(length));
    at += sizeof(length) + length;
    FUZZ_EXPECT(at <= end);
  }
  return count;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  Setting setting;
  uint64_t now_ns = 1;
  while (!input.is_empty()) {
    std::vector<uint8_t> arrived;
    for (uint64_t count = 1 + input.up_to(3); count > 0; --count) {
      append(arrived, frame_of(input));
    }
    now_ns += input.up_to(200);
    const auto served = setting.frames.serve(setting.reader, input.up_to(7) == 0 ? nullptr : &setting.writer, arrived, now_ns, 1);
    FUZZ_EXPECT(served.consumed <= arrived.size());
    const size_t requests = count_frames(arrived, served.consumed);
    FUZZ_EXPECT(count_frames(served.answers, served.answers.size()) <= requests);
    int64_t left = 1000;
    const auto expired = setting.leases.expire(now_ns, left, 1);
    while (setting.ending.release_holds({}, now_ns)) {
    }
    setting.ending.release_holds(expired, now_ns);
    size_t holds = setting.ending.size();
    for (const Lease* const lease : setting.leases.all()) {
      FUZZ_EXPECT(lease->owner == 7 && lease->chunks > 0 && lease->holds.size() == (lease->set_group ? 1 : 2));
      holds += lease->holds.size();
    }
    FUZZ_EXPECT(setting.leases.size() <= LEASES_MAX && setting.leases.verify().empty());
    FUZZ_EXPECT(setting.directory.stats().holds - setting.directory.stats().waiting_runs == holds);
    for (const PlainSave& save : setting.saves.take_expired(now_ns)) {
      for (const HoldId holder : save.holders) {
        setting.directory.end_reservation(holder, now_ns);
      }
    }
    FUZZ_EXPECT(setting.saves.size() <= SAVES_MAX && setting.saves.verify().empty());
    FUZZ_EXPECT(setting.directory.stats().reservations == setting.saves.holders().size());
  }
  FUZZ_EXPECT(setting.directory.verify().empty());
  return 0;
}
