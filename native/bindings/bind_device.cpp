// Bindings of devices: their memory, streams and events. Checks every id and column before anything is queued; the GIL is released where
// the driver may take long. No other logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings.h"
#include "columns.h"
#include "device/device_memory.h"
#include "device/device_stream.h"
#include "device/pinned_memory.h"
#include "released_gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

// A library that is missing is the system's fault, a call that failed the device's.
void require(const std::string& missing, const std::string& fault) {
  if (!missing.empty()) {
    PyErr_SetString(PyExc_OSError, missing.c_str());
    throw nb::python_error();
  }
  if (!fault.empty()) {
    throw std::runtime_error(fault);
  }
}

void require(const Device& device, DeviceStatus status) {
  if (!status.ok()) {
    throw std::runtime_error(device.text(status));
  }
}

// What `act` makes without the GIL.
template <typename Act>
auto unlocked(Act act) {
  const ReleasedGil released;
  return act();
}

std::shared_ptr<Device> open_device(const std::string& driver, int ordinal) {
  DeviceResult opened = unlocked([&] { return Device::open(driver, ordinal); });
  require(opened.missing, opened.fault);
  return std::move(opened.device);
}

std::optional<int> ordinal_of(uint64_t address, const std::string& driver) {
  const FoundOrdinal found =
      unlocked([&] { return find_ordinal(driver.empty() ? Driver::default_path() : driver, address); });
  require(found.missing, found.fault);
  return found.ordinal;
}

std::shared_ptr<DeviceMemory> memory_of(const Device& device, DeviceMemoryResult result) {
  require(device, result.status);
  return std::move(result.memory);
}

void require_size(uint64_t size) {
  if (size == 0) {
    throw nb::value_error("size must be positive");
  }
}

std::shared_ptr<DeviceMemory> allocate(const std::shared_ptr<Device>& device, uint64_t size) {
  require_size(size);
  return memory_of(*device, unlocked([&] { return DeviceMemory::allocate(device, size); }));
}

std::shared_ptr<DeviceMemory> attach(const std::shared_ptr<Device>& device, int fd, uint64_t size) {
  require_size(size);
  return memory_of(*device, unlocked([&] { return DeviceMemory::attach(device, fd, size); }));
}

int export_memory(const DeviceMemory& memory) {
  int fd = -1;
  require(*memory.device(), memory.export_to(fd));
  return fd;
}

std::shared_ptr<PinnedMapping> pin(const std::shared_ptr<Device>& device, const std::shared_ptr<Mapping>& mapping, bool writable) {
  if (writable && !mapping->is_writable()) {
    throw nb::value_error("the mapping is read-only");
  }
  return unlocked([&] { return PinnedMapping::pin(device, mapping, writable); });
}

std::shared_ptr<DeviceStream> make_stream(const std::shared_ptr<Device>& device) {
  DeviceStreamResult made = unlocked([&] { return DeviceStream::make(device); });
  require(*device, made.status);
  return std::move(made.stream);
}

std::shared_ptr<DeviceEvent> event_of(const Device& device, DeviceEventResult result) {
  require(device, result.status);
  return std::move(result.event);
}

std::shared_ptr<DeviceEvent> mark(const std::shared_ptr<Device>& device, uint64_t stream) {
  const auto handle = reinterpret_cast<cuda::Stream>(stream);
  return event_of(*device, unlocked([&] { return DeviceEvent::record(device, handle); }));
}

std::shared_ptr<DeviceEvent> record(DeviceStream& stream) {
  return event_of(stream.device(), unlocked([&] { return stream.record(); }));
}

void wait_for(DeviceStream& stream, const DeviceEvent& event) {
  require(stream.device(), unlocked([&] { return stream.wait_for(event); }));
}

template <typename Word>
std::vector<Word> words(const nb::bytes& packed, const char* name) {
  if (packed.size() % sizeof(Word) != 0) {
    throw nb::value_error((std::string(name) + " is no column of 64-bit words").c_str());
  }
  return unpacked<Word>(packed);
}

void copy_extent(DeviceStream& stream, const CacheView& view, size_t extent, const nb::bytes& block_ids,
                 const nb::bytes& chunks, uint64_t payload_bytes, DeviceStatus (DeviceStream::*way)(const ExtentCopy&)) {
  const auto ids = words<int64_t>(block_ids, "block_ids");
  const auto addresses = words<uint64_t>(chunks, "the chunks' addresses");
  const ExtentCopy copy{view, extent, ids, addresses, payload_bytes};
  if (const char* fault = extent_fault(copy)) {
    throw nb::value_error(fault);
  }
  require(stream.device(), unlocked([&] { return (stream.*way)(copy); }));
}

void scatter(DeviceStream& stream, const CacheView& view, size_t extent, const nb::bytes& block_ids, const nb::bytes& sources,
             uint64_t payload_bytes) {
  copy_extent(stream, view, extent, block_ids, sources, payload_bytes, &DeviceStream::scatter);
}

void gather(DeviceStream& stream, const CacheView& view, size_t extent, const nb::bytes& block_ids, const nb::bytes& targets,
            uint64_t payload_bytes) {
  copy_extent(stream, view, extent, block_ids, targets, payload_bytes, &DeviceStream::gather);
}

void copy(DeviceStream& stream, const nb::bytes& targets, const nb::bytes& sources, const nb::bytes& sizes) {
  const auto into = words<uint64_t>(targets, "targets");
  const auto from = words<uint64_t>(sources, "sources");
  const auto bytes = words<uint64_t>(sizes, "sizes");
  if (into.size() != from.size() || from.size() != bytes.size()) {
    throw nb::value_error("targets, sources and sizes differ in length");
  }
  require(stream.device(), unlocked([&] { return stream.copy(into, from, bytes); }));
}

void hold(const DeviceEvent& event, uint64_t stream) {
  const auto handle = reinterpret_cast<cuda::Stream>(stream);
  require(event.device(), unlocked([&] { return event.hold(handle); }));
}

bool is_done(const DeviceEvent& event) {
  bool done = false;
  require(event.device(), event.query(done));
  return done;
}

bool wait(const DeviceEvent& event, double timeout_s) {
  bool done = false;
  require(event.device(), unlocked([&] { return event.wait(timeout_s, done); }));
  return done;
}

void bind_handles(nb::module_& module) {
  nb::class_<DeviceMemory>(module, "DeviceMemory", "Memory of a device, for copies alone; it must outlive those that use it.")
      .def_prop_ro("address", &DeviceMemory::address)
      .def_prop_ro("size", &DeviceMemory::size)
      .def("export", &export_memory, "A new descriptor, which the caller closes; `Device.attach` of another process maps it.");
  nb::class_<PinnedMapping>(module, "PinnedMapping", "A mapping that the device copies from, and to, directly, while this object lives.")
      .def_prop_ro("is_pinned", &PinnedMapping::is_pinned, "False where the driver refused: copies are right, and slower.")
      .def_prop_ro("fault", &PinnedMapping::fault, "Why it refused, or nothing.");
  nb::class_<DeviceEvent>(module, "DeviceEvent", "Done when everything is that its stream had been given before.")
      .def("hold", &hold, "stream"_a, "What a stream's raw handle, an engine's, is given from now on begins after the event.")
      .def("is_done", &is_done, "RuntimeError where the device has failed.")
      .def("wait", &wait, "timeout_s"_a, "Whether it is done within the time; RuntimeError as above. GIL released.");
  nb::class_<DeviceStream>(module, "DeviceStream",
                           "Copies in the order in which they are given. What they read and write must stay until an event behind them is\n"
                           "done.")
      .def("wait_for", &wait_for, "event"_a, "What is given afterwards begins after the event.")
      .def("record", &record, "An event behind everything that was given so far.")
      .def("scatter", &scatter, "view"_a, "extent"_a, "block_ids"_a, "sources"_a, "payload_bytes"_a,
           "One extent of chunks into the engine's blocks. `block_ids`: i64 [chunk][block], -1: no copy; `sources`: u64, the address of that\n"
           "extent of each chunk, on the host or a device. ValueError for an id outside the view. GIL released.")
      .def("gather", &gather, "view"_a, "extent"_a, "block_ids"_a, "targets"_a, "payload_bytes"_a, "The same the other way. GIL released.")
      .def("copy", &copy, "targets"_a, "sources"_a, "sizes"_a, "Columns of u64. GIL released.");
}

}  // namespace

void bind_device(nb::module_& module) {
  bind_handles(module);
  nb::class_<Device>(module, "Device", nb::is_weak_referenceable(), "A device by its driver's library and ordinal, with the context that engines of the process use.")
      .def(nb::new_(&open_device), "driver"_a, "ordinal"_a,
           "OSError for a library or symbol that is missing, RuntimeError for a call that failed. GIL released.")
      .def_prop_ro("uuid",
                   [](const Device& self) {
                     const cuda::Uuid& uuid = self.uuid();
                     return nb::bytes(uuid.bytes, sizeof(uuid.bytes));
                   })
      .def_prop_ro("name", &Device::name)
      .def_prop_ro("ordinal", &Device::ordinal)
      .def_prop_ro("driver_version", &Device::driver_version, "12080 for CUDA 12.8.")
      .def_prop_ro("registers_read_only", &Device::registers_read_only,
                   "Whether memory that is mapped read-only can be pinned; copies of it are slower where it cannot.")
      .def_prop_ro("copy_method", [](const Device& self) { return name_of(self.copy_method()); }, "batch, kernel or single.")
      .def("allocate", &allocate, "size"_a, "Exportable memory, rounded up to what the driver gives. GIL released.")
      .def("attach", &attach, "fd"_a, "size"_a,
           "Maps another process's export, read-only, with the size that it has there. The descriptor stays the caller's. GIL released.")
      .def("pin", &pin, "mapping"_a, "writable"_a, "`writable`: copies write to it too. GIL released.")
      .def("stream", &make_stream)
      .def("mark", &mark, "stream"_a, "An event behind what a stream's raw handle, an engine's, has been given.")
      .def_static("ordinal_of", &ordinal_of, "address"_a, "driver"_a = "",
                  "Of the device that the address belongs to, None for the host's memory. `driver`: its library; by default what\n"
                  "KVPOOL_CUDA_DRIVER names, or libcuda.so.1.")
      .def("__repr__", [](const Device& self) {
        return "<Device " + std::to_string(self.ordinal()) + " " + self.name() + ", copies by " + name_of(self.copy_method()) + ">";
      });
}

}  // namespace kvpool
