// The retention ledger alone: cap, ancestors, timers, and random requests against a model.
#include <algorithm>
#include <map>
#include <random>

#include "retention/retention_ledger.h"
#include "tests/harness.h"

using namespace kvpool;

namespace {

constexpr uint64_t CHUNK = 2 * PAGE_BYTES;
constexpr uint64_t SECOND = 1'000'000'000;
constexpr uint32_t CHUNKS = 64;

// Records of stored chunks with their slots, and the ledger over them.
struct Chunks {
  explicit Chunks(double share = 1.0) : records(CHUNKS), arena({16 * PAGE_BYTES, CHUNKS}), ledger(records, arena, CHUNKS * CHUNK) {
    for (uint32_t segment = 0; segment < CHUNKS; ++segment) {
      arena.mark_ready(segment);
    }
    size_class = *arena.add_class(CHUNK, 1);
    ledger.cap(share);
  }
  RecordId add(RecordId parent = RecordId()) {
    const RecordId id = records.allocate();
    records[id].state = ChunkState::READY;
    records[id].size_class = size_class;
    records[id].page = *arena.allocate(size_class, id);
    if (parent.valid()) {
      records.attach_child(parent, id);
    }
    return id;
  }
  void remove(RecordId id) {
    ledger.forget(id);
    records.detach(id);
    arena.release(records[id].page);
    records.release(id);
  }
  std::vector<RecordId> add_chain(size_t length) {
    std::vector<RecordId> chain;
    for (size_t index = 0; index < length; ++index) {
      chain.push_back(add(chain.empty() ? RecordId() : chain.back()));
    }
    return chain;
  }
  bool is_sound() const {
    const auto broken = ledger.verify();
    for (const auto& line : broken) {
      std::printf("  %s\n", line.c_str());
    }
    return broken.empty();
  }

  ChunkRecords records;
  SlotArena arena;
  RetentionLedger ledger;
  ClassId size_class;
};

}  // namespace

TEST(a_retained_chunk_retains_what_precedes_it_and_releases_it_again) {
  Chunks chunks;
  const auto chain = chunks.add_chain(4);
  EXPECT(chunks.ledger.set(chain[2], {80, 0}, 1) == RetainState::ACCEPTED);
  EXPECT(chunks.ledger.counts().chunks == 3);
  EXPECT(chunks.ledger.counts().bytes == 3 * CHUNK);
  EXPECT(chunks.records[chain[0]].is_retained() && !chunks.records[chain[3]].is_retained());
  EXPECT(chunks.is_sound());
  EXPECT(chunks.ledger.set(chain[0], {36, 0}, 2) == RetainState::ACCEPTED);  // for its own sake as well
  EXPECT(chunks.ledger.set(chain[2], {}, 3) == RetainState::ACCEPTED);
  EXPECT(chunks.ledger.released() == 1);
  EXPECT(!chunks.records[chain[1]].is_retained() && chunks.records[chain[0]].is_retained());
  EXPECT(chunks.ledger.counts().chunks == 1);
  EXPECT(chunks.ledger.set(chain[0], {}, 4) == RetainState::ACCEPTED);
  EXPECT(chunks.ledger.released() == 0);
  EXPECT(chunks.ledger.counts().bytes == 0);
  EXPECT(chunks.is_sound());
}

TEST(a_request_beyond_the_cap_is_clipped_and_counts_nothing) {
  Chunks chunks(3.0 / CHUNKS);
  const auto chain = chunks.add_chain(5);
  EXPECT(chunks.ledger.set(chain[3], {80, 1000}, 1) == RetainState::CLIPPED);  // with three ancestors
  EXPECT(chunks.ledger.of(chain[3]) == Retention{});
  EXPECT(!chunks.ledger.next_ns());
  EXPECT(chunks.ledger.set(chain[2], {80, 0}, 2) == RetainState::ACCEPTED);
  EXPECT(chunks.ledger.set(chain[3], {80, 0}, 3) == RetainState::CLIPPED);
  EXPECT(chunks.ledger.set(chain[1], {100, 0}, 4) == RetainState::ACCEPTED);  // retained already
  EXPECT(chunks.ledger.set(chain[4], {0, 0}, 5) == RetainState::ACCEPTED);    // below the default: the cap is not asked
  EXPECT(chunks.ledger.counts().clipped == 2);
  EXPECT(chunks.ledger.counts().chunks == 3);
  chunks.ledger.cap(0);
  EXPECT(chunks.ledger.counts().chunks == 3);  // what is retained stays
  EXPECT(chunks.is_sound());
}

TEST(a_chunk_that_leaves_takes_its_retention_and_its_timer_along) {
  Chunks chunks;
  const auto chain = chunks.add_chain(3);
  EXPECT(chunks.ledger.set(chain[2], {80, 1000}, SECOND) == RetainState::ACCEPTED);
  chunks.ledger.start_timer(chain[2], 2 * SECOND, SECOND);
  EXPECT(chunks.ledger.next_ns().has_value());
  chunks.remove(chain[2]);
  EXPECT(chunks.ledger.released() == 2);
  EXPECT(!chunks.ledger.next_ns());
  EXPECT(chunks.ledger.counts().chunks == 0);
  EXPECT(!chunks.ledger.take_due(10 * SECOND).valid());
  EXPECT(chunks.is_sound());
}

TEST(a_duration_counts_from_the_last_use_or_from_the_request) {
  Chunks chunks;
  const RecordId id = chunks.add();
  const ChunkRecord& record = chunks.records[id];
  EXPECT(chunks.ledger.set(id, {80, 5000}, 10 * SECOND) == RetainState::ACCEPTED);
  chunks.records[id].last_access_ns = 20 * SECOND;
  EXPECT(chunks.ledger.expiry(record, DurationStart::LAST_USE, 30 * SECOND) == 25 * SECOND);
  const uint64_t requested = chunks.ledger.since(record, DurationStart::RETENTION, 30 * SECOND);
  EXPECT(requested >= 9 * SECOND && requested <= 11 * SECOND);  // in ticks
  chunks.records[id].holds = 1;
  EXPECT(chunks.ledger.expiry(record, DurationStart::RETENTION, 30 * SECOND) == 35 * SECOND);  // in use now
  chunks.ledger.start_timer(id, 25 * SECOND, 10 * SECOND);
  chunks.ledger.restart(id, 28 * SECOND);
  EXPECT(!chunks.ledger.next_ns());
  chunks.records[id].holds = 0;
  EXPECT(chunks.ledger.since(record, DurationStart::RETENTION, 30 * SECOND) >= 27 * SECOND);
}

TEST(only_a_listed_expiry_is_reported_and_once) {
  Chunks chunks;
  const RecordId one = chunks.add();
  const RecordId other = chunks.add();
  chunks.records[other].key = ChunkKey{{7, 7, 7, 7}};
  chunks.ledger.note_expired(one, false);
  chunks.ledger.note_expired(other, true);
  EXPECT(chunks.ledger.counts().expired == 2);
  EXPECT(chunks.ledger.take_expired() == std::vector<ChunkKey>{chunks.records[other].key});
  EXPECT(chunks.ledger.take_expired().empty());
}

TEST(random_requests_agree_with_a_model) {
  std::mt19937_64 random(kvpool::testing::seed());
  constexpr uint64_t MAX = 24;  // chunks, retained
  Chunks chunks(static_cast<double>(MAX) / CHUNKS);
  std::map<uint32_t, Retention> model;  // of the chunks that there are
  const auto is_retained = [&](RecordId id) {
    const auto follows = [&](uint32_t other) {
      for (RecordId at(other); at.valid(); at = chunks.records[at].parent) {
        if (at == id) {
          return true;
        }
      }
      return false;
    };
    return std::any_of(model.begin(), model.end(), [&](const auto& each) { return each.second.priority > DEFAULT_PRIORITY && follows(each.first); });
  };
  const auto any = [&] { return RecordId(std::next(model.begin(), static_cast<std::ptrdiff_t>(random() % model.size()))->first); };
  uint64_t now = SECOND;
  for (int step = 0; step < 4000; ++step) {
    now += random() % SECOND;
    chunks.ledger.begin_request();
    const uint64_t choice = random() % 10;
    if (model.empty() || (choice < 3 && model.size() < CHUNKS)) {
      model.emplace(chunks.add(model.empty() || random() % 4 == 0 ? RecordId() : any()).value(), Retention{});
    } else if (choice < 5) {
      const RecordId id = any();
      if (!chunks.records[id].first_child.valid()) {
        model.erase(id.value());
        chunks.remove(id);
      }
    } else {
      const RecordId id = any();
      const Retention request{static_cast<uint8_t>(random() % (MAX_PRIORITY + 1)), static_cast<uint32_t>(random() % 3 * 1000)};
      uint64_t further = 0;  // chunks that it would have retained
      for (RecordId at = id; at.valid(); at = chunks.records[at].parent) {
        further += is_retained(at) ? 0U : 1U;
      }
      const bool is_clipped = request.priority > DEFAULT_PRIORITY && further > 0 && chunks.ledger.counts().chunks + further > MAX;
      const RetainState state = chunks.ledger.set(id, request, now);
      EXPECT((state == RetainState::CLIPPED) == is_clipped);
      model[id.value()] = is_clipped ? Retention{} : request;
      if (model[id.value()].priority == DEFAULT_PRIORITY) {
        model[id.value()].duration_ms = 0;
      }
      chunks.ledger.start_timer(id, chunks.ledger.expiry(chunks.records[id], DurationStart::LAST_USE, now), now);
    }
    for (RecordId id = chunks.ledger.take_due(now); id.valid(); id = chunks.ledger.take_due(now)) {
      const uint64_t due = chunks.ledger.expiry(chunks.records[id], DurationStart::LAST_USE, now);
      if (due > now) {
        chunks.ledger.start_timer(id, due, now);
      } else {
        EXPECT(chunks.ledger.set(id, {}, now) == RetainState::ACCEPTED);
        model[id.value()] = Retention{};
      }
    }
    uint64_t retained = 0;
    for (const auto& [id, retention] : model) {
      EXPECT(chunks.ledger.of(RecordId(id)) == retention);
      retained += is_retained(RecordId(id)) ? 1U : 0U;
    }
    EXPECT(chunks.ledger.counts().chunks == retained && retained <= MAX);
    EXPECT(step % 50 != 0 || chunks.is_sound());
  }
}
