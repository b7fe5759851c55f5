// The shares of holders alone, over a hold table and an arena: what counts once, what is refused, what a user's holders have together.
#include <vector>

#include "holds/holder_shares.h"
#include "tests/harness.h"

using namespace kvpool;

namespace {

constexpr uint64_t CHUNK = 2 * PAGE_BYTES;
constexpr uint32_t CHUNKS = 32;
const HolderId ONE(1);
const HolderId OTHER(2);

// A chain of stored chunks in an arena of CHUNKS, of which each holder may protect half.
struct Shared {
  Shared() : records(CHUNKS), arena({16 * PAGE_BYTES, CHUNKS}), table(records), shares(table, records, arena, CHUNKS * CHUNK, CHUNKS) {
    for (uint32_t segment = 0; segment < CHUNKS; ++segment) {
      arena.mark_ready(segment);
    }
    size_class = *arena.add_class(CHUNK, 1);
    for (uint32_t index = 0; index < CHUNKS; ++index) {
      const RecordId id = records.allocate();
      records[id].state = ChunkState::READY;
      records[id].size_class = size_class;
      records[id].page = *arena.allocate(size_class, id);
      if (index > 0) {
        records.attach_child(chain.back(), id);
      }
      chain.push_back(id);
    }
    shares.limit(0.5);
  }
  HoldTable::Records first(size_t count) const { return {chain.begin(), chain.begin() + static_cast<std::ptrdiff_t>(count)}; }
  HoldId hold(size_t count) {
    for (const RecordId id : first(count)) {
      if (table.hold(id)) {
        shares.protect(size_class);
      }
    }
    return table.open_hold(first(count)).id;
  }
  void release(HoldId hold) {
    const auto records_of = table.close_hold(hold);
    shares.end(hold, *records_of);
    for (auto id = records_of->rbegin(); id != records_of->rend(); ++id) {
      if (table.unhold(*id)) {
        shares.unprotect(size_class);
      }
    }
  }
  bool is_sound() const {
    auto broken = shares.verify();
    for (const auto& line : table.verify()) {
      broken.push_back(line);
    }
    for (const auto& line : broken) {
      std::printf("  %s\n", line.c_str());
    }
    return broken.empty();
  }

  ChunkRecords records;
  SlotArena arena;
  HoldTable table;
  HolderShares shares;
  ClassId size_class;
  HoldTable::Records chain;
};

}  // namespace

TEST(a_holder_protects_half_and_the_same_chunks_twice_for_nothing) {
  Shared shared;
  const HoldId half = shared.hold(CHUNKS / 2);
  EXPECT(shared.shares.affordable(ONE, {half}, {shared.size_class}, CHUNKS / 2) == CHUNKS / 2);
  EXPECT(shared.shares.charge({half}, ONE));
  EXPECT(!shared.shares.charge({half}, OTHER));  // counts already
  const HoldId again = shared.hold(CHUNKS / 2);
  EXPECT(shared.shares.affordable(ONE, {again}, {shared.size_class}, CHUNKS / 2) == CHUNKS / 2);
  const HoldId more = shared.hold(CHUNKS / 2 + 4);
  EXPECT(shared.shares.affordable(ONE, {more}, {shared.size_class}, CHUNKS / 2 + 4) == CHUNKS / 2);
  EXPECT(shared.is_sound());
  for (const HoldId hold : {half, again, more}) {
    shared.release(hold);
  }
  EXPECT(shared.shares.accounts().all().empty() && shared.shares.protected_bytes() == 0);
  EXPECT(shared.is_sound());
}

TEST(what_is_unknown_or_of_nobody_counts_nothing) {
  Shared shared;
  const HoldId hold = shared.hold(4);
  EXPECT(!shared.shares.charge({hold + 7}, ONE));
  EXPECT(!shared.shares.charge({hold}, HolderId()));
  EXPECT(!shared.shares.is_charged(hold));
  EXPECT(shared.shares.affordable(HolderId(), {hold}, {shared.size_class}, 4) == 4);
  shared.shares.shorten(hold, shared.size_class, 2);  // not charged: nothing changes
  shared.shares.change(ReservationState{}, HolderBytes{});
  EXPECT(shared.shares.accounts().all().empty());
  EXPECT(shared.is_sound());
}

TEST(a_reservation_changes_its_kind_until_it_ends) {
  Shared shared;
  ReservationState state;
  state.holder = ONE;
  state.size_class = shared.size_class;
  state.taken_bytes = shared.shares.taken_bytes(shared.size_class);
  state.records = shared.first(4);
  state.writing = 4;
  for (const RecordId id : state.records) {
    shared.table.hold(id);
    shared.shares.protect(shared.size_class);
  }
  const HoldId id = shared.table.open_reservation(std::move(state)).first;
  ReservationState& made = *shared.table.find_reservation(id);
  shared.shares.open(id, made, ShareClaim{.holder = ONE});
  const auto bytes = [&] { return shared.shares.accounts().find(ONE)->bytes; };
  EXPECT(bytes().reserved == 4 * CHUNK && bytes().leased == 0);
  --made.writing;
  shared.shares.note_stored(made, 1);
  EXPECT(bytes().reserved == 3 * CHUNK && bytes().leased == CHUNK);
  EXPECT(shared.is_sound());
  HolderBytes before = HolderShares::bytes_of(made);
  made.expired = true;
  shared.shares.change(made, before);
  EXPECT(bytes().zombies == 4 * CHUNK && bytes().reserved == 0);
  before = HolderShares::bytes_of(made);
  for (; !made.records.empty(); made.records.pop_back()) {
    shared.table.unhold(made.records.back());
    shared.shares.unprotect(shared.size_class);
  }
  shared.shares.shorten(id, made, before, 4);
  EXPECT(shared.shares.accounts().find(ONE) == nullptr);
  shared.table.close_reservation(id);
  EXPECT(shared.is_sound());
}

TEST(a_user_has_one_share_for_all_its_holders) {
  Shared shared;
  shared.shares.limit(0.5, 0.5);
  shared.shares.accounts().join(ONE, 9);
  shared.shares.accounts().join(OTHER, 9);
  const HoldId half = shared.hold(CHUNKS / 2);
  EXPECT(shared.shares.charge({half}, ONE));
  ShareClaim claim{.holder = OTHER, .held = shared.shares.protected_bytes()};
  EXPECT(!shared.shares.has_share(claim, shared.first(CHUNKS / 2), CHUNK));  // one chunk behind what the user protects
  shared.release(half);
  ShareClaim free{.holder = OTHER, .held = shared.shares.protected_bytes()};
  EXPECT(shared.shares.has_share(free, shared.first(4), CHUNK));
  EXPECT(shared.is_sound());
}

TEST(a_user_with_a_share_of_its_own_has_that_and_its_holders_their_part_of_it) {
  Shared shared;
  shared.shares.limit_user(7, 0.5);
  shared.shares.accounts().join(ONE, 7);
  shared.shares.accounts().join(OTHER, 7);
  const HoldId whole = shared.hold(CHUNKS);
  EXPECT(shared.shares.affordable(ONE, {whole}, {shared.size_class}, CHUNKS) == CHUNKS / 4);
  EXPECT(shared.shares.affordable(HolderId(3), {whole}, {shared.size_class}, CHUNKS) == CHUNKS / 2);  // of no such user
  shared.release(whole);
  EXPECT(shared.is_sound());
}
