#include "service/executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <vector>

#include "proto/status.h"
#include "service/admission.h"

namespace kvstow {
namespace {

TEST(Executor, RunsEverythingBeforeItEnds) {
  std::atomic<int> num_run{0};
  {
    Executor executor("test", 2, 1000);
    for (int i = 0; i < 1000; ++i) ASSERT_TRUE(executor.Submit([&] { ++num_run; }).ok());
  }
  EXPECT_EQ(num_run, 1000);
}

TEST(Executor, RefusesWhenTheQueueIsFullAndNamesTheLimit) {
  std::latch is_running(1);
  std::latch may_end(1);
  Executor executor("test", 1, 2);
  ASSERT_TRUE(executor
                  .Submit([&] {
                    is_running.count_down();
                    may_end.wait();
                  })
                  .ok());
  is_running.wait();
  std::atomic<int> num_run{0};
  ASSERT_TRUE(executor.Submit([&] { ++num_run; }).ok());
  ASSERT_TRUE(executor.Submit([&] { ++num_run; }).ok());
  EXPECT_EQ(executor.num_running(), 1);
  EXPECT_EQ(executor.num_queued(), 2);
  const absl::Status refused = executor.Submit([&] { num_run = 100; });
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.message(), "the queue of the test threads is full: 2 items wait");
  EXPECT_EQ(RetryAfter(refused), kRetryAfter);
  EXPECT_EQ(executor.num_refused(), 1);
  may_end.count_down();
  std::latch drained(1);
  // Room again once a queued item has been taken.
  while (!executor.Submit([&] { drained.count_down(); }).ok()) std::this_thread::yield();
  drained.wait();
  EXPECT_EQ(num_run, 2);
}

TEST(Executor, KeepsTheOrderOfSubmissionOnOneThread) {
  std::vector<int> order;
  {
    Executor executor("test", 1, 100);
    for (int i = 0; i < 100; ++i) ASSERT_TRUE(executor.Submit([&, i] { order.push_back(i); }).ok());
  }
  for (int i = 0; i < 100; ++i) ASSERT_EQ(order[i], i);
}

TEST(Executor, WorkMaySubmitMoreEvenWhileItEnds) {
  std::atomic<int> num_run{0};
  {
    Executor executor("test", 2, 100);
    ASSERT_TRUE(executor
                    .Submit([&] {
                      ++num_run;
                      EXPECT_TRUE(executor.Submit([&] { ++num_run; }).ok());
                    })
                    .ok());
  }
  EXPECT_EQ(num_run, 2);
}

TEST(Executor, DropsWhatAnItemOwnsWhenItIsDone) {
  auto owned = std::make_shared<int>(1);
  const std::weak_ptr<int> watched = owned;
  Executor executor("test", 1, 10);
  std::latch next_ran(1);
  ASSERT_TRUE(executor.Submit([owned = std::move(owned)] {}).ok());
  ASSERT_TRUE(executor.Submit([&] { next_ran.count_down(); }).ok());
  next_ran.wait();
  EXPECT_TRUE(watched.expired());
}

}  // namespace
}  // namespace kvstow
