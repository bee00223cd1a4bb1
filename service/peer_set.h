// PeerSet: the other services whose blocks this one may fetch: a list that does not change. What is
// missing here is asked of all of them at once and fetched from one that has it, which of several
// by rendezvous hashing, so that the load of a hot block spreads the same way from everywhere.
//
//   const std::vector<bool> elsewhere = peers.Lookup(missing_keys);
//   const int64_t num_fetched = peers.Fill(*model, missing_keys, store);
//
// Fetched blocks are checked as any client checks them (key, model, XXH3 of every unit) and sealed
// here, still encoded. A peer that is gone, slow or wrong costs at most `timeout` a call, and after
// a few such calls nothing: its breaker opens. Peers are asked for what they have themselves only.
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
  std::atomic<int64_t> peer_failures{0};  // calls without an answer
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
  // Brings what peers hold of `keys`. Returns how many blocks.
  int64_t Fill(const RegisteredModel& model, absl::Span<const BlockKey> keys,
               const Destination& to);

  const PeerCounters& counters() const { return counters_; }

 private:
  struct Peer {
    std::string target;
    std::unique_ptr<KvClient> client;
  };
  PeerSet() = default;

  // [peer][key]
  std::vector<std::vector<bool>> Ask(absl::Span<const BlockKey> keys);
  // For each key the peer to fetch from, or -1.
  std::vector<int> Choose(absl::Span<const BlockKey> keys,
                          const std::vector<std::vector<bool>>& holds) const;
  int64_t FetchFrom(Peer& peer, const RegisteredModel& model, absl::Span<const BlockKey> keys,
                    const Destination& to);

  std::vector<Peer> peers_;
  PeerCounters counters_;
};

}  // namespace kvstow
