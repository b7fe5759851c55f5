#include "device/driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>

namespace kvpool {

void* DriverSymbols::find(const char* name) const noexcept { return dlsym(library_, name); }

void* DriverSymbols::require(const char* name) noexcept {
  void* const found = find(name);
  if (found == nullptr && missing_ == nullptr) {
    missing_ = name;
  }
  return found;
}

Driver::Driver(void* library) noexcept
    : symbols_(library),
      get_address_(reinterpret_cast<GetAddress*>(symbols_.find("cuGetProcAddress_v2"))) {}

DriverResult Driver::load(const std::string& path) {
  static std::mutex lock;
  static auto& loaded = *new std::map<std::string, std::shared_ptr<const Driver>>;  // guarded by lock; never destroyed
  const std::lock_guard guard(lock);
  if (const auto found = loaded.find(path); found != loaded.end()) {
    return {found->second, ""};
  }
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return {nullptr, "cannot load the CUDA driver: " + std::string(dlerror()) +
                         "; install NVIDIA's driver, or name its library (a daemon: hbm.driver, a client: KVPOOL_CUDA_DRIVER)"};
  }
  const std::shared_ptr<const Driver> driver(new Driver(library));
  if (driver->symbols_.missing() != nullptr) {
    const std::string missing = driver->symbols_.missing();
    dlclose(library);
    return {nullptr, "the CUDA driver " + path + " has no " + missing + "; install one for CUDA 11.4 or later"};
  }
  loaded.emplace(path, driver);
  return {driver, ""};
}

std::string Driver::default_path() {
  const char* const named = std::getenv("KVPOOL_CUDA_DRIVER");
  return named != nullptr && *named != '\0' ? named : "libcuda.so.1";
}

std::string Driver::text(DeviceStatus status) const {
  const char* name = nullptr;
  if (!error_name(status.code, &name).ok() || name == nullptr) {
    name = "an unknown error";
  }
  return std::string(status.call) + " failed: " + name + " (" + std::to_string(status.code) + ")";
}

void* Driver::find_version(const char* name, int cuda_version) const noexcept {
  void* found = nullptr;
  int answer = 0;
  const bool is_found = get_address_ != nullptr && get_address_(name, &found, cuda_version, 0, &answer) == cuda::SUCCESS && answer == 0;
  return is_found ? found : nullptr;
}

}  // namespace kvpool
