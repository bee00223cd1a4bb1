// KvClient: construction and control calls. Put is in put_session.cc, Get in get_blocks.cc.
#include "client/cpp/kv_client.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/client_state.h"
#include "kernels/core/status_macros.h"
#include "proto/convert.h"

namespace kvstow {
namespace {

absl::StatusOr<Model> MakeModel(const ModelSpec& spec) {
  KVSTOW_ASSIGN_OR_RETURN(BlockLayout layout, BlockLayout::Create(spec));
  return Model{.spec = spec,
               .fingerprint = spec.Fingerprint(),
               .layout = std::make_shared<const BlockLayout>(std::move(layout))};
}

}  // namespace

absl::StatusOr<std::unique_ptr<KvClient>> KvClient::Create(const KvClientOptions& options) {
  auto state = std::make_shared<ClientState>();
  KVSTOW_ASSIGN_OR_RETURN(state->connection, Connection::Create(options));
  state->windows = std::make_unique<BulkWindows>(state->connection.get());
  state->calibrations = std::make_unique<CalibrationCache>(state->connection.get());
  return std::unique_ptr<KvClient>(new KvClient(std::move(state)));
}

KvClient::KvClient(std::shared_ptr<ClientState> state) : state_(std::move(state)) {}
KvClient::~KvClient() = default;

absl::StatusOr<Model> KvClient::RegisterModel(const ModelSpec& spec) {
  KVSTOW_ASSIGN_OR_RETURN(Model model, MakeModel(spec));
  Connection& connection = *state_->connection;
  v1::RegisterModelRequest request;
  *request.mutable_spec() = ModelSpecToProto(spec);
  v1::RegisterModelResponse response;
  KVSTOW_RETURN_IF_ERROR(
      connection.Call(connection.options().control_timeout, [&](grpc::ClientContext* context) {
        return connection.models().RegisterModel(context, request, &response);
      }));
  // Both ends must mean the same bytes by a block.
  if (response.fingerprint() != model.fingerprint.AsStringView() ||
      response.num_planes() != static_cast<uint32_t>(model.layout->num_planes()) ||
      response.block_bytes() != static_cast<uint64_t>(model.layout->block_bytes())) {
    return absl::FailedPreconditionError(absl::StrCat(
        "register model: the service lays a block out as ", response.num_planes(), " planes of ",
        response.block_bytes(), " bytes, this client as ", model.layout->num_planes(),
        " planes of ", model.layout->block_bytes(), " bytes, or their fingerprints differ"));
  }
  return model;
}

absl::StatusOr<Model> KvClient::GetModel(const Digest& fingerprint) {
  Connection& connection = *state_->connection;
  v1::GetModelRequest request;
  request.set_fingerprint(std::string(fingerprint.AsStringView()));
  v1::GetModelResponse response;
  KVSTOW_RETURN_IF_ERROR(
      connection.Call(connection.options().control_timeout, [&](grpc::ClientContext* context) {
        return connection.models().GetModel(context, request, &response);
      }));
  const absl::StatusOr<ModelSpec> spec = ModelSpecFromProto(response.spec());
  if (!spec.ok() || spec->Fingerprint() != fingerprint) {
    return absl::FailedPreconditionError(absl::StrCat(
        "get model: the service answered another model, ",
        spec.ok() ? spec->Fingerprint().ToHex() : std::string(spec.status().message())));
  }
  return MakeModel(*spec);
}

v1::TurnHints HintsToProto(const Conversation& conversation) {
  const auto milliseconds = [](absl::Duration duration) {
    return static_cast<uint32_t>(
        std::clamp<int64_t>(absl::ToInt64Milliseconds(duration), 0, UINT32_MAX));
  };
  v1::TurnHints hints;
  hints.set_session(conversation.session);
  // Without a session the tenant says nothing.
  if (!conversation.session.empty()) hints.set_tenant(conversation.tenant);
  hints.set_turn(conversation.turn);
  hints.set_session_over(conversation.session_over);
  hints.set_returns_within_ms(milliseconds(conversation.returns_within));
  hints.set_pin_ms(milliseconds(conversation.pin_for));
  hints.set_output_tokens(conversation.output_tokens);
  return hints;
}

absl::StatusOr<LookupSummary> KvClient::Lookup(absl::Span<const BlockKey> keys,
                                               const LookupOptions& options) {
  KVSTOW_RETURN_IF_ERROR(CheckNumKeys(static_cast<int64_t>(keys.size()), "keys", 1));
  Connection& connection = *state_->connection;
  v1::LookupRequest request;
  request.set_keys(KeysToBytes(keys));
  request.set_local_only(connection.options().local_only);
  v1::TurnHints hints = HintsToProto(options.conversation);
  if (hints.ByteSizeLong() > 0) request.mutable_hints()->Swap(&hints);
  request.set_prefill_tokens_per_s(options.prefill_tokens_per_s);
  v1::LookupResponse response;
  const absl::Duration timeout = std::min(connection.options().control_timeout, options.timeout);
  KVSTOW_RETURN_IF_ERROR(connection.Call(timeout, [&](grpc::ClientContext* context) {
    return connection.control().Lookup(context, request, &response);
  }));
  const std::string& locations = response.locations();
  if (locations.size() != keys.size()) {
    return absl::InternalError(
        absl::StrCat("lookup: ", locations.size(), " answers for ", keys.size(), " keys"));
  }
  LookupSummary summary;
  summary.keys.assign(keys.begin(), keys.end());
  summary.locations.assign(locations.begin(), locations.end());
  while (summary.num_leading < static_cast<int32_t>(keys.size()) &&
         summary.locations[summary.num_leading] != 0) {
    ++summary.num_leading;
  }
  if (response.has_estimate()) {
    const v1::LoadEstimate& estimate = response.estimate();
    const auto most = static_cast<uint32_t>(summary.num_leading);
    summary.advice = {
        .load_ms = estimate.load_ms(),
        .recompute_ms = estimate.recompute_ms(),
        .num_worth_loading = static_cast<int32_t>(std::min(estimate.num_worth_loading(), most)),
        .is_measured = estimate.is_measured()};
  }
  return summary;
}

// Sends keys, not tokens: an eighth of the bytes, and the service does not hash.
absl::StatusOr<LookupSummary> KvClient::Lookup(const Model& model, const KeyContext& context,
                                               absl::Span<const int32_t> tokens) {
  KVSTOW_RETURN_IF_ERROR(CheckNumTokens(static_cast<int64_t>(tokens.size()), "tokens"));
  KVSTOW_RETURN_IF_ERROR(CheckKeyContext(context));
  KeyContext full = context;
  full.fingerprint = model.fingerprint;
  const std::vector<BlockKey> keys = ChainKeys(full, tokens, model.layout->tokens_per_block());
  if (keys.empty()) return LookupSummary();  // less than a block: nothing to look up
  return Lookup(keys);
}

absl::StatusOr<int64_t> KvClient::Delete(absl::Span<const BlockKey> keys) {
  KVSTOW_RETURN_IF_ERROR(CheckNumKeys(static_cast<int64_t>(keys.size()), "keys", 1));
  Connection& connection = *state_->connection;
  v1::DeleteRequest request;
  request.set_keys(KeysToBytes(keys));
  v1::DeleteResponse response;
  KVSTOW_RETURN_IF_ERROR(
      connection.Call(connection.options().control_timeout, [&](grpc::ClientContext* context) {
        return connection.control().Delete(context, request, &response);
      }));
  return int64_t{response.num_deleted()};
}

absl::StatusOr<std::unique_ptr<WindowBuffer>> KvClient::NewWindowBuffer(int64_t bytes) {
  if (bytes < 1 || bytes > kMaxWindowBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("bytes: ", bytes, ", want 1 to ", kMaxWindowBytes));
  }
  // Not by the limit of a control call: populating takes about a second for each GiB.
  const Connection& connection = *state_->connection;
  const absl::Time deadline = connection.clock().Now() + connection.options().data_timeout;
  KVSTOW_ASSIGN_OR_RETURN(std::shared_ptr<BulkArea> area,
                          state_->windows->OpenBuffer(bytes, deadline));
  return std::unique_ptr<WindowBuffer>(new WindowBuffer(std::move(area)));
}

std::string KvClient::ExplainPath() const { return state_->windows->Explain(); }

BreakerState KvClient::breaker_state() const { return state_->connection->breaker_state(); }

int64_t KvClient::corrupt_blocks() const { return state_->corrupt_blocks.load(); }

}  // namespace kvstow
