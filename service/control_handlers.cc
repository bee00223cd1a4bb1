#include "service/control_handlers.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"
#include "proto/convert.h"
#include "proto/status.h"
#include "service/plan_handlers.h"
#include "service/turns.h"

namespace kvstow {
namespace {

absl::Status CheckCount(std::string_view field, int64_t found, int64_t max) {
  if (found >= 1 && found <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(std::string(field), ": ", found, ", want 1 to ", max));
}

uint8_t LocationBits(const Location& location) {
  return static_cast<uint8_t>((location.in_hbm ? v1::LOCATION_HBM : 0) |
                              (location.in_dram ? v1::LOCATION_DRAM : 0) |
                              (location.in_nvme ? v1::LOCATION_NVME : 0));
}

int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t all_pages = 0;
  int64_t resident_pages = 0;
  statm >> all_pages >> resident_pages;
  return resident_pages * sysconf(_SC_PAGESIZE);
}

// The keys a lookup asks for. Full blocks only: the tail of a prompt has no key.
absl::StatusOr<std::vector<BlockKey>> LookupKeys(const ServiceParts& parts,
                                                 const v1::LookupRequest& request) {
  switch (request.what_case()) {
    case v1::LookupRequest::kKeys:
      return KeysFromBytes(request.keys(), "keys", 1);
    case v1::LookupRequest::kPrefix: {
      const v1::TokenPrefix& prefix = request.prefix();
      KVSTOW_RETURN_IF_ERROR(CheckNumTokens(prefix.token_ids_size(), "prefix.token_ids"));
      KVSTOW_ASSIGN_OR_RETURN(const KeyContext context, KeyContextFromProto(prefix.context()));
      KVSTOW_ASSIGN_OR_RETURN(const ModelRef model, parts.models->Find(context.fingerprint));
      return ChainKeys(context,
                       {prefix.token_ids().data(), static_cast<size_t>(prefix.token_ids_size())},
                       model->spec().tokens_per_block);
    }
    case v1::LookupRequest::WHAT_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("lookup: neither keys nor prefix is set");
}

// What all blocks of a Reserve have in common.
struct ReservePlan {
  const RegisteredModel& model;
  absl::Duration deadline;
  v1::Form form = v1::FORM_ROWS;
  Digest calibration_id = {};  // zero: the model's only one
  bool is_shared = false;
  PlanRef model_plan;  // one for all blocks, though another may come meanwhile; null: none
  // What its codecs come to: most blocks of a call ask for the same.
  struct Planned {
    RegisteredModel::Plan block;
    Digest plan_id;         // zero: no plan
    Digest calibration_id;  // zero: no codec needs one
  };
  std::map<std::string, Planned> planned;  // by ReserveBlock.codec
};

absl::StatusOr<ReservePlan::Planned> PlanBlock(const ServiceParts& parts, const ReservePlan& shared,
                                               const std::string& codec) {
  const RegisteredModel& model = shared.model;
  const absl::StatusOr<LayeredText> words = SplitLayers(codec);
  if (!words.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("codec: ", words.status().message()));
  }
  KVSTOW_ASSIGN_OR_RETURN(const CodecPair codecs, CodecPairFromName(words->choice, "codec"));
  KVSTOW_RETURN_IF_ERROR(words->layers.CheckFits(model.layout()));
  const PlanRef plan =
      parts.plans->ForRequest(model.fingerprint(), shared.model_plan, words->layers);
  CalibrationRef calibration;
  const bool needs_one = NeedsCalibration(model, codecs, plan.get());
  if (needs_one) {
    // What the client encoded with is for the client to say: the only one may have changed.
    if (shared.form == v1::FORM_ENCODED && shared.calibration_id.is_zero()) {
      return absl::InvalidArgumentError(
          absl::StrCat("calibration_id: none, want the one that the units of codec \"", codec,
                       "\" are encoded with"));
    }
    KVSTOW_ASSIGN_OR_RETURN(calibration,
                            parts.calibrations->Choose(model.fingerprint(), shared.calibration_id));
  }
  ReservePlan::Planned planned{PlannedBlock(model, codecs, plan.get(), calibration.get()),
                               plan == nullptr ? Digest() : plan->id, Digest()};
  const bool uses_it = needs_one && NeedsCalibration(model, planned.block.codecs, plan.get());
  if (uses_it) planned.calibration_id = calibration->id();
  return planned;
}

absl::StatusOr<TicketId> ReserveOne(const ServiceParts& parts, ReservePlan& shared,
                                    const v1::ReserveBlock& block,
                                    std::shared_ptr<const TurnUse> use) {
  const RegisteredModel& model = shared.model;
  ReserveRequest request;
  KVSTOW_ASSIGN_OR_RETURN(request.meta.key, Digest::FromBytes(block.key(), "key"));
  if (!block.after().empty()) {
    KVSTOW_RETURN_IF_ERROR(Digest::FromBytes(block.after(), "after").status());
  }
  auto planned = shared.planned.find(block.codec());
  if (planned == shared.planned.end()) {
    KVSTOW_ASSIGN_OR_RETURN(ReservePlan::Planned fresh, PlanBlock(parts, shared, block.codec()));
    planned = shared.planned.emplace(block.codec(), std::move(fresh)).first;
  }
  const RegisteredModel::Plan& plan = planned->second.block;
  request.meta.fingerprint = model.fingerprint();
  request.meta.plan_id = planned->second.plan_id;
  request.meta.calibration_id = planned->second.calibration_id;
  request.meta.codecs = plan.codecs;
  request.meta.num_tokens = model.layout().tokens_per_block();
  request.meta.logical_bytes = model.layout().block_bytes();
  request.unit_bytes = plan.unit_bytes;
  request.write_deadline = shared.deadline;
  request.use = std::move(use);
  request.is_shared = shared.is_shared;
  return parts.store->Reserve(request);
}

// A block that the model's plan, come meanwhile, would store otherwise is given back: a miss.
absl::Status SealOne(const ServiceParts& parts, TicketId ticket,
                     const absl::StatusOr<RecordMeta>& meta) {
  if (meta.ok()) {
    KVSTOW_ASSIGN_OR_RETURN(const ModelRef model, parts.models->Find(meta->fingerprint));
    const absl::Status allowed = parts.plans->CheckSeal(*model, *meta);
    if (!allowed.ok()) {
      KVSTOW_RETURN_IF_ERROR(parts.store->Abort(ticket));
      parts.metrics->transfer().plan_refusals.fetch_add(1, std::memory_order_relaxed);
      return allowed;
    }
  }
  return parts.store->Seal(ticket);
}

v1::BlockInfo ToProto(const BlockInfo& info) {
  v1::BlockInfo message;
  message.set_key(std::string(info.key.AsStringView()));
  message.set_fingerprint(std::string(info.fingerprint.AsStringView()));
  message.set_codec(CodecPairName(info.codecs));
  message.set_locations(LocationBits(info.location));
  message.set_num_tokens(static_cast<uint32_t>(info.num_tokens));
  message.set_record_bytes(static_cast<uint64_t>(info.record_bytes));
  message.set_logical_bytes(static_cast<uint64_t>(info.logical_bytes));
  message.set_is_pinned(info.is_pinned);
  return message;
}

// Marks what is missing here and at a peer.
void AskPeers(const ServiceParts& parts, const std::vector<BlockKey>& keys,
              std::string& locations) {
  if (parts.peers->empty()) return;
  std::vector<BlockKey> missing;
  std::vector<size_t> places;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (locations[i] != '\0') continue;
    missing.push_back(keys[i]);
    places.push_back(i);
  }
  const std::vector<bool> found = parts.peers->Lookup(missing);
  for (size_t i = 0; i < missing.size(); ++i) {
    if (found[i]) locations[places[i]] = static_cast<char>(v1::LOCATION_PEER);
  }
}

}  // namespace

absl::Status DoRegisterModel(const ServiceParts& parts, const v1::RegisterModelRequest& request,
                             v1::RegisterModelResponse* response) {
  KVSTOW_ASSIGN_OR_RETURN(const ModelSpec spec, ModelSpecFromProto(request.spec()));
  KVSTOW_ASSIGN_OR_RETURN(const ModelRef model, parts.models->Register(spec));
  response->set_fingerprint(std::string(model->fingerprint().AsStringView()));
  response->set_num_planes(static_cast<uint32_t>(model->layout().num_planes()));
  response->set_block_bytes(static_cast<uint64_t>(model->layout().block_bytes()));
  return absl::OkStatus();
}

absl::Status DoGetModel(const ServiceParts& parts, const v1::GetModelRequest& request,
                        v1::GetModelResponse* response) {
  KVSTOW_ASSIGN_OR_RETURN(const Digest fingerprint,
                          Digest::FromBytes(request.fingerprint(), "fingerprint"));
  KVSTOW_ASSIGN_OR_RETURN(const ModelRef model, parts.models->Find(fingerprint));
  *response->mutable_spec() = ModelSpecToProto(model->spec());
  const PlanRef plan = parts.plans->Current(fingerprint);
  if (plan != nullptr) *response->mutable_plan() = PlanToProto(*plan);
  return absl::OkStatus();
}

absl::Status DoListModels(const ServiceParts& parts, const v1::ListModelsRequest&,
                          v1::ListModelsResponse* response) {
  for (const ModelRef& model : parts.models->List()) {
    *response->add_specs() = ModelSpecToProto(model->spec());
  }
  return absl::OkStatus();
}

absl::Status DoLookup(const ServiceParts& parts, const v1::LookupRequest& request,
                      v1::LookupResponse* response) {
  if (!(request.prefill_tokens_per_s() >= 0 && request.prefill_tokens_per_s() <= 1e12)) {
    return absl::InvalidArgumentError(
        absl::StrCat("prefill_tokens_per_s: ", request.prefill_tokens_per_s(),
                     ", want 0 (no estimate) to 10^12"));
  }
  KVSTOW_ASSIGN_OR_RETURN(const std::vector<BlockKey> keys, LookupKeys(parts, request));
  const std::vector<Location> found = parts.store->Lookup(keys);
  std::string& locations = *response->mutable_locations();
  locations.reserve(found.size());
  for (const Location& location : found) {
    locations.push_back(static_cast<char>(LocationBits(location)));
  }
  if (!request.local_only()) AskPeers(parts, keys, locations);
  const auto first_miss = std::find(locations.begin(), locations.end(), '\0');
  response->set_num_leading(static_cast<uint32_t>(first_miss - locations.begin()));
  if (request.has_prefix()) response->set_keys(KeysToBytes(keys));
  if (request.has_hints()) {
    v1::TurnHints message = request.hints();
    if (request.has_prefix()) message.set_tenant(request.prefix().context().tenant());
    KVSTOW_ASSIGN_OR_RETURN(const TurnHints hints, ReadHints(message, 0));
    parts.store->Tell({.keys = keys, .hints = hints});
  }
  const double rate = request.prefill_tokens_per_s();
  if (rate == 0 || response->num_leading() == 0) return absl::OkStatus();
  const LoadEstimate estimate = parts.store->Estimate(keys, rate);
  v1::LoadEstimate& out = *response->mutable_estimate();
  out.set_load_ms(estimate.load_ms);
  out.set_recompute_ms(estimate.recompute_ms);
  out.set_load_bytes(static_cast<uint64_t>(estimate.load_bytes));
  out.set_num_worth_loading(static_cast<uint32_t>(estimate.num_worth_loading));
  out.set_is_measured(estimate.is_measured);
  return absl::OkStatus();
}

absl::Status DoReserve(const ServiceParts& parts, const v1::ReserveRequest& request,
                       v1::ReserveResponse* response) {
  KVSTOW_RETURN_IF_ERROR(CheckCount("blocks", request.blocks_size(), kMaxBlocksPerReserve));
  KVSTOW_ASSIGN_OR_RETURN(const v1::Form form, FormFromProto(request.form(), v1::FORM_UNSPECIFIED));
  KVSTOW_ASSIGN_OR_RETURN(const Digest fingerprint,
                          Digest::FromBytes(request.fingerprint(), "fingerprint"));
  KVSTOW_ASSIGN_OR_RETURN(const ModelRef model, parts.models->Find(fingerprint));
  KVSTOW_ASSIGN_OR_RETURN(const TurnHints hints,
                          ReadHints(request.hints(), model->layout().tokens_per_block()));
  ReservePlan shared{.model = *model,
                     .deadline = absl::Milliseconds(request.write_deadline_ms()),
                     .form = form,
                     .is_shared = request.shared(),
                     .model_plan = parts.plans->Current(fingerprint)};
  if (!request.calibration_id().empty()) {
    KVSTOW_ASSIGN_OR_RETURN(shared.calibration_id,
                            Digest::FromBytes(request.calibration_id(), "calibration_id"));
  }
  std::vector<std::shared_ptr<const TurnUse>> uses = StartTurns(*parts.store, request, hints);
  for (int i = 0; i < request.blocks_size(); ++i) {
    v1::ReserveResult* result = response->add_results();
    const absl::StatusOr<TicketId> ticket =
        ReserveOne(parts, shared, request.blocks(i), uses[static_cast<size_t>(i)]);
    *result->mutable_status() = ToItemStatus(WithRetryHint(ticket.status()));
    if (ticket.ok()) result->set_ticket(*ticket);
  }
  if (shared.model_plan != nullptr) response->set_plan(shared.model_plan->codecs.Text());
  return absl::OkStatus();
}

absl::Status DoSeal(const ServiceParts& parts, const v1::SealRequest& request,
                    absl::Duration timeout, v1::SealResponse* response) {
  KVSTOW_RETURN_IF_ERROR(CheckCount("tickets", request.tickets_size(), kMaxTicketsPerCall));
  if (request.durable() && parts.options->store.nvme_path.empty()) {
    return absl::FailedPreconditionError(
        "durable: this service has no disk tier (nvme.path is empty)");
  }
  std::vector<BlockKey> keys;
  std::vector<int> sealed;  // positions in the response
  for (int i = 0; i < request.tickets_size(); ++i) {
    const TicketId ticket = request.tickets(i);
    const absl::StatusOr<RecordMeta> meta = parts.store->TicketMeta(ticket);
    const absl::Status status = SealOne(parts, ticket, meta);
    *response->add_results() = ToItemStatus(WithRetryHint(status));
    if (status.ok() && meta.ok()) {
      keys.push_back(meta->key);
      sealed.push_back(i);
    }
  }
  if (!request.durable() || keys.empty()) return absl::OkStatus();
  // Where the disk fails the blocks are sealed all the same; what was asked for did not happen.
  const absl::Status persisted = parts.store->Persist(keys, timeout);
  if (persisted.ok()) return absl::OkStatus();
  for (const int i : sealed) *response->mutable_results(i) = ToItemStatus(persisted);
  return absl::OkStatus();
}

absl::Status DoAbort(const ServiceParts& parts, const v1::AbortRequest& request,
                     v1::AbortResponse* response) {
  KVSTOW_RETURN_IF_ERROR(CheckCount("tickets", request.tickets_size(), kMaxTicketsPerCall));
  for (const TicketId ticket : request.tickets()) {
    *response->add_results() = ToItemStatus(parts.store->Abort(ticket));
  }
  return absl::OkStatus();
}

absl::Status DoAcquire(const ServiceParts& parts, const v1::AcquireRequest& request,
                       v1::AcquireResponse* response) {
  KVSTOW_ASSIGN_OR_RETURN(const std::vector<BlockKey> keys,
                          KeysFromBytes(request.keys(), "keys", 1));
  KVSTOW_RETURN_IF_ERROR(CheckCount("ttl_ms", request.ttl_ms(),
                                    absl::ToInt64Milliseconds(parts.options->store.lease_max)));
  KVSTOW_ASSIGN_OR_RETURN(const AcquireResult result,
                          parts.store->Acquire(keys, absl::Milliseconds(request.ttl_ms())));
  response->set_lease(result.lease);
  for (const bool is_held : result.held) {
    response->mutable_held()->push_back(is_held ? '\1' : '\0');
  }
  response->set_ttl_ms(request.ttl_ms());
  return absl::OkStatus();
}

absl::Status DoRelease(const ServiceParts& parts, const v1::ReleaseRequest& request,
                       v1::ReleaseResponse*) {
  return parts.store->Release(request.lease());
}

absl::Status DoDelete(const ServiceParts& parts, const v1::DeleteRequest& request,
                      v1::DeleteResponse* response) {
  KVSTOW_ASSIGN_OR_RETURN(const std::vector<BlockKey> keys,
                          KeysFromBytes(request.keys(), "keys", 1));
  uint32_t num_deleted = 0;
  for (const BlockKey& key : keys) {
    const absl::Status status = parts.store->Delete(key);
    if (status.ok()) ++num_deleted;
    if (!status.ok() && status.code() != absl::StatusCode::kNotFound) return status;
  }
  response->set_num_deleted(num_deleted);
  return absl::OkStatus();
}

absl::Status DoList(const ServiceParts& parts, const v1::ListRequest& request,
                    v1::ListResponse* response) {
  // A page filtered by model looks at no more blocks than this; it may come back short, or even
  // empty, with a token to go on with.
  constexpr int64_t kScannedMax = 100'000;
  constexpr int64_t kReadAhead = 1024;
  if (request.page_size() > kMaxListPage) {
    return absl::InvalidArgumentError(
        absl::StrCat("page_size: ", request.page_size(), ", want at most ", kMaxListPage));
  }
  const int64_t page_size = request.page_size() == 0 ? kDefaultListPage : request.page_size();
  BlockKey after;
  if (!request.page_token().empty()) {
    absl::StatusOr<Digest> token = Digest::FromHex(request.page_token());
    if (!token.ok()) {
      return absl::InvalidArgumentError("page_token: not one that List gave");
    }
    after = *token;
  }
  Digest fingerprint;
  if (!request.fingerprint().empty()) {
    KVSTOW_ASSIGN_OR_RETURN(fingerprint, Digest::FromBytes(request.fingerprint(), "fingerprint"));
  }
  // A filtered page reads ahead; any page reads one more than it needs, to know whether it is the
  // last.
  for (int64_t num_scanned = 0; num_scanned < kScannedMax;) {
    const int64_t missing = page_size - response->blocks_size();
    const int64_t limit = fingerprint.is_zero() ? missing + 1 : std::max(missing + 1, kReadAhead);
    const std::vector<BlockInfo> blocks = parts.store->List(after, limit);
    for (const BlockInfo& block : blocks) {
      if (response->blocks_size() == page_size) {
        response->set_next_page_token(after.ToHex());
        return absl::OkStatus();
      }
      after = block.key;
      if (fingerprint.is_zero() || block.fingerprint == fingerprint) {
        *response->add_blocks() = ToProto(block);
      }
    }
    if (static_cast<int64_t>(blocks.size()) < limit) return absl::OkStatus();
    num_scanned += limit;
  }
  response->set_next_page_token(after.ToHex());
  return absl::OkStatus();
}

absl::Status DoStat(const ServiceParts& parts, const v1::StatRequest&, v1::StatResponse* response) {
  const StoreStats stats = parts.store->Stats();
  for (const TierStats& tier : stats.tiers) {
    v1::TierStat* out = response->add_tiers();
    out->set_tier(std::string(TierName(tier.kind)));
    out->set_capacity_bytes(static_cast<uint64_t>(tier.capacity_bytes));
    out->set_used_bytes(static_cast<uint64_t>(tier.used_bytes));
    out->set_sealed_bytes(static_cast<uint64_t>(tier.sealed_bytes));
    out->set_reserved_bytes(static_cast<uint64_t>(tier.reserved_bytes));
    out->set_num_blocks(static_cast<uint64_t>(tier.num_blocks));
  }
  for (const CodecStats& codec : stats.codecs) {
    v1::CodecStat* out = response->add_codecs();
    out->set_codec(CodecPairName(codec.codecs));
    out->set_num_blocks(static_cast<uint64_t>(codec.num_blocks));
    out->set_record_bytes(static_cast<uint64_t>(codec.record_bytes));
    out->set_logical_bytes(static_cast<uint64_t>(codec.logical_bytes));
  }
  response->set_num_blocks(static_cast<uint64_t>(stats.num_blocks));
  response->set_index_bytes(static_cast<uint64_t>(stats.index_bytes));
  response->set_open_tickets(static_cast<uint64_t>(stats.open_tickets));
  response->set_open_leases(static_cast<uint64_t>(stats.open_leases));
  response->set_pinned_bytes(static_cast<uint64_t>(stats.pinned_bytes));
  response->set_open_channels(static_cast<uint64_t>(parts.channels->num_open()));
  for (const auto& counters :
       {StoreCounters(stats), parts.metrics->Counters(), PeerCounterList(parts.peers->counters()),
        parts.calibrations->Counters()}) {
    for (const auto& [name, value] : counters) {
      (*response->mutable_counters())[std::string(name)] = static_cast<uint64_t>(value);
    }
  }
  AddModelStats(parts, *response);
  response->set_policy(parts.options->store.policy);
  response->set_policy_bytes(static_cast<uint64_t>(stats.policy_bytes));
  response->set_write_behind_bytes(static_cast<uint64_t>(stats.write_behind_bytes));
  response->set_version(std::string(ServerVersion()));
  response->set_uptime_ms(static_cast<uint64_t>(absl::ToInt64Milliseconds(
      absl::FromChrono(std::chrono::steady_clock::now() - parts.started_at))));
  response->set_resident_bytes(static_cast<uint64_t>(ResidentBytes()));
  return absl::OkStatus();
}

}  // namespace kvstow
