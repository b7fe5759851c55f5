// Bindings of shared memory regions and of the index's read side: Mapping, IndexView. No logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings.h"
#include "shared_index/chunk_table.h"
#include "shared_index/hit_needs.h"
#include "shared_index/landing_board.h"
#include "base/freed_memory.h"
#include "base/memory.h"
#include "base/numa.h"
#include "released_gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

[[noreturn]] void raise_os_error(int error, const std::string& what) {
  PyErr_SetObject(PyExc_OSError, nb::make_tuple(error, what).ptr());
  throw nb::python_error();
}

std::shared_ptr<Mapping> unwrap(MappingResult result) {
  if (result.mapping == nullptr) {
    raise_os_error(result.error, std::string("cannot map shared memory: ") + result.step);
  }
  return std::move(result.mapping);
}

void require_pages(const Mapping& mapping, uint64_t offset, uint64_t length) {
  if (!mapping.contains(offset, length) || offset % PAGE_BYTES != 0 || length % PAGE_BYTES != 0) {
    throw nb::value_error("range is not whole pages inside the mapping");
  }
}

using MappedBytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

// The array keeps the mapping alive. A read-only view of numpy is not enforced by the kernel; the mapping's is.
MappedBytes view(const std::shared_ptr<Mapping>& mapping) {
  auto* held = new std::shared_ptr<Mapping>(mapping);
  nb::capsule owner(held, [](void* pointer) noexcept { delete static_cast<std::shared_ptr<Mapping>*>(pointer); });
  return MappedBytes(mapping->data(), {mapping->size()}, owner);
}

nb::bytes lookup(const IndexView& index, const nb::bytes& keys, uint32_t most) {
  if (keys.size() % KEY_BYTES != 0) {
    throw nb::value_error("keys must be a multiple of 32 bytes");
  }
  const size_t n = std::min<size_t>(keys.size() / KEY_BYTES, most);
  const auto levels = std::make_unique_for_overwrite<uint8_t[]>(n);
  size_t count = 0;
  {
    const GilReleasedOver released(n * KEY_BYTES);
    count = index.lookup(static_cast<const uint8_t*>(keys.data()), n, levels.get());
  }
  return nb::bytes(levels.get(), count);
}

using Names = nb::ndarray<const uint8_t, nb::shape<-1, static_cast<nb::ssize_t>(KEY_BYTES)>, nb::c_contig, nb::device::cpu>;

nb::bytes probe(const IndexView& index, const nb::bytes& roots, const Names& names) {
  if (roots.size() % KEY_BYTES != 0 || roots.size() == 0) {
    throw nb::value_error("roots must be a multiple of 32 bytes");
  }
  const size_t n = names.shape(0);
  nb::bytes levels = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(n)));
  if (!levels.is_valid()) {
    throw nb::python_error();
  }
  {
    const GilReleasedOver released(n * KEY_BYTES);
    index.probe_names(static_cast<const uint8_t*>(roots.data()), roots.size() / KEY_BYTES, names.data(), n,
                      reinterpret_cast<uint8_t*>(PyBytes_AsString(levels.ptr())));
  }
  return levels;
}

std::pair<size_t, nb::bytes> last_run(const IndexView& index, const nb::bytes& keys, size_t end, size_t length, bool here) {
  if (keys.size() % KEY_BYTES != 0 || end > keys.size() / KEY_BYTES || length == 0) {
    throw nb::value_error("keys must be a multiple of 32 bytes, end one of them or the end, length above 0");
  }
  std::string levels(end, '\0');
  size_t found = 0;
  {
    const ReleasedGil released;
    found = index.last_run(static_cast<const uint8_t*>(keys.data()), end, length, here, reinterpret_cast<uint8_t*>(levels.data()));
  }
  const size_t count = std::min(found, length);
  return {found, nb::bytes(levels.data() + (found - count), count)};
}

using KeyColumns = nb::typed<nb::tuple, nb::bytes, nb::ellipsis>;

// The columns of a prompt's keys, as long as they live.
std::vector<std::span<const uint8_t>> columns_in(const HitNeeds& needs, const KeyColumns& columns, size_t end) {
  std::vector<std::span<const uint8_t>> found;
  found.reserve(columns.size());
  for (const nb::handle column : columns) {
    const auto keys = nb::cast<nb::bytes>(column);
    found.emplace_back(static_cast<const uint8_t*>(keys.data()), keys.size());
    if (keys.size() / KEY_BYTES < end) {
      throw nb::value_error("a column must have end keys of 32 bytes, or more");
    }
  }
  if (found.size() != needs.runs().size()) {
    throw nb::value_error("there must be a column for each run");
  }
  return found;
}

std::pair<nb::bytes, size_t> find_hit(const IndexView& index, const HitNeeds& needs, const KeyColumns& columns, size_t end, bool here) {
  const auto given = columns_in(needs, columns, end);
  FoundHit hit;
  {
    const GilReleasedOver released(given.size() * end * KEY_BYTES);
    hit = needs.find(index, given, end, here);
  }
  return {nb::bytes(hit.levels.data(), hit.levels.size()), hit.chained};
}

nb::bytes keys_of_hit(const HitNeeds& needs, const KeyColumns& columns, size_t end, bool leaves) {
  const std::string keys = needs.keys_of(columns_in(needs, columns, end), end, leaves);
  return nb::bytes(keys.data(), keys.size());
}

void bind_hit_needs(nb::module_& module) {
  nb::class_<HitNeeds>(module, "HitNeeds", "What a hit needs of each column of a prompt's keys. Immutable; any thread.")
      .def(nb::init<std::vector<size_t>, size_t>(), "runs"_a, "elsewhere_max"_a,
           "`runs`: how many chunks before its end, of each column; 0: all, as a chain. `elsewhere_max`: so many chunks of columns that\n"
           "are no chains may be on other nodes; a hit with more of them is sought among this node's chunks.")
      .def("keys_of", &keys_of_hit, "columns"_a, "end"_a, "leaves"_a,
           "The keys that a hit of `end` chunks needs of each column, one column's behind another's; `leaves`: of a chain the last one\n"
           "alone.")
      .def_prop_ro("runs", &HitNeeds::runs);
}

uint64_t count_current(const IndexView& index, const nb::bytes& slots, const nb::bytes& generations) {
  if (slots.size() != generations.size() || slots.size() % sizeof(uint64_t) != 0) {
    throw nb::value_error("slots and generations must be u64, and as many");
  }
  const size_t n = slots.size() / sizeof(uint64_t);
  std::vector<uint64_t> packed(n);
  std::vector<uint64_t> expected(n);
  if (n > 0) {
    std::memcpy(packed.data(), slots.data(), slots.size());
    std::memcpy(expected.data(), generations.data(), generations.size());
  }
  std::atomic_thread_fence(std::memory_order_acquire);  // what the caller has read of the chunks was read before
  size_t current = 0;
  while (current < n && expected[current] != 0 &&
         index.generation_at(SlotAddress::unpacked(packed[current])) == expected[current]) {
    ++current;
  }
  return current;
}

bool is_being_written(const IndexView& index, const nb::bytes& key) {
  if (key.size() != KEY_BYTES) {
    throw nb::value_error("key must have 32 bytes");
  }
  return index.is_being_written(ChunkKey::from_bytes(static_cast<const uint8_t*>(key.data())));
}

void bind_mapping(nb::module_& module) {
  nb::class_<Mapping>(module, "Mapping", "A shared memory region, mapped for as long as this object lives.")
      .def_static(
          "create",
          [](const std::string& name, uint64_t size, bool hugetlb) {
            return unwrap(Mapping::create(name, size, hugetlb));
          },
          "name"_a, "size"_a, "hugetlb"_a = false,
          "A new zeroed region, sealed against resizing. Raises OSError.")
      .def_static(
          "attach",
          [](int fd, uint64_t size, bool writable) { return unwrap(Mapping::attach(fd, size, writable)); }, "fd"_a,
          "size"_a, "writable"_a, "Maps another process's region; the descriptor is duplicated.")
      .def(
          "populate",
          [](const Mapping& mapping, uint64_t offset, uint64_t length) {
            require_pages(mapping, offset, length);
            int error = 0;
            {
              const ReleasedGil released;
              error = mapping.populate(offset, length);
            }
            if (error != 0) {
              raise_os_error(error, "cannot pre-fault shared memory");
            }
          },
          "offset"_a, "length"_a, "Brings pages into memory, bytes unchanged. GIL released.")
      .def(
          "collapse",
          [](const Mapping& mapping, uint64_t offset, uint64_t length) {
            require_pages(mapping, offset, length);
            const ReleasedGil released;
            return mapping.collapse(offset, length);
          },
          "offset"_a, "length"_a, "Asks for huge pages; returns whether they were made. GIL released.")
      .def(
          "seal_read_only",
          [](const Mapping& mapping) {
            const int error = mapping.seal_read_only();
            if (error != 0) {
              raise_os_error(error, "cannot seal shared memory");
            }
          },
          "No new writable mapping from now on; existing ones keep their rights.")
      .def("view", &view, "All bytes as a numpy array that keeps the region mapped; do not write if not writable.")
      .def_prop_ro("fd", &Mapping::fd)
      .def_prop_ro("size", &Mapping::size)
      .def_prop_ro("writable", &Mapping::is_writable)
      .def("__repr__", [](const Mapping& mapping) {
        return "<Mapping " + std::to_string(mapping.size()) + (mapping.is_writable() ? " rw>" : " ro>");
      });
}

void bind_life_page(nb::module_& module) {
  nb::class_<LifePage>(module, "LifePage", "Which life of the daemon may give the arena's slots away.")
      .def(nb::new_([](std::shared_ptr<Mapping> mapping) {
             if (mapping->size() < sizeof(uint64_t)) {
               throw nb::value_error("the region has no room for a life");
             }
             return LifePage(std::move(mapping));
           }),
           "mapping"_a)
      .def_prop_ro("life", &LifePage::life, "0: no life has begun.")
      .def(
          "begin",
          [](const LifePage& page, uint64_t life) {
            if (!page.is_writable()) {
              throw nb::value_error("the page is mapped read-only");
            }
            page.begin(life);
          },
          "life"_a, "From now on the slots are this life's.");
}

void bind_index_view(nb::module_& module) {
  nb::class_<IndexView>(module, "IndexView", "Read side of the shared index; a hit is a hint with a generation.")
      .def(nb::new_([](std::shared_ptr<Mapping> mapping, std::shared_ptr<RemoteView> remote,
                           const std::optional<LifePage>& life_page, uint64_t life) {
             const auto of_life = life_page ? std::optional<IndexLife>({*life_page, life}) : std::nullopt;
             auto index = IndexView::attach(std::move(mapping), std::move(remote), of_life);
             if (index == nullptr) {
               throw nb::value_error("region is not an index of this version");
             }
             return std::const_pointer_cast<IndexView>(index);
           }),
           "mapping"_a, "remote"_a.none() = nb::none(), "life_page"_a.none() = nb::none(), "life"_a = 0,
           "`remote`: where chunks are looked up that this node has not. `life_page`: where a later life of the daemon that has taken the\n"
           "arena over says so; the index is that of the life of number `life`.")
      .def("lookup", &lookup, "keys"_a, "most"_a = UINT32_MAX,
           "The level of each chunk of the run of readable chunks from the first key on, of the first `most` at most. GIL released "
           "over many.")
      .def("probe", &probe, "roots"_a, "names"_a.noconvert(),
           "Of each chunk without a parent that an engine names, uint8 [names, 32], behind packed roots of ranks: the fastest level from "
           "DRAM on, of the rank where that is slowest; 0 where some rank has it not. GIL released over many.")
      .def("last_run", &last_run, "keys"_a, "end"_a, "length"_a, "here"_a = true,
           "(end, levels): the largest end up to this one before which so many chunks in a row, or all, are readable, and the level "
           "of each of them; here: on this node, otherwise on another one, too. GIL released.")
      .def("find_hit", &find_hit, "needs"_a, "columns"_a, "end"_a, "here"_a = false,
           "(levels, chained): the level of each chunk of the longest hit of `end` chunks at most, the slowest among the columns that need\n"
           "it, and how far the chains alone reach; here: of this node's chunks alone. GIL released over many.")
      .def("is_being_written", &is_being_written, "key"_a, "Whether somebody is saving the chunk, or it is on its way from another tier.")
      .def(
          "generation_at",
          [](const IndexView& index, uint64_t slot) { return index.generation_at(SlotAddress::unpacked(slot)); }, "slot"_a,
          "Of the readable chunk in a slot; 0 where there is none. A slot: its region in the upper half, its number in the lower.")
      .def("count_current", &count_current, "slots"_a, "generations"_a,
           "How many leading slots, u64, still have these generations, u64: what was read of their chunks before counts.")
      .def(
          "landed_at",
          [](const IndexView& index, uint64_t slot) { return index.landed_at(SlotAddress::unpacked(slot)); }, "slot"_a,
          "How many extents of the chunk in a slot are in place; bit 31: no more come.")
      .def(
          "checksum_at",
          [](const IndexView& index, uint64_t slot, uint32_t extent) {
            return index.checksum_at(SlotAddress::unpacked(slot), extent);
          },
          "slot"_a, "extent"_a)
      .def(
          "covers",
          [](const IndexView& index, uint64_t slot, uint32_t extents) {
            return index.covers(SlotAddress::unpacked(slot), extents);
          },
          "slot"_a, "extents"_a, "Whether the slot and checksums of so many extents have words in the index.")
      .def_prop_ro("is_taken_over", &IndexView::is_taken_over, "Whether a later life of the daemon has the arena.")
      .def_prop_ro("count", &IndexView::count)
      .def_prop_ro("epoch", [](const IndexView& index) {
        const std::string epoch = index.epoch();
        return nb::bytes(epoch.data(), epoch.size());
      });
}

// The landing words of one index, which nobody publishes outside of it.
struct Landings {
  std::shared_ptr<const IndexView> index;
  LandingBoard board;
};

SlotAddress known_slot(const Landings& landings, uint64_t packed, uint64_t extents) {
  const SlotAddress slot = SlotAddress::unpacked(packed);
  if (extents == 0 || extents > UINT32_MAX || !landings.index->covers(slot, static_cast<uint32_t>(extents))) {
    throw nb::value_error("a slot has no words in the index");
  }
  return slot;
}

void bind_landings(nb::module_& module) {
  nb::class_<Landings>(module, "LandingBoard", "Where a tier announces the extents of chunks that it brings into the arena.")
      .def(nb::new_([](std::shared_ptr<Mapping> index) {
             auto view = IndexView::attach(index);
             if (view == nullptr || !index->is_writable()) {
               throw nb::value_error("region is not a writable index of this version");
             }
             return std::make_shared<Landings>(Landings{std::move(view), LandingBoard(std::move(index))});
           }),
           "index"_a)
      .def(
          "land",
          [](Landings& landings, uint64_t slot, uint32_t first, const nb::bytes& checksums) {
            const size_t count = checksums.size() / sizeof(uint32_t);
            if (checksums.size() % sizeof(uint32_t) != 0 || count == 0) {
              throw nb::value_error("checksums must be u32, and at least one");
            }
            const SlotAddress known = known_slot(landings, slot, uint64_t{first} + count);
            std::vector<uint32_t> sums(count);
            std::memcpy(sums.data(), checksums.data(), checksums.size());
            landings.board.land(known, first, sums.data(), static_cast<uint32_t>(count));
          },
          "slot"_a, "first"_a, "checksums"_a,
          "Extents `first` and on of the chunk being promoted into this slot are in place, with these CRC-32C, u32; in their order.")
      .def(
          "fail",
          [](Landings& landings, uint64_t slot) { landings.board.fail(known_slot(landings, slot, 1)); }, "slot"_a, "No more extents of this chunk come.");
}

}  // namespace

void bind_memory(nb::module_& module) {
  module.def(
      "keep_freed_memory",
      [](uint32_t kept_bytes, uint32_t block_bytes) {
        if (kept_bytes > INT32_MAX || block_bytes > INT32_MAX) {
          throw nb::value_error("kept_bytes and block_bytes must be less than 2 GiB");
        }
        return keep_freed_memory(kept_bytes, block_bytes);
      },
      "kept_bytes"_a, "block_bytes"_a,
      "Has the process keep freed memory for blocks of so many bytes at most; False where the C library has no such setting.");
  module.def(
      "place_on_nodes",
      [](const Mapping& mapping, const std::vector<uint32_t>& nodes, bool in_turns) {
        if (nodes.empty() || (!in_turns && nodes.size() != 1)) {
          throw nb::value_error("nodes must be one, or some to be taken in turns");
        }
        return place_on_nodes(mapping, nodes, in_turns);
      },
      "mapping"_a, "nodes"_a, nb::kw_only(), "in_turns"_a, "Where new pages come from; 0 or an errno.");
  bind_mapping(module);
  bind_hit_needs(module);
  bind_life_page(module);
  bind_index_view(module);
  bind_landings(module);
}

}  // namespace kvpool
