// TieredStore: finding, reading, pinning and checking.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/log.h"
#include "kernels/core/status_macros.h"
#include "storage/tiered_store.h"
#include "storage/tiered_store_impl.h"

namespace kvstow {
namespace {

absl::Status NoBlock(const BlockKey& key) {
  return absl::NotFoundError(absl::StrCat("no block ", key.ToHex()));
}

}  // namespace

absl::Status CheckRecord(const BlockKey& key, absl::Span<const std::byte> record) {
  KVSTOW_ASSIGN_OR_RETURN(const RecordView view, RecordView::Parse(record));
  if (view.meta().key != key) {
    return absl::DataLossError(absl::StrCat("record of block ", view.meta().key.ToHex(),
                                            " stands in the place of block ", key.ToHex()));
  }
  return view.VerifyUnits();
}

std::vector<Location> TieredStore::Lookup(absl::Span<const BlockKey> keys) const {
  std::vector<Location> locations;
  locations.reserve(keys.size());
  int64_t num_hits = 0;
  for (const BlockKey& key : keys) {
    locations.push_back(impl_->index.Lookup(key));
    if (locations.back().present()) ++num_hits;
  }
  impl_->counters.lookups += static_cast<int64_t>(keys.size());
  impl_->counters.lookup_hits += num_hits;
  return locations;
}

LoadEstimate TieredStore::Estimate(absl::Span<const BlockKey> keys,
                                   double prefill_tokens_per_s) const {
  std::vector<BlockInfo> blocks;
  for (const BlockKey& key : keys) {
    BlockInfo block;
    if (!impl_->index.Find(key, block)) break;
    blocks.push_back(block);
  }
  return EstimateLoad(impl_->rates, blocks, prefill_tokens_per_s);
}

void TieredStore::RecordSend(int64_t bytes, absl::Duration elapsed) {
  impl_->rates.RecordSend(bytes, elapsed);
}

// --- turns ---

std::shared_ptr<const TurnUse> TieredStore::Use(const TurnRequest& request) {
  // Before the turn: what the one before brought competes at its own time.
  impl_->KeepHeadroom();
  return impl_->retention->Use(request);
}

bool TieredStore::Tell(const TurnRequest& request) { return impl_->retention->Tell(request); }

// --- Get ---

absl::StatusOr<BlockRef> TieredStore::Get(const BlockKey& key) {
  const std::shared_ptr<const TurnUse> use = Use({.keys = {&key, 1}});
  return Read(key);
}

BlockRef TieredStore::Impl::PinnedInDram(const BlockKey& key) {
  absl::StatusOr<BlockRef> pinned = dram->Get(key);
  KVSTOW_CHECK(pinned.ok());
  return *std::move(pinned);
}

absl::StatusOr<BlockRef> TieredStore::Read(const BlockKey& key) {
  // How often a block is followed that moves while it is looked for.
  constexpr int kLooksMax = 4;
  Impl& impl = *impl_;
  for (int look = 0; look < kLooksMax; ++look) {
    BlockRef memory;
    Location where;
    BlockId id = 0;
    impl.index.Visit(key, [&](IndexedBlock& block) {
      id = block.id();
      where = {block.in(TierKind::kHbm), block.in(TierKind::kDram), block.in(TierKind::kNvme)};
      if (where.in_dram || where.in_hbm) impl.OfferWhenUsedAgain(block);
      if (!where.in_dram) return;
      impl.OfferToHbm(block);
      memory = impl.PinnedInDram(key);
    });
    if (memory) {
      ++impl.counters.dram_hits;
      return memory;
    }
    if (!where.present()) break;
    if (where.in_hbm) {
      absl::StatusOr<BlockRef> read = impl.ReadHbm(key, id);
      if (read.ok()) {
        ++impl.counters.hbm_hits;
        return read;
      }
      if (absl::IsNotFound(read.status())) continue;
      if (!where.in_nvme) break;
    }
    absl::StatusOr<BlockRef> from_disk = impl.GetFromDisk(key, id);
    ++(from_disk.ok() ? impl.counters.nvme_hits : impl.counters.misses);
    return from_disk;
  }
  ++impl.counters.misses;
  return NoBlock(key);
}

absl::StatusOr<BlockRef> TieredStore::Impl::GetFromDisk(const BlockKey& key, BlockId id) {
  const absl::Time start = clock->Now();
  absl::StatusOr<BlockRef> read = nvme->Get(key);
  absl::Status status = read.status();
  if (read.ok()) {
    counters.nvme_bytes_read += static_cast<int64_t>(read->bytes().size());
    status = CheckRecord(key, read->bytes());
    rates.RecordRead(TierKind::kNvme, static_cast<int64_t>(read->bytes().size()),
                     clock->Now() - start);
  }
  if (status.ok()) return Promote(key, id, *read);
  if (!absl::IsUnavailable(status)) DropBadCopy(key, id, TierKind::kNvme, status);
  return absl::NotFoundError(
      absl::StrCat("no block ", key.ToHex(), " that can be read: ", status.message()));
}

BlockRef TieredStore::Impl::Promote(const BlockKey& key, BlockId id, const BlockRef& from_disk) {
  absl::StatusOr<ArenaRegion> room = MakeRoom(static_cast<int64_t>(from_disk.bytes().size()));
  if (!room.ok()) return from_disk;
  std::memcpy(room->bytes().data(), from_disk.bytes().data(), from_disk.bytes().size());
  BlockRef promoted = from_disk;
  index.Visit(key, [&](IndexedBlock& block) {
    // Deleted, or sealed anew, while the disk was read: what was read may be returned, not kept.
    if (block.id() != id) return;
    if (!block.in(TierKind::kDram)) {
      KVSTOW_CHECK(dram->Adopt(key, *std::move(room)).ok());
      block.Place(TierKind::kDram);
    }
    promoted = PinnedInDram(key);
  });
  return promoted;
}

bool TieredStore::Impl::DropBadCopy(const BlockKey& key, BlockId id, TierKind tier,
                                    const absl::Status& why) {
  bool dropped = false;
  index.Visit(key, [&](IndexedBlock& block) {
    if (block.id() != id || !block.in(tier)) return;
    TierOf(tier).Drop(key);
    block.Remove(tier);
    dropped = true;
  });
  if (!dropped) return false;
  // A record of another version is not damaged, only of no use to this build.
  if (!absl::IsFailedPrecondition(why)) ++counters.corrupt_blocks;
  Log(Severity::kWarning, "bad block dropped",
      {{"key", key.ToHex()},
       {"tier", std::string(TierName(tier))},
       {"why", std::string(why.message())}});
  return true;
}

// --- leases ---

absl::StatusOr<AcquireResult> TieredStore::Acquire(absl::Span<const BlockKey> keys,
                                                   absl::Duration ttl) {
  Impl& impl = *impl_;
  if (ttl <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("lease of ", absl::FormatDuration(ttl), ", want more than 0"));
  }
  impl.Expire();
  KVSTOW_RETURN_IF_ERROR(impl.leases.CheckRoom(static_cast<int64_t>(keys.size())));
  AcquireResult result;
  result.deadline = impl.clock->Now() + std::min(ttl, impl.options.lease_max);
  result.held.assign(keys.size(), false);
  const std::shared_ptr<const TurnUse> use = Use({.keys = keys});
  std::vector<LeasePin> pins;
  for (size_t i = 0; i < keys.size(); ++i) {
    result.held[i] = impl.index.Visit(keys[i], [&](IndexedBlock& block) {
      LeasePin pin{.key = keys[i], .id = block.id()};
      if (block.in(TierKind::kDram)) {
        pin.memory = impl.PinnedInDram(keys[i]);
      } else {
        block.Pin();
      }
      pins.push_back(std::move(pin));
    });
  }
  if (pins.empty()) return result;
  absl::StatusOr<LeaseId> lease = impl.leases.Add(pins, result.deadline);
  if (!lease.ok()) {
    impl.Unpin(pins);
    return lease.status();
  }
  result.lease = *lease;
  return result;
}

absl::Status TieredStore::Release(LeaseId lease) {
  impl_->Expire();
  const std::optional<std::vector<LeasePin>> pins = impl_->leases.Remove(lease);
  if (!pins.has_value()) {
    return absl::NotFoundError(
        absl::StrCat("no lease ", lease, ": unknown, expired or released already"));
  }
  impl_->Unpin(*pins);
  return absl::OkStatus();
}

void TieredStore::Impl::Unpin(const std::vector<LeasePin>& pins) {
  for (const LeasePin& pin : pins) {
    if (pin.memory) continue;  // unpinned by its own end
    index.Visit(pin.key, [&](IndexedBlock& block) {
      if (block.id() == pin.id) block.Unpin();
    });
  }
}

// --- keeping ---

absl::Status TieredStore::Delete(const BlockKey& key) {
  Impl& impl = *impl_;
  const bool found = impl.index.Visit(key, [&](IndexedBlock& block) {
    for (const TierKind tier : {TierKind::kHbm, TierKind::kDram, TierKind::kNvme}) {
      if (!block.in(tier)) continue;
      impl.TierOf(tier).Drop(key);
      block.Remove(tier);
    }
  });
  return found ? absl::OkStatus() : NoBlock(key);
}

std::vector<BlockInfo> TieredStore::List(const BlockKey& after, int64_t limit) const {
  std::vector<BlockInfo> blocks = impl_->index.List(after, limit);
  for (BlockInfo& block : blocks) {
    if (block.location.in_dram && impl_->dram->IsPinned(block.key)) block.is_pinned = true;
  }
  return blocks;
}

absl::Status TieredStore::Verify(const BlockKey& key) {
  Impl& impl = *impl_;
  BlockRef memory;
  BlockId id = 0;
  Location where;
  impl.index.Visit(key, [&](IndexedBlock& block) {
    id = block.id();
    where = {block.in(TierKind::kHbm), block.in(TierKind::kDram), block.in(TierKind::kNvme)};
    if (where.in_dram) memory = impl.PinnedInDram(key);
  });
  if (id == 0) return NoBlock(key);
  absl::Status result;
  if (memory) {
    result = CheckRecord(key, memory.bytes());
    if (!result.ok()) impl.DropBadCopy(key, id, TierKind::kDram, result);
  }
  for (const TierKind tier : {TierKind::kHbm, TierKind::kNvme}) {
    const bool is_there = tier == TierKind::kHbm ? where.in_hbm : where.in_nvme;
    if (is_there) result.Update(impl.VerifyCopy(key, id, tier));
  }
  return result;
}

absl::Status TieredStore::Impl::VerifyCopy(const BlockKey& key, BlockId id, TierKind tier) {
  const absl::StatusOr<BlockRef> read = TierOf(tier).Get(key);
  const absl::Status status = read.ok() ? CheckRecord(key, read->bytes()) : read.status();
  if (read.ok()) {
    (tier == TierKind::kHbm ? counters.hbm_bytes_read : counters.nvme_bytes_read) +=
        static_cast<int64_t>(read->bytes().size());
  }
  if (status.ok() || absl::IsUnavailable(status)) return status;
  // Else it was moved, evicted or deleted while it was read.
  if (!DropBadCopy(key, id, tier, status)) return absl::OkStatus();
  // Said to be there and not found: lost.
  return absl::IsNotFound(status) ? absl::DataLossError(status.message()) : status;
}

}  // namespace kvstow
