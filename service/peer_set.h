// PeerSet: the other services whose blocks this one may fetch: a list that does not change. What is
// missing here is asked of all of them at once and fetched from one that has it, which of several
// by rendezvous hashing, so that the load of a hot block spreads the same way from everywhere.
//
//   const std::vector<bool> elsewhere = peers.Lookup(missing_keys);
//   const int64_t num_fetched = peers.Fill(*model, missing_keys, store);
//
// Fetched blocks are checked as any client checks them (key, model, XXH3 of every unit) and sealed
// here, still encoded. What one peer does not bring another is asked for, if it has it too. Peers
// that are gone, slow or wrong cost at most `timeout` in all, and after a few such calls nothing:
// their breakers open. Peers are asked for what they have themselves only.
//
// Thread safety: all methods may be called at once. They wait for the network: not for RPC threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/kv_client.h"
#include "kernels/core/clock.h"
#include "service/calibration_store.h"
#include "service/model_registry.h"
#include "storage/tiered_store.h"

namespace kvstow {

inline constexpr size_t kMaxPeers = 16;

struct PeerOptions {
  std::vector<std::string> targets;  // "unix:PATH" or "HOST:PORT"
  absl::Duration timeout = absl::Seconds(2);

  // kInvalidArgument: a bad target, or more than kMaxPeers.
  absl::Status Validate() const;
};

struct PeerCounters {
  std::atomic<int64_t> peer_hits{0};     // keys that were missing here and found at a peer
  std::atomic<int64_t> peer_fetched{0};  // blocks sealed here
  std::atomic<int64_t> peer_refused{0};  // blocks that came and were not taken: damaged, or no room
  std::atomic<int64_t> peer_failures{0};  // calls without an answer, or not to its end
};

class PeerSet {
 public:
  // As PeerOptions::Validate.
  static absl::StatusOr<std::unique_ptr<PeerSet>> Create(const PeerOptions& options);

  bool empty() const { return peers_.empty(); }
  // Per key: does a peer hold it? Peers that do not answer in time hold nothing.
  std::vector<bool> Lookup(absl::Span<const BlockKey> keys);
  // The model of that name, of whoever knows it; checked. Nothing: nobody does.
  std::optional<ModelSpec> FindModel(const Digest& fingerprint);
  // Where blocks, and the calibrations that they need, are brought to.
  struct Destination {
    TieredStore& store;
    CalibrationStore& calibrations;
    const ModelRegistry& models;
  };
  // Brings what peers hold of `keys`, within `timeout`. Returns how many blocks.
  int64_t Fill(const RegisteredModel& model, absl::Span<const BlockKey> keys,
               const Destination& to);

  const PeerCounters& counters() const { return counters_; }

 private:
  struct Peer {
    std::string target;
    std::unique_ptr<KvClient> client;
  };
  // What is the same for all that one Fill brings.
  struct Order {
    const RegisteredModel& model;
    const Destination& to;
    absl::Time deadline;
  };

  explicit PeerSet(absl::Duration timeout) : timeout_(timeout) {}

  // [peer][key]
  std::vector<std::vector<bool>> Ask(absl::Span<const BlockKey> keys, absl::Duration timeout);
  // For each key the peer to fetch from, or -1.
  std::vector<int> Choose(absl::Span<const BlockKey> keys,
                          const std::vector<std::vector<bool>>& holds) const;
  // Which of the keys are here afterwards.
  std::vector<bool> FetchFrom(Peer& peer, absl::Span<const BlockKey> keys, const Order& order);
  // Seals a block that came. False: it is not here.
  bool Take(const BlockKey& key, const EncodedBlock& block, const Order& order);

  const absl::Duration timeout_;
  const RealClock clock_;
  std::vector<Peer> peers_;
  PeerCounters counters_;
};

}  // namespace kvstow
