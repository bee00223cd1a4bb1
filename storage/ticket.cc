#include "storage/ticket.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/checksum.h"
#include "kernels/core/status_macros.h"
#include "storage/tiered_store.h"

namespace kvstow {

absl::Status TicketStatus(TicketState state, TicketId id) {
  switch (state) {
    case TicketState::kOpen:
      return absl::OkStatus();
    case TicketState::kSealing:
    case TicketState::kSealed:
      return absl::FailedPreconditionError(absl::StrCat("ticket ", id, " is sealed"));
    case TicketState::kAborted:
      return absl::FailedPreconditionError(absl::StrCat("ticket ", id, " was aborted"));
    case TicketState::kDead:
      return absl::DeadlineExceededError(
          absl::StrCat("ticket ", id, " has died: its write deadline has passed"));
  }
  KVSTOW_CHECK(false);
}

// --- ReservedRegion ---

ReservedRegion::ReservedRegion(ArenaRegion region, std::atomic<int64_t>* reserved_bytes)
    : region_(std::move(region)), reserved_bytes_(reserved_bytes) {
  reserved_bytes_->fetch_add(region_.size(), std::memory_order_relaxed);
}

ReservedRegion::~ReservedRegion() {
  if (reserved_bytes_ != nullptr) {
    reserved_bytes_->fetch_sub(region_.size(), std::memory_order_relaxed);
  }
}

ArenaRegion ReservedRegion::Take() {
  std::exchange(reserved_bytes_, nullptr)->fetch_sub(region_.size(), std::memory_order_relaxed);
  return std::move(region_);
}

// --- Ticket ---

Ticket::Ticket(TicketId id, const RecordMeta& meta,
               std::shared_ptr<const std::vector<uint32_t>> unit_bytes, absl::Time deadline,
               TicketHost* host)
    : id_(id),
      meta_(meta),
      unit_bytes_(std::move(unit_bytes)),
      deadline_(deadline),
      host_(host),
      planned_bytes_(LayOutUnits(*unit_bytes_, offsets_)),
      units_(unit_bytes_->size()) {
  for (size_t i = 0; i < units_.size(); ++i) units_[i].entry.offset = offsets_[i];
}

void Ticket::GiveMemory(ArenaRegion region) {
  MutexLock lock(&mutex_);
  memory_ = std::make_unique<ReservedRegion>(std::move(region), &host_->reserved_bytes);
  memory_given_.SignalAll();
}

void Ticket::GiveUp() {
  MutexLock lock(&mutex_);
  state_ = TicketState::kAborted;
  memory_given_.SignalAll();
}

absl::Status Ticket::AwaitMemory(absl::Duration timeout) {
  const RealClock clock;
  const absl::Time deadline = clock.Now() + timeout;
  MutexLock lock(&mutex_);
  // A ticket that has ended had memory, or was given up.
  while (memory_ == nullptr && state_ == TicketState::kOpen) {
    const absl::Duration left = deadline - clock.Now();
    if (left <= absl::ZeroDuration() || !memory_given_.WaitFor(&mutex_, left)) break;
  }
  if (memory_ != nullptr) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("block ", meta_.key.ToHex(), " is being reserved: retry"));
}

absl::Status Ticket::CheckOpenLocked() {
  if (state_ == TicketState::kOpen && host_->clock->Now() >= deadline_) {
    state_ = TicketState::kDead;
    host_->tickets_expired.fetch_add(1, std::memory_order_relaxed);
  }
  return TicketStatus(state_, id_);
}

absl::Status Ticket::CheckOpen() {
  MutexLock lock(&mutex_);
  return CheckOpenLocked();
}

absl::Status Ticket::BeginUnit(uint32_t unit_idx, uint64_t source_xxh3) {
  MutexLock lock(&mutex_);
  KVSTOW_RETURN_IF_ERROR(CheckOpenLocked());
  if (unit_idx >= units_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("ticket ", id_, ": unit ", unit_idx, " of ", units_.size()));
  }
  Unit& unit = units_[unit_idx];
  if (unit.state != UnitState::kEmpty) {
    if (unit.source_xxh3 != source_xxh3) {
      return absl::InvalidArgumentError(absl::StrCat(
          "ticket ", id_, ": unit ", unit_idx, " was written with XXH3 ",
          absl::Hex(unit.source_xxh3), ", now it comes with ", absl::Hex(source_xxh3)));
    }
    return absl::AlreadyExistsError(
        absl::StrCat("ticket ", id_, ": unit ", unit_idx, " was written already"));
  }
  unit.state = UnitState::kWriting;
  unit.source_xxh3 = source_xxh3;
  ++num_writers_;
  return absl::OkStatus();
}

absl::Span<std::byte> Ticket::PlannedPlace(uint32_t unit_idx, uint32_t length) {
  if (length == 0 || (*unit_bytes_)[unit_idx] != length) return {};
  // The memory stays while a unit is being written.
  MutexLock lock(&mutex_);
  return memory_->bytes().subspan(offsets_[unit_idx], length);
}

absl::Status Ticket::CommitUnit(uint32_t unit_idx, const UnitEntry& written, const std::byte* odd) {
  std::unique_ptr<ReservedRegion> room;
  absl::Status room_status;
  if (odd != nullptr && written.length > 0) {
    // Kept in the arena, so that units of unplanned sizes are bounded by it too.
    absl::StatusOr<ArenaRegion> region = host_->make_room(written.length);
    if (region.ok()) {
      std::memcpy(region->bytes().data(), odd, written.length);
      room = std::make_unique<ReservedRegion>(*std::move(region), &host_->reserved_bytes);
    } else {
      room_status = region.status();
    }
  }
  MutexLock lock(&mutex_);
  Unit& unit = units_[unit_idx];
  absl::Status status = CheckOpenLocked();
  if (status.ok()) status = room_status;
  if (status.ok()) {
    unit.entry.length = written.length;
    unit.entry.codec = written.codec;
    unit.entry.xxh3 = written.xxh3;
    unit.odd = std::move(room);
    unit.state = UnitState::kWritten;
  }
  EndWriter(unit);
  return status;
}

void Ticket::CancelUnit(uint32_t unit_idx) {
  MutexLock lock(&mutex_);
  EndWriter(units_[unit_idx]);
}

void Ticket::EndWriter(Unit& unit) {
  if (unit.state == UnitState::kWriting) unit.state = UnitState::kEmpty;
  --num_writers_;
  KVSTOW_CHECK(num_writers_ >= 0);
  FreeIfIdle();
}

void Ticket::FreeIfIdle() {
  if (num_writers_ > 0) return;
  if (state_ != TicketState::kAborted && !is_reaped_) return;
  memory_.reset();
  for (Unit& unit : units_) unit.odd.reset();
}

absl::Status Ticket::StartSeal() {
  MutexLock lock(&mutex_);
  KVSTOW_RETURN_IF_ERROR(CheckOpenLocked());
  uint32_t num_missing = 0;
  uint32_t first_missing = 0;
  for (uint32_t i = num_units(); i-- > 0;) {
    if (units_[i].state == UnitState::kWritten) continue;
    ++num_missing;
    first_missing = i;
  }
  if (num_missing > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("ticket ", id_, ": ", num_missing, " of ", num_units(),
                     " units are missing, first unit ", first_missing));
  }
  state_ = TicketState::kSealing;
  return absl::OkStatus();
}

std::vector<uint32_t> Ticket::Lengths() const {
  std::vector<uint32_t> lengths;
  lengths.reserve(units_.size());
  for (const Unit& unit : units_) lengths.push_back(unit.entry.length);
  return lengths;
}

bool Ticket::is_in_place() const {
  for (size_t i = 0; i < units_.size(); ++i) {
    if (units_[i].odd != nullptr || units_[i].entry.length != (*unit_bytes_)[i]) return false;
  }
  return true;
}

int64_t Ticket::SealedBytes() const {
  std::vector<uint64_t> offsets;
  return LayOutUnits(Lengths(), offsets);
}

absl::Span<std::byte> Ticket::memory() {
  MutexLock lock(&mutex_);
  return memory_->bytes();
}

void Ticket::WriteRecord(absl::Span<std::byte> record) {
  std::vector<uint64_t> offsets;
  KVSTOW_CHECK(LayOutUnits(Lengths(), offsets) == static_cast<int64_t>(record.size()));
  const absl::Span<const std::byte> planned = memory();
  std::vector<UnitEntry> entries;
  entries.reserve(units_.size());
  for (size_t i = 0; i < units_.size(); ++i) {
    const Unit& unit = units_[i];
    entries.push_back(unit.entry);
    entries.back().offset = offsets[i];
    const std::byte* bytes =
        unit.odd != nullptr ? unit.odd->bytes().data() : planned.data() + unit.entry.offset;
    std::byte* place = record.data() + offsets[i];
    if (unit.entry.length > 0 && bytes != place) std::memcpy(place, bytes, unit.entry.length);
  }
  WriteRecordPrefix(meta_, entries, record);
}

int64_t Ticket::CountRawFallbacks() const {
  const bool is_k_raw = meta_.codecs.k == CodecId::kRaw;
  const bool is_v_raw = meta_.codecs.v == CodecId::kRaw;
  if (is_k_raw && is_v_raw) return 0;
  const bool has_raw_by_choice = is_k_raw || is_v_raw || !meta_.plan_id.is_zero();
  int64_t num_fallbacks = 0;
  for (size_t i = 0; i < units_.size(); ++i) {
    if (units_[i].entry.codec != CodecId::kRaw) continue;
    // Where a role or a layer is raw by choice, its units have the planned size.
    const bool as_planned = units_[i].entry.length == (*unit_bytes_)[i];
    if (!has_raw_by_choice || !as_planned) ++num_fallbacks;
  }
  return num_fallbacks;
}

std::optional<ArenaRegion> Ticket::FinishSeal() {
  MutexLock lock(&mutex_);
  state_ = TicketState::kSealed;
  for (Unit& unit : units_) unit.odd.reset();
  if (memory_ == nullptr) return std::nullopt;
  ArenaRegion region = memory_->Take();
  memory_.reset();
  return region;
}

void Ticket::CancelSeal() {
  MutexLock lock(&mutex_);
  state_ = TicketState::kOpen;
}

absl::Status Ticket::Abort() {
  MutexLock lock(&mutex_);
  KVSTOW_RETURN_IF_ERROR(CheckOpenLocked());
  state_ = TicketState::kAborted;
  FreeIfIdle();
  return absl::OkStatus();
}

bool Ticket::IsDead() {
  MutexLock lock(&mutex_);
  return absl::IsDeadlineExceeded(CheckOpenLocked());
}

void Ticket::Reap() {
  MutexLock lock(&mutex_);
  is_reaped_ = true;
  FreeIfIdle();
}

// --- UnitWriter ---

UnitWriter::UnitWriter(std::shared_ptr<Ticket> ticket, uint32_t unit_idx, uint64_t source_xxh3)
    : ticket_(std::move(ticket)), unit_idx_(unit_idx), source_xxh3_(source_xxh3) {}

UnitWriter::UnitWriter(UnitWriter&&) noexcept = default;

UnitWriter& UnitWriter::operator=(UnitWriter&& other) noexcept {
  if (this != &other) {
    if (ticket_ != nullptr) ticket_->CancelUnit(unit_idx_);
    ticket_ = std::move(other.ticket_);
    unit_idx_ = other.unit_idx_;
    source_xxh3_ = other.source_xxh3_;
    buffer_ = std::exchange(other.buffer_, {});
    heap_ = std::move(other.heap_);
  }
  return *this;
}

UnitWriter::~UnitWriter() {
  if (ticket_ != nullptr) ticket_->CancelUnit(unit_idx_);
}

absl::Span<std::byte> UnitWriter::Buffer(uint32_t length) {
  heap_.reset();
  buffer_ = ticket_->PlannedPlace(unit_idx_, length);
  if (buffer_.empty()) {
    heap_ = std::make_unique_for_overwrite<std::byte[]>(length);
    buffer_ = {heap_.get(), length};
  }
  return buffer_;
}

absl::Status UnitWriter::Commit(CodecId codec, uint64_t xxh3) {
  KVSTOW_CHECK(ticket_ != nullptr &&
               (heap_ != nullptr || !buffer_.empty()));  // Buffer() comes first
  const UnitEntry written{
      .length = static_cast<uint32_t>(buffer_.size()), .codec = codec, .xxh3 = xxh3};
  const std::shared_ptr<Ticket> ticket = std::move(ticket_);
  const absl::Status status = ticket->CommitUnit(unit_idx_, written, heap_.get());
  heap_.reset();
  buffer_ = {};
  return status;
}

}  // namespace kvstow
