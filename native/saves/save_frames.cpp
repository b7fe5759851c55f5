#include "saves/save_frames.h"

#include <algorithm>
#include <utility>

#include "base/frame_fields.h"

namespace kvpool {

bool SaveFrames::serve(const SaveWriter& writer, uint32_t kind, size_t values, std::span<const uint8_t> packed, uint64_t sequence,
                       uint64_t now_ns, std::vector<uint8_t>& answers, std::vector<SaveNote>& notes) {
  if (kind == kinds_.reserve && values == 6) {
    return !desk_.is_behind() && serve_reserve(writer, packed, sequence, now_ns, answers, notes);
  }
  return kind == kinds_.commit && values == 6 && serve_commit(writer, packed, sequence, now_ns, answers, notes);
}

bool SaveFrames::serve_reserve(const SaveWriter& writer, std::span<const uint8_t> packed, uint64_t sequence, uint64_t now_ns,
                               std::vector<uint8_t>& answers, std::vector<SaveNote>& notes) {
  FieldReader fields(packed);
  const auto runs = fields.bytes();
  const auto keys = fields.bytes();
  const auto priorities = fields.bytes();
  const auto durations = fields.bytes();
  if (!runs || !keys || !priorities || !durations || !fields.is_end() || !priorities->empty() || !durations->empty()) {
    return false;
  }
  std::optional<MadeSave> made = desk_.reserve(writer, *runs, *keys, now_ns);
  if (!made) {
    return false;
  }
  writer_.begin(kinds_.reserved, sequence, 5);
  writer_.put_number(made->save);
  writer_.put_column(made->slots.states);
  writer_.put_column(made->slots.offsets);
  writer_.put_column(made->slots.generations);
  writer_.put_copied({});
  writer_.finish_into(answers);
  const bool is_declined = std::ranges::any_of(made->slots.states, [](uint8_t state) {
    return state != static_cast<uint8_t>(SaveState::RESERVED) && state != static_cast<uint8_t>(SaveState::PRESENT);
  });
  SaveNote note{false, made->group, std::move(made->slots.states), {}};
  if (is_declined) {
    const auto own = keys->last(note.states.size() * KEY_BYTES);
    note.keys.assign(own.begin(), own.end());
  }
  notes.push_back(std::move(note));
  return true;
}

bool SaveFrames::serve_commit(const SaveWriter& writer, std::span<const uint8_t> packed, uint64_t sequence, uint64_t now_ns,
                              std::vector<uint8_t>& answers, std::vector<SaveNote>& notes) {
  FieldReader fields(packed);
  const auto save = fields.number();
  const auto checksums = fields.bytes();
  const auto tokens = fields.bytes();
  const auto scope = fields.bytes();
  if (!save || !checksums || !tokens || !scope || !fields.is_end()) {
    return false;
  }
  std::optional<CommittedChunks> made = desk_.commit(writer, *save, *checksums, *tokens, *scope, now_ns);
  if (!made) {
    return false;
  }
  writer_.begin(kinds_.committed, sequence, 1);
  writer_.put_column(made->states);
  writer_.finish_into(answers);
  notes.push_back({true, made->group, std::move(made->states), {}});
  return true;
}

}  // namespace kvpool
