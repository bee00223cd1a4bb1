// Reserve, units, Seal, Abort: every status that tiered_store.h lists, and where the bytes are.
#include <string>

#include "gtest/gtest.h"
#include "tests/storage/store_fixture.h"

namespace kvstow {
namespace {

using testing::FillUnit;
using testing::IsEqual;
using testing::KeyOf;
using testing::MetaOf;
using testing::RecordOf;
using testing::RequestOf;
using testing::WriteUnits;

class StoreWriteTest : public testing::StoreTest {
 protected:
  StoreWriteTest() { Open(); }
};

TEST(StoreOptions, EachLimitIsCheckedByName) {
  struct Case {
    const char* want;
    void (*change)(StoreOptions&);
  };
  const Case cases[] = {
      {"dram_bytes is 5, want at least 1048576", [](StoreOptions& o) { o.dram_bytes = 5; }},
      {"nvme_bytes is 5, want at least 33554432",
       [](StoreOptions& o) {
         o.nvme_path = "/tmp/x";
         o.nvme_bytes = 5;
       }},
      {"leases_max is 0, want at least 1", [](StoreOptions& o) { o.leases_max = 0; }},
      {"tickets_max is -1, want at least 1", [](StoreOptions& o) { o.tickets_max = -1; }},
      {"blocks_max is 0, want at least 1", [](StoreOptions& o) { o.blocks_max = 0; }},
      {"write_behind_bytes_max is 0, want at least 1",
       [](StoreOptions& o) { o.write_behind_bytes_max = 0; }},
      {"write_deadline is 0, want more than 0 and at most 24h",
       [](StoreOptions& o) { o.write_deadline = absl::ZeroDuration(); }},
      {"lease_max is -1s, want more than 0 and at most 24h",
       [](StoreOptions& o) { o.lease_max = absl::Seconds(-1); }},
      {"turn_gap is -1s, want 0 to 24h", [](StoreOptions& o) { o.turn_gap = absl::Seconds(-1); }},
      {"dram_headroom_bytes is 536870913, want 0 to half of dram_bytes, 536870912",
       [](StoreOptions& o) { o.dram_headroom_bytes = (o.dram_bytes / 2) + 1; }},
      {"disk_write_bytes_per_day is -1, want at least 0",
       [](StoreOptions& o) { o.disk_write_bytes_per_day = -1; }},
      {"reuse_delay is inf, want 0 to 24h",
       [](StoreOptions& o) { o.reuse_delay = absl::InfiniteDuration(); }},
  };
  for (const Case& c : cases) {
    StoreOptions options;
    c.change(options);
    EXPECT_EQ(options.Validate(), absl::InvalidArgumentError(c.want));
    const testing::FakeClock clock;
    EXPECT_EQ(TieredStore::Open(options, &clock).status(), absl::InvalidArgumentError(c.want));
  }
  EXPECT_TRUE(StoreOptions().Validate().ok());
}

TEST_F(StoreWriteTest, ABlockIsVisibleOnlyAfterSealAndIsExactlyWhatWasWritten) {
  const TicketId ticket = Reserve(1);
  EXPECT_FALSE(Where(1).present());
  EXPECT_TRUE(absl::IsNotFound(store_->Get(KeyOf(1)).status()));
  EXPECT_TRUE(store_->List(BlockKey{}, 10).empty());
  EXPECT_EQ(Dram().sealed_bytes, 0);
  EXPECT_GT(Dram().reserved_bytes, 0);
  EXPECT_EQ(store_->Stats().open_tickets, 1);
  ASSERT_TRUE(store_->Seal(ticket).ok());
  EXPECT_EQ(Where(1), (Location{.in_dram = true}));
  EXPECT_TRUE(HasExactly(1));
  EXPECT_EQ(Dram().reserved_bytes, 0);
  EXPECT_EQ(Dram().sealed_bytes, Dram().used_bytes);
  EXPECT_EQ(store_->Stats().open_tickets, 0);
  EXPECT_EQ(store_->Stats().seals, 1);
}

TEST_F(StoreWriteTest, UnitsMayComeInAnyOrder) {
  const std::vector<uint32_t> lengths = {640, 64, 1000, 7};
  const absl::StatusOr<TicketId> ticket = store_->Reserve(RequestOf(KeyOf(1), lengths));
  for (const uint32_t unit_idx : {2u, 0u, 3u, 1u}) {
    absl::StatusOr<UnitWriter> unit = store_->BeginUnit(*ticket, unit_idx, unit_idx);
    ASSERT_TRUE(unit.ok());
    const absl::Span<std::byte> out = unit->Buffer(lengths[unit_idx]);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(out.data()) % 64, 0u);
    FillUnit(KeyOf(1), unit_idx, out);
    ASSERT_TRUE(unit->Commit(CodecId::kRaw, Xxh3(out)).ok());
  }
  ASSERT_TRUE(store_->Seal(*ticket).ok());
  EXPECT_TRUE(IsEqual(store_->Get(KeyOf(1))->bytes(), RecordOf(MetaOf(KeyOf(1)), lengths)));
}

TEST_F(StoreWriteTest, ReserveChecksTheRequest) {
  ReserveRequest request = RequestOf(KeyOf(1), {64});
  const std::string block = absl::StrCat("block ", KeyOf(1).ToHex());
  request.unit_bytes = nullptr;
  EXPECT_EQ(store_->Reserve(request).status(),
            absl::InvalidArgumentError(absl::StrCat(block, ": 0 units, want 1 to 1048576")));
  request = RequestOf(KeyOf(1), std::vector<uint32_t>(kMaxUnitsPerRecord + 1, 0));
  EXPECT_EQ(store_->Reserve(request).status(),
            absl::InvalidArgumentError(absl::StrCat(block, ": 1048577 units, want 1 to 1048576")));
  request = RequestOf(KeyOf(1), {64});
  request.meta.num_tokens = 0;
  EXPECT_EQ(store_->Reserve(request).status(),
            absl::InvalidArgumentError(absl::StrCat(block, ": num_tokens is 0, want 1 to 65535")));
  request = RequestOf(KeyOf(1), {64});
  request.meta.logical_bytes = -1;
  EXPECT_EQ(store_->Reserve(request).status(),
            absl::InvalidArgumentError(absl::StrCat(block, ": logical_bytes is -1")));
  request = RequestOf(KeyOf(1), {4 << 20});
  EXPECT_EQ(store_->Reserve(request).status(),
            absl::InvalidArgumentError(
                absl::StrCat(block, " needs 4194624 bytes, memory holds 4194304")));
  request = RequestOf(KeyOf(1), std::vector<uint32_t>(8, UINT32_MAX));
  EXPECT_TRUE(absl::IsInvalidArgument(store_->Reserve(request).status()));
  EXPECT_EQ(store_->Stats().open_tickets, 0);
  EXPECT_EQ(Dram().used_bytes, 0);
}

TEST_F(StoreWriteTest, OneWriterPerKey) {
  const TicketId ticket = Reserve(1);
  EXPECT_EQ(
      store_->Reserve(RequestOf(KeyOf(1), {64})).status(),
      absl::AlreadyExistsError(absl::StrCat("block ", KeyOf(1).ToHex(), " is being written")));
  ASSERT_TRUE(store_->Seal(ticket).ok());
  EXPECT_EQ(
      store_->Reserve(RequestOf(KeyOf(1), {64})).status(),
      absl::AlreadyExistsError(absl::StrCat("block ", KeyOf(1).ToHex(), " is sealed already")));
  EXPECT_EQ(Dram().reserved_bytes, 0);
}

TEST_F(StoreWriteTest, UnitsAreCheckedAgainstTheTicket) {
  const TicketId ticket = Reserve(1, kMiB, 1);
  EXPECT_EQ(store_->BeginUnit(ticket, 4, 0).status(),
            absl::InvalidArgumentError(absl::StrCat("ticket ", ticket, ": unit 4 of 4")));
  // Unit 0 was written with source checksum 0.
  EXPECT_EQ(
      store_->BeginUnit(ticket, 0, 0).status(),
      absl::AlreadyExistsError(absl::StrCat("ticket ", ticket, ": unit 0 was written already")));
  EXPECT_EQ(store_->BeginUnit(ticket, 0, 0xab).status(),
            absl::InvalidArgumentError(absl::StrCat(
                "ticket ", ticket, ": unit 0 was written with XXH3 0, now it comes with ab")));
  EXPECT_EQ(store_->BeginUnit(ticket + 1, 0, 0).status(),
            absl::NotFoundError(absl::StrCat("no ticket ", ticket + 1)));
  EXPECT_EQ(store_->Seal(ticket + 1), absl::NotFoundError(absl::StrCat("no ticket ", ticket + 1)));
  EXPECT_EQ(store_->Abort(ticket + 1), absl::NotFoundError(absl::StrCat("no ticket ", ticket + 1)));
  EXPECT_EQ(store_->TicketMeta(ticket + 1).status(),
            absl::NotFoundError(absl::StrCat("no ticket ", ticket + 1)));
  EXPECT_EQ(*store_->TicketMeta(ticket), MetaOf(KeyOf(1)));
}

TEST_F(StoreWriteTest, SealNamesWhatIsMissingAndTheTicketLivesOn) {
  const TicketId ticket = Reserve(1, kMiB, 2);
  EXPECT_EQ(store_->Seal(ticket),
            absl::FailedPreconditionError(
                absl::StrCat("ticket ", ticket, ": 2 of 4 units are missing, first unit 2")));
  for (uint32_t unit_idx : {2u, 3u}) {
    absl::StatusOr<UnitWriter> unit = store_->BeginUnit(ticket, unit_idx, 0);
    FillUnit(KeyOf(1), unit_idx, unit->Buffer(Lengths(kMiB)[unit_idx]));
    if (unit_idx == 3) {
      // Being written counts as missing.
      EXPECT_TRUE(absl::IsFailedPrecondition(store_->Seal(ticket)));
    }
    const absl::Span<std::byte> out = unit->Buffer(Lengths(kMiB)[unit_idx]);
    FillUnit(KeyOf(1), unit_idx, out);
    ASSERT_TRUE(unit->Commit(CodecId::kRaw, Xxh3(out)).ok());
  }
  ASSERT_TRUE(store_->Seal(ticket).ok());
  EXPECT_TRUE(HasExactly(1));
}

TEST_F(StoreWriteTest, AUnitDroppedWithoutCommitIsOpenAgain) {
  const TicketId ticket = Reserve(1, kMiB, 0);
  {
    absl::StatusOr<UnitWriter> unit = store_->BeginUnit(ticket, 0, 7);
    unit->Buffer(64);
    EXPECT_TRUE(absl::IsAlreadyExists(store_->BeginUnit(ticket, 0, 7).status()));
  }
  EXPECT_TRUE(store_->BeginUnit(ticket, 0, 8).ok());
}

TEST_F(StoreWriteTest, AMovedUnitWriterEndsOnce) {
  const TicketId ticket = Reserve(1, kMiB, 0);
  absl::StatusOr<UnitWriter> first = store_->BeginUnit(ticket, 0, 0);
  UnitWriter moved = *std::move(first);
  absl::StatusOr<UnitWriter> second = store_->BeginUnit(ticket, 1, 1);
  moved = *std::move(second);  // gives unit 0 back
  EXPECT_TRUE(store_->BeginUnit(ticket, 0, 0).ok());
  const absl::Span<std::byte> out = moved.Buffer(100);
  FillUnit(KeyOf(1), 1, out);
  EXPECT_TRUE(moved.Commit(CodecId::kRaw, Xxh3(out)).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(store_->BeginUnit(ticket, 1, 1).status()));
}

// U13: what has ended says so, whatever is called next.
TEST_F(StoreWriteTest, EndedTicketsAnswerCleanly) {
  const TicketId sealed = Reserve(1);
  ASSERT_TRUE(store_->Seal(sealed).ok());
  const absl::Status is_sealed =
      absl::FailedPreconditionError(absl::StrCat("ticket ", sealed, " is sealed"));
  EXPECT_EQ(store_->Seal(sealed), is_sealed);
  EXPECT_EQ(store_->Abort(sealed), is_sealed);
  EXPECT_EQ(store_->BeginUnit(sealed, 0, 0).status(), is_sealed);
  EXPECT_EQ(store_->TicketMeta(sealed).status(), is_sealed);
  const TicketId aborted = Reserve(2);
  ASSERT_TRUE(store_->Abort(aborted).ok());
  const absl::Status was_aborted =
      absl::FailedPreconditionError(absl::StrCat("ticket ", aborted, " was aborted"));
  EXPECT_EQ(store_->Seal(aborted), was_aborted);
  EXPECT_EQ(store_->Abort(aborted), was_aborted);
  EXPECT_EQ(store_->BeginUnit(aborted, 0, 0).status(), was_aborted);
  EXPECT_FALSE(Where(2).present());
  EXPECT_TRUE(HasExactly(1));
}

TEST_F(StoreWriteTest, OnlySoManyEndedTicketsAreRemembered) {
  options_.tickets_max = 3;
  Open();
  std::vector<TicketId> tickets;
  for (uint64_t number = 0; number < 5; ++number) {
    tickets.push_back(Reserve(number, 2048));
    ASSERT_TRUE(store_->Abort(tickets.back()).ok());
  }
  EXPECT_TRUE(absl::IsNotFound(store_->Abort(tickets[1])));
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->Abort(tickets[2])));
}

TEST_F(StoreWriteTest, AThousandAbortsLeaveNothing) {
  for (int i = 0; i < 1000; ++i) {
    const TicketId ticket = Reserve(1, kMiB, static_cast<uint32_t>(i % 5));
    ASSERT_TRUE(store_->Abort(ticket).ok());
    ASSERT_TRUE(absl::IsFailedPrecondition(store_->Abort(ticket)));
  }
  const StoreStats stats = store_->Stats();
  EXPECT_EQ(stats.aborts, 1000);
  EXPECT_EQ(stats.open_tickets, 0);
  EXPECT_EQ(stats.num_blocks, 0);
  EXPECT_EQ(Dram().used_bytes, 0);
  EXPECT_EQ(Dram().reserved_bytes, 0);
  EXPECT_EQ(stats.pinned_bytes, 0);
}

TEST_F(StoreWriteTest, AbortWaitsForTheUnitThatIsBeingWritten) {
  const TicketId ticket = Reserve(1, kMiB, 1);
  absl::StatusOr<UnitWriter> unit = store_->BeginUnit(ticket, 1, 1);
  const absl::Span<std::byte> out = unit->Buffer(Lengths(kMiB)[1]);
  ASSERT_TRUE(store_->Abort(ticket).ok());
  EXPECT_GT(Dram().used_bytes, 0);  // still ours to write
  FillUnit(KeyOf(1), 1, out);
  EXPECT_EQ(unit->Commit(CodecId::kRaw, Xxh3(out)),
            absl::FailedPreconditionError(absl::StrCat("ticket ", ticket, " was aborted")));
  EXPECT_EQ(Dram().used_bytes, 0);
  EXPECT_EQ(Dram().reserved_bytes, 0);
}

// --- two clocks ---

TEST_F(StoreWriteTest, AfterTheFirstClockTheTicketIsDeadAndAnotherMayWrite) {
  const TicketId late = Reserve(1, kMiB, 3);
  clock_.Advance(absl::Seconds(30) - absl::Nanoseconds(1));
  EXPECT_TRUE(absl::IsAlreadyExists(store_->Reserve(RequestOf(KeyOf(1), {64})).status()));
  absl::StatusOr<UnitWriter> unit = store_->BeginUnit(late, 3, 3);
  ASSERT_TRUE(unit.ok());
  const absl::Span<std::byte> out = unit->Buffer(Lengths(kMiB)[3]);
  clock_.Advance(absl::Nanoseconds(1));
  const absl::Status is_dead = absl::DeadlineExceededError(
      absl::StrCat("ticket ", late, " has died: its write deadline has passed"));
  EXPECT_EQ(unit->Commit(CodecId::kRaw, Xxh3(out)), is_dead);
  EXPECT_EQ(store_->BeginUnit(late, 3, 3).status(), is_dead);
  EXPECT_EQ(store_->Seal(late), is_dead);
  EXPECT_EQ(store_->Abort(late), is_dead);
  EXPECT_EQ(store_->TicketMeta(late).status(), is_dead);
  ASSERT_TRUE(Put(1, 2 * kMiB).ok());
  EXPECT_TRUE(HasExactly(1, 2 * kMiB));
  EXPECT_EQ(store_->Stats().tickets_expired, 1);
  store_->RunMaintenance();
  EXPECT_EQ(store_->Stats().tickets_expired, 1);
  EXPECT_EQ(store_->Stats().open_tickets, 0);
}

TEST_F(StoreWriteTest, MemoryOfADeadTicketIsUsedAgainOnlyAfterTheSecondClock) {
  const TicketId dead = Reserve(1, 3 * kMiB, 1);
  clock_.Advance(absl::Seconds(49));
  store_->RunMaintenance();
  EXPECT_GE(Dram().reserved_bytes, 3 * kMiB - 1024);
  const absl::Status status = store_->Reserve(RequestOf(KeyOf(2), Lengths(2 * kMiB))).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  clock_.Advance(absl::Seconds(1));
  EXPECT_TRUE(store_->Reserve(RequestOf(KeyOf(2), Lengths(2 * kMiB))).ok());  // no maintenance run
  EXPECT_LT(Dram().reserved_bytes, 3 * kMiB);
  EXPECT_TRUE(absl::IsDeadlineExceeded(store_->Seal(dead)));
}

// The writer is in the middle of a copy when both clocks have passed: its memory stays its own.
TEST_F(StoreWriteTest, AUnitBeingWrittenHoldsItsMemoryPastTheSecondClock) {
  const TicketId dead = Reserve(1, kMiB, 0);
  {
    absl::StatusOr<UnitWriter> unit = store_->BeginUnit(dead, 0, 0);
    const absl::Span<std::byte> out = unit->Buffer(Lengths(kMiB)[0]);
    clock_.Advance(absl::Hours(1));
    store_->RunMaintenance();
    EXPECT_GT(Dram().used_bytes, 0);
    FillUnit(KeyOf(1), 0, out);  // under the address sanitizer: into memory that is ours
  }
  EXPECT_EQ(Dram().used_bytes, 0);
}

TEST_F(StoreWriteTest, ARequestedDeadlineIsCutToTheLongest) {
  ReserveRequest request = RequestOf(KeyOf(1), {64});
  request.write_deadline = absl::Seconds(5);
  const TicketId five = *store_->Reserve(request);
  request = RequestOf(KeyOf(2), {64});
  request.write_deadline = absl::Hours(5);
  const TicketId longest = *store_->Reserve(request);
  clock_.Advance(absl::Seconds(5));
  EXPECT_TRUE(absl::IsDeadlineExceeded(store_->TicketMeta(five).status()));
  EXPECT_TRUE(store_->TicketMeta(longest).ok());
  clock_.Advance(absl::Seconds(25));
  EXPECT_TRUE(absl::IsDeadlineExceeded(store_->TicketMeta(longest).status()));
}

// --- units of other sizes than planned ---

TEST_F(StoreWriteTest, UnitsThatVaryAreAssembled) {
  const std::vector<uint32_t> lengths = {100, 0, 5000, 1};
  const absl::StatusOr<TicketId> ticket =
      store_->Reserve(RequestOf(KeyOf(1), std::vector<uint32_t>(4, 0)));
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  ASSERT_TRUE(WriteUnits(*store_, *ticket, KeyOf(1), lengths).ok());
  EXPECT_GE(Dram().reserved_bytes, 5100);  // bounded by the arena like everything else
  ASSERT_TRUE(store_->Seal(*ticket).ok());
  const std::vector<std::byte> want = RecordOf(MetaOf(KeyOf(1)), lengths);
  EXPECT_TRUE(IsEqual(store_->Get(KeyOf(1))->bytes(), want));
  EXPECT_EQ(Dram().used_bytes, static_cast<int64_t>(want.size()));
  EXPECT_EQ(Dram().reserved_bytes, 0);
}

TEST_F(StoreWriteTest, OneUnitLargerThanPlannedMovesTheOthers) {
  std::vector<uint32_t> lengths = {640, 640, 640, 640};
  const absl::StatusOr<TicketId> ticket = store_->Reserve(RequestOf(KeyOf(1), lengths));
  lengths[1] = 6400;
  ASSERT_TRUE(WriteUnits(*store_, *ticket, KeyOf(1), lengths).ok());
  ASSERT_TRUE(store_->Seal(*ticket).ok());
  EXPECT_TRUE(IsEqual(store_->Get(KeyOf(1))->bytes(), RecordOf(MetaOf(KeyOf(1)), lengths)));
  EXPECT_EQ(store_->Stats().raw_fallback_units, 0);  // the block is raw by choice
}

TEST_F(StoreWriteTest, RawUnitsOfAnEncodedBlockAreCounted) {
  ReserveRequest request = RequestOf(KeyOf(1), {64, 64});
  request.meta.codecs = {CodecId::kTqm4, CodecId::kTq4};
  const absl::StatusOr<TicketId> ticket = store_->Reserve(request);
  for (uint32_t unit_idx : {0u, 1u}) {
    absl::StatusOr<UnitWriter> unit = store_->BeginUnit(*ticket, unit_idx, 0);
    const absl::Span<std::byte> out = unit->Buffer(unit_idx == 0 ? 64 : 256);
    FillUnit(KeyOf(1), unit_idx, out);
    ASSERT_TRUE(unit->Commit(unit_idx == 0 ? CodecId::kTqm4 : CodecId::kRaw, Xxh3(out)).ok());
  }
  ASSERT_TRUE(store_->Seal(*ticket).ok());
  EXPECT_EQ(store_->Stats().raw_fallback_units, 1);
}

TEST_F(StoreWriteTest, SealWithoutRoomToAssembleNamesItAndCanBeTriedAgain) {
  const TicketId other = Reserve(2, 2 * kMiB);
  const absl::StatusOr<TicketId> ticket = store_->Reserve(RequestOf(KeyOf(1), {0, 0}));
  ASSERT_TRUE(WriteUnits(*store_, *ticket, KeyOf(1), {1 << 20, 100}).ok());
  const absl::Status status = store_->Seal(*ticket);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  ASSERT_TRUE(store_->Abort(other).ok());
  ASSERT_TRUE(store_->Seal(*ticket).ok());
  EXPECT_TRUE(IsEqual(store_->Get(KeyOf(1))->bytes(), RecordOf(MetaOf(KeyOf(1)), {1 << 20, 100})));
}

TEST_F(StoreWriteTest, AUnitThatFindsNoRoomIsRefusedAndOpenAgain) {
  const TicketId other = Reserve(2, 3 * kMiB);
  const absl::StatusOr<TicketId> ticket = store_->Reserve(RequestOf(KeyOf(1), {0}));
  const absl::Status status = WriteUnits(*store_, *ticket, KeyOf(1), {2 << 20});
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  ASSERT_TRUE(store_->Abort(other).ok());
  EXPECT_TRUE(WriteUnits(*store_, *ticket, KeyOf(1), {1 << 20}).ok());
}

// --- limits ---

TEST_F(StoreWriteTest, MemoryThatWritersHoldIsNotTakenAndTheMessageSaysHowMuch) {
  for (uint64_t number = 0; number < 3; ++number) Reserve(number);
  EXPECT_EQ(store_->Reserve(RequestOf(KeyOf(9), Lengths(2 * kMiB))).status(),
            absl::ResourceExhaustedError(
                "memory: 2097152 bytes wanted, 1048576 of 4194304 free, 0 pinned by readers, "
                "3145728 reserved by writers: retry when they have ended"));
}

TEST_F(StoreWriteTest, TicketsAreBounded) {
  options_.tickets_max = 2;
  Open();
  Reserve(1, 2048);
  const TicketId second = Reserve(2, 2048);
  EXPECT_EQ(
      store_->Reserve(RequestOf(KeyOf(3), {64})).status(),
      absl::ResourceExhaustedError("2 tickets are open or wait for their memory, the limit is 2"));
  ASSERT_TRUE(store_->Abort(second).ok());
  Reserve(3, 2048);
  clock_.Advance(absl::Seconds(50));  // both clocks of both
  EXPECT_TRUE(store_->Reserve(RequestOf(KeyOf(4), {64})).ok());
}

TEST_F(StoreWriteTest, AFullIndexDropsTheOldestAndRefusesOnlyWhenAllArePinned) {
  options_.blocks_max = 3;
  Open();
  for (uint64_t number = 0; number < 5; ++number) ASSERT_TRUE(Put(number, 2048).ok());
  EXPECT_EQ(store_->Stats().num_blocks, 3);
  EXPECT_FALSE(Where(1).present());
  EXPECT_TRUE(Where(4).present());
  std::vector<BlockRef> held;
  for (uint64_t number = 2; number < 5; ++number) held.push_back(*store_->Get(KeyOf(number)));
  EXPECT_EQ(Put(5, 2048), absl::ResourceExhaustedError(
                              "index: 3 blocks are held and pinned, the limit is 3 together with "
                              "open tickets: retry when readers have ended"));
  held.pop_back();
  EXPECT_TRUE(Put(5, 2048).ok());
  EXPECT_EQ(store_->Stats().open_tickets, 0);
}

TEST_F(StoreWriteTest, CapacityIsCountedInStoredBytes) {
  for (uint64_t number = 0; number < 20; ++number) {
    ASSERT_TRUE(Put(number, 700 << 10).ok());
    ASSERT_LE(Dram().used_bytes, Dram().capacity_bytes);
  }
  int64_t sum = 0;
  for (const BlockInfo& block : store_->List(BlockKey{}, 100)) sum += block.record_bytes;
  EXPECT_EQ(sum, Dram().sealed_bytes);
  EXPECT_EQ(sum, Dram().used_bytes);  // 64-byte granules: no waste at all
  ASSERT_EQ(store_->Stats().codecs.size(), 1u);
  EXPECT_EQ(store_->Stats().codecs[0].record_bytes, sum);
}

TEST_F(StoreWriteTest, AnUnknownPolicyIsRefusedAndTheNearestNamed) {
  options_.policy = "s3fif0";
  const absl::Status status = TieredStore::Open(options_, &clock_).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_NE(status.message().find("did you mean s3fifo?"), absl::string_view::npos) << status;
}

TEST_F(StoreWriteTest, HeadroomIsFreeBetweenTurns) {
  options_.dram_headroom_bytes = kMiB;
  Open();
  for (uint64_t number = 0; number < 4; ++number) ASSERT_TRUE(Put(number).ok());
  EXPECT_EQ(Dram().num_blocks, 4);  // the last turn's blocks are still there
  store_->RunMaintenance();
  EXPECT_EQ(Dram().num_blocks, 3);
  EXPECT_FALSE(Where(0).present());
  // A turn finds its room without making anybody leave for it.
  const StoreStats before = store_->Stats();
  ASSERT_TRUE(Put(4).ok());
  EXPECT_EQ(store_->Stats().dram_evictions, before.dram_evictions);
}

TEST_F(StoreWriteTest, ABlockWithoutAPromptAndOneOfAPromptLiveTogether) {
  std::vector<BlockKey> prompt;
  for (uint64_t number = 0; number < 3; ++number) prompt.push_back(KeyOf(number));
  {
    const auto use = store_->Use({.keys = prompt});
    for (uint64_t number = 0; number < 3; ++number) {
      ReserveRequest request = RequestOf(KeyOf(number), Lengths(kMiB));
      request.use = use;
      const TicketId ticket = *store_->Reserve(request);
      ASSERT_TRUE(WriteUnits(*store_, ticket, KeyOf(number), Lengths(kMiB)).ok());
      ASSERT_TRUE(store_->Seal(ticket).ok());
    }
  }
  ASSERT_TRUE(Put(10).ok());
  ASSERT_TRUE(Put(11).ok());  // the end of the prompt leaves, not its beginning
  EXPECT_TRUE(Where(0).present());
  EXPECT_FALSE(Where(2).present());
  EXPECT_TRUE(store_->Tell({.keys = {&prompt[0], 1}, .hints = {.session_over = true}}));
  EXPECT_FALSE(store_->Tell({.keys = {&prompt[2], 1}, .hints = {.session_over = true}}));
  EXPECT_EQ(store_->Stats().sessions_over, 1);
}

TEST_F(StoreWriteTest, WritersThatShareABlockMustMeanTheSameCodecsAndCalibration) {
  ReserveRequest request = RequestOf(KeyOf(1), {64});
  request.is_shared = true;
  request.meta.calibration_id = KeyOf(100);
  const absl::StatusOr<TicketId> first = store_->Reserve(request);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(store_->Reserve(request), first) << "the same ticket";
  request.meta.calibration_id = KeyOf(101);
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->Reserve(request).status()));
  request.meta.calibration_id = KeyOf(100);
  request.meta.codecs = {.k = CodecId::kInt8, .v = CodecId::kInt8};
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->Reserve(request).status()));
}

}  // namespace
}  // namespace kvstow
