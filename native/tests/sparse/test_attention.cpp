// Attention over runs against a slow model in double precision: types, instruction sets, shapes, orders, and what is not finite.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "sparse/attention/attention.h"
#include "tests/harness.h"

namespace kvpool {
namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr AttentionPath PATHS[] = {AttentionPath::PORTABLE, AttentionPath::AVX2, AttentionPath::AVX512};

uint16_t to_half(float number) {  // of numbers that are normal as float16
  const auto bits = std::bit_cast<uint32_t>(number);
  const uint32_t exponent = (bits >> 23U & 0xFFU) - 112;
  return static_cast<uint16_t>((bits >> 16U & 0x8000U) | exponent << 10U | (bits >> 13U & 0x3FFU));
}

float from_half(uint16_t half) {
  if ((half & 0x7FFFU) == 0) {
    return 0.0F;
  }
  return std::bit_cast<float>((uint32_t{half} & 0x8000U) << 16U | ((half >> 10U & 0x1FU) + 112U) << 23U | (uint32_t{half} & 0x3FFU) << 13U);
}

// Keys and values of some runs, each in memory of its own, and a query.
class Setting {
 public:
  Setting(AttentionShape shape, std::vector<uint64_t> tokens, std::mt19937_64& random)
      : shape_(shape), tokens_(std::move(tokens)), query_(size_t{shape.kv_heads} * shape.group * shape.head_dim) {
    shape_.token_stride = uint64_t{shape.kv_heads} * shape.head_dim * kv_type_bytes(shape.type);
    std::normal_distribution<float> number;
    std::ranges::generate(query_, [&] { return number(random); });
    for (const uint64_t count : tokens_) {
      for (auto* planes : {&keys_, &values_}) {
        planes->emplace_back(count * shape_.token_stride);
        for (uint64_t item = 0; item < count * shape.kv_heads * shape.head_dim; ++item) {
          write(planes->back(), item, number(random));
        }
      }
    }
    wanted_.assign(tokens_.size() * shape.kv_heads, 1);
  }

  void write(std::vector<uint8_t>& plane, uint64_t item, float number) const {
    if (shape_.type == KvType::FLOAT32) {
      std::memcpy(plane.data() + item * 4, &number, 4);
      return;
    }
    const uint16_t raw = shape_.type == KvType::FLOAT16 ? to_half(std::abs(number) < 0.001F ? 0.001F : number)
                                                       : static_cast<uint16_t>(std::bit_cast<uint32_t>(number) >> 16U);
    std::memcpy(plane.data() + item * 2, &raw, 2);
  }

  [[nodiscard]] float read(const std::vector<uint8_t>& plane, uint64_t item) const {
    if (shape_.type == KvType::FLOAT32) {
      float number = 0;
      std::memcpy(&number, plane.data() + item * 4, 4);
      return number;
    }
    uint16_t raw = 0;
    std::memcpy(&raw, plane.data() + item * 2, 2);
    return shape_.type == KvType::FLOAT16 ? from_half(raw) : std::bit_cast<float>(uint32_t{raw} << 16U);
  }

  struct Answer {
    std::vector<float> logits;
    std::vector<float> values;
    bool operator==(const Answer&) const = default;
  };

  [[nodiscard]] Answer attended(unsigned threads = 1) const {
    std::vector<KvRun> runs;
    for (size_t run = 0; run < tokens_.size(); ++run) {
      runs.push_back({keys_[run].data(), values_[run].data(), tokens_[run]});
    }
    const size_t heads = size_t{shape_.kv_heads} * shape_.group;
    Answer answer{std::vector<float>(heads), std::vector<float>(query_.size())};
    WorkerTeam team(threads);
    attend({shape_, runs, wanted_}, query_.data(), answer.logits.data(), answer.values.data(), team);
    return answer;
  }

  [[nodiscard]] Answer modelled() const {
    Answer answer;
    const uint32_t dim = shape_.head_dim;
    for (uint32_t head = 0; head < shape_.kv_heads * shape_.group; ++head) {
      const uint32_t kv_head = head / shape_.group;
      double sum = 0;
      std::vector<double> value(dim);
      for (size_t run = 0; run < tokens_.size(); ++run) {
        for (uint64_t token = 0; token < tokens_[run] && wanted_[run * shape_.kv_heads + kv_head] != 0; ++token) {
          const uint64_t first = (token * shape_.kv_heads + kv_head) * dim;
          double dot = 0;
          for (uint32_t channel = 0; channel < dim; ++channel) {
            dot += double{query_[head * dim + channel]} * double{read(keys_[run], first + channel)};
          }
          const double weight = std::exp(dot / std::sqrt(dim));
          sum += weight;
          for (uint32_t channel = 0; channel < dim; ++channel) {
            value[channel] += weight * double{read(values_[run], first + channel)};
          }
        }
      }
      answer.logits.push_back(static_cast<float>(std::log(sum)));
      for (const double each : value) {
        answer.values.push_back(sum == 0 ? 0.0F : static_cast<float>(each / sum));
      }
    }
    return answer;
  }

  AttentionShape shape_;
  std::vector<uint64_t> tokens_;
  std::vector<float> query_;
  std::vector<std::vector<uint8_t>> keys_;
  std::vector<std::vector<uint8_t>> values_;
  std::vector<uint8_t> wanted_;
};

void expect_close(const std::vector<float>& found, const std::vector<float>& expected, float tolerance) {
  EXPECT(found.size() == expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT(found[i] == expected[i] || std::abs(found[i] - expected[i]) <= tolerance);
  }
}

void expect_as_model(const Setting& setting) {
  const Setting::Answer expected = setting.modelled();
  for (const AttentionPath path : PATHS) {
    if (attention_supports(path)) {
      set_attention_path(path);
      const Setting::Answer found = setting.attended();
      expect_close(found.logits, expected.logits, 2e-4F);
      expect_close(found.values, expected.values, 2e-4F);
    }
  }
}

TEST(attention_is_that_of_a_slow_model) {
  std::mt19937_64 random(testing::seed());
  for (const KvType type : {KvType::FLOAT32, KvType::FLOAT16, KvType::BFLOAT16}) {
    for (const uint32_t head_dim : {32U, 96U, 128U, 256U}) {
      for (const uint32_t group : {1U, 2U, 3U, 4U, 7U, 8U}) {
        Setting setting({type, head_dim, 2, group, 0}, {1, 16, 128, 33, 70}, random);
        expect_as_model(setting);
        std::ranges::generate(setting.wanted_, [&] { return static_cast<uint8_t>(random() % 2); });
        expect_as_model(setting);
      }
    }
  }
}

TEST(a_query_of_bfloat16_and_one_of_float_are_both_exact) {
  std::mt19937_64 random(testing::seed());
  Setting setting({KvType::BFLOAT16, 128, 2, 4, 0}, {128, 40}, random);
  expect_as_model(setting);
  for (float& number : setting.query_) {
    number = std::bit_cast<float>(std::bit_cast<uint32_t>(number) & 0xFFFF0000U);
  }
  expect_as_model(setting);
}

TEST(a_head_without_tokens_has_no_mass) {
  std::mt19937_64 random(testing::seed());
  Setting setting({KvType::BFLOAT16, 64, 2, 2, 0}, {128, 8}, random);
  setting.wanted_ = {0, 1, 0, 1};
  expect_as_model(setting);
  const Setting::Answer found = setting.attended();
  EXPECT(found.logits[0] == -INF && found.logits[1] == -INF && found.logits[2] > -INF);
  EXPECT(std::ranges::all_of(std::span(found.values).first(128), [](float each) { return each == 0.0F; }));
  setting.wanted_.assign(4, 0);
  EXPECT(std::ranges::all_of(setting.attended().logits, [](float each) { return each == -INF; }));
}

TEST(threads_change_no_bit) {
  std::mt19937_64 random(testing::seed());
  const Setting setting({KvType::BFLOAT16, 64, 4, 2, 0}, std::vector<uint64_t>(150, 128), random);
  const Setting::Answer one = setting.attended(1);
  EXPECT(one == setting.attended(2));
  EXPECT(one == setting.attended(3));
}

TEST(large_logits_do_not_overflow) {
  std::mt19937_64 random(testing::seed());
  Setting setting({KvType::FLOAT32, 64, 1, 4, 0}, {128, 128}, random);
  std::ranges::for_each(setting.query_, [](float& each) { each *= 300.0F; });
  for (const AttentionPath path : PATHS) {
    if (attention_supports(path)) {
      set_attention_path(path);
      const Setting::Answer found = setting.attended();
      EXPECT(std::ranges::all_of(found.values, [](float each) { return std::isfinite(each); }));
      EXPECT(std::ranges::all_of(found.logits, [](float each) { return std::isfinite(each) && each > 200.0F; }));
    }
  }
}

// Keys of infinity against a query of the other sign: logits of -inf, also where a run has no other, or begins with them.
TEST(logits_of_minus_infinity_weigh_nothing) {
  std::mt19937_64 random(testing::seed());
  for (const KvType type : {KvType::FLOAT32, KvType::BFLOAT16}) {
    for (const AttentionPath path : PATHS) {
      if (!attention_supports(path)) {
        continue;
      }
      set_attention_path(path);
      for (const uint64_t first : {uint64_t{1}, uint64_t{16}, uint64_t{17}, uint64_t{128}}) {
        Setting setting({type, 64, 1, 2, 0}, {128, 20}, random);
        // Of bfloat16: with AVX-512 the rest of a float, of either sign or zero, would meet infinity too.
        std::ranges::for_each(setting.query_, [](float& each) { each = std::bit_cast<float>(std::bit_cast<uint32_t>(each) & 0xFFFF0000U); });
        setting.query_[0] = setting.query_[64] = -1.0F;
        for (uint64_t token = 0; token < first; ++token) {
          setting.write(setting.keys_[0], token * 64, INF);
        }
        const Setting::Answer found = setting.attended();
        EXPECT(std::ranges::all_of(found.values, [](float each) { return std::isfinite(each); }));
        EXPECT(std::ranges::all_of(found.logits, [](float each) { return std::isfinite(each); }));
      }
    }
  }
}

TEST(what_is_not_finite_shows) {
  std::mt19937_64 random(testing::seed());
  for (const KvType type : {KvType::FLOAT32, KvType::BFLOAT16}) {
    for (const AttentionPath path : PATHS) {
      if (!attention_supports(path)) {
        continue;
      }
      set_attention_path(path);
      Setting setting({type, 64, 2, 2, 0}, {128, 20}, random);
      setting.write(setting.keys_[0], 64 * 2 * 40, std::numeric_limits<float>::quiet_NaN());  // token 40, KV head 0
      const Setting::Answer found = setting.attended();
      EXPECT(std::isnan(found.values[0]) && std::isnan(found.logits[0]));
      EXPECT(std::isfinite(found.values[2 * 64]) && std::isfinite(found.logits[2]));
    }
  }
}

}  // namespace
}  // namespace kvpool

