#include "client/cli/args.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvstow {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr Option kOptions[] = {
    {"out", "FILE", "where to write", {}, 'o'}, {"size", "SIZE", "how much", "1MiB"},
    {"count", "N", "how often", "3"},           {"wait", "TIME", "how long", "0"},
    {"kind", "KIND", "which", "red"},           {"long", "", "more"},
};
constexpr CommandSpec kSpec = {.name = "sample",
                               .summary = "a sample",
                               .positionals = "FILE",
                               .num_positionals_min = 1,
                               .num_positionals_max = 2,
                               .options = kOptions,
                               .example = "kvstow sample a --long"};

absl::StatusOr<Args> Parse(const std::vector<std::string>& words) {
  return Args::Parse(kSpec, words);
}

std::string UsageMessage(const absl::Status& status) {
  EXPECT_TRUE(IsUsageError(status)) << status;
  return std::string(status.message());
}

TEST(Args, TakesValuesWithEqualsOrAsTheNextWord) {
  const auto args = Parse({"a", "--out=x", "--count", "7", "--long", "b"});
  ASSERT_TRUE(args.ok()) << args.status();
  EXPECT_THAT(args->positionals(), ElementsAre("a", "b"));
  EXPECT_EQ(args->Text("out"), "x");
  EXPECT_EQ(*args->Int("count", 0, 10), 7);
  EXPECT_TRUE(args->Has("long"));
  EXPECT_FALSE(args->Has("size"));
}

TEST(Args, TakesShortLettersWithAndWithoutSpace) {
  EXPECT_EQ(Parse({"a", "-o", "x"})->Text("out"), "x");
  EXPECT_EQ(Parse({"a", "-ox"})->Text("out"), "x");
  EXPECT_THAT(UsageMessage(Parse({"a", "-q"}).status()), HasSubstr("-q"));
}

TEST(Args, GivesDefaults) {
  const auto args = Parse({"a"});
  ASSERT_TRUE(args.ok());
  EXPECT_EQ(*args->Bytes("size"), 1 << 20);
  EXPECT_EQ(*args->Int("count", 1, 9), 3);
  EXPECT_EQ(*args->Duration("wait"), absl::ZeroDuration());
  EXPECT_EQ(args->Text("target"), "unix:/tmp/kvstow.sock");
  EXPECT_EQ(args->Text("out"), "");
}

TEST(Args, KeepsEqualsSignsAndEmptyValues) {
  EXPECT_EQ(Parse({"a", "--kind=k=tqm4,v=tq4"})->Text("kind"), "k=tqm4,v=tq4");
  const auto empty = Parse({"a", "--kind="});
  ASSERT_TRUE(empty.ok());
  EXPECT_TRUE(empty->Has("kind"));
  EXPECT_EQ(empty->Text("kind"), "");
}

TEST(Args, EndsOptionsAtTwoDashes) {
  EXPECT_THAT(Parse({"--", "--out"})->positionals(), ElementsAre("--out"));
  EXPECT_THAT(Parse({"-"})->positionals(), ElementsAre("-"));
}

TEST(Args, NamesTheNearestOption) {
  EXPECT_THAT(UsageMessage(Parse({"a", "--cuont", "1"}).status()), HasSubstr("--count"));
  EXPECT_THAT(UsageMessage(Parse({"a", "--taget=x"}).status()), HasSubstr("--target"));
  EXPECT_THAT(UsageMessage(Parse({"a", "--zzzzzzzz"}).status()), HasSubstr("kvstow help sample"));
}

TEST(Args, RefusesWhatIsWrongWithAnOption) {
  EXPECT_THAT(UsageMessage(Parse({"a", "--out"}).status()), HasSubstr("needs a value (FILE)"));
  EXPECT_THAT(UsageMessage(Parse({"a", "--long=1"}).status()), HasSubstr("takes no value"));
  EXPECT_THAT(UsageMessage(Parse({"a", "--out=x", "--out=y"}).status()), HasSubstr("twice"));
}

TEST(Args, CountsPositionals) {
  EXPECT_THAT(UsageMessage(Parse({}).status()), HasSubstr("FILE is missing"));
  EXPECT_THAT(UsageMessage(Parse({"a", "b", "c"}).status()), HasSubstr("\"c\""));
  EXPECT_TRUE(Parse({"--help"}).ok());  // the help needs no file
}

TEST(Args, ChecksValuesAndSaysWhatIsAllowed) {
  const auto args = Parse({"a", "--count=99", "--size=5QB", "--wait=soon", "--kind=rad"});
  ASSERT_TRUE(args.ok());
  EXPECT_THAT(UsageMessage(args->Int("count", 1, 10).status()), HasSubstr("1 to 10"));
  EXPECT_THAT(UsageMessage(args->Bytes("size").status()), HasSubstr("--size"));
  EXPECT_THAT(UsageMessage(args->Duration("wait").status()), HasSubstr("--wait"));
  EXPECT_THAT(UsageMessage(args->OneOf("kind", {"red", "blue"}).status()), HasSubstr("(red?)"));
  EXPECT_FALSE(Parse({"a", "--count=3x"})->Int("count", 1, 10).ok());
  EXPECT_FALSE(Parse({"a", "--size=0"})->Bytes("size").ok());
}

TEST(Args, SplitsLists) {
  EXPECT_THAT(*Parse({"a", "--kind=x,y"})->List("kind"), ElementsAre("x", "y"));
  EXPECT_FALSE(Parse({"a", "--kind=x,,y"})->List("kind").ok());
}

TEST(Args, PassesWordsOnUntouched) {
  CommandSpec spec = kSpec;
  spec.passes_words_on = true;
  const std::vector<std::string> words = {"--dram.capacity=1GiB", "--help", "--", "x"};
  const auto args = Args::Parse(spec, words);
  ASSERT_TRUE(args.ok());
  EXPECT_EQ(args->positionals(), words);
}

TEST(CommandHelp, ShowsOptionsDefaultsAndTheExample) {
  const std::string help = CommandHelp(kSpec);
  for (const char* text : {"usage: kvstow sample FILE", "-o, --out FILE", "--size SIZE", "[1MiB]",
                           "--target", "--json", "example:\n  kvstow sample a --long"}) {
    EXPECT_THAT(help, HasSubstr(text));
  }
}

}  // namespace
}  // namespace kvstow
