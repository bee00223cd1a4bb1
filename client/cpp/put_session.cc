// Put: whole prompts, in batches that each are reserved, sent and sealed; and PutSession: the same
// layer by layer over one batch.
#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/client_state.h"
#include "client/cpp/kv_client.h"
#include "client/cpp/plane_selection.h"
#include "client/cpp/put_batch.h"
#include "kernels/core/status_macros.h"
#include "proto/convert.h"

namespace kvstow {
namespace {

// Blocks of one batch: what is reserved but not yet sealed cannot be evicted by the service, and a
// ticket does not live for ever.
constexpr int64_t kBatchBytes = int64_t{64} << 20;

absl::Status CheckView(const std::string& name, const RowsView& view, const PlaneInfo& plane,
                       const BlockLayout& layout) {
  if (view.data == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": null pointer, want the layer's rows"));
  }
  const int64_t row_bytes = plane.row_bytes / layout.tokens_per_block();
  for (const auto& [field, stride] : {std::pair{".token_stride_bytes", view.token_stride_bytes},
                                      std::pair{".head_stride_bytes", view.head_stride_bytes}}) {
    if (stride < row_bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, field, ": ", stride, " bytes, want at least a row of ", row_bytes));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<PutPlan> MakePlan(const std::shared_ptr<ClientState>& client, const Model& model,
                                 const PutRequest& request) {
  const int32_t tokens_per_block = model.layout->tokens_per_block();
  const size_t num_tokens = request.tokens.size();
  if (num_tokens < static_cast<size_t>(tokens_per_block)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tokens: ", num_tokens, " tokens, want at least one block of ", tokens_per_block));
  }
  const int64_t last_block = static_cast<int64_t>(num_tokens) / tokens_per_block - 1;
  if (request.first_block < 0 || request.first_block > last_block) {
    return absl::InvalidArgumentError(absl::StrCat(
        "first_block: ", request.first_block, ", want 0 to ", last_block, ", the last full block"));
  }
  KVSTOW_RETURN_IF_ERROR(CheckNumTokens(static_cast<int64_t>(num_tokens), "tokens"));
  KVSTOW_RETURN_IF_ERROR(CheckKeyContext(request.context));
  KVSTOW_RETURN_IF_ERROR(request.layer_codecs.CheckFits(*model.layout));
  KVSTOW_RETURN_IF_ERROR(CheckHeads(*model.layout, request.heads));
  KeyContext context = request.context;
  context.fingerprint = model.fingerprint;
  PutPlan plan{.client = client,
               .model = model,
               .keys = ChainKeys(context, request.tokens, tokens_per_block),
               .codec = request.codec,
               .layers = request.layer_codecs,
               .compress_at = request.compress_at,
               .durable = request.durable,
               .conversation = request.conversation,
               .heads = request.heads};
  plan.conversation.tenant = context.tenant;
  if (!NeedsCalibration(request.codec.pair)) return plan;
  plan.calibration_id = request.calibration_id;
  if (request.compress_at == CompressAt::kWorker) {
    KVSTOW_ASSIGN_OR_RETURN(plan.calibration,
                            client->calibrations->Choose(model, request.calibration_id));
    plan.calibration_id = plan.calibration->id();
  }
  return plan;
}

// The blocks of a request, of `num_blocks` in the prompt.
std::vector<int32_t> BlockIdxs(const PutRequest& request, size_t num_blocks) {
  std::vector<int32_t> block_idxs(num_blocks - request.first_block);
  std::iota(block_idxs.begin(), block_idxs.end(), request.first_block);
  return block_idxs;
}

PutSummary NewSummary(const PutPlan& plan, size_t num_tokens) {
  PutSummary summary;
  summary.keys = plan.keys;
  summary.num_leftover_tokens =
      static_cast<int64_t>(num_tokens % plan.model.layout->tokens_per_block());
  return summary;
}

// Of the blocks of `plan` from `first_block` on.
absl::Status CheckNotWritten(const PutPlan& plan, int64_t first_block, const RowsOfLayers& rows) {
  const BlockLayout& layout = *plan.model.layout;
  const LayerRange layers{rows.first_layer, static_cast<int32_t>(rows.rows.size())};
  const auto num_blocks = static_cast<int64_t>(plan.keys.size()) - first_block;
  return CheckNotWritten(*plan.client->windows, layout, PlanesOf(layout, layers, plan.heads),
                         {.layers = rows.rows,
                          .first_token = first_block * layout.tokens_per_block(),
                          .heads = plan.heads},
                         num_blocks * layout.tokens_per_block());
}

void Count(const PutOutcome& outcome, PutSummary& summary) {
  if (outcome.status.ok()) {
    ++summary.num_stored;
  } else if (absl::IsAlreadyExists(outcome.status)) {
    ++summary.num_existing;
  } else if (outcome.is_shared) {
    ++summary.num_shared;
  } else {
    ++summary.num_refused;
    if (summary.first_refusal.ok()) summary.first_refusal = outcome.status;
  }
}

}  // namespace

absl::Status CheckNumLayers(const BlockLayout& layout, size_t num_layers) {
  if (num_layers == static_cast<size_t>(layout.num_layers())) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("layers: ", num_layers, ", want ", layout.num_layers(), " as the model has"));
}

absl::Status CheckRows(const BlockLayout& layout, int32_t first_layer,
                       absl::Span<const LayerRows> layers) {
  for (size_t i = 0; i < layers.size(); ++i) {
    const int32_t layer_idx = first_layer + static_cast<int32_t>(i);
    const std::string name = absl::StrCat("layers[", layer_idx, "]");
    const int32_t first_plane = layout.first_plane_of_layer(layer_idx);
    const int32_t last_plane = first_plane + layout.num_planes_of_layer(layer_idx) - 1;
    KVSTOW_RETURN_IF_ERROR(CheckView(name + ".k", layers[i].k, layout.plane(first_plane), layout));
    if (layout.plane(last_plane).role != Role::kValue) continue;
    KVSTOW_RETURN_IF_ERROR(CheckView(name + ".v", layers[i].v, layout.plane(last_plane), layout));
  }
  return absl::OkStatus();
}

absl::StatusOr<PutSummary> KvClient::Put(const Model& model, const PutRequest& request) {
  KVSTOW_ASSIGN_OR_RETURN(const PutPlan plan, MakePlan(state_, model, request));
  KVSTOW_RETURN_IF_ERROR(CheckNumLayers(*model.layout, request.layers.size()));
  KVSTOW_RETURN_IF_ERROR(CheckRows(*model.layout, 0, request.layers));
  KVSTOW_RETURN_IF_ERROR(
      CheckNotWritten(plan, request.first_block, {.first_layer = 0, .rows = request.layers}));
  const Connection& connection = *state_->connection;
  const absl::Time deadline = connection.clock().Now() + connection.options().data_timeout;
  PutSummary summary = NewSummary(plan, request.tokens.size());

  std::vector<int32_t> waiting = BlockIdxs(request, plan.keys.size());
  const size_t batch_blocks = static_cast<size_t>(
      std::clamp<int64_t>(kBatchBytes / model.layout->block_bytes(), 1, kMaxBlocksPerReserve));
  std::set<int32_t> replanned;
  while (!waiting.empty()) {
    const size_t count = std::min(batch_blocks, waiting.size());
    PutBatch batch(plan);
    KVSTOW_RETURN_IF_ERROR(batch.Reserve({waiting.data(), count}, deadline));
    KVSTOW_RETURN_IF_ERROR(batch.Send({.first_layer = 0, .rows = request.layers}, deadline));
    KVSTOW_RETURN_IF_ERROR(batch.Seal(deadline));
    waiting.erase(waiting.begin(), waiting.begin() + count);
    summary.sent_bytes += batch.sent_bytes();
    if (request.progress) {
      request.progress(static_cast<int64_t>(plan.keys.size() - waiting.size()),
                       static_cast<int64_t>(plan.keys.size()));
    }
    // Sealed blocks can make room for what was refused: those blocks are asked for again, as long
    // as every round stores something. So are those whose codecs a plan of the model, come
    // meanwhile, has changed: once each, because plans hardly ever change.
    const bool has_stored = std::any_of(batch.outcomes().begin(), batch.outcomes().end(),
                                        [](const PutOutcome& o) { return o.status.ok(); });
    std::vector<int32_t> again;
    for (const PutOutcome& outcome : batch.outcomes()) {
      if ((has_stored && absl::IsResourceExhausted(outcome.status)) ||
          (absl::IsAborted(outcome.status) && replanned.insert(outcome.block_idx).second)) {
        again.push_back(outcome.block_idx);
      } else {
        Count(outcome, summary);
      }
    }
    const bool is_full = !has_stored && absl::IsResourceExhausted(summary.first_refusal);
    if (is_full) {
      // No use in asking for the rest of the prompt.
      summary.num_refused += static_cast<int32_t>(waiting.size());
      break;
    }
    std::sort(again.begin(), again.end());
    waiting.insert(waiting.begin(), again.begin(), again.end());
  }
  return summary;
}

struct PutSession::State {
  explicit State(PutPlan put_plan) : plan(std::move(put_plan)), batch(plan) {}

  const PutPlan plan;
  int64_t first_block = 0;
  PutSummary summary;
  PutBatch batch;
  std::vector<bool> has_layer;
  absl::Status failure;  // of the first call that failed: nothing more is sent
  bool is_finished = false;

  absl::Time Deadline() const {
    const Connection& connection = *plan.client->connection;
    return connection.clock().Now() + connection.options().data_timeout;
  }
};

absl::StatusOr<std::unique_ptr<PutSession>> KvClient::StartPut(const Model& model,
                                                               const PutRequest& request) {
  KVSTOW_ASSIGN_OR_RETURN(PutPlan plan, MakePlan(state_, model, request));
  auto state = std::make_unique<PutSession::State>(std::move(plan));
  state->first_block = request.first_block;
  state->summary = NewSummary(state->plan, request.tokens.size());
  state->has_layer.resize(model.layout->num_layers());
  KVSTOW_RETURN_IF_ERROR(
      state->batch.Reserve(BlockIdxs(request, state->plan.keys.size()), state->Deadline()));
  return std::unique_ptr<PutSession>(new PutSession(std::move(state)));
}

PutSession::PutSession(std::unique_ptr<State> state) : state_(std::move(state)) {}
PutSession::~PutSession() = default;

absl::Status PutSession::PutLayer(int32_t layer_idx, const LayerRows& rows) {
  const BlockLayout& layout = *state_->plan.model.layout;
  if (layer_idx < 0 || layer_idx >= layout.num_layers()) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer_idx: ", layer_idx, ", want 0 to ", layout.num_layers() - 1));
  }
  if (state_->is_finished) return absl::FailedPreconditionError("the session is finished");
  if (state_->has_layer[layer_idx]) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer_idx: ", layer_idx, " was put before, want each layer once"));
  }
  KVSTOW_RETURN_IF_ERROR(CheckRows(layout, layer_idx, {&rows, 1}));
  KVSTOW_RETURN_IF_ERROR(state_->failure);
  const RowsOfLayers layer{.first_layer = layer_idx, .rows = {&rows, 1}};
  KVSTOW_RETURN_IF_ERROR(CheckNotWritten(state_->plan, state_->first_block, layer));
  state_->failure = state_->batch.Send(layer, state_->Deadline());
  if (state_->failure.ok()) state_->has_layer[layer_idx] = true;
  return state_->failure;
}

absl::StatusOr<PutSummary> PutSession::Finish() {
  if (state_->is_finished) return absl::FailedPreconditionError("the session is finished");
  KVSTOW_RETURN_IF_ERROR(state_->failure);
  for (size_t i = 0; i < state_->has_layer.size(); ++i) {
    if (!state_->has_layer[i]) {
      return absl::FailedPreconditionError(
          absl::StrCat("layers are missing, the first is ", i, " of ", state_->has_layer.size()));
    }
  }
  state_->is_finished = true;
  KVSTOW_RETURN_IF_ERROR(state_->batch.Seal(state_->Deadline()));
  state_->summary.sent_bytes = state_->batch.sent_bytes();
  for (const PutOutcome& outcome : state_->batch.outcomes()) Count(outcome, state_->summary);
  return state_->summary;
}

}  // namespace kvstow
