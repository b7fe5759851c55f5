// Lease frames: requests for leases as they arrive, and their answers as they are sent, without a step in between.
//
// What it is: the frames of the local socket (docs/protocol.md) of three kinds: Acquire, DropLeases and Renew; those about plain saves among
// them are passed on (save_frames.h). What it is not: a decoder of
// all frames. A frame of another kind, or in any other form than a client of ours sends, is left to who decodes all of them and says what is
// wrong with it; so is a request that the desk cannot serve as a whole.
//
// Threads: the control thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "frames/frame_writer.h"
#include "leases/lease_desk.h"
#include "leases/verb_times.h"
#include "saves/save_frames.h"

namespace kvpool {

// The numbers of records on the wire.
struct LeaseKinds {
  uint32_t acquire;
  uint32_t leased;
  uint32_t drop_leases;
  uint32_t renew;
  uint32_t done;
};

class LeaseFrames {
 public:
  struct Bounds {
    size_t frame_bytes_max;
    size_t numbers_max;       // of a column of leases
    size_t answer_bytes_max;  // of one call, beside its last answer: a peer that does not read fills no memory
  };
  // What came of bytes that arrived.
  struct Served {
    size_t consumed = 0;            // leading bytes: whole frames, which were served
    std::vector<uint8_t> answers;   // whole frames
    bool has_backlog = false;       // holds are left to be released
    std::vector<SaveNote> saves;    // what was answered about saves
  };
  using Clock = uint64_t (*)();  // nanoseconds, of any beginning

  // REQUIRES: desk, times and saves live as long.
  LeaseFrames(LeaseDesk& desk, VerbTimes& times, SaveFrames& saves, LeaseKinds kinds, Bounds bounds, Clock clock)
      : desk_(desk), times_(times), saves_(saves), kinds_(kinds), bounds_(bounds), clock_(clock) {}

  // Serves leading frames of these bytes, until one is not for here, or so long has passed. `now_ns`: of the leases' clock. `writer`: as
  // which the session saves; nullptr: it may not now.
  [[nodiscard]] Served serve(const Reader& reader, const SaveWriter* writer, std::span<const uint8_t> arrived, uint64_t now_ns,
                             uint64_t left_ns);

 private:
  [[nodiscard]] std::optional<uint32_t> serve_frame(const Reader& reader, const SaveWriter* writer, std::span<const uint8_t> body,
                                                    uint64_t now_ns, Served& served);
  [[nodiscard]] bool serve_acquire(const Reader& reader, std::span<const uint8_t> packed, uint64_t sequence, uint64_t now_ns,
                                   Served& served);
  [[nodiscard]] bool serve_drop(const Reader& reader, std::span<const uint8_t> packed, uint64_t now_ns, Served& served);
  [[nodiscard]] bool serve_renew(const Reader& reader, std::span<const uint8_t> packed, uint64_t sequence, uint64_t now_ns, Served& served);
  [[nodiscard]] std::optional<std::vector<uint64_t>> numbers_in(std::span<const uint8_t> packed) const;
  [[nodiscard]] bool serve_set(const Reader& reader, std::span<const uint8_t> keys, uint64_t group, uint64_t sequence, uint64_t now_ns,
                               Served& served);
  void answer_lease(const Lease& lease, const Columns& columns, uint64_t sequence, std::vector<uint8_t>& answers);

  LeaseDesk& desk_;
  VerbTimes& times_;
  SaveFrames& saves_;
  const LeaseKinds kinds_;
  const Bounds bounds_;
  const Clock clock_;
  FrameWriter writer_;
};

}  // namespace kvpool
