// Save frames: requests about plain saves as they arrive, and their answers as they are sent: Reserve and Commit.
//
// What it is: the frames of two kinds. What it is not: a decoder of all frames. One in any other form than a client of ours sends, or that the
// desk cannot serve as a whole, is left to who decodes all of them and says what is wrong with it.
//
// Threads: the control thread only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "frames/frame_writer.h"
#include "saves/save_desk.h"

namespace kvpool {

// The numbers of records on the wire.
struct SaveKinds {
  uint32_t reserve;
  uint32_t reserved;
  uint32_t commit;
  uint32_t committed;
};

// What has been answered to one request, for who counts it.
struct SaveNote {
  bool is_commit = false;
  uint32_t group = 0;
  std::vector<uint8_t> states;  // of its chunks
  std::vector<uint8_t> keys;    // packed, of those of a reservation of which one was declined; else none
};

class SaveFrames {
 public:
  // REQUIRES: the desk lives as long.
  SaveFrames(SaveDesk& desk, SaveKinds kinds) : desk_(desk), kinds_(kinds) {}

  // Serves a request of this kind, of so many values, the kind and the sequence among them, of which `packed` has the others. False, and
  // nothing is served, where it is not for here. A reservation is not while changes wait in the feed: what was published is recorded
  // before more is evicted.
  [[nodiscard]] bool serve(const SaveWriter& writer, uint32_t kind, size_t values, std::span<const uint8_t> packed, uint64_t sequence,
                           uint64_t now_ns, std::vector<uint8_t>& answers, std::vector<SaveNote>& notes);

 private:
  [[nodiscard]] bool serve_reserve(const SaveWriter& writer, std::span<const uint8_t> packed, uint64_t sequence, uint64_t now_ns,
                                   std::vector<uint8_t>& answers, std::vector<SaveNote>& notes);
  [[nodiscard]] bool serve_commit(const SaveWriter& writer, std::span<const uint8_t> packed, uint64_t sequence, uint64_t now_ns,
                                  std::vector<uint8_t>& answers, std::vector<SaveNote>& notes);

  SaveDesk& desk_;
  const SaveKinds kinds_;
  FrameWriter writer_;
};

}  // namespace kvpool
