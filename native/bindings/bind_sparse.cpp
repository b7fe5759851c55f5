// Bindings of summaries and recall. Checks shapes and extents before anything runs; addresses are their owner's word. The GIL is
// released wherever something is computed or somebody waits. No other logic.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bindings.h"
#include "columns.h"
#include "copy/copy_pool.h"
#include "job_handle.h"
#include "kv_types.h"
#include "released_gil.h"
#include "sparse/block_summary.h"
#include "sparse/lookup_step.h"
#include "sparse/recall.h"
#include "sparse/sparse_path.h"
#include "sparse/summary_job.h"
#include "sparse/worker_team.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

using Addresses = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Queries = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using SummaryHandle = Handle<SummaryJob>;

constexpr uint32_t KV_HEADS_MAX = 1024;

SummaryForm form_of(std::string_view name) {
  if (name == "clusters7") {
    return SummaryForm::CLUSTERS7;
  }
  if (name == "mean") {
    return SummaryForm::MEAN;
  }
  throw nb::value_error("form must be 'clusters7' or 'mean'");
}

uint32_t known_head_dim(uint32_t head_dim) {
  if (!is_head_dim(head_dim)) {
    throw nb::value_error("head_dim must be a multiple of 32, 32 to 256");
  }
  return head_dim;
}

uint32_t known_kv_heads(uint32_t kv_heads) {
  if (kv_heads == 0 || kv_heads > KV_HEADS_MAX) {
    throw nb::value_error("kv_heads must be 1 to 1024");
  }
  return kv_heads;
}

uint64_t record_bytes(const char* form, uint32_t head_dim) { return summary_bytes(form_of(form), known_head_dim(head_dim)); }

void build_summaries(const char* form, const char* dtype, uint32_t head_dim, uint32_t kv_heads, const Addresses& keys,
                     const Addresses& values, uint64_t token_stride, uint32_t block_tokens, const Bytes& out) {
  const SummaryForm known = form_of(form);
  const KvType type = kv_type_of(dtype);
  const uint64_t size = summary_bytes(known, known_head_dim(head_dim));
  if (keys.size() != values.size()) {
    throw nb::value_error("keys and values differ in length");
  }
  if (block_tokens == 0 || block_tokens > SUMMARY_TOKENS_MAX) {
    throw nb::value_error("block_tokens must be 1 to 255");
  }
  if (out.size() != keys.size() * known_kv_heads(kv_heads) * size) {
    throw nb::value_error("out must be summary_bytes for each block and KV head");
  }
  const ReleasedGil released;
  uint8_t* to = out.data();
  for (size_t block = 0; block < keys.size(); ++block) {
    for (uint32_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
      const uint64_t at = uint64_t{kv_head} * head_dim * kv_type_bytes(type);
      build_summary(known, type, head_dim, reinterpret_cast<const uint8_t*>(keys.data()[block]) + at,
                    reinterpret_cast<const uint8_t*>(values.data()[block]) + at, token_stride, block_tokens, to);
      to += size;
    }
  }
}

SummaryHandle summarize(const CopyPool& pool, const std::shared_ptr<Mapping>& arena, const nb::bytes& offsets,
                        const std::optional<Bytes>& target, const char* form, const char* dtype, uint32_t head_dim,
                        uint32_t kv_heads, uint32_t layers, uint64_t layer_bytes, uint32_t chunk_tokens, uint32_t block_tokens,
                        uint32_t extents) {
  if (offsets.size() % sizeof(uint64_t) != 0) {
    throw nb::value_error("offsets is no column of 64-bit words");
  }
  SummaryPlan plan{arena, unpacked<uint64_t>(offsets), nullptr, 0, form_of(form), kv_type_of(dtype), head_dim, known_kv_heads(kv_heads),
                   layers, layer_bytes, chunk_tokens, block_tokens, extents};
  if (target) {
    plan.target = target->data();
    plan.target_bytes = target->size();
  }
  if (const char* fault = summary_fault(plan)) {
    throw nb::value_error(fault);
  }
  SummaryHandle handle(std::make_shared<SummaryJob>(std::move(plan)), pool.queue());
  if (!handle.queue->add(handle.job)) {
    handle.job->cancel();
  }
  return handle;
}

// A new numpy array; `data` is where to write.
template <typename Number, size_t Dimensions>
struct NewArray {
  using Array = nb::ndarray<nb::numpy, Number, nb::ndim<Dimensions>, nb::c_contig>;

  template <typename... Sizes>
  explicit NewArray(Sizes... sizes) : data(new Number[std::max<size_t>(1, (size_t{sizes} * ...))]()) {
    const nb::capsule owner(data, [](void* made) noexcept { delete[] static_cast<Number*>(made); });
    array = Array(data, {size_t{sizes}...}, owner);
  }

  Number* data;
  Array array;
};

using Recalled =
    nb::typed<nb::tuple, NewArray<int32_t, 2>::Array, NewArray<bool, 1>::Array, NewArray<float, 1>::Array,
              NewArray<float, 1>::Array, std::optional<NewArray<float, 1>::Array>, std::optional<NewArray<float, 2>::Array>>;

std::unique_ptr<Recall> make_recall(const char* form, uint32_t head_dim, uint32_t kv_heads, uint32_t group, float loose_bound,
                                    float loose_share) {
  if (group == 0 || group > QUERY_GROUP_MAX) {
    throw nb::value_error("group must be 1 to 16");
  }
  if (!(loose_bound >= 0)) {
    throw nb::value_error("loose_bound must not be negative");
  }
  const RecallShape shape{form_of(form), known_head_dim(head_dim), known_kv_heads(kv_heads), group};
  return std::make_unique<Recall>(shape, RecallRule{loose_bound, loose_share});
}

Recalled run_recall(Recall& recall, const std::shared_ptr<WorkerTeam>& team, const Queries& queries, const Addresses& records,
                     uint32_t take, bool wants_tail) {
  const RecallShape& shape = recall.shape();
  if (queries.shape(0) != shape.heads() || queries.shape(1) != shape.head_dim) {
    throw nb::value_error("queries must be [kv_heads * group, head_dim]");
  }
  if (records.size() > RECALL_BLOCKS_MAX || take > records.size()) {
    throw nb::value_error("take must be at most the number of records, and they 2^24");
  }
  if (wants_tail && shape.form == SummaryForm::MEAN) {
    throw nb::value_error("summaries of the form 'mean' give no tail");
  }
  NewArray<int32_t, 2> chosen(size_t{shape.kv_heads}, size_t{take});
  NewArray<bool, 1> is_dense(size_t{shape.kv_heads});
  NewArray<float, 1> kept_mass(size_t{shape.heads()});
  NewArray<float, 1> loose_share(size_t{shape.heads()});
  std::optional<NewArray<float, 1>> logits;
  std::optional<NewArray<float, 2>> values;
  if (wants_tail) {
    logits.emplace(size_t{shape.heads()});
    values.emplace(size_t{shape.heads()}, size_t{shape.head_dim});
  }
  static_assert(sizeof(bool) == 1);
  const RecallAnswer answer{chosen.data, reinterpret_cast<uint8_t*>(is_dense.data), kept_mass.data, loose_share.data,
                            logits ? logits->data : nullptr, values ? values->data : nullptr};
  {
    const ReleasedGil released;
    const auto* first = reinterpret_cast<const uint8_t* const*>(records.data());
    recall.run(*team, {first, records.size()}, queries.data(), take, answer);
  }
  const nb::object no_tail = nb::none();
  return Recalled(nb::make_tuple(chosen.array, is_dense.array, kept_mass.array, loose_share.array,
                        logits ? nb::cast(logits->array) : no_tail, values ? nb::cast(values->array) : no_tail));
}

using Attended = std::tuple<NewArray<float, 2>::Array, double, uint32_t, uint32_t>;

// Where a layer's runs and summaries lie: `behind` bytes behind those of layer 0.
struct LayerColumn {
  const Addresses& addresses;
  uint64_t behind;

  [[nodiscard]] const uint8_t* at(size_t row) const noexcept { return reinterpret_cast<const uint8_t*>(addresses.data()[row] + behind); }
};

Attended attend_by_recall(Recall& recall, const std::shared_ptr<WorkerTeam>& team, const char* dtype, const Queries& query,
                          const Addresses& keys, uint64_t keys_behind, const Addresses& records, uint64_t records_behind, uint64_t tokens,
                          uint64_t block_tokens, uint32_t first, uint32_t blocks, uint32_t take, uint64_t value_offset,
                          uint64_t token_stride, float loose_share, float tail_weight_max) {
  const RecallShape& shape = recall.shape();
  if (query.shape(0) != shape.heads() || query.shape(1) != shape.head_dim) {
    throw nb::value_error("query must be [kv_heads * group, head_dim]");
  }
  if (blocks > RECALL_BLOCKS_MAX || take > blocks) {
    throw nb::value_error("take must be at most blocks, and they 2^24");
  }
  if (block_tokens == 0 || tokens > keys.size() * block_tokens || records.size() < uint64_t{first} + blocks ||
      tokens / block_tokens < uint64_t{first} + blocks) {
    throw nb::value_error("keys must reach to the last token, and records and full runs to the last block");
  }
  const LayerColumn key_column{keys, keys_behind};
  const LayerColumn record_column{records, records_behind};
  NewArray<float, 2> values(size_t{shape.heads()}, size_t{shape.head_dim});
  LookupCounts counts;
  {
    const ReleasedGil released;
    std::vector<KvRun> runs;
    runs.reserve((tokens + block_tokens - 1) / block_tokens);
    for (uint64_t done = 0; done < tokens; done += block_tokens) {
      const uint8_t* key = key_column.at(runs.size());
      runs.push_back({key, key + value_offset, std::min(block_tokens, tokens - done)});
    }
    std::vector<const uint8_t*> summaries(blocks);
    for (uint32_t block = 0; block < blocks; ++block) {
      summaries[block] = record_column.at(first + block);
    }
    counts = attend_by_lookup(recall, {kv_type_of(dtype), token_stride, runs, first, summaries, take, loose_share, tail_weight_max},
                              query.data(), values.data, *team);
  }
  return {values.array, counts.kept_mass, counts.kept_masses, counts.dense_heads};
}

void force_path(const std::string& name) {
  for (const SparsePath path : {SparsePath::PORTABLE, SparsePath::AVX2, SparsePath::AVX512}) {
    if (name == sparse_path_name(path) && sparse_supports(path)) {
      choose_sparse_path(path);
      return;
    }
  }
  if (!name.empty()) {
    throw nb::value_error("this machine has no such path");
  }
  choose_sparse_path(sparse_best_path());
}

}  // namespace

void bind_summaries(nb::module_& module, nb::class_<CopyPool>& pool) {
  const auto free_gil = nb::call_guard<ReleasedGil>();
  module.def("summary_bytes", &record_bytes, "form"_a, "head_dim"_a, "Bytes of the summary of one block and KV head.");
  module.def("build_summaries", &build_summaries, nb::kw_only(), "form"_a, "dtype"_a, "head_dim"_a, "kv_heads"_a, "keys"_a,
             "values"_a, "token_stride"_a, "block_tokens"_a, "out"_a,
             "Builds out [block][kv_head]. `keys`, `values`: addresses u64 of the first token's first KV head, for each block. "
             "GIL released.");
  nb::class_<SummaryHandle>(module, "SummaryJob", nb::is_weak_referenceable(), "Summaries that are built from the start.")
      .def(
          "wait", [](const SummaryHandle& self, double timeout_s) { return self.job->wait(timeout_s); }, "timeout_s"_a, free_gil,
          "Whether all was built, or the job cancelled, within the time.")
      .def("cancel", [](const SummaryHandle& self) { self.job->cancel(); }, free_gil)
      .def("is_cancelled", [](const SummaryHandle& self) { return self.job->is_cancelled(); })
      .def("progress", [](const SummaryHandle& self) { return self.job->progress(); }, "Layers of chunks that are done.")
      .def(
          "checksums", [](const SummaryHandle& self) { return pack(self.job->checksums()); },
          "CRC-32C as u32 [chunk][extent]; empty unless all was built.");
  pool.def("summarize", &summarize, "arena"_a, "offsets"_a, "target"_a.none(), nb::kw_only(), "form"_a, "dtype"_a, "head_dim"_a,
           "kv_heads"_a, "layers"_a, "layer_bytes"_a, "chunk_tokens"_a, "block_tokens"_a, "extents"_a, nb::keep_alive<0, 4>(),
           "Starts to build the summaries of chunks at `offsets` (u64): behind their layers where `target` is None, else in "
           "[chunk][extents * layer_bytes]. ValueError for what lies outside.");
}

void bind_recall(nb::module_& module) {
  nb::class_<WorkerTeam>(module, "WorkerTeam", "The caller and some threads that work on one thing at a time.")
      .def(nb::new_([](unsigned threads) {
             if (threads == 0 || threads > THREADS_MAX) {
               throw nb::value_error("threads must be 1 to 64");
             }
             return std::make_shared<WorkerTeam>(threads);
           }),
           "threads"_a)
      .def_prop_ro("threads", &WorkerTeam::threads);
  nb::class_<Recall>(module, "Recall", "Chooses blocks by their summaries, one layer and step at a time.")
      .def(nb::new_(&make_recall), nb::kw_only(), "form"_a, "head_dim"_a, "kv_heads"_a, "group"_a,
           "loose_bound"_a = RecallRule::LOOSE_BOUND, "loose_share"_a = RecallRule::LOOSE_SHARE)
      .def("run", &run_recall, "team"_a, "queries"_a, "records"_a, nb::kw_only(), "take"_a, "wants_tail"_a,
           "(chosen [kv_heads, take], is_dense [kv_heads], kept_mass [heads], loose_share [heads], tail_logits [heads] or None, "
           "tail_values [heads, head_dim] or None). `queries` [heads, head_dim] unscaled; `records`: addresses u64 of the first "
           "KV head's record, for each block. GIL released.")
      .def("attend", &attend_by_recall, "team"_a, "dtype"_a, "query"_a, nb::kw_only(), "keys"_a, "keys_behind"_a, "records"_a,
           "records_behind"_a, "tokens"_a, "block_tokens"_a, "first"_a, "blocks"_a, "take"_a, "value_offset"_a, "token_stride"_a,
           "loose_share"_a, "tail_weight_max"_a,
           "A step of a layer: (value [heads, head_dim], sum of kept masses, how many these are, KV heads that have read "
           "everything). `keys`, `records`: addresses u64 by run, of layer 0; the layer's lie so many bytes behind. `first`: run of "
           "the first of the middle `blocks`. GIL released. ValueError for shapes that do not agree; the addresses are believed.");
  module.def("sparse_path", [] { return sparse_path_name(sparse_path()); }, "What builds and recalls: avx512, avx2 or portable.");
  module.def("force_sparse_path", &force_path, "name"_a, "For tests: one path, or '' for the best.");
}

}  // namespace kvpool
