#include "client/cli/top_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace kvstow {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

ServiceStat Before() {
  ServiceStat stat;
  stat.version = "9.9";
  stat.policy = "rtv";
  stat.uptime = absl::Seconds(100);
  stat.tiers = {{.tier = "dram", .capacity_bytes = 1000, .used_bytes = 250, .num_blocks = 3}};
  stat.counters = {{"dram_hits", 10}, {"misses", 10}, {"lookups", 5}, {"put_rows_bytes", 0}};
  return stat;
}

ServiceStat After() {
  ServiceStat stat = Before();
  stat.uptime = absl::Seconds(102);
  stat.num_blocks = 3;
  stat.codecs = {
      {.codec = "k=tqm4,v=tq4", .num_blocks = 3, .record_bytes = 100, .logical_bytes = 367}};
  stat.counters = {
      {"dram_hits", 40},           {"nvme_hits", 6},      {"misses", 14},       {"lookups", 5},
      {"put_rows_bytes", 4 << 20}, {"dram_evictions", 8}, {"corrupt_blocks", 1}};
  return stat;
}

TEST(TopView, ShowsCountersAsRatesAndGaugesAsTheyAre) {
  const std::string text = TopText(Before(), After(), 2);
  EXPECT_THAT(text, HasSubstr("kvstowd 9.9, up 1m42s, policy rtv"));
  EXPECT_THAT(text, HasSubstr("25.0 %"));
  EXPECT_THAT(text, HasSubstr("[#####...............]"));
  EXPECT_THAT(text, HasSubstr("90.0 %"));  // 36 of 40 blocks found
  EXPECT_THAT(text, HasSubstr("2 MiB/s"));
  EXPECT_THAT(text, HasSubstr("3.67"));
  EXPECT_THAT(text, HasSubstr("since the last look:  corrupt_blocks +1"));
}

TEST(TopView, JsonHasTheSameFigures) {
  const auto json = TopJson(Before(), After(), 2);
  EXPECT_EQ(json["seconds"], 2);
  EXPECT_DOUBLE_EQ(json["hit_share"], 0.9);
  EXPECT_TRUE(json["lookup_hit_share"].is_null());  // nothing was looked up
  EXPECT_DOUBLE_EQ(json["tiers"][0]["full"], 0.25);
  EXPECT_DOUBLE_EQ(json["tiers"][0]["hits_per_s"], 15);
  EXPECT_DOUBLE_EQ(json["tiers"][0]["evictions_per_s"], 4);
  EXPECT_DOUBLE_EQ(json["per_s"]["nvme_hits"], 3);
}

TEST(TopView, AServiceStartedAnewCountsFromThen) {
  ServiceStat fresh = Before();
  fresh.uptime = absl::Seconds(1);
  fresh.counters = {{"dram_hits", 4}};
  EXPECT_DOUBLE_EQ(TopJson(Before(), fresh, 2)["per_s"]["dram_hits"], 2);
}

TEST(TopView, AnIdleOrOldServiceShowsNoNumbersThatAreNone) {
  const std::string text = TopText(ServiceStat(), ServiceStat(), 1);
  EXPECT_THAT(text, HasSubstr("policy ?"));
  EXPECT_THAT(text, Not(HasSubstr("nan")));
  EXPECT_THAT(text, Not(HasSubstr("since the last look")));
}

}  // namespace
}  // namespace kvstow
