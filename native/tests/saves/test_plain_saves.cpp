// The table of plain saves against a plain map, and its owners and deadlines.
#include <algorithm>
#include <map>
#include <random>

#include "saves/plain_saves.h"
#include "tests/harness.h"

namespace {

using namespace kvpool;

constexpr uint64_t TTL = 1000;

PlainSave save_of(uint32_t owner, uint64_t chunks, HoldId holder) {
  PlainSave save;
  save.owner = owner;
  save.chunks = chunks;
  save.holders = {holder};
  return save;
}

std::vector<HoldId> holders_of(const std::vector<PlainSave>& saves) {
  std::vector<HoldId> holders;
  for (const PlainSave& save : saves) {
    holders.push_back(save.holders.front());
  }
  return holders;
}

}  // namespace

TEST(a_save_is_its_owners_alone_and_ends_with_its_last_chunk) {
  PlainSaves saves(TTL);
  const uint64_t id = saves.add(save_of(1, 3, 7), 5);
  EXPECT(saves.find(id, 1)->deadline_ns == 5 + TTL && saves.find(id, 2) == nullptr && saves.find(id + 1, 1) == nullptr);
  saves.note_committed(id, 2);
  EXPECT(saves.find(id, 1)->committed == 2 && saves.verify().empty());
  EXPECT(!saves.take(id, 2) && saves.size() == 1);
  saves.note_committed(id, 1);
  EXPECT(saves.find(id, 1) == nullptr && saves.size() == 0 && saves.count_of(1) == 0 && saves.verify().empty());
  EXPECT(saves.new_id() == id + 1);
}

TEST(saves_are_taken_out_by_number_owner_and_deadline) {
  PlainSaves saves(TTL);
  const uint64_t first = saves.add(save_of(1, 1, 10), 0);
  saves.add(save_of(2, 1, 20), 1);
  saves.change_ttl(TTL / 2);
  saves.add(save_of(2, 1, 21), 2);
  saves.add(save_of(2, 1, 22), 3);
  saves.count_others(2, 2);
  EXPECT(saves.count_of(2) == 5 && saves.count_of(1) == 1 && saves.holders().size() == 4);
  EXPECT(saves.take_expired(TTL / 2 + 1).empty());
  EXPECT(holders_of(saves.take_expired(TTL / 2 + 2)) == std::vector<HoldId>({21}));
  EXPECT(saves.take(first, 1)->holders.front() == 10 && !saves.take(first, 1));
  EXPECT(holders_of(saves.take_owner(2)) == std::vector<HoldId>({20, 22}));
  EXPECT(saves.take_owner(2).empty() && saves.count_of(2) == 2 && saves.size() == 0);
  EXPECT(saves.take_expired(10 * TTL).empty());
  saves.count_others(2, -2);
  EXPECT(saves.owners().empty() && saves.verify().empty());
}

TEST(random_saves_are_where_a_map_has_them) {
  PlainSaves saves(TTL);
  std::map<uint64_t, PlainSave> model;
  std::mt19937_64 random(kvpool::testing::seed());
  for (uint64_t now = 1; now < 20'000; ++now) {
    const auto owner = static_cast<uint32_t>(random() % 4);
    const uint64_t id = model.empty() ? 0 : std::next(model.begin(), static_cast<std::ptrdiff_t>(random() % model.size()))->first;
    switch (random() % 5) {
      case 0:
      case 1: {
        PlainSave save = save_of(owner, 1 + random() % 4, now);
        save.id = saves.add(save, now);
        save.deadline_ns = now + TTL;
        model[save.id] = save;
        break;
      }
      case 2:
        EXPECT(saves.take(id, owner).has_value() == (model.contains(id) && model[id].owner == owner));
        if (model.contains(id) && model[id].owner == owner) {
          model.erase(id);
        }
        break;
      case 3:
        if (id != 0) {
          saves.note_committed(id, 1);
          if (++model[id].committed == model[id].chunks) {
            model.erase(id);
          }
        }
        break;
      default:
        for (const PlainSave& save : random() % 50 == 0 ? saves.take_owner(owner) : saves.take_expired(now)) {
          EXPECT(model.contains(save.id) && model[save.id].committed == save.committed);
          model.erase(save.id);
        }
    }
    EXPECT(saves.size() == model.size());
  }
  for (const auto& [id, save] : model) {
    EXPECT(saves.find(id, save.owner) != nullptr && saves.find(id, save.owner)->committed == save.committed);
  }
  EXPECT(saves.verify().empty());
}
