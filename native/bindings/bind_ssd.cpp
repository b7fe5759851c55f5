// Bindings of the SSD tier's files and queue. Checks every extent before anything runs; rows cross packed, once per job.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>

#include "bindings.h"
#include "columns.h"
#include "lines.h"
#include "rows.h"
#include "ssd/file_pages.h"
#include "ssd/ssd_queue.h"
#include "released_gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

[[noreturn]] void raise_os_error(int error, const std::string& what) {
  PyErr_SetObject(PyExc_OSError, nb::make_tuple(error, what).ptr());
  throw nb::python_error();
}

std::shared_ptr<SsdFiles> open_files(const std::string& path, uint64_t segment_bytes, uint32_t segments,
                                     bool wants_direct) {
  if (segment_bytes == 0 || segment_bytes % PAGE_BYTES != 0 || segments == 0) {
    throw nb::value_error("segment_bytes must be whole pages, segments positive");
  }
  SsdFilesResult result;
  {
    const ReleasedGil released;
    result = SsdFiles::open(path, segment_bytes, segments, wants_direct);
  }
  if (result.files == nullptr) {
    raise_os_error(result.error, result.detail);
  }
  return result.files;
}

std::shared_ptr<FilePages> open_pages(const std::string& path) {
  FilePagesResult result;
  {
    const ReleasedGil released;
    result = FilePages::open(path);
  }
  if (result.pages == nullptr) {
    raise_os_error(result.error, "cannot map " + path + ": " + std::strerror(result.error));
  }
  return result.pages;
}

void load_pages(const FilePages& pages, uint64_t bytes) {
  int error = 0;
  {
    const ReleasedGil released;
    error = pages.load(bytes);
  }
  if (error != 0) {
    raise_os_error(error, "cannot read " + pages.path() + " into its map: " + std::strerror(error));
  }
}

// What all chunks of a job have in common.
SsdHeader common_header(const nb::bytes& epoch, const nb::bytes& name_space, uint32_t extents, uint64_t extent_bytes) {
  SsdHeader header{};
  if (epoch.size() != sizeof(header.pool_epoch) || name_space.size() != sizeof(header.name_space)) {
    throw nb::value_error("epoch must be 16 bytes, namespace 32");
  }
  if (extents == 0 || extents > SSD_EXTENTS_MAX || extent_bytes == 0) {
    throw nb::value_error("extents must be 1 to 4096, extent_bytes positive");
  }
  std::memcpy(header.pool_epoch, epoch.data(), sizeof(header.pool_epoch));
  std::memcpy(header.name_space, name_space.data(), sizeof(header.name_space));
  header.extent_bytes = extent_bytes;
  header.extent_crcs.resize(extents);
  return header;
}

std::vector<MoveRow> checked_rows(const SsdQueue& queue, const nb::bytes& rows, const SsdHeader& common) {
  if (rows.size() == 0 || rows.size() % sizeof(MoveRow) != 0) {
    throw nb::value_error("rows must be 96 bytes each, and at least one");
  }
  std::vector<MoveRow> unpacked(rows.size() / sizeof(MoveRow));
  std::memcpy(unpacked.data(), rows.data(), rows.size());
  uint64_t bytes = 0;
  const bool fits = !__builtin_mul_overflow(common.extent_bytes, common.extent_crcs.size(), &bytes) &&
                    bytes <= queue.arena().size();
  for (const MoveRow& row : unpacked) {
    if (!fits || row.offset % PAGE_BYTES != 0 || row.arena_offset % PAGE_BYTES != 0 ||
        !queue.arena().contains(row.arena_offset, round_up(bytes, PAGE_BYTES)) ||
        !queue.files().contains(row.offset, round_up(bytes, PAGE_BYTES) + common.header_bytes())) {
      throw nb::value_error("a chunk lies outside the arena or the files");
    }
  }
  return unpacked;
}

SsdHeader header_of(const SsdHeader& common, const MoveRow& row) {
  SsdHeader header = common;
  std::memcpy(header.key, row.key, sizeof(header.key));
  std::memcpy(header.parent, row.parent, sizeof(header.parent));
  header.generation = row.generation;
  return header;
}

SlotAddress known_slot(const IndexView& index, const MoveRow& row, uint32_t extents) {
  const SlotAddress slot = SlotAddress::unpacked(row.arena_slot);
  if (!index.covers(slot, extents)) {
    throw nb::value_error("a slot has no words in the index");
  }
  return slot;
}

uint64_t read(SsdQueue& queue, const nb::bytes& rows, const nb::bytes& epoch, const nb::bytes& name_space,
              uint32_t extents, uint64_t extent_bytes, const IndexView& index, uint8_t urgency) {
  if (urgency > static_cast<uint8_t>(SsdUrgency::PROMOTION)) {
    throw nb::value_error("urgency must be 0 (demand) or 1 (promotion)");
  }
  const SsdHeader common = common_header(epoch, name_space, extents, extent_bytes);
  std::vector<SsdRead> chunks;
  for (const MoveRow& row : checked_rows(queue, rows, common)) {
    chunks.push_back({row.offset, row.arena_offset, known_slot(index, row, extents), header_of(common, row)});
  }
  return queue.read(std::move(chunks), static_cast<SsdUrgency>(urgency));
}

uint64_t write(SsdQueue& queue, const nb::bytes& rows, const nb::bytes& epoch, const nb::bytes& name_space,
               uint32_t extents, uint64_t extent_bytes, const IndexView& index, const std::vector<nb::bytes>& tokens) {
  const SsdHeader common = common_header(epoch, name_space, extents, extent_bytes);
  std::vector<SsdWrite> chunks;
  for (const MoveRow& row : checked_rows(queue, rows, common)) {
    SsdHeader header = header_of(common, row);
    if (chunks.size() < tokens.size()) {
      header.tokens = token_ids(tokens[chunks.size()]);
    }
    const SlotAddress slot = known_slot(index, row, extents);
    for (uint32_t extent = 0; extent < extents; ++extent) {
      header.extent_crcs[extent] = index.checksum_at(slot, extent);
    }
    chunks.push_back({row.offset, row.arena_offset, std::move(header)});
  }
  return queue.write(std::move(chunks));
}

uint64_t verify(SsdQueue& queue, const nb::bytes& rows, const nb::bytes& epoch, const nb::bytes& name_space,
                uint32_t extents, uint64_t extent_bytes) {
  const SsdHeader common = common_header(epoch, name_space, extents, extent_bytes);
  std::vector<SsdVerify> chunks;
  for (const MoveRow& row : checked_rows(queue, rows, common)) {
    chunks.push_back({row.offset, header_of(common, row)});
  }
  return queue.verify(std::move(chunks));
}

Counts queue_stats(const SsdQueue& queue) {
  const SsdQueueStats counts = queue.stats();
  Counts result;
  result["waiting_demand"] = counts.waiting[0];
  result["waiting_promotion"] = counts.waiting[1];
  result["waiting_write_back"] = counts.waiting[2];
  result["waiting_check"] = counts.waiting[3];
  result["read_bytes"] = counts.read_bytes;
  result["written_bytes"] = counts.written_bytes;
  result["failed_chunks"] = counts.failed_chunks;
  result["read_back_chunks"] = counts.read_back_chunks;
  result["second_reads"] = counts.second_reads;
  return result;
}

Counts queue_io(const SsdQueue& queue) {
  const SsdQueueIo found = queue.io();
  Counts result;
  result["threads"] = found.threads;
  result["rings"] = found.rings;
  result["ring_error"] = found.ring_error;
  result["is_distrusted"] = found.is_distrusted;
  result["fault_error"] = static_cast<uint64_t>(found.fault.error);
  result["fault_is_write"] = found.fault.is_write;
  result["fault_offset"] = found.fault.offset;
  return result;
}

void bind_outcome(nb::module_& module) {
  nb::class_<SsdOutcome>(module, "ChunkOutcome", "What became of one chunk of a job.")
      .def_ro("job", &SsdOutcome::job)
      .def_ro("chunk", &SsdOutcome::chunk, "Its row in the job.")
      .def_prop_ro("status", [](const SsdOutcome& self) { return static_cast<uint8_t>(self.status); }, "An `SsdStatus`.")
      .def_ro("moved_bytes", &SsdOutcome::bytes)
      .def_prop_ro("tokens", [](const SsdOutcome& self) { return pack(self.tokens); },
                   "Token ids and the scope behind them, i32, of a chunk that was read.");
}

}  // namespace

void bind_ssd(nb::module_& module) {
  bind_outcome(module);
  nb::class_<FilePages>(module, "FilePages", "Pages of a file that another library reads through a map.")
      .def_static("open", &open_pages, "path"_a, "OSError where it cannot be mapped. GIL released.")
      .def("load", &load_pages, "bytes"_a,
           "Has the first bytes of the file in memory; OSError where the disk does not give them. GIL released.");
  module.attr("SSD_HEADER_BYTES") = SSD_HEADER_BYTES;
  module.attr("SSD_EXTENTS_MAX") = SSD_EXTENTS_MAX;
  module.def("ssd_header_bytes", &ssd_header_bytes, "extents"_a, "Bytes of the header of a slot for a chunk of so many extents.");
  module.attr("SSD_WRITE_BYTES") = SSD_WRITE_BYTES;
  nb::class_<SsdFiles>(module, "SsdFiles", "The segment files of an SSD tier.")
      .def_static("open", &open_files, "path"_a, "segment_bytes"_a, "segments"_a, "wants_direct"_a,
                  "Opens or makes the directory and its files; OSError names what is wrong. GIL released.")
      .def_prop_ro("is_direct", &SsdFiles::is_direct)
      .def(
          "sync",
          [](SsdFiles& self) {
            int error = 0;
            {
              const ReleasedGil released;
              error = self.sync();
            }
            if (error != 0) {
              raise_os_error(error, "cannot sync segment files");
            }
          },
          "Has the disk make what was written durable; OSError when it did not, which is final. GIL released.");
  nb::class_<SsdQueue> queue(module, "SsdQueue", "Threads that move chunks between segment files and the arena.");
  queue
      .def(nb::new_([](std::shared_ptr<SsdFiles> files, std::shared_ptr<Mapping> arena, std::shared_ptr<Mapping> index,
                       unsigned threads, size_t jobs_max, bool wants_rings) {
             require_bounds(threads, jobs_max);
             auto board = std::make_shared<LandingBoard>(std::move(index));
             return std::make_shared<SsdQueue>(std::move(files), std::move(arena), std::move(board), threads, jobs_max,
                                               wants_rings);
           }),
           "files"_a, "arena"_a, "index"_a, "threads"_a, "jobs_max"_a, "wants_rings"_a = false,
           nb::call_guard<ReleasedGil>())
      .def("read", &read, "rows"_a, "epoch"_a, "namespace"_a, "extents"_a, "extent_bytes"_a, "index"_a, "urgency"_a,
           "A job's number, 0 where the queue is full. `rows` in the format of `MOVE_ROW`. Extents are announced on the index as they land.")
      .def("write", &write, "rows"_a, "epoch"_a, "namespace"_a, "extents"_a, "extent_bytes"_a, "index"_a,
           "tokens"_a = std::vector<nb::bytes>(),
           "The same the other way; checksums are the index's. `tokens`: token ids, i32, of each row or of none; stored where\n"
           "they fit the header.")
      .def("verify", &verify, "rows"_a, "epoch"_a, "namespace"_a, "extents"_a, "extent_bytes"_a,
           "Reads chunks and compares them with their checksums, after everything else; nothing is stored. Rows as for `read`,\n"
           "any arena offset and slot.")
      .def(
          "longest_transfer_ns", [](const SsdQueue& self) { return self.longest_transfer().count(); },
          "For how long the transfer has been under way that was begun first; 0: none is.")
      .def("stats", &queue_stats)
      .def("io", &queue_io, "How many threads have a ring, the errno of a refusal, whether what was moved differed once, and the latest failed\n"
           "transfer: its errno (0: none has failed), whether it was a write, where it began.");
  bind_line(queue);
}

}  // namespace kvpool
