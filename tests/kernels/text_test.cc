// How sizes, durations and near misses of names are read and written.
#include "kernels/core/text.h"

#include "gtest/gtest.h"

namespace kvstow {
namespace {

TEST(ParseBytes, ReadsUnits) {
  const std::pair<std::string_view, int64_t> cases[] = {
      {"4096", 4096},          {"0", 0},
      {"312B", 312},           {"512KiB", 512 << 10},
      {"64MiB", 64 << 20},     {" 64 MiB ", 64 << 20},
      {"1.5 GiB", 1610612736}, {"2GB", 2000000000},
      {"3KB", 3000},           {"5MB", 5000000},
      {"1TB", 1000000000000},  {"2TiB", int64_t{2} << 40}};
  for (const auto& [text, want] : cases) {
    const auto got = ParseBytes(text);
    ASSERT_TRUE(got.ok()) << text;
    EXPECT_EQ(*got, want) << text;
  }
}

TEST(ParseBytes, RefusesWhatIsNoSize) {
  EXPECT_EQ(ParseBytes("64XB").status().message(),
            "size \"64XB\" is not a number with a unit (B, KiB, MiB, GiB, TiB, KB, MB, GB, TB)");
  for (std::string_view text :
       {"", "MiB", "-1", "-1MiB", "1 2", "1e3", "0x10", "64mib", "64M", "1.2.3MiB", "nan"}) {
    EXPECT_EQ(ParseBytes(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  EXPECT_EQ(ParseBytes("99999999TiB").status().message(),
            "size \"99999999TiB\" does not fit 63 bits");
}

TEST(FormatBytes, GivesThreeDigitsAndBinaryUnits) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(312), "312 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1 KiB");
  EXPECT_EQ(FormatBytes(64 << 10), "64 KiB");
  EXPECT_EQ(FormatBytes(1610612736), "1.5 GiB");
}

TEST(ParseDuration, ReadsUnitsAndRefusesTheRest) {
  EXPECT_EQ(*ParseDuration("250ms"), absl::Milliseconds(250));
  EXPECT_EQ(*ParseDuration("1h30m"), absl::Minutes(90));
  EXPECT_EQ(*ParseDuration("0"), absl::ZeroDuration());
  for (std::string_view text : {"", "-5s", "inf", "30", "5 parsecs"}) {
    EXPECT_EQ(ParseDuration(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  EXPECT_EQ(ParseDuration("-5s").status().message(),
            "duration \"-5s\" is not a positive number with a unit (ms, s, m, h), for example 30s");
}

TEST(NearestName, FindsNearMissesOnly) {
  const std::vector<std::string> names = {"lossless", "safe", "small", "tq4"};
  EXPECT_EQ(NearestName("saef", names), "safe");
  EXPECT_EQ(NearestName("losless", names), "lossless");
  EXPECT_EQ(NearestName("smal", names), "small");
  EXPECT_EQ(NearestName("tq4", names), "tq4");
  EXPECT_EQ(NearestName("completely", names), "");
  EXPECT_EQ(NearestName("x", {}), "");
}

}  // namespace
}  // namespace kvstow
