// A slow model of summaries and recall in double precision, and random blocks to try it on.
//
// What it is: the formulas written down plainly, over records that are decoded field by field. What it is not: quick, or the same
// bits. One thread.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "sparse/block_summary.h"
#include "sparse/half_float.h"
#include "sparse/recall.h"
#include "sparse/sparse_path.h"

namespace kvpool::testing {

inline std::vector<SparsePath> available_paths() {
  std::vector<SparsePath> paths;
  for (const SparsePath path : {SparsePath::PORTABLE, SparsePath::AVX2, SparsePath::AVX512}) {
    if (sparse_supports(path)) {
      paths.push_back(path);
    }
  }
  return paths;
}

// Keys and values of one block of one KV head, as floats and as an engine has them.
struct Block {
  KvType type = KvType::FLOAT32;
  uint32_t dim = 0;
  uint32_t tokens = 0;
  std::vector<float> keys;
  std::vector<float> values;
  std::vector<uint8_t> key_bytes;
  std::vector<uint8_t> value_bytes;
  uint64_t stride = 0;

  // Rounds the numbers to the type and lays them out with a gap behind each token.
  void pack(uint64_t gap) {
    stride = uint64_t{dim} * kv_type_bytes(type) + gap;
    pack_one(keys, key_bytes);
    pack_one(values, value_bytes);
  }

  [[nodiscard]] std::vector<uint8_t> summary(SummaryForm form) const {
    std::vector<uint8_t> record(summary_bytes(form, dim) + 16, 0xA5);
    build_summary(form, type, dim, key_bytes.data(), value_bytes.data(), stride, tokens, record.data());
    return record;
  }

 private:
  void pack_one(std::vector<float>& numbers, std::vector<uint8_t>& bytes) const {
    bytes.assign(stride * tokens, 0xFF);
    for (uint32_t t = 0; t < tokens; ++t) {
      for (uint32_t d = 0; d < dim; ++d) {
        float& number = numbers[size_t{t} * dim + d];
        uint8_t* to = bytes.data() + t * stride + d * kv_type_bytes(type);
        if (type == KvType::FLOAT32) {
          std::memcpy(to, &number, 4);
        } else if (type == KvType::FLOAT16) {
          const uint16_t half = to_half(number);
          std::memcpy(to, &half, 2);
          number = from_half(half);
        } else {
          const auto half = static_cast<uint16_t>(std::bit_cast<uint32_t>(number) >> 16);
          std::memcpy(to, &half, 2);
          number = std::bit_cast<float>(uint32_t{half} << 16);
        }
      }
    }
  }
};

// Groups of alike tokens, some channels with large constants, one or two tokens unlike all others.
inline Block random_block(std::mt19937_64& random, KvType type, uint32_t dim, uint32_t tokens) {
  std::normal_distribution<float> normal;
  Block block{type, dim, tokens, {}, {}, {}, {}, 0};
  std::vector<float> topic(dim), constant(dim);
  for (uint32_t d = 0; d < dim; ++d) {
    constant[d] = random() % 16 == 0 ? 12.0F * normal(random) : 0.0F;
  }
  for (uint32_t t = 0; t < tokens; ++t) {
    const bool is_odd = random() % 40 == 0;
    if (t == 0 || random() % 30 == 0) {
      std::generate(topic.begin(), topic.end(), [&] { return normal(random); });
    }
    for (uint32_t d = 0; d < dim; ++d) {
      block.keys.push_back(constant[d] + topic[d] + (is_odd ? 3.0F : 0.3F) * normal(random));
      block.values.push_back(normal(random));
    }
  }
  block.pack(random() % 3 * 32);
  return block;
}

// A record of clusters, decoded.
struct Decoded {
  std::vector<double> key_means[CLUSTERS];
  std::vector<double> value_means[CLUSTERS];
  std::vector<double> profile;
  double variances[CLUSTERS];
  uint32_t counts[CLUSTERS];

  Decoded(const uint8_t* record, uint32_t dim) {
    const ClusterFields at = cluster_fields(dim);
    const auto half = [&](uint32_t offset) {
      uint16_t bits;
      std::memcpy(&bits, record + offset, 2);
      return static_cast<double>(from_half(bits));
    };
    for (uint32_t j = 0; j < CLUSTERS; ++j) {
      counts[j] = record[at.counts + j];
      variances[j] = half(at.variances + j * 2);
      for (uint32_t d = 0; d < dim; ++d) {
        const uint32_t group = d / CHANNEL_GROUP;
        const int code = record[d / 4 * 32 + j * 4 + d % 4] - 128;
        key_means[j].push_back(code * half(at.key_scales + (group * 8 + j) * 2));
        uint32_t packed;
        std::memcpy(&packed, record + at.values + d * 4, 4);
        const int nibble = static_cast<int>(packed >> (4 * j) & 15U) - 8;
        value_means[j].push_back(nibble * half(at.value_scales + (group * CLUSTERS + j) * 2));
      }
    }
    for (uint32_t d = 0; d < dim; ++d) {
      profile.push_back(record[d / 4 * 32 + 28 + d % 4] * half(at.key_scales + (d / CHANNEL_GROUP * 8 + 7) * 2));
    }
  }

  [[nodiscard]] uint32_t tokens() const {
    uint32_t sum = 0;
    for (const uint32_t count : counts) {
      sum += count;
    }
    return sum;
  }

  // Logits of the clusters for one query; the correction for the spread is `share` of the Gaussian one.
  [[nodiscard]] std::vector<double> logits(const float* query, double share) const {
    const auto dim = static_cast<double>(profile.size());
    double spread = 0;
    for (size_t d = 0; d < profile.size(); ++d) {
      spread += static_cast<double>(query[d]) * query[d] * profile[d] / dim;
    }
    std::vector<double> all;
    for (uint32_t j = 0; j < CLUSTERS; ++j) {
      double product = 0;
      for (size_t d = 0; d < profile.size(); ++d) {
        product += query[d] * key_means[j][d];
      }
      const double correction = share * std::min(0.5 * variances[j] * spread, 30.0);
      all.push_back(counts[j] == 0 ? -std::numeric_limits<double>::infinity()
                                   : product / std::sqrt(dim) + std::log(counts[j]) + correction);
    }
    return all;
  }
};

inline double log_sum_exp(const std::vector<double>& logits) {
  const double top = *std::max_element(logits.begin(), logits.end());
  if (std::isinf(top)) {
    return top;
  }
  double sum = 0;
  for (const double logit : logits) {
    sum += std::exp(logit - top);
  }
  return top + std::log(sum);
}

// What a recall answers, with room for it.
struct Answered {
  explicit Answered(const RecallShape& shape, uint32_t take, bool wants_tail)
      : chosen(size_t{shape.kv_heads} * take), is_dense(shape.kv_heads), kept_mass(shape.heads()), loose_share(shape.heads()),
        tail_logits(wants_tail ? shape.heads() : 0), tail_values(wants_tail ? size_t{shape.heads()} * shape.head_dim : 0) {}

  [[nodiscard]] RecallAnswer view() {
    return {chosen.data(), is_dense.data(), kept_mass.data(), loose_share.data(),
            tail_logits.empty() ? nullptr : tail_logits.data(), tail_values.empty() ? nullptr : tail_values.data()};
  }
  [[nodiscard]] bool has_same_bits(const Answered& other) const {
    const auto same = [](const auto& a, const auto& b) {
      return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0);
    };
    return same(chosen, other.chosen) && same(is_dense, other.is_dense) && same(kept_mass, other.kept_mass) &&
           same(loose_share, other.loose_share) && same(tail_logits, other.tail_logits) && same(tail_values, other.tail_values);
  }

  std::vector<int32_t> chosen;
  std::vector<uint8_t> is_dense;
  std::vector<float> kept_mass;
  std::vector<float> loose_share;
  std::vector<float> tail_logits;
  std::vector<float> tail_values;
};

// Records of some blocks, one KV head behind the other, each block in memory of its own.
struct Records {
  std::vector<std::vector<uint8_t>> bytes;
  std::vector<const uint8_t*> pointers;

  Records(std::mt19937_64& random, const RecallShape& shape, uint32_t blocks, uint32_t tokens, KvType type = KvType::BFLOAT16) {
    const uint64_t size = summary_bytes(shape.form, shape.head_dim);
    for (uint32_t b = 0; b < blocks; ++b) {
      bytes.emplace_back(shape.kv_heads * size);  // exactly: a read behind it is found by the address sanitizer
      for (uint32_t g = 0; g < shape.kv_heads; ++g) {
        const auto record = random_block(random, type, shape.head_dim, tokens).summary(shape.form);
        std::memcpy(bytes.back().data() + g * size, record.data(), size);
      }
    }
    for (const auto& block : bytes) {
      pointers.push_back(block.data());
    }
  }
};

inline std::vector<float> random_queries(std::mt19937_64& random, const RecallShape& shape, float size) {
  std::normal_distribution<float> normal;
  std::vector<float> queries(size_t{shape.heads()} * shape.head_dim);
  std::generate(queries.begin(), queries.end(), [&] { return size * normal(random); });
  return queries;
}

}  // namespace kvpool::testing
