#include "client/cpp/admin_client.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/calibration_calls.h"
#include "client/cpp/connection.h"
#include "client/cpp/raw_stream.h"
#include "kernels/core/status_macros.h"
#include "proto/convert.h"
#include "proto/status.h"

namespace kvstow {
namespace {

constexpr char kHealthMethod[] = "/grpc.health.v1.Health/Check";
constexpr char kVerifyMethod[] = "/kvstow.v1.Control/Verify";
constexpr absl::Duration kVerifyTimeout = absl::Hours(24);  // the longest that gRPC is given

// grpc.health.v1.HealthCheckResponse {status = 1 (enum; 1 is SERVING)}, read by hand: its proto
// file is not packaged with gRPC, and the request for the whole server is the empty message.
constexpr char kServing[] = "\x08\x01";

std::string BytesOf(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  if (!buffer.Dump(&slices).ok()) return {};
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

absl::StatusOr<ListedBlock> BlockFromProto(const v1::BlockInfo& info) {
  ListedBlock block{.codec = info.codec(),
                    .locations = info.locations(),
                    .num_tokens = info.num_tokens(),
                    .record_bytes = info.record_bytes(),
                    .logical_bytes = info.logical_bytes(),
                    .is_pinned = info.is_pinned()};
  KVSTOW_ASSIGN_OR_RETURN(block.key, Digest::FromBytes(info.key(), "blocks.key"));
  KVSTOW_ASSIGN_OR_RETURN(block.fingerprint,
                          Digest::FromBytes(info.fingerprint(), "blocks.fingerprint"));
  return block;
}

ServicePlan PlanFromProto(const v1::ModelPlan& message) {
  ServicePlan plan{.codecs = message.plan(),
                   .is_derived = message.is_derived(),
                   .reasons = {message.reasons().begin(), message.reasons().end()}};
  const absl::StatusOr<Digest> id = Digest::FromBytes(message.plan_id(), "plan_id");
  if (id.ok()) plan.id = *id;
  return plan;
}

ServiceStat StatFromProto(const v1::StatResponse& response) {
  ServiceStat stat{.num_blocks = response.num_blocks(),
                   .index_bytes = response.index_bytes(),
                   .open_tickets = response.open_tickets(),
                   .open_leases = response.open_leases(),
                   .pinned_bytes = response.pinned_bytes(),
                   .counters = {response.counters().begin(), response.counters().end()},
                   .version = response.version(),
                   .uptime = absl::Milliseconds(response.uptime_ms()),
                   .resident_bytes = response.resident_bytes(),
                   .policy = response.policy(),
                   .policy_bytes = response.policy_bytes(),
                   .write_behind_bytes = response.write_behind_bytes()};
  for (const v1::TierStat& tier : response.tiers()) {
    stat.tiers.push_back({.tier = tier.tier(),
                          .capacity_bytes = tier.capacity_bytes(),
                          .used_bytes = tier.used_bytes(),
                          .sealed_bytes = tier.sealed_bytes(),
                          .reserved_bytes = tier.reserved_bytes(),
                          .num_blocks = tier.num_blocks()});
  }
  for (const v1::CodecStat& codec : response.codecs()) {
    stat.codecs.push_back({.codec = codec.codec(),
                           .num_blocks = codec.num_blocks(),
                           .record_bytes = codec.record_bytes(),
                           .logical_bytes = codec.logical_bytes()});
  }
  for (const v1::ModelStat& message : response.models()) {
    ServiceModel model{.name = message.name()};
    const absl::StatusOr<Digest> fingerprint =
        Digest::FromBytes(message.fingerprint(), "models.fingerprint");
    if (fingerprint.ok()) model.fingerprint = *fingerprint;
    if (message.has_plan()) model.plan = PlanFromProto(message.plan());
    stat.models.push_back(std::move(model));
  }
  return stat;
}

}  // namespace

struct AdminClient::State {
  std::unique_ptr<Connection> connection;

  // A control call without the breaker.
  absl::Status Call(const Connection::CallFn& call) const {
    return Call(connection->options().control_timeout, call);
  }
  absl::Status Call(absl::Duration timeout, const Connection::CallFn& call) const {
    grpc::ClientContext context;
    context.set_deadline(GrpcDeadline(timeout));
    return connection->WithTarget(FromGrpcStatus(call(&context)), timeout);
  }
  // Calls that may carry many bytes.
  Caller Bulk() const {
    return [this](const Connection::CallFn& call) {
      return Call(connection->options().data_timeout, call);
    };
  }
};

AdminClient::AdminClient(std::unique_ptr<State> state) : state_(std::move(state)) {}
AdminClient::~AdminClient() = default;

absl::StatusOr<std::unique_ptr<AdminClient>> AdminClient::Create(const KvClientOptions& options) {
  auto state = std::make_unique<State>();
  KVSTOW_ASSIGN_OR_RETURN(state->connection, Connection::Create(options));
  return std::unique_ptr<AdminClient>(new AdminClient(std::move(state)));
}

absl::StatusOr<absl::Duration> AdminClient::Ping(absl::Duration timeout) {
  Connection& connection = *state_->connection;
  const absl::Time start = connection.clock().Now();
  RawStream stream(connection.NextDataStub(), {.method = kHealthMethod, .timeout = timeout});
  grpc::Slice empty;
  stream.Write(grpc::ByteBuffer(&empty, 1));
  stream.WritesDone();
  grpc::ByteBuffer response;
  const bool has_response = stream.Read(response);
  KVSTOW_RETURN_IF_ERROR(connection.WithTarget(stream.Finish(), timeout));
  if (!has_response || BytesOf(response) != kServing) {
    return absl::UnavailableError(absl::StrCat("kvstow service at ", connection.options().target,
                                               ": it answers, but does not serve now"));
  }
  return connection.clock().Now() - start;
}

absl::StatusOr<ServiceStat> AdminClient::Stat() {
  v1::StatResponse response;
  KVSTOW_RETURN_IF_ERROR(state_->Call([&](grpc::ClientContext* context) {
    return state_->connection->control().Stat(context, v1::StatRequest(), &response);
  }));
  return StatFromProto(response);
}

absl::StatusOr<BlockPage> AdminClient::ListBlocks(const ListOptions& options) {
  if (options.page_size < 0 || options.page_size > kMaxListPage) {
    return absl::InvalidArgumentError(absl::StrCat("page_size: ", options.page_size, ", want 1 to ",
                                                   kMaxListPage, ", or 0 for ", kDefaultListPage));
  }
  v1::ListRequest request;
  request.set_page_size(static_cast<uint32_t>(options.page_size));
  request.set_page_token(options.page_token);
  if (!options.fingerprint.is_zero()) {
    request.set_fingerprint(std::string(options.fingerprint.AsStringView()));
  }
  v1::ListResponse response;
  KVSTOW_RETURN_IF_ERROR(state_->Call([&](grpc::ClientContext* context) {
    return state_->connection->control().List(context, request, &response);
  }));
  BlockPage page;
  page.next_page_token = response.next_page_token();
  for (const v1::BlockInfo& info : response.blocks()) {
    KVSTOW_ASSIGN_OR_RETURN(ListedBlock block, BlockFromProto(info));
    page.blocks.push_back(std::move(block));
  }
  return page;
}

absl::StatusOr<std::vector<ModelSpec>> AdminClient::ListModels() {
  v1::ListModelsResponse response;
  KVSTOW_RETURN_IF_ERROR(state_->Call([&](grpc::ClientContext* context) {
    return state_->connection->models().ListModels(context, v1::ListModelsRequest(), &response);
  }));
  std::vector<ModelSpec> specs;
  for (const v1::ModelSpec& message : response.specs()) {
    KVSTOW_ASSIGN_OR_RETURN(ModelSpec spec, ModelSpecFromProto(message));
    specs.push_back(std::move(spec));
  }
  return specs;
}

absl::StatusOr<ServicePlan> AdminClient::SetPlan(const Digest& fingerprint,
                                                 const std::string& plan) {
  v1::SetPlanRequest request;
  request.set_fingerprint(std::string(fingerprint.AsStringView()));
  request.set_plan(plan);
  v1::SetPlanResponse response;
  KVSTOW_RETURN_IF_ERROR(state_->Call([&](grpc::ClientContext* context) {
    return state_->connection->models().SetPlan(context, request, &response);
  }));
  return PlanFromProto(response.plan());
}

absl::Status AdminClient::DerivePlan(const Digest& fingerprint) {
  v1::SetPlanRequest request;
  request.set_fingerprint(std::string(fingerprint.AsStringView()));
  request.set_derive(true);
  v1::SetPlanResponse response;
  return state_->Call([&](grpc::ClientContext* context) {
    return state_->connection->models().SetPlan(context, request, &response);
  });
}

absl::StatusOr<std::vector<ServicePath>> AdminClient::ListPaths() {
  v1::ListPathsResponse response;
  KVSTOW_RETURN_IF_ERROR(state_->Call([&](grpc::ClientContext* context) {
    return state_->connection->channels().ListPaths(context, v1::ListPathsRequest(), &response);
  }));
  std::vector<ServicePath> paths;
  for (const v1::PathInfo& info : response.paths()) {
    paths.push_back({info.path(), info.address(), info.unavailable()});
  }
  return paths;
}

absl::StatusOr<ListedCalibration> AdminClient::PutCalibration(std::string_view bundle) {
  return SendBundle(state_->connection->calibrations(), bundle, state_->Bulk());
}

absl::StatusOr<std::vector<ListedCalibration>> AdminClient::ListCalibrations(
    const Digest& fingerprint) {
  return ListBundles(state_->connection->calibrations(), fingerprint, state_->Bulk());
}

absl::StatusOr<std::string> AdminClient::GetCalibration(const Digest& id) {
  return FetchBundle(state_->connection->calibrations(), id, state_->Bulk());
}

absl::Status AdminClient::DeleteCalibration(const Digest& id) {
  return DeleteBundle(state_->connection->calibrations(), id, state_->Bulk());
}

absl::StatusOr<VerifySummary> AdminClient::Verify(absl::Span<const BlockKey> keys,
                                                  const VerifyProgressFn& progress) {
  KVSTOW_RETURN_IF_ERROR(CheckNumKeys(static_cast<int64_t>(keys.size()), "keys", 0));
  Connection& connection = *state_->connection;
  const absl::Duration wait_limit = connection.options().data_timeout;
  RawStream stream(connection.NextDataStub(),
                   {.method = kVerifyMethod, .timeout = kVerifyTimeout, .wait_limit = wait_limit});
  v1::VerifyRequest request;
  request.set_keys(KeysToBytes(keys));
  stream.Write(ToByteBuffer(request));
  stream.WritesDone();
  VerifySummary summary;
  bool is_done = false;
  grpc::ByteBuffer bytes;
  while (stream.Read(bytes)) {
    v1::VerifyProgress message;
    KVSTOW_RETURN_IF_ERROR(FromByteBuffer(bytes, "VerifyProgress", message));
    std::vector<BlockKey> bad_keys;
    for (const std::string& key : message.bad_keys()) {
      KVSTOW_ASSIGN_OR_RETURN(bad_keys.emplace_back(), Digest::FromBytes(key, "bad_keys"));
    }
    summary.num_checked = message.num_checked();
    summary.bad_keys.insert(summary.bad_keys.end(), bad_keys.begin(), bad_keys.end());
    is_done = message.done();
    if (progress) progress(message.num_checked(), message.num_total(), bad_keys);
  }
  KVSTOW_RETURN_IF_ERROR(connection.WithTarget(stream.Finish(), wait_limit));
  if (!is_done) return absl::InternalError("verify: the service stopped before it was done");
  return summary;
}

absl::StatusOr<Lease> AdminClient::Acquire(absl::Span<const BlockKey> keys, absl::Duration ttl) {
  KVSTOW_RETURN_IF_ERROR(CheckNumKeys(static_cast<int64_t>(keys.size()), "keys", 1));
  const int64_t ttl_ms = absl::ToInt64Milliseconds(ttl);
  if (ttl_ms < 1 || ttl_ms > UINT32_MAX) {
    return absl::InvalidArgumentError(
        absl::StrCat("ttl: ", absl::FormatDuration(ttl), ", want at least 1ms"));
  }
  v1::AcquireRequest request;
  request.set_keys(KeysToBytes(keys));
  request.set_ttl_ms(static_cast<uint32_t>(ttl_ms));
  v1::AcquireResponse response;
  KVSTOW_RETURN_IF_ERROR(state_->Call([&](grpc::ClientContext* context) {
    return state_->connection->control().Acquire(context, request, &response);
  }));
  if (response.held().size() != keys.size()) {
    return absl::InternalError(
        absl::StrCat("acquire: ", response.held().size(), " answers for ", keys.size(), " keys"));
  }
  Lease lease{.id = response.lease(), .ttl = absl::Milliseconds(response.ttl_ms())};
  for (const char held : response.held()) lease.held.push_back(held != 0);
  return lease;
}

absl::Status AdminClient::Release(uint64_t lease_id) {
  v1::ReleaseRequest request;
  request.set_lease(lease_id);
  v1::ReleaseResponse response;
  return state_->Call([&](grpc::ClientContext* context) {
    return state_->connection->control().Release(context, request, &response);
  });
}

}  // namespace kvstow
