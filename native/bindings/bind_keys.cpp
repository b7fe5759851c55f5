// Bindings of key hashing. Packed columns in and out; the GIL is released over many bytes. No logic.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include <memory>
#include <span>
#include <string>
#include <utility>

#include "bindings.h"
#include "hash/key_hash.h"
#include "released_gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

template <typename Token>
using Tokens = nb::ndarray<const Token, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::bytes as_bytes(const std::string& data) { return nb::bytes(data.data(), data.size()); }

uint8_t* writable(std::string& data) { return reinterpret_cast<uint8_t*>(data.data()); }

// Bytes that nobody has yet, to be written before anybody does.
nb::bytes unwritten(size_t size) {
  nb::bytes data = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
  if (!data.is_valid()) {
    throw nb::python_error();
  }
  return data;
}

uint8_t* writable(nb::bytes& data) { return reinterpret_cast<uint8_t*>(PyBytes_AsString(data.ptr())); }

const uint8_t* readable(const nb::bytes& data) { return static_cast<const uint8_t*>(data.data()); }

void require_hashes(const nb::bytes& data, const char* what) {
  if (data.size() % HASH_BYTES != 0) {
    throw nb::value_error((std::string(what) + " must be a multiple of 32 bytes").c_str());
  }
}

void require_tokens(bool fits) {
  if (!fits) {
    throw nb::value_error("a token does not fit 32 bits");
  }
}

template <typename Token>
nb::bytes leaves_of(const Tokens<Token>& tokens, size_t chunk_tokens) {
  if (chunk_tokens == 0) {
    throw nb::value_error("chunk_tokens must be positive");
  }
  const size_t chunks = tokens.size() / chunk_tokens;
  nb::bytes leaves = unwritten(chunks * HASH_BYTES);
  bool fits = true;
  {
    const GilReleasedOver released(tokens.nbytes());
    if constexpr (sizeof(Token) == sizeof(int64_t)) {
      fits = hash_leaves(tokens.data(), chunk_tokens, chunks, writable(leaves));
    } else {
      hash_leaves(tokens.data(), chunk_tokens, chunks, writable(leaves));
    }
  }
  require_tokens(fits);
  return leaves;
}

using Keys = nb::typed<nb::tuple, nb::bytes, nb::ellipsis>;

std::string packed(const Keys& parents) {
  std::string joined;
  for (const nb::handle parent : parents) {
    const auto key = nb::cast<nb::bytes>(parent);
    if (key.size() != HASH_BYTES) {
      throw nb::value_error("each of the parents must have 32 bytes");
    }
    joined.append(key.c_str(), key.size());
  }
  return joined;
}

template <typename Token>
std::pair<nb::bytes, Keys> chunks_of(const Tokens<Token>& tokens, size_t chunk_tokens, const Keys& parents) {
  const std::string roots = packed(parents);
  if (chunk_tokens == 0 || roots.empty()) {
    throw nb::value_error("chunk_tokens must be positive, and there must be a parent");
  }
  const size_t chunks = tokens.size() / chunk_tokens;
  nb::bytes leaves = unwritten(chunks * HASH_BYTES);
  const auto keys = std::make_unique_for_overwrite<uint8_t[]>(chunks * roots.size());
  bool fits = true;
  {
    const GilReleasedOver released(tokens.nbytes());
    const std::span<const uint8_t> behind(reinterpret_cast<const uint8_t*>(roots.data()), roots.size());
    if constexpr (sizeof(Token) == sizeof(int64_t)) {
      fits = hash_chunks(tokens.data(), chunk_tokens, chunks, behind, writable(leaves), keys.get());
    } else {
      hash_chunks(tokens.data(), chunk_tokens, chunks, behind, writable(leaves), keys.get());
    }
  }
  require_tokens(fits);
  Keys columns = nb::steal<Keys>(PyTuple_New(static_cast<Py_ssize_t>(parents.size())));
  for (size_t chain = 0; columns.is_valid() && chain < parents.size(); ++chain) {
    nb::bytes column(keys.get() + chain * chunks * HASH_BYTES, chunks * HASH_BYTES);
    NB_TUPLE_SET_ITEM(columns.ptr(), static_cast<Py_ssize_t>(chain), column.release().ptr());
  }
  if (!columns.is_valid()) {
    throw nb::python_error();
  }
  return {std::move(leaves), std::move(columns)};
}

nb::bytes chain(const nb::bytes& parents, const nb::bytes& leaves) {
  require_hashes(parents, "parents");
  require_hashes(leaves, "leaves");
  const size_t chains = parents.size() / HASH_BYTES;
  nb::bytes keys = unwritten(chains * leaves.size());
  {
    const GilReleasedOver released(keys.size());
    chain_keys(readable(parents), chains, readable(leaves), leaves.size() / HASH_BYTES, writable(keys));
  }
  return keys;
}

using Names = nb::ndarray<const uint8_t, nb::shape<-1, static_cast<nb::ssize_t>(HASH_BYTES)>, nb::c_contig, nb::device::cpu>;

nb::bytes named(const nb::bytes& roots, const Names& names) {
  require_hashes(roots, "roots");
  const size_t count = names.shape(0);
  nb::bytes keys = unwritten(roots.size() * count);
  {
    const GilReleasedOver released(keys.size());
    for (size_t root = 0; root < roots.size() / HASH_BYTES; ++root) {
      name_keys(readable(roots) + root * HASH_BYTES, names.data(), count, writable(keys) + root * count * HASH_BYTES);
    }
  }
  return keys;
}

nb::bytes mixed(const nb::bytes& leaf, const nb::bytes& payload) {
  if (leaf.size() != HASH_BYTES) {
    throw nb::value_error("leaf must have 32 bytes");
  }
  std::string out(HASH_BYTES, '\0');
  mix_leaf(readable(leaf), readable(payload), payload.size(), writable(out));
  return as_bytes(out);
}

nb::bytes root(const nb::typed<nb::list, nb::bytes>& fields) {
  std::string packed;
  for (const nb::handle field : fields) {
    const auto data = nb::cast<nb::bytes>(field);
    const auto size = static_cast<uint32_t>(data.size());
    packed.append(reinterpret_cast<const char*>(&size), sizeof(size));
    packed.append(data.c_str(), data.size());
  }
  std::string out(HASH_BYTES, '\0');
  derive_root(reinterpret_cast<const uint8_t*>(packed.data()), packed.size(), writable(out));
  return as_bytes(out);
}

nb::bytes plain(const nb::bytes& data) {
  std::string out(HASH_BYTES, '\0');
  {
    const ReleasedGil released;
    blake3_hash(plain_hash_key(), readable(data), data.size(), writable(out));
  }
  return as_bytes(out);
}

// A few at a time: whoever gives the interpreter away between two of them may wait milliseconds for it.
nb::bytes plain_each(const nb::typed<nb::list, nb::bytes>& values) {
  std::string out(values.size() * HASH_BYTES, '\0');
  size_t place = 0;
  for (const nb::handle value : values) {
    const auto data = nb::cast<nb::bytes>(value);
    blake3_hash(plain_hash_key(), readable(data), data.size(), writable(out) + place);
    place += HASH_BYTES;
  }
  return as_bytes(out);
}

}  // namespace

void bind_keys(nb::module_& module) {
  module.def("hash_leaves", &leaves_of<int32_t>, "tokens"_a.noconvert(), "chunk_tokens"_a,
             "Leaves of the full chunks of int32 or int64 tokens, 32 bytes each. GIL released over many.");
  module.def("hash_leaves", &leaves_of<int64_t>, "tokens"_a.noconvert(), "chunk_tokens"_a);
  module.def("hash_chunks", &chunks_of<int32_t>, "tokens"_a.noconvert(), "chunk_tokens"_a, "parents"_a,
             "(leaves, keys): `hash_leaves` and, behind each parent, `chain_keys`; of one in the time of the first. GIL released over many.");
  module.def("hash_chunks", &chunks_of<int64_t>, "tokens"_a.noconvert(), "chunk_tokens"_a, "parents"_a);
  module.def("chain_keys", &chain, "parents"_a, "leaves"_a,
             "Keys of the chunks that follow each of the packed `parents`: those of one behind those of another. GIL released over many.");
  module.def("name_keys", &named, "roots"_a, "names"_a.noconvert(),
             "Keys of chunks without a parent by an engine's names, uint8 [names, 32], behind each of the packed `roots`: those of one "
             "behind those of another. GIL released over many.");
  module.def("mix_leaf", &mixed, "leaf"_a, "payload"_a, "A leaf with content mixed in.");
  module.def("derive_root", &root, "fields"_a, "A root over length-prefixed fields.");
  module.def("blake3", &plain, "data"_a, "Plain BLAKE3 of 32 bytes. GIL released.");
  module.def("blake3_each", &plain_each, "values"_a, "The plain BLAKE3 of each, 32 bytes one after the other.");
  module.def("hash_lanes", &blake3_lanes, "Vector width of leaf hashing: avx512, avx2 or scalar.");
}

}  // namespace kvpool
