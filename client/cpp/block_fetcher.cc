#include "client/cpp/block_fetcher.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/plane_selection.h"
#include "client/cpp/raw_stream.h"
#include "kernels/core/status_macros.h"
#include "kernels/layout/planes.h"
#include "kvstow/v1/data.pb.h"
#include "proto/convert.h"
#include "proto/status.h"

namespace kvstow {
namespace {

constexpr char kGetMethod[] = "/kvstow.v1.Data/Get";

// The payload of a frame that says where in the window it is. kDataLoss: not within our area.
absl::Status TakeFromWindow(const GetFrameHeader& header, const BulkArea& area,
                            FramePayload& payload) {
  const uint64_t begin = header.window_offset - area.window_offset();
  const uint64_t all = area.memory().size();
  if (begin > all || header.window_bytes > all - begin) {
    return absl::DataLossError(absl::StrCat("get: a payload at ", header.window_offset, " of ",
                                            header.window_bytes, " bytes, outside of the area"));
  }
  payload =
      FramePayload(OwnedSlice(area.owner(), area.memory().subspan(begin, header.window_bytes)),
                   /*is_shared=*/true);
  return absl::OkStatus();
}

absl::Status ReceiveFrames(RawStream& stream, const BulkArea* area, BlockReceiver& receiver,
                           const BlockFn& on_block) {
  grpc::ByteBuffer message;
  while (stream.Read(message)) {
    stream.StartRead();  // the next one arrives while this one is checked
    GetFrameHeader header;
    FramePayload payload;
    KVSTOW_RETURN_IF_ERROR(ParseFrame(message, header, payload));
    if (header.window_bytes > 0) {
      if (area == nullptr) return absl::DataLossError("get: a payload in a window, but none is");
      KVSTOW_RETURN_IF_ERROR(TakeFromWindow(header, *area, payload));
    }
    KVSTOW_ASSIGN_OR_RETURN(const ReceivedBlock* block, receiver.OnFrame(header, payload));
    if (block == nullptr) continue;
    if (const absl::Status taken = on_block(*block); !taken.ok()) receiver.Refuse(taken);
  }
  return absl::OkStatus();
}

// What only the service says, and only when it does nothing more for the call. gRPC says
// kResourceExhausted as well, without a hint.
bool IsAnswer(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsInvalidArgument(status) ||
         (absl::IsResourceExhausted(status) && RetryAfter(status) > absl::ZeroDuration());
}

// The units of the planes, as ranges; none where they are all of a block's.
void AddRanges(const FetchPlan& plan, v1::GetRequest& request) {
  if (plan.planes.size() == static_cast<size_t>(plan.model.layout->num_planes())) return;
  for (const int32_t plane : plan.planes) {
    const auto unit = static_cast<uint32_t>(plane);
    v1::UnitRange* last =
        request.ranges_size() == 0 ? nullptr : request.mutable_ranges(request.ranges_size() - 1);
    if (last == nullptr || last->first() + last->count() != unit) {
      last = request.add_ranges();
      last->set_first(unit);
    }
    last->set_count(last->count() + 1);
  }
}

}  // namespace

void FetchResult::Add(const BlockReceiver& receiver) {
  num_answered += receiver.num_answered();
  received_bytes += receiver.received_bytes();
  blocks.insert(blocks.end(), receiver.statuses().begin(), receiver.statuses().end());
  corrupt.insert(corrupt.end(), receiver.corrupt_keys().begin(), receiver.corrupt_keys().end());
}

absl::Status BlockFetcher::Call(const KeyRange& range, const Way& way, const BlockFn& on_block,
                                BlockReceiver& receiver) {
  Connection& connection = *client_.connection;
  const absl::Duration timeout =
      std::max(plan_.deadline - connection.clock().Now(), absl::ZeroDuration());
  RawStream stream(connection.NextDataStub(), {.method = kGetMethod, .timeout = timeout});
  v1::GetRequest request;
  request.set_fingerprint(std::string(plan_.model.fingerprint.AsStringView()));
  request.set_local_only(connection.options().local_only);
  AddRanges(plan_, request);
  if (range.after() != nullptr) request.set_after(std::string(range.after()->AsStringView()));
  if (way.area != nullptr) {
    request.set_channel(way.area->channel());
    request.set_window_offset(way.area->window_offset());
    request.set_window_bytes(way.area->memory().size());
  }
  if (way.buffer != nullptr) {
    request.set_channel(way.buffer->channel());
    request.mutable_unit_place()->Assign(way.placed->offsets.begin(), way.placed->offsets.end());
  }
  request.set_keys(KeysToBytes(range.keys));
  if (way.buffer != nullptr) request.set_place_xxh3(PlaceXxh3(request));
  request.set_form(v1::FORM_ENCODED);
  stream.Write(ToByteBuffer(request));
  stream.WritesDone();
  receiver.ExpectPlaced(way.placed);
  const absl::Status fault = ReceiveFrames(stream, way.area, receiver, on_block);
  if (!fault.ok()) stream.Cancel();
  // The limit that the caller knows, not what was left of it for this call.
  absl::Status status = connection.WithTarget(stream.Finish(), connection.options().data_timeout);
  if (!fault.ok()) status = absl::DataLossError(fault.message());
  longest_wait_ = std::max(longest_wait_, stream.longest_wait());
  receiver.OnEnd(status);
  return status;
}

PlacedUnits BlockFetcher::PlacesIn(const BulkArea& buffer, const KeyRange& range) const {
  const BlockLayout& layout = *plan_.model.layout;
  const RowsPlace& place = *plan_.place;
  PlacedUnits placed{.memory = buffer.memory()};
  // Planes of blocks that follow each other do so too.
  if (range.places.back() - range.places.front() + 1 != static_cast<int32_t>(range.places.size())) {
    return placed;
  }
  for (const int32_t plane_idx : plan_.planes) {
    const RowsView view = ViewOfPlane(layout, plane_idx, place.heads,
                                      place.layers[layout.plane(plane_idx).layer_idx]);
    const auto offset_of = [&](int32_t block) {
      return buffer.OffsetOf(PlaneInPlace(
          layout, plane_idx, view, place.first_token + int64_t{block} * layout.tokens_per_block()));
    };
    const int64_t offset = offset_of(range.places.front());
    if (offset < 0 || offset_of(range.places.back()) < 0) return {};
    placed.offsets.push_back(static_cast<uint64_t>(offset));
  }
  return placed;
}

size_t BlockFetcher::FetchInPlace(const KeyRange& range, const BlockFn& on_block,
                                  FetchResult& result) {
  if (plan_.place == nullptr) return 0;
  const PlaneInfo& first = plan_.model.layout->plane(plan_.planes[0]);
  const RowsView& rows = RowsOf(first, plan_.place->layers[first.layer_idx]);
  const std::shared_ptr<BulkArea> buffer = client_.windows->BufferAt(rows.data);
  if (buffer == nullptr || !buffer->IsUsable()) return 0;
  const PlacedUnits placed = PlacesIn(*buffer, range);
  if (placed.offsets.empty()) return 0;
  BlockReceiver receiver(plan_.model, *client_.calibrations, plan_.planes, range.keys,
                         range.places);
  result.status = Call(range, {.buffer = buffer.get(), .placed = &placed}, on_block, receiver);
  if (!result.status.ok()) {
    if (!IsAnswer(result.status)) buffer->AbandonWritten();
    // The service does not know the window, or not its size.
    if (absl::IsNotFound(result.status) || absl::IsInvalidArgument(result.status)) {
      buffer->Abandon();
    }
    if (!absl::IsDeadlineExceeded(result.status) && !buffer->MayBeWritten()) {
      result.status = absl::OkStatus();
      receiver.DropUnfinished();
    }
  }
  result.Add(receiver);
  return receiver.statuses().size();
}

FetchResult BlockFetcher::Fetch(KeyRange range, const BlockFn& on_block) {
  FetchResult result;
  range = range.From(FetchInPlace(range, on_block, result));
  if (range.keys.empty()) {
    result.longest_wait = longest_wait_;
    return result;
  }
  const auto block_bytes = static_cast<size_t>(MaxBlockBytes(*plan_.model.layout, plan_.planes));
  std::optional<BulkArea> area =
      client_.windows->Take(static_cast<int64_t>(block_bytes), plan_.deadline);
  while (!range.keys.empty() && result.status.ok()) {
    size_t count = range.keys.size();
    if (area.has_value()) {
      const auto bytes = std::min<size_t>(area->memory().size(), kBulkCallBytes);
      count = std::min(count, std::max<size_t>(1, bytes / block_bytes));
    }
    const KeyRange some{range.keys.subspan(0, count), range.places.subspan(0, count), range.all};
    BlockReceiver receiver(plan_.model, *client_.calibrations, plan_.planes, some.keys,
                           some.places);
    result.status = Call(some, {.area = area.has_value() ? &*area : nullptr}, on_block, receiver);
    if (!result.status.ok() && area.has_value()) {
      area->Abandon();
      area.reset();
      if (!absl::IsDeadlineExceeded(result.status)) {
        // What came has come; the rest by gRPC.
        result.status = absl::OkStatus();
        receiver.DropUnfinished();
        count = receiver.statuses().size();
      }
    }
    result.Add(receiver);
    range = range.From(count);
  }
  // What was never asked for ends as the last call did.
  result.blocks.resize(result.blocks.size() + range.keys.size(), result.status);
  result.longest_wait = longest_wait_;
  return result;
}

}  // namespace kvstow
