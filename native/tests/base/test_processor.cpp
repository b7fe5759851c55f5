// Features of the processor, as the kernel knows them.
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string>

#include "base/processor.h"
#include "tests/harness.h"

#if defined(__x86_64__)

using namespace kvpool;

namespace {

std::set<std::string> flags_of_kernel() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("flags")) {
      std::istringstream words(line);
      return {std::istream_iterator<std::string>(words), {}};
    }
  }
  return {};
}

}  // namespace

TEST(features_are_those_that_the_kernel_lists) {
  const auto flags = flags_of_kernel();
  const ProcessorFeatures& has = processor_features();
  EXPECT(!flags.empty());
  EXPECT(has.sse42 == flags.contains("sse4_2"));
  EXPECT(has.avx2 == flags.contains("avx2"));
  EXPECT(has.fma == flags.contains("fma"));
  EXPECT(has.f16c == flags.contains("f16c"));
  EXPECT(has.avx512f == flags.contains("avx512f"));
  EXPECT(has.avx512bw == flags.contains("avx512bw"));
  EXPECT(has.avx512dq == flags.contains("avx512dq"));
  EXPECT(has.avx512vl == flags.contains("avx512vl"));
  EXPECT(has.avx512vnni == flags.contains("avx512_vnni"));
  EXPECT(has.vpclmulqdq == flags.contains("vpclmulqdq"));
}

#endif
