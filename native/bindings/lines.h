// What the bindings of all queues share: their bounds, what has ended, and the end of their threads.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "bindings.h"
#include "released_gil.h"

namespace kvpool {

inline constexpr double SECONDS_MAX = 3600;

[[nodiscard]] inline std::chrono::milliseconds milliseconds_of(double seconds, const char* name) {
  if (!(seconds > 0 && seconds <= SECONDS_MAX)) {
    throw nanobind::value_error((std::string(name) + " must be above 0 and at most 3600 seconds").c_str());
  }
  return std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
}

inline void require_bounds(unsigned threads, size_t jobs_max) {
  if (threads == 0 || threads > THREADS_MAX || jobs_max == 0) {
    throw nanobind::value_error("threads must be 1 to 64, jobs_max positive");
  }
}

template <typename Queue>
void bind_line(nanobind::class_<Queue>& queue) {
  using namespace nanobind::literals;
  queue
      .def("take_outcomes", [](Queue& self, size_t limit) { return self.take_outcomes(limit); }, "limit"_a = SIZE_MAX,
           "What has ended, each thing once, `limit` at most. Nothing writes to the slot of a reported chunk.")
      .def("fileno", [](const Queue& self) { return self.event_fd(); }, "Readable while there are outcomes.")
      .def(
          "stop",
          [](Queue& self, double timeout_s) {
            const auto timeout = milliseconds_of(timeout_s, "timeout_s");
            const ReleasedGil released;
            return self.stop(timeout);
          },
          "timeout_s"_a, "Ends everything, reported like any end, and the threads; False where one has not ended in time. GIL released.");
}

}  // namespace kvpool
