#include "client/cpp/block_fetcher.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/raw_stream.h"
#include "kernels/core/status_macros.h"
#include "kvstow/v1/data.pb.h"
#include "proto/convert.h"

namespace kvstow {
namespace {

constexpr char kGetMethod[] = "/kvstow.v1.Data/Get";

// `common`: what is the same for every call of the Get.
grpc::ByteBuffer GetRequestBytes(const v1::GetRequest& common, absl::Span<const BlockKey> keys,
                                 const BulkArea* area) {
  v1::GetRequest request = common;
  if (area != nullptr) {
    request.set_channel(area->channel());
    request.set_window_offset(area->window_offset());
    request.set_window_bytes(area->memory().size());
  }
  request.set_keys(KeysToBytes(keys));
  request.set_form(v1::FORM_ENCODED);
  return ToByteBuffer(request);
}

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

absl::Status BlockFetcher::Call(const KeyRange& range, const BulkArea* area,
                                const BlockFn& on_block, BlockReceiver& receiver) {
  Connection& connection = *client_.connection;
  const absl::Duration timeout =
      std::max(plan_.deadline - connection.clock().Now(), absl::ZeroDuration());
  RawStream stream(connection.NextDataStub(), {.method = kGetMethod, .timeout = timeout});
  v1::GetRequest common;
  common.set_fingerprint(std::string(plan_.model.fingerprint.AsStringView()));
  common.set_local_only(connection.options().local_only);
  AddRanges(plan_, common);
  if (range.after() != nullptr) common.set_after(std::string(range.after()->AsStringView()));
  stream.Write(GetRequestBytes(common, range.keys, area));
  stream.WritesDone();
  const absl::Status fault = ReceiveFrames(stream, area, receiver, on_block);
  if (!fault.ok()) stream.Cancel();
  // The limit that the caller knows, not what was left of it for this call.
  absl::Status status = connection.WithTarget(stream.Finish(), connection.options().data_timeout);
  if (!fault.ok()) status = absl::DataLossError(fault.message());
  longest_wait_ = std::max(longest_wait_, stream.longest_wait());
  receiver.OnEnd(status);
  return status;
}

FetchResult BlockFetcher::Fetch(KeyRange range, const BlockFn& on_block) {
  const auto block_bytes = static_cast<size_t>(MaxBlockBytes(*plan_.model.layout, plan_.planes));
  std::optional<BulkArea> area =
      client_.windows->Take(static_cast<int64_t>(block_bytes), plan_.deadline);
  FetchResult result;
  while (!range.keys.empty() && result.status.ok()) {
    size_t count = range.keys.size();
    if (area.has_value()) {
      const auto bytes = std::min<size_t>(area->memory().size(), kBulkCallBytes);
      count = std::min(count, std::max<size_t>(1, bytes / block_bytes));
    }
    const KeyRange some{range.keys.subspan(0, count), range.places.subspan(0, count), range.all};
    BlockReceiver receiver(plan_.model, *client_.calibrations, plan_.planes, some.keys,
                           some.places);
    result.status = Call(some, area.has_value() ? &*area : nullptr, on_block, receiver);
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
