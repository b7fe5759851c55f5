// The hold table alone: ids, counts of each chunk, what is unknown, and random holds against a model.
#include <map>
#include <random>

#include "holds/hold_table.h"
#include "tests/harness.h"

using namespace kvpool;

namespace {

// A chain of stored chunks, and the table over them.
struct Chain {
  explicit Chain(uint32_t length) : records(length), table(records) {
    for (uint32_t index = 0; index < length; ++index) {
      ids.push_back(records.allocate());
      records[ids.back()].state = ChunkState::READY;
      records[ids.back()].key = ChunkKey{{index + 1, 0, 0, 0}};
      if (index > 0) {
        records.attach_child(ids[index - 1], ids[index]);
      }
    }
  }
  HoldTable::Records first(size_t count) const { return {ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(count)}; }
  HoldId hold(size_t count) {
    for (const RecordId id : first(count)) {
      table.hold(id);
    }
    return table.open_hold(first(count)).id;
  }
  bool is_sound() const {
    const auto broken = table.verify();
    for (const auto& line : broken) {
      std::printf("  %s\n", line.c_str());
    }
    return broken.empty();
  }

  ChunkRecords records;
  HoldTable table;
  HoldTable::Records ids;
};

}  // namespace

TEST(the_first_hold_and_the_last_one_are_reported) {
  Chain chain(1);
  const RecordId id = chain.ids[0];
  EXPECT(chain.table.hold(id));
  EXPECT(!chain.table.hold(id));
  EXPECT(chain.table.held() == 1);
  EXPECT(!chain.table.unhold(id));
  EXPECT(chain.table.unhold(id));
  EXPECT(chain.table.held() == 0);
  EXPECT(chain.table.pin(id) && !chain.table.pin(id));
  EXPECT(!chain.table.unpin(id) && chain.table.unpin(id));
  EXPECT(chain.is_sound());
}

TEST(an_unknown_id_is_an_answer) {
  Chain chain(2);
  for (const HoldId unknown : {HoldId{0}, HoldId{77}}) {
    EXPECT(chain.table.find_hold(unknown) == nullptr);
    EXPECT(chain.table.find_readable(unknown) == nullptr);
    EXPECT(chain.table.find_reservation(unknown) == nullptr);
    EXPECT(chain.table.chain_of(unknown).empty());
    EXPECT(!chain.table.close_hold(unknown) && !chain.table.close_pin(unknown));
    EXPECT(!chain.table.record_of(unknown, 0) && !chain.table.parent_key_of(unknown));
    EXPECT(!chain.table.extents_of(unknown) && chain.table.count_whole({unknown}) == std::vector<size_t>{0});
    EXPECT(chain.table.keys_of({unknown}).empty() && !chain.table.records_of({unknown}));
    size_t chunks = 9;
    EXPECT(chain.table.sampled_keys({unknown}, chunks).empty() && chunks == 0);
  }
}

TEST(ids_rise_over_all_tables_and_each_closes_once) {
  Chain chain(3);
  const HoldId hold = chain.hold(2);
  chain.table.pin(chain.ids[2]);
  const HoldId pin = chain.table.open_pin({chain.ids[2]}).id;
  ReservationState state;
  state.extents = 5;
  state.records = chain.first(3);
  for (const RecordId id : state.records) {
    chain.table.hold(id);
  }
  const HoldId made = chain.table.open_reservation(std::move(state)).first;
  EXPECT(0 < hold && hold < pin && pin < made);
  EXPECT(chain.table.extents_of(made) == 5U);
  EXPECT(chain.is_sound());
  EXPECT(chain.table.find_hold(pin) == nullptr && chain.table.find_readable(pin) != nullptr);
  EXPECT(chain.table.parent_key_of(pin) == chain.records[chain.ids[1]].key);
  EXPECT(!chain.table.parent_key_of(hold));
  EXPECT(chain.table.key_of(hold, 1) == chain.records[chain.ids[1]].key && !chain.table.key_of(hold, 2));
  EXPECT(chain.table.chain_of(made).size() == 3);
  chain.table.find_reservation(made)->expired = true;
  EXPECT(chain.table.chain_of(made).empty());
  EXPECT(!chain.table.close_pin(hold) && chain.table.close_hold(hold) == chain.first(2) && !chain.table.close_hold(hold));
  EXPECT(!chain.is_sound());  // its chunks are still counted
  for (const RecordId id : chain.first(2)) {
    EXPECT(!chain.table.unhold(id));
  }
  EXPECT(chain.is_sound());
}

TEST(what_was_dropped_ends_a_whole_prefix) {
  Chain chain(4);
  const HoldId hold = chain.hold(4);
  chain.records[chain.ids[1]].is_sampled = true;
  EXPECT(chain.table.count_whole({hold}) == std::vector<size_t>{4});
  chain.records[chain.ids[2]].state = ChunkState::ZOMBIE;
  chain.records[chain.ids[3]].state = ChunkState::ZOMBIE;
  const HoldId shorter = chain.hold(1);
  EXPECT(chain.table.count_whole({shorter, hold, hold + 99}) == std::vector<size_t>({1, 2, 0}));
  size_t chunks = 0;
  EXPECT(chain.table.sampled_keys({hold, shorter, hold}, chunks).size() == 2 && chunks == 9);
}

TEST(random_holds_agree_with_a_model) {
  std::mt19937_64 random(kvpool::testing::seed());
  constexpr uint32_t LENGTH = 12;
  Chain chain(LENGTH);
  std::map<HoldId, size_t> model;  // how many leading chunks each has
  for (int step = 0; step < 3000; ++step) {
    if (model.empty() || random() % 2 == 0) {
      const size_t count = 1 + random() % LENGTH;
      const HoldId id = chain.hold(count);
      EXPECT(model.empty() || id > model.rbegin()->first);
      model.emplace(id, count);
    } else {
      const auto ended = std::next(model.begin(), static_cast<std::ptrdiff_t>(random() % model.size()));
      const auto records = chain.table.close_hold(ended->first);
      EXPECT(records && records->size() == ended->second);
      for (auto id = records->rbegin(); id != records->rend(); ++id) {
        chain.table.unhold(*id);
      }
      model.erase(ended);
    }
    uint64_t held = 0;
    for (const auto& [id, count] : model) {
      held = std::max<uint64_t>(held, count);
    }
    EXPECT(chain.table.held() == held && chain.table.holds() == model.size());
    EXPECT(step % 20 != 0 || chain.is_sound());
  }
}
