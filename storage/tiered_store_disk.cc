// TieredStore: the way to the disk.
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/log.h"
#include "kernels/core/status_macros.h"
#include "storage/policy_state.h"
#include "storage/tiered_store.h"
#include "storage/tiered_store_impl.h"

namespace kvstow {
namespace {

// What nobody asked to persist is flushed when the disk tier has been quiet for this long.
constexpr absl::Duration kIdleFlush = absl::Seconds(5);
constexpr absl::Duration kPersistPoll = absl::Milliseconds(20);

}  // namespace

bool TieredStore::Impl::Enqueue(IndexedBlock& block) {
  const bool pushed = queue.Push({block.key(), block.id(), block.record_bytes()});
  block.SetQueued(pushed);
  return pushed;
}

void TieredStore::Impl::OfferToDisk(IndexedBlock& block) {
  if (options.disk_admission == DiskAdmission::kSecondSight &&
      !retention->IsUsedAgain(block.key())) {
    ++counters.nvme_writes_filtered;
  } else if (!write_budget.Take(block.record_bytes(), clock->Now())) {
    ++counters.nvme_writes_over_budget;
  } else {
    Enqueue(block);
  }
}

absl::Status TieredStore::Impl::PutOnDisk(const BlockKey& key, absl::Span<const std::byte> record) {
  while (true) {
    absl::Status status = nvme->Put(key, record);
    if (absl::IsResourceExhausted(status) && EvictFromNvme()) continue;
    return status;
  }
}

void TieredStore::Impl::OfferWhenUsedAgain(IndexedBlock& block) {
  if (nvme == nullptr || options.disk_admission != DiskAdmission::kSecondSight) return;
  if (block.in(TierKind::kNvme) || block.is_queued()) return;
  if (retention->IsUsedAgain(block.key())) OfferToDisk(block);
}

bool TieredStore::Impl::WriteOne() {
  MutexLock lock(&move_mutex);
  const std::optional<WriteBehindItem> item = queue.Pop();
  if (!item.has_value()) return false;
  const absl::StatusOr<BlockRef> memory = FromMemory(item->key, item->id);
  const absl::Status status = memory.ok() ? PutOnDisk(item->key, memory->bytes()) : memory.status();
  bool placed = false;
  index.Visit(item->key, [&](IndexedBlock& block) {
    if (block.id() != item->id) return;
    block.SetQueued(false);
    if (!status.ok()) return;
    block.Place(TierKind::kNvme);
    placed = true;
  });
  if (status.ok()) {
    // Deleted meanwhile. A new incarnation cannot be on disk: it waits in the queue behind us.
    if (!placed) nvme->Drop(item->key);
    counters.nvme_bytes_written += item->record_bytes;
    last_disk_put = clock->Now();
  } else if (!absl::IsNotFound(status)) {  // else it has left memory: nothing to write
    last_disk_error = status;
    if (memory.ok() && absl::IsUnavailable(status)) ++counters.nvme_write_errors;
  }
  queue.Done(*item);
  return true;
}

absl::Status TieredStore::Impl::FlushDisk() {
  absl::Status status = nvme->Flush();
  if (!status.ok()) ++counters.nvme_write_errors;
  return status;
}

void TieredStore::Impl::FlushWhenIdle() {
  MutexLock lock(&move_mutex);
  if (!nvme->has_unflushed() || clock->Now() < last_disk_put + kIdleFlush) return;
  last_disk_put = clock->Now();  // also after a failure: not at once again
  absl::Status status = FlushDisk();
  if (status.ok()) status = nvme->FlushDrops();
  if (!status.ok()) {
    Log(Severity::kWarning, "disk tier flush failed", {{"error", std::string(status.message())}});
  }
}

std::shared_ptr<const TurnUse> TieredStore::Impl::RestorePolicy() {
  last_policy_save = clock->Now();
  absl::StatusOr<PolicyState> state = ReadPolicyState(options.nvme_path);
  if (absl::IsNotFound(state.status())) return nullptr;
  std::string why(state.status().message());
  if (state.ok()) {
    if (state->policy != options.policy) return nullptr;  // of another policy: replaced by ours
    // A GPU came or went: what each tier knew is learned anew, the turns are the same.
    const size_t num_tiers = state->learned.size();
    const bool is_of_others =
        num_tiers != retention->num_tiers() && num_tiers > 1 && num_tiers <= kNumStoreTiers;
    if (is_of_others || retention->Restore(state->learned)) {
      return *retention->Recall(state->history);
    }
    why = "its numbers are none that the policy can have learned";
  }
  SetPolicyStateAside(options.nvme_path);
  ++counters.policy_files_set_aside;
  Log(Severity::kWarning, "policy state set aside: the policy learns anew",
      {{"path", options.nvme_path}, {"why", why}});
  return nullptr;
}

void TieredStore::Impl::SavePolicy(bool is_end) {
  last_policy_save = clock->Now();
  PolicyState state{.policy = options.policy, .learned = retention->Learned()};
  // Looking at every block takes long: once.
  if (is_end) state.history = retention->History();
  const absl::Status status = WritePolicyState(options.nvme_path, state);
  if (status.ok()) return;
  Log(Severity::kWarning, "policy state not written", {{"why", std::string(status.message())}});
}

absl::Status TieredStore::Impl::PersistStep(const BlockKey& key, bool& is_tried) {
  bool is_on_disk = false;
  bool is_waiting = false;
  const bool found = index.Visit(key, [&](IndexedBlock& block) {
    is_on_disk = block.in(TierKind::kNvme);
    if (is_on_disk) return;
    is_waiting = block.is_queued();
    // Not queued: the queue was full, or the disk failed. One more try, now that somebody asks; a
    // full queue is waited for.
    if (is_waiting || is_tried) return;
    is_tried = Enqueue(block);
    if (is_tried) write_budget.Charge(block.record_bytes(), clock->Now());
    is_waiting = true;
  });
  if (!found) return absl::NotFoundError(absl::StrCat("no block ", key.ToHex(), " to persist"));
  if (is_on_disk) return absl::OkStatus();
  if (is_waiting) return absl::CancelledError("waits");
  MutexLock lock(&move_mutex);
  return absl::UnavailableError(
      absl::StrCat("block ", key.ToHex(), " is not on disk: ", last_disk_error.message()));
}

absl::Status TieredStore::Persist(absl::Span<const BlockKey> keys, absl::Duration timeout) {
  Impl& impl = *impl_;
  if (impl.nvme == nullptr) {
    return absl::FailedPreconditionError("there is no disk tier: blocks live in memory only");
  }
  const absl::Time deadline = impl.clock->Now() + timeout;
  for (size_t i = 0; i < keys.size(); ++i) {
    bool is_tried = false;
    while (true) {
      const absl::Status status = impl.PersistStep(keys[i], is_tried);
      if (status.ok()) break;
      if (!absl::IsCancelled(status)) return status;
      if (impl.clock->Now() >= deadline) {
        return absl::DeadlineExceededError(
            absl::StrCat(keys.size() - i, " of ", keys.size(), " blocks are not on disk after ",
                         absl::FormatDuration(timeout), ", first block ", keys[i].ToHex()));
      }
      // Without a background thread the caller is the one who writes.
      if (impl.options.background) {
        impl.queue.WaitForProgress(kPersistPoll);
      } else {
        impl.WriteOne();
      }
    }
  }
  return impl.FlushDisk();
}

}  // namespace kvstow
