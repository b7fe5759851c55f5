#include "device/device_event.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/wait.h"

namespace kvpool {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::microseconds FIRST_POLL_NAP{10};
constexpr std::chrono::microseconds LONGEST_POLL_NAP{200};

}  // namespace

std::unique_ptr<EventHandle> EventHandle::make(const Device& device, DeviceStatus& status) {
  const CurrentContext current(device);
  cuda::Event event = nullptr;
  status = current.ok() ? device.driver().create_event(&event, cuda::EVENT_WITHOUT_TIMES) : current.status();
  return status.ok() ? std::unique_ptr<EventHandle>(new EventHandle(device, event)) : nullptr;
}

EventHandle::~EventHandle() {
  if (!device_.is_inherited()) {
    const CurrentContext current(device_);
    device_.note_release(device_.driver().destroy_event(event_));
  }
}

DeviceStatus EventHandle::record(cuda::Stream stream) const {
  const CurrentContext current(device_);
  return current.ok() ? device_.driver().record_event(event_, stream) : current.status();
}

DeviceStatus EventHandle::query(bool& is_done) const {
  is_done = false;
  const CurrentContext current(device_);
  const DeviceStatus status = current.ok() ? device_.driver().query_event(event_) : current.status();
  if (status.code == cuda::NOT_READY) {
    return {};
  }
  is_done = status.ok();
  return status;
}

DeviceStatus EventHandle::wait(double timeout_s, bool& is_done) const {
  const std::chrono::duration<double> bounded(std::clamp(timeout_s, 0.0, WAIT_S_MAX));
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(bounded);
  auto nap = FIRST_POLL_NAP;
  while (true) {
    const DeviceStatus status = query(is_done);
    const auto now = Clock::now();
    if (!status.ok() || is_done || now >= deadline) {
      return status;
    }
    std::this_thread::sleep_for(std::min<Clock::duration>(nap, deadline - now));
    nap = std::min(nap * 2, LONGEST_POLL_NAP);
  }
}

DeviceStatus DeviceEvent::hold(cuda::Stream stream) const {
  const CurrentContext current(*device_);
  return current.ok() ? device_->driver().wait_event(stream, get(), 0) : current.status();
}

DeviceEventResult DeviceEvent::record(std::shared_ptr<const Device> device, cuda::Stream stream) {
  DeviceStatus status;
  auto handle = EventHandle::make(*device, status);
  if (status.ok()) {
    status = handle->record(stream);
  }
  if (!status.ok()) {
    return {nullptr, status};
  }
  return {std::shared_ptr<DeviceEvent>(new DeviceEvent(std::move(device), std::move(handle))), status};
}

}  // namespace kvpool
