// Bindings of attention over runs where they lie. Checks shapes; addresses are the caller's. The GIL is released while it computes.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string_view.h>

#include <memory>
#include <string_view>
#include <vector>

#include "bindings.h"
#include "kv_types.h"
#include "released_gil.h"
#include "sparse/attention/attention.h"
#include "sparse/plain_read.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

using Queries = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Column = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Wanted = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<nb::numpy, float>;

constexpr AttentionPath PATHS[] = {AttentionPath::PORTABLE, AttentionPath::AVX2, AttentionPath::AVX512};
constexpr size_t RUNS_MAX = 1 << 24;

Floats owned(std::unique_ptr<float[]> numbers, std::initializer_list<size_t> shape) {
  const nb::capsule owner(numbers.get(), [](void* held) noexcept { delete[] static_cast<float*>(held); });
  return Floats(numbers.release(), shape, owner);
}

AttentionShape checked_shape(std::string_view dtype, const Queries& query, const Wanted& wanted, uint64_t token_stride) {
  const size_t heads = query.shape(0);
  const size_t kv_heads = wanted.shape(1);
  if (query.shape(1) > HEAD_DIM_MAX || !is_head_dim(static_cast<uint32_t>(query.shape(1)))) {
    throw nb::value_error("head_dim must be a multiple of 32 up to 256");
  }
  if (kv_heads == 0 || heads == 0 || heads % kv_heads != 0 || heads / kv_heads > QUERY_GROUP_MAX) {
    throw nb::value_error("query heads must be a multiple of the KV heads, at most 16 for each");
  }
  return {.type = kv_type_of(dtype),
          .head_dim = static_cast<uint32_t>(query.shape(1)),
          .kv_heads = static_cast<uint32_t>(kv_heads),
          .group = static_cast<uint32_t>(heads / kv_heads),
          .token_stride = token_stride};
}

nb::tuple attend_to(WorkerTeam& team, std::string_view dtype, const Queries& query, const Column& keys, const Column& tokens,
                    const Wanted& wanted, uint64_t value_offset, uint64_t token_stride) {
  const AttentionShape shape = checked_shape(dtype, query, wanted, token_stride);
  const size_t count = wanted.shape(0);
  if (keys.shape(0) != count || tokens.shape(0) != count) {
    throw nb::value_error("keys, tokens and wanted must have the same number of runs");
  }
  const size_t heads = query.shape(0);
  auto logits = std::make_unique<float[]>(heads);
  auto values = std::make_unique<float[]>(heads * shape.head_dim);
  {
    const ReleasedGil released;
    std::vector<KvRun> runs(count);
    for (size_t run = 0; run < count; ++run) {
      const auto* key = reinterpret_cast<const uint8_t*>(keys.data()[run]);
      runs[run] = {key, key + value_offset, tokens.data()[run]};
    }
    attend({shape, runs, {wanted.data(), count * shape.kv_heads}}, query.data(), logits.get(), values.get(), team);
  }
  return nb::make_tuple(owned(std::move(logits), {heads}), owned(std::move(values), {heads, shape.head_dim}));
}

uint64_t read_plainly(WorkerTeam& team, const Column& runs, uint64_t run_bytes) {
  if (run_bytes % PLAIN_READ_STEP_BYTES != 0) {
    throw nb::value_error("run_bytes must be a multiple of 256");
  }
  if (runs.size() > RUNS_MAX) {
    throw nb::value_error("runs must be at most 2^24");
  }
  const ReleasedGil released;
  return sum_words(team, {reinterpret_cast<const uint8_t* const*>(runs.data()), runs.size()}, run_bytes);
}

void choose_attention_path(std::string_view name) {
  for (const AttentionPath path : PATHS) {
    if (name == attention_path_name(path) && attention_supports(path)) {
      set_attention_path(path);
      return;
    }
  }
  throw nb::value_error("this processor has no such path");
}

}  // namespace

void bind_attention(nb::module_& module) {
  module.def("attend", &attend_to, "team"_a, "dtype"_a, "query"_a, "keys"_a, "tokens"_a, "wanted"_a, nb::kw_only(), "value_offset"_a,
             "token_stride"_a,
             nb::sig("def attend(team: WorkerTeam, dtype: str, query: NDArray[numpy.float32], keys: NDArray[numpy.uint64], tokens: "
                     "NDArray[numpy.uint64], wanted: NDArray[numpy.uint8], *, value_offset: int, token_stride: int) -> "
                     "tuple[NDArray[numpy.float32], NDArray[numpy.float32]]"),
             "Attention of one query token: (logit [heads], value [heads, head_dim]). `keys`: where the key of KV head 0 of each run's "
             "first token lies; its value lies `value_offset` behind it. `wanted` [run, kv_heads]. GIL released. ValueError for shapes "
             "that do not agree; the addresses are believed.");
  module.def("read_plainly", &read_plainly, "team"_a, "runs"_a, nb::kw_only(), "run_bytes"_a,
             nb::sig("def read_plainly(team: WorkerTeam, runs: NDArray[numpy.uint64], *, run_bytes: int) -> int"),
             "The sum of all 64-bit words at these addresses, modulo 2^64: what reading alone costs, for benchmarks. GIL released. "
             "ValueError for a size that is no multiple of 256; the addresses are believed.");
  module.def("attention_path", [] { return attention_path_name(attention_path()); }, "How attention is computed: avx512, avx2 or portable.");
  module.def("choose_attention_path", &choose_attention_path, "path"_a, "For tests: ValueError where the processor has no such path.");
}

}  // namespace kvpool
