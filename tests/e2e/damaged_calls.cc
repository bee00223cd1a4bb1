#include "tests/e2e/damaged_calls.h"

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/block_receiver.h"
#include "kernels/core/mutex.h"
#include "proto/frames.h"
#include "transport/shm_window.h"
#include "transport/ucx.h"

namespace kvstow {
namespace testing {
namespace {

std::atomic<int> g_every{0};
std::atomic<int> g_num_frames{0};

// The memory of the window that was opened last: a client has one.
class LastWindow {
 public:
  void Set(absl::Span<std::byte> memory) {
    MutexLock lock(&mutex_);
    memory_ = memory;
  }
  absl::Span<std::byte> Range(uint64_t offset, uint64_t bytes) {
    MutexLock lock(&mutex_);
    if (offset > memory_.size() || bytes > memory_.size() - offset) return {};
    return memory_.subspan(offset, bytes);
  }

 private:
  Mutex mutex_;
  absl::Span<std::byte> memory_ ABSL_GUARDED_BY(mutex_);
};

LastWindow& TheWindow() {
  static auto* window = new LastWindow();
  return *window;
}

// A bit of one byte, another place each time.
void Flip(absl::Span<std::byte> bytes, int frame) {
  if (bytes.empty()) return;
  bytes[static_cast<size_t>(frame) * 7919 % bytes.size()] ^= static_cast<std::byte>(1 << frame % 8);
}

// The number of the frame, where it is to be damaged; else 0.
int NextDamage() {
  const int every = g_every.load();
  if (every == 0) return 0;
  const int frame = ++g_num_frames;
  return frame % every == 0 ? frame : 0;
}

}  // namespace

void DamageEvery(int num_frames) { g_every = num_frames; }

}  // namespace testing

// --- what the linker calls in place of the library's functions, and those themselves ---

grpc::ByteBuffer
RealBuildFrame(const PutFrameHeader& header, std::vector<grpc::Slice> payload) __asm__(
    "__real__ZN6kvstow10BuildFrameERKNS_14PutFrameHeaderESt6vectorIN4grpc5SliceESaIS5_EE");
grpc::ByteBuffer
DamagedBuildFrame(const PutFrameHeader& header, std::vector<grpc::Slice> payload) __asm__(
    "__wrap__ZN6kvstow10BuildFrameERKNS_14PutFrameHeaderESt6vectorIN4grpc5SliceESaIS5_EE");

absl::StatusOr<const ReceivedBlock*>
RealOnFrame(BlockReceiver* receiver, const GetFrameHeader& header, const FramePayload& payload) __asm__(
    "__real__ZN6kvstow13BlockReceiver7OnFrameERKNS_14GetFrameHeaderERKNS_12FramePayloadE");
absl::StatusOr<const ReceivedBlock*>
DamagedOnFrame(BlockReceiver* receiver, const GetFrameHeader& header, const FramePayload& payload) __asm__(
    "__wrap__ZN6kvstow13BlockReceiver7OnFrameERKNS_14GetFrameHeaderERKNS_12FramePayloadE");

absl::StatusOr<std::unique_ptr<Window>> RealOpenShmWindow(const ShmWindowOptions& options) __asm__(
    "__real__ZN6kvstow13OpenShmWindowERKNS_16ShmWindowOptionsE");
absl::StatusOr<std::unique_ptr<Window>>
WatchedOpenShmWindow(const ShmWindowOptions& options) __asm__(
    "__wrap__ZN6kvstow13OpenShmWindowERKNS_16ShmWindowOptionsE");

absl::StatusOr<std::unique_ptr<Window>> RealOpenUcxWindow(const UcxWindowOptions& options) __asm__(
    "__real__ZN6kvstow13OpenUcxWindowERKNS_16UcxWindowOptionsE");
absl::StatusOr<std::unique_ptr<Window>>
WatchedOpenUcxWindow(const UcxWindowOptions& options) __asm__(
    "__wrap__ZN6kvstow13OpenUcxWindowERKNS_16UcxWindowOptionsE");

grpc::ByteBuffer DamagedBuildFrame(const PutFrameHeader& header, std::vector<grpc::Slice> payload) {
  if (const int frame = testing::NextDamage(); frame != 0) {
    testing::Flip(testing::TheWindow().Range(header.window_offset, header.window_bytes), frame);
    for (grpc::Slice& slice : payload) {
      grpc::Slice copy(slice.begin(), slice.size());
      auto* const bytes = reinterpret_cast<std::byte*>(const_cast<uint8_t*>(copy.begin()));
      testing::Flip({bytes, copy.size()}, frame);
      slice = std::move(copy);
    }
  }
  return RealBuildFrame(header, std::move(payload));
}

absl::StatusOr<const ReceivedBlock*> DamagedOnFrame(BlockReceiver* receiver,
                                                    const GetFrameHeader& header,
                                                    const FramePayload& payload) {
  if (const int frame = testing::NextDamage(); frame != 0 && payload.size() > 0) {
    // A single byte lies in one piece, however the payload came.
    const absl::Span<const std::byte> byte =
        payload.Contiguous(int64_t{frame} * 7919 % payload.size(), 1);
    testing::Flip({const_cast<std::byte*>(byte.data()), 1}, frame);
  }
  return RealOnFrame(receiver, header, payload);
}

absl::StatusOr<std::unique_ptr<Window>> WatchedOpenShmWindow(const ShmWindowOptions& options) {
  absl::StatusOr<std::unique_ptr<Window>> window = RealOpenShmWindow(options);
  if (window.ok()) testing::TheWindow().Set((*window)->memory());
  return window;
}

absl::StatusOr<std::unique_ptr<Window>> WatchedOpenUcxWindow(const UcxWindowOptions& options) {
  absl::StatusOr<std::unique_ptr<Window>> window = RealOpenUcxWindow(options);
  if (window.ok()) testing::TheWindow().Set((*window)->memory());
  return window;
}

}  // namespace kvstow
