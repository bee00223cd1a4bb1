#include "client/cpp/put_frames.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "client/cpp/plane_selection.h"
#include "kernels/core/check.h"
#include "kernels/core/checksum.h"
#include "kernels/layout/planes.h"

namespace kvstow {
namespace {

// Room for the header of a frame of kMaxUnitsPerFrame units: 8 bytes of checksum, and at most 4 of
// length and 2 of codec, or 8 of an offset, each, stay below kMaxFrameHeaderBytes.
constexpr int32_t kMaxUnitsPerFrame = 4000;
constexpr int64_t kMaxPayloadBytes = kMaxFrameBytes - kMaxFrameHeaderBytes;

int64_t PlannedBytes(const PutPlan& plan, const PutTicket& ticket, const PlaneInfo& plane) {
  if (plan.compress_at == CompressAt::kService) return plane.row_bytes;
  const PlaneShape shape = plan.ShapeOf(plane);
  const CodecId codec =
      EffectiveCodec(ticket.CodecsOf(plan, plane.layer_idx).of(plane.role), shape);
  return FindCodec(codec)->plane_bytes(shape);
}

// Aligned, and enough where the plane cannot be encoded.
int64_t UnitBytesMax(const PutPlan& plan, const PutTicket& ticket, const PlaneInfo& plane) {
  return AlignPayload(std::max(plane.row_bytes, PlannedBytes(plan, ticket, plane)));
}

// A plane of a ticket's block where it stands in row form; empty: its rows are apart.
absl::Span<const std::byte> RowsInPlace(const PutPlan& plan, const RowsOfLayers& rows,
                                        const PutTicket& ticket, int32_t plane_idx) {
  const BlockLayout& layout = *plan.model.layout;
  const int32_t layer_idx = layout.plane(plane_idx).layer_idx;
  const RowsView view =
      ViewOfPlane(layout, plane_idx, plan.heads, rows.rows[layer_idx - rows.first_layer]);
  return PlaneInPlace(layout, plane_idx, view,
                      int64_t{ticket.block_idx} * layout.tokens_per_block());
}

}  // namespace

std::shared_ptr<BulkArea> BufferOf(const PutPlan& plan, absl::Span<const PutFramePlan> frames,
                                   const RowsOfLayers& rows) {
  if (plan.compress_at != CompressAt::kService) return nullptr;
  const PutFramePlan& first = frames[0];
  std::shared_ptr<BulkArea> buffer = plan.client->windows->BufferAt(
      RowsInPlace(plan, rows, first.ticket, first.first_plane).data());
  if (buffer == nullptr || !buffer->IsUsable()) return nullptr;
  for (const PutFramePlan& frame : frames) {
    for (int32_t i = 0; i < frame.num_planes; ++i) {
      const auto plane = RowsInPlace(plan, rows, frame.ticket, frame.first_plane + i);
      if (buffer->OffsetOf(plane) < 0) return nullptr;
    }
  }
  return buffer;
}

std::vector<PutFramePlan> PlanPutFrames(const PutPlan& plan, const PutTicket& ticket,
                                        const RowsOfLayers& rows) {
  const BlockLayout& layout = *plan.model.layout;
  const LayerRange layers{rows.first_layer, static_cast<int32_t>(rows.rows.size())};
  const std::vector<int32_t> planes = PlanesOf(layout, layers, plan.heads);
  int64_t all_bytes = 0;
  for (const int32_t i : planes) {
    all_bytes += PlannedBytes(plan, ticket, layout.plane(i));
  }
  const int64_t num_frames =
      std::max<int64_t>(1, (all_bytes + kTargetPayloadBytes / 2) / kTargetPayloadBytes);
  const int64_t target_bytes = (all_bytes + num_frames - 1) / num_frames;

  std::vector<PutFramePlan> frames;
  PutFramePlan frame{.ticket = ticket, .first_plane = planes[0]};
  int64_t planned_bytes = 0;
  int64_t largest_bytes = 0;
  for (const int32_t i : planes) {
    const PlaneInfo& plane = layout.plane(i);
    const int64_t plane_max = UnitBytesMax(plan, ticket, plane);
    if (frame.num_planes > 0 &&
        (i != frame.first_plane + frame.num_planes || planned_bytes >= target_bytes ||
         largest_bytes + plane_max > kMaxPayloadBytes || frame.num_planes == kMaxUnitsPerFrame)) {
      frames.push_back(frame);
      frame = {.ticket = ticket, .first_plane = i};
      planned_bytes = largest_bytes = 0;
    }
    ++frame.num_planes;
    planned_bytes += PlannedBytes(plan, ticket, plane);
    largest_bytes += plane_max;
  }
  frames.push_back(frame);
  return frames;
}

PutFrameMaker::Unit PutFrameMaker::WriteUnit(const PutTicket& ticket, int32_t plane_idx,
                                             std::byte* out) {
  const BlockLayout& layout = *plan_.model.layout;
  const PlaneInfo& plane = layout.plane(plane_idx);
  const RowsView rows =
      ViewOfPlane(layout, plane_idx, plan_.heads, rows_.rows[plane.layer_idx - rows_.first_layer]);
  const PlaneShape shape = plan_.ShapeOf(plane);
  const int64_t first_token = int64_t{ticket.block_idx} * layout.tokens_per_block();
  CodecId codec = CodecId::kRaw;
  if (plan_.compress_at == CompressAt::kWorker) {
    codec = EffectiveCodec(ticket.CodecsOf(plan_, plane.layer_idx).of(plane.role), shape);
  }
  if (codec == CodecId::kRaw) {
    GatherPlane(layout, plane_idx, rows, first_token, out);
    return {.codec = CodecId::kRaw, .bytes = plane.row_bytes};
  }
  scratch_.resize(std::max<size_t>(scratch_.size(), plane.row_bytes));
  GatherPlane(layout, plane_idx, rows, first_token, scratch_.data());
  const Codec& encoder = *FindCodec(codec);
  if (BestBackend(encoder).encode(shape, scratch_.data(), out) == EncodeResult::kKeepRaw) {
    std::memcpy(out, scratch_.data(), plane.row_bytes);
    return {.codec = CodecId::kRaw, .bytes = plane.row_bytes};
  }
  return {.codec = codec, .bytes = encoder.plane_bytes(shape)};
}

int64_t MaxPayloadBytes(const PutPlan& plan, const PutFramePlan& frame) {
  int64_t bytes = 0;
  for (int32_t i = 0; i < frame.num_planes; ++i) {
    const PlaneInfo& plane = plan.model.layout->plane(frame.first_plane + i);
    bytes += UnitBytesMax(plan, frame.ticket, plane);
  }
  return bytes;
}

int64_t PutFrameMaker::WriteUnits(const PutFramePlan& frame, std::byte* payload,
                                  PutFrameHeader& header) {
  int64_t used_bytes = 0;
  for (int32_t i = 0; i < frame.num_planes; ++i) {
    const int64_t start = AlignPayload(used_bytes);
    std::memset(payload + used_bytes, 0, start - used_bytes);
    const Unit unit = WriteUnit(frame.ticket, frame.first_plane + i, payload + start);
    header.unit_xxh3.push_back(Xxh3({payload + start, static_cast<size_t>(unit.bytes)}));
    if (plan_.compress_at == CompressAt::kWorker) {
      header.unit_bytes.push_back(static_cast<uint32_t>(unit.bytes));
      header.unit_codec.push_back(static_cast<uint32_t>(unit.codec));
    }
    used_bytes = start + unit.bytes;
  }
  return used_bytes;
}

grpc::ByteBuffer PutFrameMaker::MakeInPlace(const PutFramePlan& frame, PutFrameHeader header) {
  header.channel = place_.buffer->channel();
  for (int32_t i = 0; i < frame.num_planes; ++i) {
    const auto plane = RowsInPlace(plan_, rows_, frame.ticket, frame.first_plane + i);
    header.unit_xxh3.push_back(Xxh3(plane));
    header.unit_offset.push_back(static_cast<uint64_t>(place_.buffer->OffsetOf(plane)));
    header.window_bytes += plane.size();
  }
  payload_bytes_ += static_cast<int64_t>(header.window_bytes);
  return BuildFrame(header, {});
}

grpc::ByteBuffer PutFrameMaker::Make(const PutFramePlan& frame) {
  PutFrameHeader header{.ticket = frame.ticket.id,
                        .first_unit = static_cast<uint32_t>(frame.first_plane)};
  if (place_.buffer != nullptr) return MakeInPlace(frame, std::move(header));
  const int64_t max_bytes = MaxPayloadBytes(plan_, frame);
  if (place_.area != nullptr) {
    const absl::Span<std::byte> memory = place_.area->memory();
    KVSTOW_CHECK(max_bytes <= static_cast<int64_t>(memory.size()) - area_used_bytes_);
    const int64_t bytes = WriteUnits(frame, memory.data() + area_used_bytes_, header);
    header.channel = place_.area->channel();
    header.window_offset = place_.area->window_offset() + static_cast<uint64_t>(area_used_bytes_);
    header.window_bytes = static_cast<uint64_t>(bytes);
    area_used_bytes_ += AlignPayload(bytes);
    payload_bytes_ += bytes;
    return BuildFrame(header, {});
  }
  BufferPool::Buffer buffer = plan_.client->connection->buffers().Take(max_bytes);
  const int64_t bytes = WriteUnits(frame, buffer.bytes().data(), header);
  payload_bytes_ += bytes;
  std::vector<grpc::Slice> slices;
  slices.push_back(std::move(buffer).ToSlice(bytes));
  return BuildFrame(header, std::move(slices));
}

}  // namespace kvstow
