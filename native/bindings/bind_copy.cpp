// Bindings of copies between engine memory and the arena. Checks every id and extent before anything runs; the GIL is
// released wherever bytes move or somebody waits. No other logic.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <string>

#include "bindings.h"
#include "copy/copy_checks.h"
#include "copy/copy_pool.h"
#include "checksum/crc32c.h"
#include "copy/load_job.h"
#include "copy/plain_copy.h"
#include "copy/save_job.h"
#include "job_handle.h"
#include "released_gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

using Buffer = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableBuffer = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Copying threads: more than any machine has use for; a guess that stops a mistaken argument.
constexpr unsigned COPY_THREADS_MAX = 256;

using LoadHandle = Handle<LoadJob>;
using SaveHandle = Handle<SaveJob>;

template <typename Word>
std::vector<Word> column(const nb::bytes& data, const char* what) {
  if (data.size() % sizeof(Word) != 0) {
    throw nb::value_error((std::string(what) + " is no column of whole words").c_str());
  }
  std::vector<Word> words(data.size() / sizeof(Word));
  if (!words.empty()) {
    std::memcpy(words.data(), data.data(), data.size());
  }
  return words;
}

void require(const char* fault) {
  if (fault != nullptr) {
    throw nb::value_error(fault);
  }
}

CacheView make_view(const std::vector<uint64_t>& bases, uint32_t planes, uint64_t blocks, uint64_t plane_block_bytes,
                    uint64_t plane_stride, uint64_t block_stride, const nb::object&, uint64_t runs, uint64_t run_stride) {
  CacheView view{{}, planes, blocks, plane_block_bytes, plane_stride, block_stride, runs, run_stride};
  require(view_fault(view));
  for (const uint64_t base : bases) {
    view.bases.push_back(reinterpret_cast<uint8_t*>(base));
  }
  return view;
}

LoadHandle make_load(const CopyPool& pool, const CacheView& view, const std::shared_ptr<Mapping>& arena,
                     const std::shared_ptr<IndexView>& index, const nb::bytes& offsets, const nb::bytes& slots,
                     const nb::bytes& generations, const nb::bytes& block_ids, uint32_t extents, uint64_t payload_bytes, bool verifies,
                     const nb::bytes& numbers, uint64_t extent_bytes, bool is_set) {
  LoadPlan plan{view, arena, index, column<uint64_t>(offsets, "offsets"), {}, column<uint64_t>(generations, "generations"),
                column<int64_t>(block_ids, "block_ids"), extents, payload_bytes, verifies,
                {column<uint32_t>(numbers, "numbers"), extent_bytes}, is_set};
  for (const uint64_t packed : column<uint64_t>(slots, "slots")) {
    plan.slots.push_back(SlotAddress::unpacked(packed));
  }
  require(load_fault(plan));
  LoadHandle handle(std::make_shared<LoadJob>(std::move(plan)), pool.queue());
  if (!handle.queue->add(handle.job)) {
    handle.job->cancel();
  }
  return handle;
}

SaveHandle make_save(const CopyPool& pool, const CacheView& view, const std::shared_ptr<Mapping>& arena,
                     const nb::bytes& offsets, const nb::bytes& block_ids, uint32_t extents, uint64_t payload_bytes,
                     uint32_t first_extent, const nb::bytes& numbers, uint64_t extent_bytes) {
  SavePlan plan{view,   arena,       column<uint64_t>(offsets, "offsets"), column<int64_t>(block_ids, "block_ids"),
                extents, payload_bytes, first_extent, {column<uint32_t>(numbers, "numbers"), extent_bytes}};
  require(save_fault(plan));
  return {std::make_shared<SaveJob>(std::move(plan)), pool.queue()};
}

bool announce(const SaveHandle& handle, uint32_t extent) {
  if (extent >= handle.job->extents()) {
    throw nb::value_error("no such extent");
  }
  if (!handle.job->announce(extent)) {
    return false;
  }
  if (!handle.queue->add(handle.job)) {
    handle.job->cancel();
  }
  return true;
}

nb::bytes words_as_bytes(const std::vector<uint32_t>& words) {
  return nb::bytes(words.data(), words.size() * sizeof(uint32_t));
}

nb::bytes extent_checksums(const Mapping& arena, uint64_t offset, uint64_t extent_bytes, uint32_t extents) {
  require(extents_fault(arena, {offset}, extents, extent_bytes));
  std::vector<uint32_t> words(extents);
  {
    const ReleasedGil released;
    for (uint32_t extent = 0; extent < extents; ++extent) {
      words[extent] = crc32c(0, arena.data() + offset + extent * extent_bytes, extent_bytes);
    }
  }
  return words_as_bytes(words);
}

nb::bytes copy_extents(const Mapping& target, const nb::bytes& target_offsets, const Mapping& source,
                       uint64_t source_offset, uint32_t extents, uint64_t extent_bytes) {
  const auto offsets = column<uint64_t>(target_offsets, "target_offsets");
  if (!target.is_writable()) {
    throw nb::value_error("the target is mapped read-only");
  }
  require(extents_fault(target, offsets, extents, extent_bytes));
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(extents * extent_bytes, offsets.size(), &bytes) || !source.contains(source_offset, bytes)) {
    throw nb::value_error("the extents lie outside the source");
  }
  std::vector<uint32_t> words(offsets.size() * extents);
  {
    const ReleasedGil released;
    for (size_t chunk = 0; chunk < offsets.size(); ++chunk) {
      const uint8_t* from = source.data() + source_offset + chunk * extents * extent_bytes;
      copy_whole_extents(target.data() + offsets[chunk], from, extents, extent_bytes, &words[chunk * extents]);
    }
  }
  return words_as_bytes(words);
}

void copy_plain(const WritableBuffer& target, const Buffer& source) {
  if (target.size() != source.size()) {
    throw nb::value_error("target and source differ in size");
  }
  const ReleasedGil released;
  std::memcpy(target.data(), source.data(), source.size());
}

void copy_pieces(PlainCopy way, const CacheView& view, const nb::bytes& block_ids, uint64_t chunk_blocks,
                 const WritableBuffer& chunks) {
  const auto ids = column<int64_t>(block_ids, "block_ids");
  require(plain_fault(view, ids, chunk_blocks, chunks.size()));
  const ReleasedGil released;
  copy_blocks_plain(way, view, ids, chunk_blocks, chunks.data());
}

void gather_plain(const CacheView& view, const nb::bytes& block_ids, uint64_t chunk_blocks, const WritableBuffer& chunks) {
  copy_pieces(PlainCopy::GATHER, view, block_ids, chunk_blocks, chunks);
}

void scatter_plain(const CacheView& view, const nb::bytes& block_ids, uint64_t chunk_blocks, const WritableBuffer& chunks) {
  copy_pieces(PlainCopy::SCATTER, view, block_ids, chunk_blocks, chunks);
}

uint32_t buffer_crc(const Buffer& data, uint32_t init) {
  const ReleasedGil released;
  return crc32c(init, data.data(), data.size());
}

void bind_jobs(nb::module_& module) {
  const auto free_gil = nb::call_guard<ReleasedGil>();
  nb::class_<LoadHandle>(module, "LoadJob", nb::is_weak_referenceable(), "A load that runs from the start.")
      .def(
          "wait_extent",
          [](const LoadHandle& self, uint32_t extent, double timeout_s) {
            if (extent >= self.job->extents()) {
              throw nb::value_error("no such extent");
            }
            const ReleasedGil released;
            return static_cast<int>(self.job->wait_extent(extent, timeout_s));
          },
          "extent"_a, "timeout_s"_a, "1: in place, 0: the load ended before, -1: time is over. GIL released.")
      .def(
          "wait", [](const LoadHandle& self, double timeout_s) { return self.job->wait(timeout_s); }, "timeout_s"_a,
          free_gil)
      .def("cancel", [](const LoadHandle& self) { self.job->cancel(); }, free_gil)
      .def("done", [](const LoadHandle& self) { return self.job->is_done(); })
      .def("chunks", [](const LoadHandle& self) { return self.job->chunks(); })
      .def("reason", [](const LoadHandle& self) { return static_cast<int>(self.job->reason()); })
      .def(
          "reasons",
          [](const LoadHandle& self) {
            const std::vector<LoadReason> found = self.job->reasons();
            return nb::bytes(found.data(), found.size());
          },
          "Of a set, of each chunk, u8; CANCELLED for one without a verdict.")
      .def("progress", [](const LoadHandle& self) { return self.job->progress(); });

  nb::class_<SaveHandle>(module, "SaveJob", nb::is_weak_referenceable(), "A save that copies what is announced.")
      .def("announce", &announce, "extent"_a, "False if the extent was announced before.")
      .def(
          "announce_all", [](const SaveHandle& self) { copy_rest(self.job, *self.queue); }, free_gil,
          "Copy every extent not announced: little of it before this returns. GIL released.")
      .def(
          "wait", [](const SaveHandle& self, double timeout_s) { return self.job->wait(timeout_s); }, "timeout_s"_a,
          free_gil, "Whether everything announced was copied, or the job cancelled, within the time.")
      .def("cancel", [](const SaveHandle& self) { self.job->cancel(); }, free_gil)
      .def("is_cancelled", [](const SaveHandle& self) { return self.job->is_cancelled(); })
      .def("progress", [](const SaveHandle& self) { return self.job->progress(); })
      .def(
          "checksums", [](const SaveHandle& self) { return words_as_bytes(self.job->checksums()); },
          "CRC-32C as u32 [chunk][extent]; empty unless every extent was copied.")
      .def("copied_extents", [](const SaveHandle& self) { return self.job->copied_extents(); },
           "Extents that were copied, from the first one up to one that was not.")
      .def(
          "checksums_from",
          [](const SaveHandle& self, uint32_t first) { return words_as_bytes(self.job->checksums_from(first)); }, "first"_a,
          "CRC-32C as u32 [chunk][extent] of the extents from `first` on that `copied_extents` counts.");
}

}  // namespace

void bind_copy(nb::module_& module) {
  nb::class_<CacheView>(module, "CacheView", "Where an engine has its blocks; holds a reference to `owner`.")
      .def(nb::new_(&make_view), "bases"_a, nb::kw_only(), "planes"_a, "blocks"_a, "plane_block_bytes"_a,
           "plane_stride"_a, "block_stride"_a, "owner"_a, "runs"_a = 1, "run_stride"_a = 0, nb::keep_alive<0, 8>(),
           "`runs`: of bytes in a block's plane, `run_stride` apart; plane_block_bytes is the bytes of all of them.");
  bind_jobs(module);
  nb::class_<CopyPool> pool(module, "CopyPool", "Native threads that copy for one client.");
  pool
      .def(nb::new_([](unsigned threads) {
             if (threads == 0 || threads > COPY_THREADS_MAX) {
               throw nb::value_error("threads must be 1 to 256");
             }
             return std::make_shared<CopyPool>(threads);
           }),
           "threads"_a)
      .def("load", &make_load, "view"_a, "arena"_a, "index"_a, "offsets"_a, "slots"_a, "generations"_a, "block_ids"_a,
           "extents"_a, "payload_bytes"_a, "verifies"_a, nb::kw_only(), "numbers"_a = nb::bytes("", 0), "extent_bytes"_a = 0,
           "is_set"_a = false, nb::keep_alive<0, 2>(),
           "Starts a load. Columns: u64 offsets, slots and generations, i64 block ids; u32 `numbers`: in a chunk, of each "
           "extent of the view, rising, none for all from 0 on; `extent_bytes`: of each as it is stored, 0 for payload_bytes. "
           "`is_set`: a chunk that fails takes none behind it along. ValueError for what lies outside.")
      .def("save", &make_save, "view"_a, "arena"_a, "offsets"_a, "block_ids"_a, "extents"_a, "payload_bytes"_a,
           "first_extent"_a = 0, nb::kw_only(), "numbers"_a = nb::bytes("", 0), "extent_bytes"_a = 0, nb::keep_alive<0, 2>(),
           "Prepares a save of `extents` extents of the view from `first_extent` on; nothing is copied before it is announced. "
           "`numbers` and `extent_bytes` as in `load`.")
      .def("stop", &CopyPool::stop, nb::call_guard<ReleasedGil>())
      .def("bytes_copied", &CopyPool::bytes_copied)
      .def("cpu_seconds", &CopyPool::cpu_seconds);
  bind_summaries(module, pool);
  module.def("extent_checksums", &extent_checksums, "arena"_a, "offset"_a, "extent_bytes"_a, "extents"_a,
             "CRC-32C of each extent in place, u32. GIL released.");
  module.def("copy_extents", &copy_extents, "target"_a, "target_offsets"_a, "source"_a, "source_offset"_a, "extents"_a,
             "extent_bytes"_a,
             "Copies so many extents to each offset, which lie one behind the other in the source; the CRC-32C of what was "
             "stored, u32 [offset][extent]. GIL released. ValueError for what lies outside.");
  module.def("copy_plain", &copy_plain, "target"_a, "source"_a, "memcpy, GIL released: the floor of the benchmarks.");
  module.def("gather_plain", &gather_plain, "view"_a, "block_ids"_a, "chunk_blocks"_a, "chunks"_a,
             "memcpy of each piece into chunks that lie one behind the other, GIL released: a floor of the benchmarks.");
  module.def("scatter_plain", &scatter_plain, "view"_a, "block_ids"_a, "chunk_blocks"_a, "chunks"_a,
             "The way back, GIL released. ValueError for what lies outside.");
  module.def("crc32c", &buffer_crc, "data"_a, "init"_a = 0,
             nb::sig("def crc32c(data: NDArray[numpy.uint8] | bytes, init: int = 0) -> int"), "GIL released.");
  module.def("crc_path", &crc32c_path, "How checksums are computed: avx512, sse4.2 or table.");
}

}  // namespace kvpool
