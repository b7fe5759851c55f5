// Memory of the emulated devices, and the host's memory that the driver knows.
//
// Physical memory is a memfd, so that it can be exported as a descriptor. The range that the driver hands out is PROT_NONE: a host that
// touches it dies. Copies go through another mapping of the memfd, which nobody else knows.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "cuda_types.h"

namespace emulated {

inline constexpr size_t GRANULARITY = size_t{2} << 20;
inline constexpr int DEVICES_MAX = 8;
inline constexpr int READS = 1;
inline constexpr int WRITES = 2;
inline const std::string DESCRIPTOR_NAME = "kvpool-emulated-device-";

struct Physical {
  Physical(int descriptor, size_t bytes, int of_device, bool is_of_others, uint8_t* mapped)
      : fd(descriptor), size(bytes), device(of_device), is_imported(is_of_others), alias(mapped) {}
  ~Physical() {
    munmap(alias, size);
    close(fd);
  }
  Physical(const Physical&) = delete;
  Physical& operator=(const Physical&) = delete;

  static inline std::atomic<uint64_t> last_number = 0;
  const uint64_t number = ++last_number;  // never that of another one of this process
  const int fd;
  const size_t size;
  const int device;  // the physical one, whatever ordinal a process gives it
  const bool is_imported;
  uint8_t* const alias;

  static std::shared_ptr<Physical> of(int fd, size_t size, int device, bool is_imported) {
    void* const alias = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (alias == MAP_FAILED) {
      close(fd);
      return nullptr;
    }
    return std::make_shared<Physical>(fd, size, device, is_imported, static_cast<uint8_t*>(alias));
  }

  static std::shared_ptr<Physical> make(size_t size, int device) {
    const int fd = memfd_create((DESCRIPTOR_NAME + std::to_string(device)).c_str(), MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(size)) != 0) {
      return nullptr;
    }
    return of(fd, size, device, false);
  }

  // nullptr: the descriptor is none that `make` made.
  static std::shared_ptr<Physical> import(int exported) {
    char name[128] = {};
    const std::string link = "/proc/self/fd/" + std::to_string(exported);
    struct stat status = {};
    if (readlink(link.c_str(), name, sizeof(name) - 1) < 0 || fstat(exported, &status) != 0) {
      return nullptr;
    }
    const std::string found(name);
    const size_t at = found.find(DESCRIPTOR_NAME);
    if (at == std::string::npos) {
      return nullptr;
    }
    const int fd = fcntl(exported, F_DUPFD_CLOEXEC, 0);
    const int device = std::stoi(found.substr(at + DESCRIPTOR_NAME.size()));
    return fd < 0 ? nullptr : of(fd, static_cast<size_t>(status.st_size), device, true);
  }
};

struct Mapped {
  size_t size = 0;
  size_t offset = 0;
  std::shared_ptr<Physical> physical;
  int access[DEVICES_MAX] = {};  // by physical device
};

struct HostRange {
  size_t size = 0;
  bool is_read_only = false;
  int device = 0;
};

// Bytes that a copy may touch; `held` keeps them mapped.
struct Place {
  uint8_t* bytes = nullptr;  // nullptr: it may not
  std::shared_ptr<Physical> held;

  // Which memory it is; 0: the host's.
  [[nodiscard]] uint64_t memory() const { return held ? held->number : 0; }
};

template <typename Range>
auto range_of(std::map<CUdeviceptr, Range>& ranges, CUdeviceptr address) {
  auto found = ranges.upper_bound(address);
  if (found == ranges.begin()) {
    return ranges.end();
  }
  --found;
  return address - found->first < found->second.size ? found : ranges.end();
}

struct Reserved {
  size_t size = 0;
  void* range = nullptr;  // what was mapped for it
};

// All memory of a process that the driver knows.
struct Memory {
  std::mutex lock;
  std::map<CUmemGenericAllocationHandle, std::shared_ptr<Physical>> handles;  // what follows is guarded by lock
  std::map<CUdeviceptr, Reserved> reserved;
  std::map<CUdeviceptr, Mapped> mapped;
  std::map<CUdeviceptr, HostRange> allocated;
  std::map<CUdeviceptr, HostRange> registered;
  CUmemGenericAllocationHandle last_handle = 0;
  size_t created_bytes[DEVICES_MAX] = {};

  // Where a device's copy reads or writes. `is_kernel`: kernels reach no memory of the host that is not pinned.
  Place find(CUdeviceptr address, size_t size, int access, int device, bool is_kernel) {
    const std::lock_guard guard(lock);
    if (range_of(reserved, address) != reserved.end()) {
      const auto found = range_of(mapped, address);
      if (found == mapped.end() || size > found->second.size - (address - found->first) ||
          (found->second.access[device] & access) != access) {
        return {};
      }
      const Mapped& mapping = found->second;
      return {mapping.physical->alias + mapping.offset + (address - found->first), mapping.physical};
    }
    for (auto* const ranges : {&allocated, &registered}) {
      const auto found = range_of(*ranges, address);
      if (found != ranges->end()) {
        const bool fits = size <= found->second.size - (address - found->first);
        const bool may = fits && !((access & WRITES) != 0 && found->second.is_read_only);
        return {may ? reinterpret_cast<uint8_t*>(address) : nullptr, nullptr};
      }
    }
    return {is_kernel ? nullptr : reinterpret_cast<uint8_t*>(address), nullptr};
  }

  // At a multiple of the granularity; the rest of what is mapped is a gap between ranges. 0: there is no room.
  CUdeviceptr reserve(size_t size) {
    void* const range = mmap(nullptr, size + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) {
      return 0;
    }
    const CUdeviceptr address = (reinterpret_cast<CUdeviceptr>(range) + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    const std::lock_guard guard(lock);
    reserved[address] = {size, range};
    return address;
  }

  bool free_reserved(CUdeviceptr address) {
    const std::lock_guard guard(lock);
    const auto found = reserved.find(address);
    if (found == reserved.end() || range_of(mapped, address) != mapped.end()) {
      return false;
    }
    munmap(found->second.range, found->second.size + GRANULARITY);
    reserved.erase(found);
    return true;
  }
};

// Whether every page of a range may be written, as the kernel lists it.
inline bool is_writable(CUdeviceptr address, size_t size) {
  std::FILE* const maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) {
    return true;
  }
  bool writable = true;
  char line[512];
  while (std::fgets(line, sizeof(line), maps) != nullptr) {
    unsigned long begin = 0;
    unsigned long end = 0;
    char rights[8] = {};
    if (std::sscanf(line, "%lx-%lx %7s", &begin, &end, rights) == 3 && begin < address + size && address < end) {
      writable = writable && rights[1] == 'w';
    }
  }
  std::fclose(maps);
  return writable;
}

}  // namespace emulated
