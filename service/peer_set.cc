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
    KVSTOW_ASSIGN_OR_RETURN(UnitWriter writer,
                            store.BeginUnit(ticket, static_cast<uint32_t>(i), unit.xxh3));
    const absl::Span<std::byte> out = writer.Buffer(static_cast<uint32_t>(unit.bytes.size()));
    std::memcpy(out.data(), unit.bytes.data(), unit.bytes.size());
    // The checksum is the encoder's, wherever that was; only what still has it is kept.
    if (Xxh3(out) != unit.xxh3) return absl::DataLossError("a unit changed on its way");
    KVSTOW_RETURN_IF_ERROR(writer.Commit(unit.codec, unit.xxh3));
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
          .control_timeout = options.timeout,
          .data_timeout = options.timeout,
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
  std::unique_ptr<PeerSet> set(new PeerSet(options.timeout));
  for (const std::string& target : options.targets) {
    KVSTOW_ASSIGN_OR_RETURN(std::unique_ptr<KvClient> client,
                            KvClient::Create(ClientOptions(options, target)));
    set->peers_.push_back({target, std::move(client)});
  }
  return set;
}

std::vector<std::vector<bool>> PeerSet::Ask(absl::Span<const BlockKey> keys,
                                            absl::Duration timeout) {
  std::vector<std::vector<bool>> holds(peers_.size());
  RunParallel(static_cast<int>(peers_.size()), [&](int i) {
    holds[i].resize(keys.size());
    const absl::StatusOr<LookupSummary> found =
        peers_[i].client->Lookup(keys, {.timeout = timeout});
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
  const std::vector<int> chosen = Choose(keys, Ask(keys, timeout_));
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
  if (keys.empty() || peers_.empty()) return 0;
  const absl::Time deadline = clock_.Now() + timeout_;
  // A peer that does not answer must leave the others time to bring something.
  std::vector<std::vector<bool>> holds = Ask(keys, timeout_ / 2);
  std::atomic<int64_t> num_fetched{0};
  // Each block is asked of each peer once.
  for (size_t round = 0; round < peers_.size() && clock_.Now() < deadline; ++round) {
    const std::vector<int> chosen = Choose(keys, holds);
    if (*std::max_element(chosen.begin(), chosen.end()) < 0) break;  // nobody has what is missing
    std::vector<std::vector<size_t>> places(peers_.size());          // in `keys`
    bool has_others = false;
    for (size_t k = 0; k < keys.size(); ++k) {
      if (chosen[k] < 0) continue;
      places[chosen[k]].push_back(k);
      for (size_t i = 0; i < peers_.size(); ++i) {
        has_others = has_others || (holds[i][k] && static_cast<int>(i) != chosen[k]);
      }
    }
    const absl::Duration left = deadline - clock_.Now();
    const Order order{model, to, deadline - (has_others ? left / 2 : absl::ZeroDuration())};
    std::vector<std::vector<bool>> is_here(peers_.size());
    RunParallel(static_cast<int>(peers_.size()), [&](int i) {
      std::vector<BlockKey> wanted;
      for (const size_t k : places[i]) wanted.push_back(keys[k]);
      is_here[i] = FetchFrom(peers_[i], wanted, order);
      num_fetched += std::count(is_here[i].begin(), is_here[i].end(), true);
    });
    for (size_t i = 0; i < peers_.size(); ++i) {
      for (size_t n = 0; n < places[i].size(); ++n) {
        // What is here now is asked of nobody else.
        for (std::vector<bool>& held : holds) {
          held[places[i][n]] = held[places[i][n]] && !is_here[i][n];
        }
        holds[i][places[i][n]] = false;
      }
    }
  }
  return num_fetched;
}

std::vector<bool> PeerSet::FetchFrom(Peer& peer, absl::Span<const BlockKey> keys,
                                     const Order& order) {
  const Model wire_model{.spec = order.model.spec(),
                         .fingerprint = order.model.fingerprint(),
                         .layout = std::make_shared<const BlockLayout>(order.model.layout())};
  std::vector<bool> is_here(keys.size());
  // A few at a time: they are in memory twice until they are sealed.
  const size_t keys_per_call =
      std::max<size_t>(1, kFetchBytes / static_cast<size_t>(order.model.layout().block_bytes()));
  for (size_t begin = 0; begin < keys.size(); begin += keys_per_call) {
    const absl::Duration left = order.deadline - clock_.Now();
    if (left <= absl::ZeroDuration()) break;  // the rest misses
    const absl::Span<const BlockKey> some = keys.subspan(begin, keys_per_call);
    const absl::StatusOr<std::vector<EncodedBlock>> blocks =
        peer.client->GetEncoded(wire_model, some, left);
    if (!blocks.ok()) {
      ++counters_.peer_failures;
      break;
    }
    bool is_cut = false;
    for (size_t k = 0; k < some.size(); ++k) {
      const absl::Status& came = (*blocks)[k].status;
      is_cut = is_cut || absl::IsUnavailable(came) || absl::IsDeadlineExceeded(came);
      is_here[begin + k] = Take(some[k], (*blocks)[k], order);
    }
    if (is_cut) ++counters_.peer_failures;
  }
  return is_here;
}

bool PeerSet::Take(const BlockKey& key, const EncodedBlock& block, const Order& order) {
  if (absl::IsDataLoss(block.status)) ++counters_.peer_refused;
  if (!block.status.ok()) return false;
  const absl::Status kept = Keep(order.model, key, block, order.to);
  if (kept.ok()) ++counters_.peer_fetched;
  // Another call may have brought it meanwhile.
  if (kept.ok() || absl::IsAlreadyExists(kept)) return true;
  ++counters_.peer_refused;
  return false;
}

}  // namespace kvstow
