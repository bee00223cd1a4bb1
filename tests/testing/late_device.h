// LateDevice: a DeviceMemory whose copies run as late as they may, and in any order that streams
// allow, chosen by a seed. Whoever reads a target or changes a source before the event behind the
// copy has been waited for has garbage.
//
//   auto device = std::make_shared<LateDevice>(seed, 1 << 20);
//   device->Hang(true);    // waits end with kDeadlineExceeded, at once
//   device->Break(true);   // every call answers kUnavailable
//   device->OnCopyToDevice([&] { ... });   // what others do meanwhile; it may call the device
//
// Device addresses name no host memory: reading them ends the process.
#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/device_memory.h"
#include "kernels/core/mutex.h"
#include "tests/testing/rng.h"

namespace kvstow::testing {

class LateDevice final : public DeviceMemory, public std::enable_shared_from_this<LateDevice> {
 public:
  // `memory_bytes`: of all slabs together.
  LateDevice(uint64_t seed, int64_t memory_bytes) : rng_(seed), free_bytes_(memory_bytes) {}

  void Hang(bool hangs) {
    MutexLock lock(&mutex_);
    hangs_ = hangs;
  }
  void Break(bool is_broken) {
    MutexLock lock(&mutex_);
    is_broken_ = is_broken;
  }
  // `meanwhile` runs at the beginning of each copy to the device, in its thread. Null: no more.
  void OnCopyToDevice(std::function<void()> meanwhile) {
    MutexLock lock(&mutex_);
    meanwhile_ = std::move(meanwhile);
  }
  // Changes one byte of all that is stored, as failing memory would.
  void FlipBytes() {
    MutexLock lock(&mutex_);
    for (auto& [base, bytes] : slabs_) {
      for (size_t i = 300; i < bytes.size(); i += 512) bytes[i] ^= std::byte{0x40};
    }
  }

  absl::StatusOr<DeviceSlab> Allocate(int64_t bytes) override {
    MutexLock lock(&mutex_);
    if (is_broken_) return Broken();
    if (bytes > free_bytes_) {
      return absl::ResourceExhaustedError(
          absl::StrCat(bytes, " bytes of device memory wanted, ", free_bytes_, " free"));
    }
    free_bytes_ -= bytes;
    const DeviceAddress base = next_base_;
    next_base_ += static_cast<DeviceAddress>(bytes) / 4096 * 4096 + 8192;  // with a gap
    std::vector<std::byte>& slab = slabs_[base];
    slab.resize(static_cast<size_t>(bytes));
    Garbage(slab.data(), slab.size());
    return DeviceSlab{{this, [self = shared_from_this(), base](const void*) { self->Free(base); }},
                      base};
  }

  absl::StatusOr<HostBuffer> AllocateHost(int64_t bytes) override {
    MutexLock lock(&mutex_);
    if (is_broken_) return Broken();
    auto buffer = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(bytes));
    return HostBuffer(buffer, buffer->data());
  }

  absl::StatusOr<DeviceStream> CreateStream() override {
    MutexLock lock(&mutex_);
    if (is_broken_) return Broken();
    auto stream = std::make_shared<Stream>();
    streams_.push_back(stream);
    return DeviceStream(stream);
  }

  absl::Status CopyToDevice(const DeviceStream& stream, DeviceAddress target,
                            const std::byte* source, int64_t bytes) override {
    if (const std::function<void()> meanwhile = Meanwhile()) meanwhile();
    MutexLock lock(&mutex_);
    if (is_broken_) return Broken();
    Garbage(At(target, bytes), static_cast<size_t>(bytes));
    Queue(stream, [this, target, source, bytes] {
      std::memcpy(At(target, bytes), source, static_cast<size_t>(bytes));
    });
    return absl::OkStatus();
  }

  absl::Status CopyToHost(const DeviceStream& stream, std::byte* target, DeviceAddress source,
                          int64_t bytes) override {
    MutexLock lock(&mutex_);
    if (is_broken_) return Broken();
    Garbage(target, static_cast<size_t>(bytes));
    Queue(stream, [this, target, source, bytes] {
      std::memcpy(target, At(source, bytes), static_cast<size_t>(bytes));
    });
    return absl::OkStatus();
  }

  absl::StatusOr<DeviceEvent> Record(const DeviceStream& stream) override {
    MutexLock lock(&mutex_);
    if (is_broken_) return Broken();
    auto is_done = std::make_shared<bool>(false);
    Queue(stream, [is_done] { *is_done = true; });
    return DeviceEvent(is_done);
  }

  absl::Status Wait(const DeviceEvent& event, absl::Duration timeout) override {
    MutexLock lock(&mutex_);
    if (is_broken_) return Broken();
    const bool& is_done = *static_cast<const bool*>(event.get());
    while (!is_done && !hangs_) KVSTOW_CHECK(RunOne());
    if (is_done) return absl::OkStatus();
    return absl::DeadlineExceededError(
        absl::StrCat("a copy has not ended within ", absl::FormatDuration(timeout)));
  }

 private:
  using Stream = std::deque<std::function<void()>>;

  static absl::Status Broken() { return absl::UnavailableError("the device fell off the bus"); }

  std::function<void()> Meanwhile() {
    MutexLock lock(&mutex_);
    return meanwhile_;
  }
  void Free(DeviceAddress base) {
    MutexLock lock(&mutex_);
    free_bytes_ += static_cast<int64_t>(slabs_.at(base).size());
    slabs_.erase(base);
  }

  // All below: with the lock held.
  void Garbage(std::byte* bytes, size_t count) {
    for (size_t i = 0; i < count; i += 61) bytes[i] = static_cast<std::byte>(rng_.Next());
  }
  std::byte* At(DeviceAddress address, int64_t bytes) {
    auto slab = slabs_.upper_bound(address);
    KVSTOW_CHECK(slab != slabs_.begin());
    --slab;
    const DeviceAddress offset = address - slab->first;
    KVSTOW_CHECK(offset + static_cast<DeviceAddress>(bytes) <= slab->second.size());
    return slab->second.data() + offset;
  }
  void Queue(const DeviceStream& stream, std::function<void()> step) {
    static_cast<Stream*>(stream.get())->push_back(std::move(step));
    while (!hangs_ && rng_.Below(4) == 0 && RunOne()) {
    }
  }
  // The next step of any stream; false where none waits.
  bool RunOne() {
    std::vector<Stream*> waiting;
    for (const std::shared_ptr<Stream>& stream : streams_) {
      if (!stream->empty()) waiting.push_back(stream.get());
    }
    if (waiting.empty()) return false;
    Stream& stream = *waiting[rng_.Below(waiting.size())];
    stream.front()();
    stream.pop_front();
    return true;
  }

  Mutex mutex_;
  Rng rng_;
  int64_t free_bytes_;
  DeviceAddress next_base_ = DeviceAddress{0xdead} << 48;  // no address of the host
  std::map<DeviceAddress, std::vector<std::byte>> slabs_;
  std::vector<std::shared_ptr<Stream>> streams_;
  bool hangs_ = false;
  bool is_broken_ = false;
  std::function<void()> meanwhile_;
};

}  // namespace kvstow::testing
