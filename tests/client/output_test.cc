#include "client/cli/output.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/testing/fake_clock.h"

namespace kvstow {
namespace {

TEST(Output, PrintsTextOrJsonAndNotBoth) {
  for (bool is_json : {false, true}) {
    std::ostringstream out;
    std::ostringstream err;
    Output output(out, err, is_json, false);
    output.Line("text");
    output.Json({{"a", 1}});
    output.Note("note");
    EXPECT_EQ(out.str(), is_json ? "{\"a\":1}\n" : "text\n");
    EXPECT_EQ(err.str(), "note\n");
  }
}

TEST(Output, JsonIsOneLineWhateverTheText) {
  std::ostringstream out;
  std::ostringstream err;
  Output output(out, err, true, false);
  output.Json({{"text", "two\nlines \xff"}});  // not UTF-8 either
  EXPECT_EQ(out.str(), "{\"text\":\"two\\nlines \xef\xbf\xbd\"}\n");
}

TEST(Table, NumbersStandToTheRightTextToTheLeft) {
  Table table({"NAME", "SIZE"});
  table.AddRow({"a", "5"});
  table.AddRow({"longer", "123"});
  EXPECT_EQ(table.Text(), "NAME    SIZE\na          5\nlonger   123");
  table.AddRow({"b", "none"});  // one word makes a column of words
  EXPECT_EQ(table.Text(), "NAME    SIZE\na       5\nlonger  123\nb       none");
}

TEST(ProgressText, ShowsShareAndCounts) {
  const std::string half = ProgressText("verify", 5, 10);
  EXPECT_EQ(half, "verify [" + std::string(15, '#') + std::string(15, ' ') + "]  50 %  5/10");
  EXPECT_NE(ProgressText("x", 0, 0).find("100 %"), std::string::npos);
  EXPECT_NE(ProgressText("x", 11, 10).find("100 %"), std::string::npos);
}

TEST(Progress, IsSilentWithoutATerminal) {
  std::ostringstream out;
  std::ostringstream err;
  Output output(out, err, false, /*err_is_terminal=*/false);
  {
    Progress progress(output, "verify", 10);
    progress.Update(10);
  }
  EXPECT_EQ(err.str(), "");
}

TEST(Progress, ShowsUpOnATerminalWhenWorkIsLongAndWipesItselfOut) {
  testing::FakeClock clock;
  std::ostringstream out;
  std::ostringstream err;
  Output output(out, err, false, /*err_is_terminal=*/true);
  {
    Progress progress(output, "verify", 10, clock);
    clock.Advance(absl::Milliseconds(400));
    progress.Update(4);
    EXPECT_EQ(err.str(), "");  // short so far
    clock.Advance(absl::Milliseconds(200));
    progress.Update(6);
    EXPECT_EQ(err.str(), "\r\x1b[K" + ProgressText("verify", 6, 10));
    progress.Update(7);  // no sooner than a terminal can show it
    EXPECT_EQ(err.str(), "\r\x1b[K" + ProgressText("verify", 6, 10));
  }
  EXPECT_EQ(err.str(), "\r\x1b[K" + ProgressText("verify", 6, 10) + "\r\x1b[K");
  EXPECT_EQ(out.str(), "");
}

TEST(MedianOf, TakesTheMiddle) {
  EXPECT_EQ(MedianOf({}), 0);
  EXPECT_EQ(MedianOf({3, 1, 2}), 2);
  EXPECT_EQ(MedianOf({4, 1, 3, 2}), 2.5);
}

TEST(PercentileOf, IsTheNearestRank) {
  std::vector<double> values;
  for (int i = 1; i <= 100; ++i) values.push_back(i);
  EXPECT_EQ(PercentileOf(values, 0.50), 50);
  EXPECT_EQ(PercentileOf(values, 0.99), 99);
  EXPECT_EQ(PercentileOf({7}, 0.99), 7);
  EXPECT_EQ(PercentileOf({}, 0.5), 0);
}

TEST(FormatShort, GivesThreeDigitsAndADashForNotANumber) {
  EXPECT_EQ(FormatShort(0.00123456), "0.00123");
  EXPECT_EQ(FormatShort(std::nan("")), "-");
}

}  // namespace
}  // namespace kvstow
