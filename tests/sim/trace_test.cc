// Reading traces: both formats, what is refused and how it is named; the session rule.
#include "storage/policy/trace.h"

#include <gtest/gtest.h>

#include <string>

#include "storage/policy/sessions.h"

namespace kvstow::policy {
namespace {

absl::StatusOr<Trace> Json(std::string_view text) {
  return ParseTrace(text, TraceFormat::kMooncake, {.block_tokens = 10});
}

absl::StatusOr<Trace> Csv(std::string_view text) {
  return ParseTrace(text, TraceFormat::kCsv, {.block_tokens = 10});
}

std::string Error(const absl::StatusOr<Trace>& trace) {
  if (trace.ok()) return "no error";
  EXPECT_EQ(trace.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(trace.status().message());
}

// A good first line, so that errors are on the second.
constexpr char kFirst[] =
    R"({"timestamp": 1000, "input_length": 25, "output_length": 3, "hash_ids": [7, 8, 9]})"
    "\n";

std::string SecondLineError(std::string_view line) {
  return Error(Json(std::string(kFirst) + std::string(line)));
}

void ExpectHas(const std::string& text, std::string_view part) {
  EXPECT_NE(text.find(part), std::string::npos) << text << "\nlacks: " << part;
}

TEST(Trace, ReadsJsonLinesSkipsOtherFieldsAndRenumbersIds) {
  const absl::StatusOr<Trace> trace = Json(
      "\n"
      R"({"type": "chat", "extra": {"a": [1, "x}"], "b": null}, "timestamp": 1500,)"
      R"( "input_length": 20, "output_length": 0, "hash_ids": [70, 5000000000]})"
      "\r\n"
      R"({"hash_ids":[70,5000000000,3],"output_length":4,"input_length":21,"timestamp":1500.5})");
  ASSERT_TRUE(trace.ok()) << trace.status();
  ASSERT_EQ(trace->requests.size(), 2u);
  EXPECT_DOUBLE_EQ(trace->requests[0].time_s, 1.5);
  EXPECT_DOUBLE_EQ(trace->requests[1].time_s, 1.5005);
  EXPECT_EQ(trace->requests[1].input_tokens, 21);
  EXPECT_EQ(trace->requests[1].output_tokens, 4);
  EXPECT_EQ(trace->num_distinct, 3u);
  EXPECT_EQ(trace->Chain(0), (std::vector<BlockNumber>{0, 1}));
  EXPECT_EQ(trace->Chain(1), (std::vector<BlockNumber>{0, 1, 2}));
}

TEST(Trace, ReadsCsvWithColumnsInAnyOrder) {
  const absl::StatusOr<Trace> trace =
      Csv("hash_ids,client,timestamp,output_length,input_length\n"
          "4 9,alice,1000,7,11\n"
          "4 9 1, bob ,2000,0,30\n");
  ASSERT_TRUE(trace.ok()) << trace.status();
  ASSERT_EQ(trace->requests.size(), 2u);
  EXPECT_EQ(trace->requests[0].output_tokens, 7);
  EXPECT_EQ(trace->requests[0].input_tokens, 11);
  EXPECT_EQ(trace->Chain(1), (std::vector<BlockNumber>{0, 1, 2}));
}

TEST(Trace, NamesLineAndMissingField) {
  const std::string error =
      SecondLineError(R"({"timestamp": 2000, "input_length": 5, "hash_ids": [1]})");
  EXPECT_EQ(error, "line 2: field output_length is missing");
}

TEST(Trace, RefusesTimesThatGoBack) {
  const std::string error = SecondLineError(
      R"({"timestamp": 999, "input_length": 5, "output_length": 1, "hash_ids": [1]})");
  ExpectHas(error, "line 2: timestamp is 999 ms, before the 1000 ms");
}

TEST(Trace, RefusesNegativeLengthsAndTimes) {
  ExpectHas(SecondLineError(
                R"({"timestamp": 2000, "input_length": -5, "output_length": 1, "hash_ids": []})"),
            "line 2: input_length is -5 tokens");
  ExpectHas(SecondLineError(
                R"({"timestamp": 2000, "input_length": 5, "output_length": -1, "hash_ids": [1]})"),
            "line 2: output_length is -1 tokens");
  ExpectHas(
      Error(Json(R"({"timestamp": -1, "input_length": 5, "output_length": 1, "hash_ids": [1]})")),
      "line 1: timestamp is -1 ms");
}

TEST(Trace, RefusesIdsThatDoNotFitTheLength) {
  const std::string error = SecondLineError(
      R"({"timestamp": 2000, "input_length": 21, "output_length": 1, "hash_ids": [1, 2]})");
  ExpectHas(error, "line 2: hash_ids holds 2 ids, but 21 tokens are 3 blocks of 10");
}

TEST(Trace, RefusesAnIdUnderTwoParents) {
  const std::string error = SecondLineError(
      R"({"timestamp": 2000, "input_length": 20, "output_length": 1, "hash_ids": [7, 9]})");
  ExpectHas(error, "line 2: hash_ids: 9 follows 7, but followed 8 on line 1");
  ExpectHas(SecondLineError(
                R"({"timestamp": 2000, "input_length": 5, "output_length": 1, "hash_ids": [8]})"),
            "8 follows nothing, but followed 7");
}

TEST(Trace, RefusesWhatIsNotAnObjectOfTheRightTypes) {
  ExpectHas(SecondLineError("[1, 2]"), "line 2: found `[1, 2]` where `{` was expected");
  ExpectHas(SecondLineError(R"({"timestamp": "soon"})"),
            "line 2: field timestamp: found `\"soon\"`");
  ExpectHas(SecondLineError(R"({"timestamp": 1e400})"), "expected milliseconds");
  ExpectHas(SecondLineError(R"({"input_length": 2.5})"), "expected a whole number");
  ExpectHas(SecondLineError(R"({"hash_ids": [1, -2]})"), "found `-2`");
  ExpectHas(SecondLineError(R"({"timestamp": 1, "timestamp": 2})"), "is given twice");
  ExpectHas(SecondLineError(R"({"timestamp": 1)"), "line 2");
  ExpectHas(SecondLineError(R"({"a)"), "without its closing quote");
  ExpectHas(SecondLineError("{} {}"), "text after the closing brace");
  ExpectHas(SecondLineError("{\"a\":" + std::string(100, '[')), "nested more than 32 deep");
}

TEST(Trace, CsvErrorsNameColumnAndLine) {
  ExpectHas(Error(Csv("timestamp,input_length,hash_ids\n")),
            "line 1: the header does not name the column output_length");
  const std::string header = "timestamp,input_length,output_length,hash_ids\n\n";
  ExpectHas(Error(Csv(header + "1,2,3\n")), "line 3: has 3 columns, the header has 4");
  ExpectHas(Error(Csv(header + "1,,3,4\n")), "line 3: field input_length is missing");
  ExpectHas(Error(Csv(header + "1,2,3,\n")), "line 3: field hash_ids is missing");
  ExpectHas(Error(Csv(header + "1,2,3,4;5\n")), "found `4;5`");
}

TEST(Trace, RefusesEmptyTracesAndAbsentFiles) {
  ExpectHas(Error(Json("\n\n")), "holds no request");
  ExpectHas(Error(Csv("timestamp,input_length,output_length,hash_ids\n")), "holds no request");
  EXPECT_EQ(ReadTrace("no/such/trace.jsonl", {}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(ParseTrace(kFirst, TraceFormat::kMooncake, {.block_tokens = 0}).ok());
}

TEST(Trace, RepeatGivesEachRoundItsOwnBlocksAndLaterTimes) {
  const absl::StatusOr<Trace> once = Json(kFirst);
  ASSERT_TRUE(once.ok());
  const absl::StatusOr<Trace> thrice = RepeatTrace(*once, 3);
  ASSERT_TRUE(thrice.ok());
  EXPECT_EQ(thrice->requests.size(), 3u);
  EXPECT_EQ(thrice->num_distinct, 9u);
  EXPECT_EQ(thrice->Chain(2), (std::vector<BlockNumber>{6, 7, 8}));
  EXPECT_DOUBLE_EQ(thrice->requests[2].time_s, 1.0 + 2 * 2.0);
  EXPECT_FALSE(RepeatTrace(*once, 0).ok());
  EXPECT_FALSE(RepeatTrace(*once, int64_t{1} << 31).ok());
}

// Blocks of 10 tokens. 0: two whole blocks and a tail. 1: continues it. 2: shares one block only.
// 3: shares two blocks with the last user of them (1), but not all of its prompt: a new session.
constexpr char kFamily[] =
    R"({"timestamp": 0, "input_length": 25, "output_length": 2, "hash_ids": [1, 2, 3]}
{"timestamp": 1000, "input_length": 38, "output_length": 2, "hash_ids": [1, 2, 4, 5]}
{"timestamp": 2000, "input_length": 19, "output_length": 2, "hash_ids": [1, 6]}
{"timestamp": 3000, "input_length": 30, "output_length": 2, "hash_ids": [1, 2, 7]}
{"timestamp": 4000, "input_length": 45, "output_length": 2, "hash_ids": [1, 2, 4, 5, 8]}
)";

TEST(Sessions, FollowTheRuleOfTheDeepestSeenBlock) {
  const absl::StatusOr<Trace> trace = Json(kFamily);
  ASSERT_TRUE(trace.ok()) << trace.status();
  const std::vector<Request> requests = FindSessions(*trace);
  EXPECT_FALSE(requests[0].continues);
  EXPECT_EQ(requests[0].full_blocks, 2);
  EXPECT_TRUE(requests[1].continues);
  EXPECT_EQ(requests[1].parent, 0u);
  EXPECT_EQ(requests[1].turn, 2);
  EXPECT_EQ(requests[1].seen_blocks, 2);
  EXPECT_EQ(requests[1].parent_tokens, 27);
  EXPECT_FALSE(requests[2].continues);  // depth 1
  EXPECT_FALSE(requests[3].continues);  // depth 2, the parent has 3 whole blocks
  EXPECT_EQ(requests[3].seen_blocks, 2);
  EXPECT_TRUE(requests[4].continues);
  EXPECT_EQ(requests[4].parent, 1u);
  EXPECT_EQ(requests[4].turn, 3);
}

TEST(Sessions, FutureKnowsReturnsAndNextUses) {
  const absl::StatusOr<Trace> trace = Json(kFamily);
  ASSERT_TRUE(trace.ok());
  const std::vector<Request> requests = FindSessions(*trace);
  const Future future(*trace, requests);
  EXPECT_DOUBLE_EQ(future.ReturnTime(0), 1.0);
  EXPECT_DOUBLE_EQ(future.ReturnTime(1), 4.0);
  EXPECT_EQ(future.ReturnTime(2), Future::kNever);
  EXPECT_EQ(future.NextUse(0, 1), 1u);
  EXPECT_EQ(future.NextUse(0, 2), Future::kNoUse);
  EXPECT_EQ(future.NextUse(1, 2), 4u);
  EXPECT_EQ(future.NextUse(1, 0), 2u);
}

TEST(Sessions, AnnouncedEndsAreLastTurnsOfTheChosenShare) {
  const absl::StatusOr<Trace> trace = Json(kFamily);
  ASSERT_TRUE(trace.ok());
  const std::vector<Request> requests = FindSessions(*trace);
  EXPECT_EQ(ChooseAnnouncedEnds(requests, 1, 1),
            (std::vector<bool>{false, false, true, true, true}));
  EXPECT_EQ(ChooseAnnouncedEnds(requests, 0, 1), std::vector<bool>(5, false));
  EXPECT_EQ(ChooseAnnouncedEnds(requests, 0.5, 3), ChooseAnnouncedEnds(requests, 0.5, 3));
}

}  // namespace
}  // namespace kvstow::policy
