// Bytes that change under the tier's hands: memory that clients write to, disks that lie once or always.
#include <linux/falloc.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <vector>

#include "tests/harness.h"
#include "ssd/ssd_read_backs.h"
#include "ssd/ssd_stamped_io.h"
#include "tests/ssd/ssd_setting.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

constexpr uint32_t SLOTS = 6;
constexpr uint64_t EXTENT_BYTES = 512 << 10;

// Plain calls that spoil what they have read, so many times, and forget writes where that is wanted.
class LyingIo final : public SsdIo {
 public:
  explicit LyingIo(const SsdSetting& setting) : calls_(make_call_io(setting.files)) {}

  int read(uint64_t offset, uint8_t* bytes, uint64_t size) noexcept override {
    const int error = calls_->read(offset, bytes, size);
    if (lies > 0 && size > spoiled) {
      --lies;
      bytes[spoiled] ^= 1;
    }
    return error;
  }
  int read_slot(uint64_t offset, std::span<uint8_t> header, uint8_t* bytes, uint64_t size) noexcept override {
    const int error = calls_->read_slot(offset, header, bytes, size);
    if (lies > 0) {
      --lies;
      (spoiled < header.size() ? header[spoiled] : bytes[spoiled - header.size()]) ^= 1;
    }
    return error;
  }
  int write(uint64_t offset, const uint8_t* bytes, uint64_t size) noexcept override {
    return forgets ? 0 : calls_->write(offset, bytes, size);
  }

  unsigned lies = 0;
  uint64_t spoiled = 0;
  bool forgets = false;

 private:
  const std::unique_ptr<SsdIo> calls_;
};

struct Workplace {
  explicit Workplace(const SsdSetting& setting) : lying(setting), calls(make_call_io(setting.files)) {}

  std::vector<SsdOutcome> run(SsdJob& job) {
    std::vector<SsdOutcome> ended;
    for (uint32_t part = 0; part < job.parts(); ++part) {
      while (job.run_piece(worker, part, ended)) {
      }
    }
    return ended;
  }

  LyingIo lying;
  const std::unique_ptr<SsdIo> calls;
  SsdBounce bounce;
  SsdWorker worker{lying, *calls, bounce};
};

void punch(const Mapping& arena) {
  EXPECT(fallocate(arena.fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(arena.size())) == 0);
}

}  // namespace

TEST(a_hole_in_the_arena_costs_no_chunk_on_disk) {
  for_each_io([](IoKind kind) {
    const SsdSetting setting(SLOTS, 4, EXTENT_BYTES);
    const auto queue = make_queue(setting, kind, 2, 8);
    const auto chunks = writes(setting, SLOTS);
    EXPECT(queue->write(chunks) != 0);
    EXPECT(wait_for_outcomes(*queue, SLOTS).size() == SLOTS);
    for (int round = 0; round < 2; ++round) {
      punch(*setting.arena);
      EXPECT(queue->read(reads(chunks), SsdUrgency::DEMAND) != 0);
      for (const SsdOutcome& outcome : wait_for_outcomes(*queue, SLOTS)) {
        EXPECT(outcome.status == SsdStatus::OK);
        EXPECT(setting.is_right(outcome.chunk));
      }
    }
    EXPECT(!queue->io().is_distrusted);
  });
}

TEST(a_chunk_that_changes_during_its_write_is_right_on_disk_or_not_acknowledged) {
  for_each_io([](IoKind kind) {
    const SsdSetting setting(SLOTS, 4, EXTENT_BYTES);
    std::mt19937_64 random(seed());
    // A process and not a thread, as a client is one: what two processes do to the same bytes is no data race of either.
    const pid_t scribbler = fork();
    if (scribbler == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      while (true) {
        volatile uint8_t& byte = setting.bytes(static_cast<uint32_t>(random() % SLOTS))[random() % setting.slot_bytes];
        byte = byte ^ 1U;
        byte = byte ^ 1U;
      }
    }
    EXPECT(scribbler > 0);
    const auto queue = make_queue(setting, kind, 2, 8);
    const auto chunks = writes(setting, SLOTS);
    for (int round = 0; round < 8; ++round) {
      EXPECT(queue->write(chunks) != 0);
      std::vector<SsdVerify> acknowledged;
      for (const SsdOutcome& outcome : wait_for_outcomes(*queue, SLOTS)) {
        EXPECT(outcome.status == SsdStatus::OK || outcome.status == SsdStatus::BAD_SOURCE);
        if (outcome.status == SsdStatus::OK) {
          acknowledged.push_back({chunks[outcome.chunk].offset, chunks[outcome.chunk].header});
        }
      }
      if (!acknowledged.empty()) {
        EXPECT(queue->verify(acknowledged) != 0);
        for (const SsdOutcome& outcome : wait_for_outcomes(*queue, acknowledged.size())) {
          EXPECT(outcome.status == SsdStatus::OK);
        }
      }
    }
    kill(scribbler, SIGKILL);
    waitpid(scribbler, nullptr, 0);
    EXPECT(!queue->io().is_distrusted);
  });
}

TEST(a_chunk_that_is_bad_at_the_first_read_only_counts_as_good) {
  for (const uint64_t spoiled : {uint64_t{3}, SSD_HEADER_BYTES + 77, SSD_HEADER_BYTES + EXTENT_BYTES + 5}) {
    const SsdSetting setting(1, 4, EXTENT_BYTES);
    Workplace place(setting);
    const auto chunks = writes(setting, 1);
    SsdWriteJob write(chunks, setting.arena);
    EXPECT(place.run(write).at(0).status == SsdStatus::OK);
    setting.wipe(0);
    place.lying.spoiled = spoiled;
    place.lying.lies = 1;
    SsdReadJob read(reads(chunks), setting.arena, setting.board);
    EXPECT(place.run(read).at(0).status == SsdStatus::OK);
    EXPECT(place.lying.lies == 0 && place.worker.second_reads == 1);
    EXPECT(place.worker.has_found_bad_path == (spoiled < SSD_HEADER_BYTES));  // clients reach the rest
    EXPECT(setting.is_right(0));
    place.worker.has_found_bad_path = false;
    place.lying.lies = 1;
    SsdVerifyJob verify({{chunks[0].offset, chunks[0].header}});
    EXPECT(place.run(verify).at(0).status == SsdStatus::OK);
    EXPECT(place.worker.has_found_bad_path);
  }
}

TEST(a_chunk_that_is_bad_by_both_paths_is_bad) {
  const SsdSetting setting(1, 4, EXTENT_BYTES);
  Workplace place(setting);
  auto chunks = writes(setting, 1);
  SsdWriteJob write(chunks, setting.arena);
  EXPECT(place.run(write).at(0).status == SsdStatus::OK);
  const auto page = Mapping::create("test-page", PAGE_BYTES, false).mapping;
  EXPECT(place.calls->write(chunks[0].offset + SSD_HEADER_BYTES + 3 * EXTENT_BYTES, page->data(), PAGE_BYTES) == 0);
  SsdReadJob read(reads(chunks), setting.arena, setting.board);
  EXPECT(place.run(read).at(0).status == SsdStatus::BAD_CHECKSUM);
  SsdVerifyJob verify({{chunks[0].offset, chunks[0].header}});
  EXPECT(place.run(verify).at(0).status == SsdStatus::BAD_CHECKSUM);
  EXPECT(!place.worker.has_found_bad_path);
}

TEST(a_write_that_never_came_is_found_by_reading_it_back_and_all_are_read_back_then) {
  const SsdSetting setting(1, 4, EXTENT_BYTES);
  Workplace place(setting);
  place.lying.forgets = true;
  SsdWriteJob write(writes(setting, 1), setting.arena);
  const SsdOutcome written = place.run(write).at(0);
  EXPECT(written.status == SsdStatus::OK);
  SsdReadBacks read_backs;
  EXPECT(read_backs.wants_next());
  uint32_t chosen = 0;
  for (uint32_t chunk = 0; chunk < 100 * SsdReadBacks::SAMPLE; ++chunk) {
    chosen += read_backs.wants_next() ? 1U : 0U;
  }
  EXPECT(chosen > 40 && chosen < 200);
  for (const SsdStatus status : {SsdStatus::OK, SsdStatus::IO_ERROR, SsdStatus::CANCELLED}) {
    EXPECT(read_backs.verdict(status) == status && !read_backs.is_distrusted());
  }
  SsdVerifyJob verify({*write.written(0)});
  EXPECT(read_backs.verdict(place.run(verify).at(0).status) == SsdStatus::BAD_WRITE);
  EXPECT(read_backs.is_distrusted());
  EXPECT(read_backs.wants_next() && read_backs.wants_next());
}

TEST(an_unresponsive_disk_is_reported_by_transfer_and_not_by_chunk) {
  const SsdSetting setting(1, 4, 8 << 20);
  unsigned stamps = 0;
  unsigned faults = 0;
  SsdStampedIo stamped(make_call_io(setting.files), [&] { ++stamps; }, [&](const SsdFault&) { ++faults; });
  SsdBounce bounce;
  SsdWorker worker{stamped, stamped, bounce};
  std::vector<SsdOutcome> ended;
  SsdWriteJob write(writes(setting, 1), setting.arena);
  unsigned pieces = 1;
  while (write.run_piece(worker, 0, ended)) {
    ++pieces;
  }
  EXPECT(ended.at(0).status == SsdStatus::OK);
  EXPECT(pieces == (32 << 20) / SSD_WRITE_BYTES);
  EXPECT(stamps == (32 << 20) / SSD_STEP_BYTES + 1);  // the header is the last one
  stamps = 0;
  SsdVerifyJob verify({*write.written(0)});
  for (uint32_t part = 0; part < verify.parts(); ++part) {
    EXPECT(!verify.run_piece(worker, part, ended));
  }
  EXPECT(ended.at(1).status == SsdStatus::OK);
  EXPECT(stamps == (32 << 20) / SSD_PIECE_BYTES + 1);
  EXPECT(faults == 0);
}

// Fails each transfer with the error that it is given.
class FailingIo final : public SsdIo {
 public:
  explicit FailingIo(int error) : error_(error) {}
  int read(uint64_t, uint8_t*, uint64_t) noexcept override { return error_; }
  int write(uint64_t, const uint8_t*, uint64_t) noexcept override { return error_; }
  int read_slot(uint64_t, std::span<uint8_t>, uint8_t*, uint64_t) noexcept override { return error_; }

 private:
  const int error_;
};

TEST(failed_transfers_are_reported_with_their_error_direction_and_offset) {
  std::vector<SsdFault> faults;
  const auto note = [&](const SsdFault& fault) { faults.push_back(fault); };
  std::array<uint8_t, 8> bytes{};
  SsdStampedIo broken(std::make_unique<FailingIo>(EIO), [] {}, note);
  EXPECT(broken.read(4096, bytes.data(), bytes.size()) == EIO);
  EXPECT(broken.write(8192, bytes.data(), bytes.size()) == EIO);
  EXPECT(broken.read_slot(12288, {}, bytes.data(), bytes.size()) == EIO);
  const auto fill = [&](unsigned, uint64_t, uint64_t) { return bytes.data(); };
  EXPECT(broken.write_steps(16384, bytes.size(), bytes.size(), fill) == EIO);
  EXPECT(faults.size() == 4);
  for (size_t number = 0; number < faults.size(); ++number) {
    EXPECT(faults[number].error == EIO && faults[number].offset == (number + 1) * 4096);
    EXPECT(faults[number].is_write == (number % 2 == 1));
  }
  SsdStampedIo cut(std::make_unique<FailingIo>(SsdIo::NO_MORE_BYTES), [] {}, note);
  EXPECT(cut.read(0, bytes.data(), bytes.size()) == SsdIo::NO_MORE_BYTES);
  EXPECT(faults.size() == 4);  // the file ends there, which is no fault of the disk
}
