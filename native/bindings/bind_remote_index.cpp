// Bindings of the remote index: RemoteIndex, its writer, and RemoteView. No logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "columns.h"
#include "remote_index/remote_index.h"
#include "remote_index/remote_view.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

std::shared_ptr<RemoteIndex> create(std::shared_ptr<Mapping> mapping, uint64_t buckets, const nb::bytes& epoch,
                                    const nb::bytes& seed) {
  if (epoch.size() != 16) {
    throw nb::value_error("epoch must be 16 bytes");
  }
  if (buckets < MIN_REMOTE_BUCKETS || buckets > MAX_REMOTE_BUCKETS || mapping == nullptr || !mapping->is_writable() ||
      mapping->size() < remote_bytes(buckets) || reinterpret_cast<const RemoteHeader*>(mapping->data())->version != 0) {
    throw nb::value_error("region must be new, writable, and have room for so many buckets, 8 to 2^28");
  }
  return std::make_shared<RemoteIndex>(std::move(mapping), buckets, static_cast<const uint8_t*>(epoch.data()), seed_of(seed));
}

void require_live(const RemoteIndex& index, RemoteOwner owner) {
  if (!index.is_live(owner)) {
    throw nb::key_error("unknown or ended owner");
  }
}

std::vector<std::pair<RemoteOwner, uint64_t>> runs(const RemoteIndex& index, const nb::bytes& keys, size_t first) {
  const uint8_t* const packed = packed_keys(keys);
  const size_t n = keys.size() / KEY_BYTES;
  if (first > n) {
    throw nb::value_error("first is behind the keys");
  }
  std::vector<std::pair<RemoteOwner, uint64_t>> found;
  for (const RemoteRun& run : index.runs(packed + first * KEY_BYTES, n - first)) {
    found.emplace_back(run.owner, run.chunks);
  }
  return found;
}

std::vector<std::pair<RemoteOwner, std::vector<uint32_t>>> keys_by_owner(const RemoteIndex& index, const nb::bytes& keys) {
  std::vector<std::pair<RemoteOwner, std::vector<uint32_t>>> found;
  for (RemoteKeys& one : index.keys_by_owner(packed_keys(keys), keys.size() / KEY_BYTES)) {
    found.emplace_back(one.owner, std::move(one.keys));
  }
  return found;
}

void bind_writer(nb::module_& module) {
  nb::class_<RemoteIndex>(module, "RemoteIndex", "Which other node has which chunk, by fingerprint: written by the daemon alone.")
      .def(nb::new_(&create), "mapping"_a, "buckets"_a, "epoch"_a, "seed"_a = nb::bytes("", 0),
           "Formats a new region. `seed` places the keys; empty: drawn.")
      .def_static("buckets_for", &RemoteIndex::buckets_for, "pairs"_a, "Buckets that hold so many pairs of chunk and owner.")
      .def_static("bytes_of", &remote_bytes, "buckets"_a, "Bytes of a region with so many buckets.")
      .def("add_owner", &RemoteIndex::add_owner, "A number; None where all are in use, or their entries not emptied yet.")
      .def(
          "retire",
          [](RemoteIndex& index, RemoteOwner owner) {
            require_live(index, owner);
            index.retire(owner);
          },
          "owner"_a, "Nobody finds a chunk of this owner any more.")
      .def(
          "set_pace",
          [](RemoteIndex& index, RemoteOwner owner, uint32_t ns_per_mib, uint32_t latency_us) {
            require_live(index, owner);
            if (ns_per_mib == 0) {
              throw nb::value_error("ns_per_mib must be more than 0");
            }
            index.set_pace(owner, {latency_us, ns_per_mib});
          },
          "owner"_a, "ns_per_mib"_a, "latency_us"_a, "Readers see how long this owner's chunks take.")
      .def(
          "insert",
          [](RemoteIndex& index, RemoteOwner owner, const nb::bytes& keys) {
            require_live(index, owner);
            const uint8_t* const packed = packed_keys(keys);
            index.insert(owner, packed, keys.size() / KEY_BYTES);
          },
          "owner"_a, "keys"_a)
      .def(
          "remove",
          [](RemoteIndex& index, RemoteOwner owner, const nb::bytes& keys) {
            require_live(index, owner);
            const uint8_t* const packed = packed_keys(keys);
            index.remove(owner, packed, keys.size() / KEY_BYTES);
          },
          "owner"_a, "keys"_a, "Pairs that are not there are ignored.")
      .def("runs", &runs, "keys"_a, "first"_a = 0,
           "(owner, chunks) for each live owner of key `first`: how many keys from there on it has; the longest run first.")
      .def("keys_by_owner", &keys_by_owner, "keys"_a,
           "(owner, indexes) for each live owner of any of these keys, by the first one that it has: which of them it has.")
      .def("sweep", &RemoteIndex::sweep, "buckets"_a, "Empties entries of ended owners; whether any are left.")
      .def("count_of", &RemoteIndex::count_of, "owner"_a)
      .def_prop_ro("count", &RemoteIndex::count)
      .def_prop_ro("dead", &RemoteIndex::dead, "Entries of ended owners, not emptied yet.")
      .def_prop_ro("capacity", &RemoteIndex::capacity)
      .def_prop_ro("evicted", &RemoteIndex::evicted)
      .def("verify", &RemoteIndex::verify, "Recounts everything: broken invariants, one line each.")
      .def(
          "verify_part",
          [](const RemoteIndex& index, uint64_t position, uint64_t limit) {
            if (limit == 0 || position >= index.capacity() / BUCKET_ENTRIES) {
              throw nb::value_error("position must be one of the table's buckets, and limit more than 0");
            }
            std::vector<std::string> broken;
            const uint64_t next = index.verify_part(position, limit, broken);
            return std::make_pair(next, broken);
          },
          "position"_a, "limit"_a, "(next, broken): each entry by itself in `limit` buckets; next is 0 at the end.");
}

}  // namespace

void bind_remote_index(nb::module_& module) {
  module.attr("OWNERS_PER_CHUNK") = OWNERS_PER_CHUNK;
  bind_writer(module);
  nb::class_<RemoteView>(module, "RemoteView", "Read side of the remote index; what it has is a hint.")
      .def(nb::new_([](std::shared_ptr<Mapping> mapping) {
             auto view = RemoteView::attach(std::move(mapping));
             if (view == nullptr) {
               throw nb::value_error("region is not a remote index of this version");
             }
             return std::const_pointer_cast<RemoteView>(view);
           }),
           "mapping"_a)
      .def(
          "has", [](const RemoteView& view, const nb::bytes& key) { return view.has(view.place_of(one_key(key))); }, "key"_a)
      .def(
          "pace_of",
          [](const RemoteView& view, const nb::bytes& key) {
            const RemotePace pace = view.pace_of(view.place_of(one_key(key)));
            return std::make_pair(pace.ns_per_mib, pace.latency_us);
          },
          "key"_a, "(nanoseconds for each MiB, microseconds before): of the fastest owner; (0, 0) where none is known.")
      .def_prop_ro("epoch", [](const RemoteView& view) {
        const std::string epoch = view.epoch();
        return nb::bytes(epoch.data(), epoch.size());
      });
}

}  // namespace kvpool
