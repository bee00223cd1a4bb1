// TieredStore: writing, and the room for it.
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status_macros.h"
#include "storage/random_id.h"
#include "storage/tiered_store.h"
#include "storage/tiered_store_impl.h"

namespace kvstow {
namespace {

absl::Status CheckRequest(const ReserveRequest& request) {
  const std::string block = absl::StrCat("block ", request.meta.key.ToHex());
  const size_t num_units = request.unit_bytes == nullptr ? 0 : request.unit_bytes->size();
  if (num_units == 0 || num_units > kMaxUnitsPerRecord) {
    return absl::InvalidArgumentError(
        absl::StrCat(block, ": ", num_units, " units, want 1 to ", kMaxUnitsPerRecord));
  }
  if (request.meta.num_tokens < 1 || request.meta.num_tokens > BlockIndex::kTokensMax) {
    return absl::InvalidArgumentError(absl::StrCat(block, ": num_tokens is ",
                                                   request.meta.num_tokens, ", want 1 to ",
                                                   BlockIndex::kTokensMax));
  }
  if (request.meta.logical_bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(block, ": logical_bytes is ", request.meta.logical_bytes));
  }
  return absl::OkStatus();
}

}  // namespace

// --- room ---

void TieredStore::Impl::Expire() {
  const absl::Time now = clock->Now();
  tickets.Sweep(now);
  while (true) {
    const std::optional<std::vector<LeasePin>> pins = leases.RemoveExpired(now);
    if (!pins.has_value()) break;
    if (pins->empty()) continue;
    Unpin(*pins);
    ++counters.leases_expired;
  }
}

bool TieredStore::Impl::Evict(TierKind tier, absl::FunctionRef<bool(IndexedBlock&)> take) {
  // How many blocks that wait for the disk are passed over before one of them is taken.
  constexpr int kPassedOverMax = 16;
  for (const bool takes_queued : {false, true}) {
    int num_passed_over = 0;
    while (const std::optional<BlockKey> key = retention->Choose(tier)) {
      bool is_taken = false;
      bool is_passed_over = false;
      index.Visit(*key, [&](IndexedBlock& block) {
        if (!block.in(tier)) return;  // has left in between
        is_passed_over = !takes_queued && block.is_queued() && num_passed_over < kPassedOverMax;
        if (!is_passed_over) is_taken = take(block);
      });
      if (is_taken) {
        if (num_passed_over > 0) retention->TakeBack(tier);
        return true;
      }
      if (is_passed_over) ++num_passed_over;
      retention->SetAside(tier, *key);
    }
    retention->TakeBack(tier);
  }
  return false;
}

Tier& TieredStore::Impl::TierOf(TierKind tier) {
  if (tier == TierKind::kHbm) return *hbm;
  if (tier == TierKind::kDram) return *dram;
  return *nvme;
}

bool TieredStore::Impl::TakeOut(TierKind tier, IndexedBlock& block) {
  if (tier == TierKind::kDram) {
    if (!dram->DropIfUnpinned(block.key())) return false;
  } else {
    if (block.is_pinned()) return false;
    TierOf(tier).Drop(block.key());
  }
  block.Remove(tier);
  return true;
}

bool TieredStore::Impl::EvictFromDram() {
  const bool evicted = Evict(TierKind::kDram, [this](IndexedBlock& block) {
    const bool is_only_copy =
        nvme != nullptr && !block.in(TierKind::kNvme) && !block.in(TierKind::kHbm);
    if (!TakeOut(TierKind::kDram, block)) return false;
    if (is_only_copy) ++counters.demotions_dropped;
    return true;
  });
  if (evicted) ++counters.dram_evictions;
  return evicted;
}

bool TieredStore::Impl::EvictFromNvme() {
  const bool evicted = Evict(
      TierKind::kNvme, [this](IndexedBlock& block) { return TakeOut(TierKind::kNvme, block); });
  if (evicted) ++counters.nvme_evictions;
  return evicted;
}

void TieredStore::Impl::DropIdle() {
  if (options.block_ttl <= absl::ZeroDuration()) return;
  // Other maintenance waits meanwhile: the rest goes the next time.
  constexpr int kDropsMax = 1024;
  for (const TierKind tier : {TierKind::kHbm, TierKind::kDram, TierKind::kNvme}) {
    for (int i = 0; i < kDropsMax; ++i) {
      const std::optional<BlockKey> key = retention->ChooseIdle(tier, options.block_ttl);
      if (!key.has_value()) break;
      bool is_out = false;
      index.Visit(*key,
                  [&](IndexedBlock& block) { is_out = block.in(tier) && TakeOut(tier, block); });
      if (is_out) {
        ++counters.blocks_idle_dropped;
      } else {
        retention->SetAside(tier, *key);  // a reader holds it
      }
    }
  }
}

void TieredStore::Impl::KeepHeadroom() {
  if (options.dram_headroom_bytes == 0) return;
  const int64_t most = dram->capacity_bytes() - options.dram_headroom_bytes;
  while (dram->used_bytes() > most && EvictFromDram()) {
  }
}

absl::StatusOr<ArenaRegion> TieredStore::Impl::MakeRoom(int64_t bytes) {
  absl::StatusOr<ArenaRegion> region = dram->Allocate(bytes);
  if (region.ok() || absl::IsInvalidArgument(region.status())) return region;
  Expire();
  while (true) {
    region = dram->Allocate(bytes);
    if (region.ok()) return region;
    const int64_t pinned = dram->pinned_bytes();
    const int64_t reserved = host.reserved_bytes;
    // Where even an empty memory would not do, nobody has to leave.
    const bool is_possible = dram->capacity_bytes() - pinned - reserved >= bytes;
    if (!is_possible || !EvictFromDram()) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "memory: ", bytes, " bytes wanted, ", dram->capacity_bytes() - dram->used_bytes(), " of ",
          dram->capacity_bytes(), " free, ", pinned, " pinned by readers, ", reserved,
          " reserved by writers: retry when they have ended"));
    }
  }
}

absl::Status TieredStore::Impl::ShrinkIndex(int64_t blocks) {
  const auto drop = [this](IndexedBlock& block) {
    if (block.is_pinned()) return false;
    if (block.in(TierKind::kDram)) {
      if (!dram->DropIfUnpinned(block.key())) return false;
      block.Remove(TierKind::kDram);
      ++counters.dram_evictions;
    }
    if (block.in(TierKind::kHbm)) {
      hbm->Drop(block.key());
      block.Remove(TierKind::kHbm);
      ++counters.hbm_evictions;
    }
    if (block.in(TierKind::kNvme)) {
      nvme->Drop(block.key());
      block.Remove(TierKind::kNvme);
      ++counters.nvme_evictions;
    }
    return true;
  };
  while (index.num_blocks() > std::max<int64_t>(blocks, 0)) {
    if (Evict(TierKind::kNvme, drop)) continue;
    if (Evict(TierKind::kDram, drop)) continue;
    if (Evict(TierKind::kHbm, drop)) continue;
    return absl::ResourceExhaustedError(absl::StrCat(
        "index: ", index.num_blocks(), " blocks are held and pinned, the limit is ",
        options.blocks_max, " together with open tickets: retry when readers have ended"));
  }
  return absl::OkStatus();
}

// --- tickets ---

absl::StatusOr<TicketId> TieredStore::Reserve(const ReserveRequest& request) {
  Impl& impl = *impl_;
  KVSTOW_RETURN_IF_ERROR(CheckRequest(request));
  const BlockKey& key = request.meta.key;
  const absl::Duration wanted = request.write_deadline;
  const absl::Duration longest = impl.options.write_deadline;
  const absl::Duration deadline =
      wanted <= absl::ZeroDuration() ? longest : std::min(wanted, longest);
  const auto ticket = std::make_shared<Ticket>(RandomId(), request.meta, request.unit_bytes,
                                               impl.clock->Now() + deadline, &impl.host);
  if (ticket->planned_bytes() >
      std::min(impl.dram->capacity_bytes(), BlockIndex::kRecordBytesMax)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "block ", key.ToHex(), " needs ", ticket->planned_bytes(), " bytes, memory holds ",
        std::min(impl.dram->capacity_bytes(), BlockIndex::kRecordBytesMax)));
  }
  absl::Status status = impl.tickets.Add(ticket);
  if (request.is_shared && absl::IsAlreadyExists(status)) {
    const std::shared_ptr<Ticket> writer = impl.tickets.WriterOf(key);
    if (writer != nullptr) return impl.Join(*writer, request.meta);
    status = impl.tickets.Add(ticket);  // it has ended in between
  }
  if (absl::IsResourceExhausted(status)) {
    impl.Expire();
    status = impl.tickets.Add(ticket);
  }
  KVSTOW_RETURN_IF_ERROR(status);
  // Only now: a seal of the same key shows in the index before its ticket leaves the table.
  if (impl.index.Lookup(key).present()) {
    impl.tickets.Forget(*ticket);
    return absl::AlreadyExistsError(absl::StrCat("block ", key.ToHex(), " is sealed already"));
  }
  ticket->Keep(request.use != nullptr ? request.use : Use({.keys = {&key, 1}}));
  status = impl.ShrinkIndex(impl.options.blocks_max - impl.tickets.num_open());
  if (status.ok()) {
    absl::StatusOr<ArenaRegion> memory = impl.MakeRoom(ticket->planned_bytes());
    if (memory.ok()) {
      ticket->GiveMemory(*std::move(memory));
      return ticket->id();
    }
    status = memory.status();
  }
  ticket->GiveUp();
  impl.tickets.Forget(*ticket);
  return status;
}

absl::StatusOr<TicketId> TieredStore::Impl::Join(Ticket& writer, const RecordMeta& meta) {
  // Between a ticket and its memory lies what eviction takes: far less.
  constexpr absl::Duration kPatience = absl::Milliseconds(100);
  if (writer.meta().codecs != meta.codecs || writer.meta().fingerprint != meta.fingerprint) {
    return absl::FailedPreconditionError(absl::StrCat(
        "block ", meta.key.ToHex(), " is being written with the codecs ",
        CodecPairName(writer.meta().codecs), ", this writer has ", CodecPairName(meta.codecs)));
  }
  // Units that were encoded with one would be decoded with the other.
  if (writer.meta().calibration_id != meta.calibration_id) {
    return absl::FailedPreconditionError(absl::StrCat(
        "block ", meta.key.ToHex(), " is being written with the calibration ",
        writer.meta().calibration_id.ToHex(), ", this writer has ", meta.calibration_id.ToHex()));
  }
  KVSTOW_RETURN_IF_ERROR(writer.AwaitMemory(kPatience));
  return writer.id();
}

absl::StatusOr<UnitWriter> TieredStore::BeginUnit(TicketId ticket, uint32_t unit_idx,
                                                  uint64_t source_xxh3) {
  KVSTOW_ASSIGN_OR_RETURN(std::shared_ptr<Ticket> found, impl_->tickets.Find(ticket));
  KVSTOW_RETURN_IF_ERROR(found->BeginUnit(unit_idx, source_xxh3));
  return UnitWriter(std::move(found), unit_idx, source_xxh3);
}

absl::StatusOr<RecordMeta> TieredStore::TicketMeta(TicketId ticket) const {
  KVSTOW_ASSIGN_OR_RETURN(const std::shared_ptr<Ticket> found, impl_->tickets.Find(ticket));
  return found->meta();
}

absl::Status TieredStore::Abort(TicketId ticket) {
  KVSTOW_ASSIGN_OR_RETURN(const std::shared_ptr<Ticket> found, impl_->tickets.Find(ticket));
  KVSTOW_RETURN_IF_ERROR(found->Abort());
  impl_->tickets.End(*found, TicketState::kAborted);
  ++impl_->counters.aborts;
  return absl::OkStatus();
}

absl::Status TieredStore::Seal(TicketId ticket) {
  Impl& impl = *impl_;
  KVSTOW_ASSIGN_OR_RETURN(const std::shared_ptr<Ticket> found, impl.tickets.Find(ticket));
  KVSTOW_RETURN_IF_ERROR(found->StartSeal());
  std::optional<ArenaRegion> assembled;
  if (!found->is_in_place()) {
    const int64_t sealed_bytes = found->SealedBytes();
    absl::Status status;
    if (sealed_bytes > BlockIndex::kRecordBytesMax) {
      status = absl::InvalidArgumentError(absl::StrCat("ticket ", ticket, ": record of ",
                                                       sealed_bytes, " bytes, the limit is ",
                                                       BlockIndex::kRecordBytesMax));
    } else {
      absl::StatusOr<ArenaRegion> memory = impl.MakeRoom(sealed_bytes);
      if (memory.ok()) assembled.emplace(*std::move(memory));
      status = memory.status();
    }
    if (!status.ok()) {
      found->CancelSeal();
      return status;
    }
  }
  found->WriteRecord(assembled.has_value() ? assembled->bytes() : found->memory());
  const absl::Status status = impl.Publish(*found, assembled);
  if (!status.ok()) {
    found->CancelSeal();
    return status;
  }
  // In this order: whoever finds the key free in the table finds the block in the index.
  impl.tickets.End(*found, TicketState::kSealed);
  ++impl.counters.seals;
  return absl::OkStatus();
}

absl::Status TieredStore::Impl::Publish(Ticket& ticket, std::optional<ArenaRegion>& assembled) {
  const RecordMeta& meta = ticket.meta();
  const BlockInfo block{.key = meta.key,
                        .fingerprint = meta.fingerprint,
                        .codecs = meta.codecs,
                        .location = {.in_dram = true},
                        .num_tokens = meta.num_tokens,
                        .record_bytes = ticket.SealedBytes(),
                        .logical_bytes = meta.logical_bytes};
  absl::Status status;
  do {
    KVSTOW_RETURN_IF_ERROR(ShrinkIndex(options.blocks_max - 1));
    // Full again where another block came in between: once more.
    status = index.Insert(block, [&](IndexedBlock& inserted) {
      counters.raw_fallback_units += ticket.CountRawFallbacks();
      std::optional<ArenaRegion> planned = ticket.FinishSeal();
      // Tier and index change together: a key that the index did not know is not in the tier.
      KVSTOW_CHECK(
          dram->Adopt(meta.key, *std::move(assembled.has_value() ? assembled : planned)).ok());
      if (nvme != nullptr) OfferToDisk(inserted);
    });
  } while (absl::IsResourceExhausted(status));
  return status;
}

}  // namespace kvstow
