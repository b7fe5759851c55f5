// Devices, their memory and pins: what is opened, shared, refused and given back.
#include "device/device.h"

#include "tests/device/device_setting.h"

using namespace kvpool;
using namespace kvpool::testing;

namespace {

std::string text_of_open(int ordinal = 0) {
  const DeviceResult opened = Device::open(EMULATED, ordinal);
  return opened.device == nullptr ? opened.fault + opened.missing : "";
}

constexpr uint64_t UNIT = uint64_t{2} << 20;

}  // namespace

TEST(a_missing_library_is_named_with_what_to_do) {
  const DeviceResult opened = Device::open("libno-such-driver.so.1", 0);
  EXPECT(opened.device == nullptr && opened.fault.empty());
  EXPECT(opened.missing.find("libno-such-driver.so.1") != std::string::npos);
  EXPECT(opened.missing.find("hbm.driver") != std::string::npos);
}

TEST(a_missing_symbol_is_named) {
  const DeviceResult opened = Device::open("libm.so.6", 0);
  EXPECT(opened.missing.find("libm.so.6 has no cuInit") != std::string::npos);
}

TEST(a_device_has_its_uuid_whatever_its_ordinal) {
  const auto first = open_device(CopyMethod::BATCH, 0);
  const auto second = open_device(CopyMethod::BATCH, 1);
  EXPECT(std::memcmp(first->uuid().bytes, "emulated-device0", 16) == 0);
  EXPECT(std::memcmp(second->uuid().bytes, "emulated-device1", 16) == 0);
  EXPECT(first->name() == "Emulated Device 0");
  EXPECT(first->driver_version() == 13000);
  EXPECT(second->ordinal() == 1);
}

TEST(an_ordinal_that_there_is_not_is_named) {
  EXPECT(text_of_open(7) == "cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE (101)");
  EXPECT(live_sum() == 0);
}

TEST(each_call_that_fails_while_a_device_is_opened_is_named_and_leaves_nothing) {
  offer(CopyMethod::BATCH);
  for (const char* const call : {"cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuDeviceGetName",
                                 "cuDeviceGetUuid_v2", "cuDeviceGetAttribute", "cuDriverGetVersion"}) {
    order(std::string("fail ") + call + " 1 999");
    EXPECT(text_of_open() == std::string(call) + " failed: CUDA_ERROR_UNKNOWN (999)");
    EXPECT(live_sum() == 0);
  }
}

TEST(a_kernel_that_cannot_be_had_leaves_single_copies) {
  offer(CopyMethod::KERNEL);
  for (const char* const call : {"cuModuleLoadData", "cuModuleGetFunction"}) {
    order(std::string("fail ") + call + " 1 999");
    const DeviceResult opened = Device::open(EMULATED, 0);
    EXPECT(opened.device->copy_method() == CopyMethod::SINGLE);
  }
  EXPECT(live_sum() == 0);
}

TEST(memory_is_rounded_up_and_given_back) {
  {
    const auto device = open_device();
    const auto memory = allocate(device, UNIT + 1);
    EXPECT(memory->size() == 2 * UNIT);
    EXPECT(memory->address() % UNIT == 0);
    EXPECT(memory->contains(UNIT, UNIT) && !memory->contains(UNIT, UNIT + 1));
    EXPECT(live("memory") == 1 && live("mappings") == 1);
  }
  EXPECT(live_sum() == 0);
}

TEST(each_call_that_fails_while_memory_is_made_is_named_and_leaves_nothing) {
  {
    const auto device = open_device();
    for (const char* const call : {"cuMemGetAllocationGranularity", "cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"}) {
      order(std::string("fail ") + call + " 1 2");
      const DeviceMemoryResult made = DeviceMemory::allocate(device, UNIT);
      EXPECT(made.memory == nullptr);
      EXPECT(device->text(made.status) == std::string(call) + " failed: CUDA_ERROR_OUT_OF_MEMORY (2)");
      EXPECT(live("memory") + live("reservations") + live("mappings") == 0);
    }
    EXPECT(!DeviceMemory::allocate(device, UINT64_MAX).status.ok());
    EXPECT(!DeviceMemory::allocate(device, uint64_t{1} << 40).status.ok());
    EXPECT(device->failed_releases() == 0);
  }
  EXPECT(live_sum() == 0);
}

TEST(an_export_is_read_with_the_bytes_that_its_owner_wrote) {
  const auto device = open_device();
  const auto stream = make_stream(device);
  const auto memory = allocate(device, UNIT);
  const auto bytes = random_bytes(5000, 1);
  write_to(*stream, memory->address() + 77, bytes);
  int fd = -1;
  EXPECT(memory->export_to(fd).ok());
  const DeviceMemoryResult attached = DeviceMemory::attach(device, fd, memory->size());
  close(fd);
  EXPECT(attached.status.ok() && !attached.memory->is_writable());
  EXPECT(read_from(*stream, attached.memory->address() + 77, 5000) == bytes);
}

TEST(who_attaches_memory_cannot_write_to_it) {
  const auto device = open_device();
  const auto stream = make_stream(device);
  const auto memory = allocate(device, UNIT);
  int fd = -1;
  EXPECT(memory->export_to(fd).ok());
  const auto attached = DeviceMemory::attach(device, fd, memory->size()).memory;
  close(fd);
  const std::vector<uint8_t> bytes(10);
  const DeviceEventResult recorded = stream->record();
  EXPECT(copy_one(*stream, attached->address(), address_of(bytes.data()), 10).ok());
  bool is_done = false;
  EXPECT(comes_true([&] { return recorded.event->query(is_done).code == 700; }));  // ILLEGAL_ADDRESS: the context has ended
}

TEST(a_descriptor_that_is_no_export_and_a_size_that_it_has_not_are_refused) {
  const auto device = open_device();
  const int fd = memfd_create("another", MFD_CLOEXEC);
  const DeviceMemoryResult foreign = DeviceMemory::attach(device, fd, UNIT);
  close(fd);
  EXPECT(device->text(foreign.status) == "cuMemImportFromShareableHandle failed: CUDA_ERROR_INVALID_VALUE (1)");
  const auto memory = allocate(device, UNIT);
  int exported = -1;
  EXPECT(memory->export_to(exported).ok());
  const DeviceMemoryResult larger = DeviceMemory::attach(device, exported, 2 * UNIT);
  EXPECT(device->text(larger.status) == "cuMemMap failed: CUDA_ERROR_INVALID_VALUE (1)");
  close(exported);
  EXPECT(live("memory") == 1 && live("reservations") == 1);
}

TEST(memory_of_one_device_is_not_mapped_on_another) {
  const auto first = open_device(CopyMethod::BATCH, 0);
  const auto second = open_device(CopyMethod::BATCH, 1);
  const auto memory = allocate(first, UNIT);
  int fd = -1;
  EXPECT(memory->export_to(fd).ok());
  EXPECT(!DeviceMemory::attach(second, fd, memory->size()).status.ok());
  close(fd);
}

TEST(mappings_are_pinned_as_long_as_somebody_holds_the_pin) {
  const auto device = open_device();
  const auto mapping = Mapping::create("pinned", 1 << 20, false).mapping;
  const std::shared_ptr<const Mapping> read_only = Mapping::attach(mapping->fd(), mapping->size(), false).mapping;
  {
    const auto written = PinnedMapping::pin(device, mapping, true);
    const auto read = PinnedMapping::pin(device, read_only, false);
    EXPECT(written->is_pinned() && read->is_pinned());
    EXPECT(live("registrations") == 2);
    const auto again = PinnedMapping::pin(device, mapping, true);
    EXPECT(again->is_pinned() && live("registrations") == 2);
  }
  EXPECT(live("registrations") == 0);
  EXPECT(device->failed_releases() == 0);
}

TEST(a_mapping_that_the_driver_refuses_to_pin_says_why) {
  const auto device = open_device();
  order("fail cuMemHostRegister_v2 1 2");
  const auto pinned = PinnedMapping::pin(device, Mapping::create("refused", 1 << 20, false).mapping, true);
  EXPECT(!pinned->is_pinned());
  EXPECT(pinned->fault() == "cuMemHostRegister_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2)");
}

TEST(an_address_has_its_devices_ordinal_and_the_hosts_has_none) {
  const auto device = open_device(CopyMethod::BATCH, 1);
  const auto memory = allocate(device, UNIT);
  const auto pinned = PinnedMemory::allocate(*device, 4096);
  const int number = 0;
  EXPECT(find_ordinal(EMULATED, memory->address() + 5).ordinal == 1);
  EXPECT(!find_ordinal(EMULATED, address_of(&number)).ordinal && find_ordinal(EMULATED, address_of(&number)).fault.empty());
  EXPECT(!find_ordinal(EMULATED, address_of(pinned.memory->data())).ordinal);
  EXPECT(!find_ordinal("libno-such-driver.so.1", 5).missing.empty());
  order("fail cuPointerGetAttribute 1 999");
  EXPECT(find_ordinal(EMULATED, memory->address()).fault == "cuPointerGetAttribute failed: CUDA_ERROR_UNKNOWN (999)");
}

TEST(the_callers_context_stays_current) {
  const auto first = open_device(CopyMethod::BATCH, 0);
  const auto second = open_device(CopyMethod::BATCH, 1);
  const CurrentContext outer(*first);
  const auto memory = allocate(second, UNIT);
  cuda::Context popped = nullptr;
  EXPECT(first->driver().pop_context(&popped).ok() && popped == first->context());
  EXPECT(first->driver().push_context(popped).ok());
}

TEST(everything_was_given_back) { EXPECT(live_sum() == 0); }

// What could not be given back stays: the last test.
TEST(a_release_that_fails_is_counted) {
  const auto device = open_device();
  order("fail cuMemUnmap 1 999\nfail cuMemRelease 1 999");
  allocate(device, UNIT).reset();
  EXPECT(device->failed_releases() == 3);  // the range of what is mapped cannot be freed either
}
