// Relay: a wire between clients and a service on one machine that its owner controls: held to a
// rate, passing a few bytes at a time, damaged or cut. Bytes pass in order and are otherwise left
// alone.
//
//   KVSTOW_ASSIGN_OR_RETURN(auto relay, Relay::Listen("/tmp/wire.sock"));
//   relay->SetTarget("/tmp/kvstow.sock");
//   relay->SetRule({.bytes_per_s = 5e8});
//   std::thread thread([&] { relay->Run(); });  // until relay->Stop()
//
// Thread safety: Run on one thread, all else from any.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/core/clock.h"
#include "kernels/core/mutex.h"
#include "transport/owned_fd.h"

namespace kvstow {

enum class WireDirection { kToService = 0, kToClient = 1 };

// What the wire does, in each direction.
struct WireRule {
  double bytes_per_s = 0;    // all connections together; 0: as fast as it goes
  int64_t piece_bytes = 0;   // passed on at once, at most; 0: as they come
  int64_t damage_every = 0;  // bytes of `direction` after which one bit is changed; 0: never
  int64_t cut_after = 0;     // bytes of `direction` after which the connection breaks; 0: never
  WireDirection direction = WireDirection::kToClient;
};

class Relay {
 public:
  // A unix socket at `path`, which must not be there. Clients that come before SetTarget wait.
  static absl::StatusOr<std::unique_ptr<Relay>> Listen(const std::string& path);
  ~Relay();

  void SetTarget(const std::string& socket_path);
  void SetRule(const WireRule& rule);
  // The connections that there are pass nothing any more, and stay open; new ones do.
  void Freeze();
  int64_t num_damaged() const;  // bits changed so far

  void Run();
  void Stop();

 private:
  // One direction of one connection: what was read and not passed on yet.
  struct Flow {
    int from = -1;
    int to = -1;
    std::vector<std::byte> buffer;
    size_t begin = 0;
    size_t end = 0;
    int64_t passed_bytes = 0;
    bool has_ended = false;  // the sender has, and all is passed on
    bool is_empty() const { return begin == end; }
  };
  struct Connection {
    OwnedFd client;
    OwnedFd service;
    std::array<Flow, 2> flows;  // by WireDirection
    bool is_broken = false;
    bool is_frozen = false;
  };
  // Bytes that may pass now, at a rate.
  struct Bucket {
    double bytes = 0;
    absl::Time filled;
  };

  Relay(OwnedFd listener, OwnedFd wake) : listener_(std::move(listener)), wake_(std::move(wake)) {}
  void Accept(const std::string& target);
  void Wait(const WireRule& rule, bool has_target);
  void Fill(const WireRule& rule);
  void Pump(const WireRule& rule, WireDirection direction, Connection& connection);
  bool Read(const WireRule& rule, WireDirection direction, Connection& connection);
  void Write(const WireRule& rule, WireDirection direction, Connection& connection);

  const OwnedFd listener_;
  const OwnedFd wake_;
  const RealClock clock_;
  // Of the thread that runs.
  std::list<Connection> connections_;
  std::array<Bucket, 2> buckets_;
  std::array<int64_t, 2> until_damage_ = {};

  mutable Mutex mutex_;
  std::string target_ ABSL_GUARDED_BY(mutex_);
  WireRule rule_ ABSL_GUARDED_BY(mutex_);
  int64_t num_damaged_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_freezing_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvstow
