#include "leases/lease_frames.h"

#include <cstring>
#include <optional>
#include <string_view>

#include "base/frame_fields.h"

namespace kvpool {

LeaseFrames::Served LeaseFrames::serve(const Reader& reader, const SaveWriter* writer, std::span<const uint8_t> arrived, uint64_t now_ns,
                                       uint64_t left_ns) {
  Served served;
  const uint64_t begun_ns = clock_();
  for (uint64_t before_ns = begun_ns; before_ns - begun_ns <= left_ns && arrived.size() - served.consumed > FRAME_LENGTH_BYTES &&
                                      served.answers.size() < bounds_.answer_bytes_max;) {
    const auto left = arrived.subspan(served.consumed);
    uint32_t length = 0;
    std::memcpy(&length, left.data(), FRAME_LENGTH_BYTES);
    if (length > bounds_.frame_bytes_max || length > left.size() - FRAME_LENGTH_BYTES) {
      break;
    }
    const auto kind = serve_frame(reader, writer, left.subspan(FRAME_LENGTH_BYTES, length), now_ns, served);
    if (!kind) {
      break;
    }
    served.consumed += FRAME_LENGTH_BYTES + length;
    const uint64_t after_ns = clock_();
    times_.add_time(*kind, after_ns - before_ns);
    before_ns = after_ns;
  }
  return served;
}

// The kind of a frame that was served; nothing where it is not for here.
std::optional<uint32_t> LeaseFrames::serve_frame(const Reader& reader, const SaveWriter* writer, std::span<const uint8_t> body,
                                                 uint64_t now_ns, Served& served) {
  FieldReader fields(body);
  const size_t values = fields.array_size();
  const auto kind = fields.number();
  const auto sequence = fields.number();
  if (!kind || *kind > UINT32_MAX || !sequence || *sequence > INT64_MAX) {
    return std::nullopt;
  }
  const auto number = static_cast<uint32_t>(*kind);
  bool is_served = false;
  if (number == kinds_.acquire && values == 6) {
    is_served = serve_acquire(reader, fields.rest(), *sequence, now_ns, served);
  } else if (number == kinds_.drop_leases && values == 3) {
    is_served = serve_drop(reader, fields.rest(), now_ns, served);
  } else if (number == kinds_.renew && values == 3) {
    is_served = serve_renew(reader, fields.rest(), *sequence, now_ns, served);
  } else if (writer != nullptr) {
    is_served = saves_.serve(*writer, number, values, fields.rest(), *sequence, now_ns, served.answers, served.saves);
  }
  return is_served ? std::optional(number) : std::nullopt;
}

bool LeaseFrames::serve_acquire(const Reader& reader, std::span<const uint8_t> packed, uint64_t sequence, uint64_t now_ns,
                                Served& served) {
  FieldReader fields(packed);
  const auto keys = fields.bytes();
  const auto chunks = fields.number();
  if (!keys || !chunks || !fields.is_empty_text()) {
    return false;
  }
  const auto set_of = fields.number();
  if (!set_of || !fields.is_end()) {
    return false;
  }
  if (*set_of != 0) {
    return *chunks == 0 && serve_set(reader, *keys, *set_of - 1, sequence, now_ns, served);
  }
  const Lease* const lease = desk_.lease_hit(reader, *keys, *chunks, now_ns);
  if (lease == nullptr) {
    return false;
  }
  answer_lease(*lease, desk_.columns_of(reader, *lease), sequence, served.answers);
  return true;
}

bool LeaseFrames::serve_set(const Reader& reader, std::span<const uint8_t> keys, uint64_t group, uint64_t sequence, uint64_t now_ns,
                            Served& served) {
  const std::optional<LeasedSet> leased = desk_.lease_set(reader, keys, group, now_ns);
  if (!leased) {
    return false;
  }
  const size_t named = keys.size() / KEY_BYTES;
  static const Lease nothing;
  const Lease& lease = leased->lease == nullptr ? nothing : *leased->lease;
  answer_lease(lease, desk_.rows_by_key(reader, leased->lease, leased->places, named), sequence, served.answers);
  return true;
}

void LeaseFrames::answer_lease(const Lease& lease, const Columns& columns, uint64_t sequence, std::vector<uint8_t>& answers) {
  writer_.begin(kinds_.leased, sequence, 6);
  writer_.put_number(lease.id);
  writer_.put_number(lease.chunks);
  writer_.put_column(columns.offsets);
  writer_.put_column(columns.generations);
  writer_.put_column(columns.levels);
  writer_.put_column(columns.slots);
  writer_.finish_into(answers);
}

// A column of lease numbers, and nothing behind it.
std::optional<std::vector<uint64_t>> LeaseFrames::numbers_in(std::span<const uint8_t> packed) const {
  FieldReader fields(packed);
  const auto column = fields.bytes();
  if (!column || !fields.is_end() || column->size() % sizeof(uint64_t) != 0 || column->size() / sizeof(uint64_t) > bounds_.numbers_max) {
    return std::nullopt;
  }
  std::vector<uint64_t> numbers(column->size() / sizeof(uint64_t));
  if (!numbers.empty()) {
    std::memcpy(numbers.data(), column->data(), column->size());
  }
  return numbers;
}

bool LeaseFrames::serve_drop(const Reader& reader, std::span<const uint8_t> packed, uint64_t now_ns, Served& served) {
  const auto numbers = numbers_in(packed);
  if (!numbers) {
    return false;
  }
  served.has_backlog = desk_.release_leases(reader, *numbers, now_ns);
  return true;
}

bool LeaseFrames::serve_renew(const Reader& reader, std::span<const uint8_t> packed, uint64_t sequence, uint64_t now_ns, Served& served) {
  const auto numbers = numbers_in(packed);
  if (!numbers) {
    return false;
  }
  for (const uint64_t number : *numbers) {
    desk_.leases().renew(number, reader.connection, now_ns);
  }
  writer_.begin(kinds_.done, sequence, 0);
  writer_.finish_into(served.answers);
  return true;
}

}  // namespace kvpool
