#include "client/cpp/window_buffer.h"

#include <utility>

#include "client/cpp/bulk_windows.h"

namespace kvstow {

WindowBuffer::WindowBuffer(std::shared_ptr<BulkArea> area) : area_(std::move(area)) {}
WindowBuffer::~WindowBuffer() = default;

absl::Span<std::byte> WindowBuffer::memory() const { return area_->memory(); }

bool WindowBuffer::is_in_place() const { return area_->IsUsable(); }

}  // namespace kvstow
