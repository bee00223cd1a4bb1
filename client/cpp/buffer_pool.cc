#include "client/cpp/buffer_pool.h"

#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "kernels/core/check.h"
#include "kernels/core/mutex.h"

namespace kvstow {
namespace {

constexpr size_t kAlignment = 64;

struct AlignedDelete {
  void operator()(std::byte* bytes) const {
    ::operator delete[](bytes, std::align_val_t{kAlignment});
  }
};

}  // namespace

struct BufferPool::Buffer::Memory {
  std::shared_ptr<BufferPool::State> pool;
  std::unique_ptr<std::byte[], AlignedDelete> bytes;
  int64_t capacity_bytes = 0;
};

struct BufferPool::State {
  using Memory = Buffer::Memory;

  explicit State(int64_t max) : free_bytes_max(max) {}

  // The smallest one that is large enough, or nothing.
  std::unique_ptr<Memory> TakeFree(int64_t bytes) {
    MutexLock lock(&mutex);
    size_t best = free.size();
    for (size_t i = 0; i < free.size(); ++i) {
      if (free[i]->capacity_bytes < bytes) continue;
      // Of equals the last that came back: it is in cache.
      if (best == free.size() || free[i]->capacity_bytes <= free[best]->capacity_bytes) best = i;
    }
    if (best == free.size()) return nullptr;
    std::swap(free[best], free.back());
    std::unique_ptr<Memory> memory = std::move(free.back());
    free.pop_back();
    free_bytes -= memory->capacity_bytes;
    return memory;
  }

  // Keeps `memory` where it fits; the caller frees what comes back.
  std::unique_ptr<Memory> GiveBack(std::unique_ptr<Memory> memory) {
    MutexLock lock(&mutex);
    if (free_bytes + memory->capacity_bytes > free_bytes_max) return memory;
    free_bytes += memory->capacity_bytes;
    free.push_back(std::move(memory));
    return nullptr;
  }

  const int64_t free_bytes_max;
  Mutex mutex;
  std::vector<std::unique_ptr<Memory>> free ABSL_GUARDED_BY(mutex);
  int64_t free_bytes ABSL_GUARDED_BY(mutex) = 0;
};

namespace {

// Buffers in the pool do not hold it, or neither would ever go.
template <typename Memory>
void Return(std::unique_ptr<Memory> memory) {
  const auto pool = std::move(memory->pool);
  pool->GiveBack(std::move(memory));
}

}  // namespace

BufferPool::Buffer::Buffer(std::unique_ptr<Memory> memory) : memory_(std::move(memory)) {}
BufferPool::Buffer::Buffer(Buffer&&) noexcept = default;

BufferPool::Buffer::~Buffer() {
  if (memory_ != nullptr) Return(std::move(memory_));
}

absl::Span<std::byte> BufferPool::Buffer::bytes() const {
  return {memory_->bytes.get(), static_cast<size_t>(memory_->capacity_bytes)};
}

grpc::Slice BufferPool::Buffer::ToSlice(int64_t used_bytes) && {
  KVSTOW_CHECK(used_bytes >= 0 && used_bytes <= memory_->capacity_bytes);
  std::byte* const bytes = memory_->bytes.get();
  return grpc::Slice(
      bytes, static_cast<size_t>(used_bytes),
      [](void* memory) { Return(std::unique_ptr<Memory>(static_cast<Memory*>(memory))); },
      memory_.release());
}

BufferPool::BufferPool(int64_t free_bytes_max) : state_(std::make_shared<State>(free_bytes_max)) {}
BufferPool::~BufferPool() = default;

BufferPool::Buffer BufferPool::Take(int64_t bytes) {
  KVSTOW_CHECK(bytes >= 0);
  std::unique_ptr<Buffer::Memory> memory = state_->TakeFree(bytes);
  if (memory == nullptr) {
    memory = std::make_unique<Buffer::Memory>();
    memory->bytes.reset(new (std::align_val_t{kAlignment}) std::byte[bytes]);
    memory->capacity_bytes = bytes;
  }
  memory->pool = state_;
  return Buffer(std::move(memory));
}

}  // namespace kvstow
