#include "storage/write_budget.h"

#include "gtest/gtest.h"

namespace kvstow {
namespace {

constexpr int64_t kPerDay = 24 * 1000;  // a thousand bytes an hour
const absl::Time kStart = absl::UnixEpoch() + absl::Hours(1000);

TEST(WriteBudget, ZeroIsNoLimit) {
  WriteBudget budget(0);
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(budget.Take(int64_t{1} << 60, kStart));
}

TEST(WriteBudget, GivesTheDaysBytesEvenlyAndNeverMoreThanAnHoursAtOnce) {
  WriteBudget budget(kPerDay);
  int64_t written = 0;
  for (int minute = 0; minute < 24 * 60; ++minute) {
    while (budget.Take(100, kStart + absl::Minutes(minute))) written += 100;
    if (minute == 0) {
      EXPECT_EQ(written, 1000);
    }
  }
  EXPECT_GE(written, kPerDay);
  EXPECT_LE(written, kPerDay + 1000 + 100);
  // A week of quiet saves no more than an hour.
  written = 0;
  while (budget.Take(100, kStart + absl::Hours(24 * 8))) written += 100;
  EXPECT_EQ(written, 1000);
}

TEST(WriteBudget, WhatABlockTakesTooMuchIsMissingLater) {
  WriteBudget budget(kPerDay);
  EXPECT_TRUE(budget.Take(5000, kStart));
  EXPECT_FALSE(budget.Take(1, kStart + absl::Hours(3)));
  EXPECT_TRUE(budget.Take(1, kStart + absl::Hours(5)));
}

TEST(WriteBudget, WhatSomebodyAskedForIsChargedAndNeverRefused) {
  WriteBudget budget(kPerDay);
  budget.Charge(3000, kStart);
  EXPECT_FALSE(budget.Take(1, kStart + absl::Hours(1)));
}

TEST(WriteBudget, AClockThatIsSetBackGivesNothing) {
  WriteBudget budget(kPerDay);
  EXPECT_TRUE(budget.Take(1000, kStart));
  EXPECT_FALSE(budget.Take(1, kStart - absl::Hours(100)));
  EXPECT_TRUE(budget.Take(1, kStart - absl::Hours(99)));
}

}  // namespace
}  // namespace kvstow
