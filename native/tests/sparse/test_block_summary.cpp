// Summaries against the formulas in double precision: what stands in a record for the tokens of each cluster.
#include <set>

#include "tests/harness.h"
#include "tests/sparse/sparse_model.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

using Rows = std::vector<std::vector<double>>;

Rows rows_of(const std::vector<float>& numbers, uint32_t dim) {
  Rows rows;
  for (size_t at = 0; at < numbers.size(); at += dim) {
    rows.emplace_back(numbers.begin() + static_cast<std::ptrdiff_t>(at), numbers.begin() + static_cast<std::ptrdiff_t>(at + dim));
  }
  return rows;
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t d = 0; d < a.size(); ++d) {
    sum += (a[d] - b[d]) * (a[d] - b[d]);
  }
  return sum;
}

std::vector<double> mean_of(const Rows& rows, const std::vector<uint32_t>& clusters, uint32_t cluster, double count) {
  std::vector<double> mean(rows[0].size());
  for (size_t t = 0; t < rows.size(); ++t) {
    for (size_t d = 0; clusters[t] == cluster && d < mean.size(); ++d) {
      mean[d] += rows[t][d] / count;
    }
  }
  return mean;
}

// Clusters as the format's description says.
struct Clustering {
  std::vector<uint32_t> clusters;  // by token
  double margin = 1e300;           // by how much, relatively, the closest decision was taken

  explicit Clustering(const Rows& keys) : clusters(keys.size()) {
    const Rows scaled = scale(keys);
    Rows centres = {mean_of(scaled, clusters, 0, static_cast<double>(keys.size()))};
    while (centres.size() < CLUSTERS) {
      std::vector<double> nearest;
      for (const auto& key : scaled) {
        double least = 1e300;
        for (const auto& centre : centres) {
          least = std::min(least, distance(key, centre));
        }
        nearest.push_back(least);
      }
      const auto farthest = std::max_element(nearest.begin(), nearest.end());
      for (auto other = nearest.begin(); other != nearest.end(); ++other) {
        if (other != farthest) {
          margin = std::min(margin, (*farthest - *other) / (*farthest + 1e-30));
        }
      }
      centres.push_back(scaled[static_cast<size_t>(farthest - nearest.begin())]);
    }
    for (int round = 0; round < 3; ++round) {
      assign(scaled, centres);
      for (uint32_t j = 0; j < CLUSTERS; ++j) {
        const auto count = std::count(clusters.begin(), clusters.end(), j);
        if (count > 0) {
          centres[j] = mean_of(scaled, clusters, j, static_cast<double>(count));
        }
      }
    }
  }

 private:
  static Rows scale(const Rows& keys) {
    const size_t dim = keys[0].size();
    const auto mean = mean_of(keys, std::vector<uint32_t>(keys.size()), 0, static_cast<double>(keys.size()));
    std::vector<double> variances(dim);
    for (const auto& key : keys) {
      for (size_t d = 0; d < dim; ++d) {
        variances[d] += std::pow(key[d] - mean[d], 2) / static_cast<double>(keys.size());
      }
    }
    Rows scaled = keys;
    for (auto& key : scaled) {
      for (size_t d = 0; d < dim; ++d) {
        const double variance = (variances[d] + variances[(d + dim / 2) % dim]) / 2;
        key[d] = variance > 0 ? (key[d] - mean[d]) / std::pow(variance, 0.25) : 0.0;
      }
    }
    return scaled;
  }

  void assign(const Rows& scaled, const Rows& centres) {
    for (size_t t = 0; t < scaled.size(); ++t) {
      std::vector<double> distances;
      for (const auto& centre : centres) {
        distances.push_back(distance(scaled[t], centre));
      }
      const auto nearest = std::min_element(distances.begin(), distances.end());
      clusters[t] = static_cast<uint32_t>(nearest - distances.begin());
      for (auto other = distances.begin(); other != distances.end(); ++other) {
        if (other != nearest) {
          margin = std::min(margin, (*other - *nearest) / (*other + 1e-30));
        }
      }
    }
  }
};

double largest_in_group(const std::vector<double>& numbers, size_t d) {
  const auto first = numbers.begin() + static_cast<std::ptrdiff_t>(d / CHANNEL_GROUP * CHANNEL_GROUP);
  double most = 0;
  std::for_each(first, first + CHANNEL_GROUP, [&](double number) { most = std::max(most, std::fabs(number)); });
  return most;
}

bool is_quantised(const std::vector<double>& stored, const std::vector<double>& numbers, double codes) {
  for (size_t d = 0; d < numbers.size(); ++d) {
    if (std::fabs(stored[d] - numbers[d]) > largest_in_group(numbers, d) * (0.51 / codes) + 1e-5) {
      return false;
    }
  }
  return true;
}

// Whether the block was one whose decisions rounding cannot change.
bool check(const Block& block) {
  const auto record = block.summary(SummaryForm::CLUSTERS7);
  const Decoded decoded(record.data(), block.dim);
  EXPECT(decoded.tokens() == block.tokens);
  const Rows keys = rows_of(block.keys, block.dim);
  const Clustering model(keys);
  if (model.margin < 1e-4) {
    return false;
  }
  std::vector<double> by_channel(block.dim);
  Rows means;
  for (uint32_t j = 0; j < CLUSTERS; ++j) {
    const auto count = static_cast<uint32_t>(std::count(model.clusters.begin(), model.clusters.end(), j));
    EXPECT(decoded.counts[j] == count);
    means.push_back(mean_of(keys, model.clusters, j, std::max(count, 1U)));
    EXPECT(is_quantised(decoded.key_means[j], means[j], 127));
    EXPECT(is_quantised(decoded.value_means[j], mean_of(rows_of(block.values, block.dim), model.clusters, j, std::max(count, 1U)), 7));
    double variance = 0;
    for (size_t t = 0; t < keys.size(); ++t) {
      if (model.clusters[t] == j) {
        variance += distance(keys[t], means[j]) / (std::max(count, 1U) * block.dim);
        for (uint32_t d = 0; d < block.dim; ++d) {
          by_channel[d] += std::pow(keys[t][d] - means[j][d], 2);
        }
      }
    }
    EXPECT(std::fabs(decoded.variances[j] - variance) <= 1e-3 * variance + 1e-6);
  }
  double mean = 0;
  for (const double square : by_channel) {
    mean += square / block.dim;
  }
  std::vector<double> profile;
  for (uint32_t d = 0; d < block.dim; ++d) {
    profile.push_back(mean > 0 ? by_channel[d] / mean : 0.0);
  }
  EXPECT(is_quantised(decoded.profile, profile, 255));
  return true;
}

bool cannot_be_estimated(const Block& block) {
  const auto record = block.summary(SummaryForm::CLUSTERS7);
  const auto mean = block.summary(SummaryForm::MEAN);
  return std::all_of(record.begin(), record.end() - 16, [](uint8_t byte) { return byte == 0; }) && mean[0] == 0x00 && mean[1] == 0x7E;
}

}  // namespace

TEST(a_record_is_what_the_formulas_say) {
  std::mt19937_64 random(seed());
  int clear = 0;
  for (int round = 0; round < 90; ++round) {
    const uint32_t dims[] = {32, 64, 96, 128, 256};
    const auto type = static_cast<KvType>(round % 3);
    clear += check(random_block(random, type, dims[random() % 5], static_cast<uint32_t>(8 + random() % 140))) ? 1 : 0;
  }
  EXPECT(clear > 45);
}

TEST(a_token_unlike_the_others_is_a_cluster_with_its_own_key_and_value) {
  std::mt19937_64 random(seed());
  Block block = random_block(random, KvType::FLOAT32, 64, 128);
  for (uint32_t d = 0; d < 64; ++d) {
    block.keys[77 * 64 + d] = d % 2 == 0 ? 40.0F : -40.0F;
    block.values[77 * 64 + d] = d % 3 == 0 ? 1.0F : -1.0F;
  }
  block.pack(0);
  const auto record = block.summary(SummaryForm::CLUSTERS7);
  const Decoded decoded(record.data(), 64);
  bool is_found = false;
  for (uint32_t j = 0; j < CLUSTERS; ++j) {
    if (decoded.counts[j] == 1 && decoded.key_means[j][0] > 39.0) {
      is_found = true;
      EXPECT(decoded.variances[j] == 0.0);
      for (uint32_t d = 0; d < 64; ++d) {
        EXPECT(std::fabs(decoded.key_means[j][d] - (d % 2 == 0 ? 40.0 : -40.0)) < 0.04);
        EXPECT(std::fabs(decoded.value_means[j][d] - (d % 3 == 0 ? 1.0 : -1.0)) < 0.001);
      }
    }
  }
  EXPECT(is_found);
}

TEST(tokens_that_are_all_the_same_are_one_cluster_without_spread) {
  std::mt19937_64 random(seed());
  Block block = random_block(random, KvType::BFLOAT16, 96, 50);
  for (size_t at = 96; at < block.keys.size(); ++at) {
    block.keys[at] = block.keys[at - 96];
  }
  block.pack(0);
  const auto record = block.summary(SummaryForm::CLUSTERS7);
  const Decoded decoded(record.data(), 96);
  EXPECT(decoded.counts[0] == 50);
  EXPECT(decoded.variances[0] < 1e-6);
  for (const double share : decoded.profile) {
    EXPECT(std::isfinite(share));
  }
}

TEST(fewer_tokens_than_clusters_leave_clusters_empty) {
  std::mt19937_64 random(seed());
  for (uint32_t tokens = 1; tokens < CLUSTERS; ++tokens) {
    const Block block = random_block(random, KvType::FLOAT16, 64, tokens);
    const auto record = block.summary(SummaryForm::CLUSTERS7);
    const Decoded decoded(record.data(), 64);
    EXPECT(decoded.tokens() == tokens);
    EXPECT(std::count(std::begin(decoded.counts), std::end(decoded.counts), 0U) >= CLUSTERS - tokens);
  }
}

TEST(numbers_that_are_none_or_have_no_scale_make_a_block_that_cannot_be_estimated) {
  std::mt19937_64 random(seed());
  for (const float odd : {std::nanf(""), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(), 3e38F}) {
    for (const bool is_key : {true, false}) {
      Block block = random_block(random, KvType::BFLOAT16, 64, 40);
      (is_key ? block.keys : block.values)[5 * 64 + 9] = odd;
      block.pack(0);
      if (std::isfinite(odd) && !is_key) {
        EXPECT(block.summary(SummaryForm::CLUSTERS7)[cluster_fields(64).counts] == 0);  // a mean keeps no values
      } else {
        EXPECT(cannot_be_estimated(block));
      }
    }
  }
}

TEST(halves_are_rounded_as_by_the_hardware) {
  for (uint32_t bits = 0; bits < 0x7C00; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    EXPECT(to_half(from_half(half)) == half);
    const float next = from_half(static_cast<uint16_t>(half + 1));
    const float middle = from_half(half) + (next - from_half(half)) / 2;
    if (bits + 1 < 0x7C00) {
      EXPECT(to_half(middle) == half + (half & 1));
      EXPECT(to_half_above(std::nextafter(from_half(half), 1e9F)) == half + 1);
    }
  }
  EXPECT(to_half(65519.9F) == 0x7BFF);
  EXPECT(to_half(65520.0F) == 0x7C00);
  EXPECT(to_half(-1e-9F) == 0x8000);
}
