#include "service/peer_set.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/parallel.h"
#include "kernels/core/checksum.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

// Of encoded blocks that one fetch holds besides the store.
constexpr size_t kFetchBytes = size_t{16} << 20;

absl::Span<const std::byte> BytesOf(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// Highest score first: the same order wherever it is computed.
uint64_t Score(const std::string& target, const BlockKey& key) {
  return Xxh3(BytesOf(absl::StrCat(target, std::string(key.AsStringView()))));
}

// The pair that the units of a block show: of each role the first codec that is not raw.
CodecPair CodecsOf(const RegisteredModel& model, const EncodedBlock& block) {
  CodecPair codecs;
  for (int32_t i = 0; i < model.layout().num_planes(); ++i) {
    CodecId& codec = model.layout().plane(i).role == Role::kKey ? codecs.k : codecs.v;
    if (codec == CodecId::kRaw) codec = block.units[i].codec;
  }
  return codecs;
}

absl::Status WriteUnits(const EncodedBlock& block, TicketId ticket, TieredStore& store) {
  for (size_t i = 0; i < block.units.size(); ++i) {
    const EncodedUnit& unit = block.units[i];
    const uint64_t xxh3 = Xxh3(unit.bytes);
    KVSTOW_ASSIGN_OR_RETURN(UnitWriter writer,
                            store.BeginUnit(ticket, static_cast<uint32_t>(i), xxh3));
    const absl::Span<std::byte> out = writer.Buffer(static_cast<uint32_t>(unit.bytes.size()));
    std::memcpy(out.data(), unit.bytes.data(), unit.bytes.size());
    KVSTOW_RETURN_IF_ERROR(writer.Commit(unit.codec, xxh3));
  }
  return store.Seal(ticket);
}

// The calibration that came with a block, kept here too: the block's record names it.
absl::StatusOr<CalibrationRef> KeepCalibration(const CalibrationRef& calibration,
                                               const PeerSet::Destination& to) {
  if (calibration == nullptr) return calibration;
  if (CalibrationRef known = to.calibrations.Find(calibration->id()); known != nullptr) {
    return known;
  }
  return to.calibrations.Put(calibration->Serialize(), to.models);
}

absl::Status Keep(const RegisteredModel& model, const BlockKey& key, const EncodedBlock& block,
                  const PeerSet::Destination& to) {
  TieredStore& store = to.store;
  KVSTOW_ASSIGN_OR_RETURN(const CalibrationRef calibration, KeepCalibration(block.calibration, to));
  const RegisteredModel::Plan plan = model.PlanFor(CodecsOf(model, block), calibration.get());
  ReserveRequest request;
  request.meta = {.key = key,
                  .fingerprint = model.fingerprint(),
                  .codecs = plan.codecs,
                  .num_tokens = model.layout().tokens_per_block(),
                  .logical_bytes = model.layout().block_bytes()};
  if (calibration != nullptr) request.meta.calibration_id = calibration->id();
  request.unit_bytes = plan.unit_bytes;
  KVSTOW_ASSIGN_OR_RETURN(const TicketId ticket, store.Reserve(request));
  const absl::Status written = WriteUnits(block, ticket, store);
  if (!written.ok()) store.Abort(ticket).IgnoreError();
  return written;
}

KvClientOptions ClientOptions(const PeerOptions& options, const std::string& target) {
  return {.target = target,
          .num_channels = 1,
          // A question and a fetch are a call's two steps, and each has half of the time.
          .control_timeout = options.timeout / 2,
          .data_timeout = options.timeout / 2,
          .paths = {},
          .local_only = true};
}

}  // namespace

absl::Status PeerOptions::Validate() const {
  if (targets.size() > kMaxPeers) {
    return absl::InvalidArgumentError(
        absl::StrCat("peers.list: ", targets.size(), " peers, want at most ", kMaxPeers));
  }
  for (const std::string& target : targets) {
    if (const absl::Status status = ClientOptions(*this, target).Validate(); !status.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("peers.list: \"", target, "\": ", status.message()));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<PeerSet>> PeerSet::Create(const PeerOptions& options) {
  KVSTOW_RETURN_IF_ERROR(options.Validate());
  std::unique_ptr<PeerSet> set(new PeerSet());
  for (const std::string& target : options.targets) {
    KVSTOW_ASSIGN_OR_RETURN(std::unique_ptr<KvClient> client,
                            KvClient::Create(ClientOptions(options, target)));
    set->peers_.push_back({target, std::move(client)});
  }
  return set;
}

std::vector<std::vector<bool>> PeerSet::Ask(absl::Span<const BlockKey> keys) {
  std::vector<std::vector<bool>> holds(peers_.size());
  RunParallel(static_cast<int>(peers_.size()), [&](int i) {
    holds[i].resize(keys.size());
    const absl::StatusOr<LookupSummary> found = peers_[i].client->Lookup(keys);
    if (!found.ok()) {
      ++counters_.peer_failures;
      return;
    }
    for (size_t k = 0; k < keys.size(); ++k) holds[i][k] = found->locations[k] != 0;
  });
  return holds;
}

std::vector<int> PeerSet::Choose(absl::Span<const BlockKey> keys,
                                 const std::vector<std::vector<bool>>& holds) const {
  std::vector<int> chosen(keys.size(), -1);
  for (size_t k = 0; k < keys.size(); ++k) {
    uint64_t best = 0;
    for (size_t i = 0; i < peers_.size(); ++i) {
      if (!holds[i][k]) continue;
      const uint64_t score = Score(peers_[i].target, keys[k]);
      if (chosen[k] >= 0 && score <= best) continue;
      chosen[k] = static_cast<int>(i);
      best = score;
    }
  }
  return chosen;
}

std::vector<bool> PeerSet::Lookup(absl::Span<const BlockKey> keys) {
  std::vector<bool> found(keys.size());
  if (keys.empty() || peers_.empty()) return found;
  const std::vector<int> chosen = Choose(keys, Ask(keys));
  for (size_t k = 0; k < keys.size(); ++k) found[k] = chosen[k] >= 0;
  counters_.peer_hits += std::count(found.begin(), found.end(), true);
  return found;
}

std::optional<ModelSpec> PeerSet::FindModel(const Digest& fingerprint) {
  std::vector<std::optional<ModelSpec>> found(peers_.size());
  RunParallel(static_cast<int>(peers_.size()), [&](int i) {
    absl::StatusOr<Model> model = peers_[i].client->GetModel(fingerprint);
    if (model.ok()) found[i] = std::move(model->spec);
    if (!model.ok() && !absl::IsNotFound(model.status())) ++counters_.peer_failures;
  });
  for (std::optional<ModelSpec>& spec : found) {
    if (spec.has_value()) return std::move(spec);
  }
  return std::nullopt;
}

int64_t PeerSet::Fill(const RegisteredModel& model, absl::Span<const BlockKey> keys,
                      const Destination& to) {
  // What one peer does not bring is asked of another once: one that hangs costs its half of the
  // time, and the next one has as much.
  constexpr int kRounds = 2;
  if (keys.empty() || peers_.empty()) return 0;
  std::vector<std::vector<bool>> holds = Ask(keys);
  std::atomic<int64_t> num_fetched{0};
  for (int round = 0; round < kRounds; ++round) {
    const std::vector<int> chosen = Choose(keys, holds);
    if (*std::max_element(chosen.begin(), chosen.end()) < 0) break;  // nobody has what is missing
    std::vector<std::vector<BlockKey>> keys_of(peers_.size());
    for (size_t k = 0; k < keys.size(); ++k) {
      if (chosen[k] >= 0) keys_of[chosen[k]].push_back(keys[k]);
    }
    RunParallel(static_cast<int>(peers_.size()),
                [&](int i) { num_fetched += FetchFrom(peers_[i], model, keys_of[i], to); });
    const std::vector<Location> locations = to.store.Lookup(keys);
    for (size_t k = 0; k < keys.size(); ++k) {
      if (chosen[k] < 0) continue;
      holds[chosen[k]][k] = false;
      const bool is_here = locations[k].in_dram || locations[k].in_nvme;
      for (std::vector<bool>& held : holds) held[k] = held[k] && !is_here;
    }
  }
  return num_fetched;
}

int64_t PeerSet::FetchFrom(Peer& peer, const RegisteredModel& model,
                           absl::Span<const BlockKey> keys, const Destination& to) {
  if (keys.empty()) return 0;
  const Model wire_model{.spec = model.spec(),
                         .fingerprint = model.fingerprint(),
                         .layout = std::make_shared<const BlockLayout>(model.layout())};
  int64_t num_fetched = 0;
  // A few at a time: they are in memory twice until they are sealed.
  const size_t keys_per_call =
      std::max<size_t>(1, kFetchBytes / static_cast<size_t>(model.layout().block_bytes()));
  while (!keys.empty()) {
    const absl::Span<const BlockKey> some = keys.subspan(0, keys_per_call);
    const absl::StatusOr<std::vector<EncodedBlock>> blocks =
        peer.client->GetEncoded(wire_model, some);
    if (!blocks.ok()) {
      ++counters_.peer_failures;
      return num_fetched;  // the rest misses
    }
    bool is_cut = false;
    for (size_t k = 0; k < some.size(); ++k) {
      const EncodedBlock& block = (*blocks)[k];
      absl::Status status = block.status;
      const bool came = !absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status);
      is_cut = is_cut || !came;
      if (status.ok()) status = Keep(model, some[k], block, to);
      // Another call may have brought it meanwhile.
      const bool is_here = status.ok() || absl::IsAlreadyExists(status);
      if (is_here) ++num_fetched;
      if (status.ok()) ++counters_.peer_fetched;
      if (came && !is_here && !absl::IsNotFound(status)) ++counters_.peer_refused;
    }
    if (is_cut) ++counters_.peer_failures;
    keys.remove_prefix(some.size());
  }
  return num_fetched;
}

}  // namespace kvstow
