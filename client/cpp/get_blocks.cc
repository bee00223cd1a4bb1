// Get: blocks by key into the caller's memory.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/client_state.h"
#include "client/cpp/fetch_job.h"
#include "client/cpp/kv_client.h"
#include "client/cpp/plane_selection.h"
#include "client/cpp/rows_writer.h"
#include "kernels/core/checksum.h"
#include "kernels/core/status_macros.h"
#include "proto/convert.h"

namespace kvstow {
namespace {

// Layers that are fetched together: all, or, where they are wanted one after the other, so many
// that their calls are worth it: few at first, as somebody waits for those.
std::vector<LayerRange> LayerGroups(const BlockLayout& layout, int64_t num_blocks,
                                    const GetOptions& options) {
  if (!options.on_layers) return {{.first = 0, .count = layout.num_layers()}};
  std::vector<LayerRange> groups;
  int64_t wanted_bytes = int64_t{1} << 20;  // of a group, at least
  int64_t bytes = wanted_bytes;             // of the last group
  for (int32_t layer = 0; layer < layout.num_layers(); ++layer) {
    if (bytes >= wanted_bytes) {
      if (!groups.empty()) wanted_bytes = std::min(2 * wanted_bytes, kBulkCallBytes);
      groups.push_back({.first = layer});
      bytes = 0;
    }
    ++groups.back().count;
    const std::vector<int32_t> planes =
        PlanesOf(layout, {.first = layer, .count = 1}, options.heads);
    bytes += num_blocks * RowBytes(layout, planes);
  }
  return groups;
}

}  // namespace

absl::StatusOr<GetSummary> KvClient::Get(const Model& model, absl::Span<const BlockKey> keys,
                                         absl::Span<const LayerRows> layers, int64_t first_token,
                                         const GetOptions& options) {
  const BlockLayout& layout = *model.layout;
  KVSTOW_RETURN_IF_ERROR(CheckNumKeys(static_cast<int64_t>(keys.size()), "keys", 1));
  KVSTOW_RETURN_IF_ERROR(CheckNumLayers(layout, layers.size()));
  KVSTOW_RETURN_IF_ERROR(CheckRows(layout, 0, layers));
  KVSTOW_RETURN_IF_ERROR(CheckHeads(layout, options.heads));
  if (first_token < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("first_token: ", first_token, ", want 0 or more"));
  }
  const Connection& connection = *state_->connection;
  const RowsPlace place{.layers = layers, .first_token = first_token, .heads = options.heads};
  KVSTOW_RETURN_IF_ERROR(
      CheckNotWritten(*state_->windows, layout,
                      PlanesOf(layout, {.first = 0, .count = layout.num_layers()}, options.heads),
                      place, static_cast<int64_t>(keys.size()) * layout.tokens_per_block()));
  const std::vector<LayerRange> groups =
      LayerGroups(layout, static_cast<int64_t>(keys.size()), options);
  FetchJob job{.model = model,
               .keys = keys,
               .deadline = connection.clock().Now() + connection.options().data_timeout,
               .place = &place};
  for (const LayerRange& group : groups) {
    job.groups.push_back(PlanesOf(layout, group, options.heads));
  }
  job.make_fn = [&](size_t group_idx) -> BlockFn {
    const auto writer = std::make_shared<RowsWriter>(model, job.groups[group_idx], place);
    return [writer](const ReceivedBlock& block) { return writer->Write(block); };
  };
  if (options.on_layers) {
    job.on_group = [&](size_t group_idx, absl::Span<const absl::Status> blocks) {
      options.on_layers({groups[group_idx].first, groups[group_idx].count, blocks});
    };
  }
  KVSTOW_ASSIGN_OR_RETURN(Fetched fetched, FetchBlocks(*state_, job));
  GetSummary summary{.blocks = std::move(fetched.blocks), .received_bytes = fetched.received_bytes};
  for (const absl::Status& status : summary.blocks) {
    if (!status.ok()) break;
    ++summary.num_leading;
  }
  return summary;
}

absl::StatusOr<std::vector<EncodedBlock>> KvClient::GetEncoded(const Model& model,
                                                               absl::Span<const BlockKey> keys,
                                                               absl::Duration timeout) {
  KVSTOW_RETURN_IF_ERROR(CheckNumKeys(static_cast<int64_t>(keys.size()), "keys", 1));
  const Connection& connection = *state_->connection;
  std::vector<EncodedBlock> blocks(keys.size());
  const auto take = [&](const ReceivedBlock& block) {
    EncodedBlock& out = blocks[block.block_idx];
    out.calibration = block.calibration;
    for (const ReceivedBlock::Unit& unit : block.units) {
      out.units.push_back({.codec = unit.codec,
                           .xxh3 = unit.xxh3,
                           .bytes = {unit.bytes.begin(), unit.bytes.end()}});
      if (!unit.is_checked && Xxh3(out.units.back().bytes) != unit.xxh3) {
        const auto unit_idx = static_cast<int32_t>(out.units.size()) - 1;
        out.units.clear();
        return ChecksumDiffers(unit_idx);
      }
    }
    return absl::OkStatus();
  };
  const LayerRange all{.first = 0, .count = model.layout->num_layers()};
  const FetchJob job{
      .model = model,
      .keys = keys,
      .groups = {PlanesOf(*model.layout, all, {})},
      .deadline = connection.clock().Now() + std::min(connection.options().data_timeout, timeout),
      .make_fn = [&](size_t) -> BlockFn { return take; }};
  KVSTOW_ASSIGN_OR_RETURN(const Fetched fetched, FetchBlocks(*state_, job));
  for (size_t i = 0; i < keys.size(); ++i) blocks[i].status = fetched.blocks[i];
  return blocks;
}

}  // namespace kvstow
