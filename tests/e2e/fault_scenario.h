// FaultScenario: a daemon, a worker that puts and gets over one path, a wire between them, and one
// fault while they are at work.
//
//   FaultScenario scenario(PathKind::kShm, /*seed=*/7);
//   for (const std::string& failure : scenario.Run("stop-daemon")) ...
//
// What must hold, whatever the fault: never a wrong byte, every call ends within its deadline and a
// second (the worker watches both), work goes on afterwards, and no memory is held for longer than
// two deadlines.
//
// Thread safety: one thread, from construction to destruction: its children die with it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "client/cli/relay.h"
#include "tests/e2e/daemon.h"
#include "tests/e2e/kv_data.h"
#include "tests/testing/rng.h"

namespace kvstow::testing {

class FaultScenario {
 public:
  // What Run takes.
  static std::vector<std::string_view> FaultNames();

  static constexpr absl::Duration kDeadline = absl::Seconds(1);  // of the worker's calls

  FaultScenario(PathKind path, uint64_t seed);
  ~FaultScenario();

  // What did not hold; empty when all did. Once. `fault` is one of FaultNames().
  std::vector<std::string> Run(std::string_view fault);

 private:
  struct Fault {
    std::string_view name;
    void (FaultScenario::*run)();
  };
  static const std::vector<Fault>& Faults();

  void KillDaemon();
  void StopDaemon();
  void KillWorker();
  void StopWorker();
  void DamageFrames();
  void DamageStore();
  void DamageWire();
  void Trickle();
  void SlowReader();
  void LeaseExpires();

  void StartWorker(int damage_every = 0);
  void EndWorker();
  void Expect(bool holds, const std::string& claim);
  bool Soon(const std::function<bool()>& holds);
  // Lines of the worker that begin so.
  int Count(std::string_view beginning) const;
  // The worker completes `rounds` more round trips.
  void ExpectProgress(int rounds = 3);
  // At least one call of each of its threads fails from now on.
  void ExpectErrors();
  // Nothing is held, after two deadlines at most. `windows_too`: no worker is there either.
  void ExpectNothingHeld(bool windows_too);
  std::string WhatIsHeld(bool windows_too);
  // A client of the scenario's own, and its blocks.
  std::unique_ptr<KvClient> NewClient(const std::string& target = "") const;
  void PutRaw(KvClient& client, const KvData& kv, bool durable);
  // Blocks that came back. Wrong bytes are a failure.
  int CountHits(KvClient& client, const KvData& kv);
  void DamageMemory(KvClient& client);
  void DamageDisk(KvClient& client);

  const PathKind path_;
  const uint64_t seed_;
  Rng rng_;
  const TempFolder folder_;
  Daemon daemon_;
  Model model_;
  std::unique_ptr<Relay> relay_;
  std::thread wire_;
  uint64_t num_workers_ = 0;
  std::unique_ptr<ChildProcess> worker_;
  std::vector<std::string> failures_;
};

}  // namespace kvstow::testing
