// Marks in the order of a stream: done when everything that the stream was given before them is done.
//
// What it is: an event of the driver, asked again and again while somebody waits: the driver's own wait has no end. What it is not: a
// clock. Between two looks a wait naps, longer each time: 10 to 200 µs (guesses: a look costs about 1 µs, an extent's copy about 100).
// Threads: any.
#pragma once

#include <memory>

#include "device/device.h"

namespace kvpool {

// A device that has not answered for so long is unresponsive: longer than any copy of a chunk takes by a factor of a thousand (guess).
inline constexpr double DEVICE_ANSWER_S = 30.0;

// Held by what belongs to the device: it does not keep the device itself.
class EventHandle {
 public:
  // Nothing, and why, where the driver has none. REQUIRES: the device outlives the event.
  [[nodiscard]] static std::unique_ptr<EventHandle> make(const Device& device, DeviceStatus& status);
  ~EventHandle();
  EventHandle(const EventHandle&) = delete;
  EventHandle& operator=(const EventHandle&) = delete;

  [[nodiscard]] DeviceStatus record(cuda::Stream stream) const;
  [[nodiscard]] DeviceStatus query(bool& is_done) const;
  // Until it is done, or time is over.
  [[nodiscard]] DeviceStatus wait(double timeout_s, bool& is_done) const;
  [[nodiscard]] cuda::Event get() const noexcept { return event_; }

 private:
  EventHandle(const Device& device, cuda::Event event) noexcept : device_(device), event_(event) {}

  const Device& device_;
  const cuda::Event event_;
};

class DeviceEvent;

struct DeviceEventResult {
  std::shared_ptr<DeviceEvent> event;
  DeviceStatus status{};
};

// An event that was recorded, with its device.
class DeviceEvent : public std::enable_shared_from_this<DeviceEvent> {
 public:
  // Behind what a stream of this device has been given, also one that an engine made.
  [[nodiscard]] static DeviceEventResult record(std::shared_ptr<const Device> device, cuda::Stream stream);

  [[nodiscard]] DeviceStatus query(bool& is_done) const { return handle_->query(is_done); }
  [[nodiscard]] DeviceStatus wait(double timeout_s, bool& is_done) const { return handle_->wait(timeout_s, is_done); }
  // What a stream of this device, also one that an engine made, is given from now on begins after the event.
  [[nodiscard]] DeviceStatus hold(cuda::Stream stream) const;
  [[nodiscard]] cuda::Event get() const noexcept { return handle_->get(); }
  [[nodiscard]] const Device& device() const noexcept { return *device_; }

 private:
  DeviceEvent(std::shared_ptr<const Device> device, std::unique_ptr<EventHandle> handle) noexcept
      : device_(std::move(device)), handle_(std::move(handle)) {}

  const std::shared_ptr<const Device> device_;
  const std::unique_ptr<EventHandle> handle_;
};

}  // namespace kvpool
