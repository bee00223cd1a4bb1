#include "client/cpp/breaker.h"

#include <gtest/gtest.h>

#include "tests/testing/fake_clock.h"

namespace kvstow {
namespace {

constexpr absl::Duration kFast = absl::Milliseconds(1);
constexpr absl::Duration kSlow = absl::Milliseconds(101);
constexpr BreakerOptions kOptions = {.errors_to_open = 3,
                                     .slow_to_open = 2,
                                     .slow_call = absl::Milliseconds(100),
                                     .cool_down = absl::Seconds(1)};

class BreakerTest : public ::testing::Test {
 protected:
  void Open() {
    for (int i = 0; i < 3; ++i) breaker_.Record(false, kFast);
    ASSERT_EQ(breaker_.state(), BreakerState::kOpen);
  }

  testing::FakeClock clock_;
  Breaker breaker_{kOptions, &clock_};
};

TEST_F(BreakerTest, StartsClosed) {
  EXPECT_EQ(breaker_.state(), BreakerState::kClosed);
  EXPECT_TRUE(breaker_.Allow());
  EXPECT_TRUE(breaker_.Allow());
}

TEST_F(BreakerTest, OpensAtTheLastErrorInARowAndNotBefore) {
  breaker_.Record(false, kFast);
  breaker_.Record(false, kFast);
  EXPECT_EQ(breaker_.state(), BreakerState::kClosed);
  EXPECT_TRUE(breaker_.Allow());
  breaker_.Record(false, kFast);
  EXPECT_EQ(breaker_.state(), BreakerState::kOpen);
  EXPECT_FALSE(breaker_.Allow());
}

TEST_F(BreakerTest, OneSuccessEndsTheRow) {
  breaker_.Record(false, kFast);
  breaker_.Record(false, kFast);
  breaker_.Record(true, kFast);
  breaker_.Record(false, kFast);
  breaker_.Record(false, kFast);
  EXPECT_EQ(breaker_.state(), BreakerState::kClosed);
}

TEST_F(BreakerTest, OpensWhenCallsAreSlowThoughTheySucceed) {
  breaker_.Record(true, kSlow);
  EXPECT_EQ(breaker_.state(), BreakerState::kClosed);
  breaker_.Record(true, kSlow);
  EXPECT_EQ(breaker_.state(), BreakerState::kOpen);
}

TEST_F(BreakerTest, ACallOfExactlyTheLimitIsNotSlow) {
  for (int i = 0; i < 10; ++i) breaker_.Record(true, absl::Milliseconds(100));
  EXPECT_EQ(breaker_.state(), BreakerState::kClosed);
}

TEST_F(BreakerTest, OneFastCallEndsTheRowOfSlowOnes) {
  breaker_.Record(true, kSlow);
  breaker_.Record(true, kFast);
  breaker_.Record(true, kSlow);
  EXPECT_EQ(breaker_.state(), BreakerState::kClosed);
}

TEST_F(BreakerTest, RefusesUntilTheCoolDownIsOver) {
  Open();
  clock_.Advance(absl::Milliseconds(999));
  EXPECT_FALSE(breaker_.Allow());
  EXPECT_EQ(breaker_.state(), BreakerState::kOpen);
  clock_.Advance(absl::Milliseconds(1));
  EXPECT_TRUE(breaker_.Allow());
  EXPECT_EQ(breaker_.state(), BreakerState::kHalfOpen);
}

TEST_F(BreakerTest, HalfOpenPassesOneProbeOnly) {
  Open();
  clock_.Advance(absl::Seconds(1));
  EXPECT_TRUE(breaker_.Allow());
  EXPECT_FALSE(breaker_.Allow());
  EXPECT_FALSE(breaker_.Allow());
}

TEST_F(BreakerTest, AGoodProbeClosesItWithACleanSlate) {
  Open();
  clock_.Advance(absl::Seconds(1));
  ASSERT_TRUE(breaker_.Allow());
  breaker_.Record(true, kFast);
  EXPECT_EQ(breaker_.state(), BreakerState::kClosed);
  EXPECT_TRUE(breaker_.Allow());
  breaker_.Record(false, kFast);
  breaker_.Record(false, kFast);
  EXPECT_EQ(breaker_.state(), BreakerState::kClosed);
}

TEST_F(BreakerTest, AFailedProbeOpensItForAWholeCoolDown) {
  Open();
  clock_.Advance(absl::Seconds(1));
  ASSERT_TRUE(breaker_.Allow());
  clock_.Advance(absl::Milliseconds(500));
  breaker_.Record(false, kFast);
  EXPECT_EQ(breaker_.state(), BreakerState::kOpen);
  clock_.Advance(absl::Milliseconds(999));
  EXPECT_FALSE(breaker_.Allow());
  clock_.Advance(absl::Milliseconds(1));
  EXPECT_TRUE(breaker_.Allow());
}

TEST_F(BreakerTest, ASlowProbeOpensItAgain) {
  Open();
  clock_.Advance(absl::Seconds(1));
  ASSERT_TRUE(breaker_.Allow());
  breaker_.Record(true, kSlow);
  EXPECT_EQ(breaker_.state(), BreakerState::kOpen);
}

TEST_F(BreakerTest, LateAnswersOfOldCallsDoNotMoveTheCoolDown) {
  Open();
  clock_.Advance(absl::Milliseconds(900));
  breaker_.Record(false, kFast);
  breaker_.Record(true, kFast);
  EXPECT_EQ(breaker_.state(), BreakerState::kOpen);
  clock_.Advance(absl::Milliseconds(100));
  EXPECT_TRUE(breaker_.Allow());
}

TEST(BreakerStateName, NamesEveryState) {
  EXPECT_EQ(BreakerStateName(BreakerState::kClosed), "closed");
  EXPECT_EQ(BreakerStateName(BreakerState::kOpen), "open");
  EXPECT_EQ(BreakerStateName(BreakerState::kHalfOpen), "half-open");
}

}  // namespace
}  // namespace kvstow
