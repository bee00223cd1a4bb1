// TieredStore: the memory of a GPU above host memory. A block that is hit moves up, one that has to
// make room for it moves down, both in the background and one at a time: readers wait for neither.
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/log.h"
#include "kernels/core/status_macros.h"
#include "storage/tiered_store.h"
#include "storage/tiered_store_impl.h"

namespace kvstow {
namespace {

// A device that does not answer is left alone for so long: a call costs seconds until then.
constexpr absl::Duration kPause = absl::Seconds(30);

}  // namespace

absl::Status TieredStore::Impl::CheckHbm() const {
  if (clock->Now() >= absl::FromUnixNanos(hbm_paused_until)) return absl::OkStatus();
  return absl::UnavailableError("the GPU did not answer a moment ago");
}

void TieredStore::Impl::NoteHbm(const absl::Status& status) {
  if (!absl::IsUnavailable(status)) return;
  ++counters.hbm_errors;
  hbm_paused_until = absl::ToUnixNanos(clock->Now() + kPause);
  Log(Severity::kWarning, "hbm tier paused",
      {{"why", std::string(status.message())}, {"for", absl::FormatDuration(kPause)}});
}

absl::StatusOr<BlockRef> TieredStore::Impl::ReadHbm(const BlockKey& key, BlockId id) {
  KVSTOW_RETURN_IF_ERROR(CheckHbm());
  absl::StatusOr<BlockRef> read = hbm->Get(key);
  NoteHbm(read.status());
  if (!read.ok()) return read;
  counters.hbm_bytes_read += static_cast<int64_t>(read->bytes().size());
  const absl::Status status = CheckRecord(key, read->bytes());
  if (status.ok()) return read;
  DropBadCopy(key, id, TierKind::kHbm, status);
  return absl::NotFoundError(
      absl::StrCat("no block ", key.ToHex(), " that can be read from hbm: ", status.message()));
}

absl::StatusOr<BlockRef> TieredStore::Impl::FromMemory(const BlockKey& key, BlockId id) {
  // Every look but the first follows a move between the two.
  constexpr int kLooksMax = 4;
  for (int look = 0; look < kLooksMax; ++look) {
    BlockRef memory;
    bool is_in_hbm = false;
    index.Visit(key, [&](IndexedBlock& block) {
      if (block.id() != id) return;
      if (block.in(TierKind::kDram)) memory = PinnedInDram(key);
      is_in_hbm = block.in(TierKind::kHbm);
    });
    if (memory) return memory;
    if (!is_in_hbm) break;
    absl::StatusOr<BlockRef> read = ReadHbm(key, id);
    if (!absl::IsNotFound(read.status())) return read;
  }
  return absl::NotFoundError(absl::StrCat("block ", key.ToHex(), " has left memory"));
}

void TieredStore::Impl::OfferToHbm(IndexedBlock& block) {
  if (hbm == nullptr || block.in(TierKind::kHbm) || block.is_rising()) return;
  if (block.record_bytes() > hbm->capacity_bytes()) return;
  block.SetRising(rising.Push({block.key(), block.id(), block.record_bytes()}));
  queue.Wake();
}

bool TieredStore::Impl::RaiseOne() {
  MutexLock lock(&move_mutex);
  const std::optional<WriteBehindItem> item = rising.Pop();
  if (!item.has_value()) return false;
  const bool is_asked = CheckHbm().ok();
  BlockRef memory;
  index.Visit(item->key, [&](IndexedBlock& block) {
    if (block.id() != item->id) return;
    block.SetRising(false);
    if (!is_asked || !block.in(TierKind::kDram) || block.in(TierKind::kHbm)) return;
    memory = PinnedInDram(item->key);
  });
  if (memory) Raise(item->key, item->id, std::move(memory));
  rising.Done(*item);
  // For the next one. What leaves goes where this one came from.
  const int64_t capacity = hbm->capacity_bytes();
  const int64_t most = capacity - StoreOptions::UsualHeadroomBytes(capacity);
  while (hbm->used_bytes() > most && EvictFromHbm()) {
  }
  return true;
}

void TieredStore::Impl::Raise(const BlockKey& key, BlockId id, BlockRef memory) {
  absl::Status status = hbm->Put(key, memory.bytes());
  while (absl::IsResourceExhausted(status) && EvictFromHbm()) {
    status = hbm->Put(key, memory.bytes());
  }
  NoteHbm(status);
  if (!status.ok()) return;
  counters.hbm_bytes_written += static_cast<int64_t>(memory.bytes().size());
  memory = BlockRef();  // else its place in host memory would be in use
  bool is_placed = false;
  index.Visit(key, [&](IndexedBlock& block) {
    if (block.id() != id) return;
    block.Place(TierKind::kHbm);
    is_placed = true;
    // It lives in one of the two, unless a reader holds it or the disk waits for it.
    if (block.in(TierKind::kDram) && !block.is_queued()) TakeOut(TierKind::kDram, block);
  });
  // Deleted meanwhile. A new incarnation cannot be there: who raises it waits for us.
  if (!is_placed) hbm->Drop(key);
}

bool TieredStore::Impl::EvictFromHbm() {
  BlockKey victim;
  BlockId id = 0;
  bool evicted = Evict(TierKind::kHbm, [&](IndexedBlock& block) {
    if (block.in(TierKind::kDram)) return TakeOut(TierKind::kHbm, block);
    if (block.is_pinned()) return false;
    victim = block.key();
    id = block.id();
    return true;
  });
  if (evicted && id != 0) evicted = Lower(victim, id);
  if (evicted) ++counters.hbm_evictions;
  return evicted;
}

bool TieredStore::Impl::Lower(const BlockKey& key, BlockId id) {
  const absl::StatusOr<BlockRef> read = ReadHbm(key, id);
  std::optional<ArenaRegion> room;
  if (read.ok()) {
    absl::StatusOr<ArenaRegion> memory = MakeRoom(static_cast<int64_t>(read->bytes().size()));
    if (memory.ok()) {
      room.emplace(*std::move(memory));
      std::memcpy(room->bytes().data(), read->bytes().data(), read->bytes().size());
    }
  }
  bool is_out = true;  // deleted, or found bad
  index.Visit(key, [&](IndexedBlock& block) {
    if (block.id() != id || !block.in(TierKind::kHbm)) return;
    if (room.has_value()) {
      if (!block.in(TierKind::kDram)) {
        KVSTOW_CHECK(dram->Adopt(key, *std::move(room)).ok());
        block.Place(TierKind::kDram);
      }
    }
    // The last copy stays: what wants its place waits.
    const bool is_elsewhere = block.in(TierKind::kDram) || block.in(TierKind::kNvme);
    is_out = is_elsewhere && TakeOut(TierKind::kHbm, block);
  });
  return is_out;
}

}  // namespace kvstow
