#include "storage/tiered_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/log.h"
#include "kernels/core/status_macros.h"
#include "storage/policy/policy.h"
#include "storage/tiered_store_impl.h"

namespace kvstow {
namespace {

constexpr int64_t kDramBytesMin = int64_t{1} << 20;
constexpr int64_t kHbmBytesMin = int64_t{1} << 20;
// Of blocks that were hit and wait for their copy to hbm; what is hit again comes again.
constexpr int64_t kRisingBytesMax = int64_t{64} << 20;
constexpr absl::Duration kBackgroundPeriod = absl::Milliseconds(100);
// What a crash may cost of what the policy has learned.
constexpr absl::Duration kPolicySavePeriod = absl::Minutes(1);

absl::Status TooSmall(const char* field, int64_t found, int64_t least) {
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", found, ", want at least ", least));
}

TierStats StatsOf(const Tier& tier, const IndexShard::Totals& totals) {
  const size_t tier_idx = TierIdx(tier.kind());
  return {.kind = tier.kind(),
          .capacity_bytes = tier.capacity_bytes(),
          .used_bytes = tier.used_bytes(),
          .sealed_bytes = totals.bytes_in[tier_idx],
          .num_blocks = totals.blocks_in[tier_idx]};
}

}  // namespace

absl::Status StoreOptions::Validate() const {
  if (dram_bytes < kDramBytesMin) return TooSmall("dram_bytes", dram_bytes, kDramBytesMin);
  if (hbm_bytes != 0 && hbm_bytes < kHbmBytesMin) {
    return TooSmall("hbm_bytes", hbm_bytes, kHbmBytesMin);
  }
  if (!nvme_path.empty() && nvme_bytes < NvmeTier::kCapacityMin) {
    return TooSmall("nvme_bytes", nvme_bytes, NvmeTier::kCapacityMin);
  }
  if (leases_max < 1) return TooSmall("leases_max", leases_max, 1);
  if (tickets_max < 1) return TooSmall("tickets_max", tickets_max, 1);
  if (blocks_max < 1) return TooSmall("blocks_max", blocks_max, 1);
  if (write_behind_bytes_max < 1) {
    return TooSmall("write_behind_bytes_max", write_behind_bytes_max, 1);
  }
  if (dram_headroom_bytes < 0 || dram_headroom_bytes > dram_bytes / 2) {
    return absl::InvalidArgumentError(absl::StrCat("dram_headroom_bytes is ", dram_headroom_bytes,
                                                   ", want 0 to half of dram_bytes, ",
                                                   dram_bytes / 2));
  }
  if (disk_write_bytes_per_day < 0) {
    return TooSmall("disk_write_bytes_per_day", disk_write_bytes_per_day, 0);
  }
  constexpr absl::Duration kTtlMax = absl::Hours(24 * 365);
  if (block_ttl < absl::ZeroDuration() || block_ttl > kTtlMax) {
    return absl::InvalidArgumentError(absl::StrCat("block_ttl is ", absl::FormatDuration(block_ttl),
                                                   ", want 0 (none) to 8760h, a year"));
  }
  const absl::Duration longest = absl::Hours(24);
  const std::pair<const char*, absl::Duration> durations[] = {{"write_deadline", write_deadline},
                                                              {"lease_max", lease_max}};
  for (const auto& [field, duration] : durations) {
    if (duration <= absl::ZeroDuration() || duration > longest) {
      return absl::InvalidArgumentError(absl::StrCat(field, " is ", absl::FormatDuration(duration),
                                                     ", want more than 0 and at most 24h"));
    }
  }
  for (const auto& [field, duration] :
       {std::pair("reuse_delay", reuse_delay), std::pair("turn_gap", turn_gap)}) {
    if (duration < absl::ZeroDuration() || duration > longest) {
      return absl::InvalidArgumentError(
          absl::StrCat(field, " is ", absl::FormatDuration(duration), ", want 0 to 24h"));
    }
  }
  return absl::OkStatus();
}

int64_t StoreOptions::BytesPerBlock() const {
  // Index 100, a copy in memory 200, what all policies share 100.
  constexpr int64_t kAll = 400;
  // A tier's policy, and the disk's map. Ghosts cost what blocks do, and each tier has its own.
  constexpr int64_t kTier = 100;
  constexpr int64_t kTierWithGhosts = 400;
  bool has_ghosts = false;
  for (const policy::PolicyKind& kind : policy::AllPolicies()) {
    if (kind.name == policy) has_ghosts = kind.has_ghosts;
  }
  const int64_t num_tiers = 1 + (hbm_bytes > 0 ? 1 : 0) + (nvme_path.empty() ? 0 : 1);
  return kAll + num_tiers * (has_ghosts ? kTierWithGhosts : kTier);
}

// --- Impl: life ---

TieredStore::Impl::Impl(const StoreOptions& options, const Clock* clock, Parts parts)
    : options(options),
      clock(clock),
      hbm(std::move(parts.hbm)),
      dram(std::move(parts.dram)),
      retention(std::move(parts.retention)),
      index(options.blocks_max, retention.get()),
      tickets(options.tickets_max, options.reuse_delay),
      leases(options.leases_max),
      queue(options.write_behind_bytes_max),
      rising(kRisingBytesMax),
      write_budget(options.disk_write_bytes_per_day),
      last_disk_put(absl::InfinitePast()) {
  host.clock = clock;
  host.make_room = [this](int64_t bytes) { return MakeRoom(bytes); };
}

TieredStore::Impl::~Impl() {
  is_stopping = true;
  queue.Wake();
  if (background.joinable()) background.join();
  if (nvme == nullptr) return;
  while (WriteOne()) {
  }
  SavePolicy(/*is_end=*/true);
  const absl::Status status = FlushDisk();
  if (!status.ok()) {
    Log(Severity::kError, "last flush failed", {{"error", std::string(status.message())}});
  }
}

absl::Status TieredStore::Impl::OpenDisk() {
  int64_t num_refused = 0;
  std::vector<BlockKey> refused;
  // Once the directory is ours, and before its blocks are placed.
  std::optional<std::shared_ptr<const TurnUse>> recalled;
  const auto found = [&](const BlockInfo& block) {
    if (!recalled.has_value()) recalled = RestorePolicy();
    // Found again, in a younger segment: what the index has is old.
    index.Visit(block.key, [](IndexedBlock& old) { old.Remove(TierKind::kNvme); });
    const bool fits = block.record_bytes <= BlockIndex::kRecordBytesMax &&
                      block.num_tokens <= BlockIndex::kTokensMax;
    if (!fits || !index.Insert(block, [](IndexedBlock&) {}).ok()) refused.push_back(block.key);
  };
  KVSTOW_ASSIGN_OR_RETURN(
      nvme, NvmeTier::Open(
                {.path = options.nvme_path, .capacity_bytes = options.nvme_bytes, .clock = clock},
                found));
  if (!recalled.has_value()) recalled = RestorePolicy();
  for (const BlockKey& key : refused) {
    if (index.Lookup(key).in_nvme) continue;
    nvme->Drop(key);
    ++num_refused;
  }
  // The capacity may be smaller than it was.
  while (absl::IsResourceExhausted(nvme->MakeRoom(0)) && EvictFromNvme()) {
  }
  counters.corrupt_blocks += nvme->open_report().blocks_lost;
  Log(Severity::kInfo, "disk tier opened",
      {{"path", options.nvme_path},
       {"blocks", absl::StrCat(index.num_blocks())},
       {"blocks_lost", absl::StrCat(nvme->open_report().blocks_lost)},
       {"blocks_refused", absl::StrCat(num_refused)},
       {"dirs_set_aside", absl::StrCat(nvme->open_report().dirs_set_aside)}});
  return absl::OkStatus();
}

void TieredStore::Impl::StartBackground() {
  background = std::thread([this] {
    while (!is_stopping) {
      queue.WaitForWork(kBackgroundPeriod);
      if (!is_stopping) Maintain();
    }
  });
}

void TieredStore::Impl::Maintain() {
  Expire();
  for (const TierKind tier : {TierKind::kHbm, TierKind::kDram, TierKind::kNvme}) {
    retention->TakeBack(tier);
  }
  DropIdle();
  KeepHeadroom();
  MoveWaiting();
  if (nvme == nullptr) return;
  FlushWhenIdle();
  if (clock->Now() >= last_policy_save + kPolicySavePeriod) SavePolicy(/*is_end=*/false);
}

void TieredStore::Impl::MoveWaiting() {
  // What waits now. Blocks that are hit or sealed meanwhile may come faster than they are moved:
  // the next round, which begins at once, moves those, so that the rest of this one has its turn.
  int64_t steps = std::max(queue.num_items(), rising.num_items());
  for (; steps > 0 && !is_stopping; --steps) {
    // The disk first, and before each block that moves up: writers wait for it, nobody for hbm.
    if (nvme != nullptr) WriteOne();
    if (hbm != nullptr) RaiseOne();
    Expire();  // the clocks go on while a device is slow
  }
}

// --- TieredStore ---

absl::StatusOr<std::unique_ptr<TieredStore>> TieredStore::Open(
    const StoreOptions& options, const Clock* clock, std::shared_ptr<DeviceMemory> device) {
  KVSTOW_RETURN_IF_ERROR(options.Validate());
  std::unique_ptr<HbmTier> hbm;
  if (options.hbm_bytes > 0) {
    if (device == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("hbm_bytes is ", options.hbm_bytes, ", want 0 where there is no device"));
    }
    KVSTOW_ASSIGN_OR_RETURN(
        hbm, HbmTier::Create(std::move(device), {.capacity_bytes = options.hbm_bytes}));
  }
  KVSTOW_ASSIGN_OR_RETURN(std::unique_ptr<DramTier> dram, DramTier::Create(options.dram_bytes));
  const int64_t nvme_bytes = options.nvme_path.empty() ? 0 : options.nvme_bytes;
  KVSTOW_ASSIGN_OR_RETURN(
      std::unique_ptr<Retention> retention,
      Retention::Create(
          {.policy = options.policy,
           .alpha = options.policy_alpha,
           .turn_gap = options.turn_gap,
           .tier_bytes = {options.hbm_bytes, options.dram_bytes - options.dram_headroom_bytes,
                          nvme_bytes},
           .blocks_max = options.blocks_max},
          clock));
  auto impl = std::make_unique<Impl>(
      options, clock, Impl::Parts{std::move(hbm), std::move(dram), std::move(retention)});
  if (!options.nvme_path.empty()) KVSTOW_RETURN_IF_ERROR(impl->OpenDisk());
  if (options.background) impl->StartBackground();
  return std::unique_ptr<TieredStore>(new TieredStore(std::move(impl)));
}

TieredStore::TieredStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TieredStore::~TieredStore() = default;

void TieredStore::RunMaintenance() { impl_->Maintain(); }

StoreStats TieredStore::Stats() const {
  const Impl& impl = *impl_;
  const StoreCounters& counters = impl.counters;
  const IndexShard::Totals totals = impl.index.totals();
  StoreStats stats;
  if (impl.hbm != nullptr) stats.tiers.push_back(StatsOf(*impl.hbm, totals));
  stats.tiers.push_back(StatsOf(*impl.dram, totals));
  stats.tiers.back().reserved_bytes = impl.host.reserved_bytes;
  if (impl.nvme != nullptr) stats.tiers.push_back(StatsOf(*impl.nvme, totals));
  stats.codecs = totals.codecs;
  stats.num_blocks = totals.num_blocks;
  stats.index_bytes = totals.index_bytes;
  stats.open_tickets = impl.tickets.num_open();
  stats.open_leases = impl.leases.num_leases();
  stats.pinned_bytes = impl.dram->pinned_bytes() + totals.pinned_bytes;
  stats.write_behind_bytes = impl.queue.waiting_bytes();
  stats.lookups = counters.lookups;
  stats.lookup_hits = counters.lookup_hits;
  stats.hbm_hits = counters.hbm_hits;
  stats.dram_hits = counters.dram_hits;
  stats.nvme_hits = counters.nvme_hits;
  stats.misses = counters.misses;
  stats.seals = counters.seals;
  stats.aborts = counters.aborts;
  stats.tickets_expired = impl.host.tickets_expired;
  stats.leases_expired = counters.leases_expired;
  stats.hbm_evictions = counters.hbm_evictions;
  stats.hbm_bytes_written = counters.hbm_bytes_written;
  stats.hbm_bytes_read = counters.hbm_bytes_read;
  stats.hbm_errors = counters.hbm_errors;
  stats.dram_evictions = counters.dram_evictions;
  stats.nvme_evictions = counters.nvme_evictions;
  stats.demotions_dropped = counters.demotions_dropped;
  stats.corrupt_blocks = counters.corrupt_blocks;
  stats.raw_fallback_units = counters.raw_fallback_units;
  stats.nvme_bytes_written = counters.nvme_bytes_written;
  stats.nvme_bytes_read = counters.nvme_bytes_read;
  stats.nvme_write_errors = counters.nvme_write_errors;
  stats.nvme_writes_filtered = counters.nvme_writes_filtered;
  stats.nvme_writes_over_budget = counters.nvme_writes_over_budget;
  stats.blocks_idle_dropped = counters.blocks_idle_dropped;
  stats.policy_files_set_aside = counters.policy_files_set_aside;
  const Retention::Stats kept = impl.retention->stats();
  stats.turns = kept.turns;
  stats.follow_up_turns = kept.follow_ups;
  stats.sessions_over = kept.sessions_over;
  stats.policy_bytes = kept.memory_bytes;
  stats.hint_pinned_blocks = kept.pinned_blocks;
  if (impl.nvme != nullptr) stats.dirs_set_aside = impl.nvme->open_report().dirs_set_aside;
  return stats;
}

}  // namespace kvstow
