#include "service/admission.h"

#include <gtest/gtest.h>

#include <thread>
#include <utility>
#include <vector>

#include "proto/status.h"

namespace kvstow {
namespace {

TEST(Admission, RefusesCallsAtTheLimitWithAHint) {
  auto admission = std::make_shared<Admission>(2, 1000);
  const auto a = admission->AdmitCall(10);
  auto b = admission->AdmitCall(10);
  ASSERT_TRUE(a.ok() && b.ok());
  const auto c = admission->AdmitCall(10);
  EXPECT_EQ(c.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(c.status().message(), "calls in flight: 2 of 2");
  EXPECT_EQ(RetryAfter(c.status()), absl::Milliseconds(100));
  EXPECT_EQ(admission->num_refused_by_calls(), 1);
  EXPECT_EQ(admission->num_refused_by_bytes(), 0);
  *b = Permit();
  EXPECT_TRUE(admission->AdmitCall(10).ok());
}

TEST(Admission, RefusesBytesAtTheLimitWithNumbers) {
  auto admission = std::make_shared<Admission>(10, 1000);
  const auto a = admission->AdmitCall(600);
  const auto b = admission->HoldBytes(401);
  EXPECT_EQ(b.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(b.status().message(), "bytes in flight: 600 of 1000 are held, 401 wanted");
  EXPECT_EQ(RetryAfter(b.status()), absl::Milliseconds(100));
  EXPECT_EQ(admission->num_refused_by_bytes(), 1);
  EXPECT_TRUE(admission->HoldBytes(400).ok());  // exactly full is not over
}

TEST(Admission, HoldingBytesIsNoCall) {
  auto admission = std::make_shared<Admission>(1, 1000);
  const auto call = admission->AdmitCall(1);
  const auto held = admission->HoldBytes(1);
  EXPECT_TRUE(held.ok());
  EXPECT_EQ(admission->calls_in_flight(), 1);
  EXPECT_EQ(admission->bytes_in_flight(), 2);
}

TEST(Admission, PermitsGiveBackOnceHoweverTheyAreMoved) {
  auto admission = std::make_shared<Admission>(10, 1000);
  {
    Permit a = *admission->AdmitCall(100);
    Permit b = std::move(a);
    Permit c = *admission->AdmitCall(10);
    c = std::move(b);
    EXPECT_EQ(admission->bytes_in_flight(), 110);
  }
  EXPECT_EQ(admission->bytes_in_flight(), 0);
  EXPECT_EQ(admission->calls_in_flight(), 0);
}

// A slice of gRPC may outlive the server that made it by a moment.
TEST(Admission, LivesAsLongAsItsPermits) {
  auto admission = std::make_shared<Admission>(10, 1000);
  const std::weak_ptr<Admission> watched = admission;
  {
    const Permit permit = *admission->AdmitCall(100);
    admission.reset();
    EXPECT_FALSE(watched.expired());
  }
  EXPECT_TRUE(watched.expired());
}

TEST(Admission, ADrainRefusesNewCallsAndWaitsForThoseAdmittedBefore) {
  auto admission = std::make_shared<Admission>(10, 1000);
  Permit call = *admission->AdmitCall(0);
  admission->StartDrain();
  EXPECT_EQ(admission->AdmitCall(0).status(),
            absl::UnavailableError("the service is going down: try another or come back later"));
  EXPECT_TRUE(admission->HoldBytes(1).ok()) << "a call admitted before goes on";
  EXPECT_FALSE(admission->WaitUntilIdle(absl::ZeroDuration()));
  call = Permit();
  EXPECT_TRUE(admission->WaitUntilIdle(absl::ZeroDuration()));
}

TEST(Admission, WaitsUntilNothingIsHeldOrTheTimeIsUp) {
  auto admission = std::make_shared<Admission>(10, 1000);
  EXPECT_TRUE(admission->WaitUntilIdle(absl::ZeroDuration()));
  Permit held = *admission->HoldBytes(1);
  EXPECT_FALSE(admission->WaitUntilIdle(absl::Milliseconds(1)));
  std::thread giver([permit = std::move(held)]() mutable { permit = Permit(); });
  EXPECT_TRUE(admission->WaitUntilIdle(absl::Seconds(60)));
  giver.join();
}

TEST(Admission, CountsStayExactUnderContention) {
  auto admission = std::make_shared<Admission>(3, 1000);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 2000; ++i) {
        const auto permit = admission->AdmitCall(1);
        EXPECT_LE(admission->calls_in_flight(), 3);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(admission->calls_in_flight(), 0);
  EXPECT_EQ(admission->bytes_in_flight(), 0);
}

TEST(Admission, HintIsAddedToExhaustionOnlyAndNeverReplaced) {
  EXPECT_EQ(RetryAfter(WithRetryHint(absl::NotFoundError("x"))), absl::ZeroDuration());
  EXPECT_EQ(RetryAfter(WithRetryHint(absl::ResourceExhaustedError("x"))), kRetryAfter);
  absl::Status hinted = absl::ResourceExhaustedError("x");
  SetRetryAfter(hinted, absl::Seconds(3));
  EXPECT_EQ(RetryAfter(WithRetryHint(hinted)), absl::Seconds(3));
  EXPECT_TRUE(WithRetryHint(absl::OkStatus()).ok());
}

}  // namespace
}  // namespace kvstow
