// AdminClient: looks into a running service: what it holds, whether it is sound. For tools; an
// inference engine needs KvClient only.
//
//   KVSTOW_ASSIGN_OR_RETURN(auto admin, AdminClient::Create({.target = "unix:/run/kvstow.sock"}));
//   KVSTOW_ASSIGN_OR_RETURN(ServiceStat stat, admin->Stat());
//   KVSTOW_ASSIGN_OR_RETURN(BlockPage page, admin->ListBlocks({}));
//   while (!page.next_page_token.empty()) { ... ListBlocks({.page_token = page.next_page_token})
//   ... }
//
// Every call ends by its deadline (KvClientOptions::control_timeout unless it says otherwise).
// There is no breaker: a tool wants to hear the error.
//
// Thread safety: all methods may be called at once.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/kv_client.h"
#include "kernels/core/block_key.h"
#include "kernels/core/model_spec.h"

namespace kvstow {

// As StatResponse of control.proto.
struct ServiceTier {
  std::string tier;  // "hbm", "dram", "nvme"
  uint64_t capacity_bytes = 0;
  uint64_t used_bytes = 0;    // sealed, reserved and waiting for reuse
  uint64_t sealed_bytes = 0;  // sum of the record sizes
  uint64_t reserved_bytes = 0;
  uint64_t num_blocks = 0;
};
struct ServiceCodec {
  std::string codec;
  uint64_t num_blocks = 0;
  uint64_t record_bytes = 0;
  uint64_t logical_bytes = 0;
};
// As PathInfo of channels.proto.
struct ServicePath {
  std::string path;         // "shm", "ucx"
  std::string address;      // for workers
  std::string unavailable;  // why it is not there; empty: it is
};
// As ModelPlan of model.proto.
struct ServicePlan {
  std::string codecs;  // "layer0.k=raw"; empty: all layers as asked for
  Digest id;
  bool is_derived = false;
  std::vector<std::string> reasons;
};
struct ServiceModel {
  Digest fingerprint;
  std::string name;
  std::optional<ServicePlan> plan;  // none yet
};
struct ServiceStat {
  std::vector<ServiceTier> tiers;
  std::vector<ServiceCodec> codecs;
  uint64_t num_blocks = 0;  // distinct keys
  uint64_t index_bytes = 0;
  uint64_t open_tickets = 0;
  uint64_t open_leases = 0;
  uint64_t pinned_bytes = 0;
  std::map<std::string, uint64_t> counters;
  std::string version;
  absl::Duration uptime;
  uint64_t resident_bytes = 0;  // of the daemon
  std::string policy;           // "rtv"; empty from a service that does not tell
  uint64_t policy_bytes = 0;
  uint64_t write_behind_bytes = 0;
  std::vector<ServiceModel> models;  // by fingerprint
};

// Bits of a location, as LocationBit of control.proto.
inline constexpr uint32_t kLocationDram = 1;
inline constexpr uint32_t kLocationNvme = 2;
inline constexpr uint32_t kLocationPeer = 4;
inline constexpr uint32_t kLocationHbm = 8;

// As BlockInfo of control.proto.
struct ListedBlock {
  BlockKey key;
  Digest fingerprint;
  std::string codec;
  uint32_t locations = 0;
  uint32_t num_tokens = 0;
  uint64_t record_bytes = 0;   // as stored
  uint64_t logical_bytes = 0;  // of the row form
  bool is_pinned = false;
};
struct BlockPage {
  std::vector<ListedBlock> blocks;  // ascending by key
  std::string next_page_token;      // empty: this was the last page
};
struct ListOptions {
  std::string page_token;  // from the last page; empty for the first
  int32_t page_size = 0;   // 1 to 10,000; 0: the service's default, 1,000
  Digest fingerprint;      // only this model's; zero for all
};

// As CalibrationInfo of calibrations.proto.
struct ListedCalibration {
  Digest id;
  Digest fingerprint;  // of its model
  Digest source;       // SHA-256 of the samples
  uint32_t num_rotations = 0;
  uint64_t bundle_bytes = 0;
};

// Called for each message of a Verify: `bad_keys` are those found since the last call.
using VerifyProgressFn = std::function<void(uint64_t num_checked, uint64_t num_total,
                                            absl::Span<const BlockKey> bad_keys)>;
struct VerifySummary {
  uint64_t num_checked = 0;
  std::vector<BlockKey> bad_keys;  // dropped by the service
};

struct Lease {
  uint64_t id = 0;         // 0: nothing was present
  std::vector<bool> held;  // per key
  absl::Duration ttl;
};

class AdminClient {
 public:
  // Connects lazily. kInvalidArgument for bad options.
  static absl::StatusOr<std::unique_ptr<AdminClient>> Create(const KvClientOptions& options);
  ~AdminClient();

  // Asks the standard health service; returns how long the answer took. kUnavailable: no one
  // answers, or the service says it is not serving; kDeadlineExceeded after `timeout`.
  absl::StatusOr<absl::Duration> Ping(absl::Duration timeout);

  absl::StatusOr<ServiceStat> Stat();
  absl::StatusOr<BlockPage> ListBlocks(const ListOptions& options);
  absl::StatusOr<std::vector<ModelSpec>> ListModels();
  // Which layers of a model are stored with another codec than writers ask for, from now on; as
  // CodecPlan::Parse reads it. Empty: none. kInvalidArgument names the item.
  absl::StatusOr<ServicePlan> SetPlan(const Digest& fingerprint, const std::string& plan);
  // Forgets the model's plan: the service derives one from what it is sent next.
  absl::Status DerivePlan(const Digest& fingerprint);
  // Paths past gRPC, best first.
  absl::StatusOr<std::vector<ServicePath>> ListPaths();

  // Calibrations: upload (its model must be registered), all or those of one model, the bytes of
  // one, forget one (its blocks become misses).
  absl::StatusOr<ListedCalibration> PutCalibration(std::string_view bundle);
  absl::StatusOr<std::vector<ListedCalibration>> ListCalibrations(const Digest& fingerprint);
  absl::StatusOr<std::string> GetCalibration(const Digest& id);
  absl::Status DeleteCalibration(const Digest& id);

  // Has the service read and check records: those of `keys`, or all when empty. `progress` may be
  // empty; it runs on the calling thread. kDeadlineExceeded when the service reports nothing for
  // KvClientOptions::data_timeout; there is no other limit on how long a full check may take.
  absl::StatusOr<VerifySummary> Verify(absl::Span<const BlockKey> keys,
                                       const VerifyProgressFn& progress);

  // Pins what is present of `keys` until Release or `ttl`.
  absl::StatusOr<Lease> Acquire(absl::Span<const BlockKey> keys, absl::Duration ttl);
  // kNotFound: unknown, expired or released before.
  absl::Status Release(uint64_t lease_id);

 private:
  struct State;
  explicit AdminClient(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace kvstow
