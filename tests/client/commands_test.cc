// The command line as a user sees it, without a service.
#include "client/cli/commands.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "client/cli/connect.h"
#include "client/cli/doctor.h"
#include "kernels/core/device.h"
#include "tests/client/run_cli.h"

namespace kvstow {
namespace {

using testing::CliResult;
using ::testing::HasSubstr;
using testing::RunKvstow;

const char kFixture[] = KVSTOW_TEST_DATA "/smollm2_kv.safetensors";
const char kNobody[] = "--target=unix:/nonexistent/kvstow.sock";

TEST(Cli, HelpListsEveryCommandAndEachShowsAnExample) {
  const CliResult overview = RunKvstow({"help"});
  EXPECT_EQ(overview.status, 0);
  for (const Command* command : AllCommands()) {
    const std::string name(command->spec.name);
    EXPECT_THAT(overview.out, HasSubstr("  " + name));
    const CliResult page = RunKvstow({"help", name});
    EXPECT_EQ(page.status, 0);
    EXPECT_THAT(page.out, HasSubstr("example:\n  "));
    EXPECT_THAT(page.out, HasSubstr("kvstow " + name + " "));
    EXPECT_FALSE(command->spec.summary.empty());
    if (!command->spec.passes_words_on) {
      EXPECT_EQ(RunKvstow({name, "--help"}).out, page.out);
    }
  }
}

TEST(Cli, ExamplesAreValidCommandLines) {
  for (const Command* command : AllCommands()) {
    std::istringstream example{std::string(command->spec.example)};
    std::vector<std::string> words;
    for (std::string word; example >> word && word != "|";) words.push_back(word);
    if (words[0] != "kvstow") continue;  // the shell reads the output
    ASSERT_EQ(words[1], command->spec.name);
    const auto args = Args::Parse(command->spec, absl::MakeConstSpan(words).subspan(2));
    EXPECT_TRUE(args.ok()) << command->spec.example << ": " << args.status();
  }
}

TEST(Cli, UsageErrorsGiveStatus2AndOneLine) {
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"no-such-command"},
                                             {"put"},
                                             {"put", kFixture, "--codec=unknown"},
                                             {"put", kFixture, "--tokens-per-block=33x"},
                                             {"get", kFixture, "--keys=00"},
                                             {"get"},
                                             {"get", "--keys=xyz"},
                                             {"ls", "--log"},
                                             {"ls", "--fingerprint=1"},
                                             {"verify", "abc"},
                                             {"ping", "--wait=soon"},
                                             {"top", "--interval=0"},
                                             {"top", "--count=-1"},
                                             {"bench"},
                                             {"bench", "--path=rdma"},
                                             {"bench", "--path=grpc", "--size=100KiB"},
                                             {"bench", "--path=grpc", "--wire-limit=fast"},
                                             {"bench", "--path=shm", "--wire-limit=500MB/s"},
                                             {"eval", kFixture},
                                             {"completion", "fish"},
                                             {"help", "pu"},
                                             {"key", kFixture, "--lora=xyz"}}) {
    const CliResult result = RunKvstow(words);
    EXPECT_EQ(result.status, 2) << words[0] << ": " << result.err;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    EXPECT_EQ(result.out, "");
  }
}

TEST(Cli, NamesTheNearestCommand) {
  EXPECT_THAT(RunKvstow({"verfy"}).err, HasSubstr("did you mean verify?"));
}

TEST(Cli, EveryCallWithoutAServiceFailsWithTheCommandThatHelps) {
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"put", kFixture, kNobody},
                                             {"get", kFixture, kNobody},
                                             {"delete", kFixture, kNobody},
                                             {"calibration", "ls", kNobody},
                                             {"ls", kNobody},
                                             {"stat", kNobody},
                                             {"top", "--once", kNobody},
                                             {"verify", kNobody},
                                             {"ping", kNobody}}) {
    const CliResult result = RunKvstow(words);
    EXPECT_EQ(result.status, 1) << words[0];
    EXPECT_THAT(result.err, HasSubstr("kvstow serve --listen.unix_socket=/nonexistent/kvstow.sock"))
        << words[0];
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
}

TEST(Cli, BadFilesFailWithTheirNameBeforeAnyCall) {
  const CliResult missing = RunKvstow({"put", "/nonexistent/kv.safetensors", kNobody});
  EXPECT_EQ(missing.status, 1);
  EXPECT_THAT(missing.err, HasSubstr("/nonexistent/kv.safetensors"));
}

TEST(Cli, KeyPrintsOneKeyPerFullBlockAndTenantsDiffer) {
  const CliResult plain = RunKvstow({"key", kFixture});
  EXPECT_EQ(plain.status, 0) << plain.err;
  EXPECT_EQ(plain.out.size(), 4u * 65);
  EXPECT_EQ(RunKvstow({"key", kFixture}).out, plain.out);
  for (const char* change : {"--tenant=t", "--lora=00ff", "--weights=w", "--tokenizer=t",
                             "--rope=base=1,half", "--tokens-per-block=128", "--model=m"}) {
    const CliResult changed = RunKvstow({"key", kFixture, change});
    EXPECT_EQ(changed.status, 0) << changed.err;
    // Not a single key in common.
    std::istringstream lines(changed.out);
    for (std::string line; std::getline(lines, line);) {
      EXPECT_EQ(plain.out.find(line), std::string::npos) << change;
    }
  }
}

TEST(Cli, KeyAgreesWithTheChainOfBlockKeys) {
  const auto file = KvFile::Open(kFixture, {});
  ASSERT_TRUE(file.ok());
  const std::vector<BlockKey> keys =
      ChainKeys({.fingerprint = file->spec().Fingerprint(), .tenant = "t"}, file->tokens(), 64);
  const CliResult result = RunKvstow({"key", kFixture, "--tenant=t", "--json"});
  std::istringstream lines(result.out);
  size_t i = 0;
  for (std::string line; std::getline(lines, line); ++i) {
    const auto json = nlohmann::json::parse(line);
    EXPECT_EQ(json["key"], keys[i].ToHex());
    EXPECT_EQ(json["first_token"], 64 * i);
  }
  EXPECT_EQ(i, keys.size());
}

TEST(Cli, VersionIsThatOfTheBuild) {
  EXPECT_EQ(RunKvstow({"--version"}).out, "kvstow " + std::string(CliVersion()) + "\n");
}

TEST(Doctor, SaysOkAbsentOrWarnAndFindsNoServiceWithoutFailing) {
  const CliResult result = RunKvstow({"doctor", "--json", kNobody});
  EXPECT_EQ(result.status, 0) << result.err;
  std::istringstream lines(result.out);
  std::map<std::string, std::string> states;
  for (std::string line; std::getline(lines, line);) {
    const auto json = nlohmann::json::parse(line);
    const std::string state = json["state"];
    EXPECT_TRUE(state == "ok" || state == "absent" || state == "warn") << line;
    EXPECT_NE(json["found"], "") << line;
    if (state == "warn") {
      EXPECT_NE(json["hint"], "") << line;
    }
    states[json["what"]] = state;
  }
  for (const char* what : {"cpu", "simd", "cores", "memory", "memlock", "huge pages", "gpu",
                           "hbm tier", "nccl", "rdma", "ucx", "rocksdb"}) {
    EXPECT_TRUE(states.contains(what)) << what;
  }
  EXPECT_EQ(states["hbm tier"], ListDevices().devices.empty() ? "absent" : "ok");
  EXPECT_EQ(states["service"], "absent");
}

TEST(Completion, ParsesInBashAndKnowsEveryCommandAndOption) {
  const CliResult script = RunKvstow({"completion", "bash"});
  EXPECT_EQ(script.status, 0);
  const std::string path = ::testing::TempDir() + "/completion_" + std::to_string(getpid());
  std::ofstream(path) << script.out;
  EXPECT_EQ(std::system(("bash -n " + path).c_str()), 0);
  // As the shell calls it: `kvstow put --cod<TAB>`.
  const std::string ask = "source " + path +
                          "; COMP_WORDS=(kvstow put --cod); COMP_CWORD=2; _kvstow; "
                          "[ \"${COMPREPLY[*]}\" = --codec ] && "
                          "COMP_WORDS=(kvstow ver); COMP_CWORD=1; _kvstow; "
                          "[ \"${COMPREPLY[*]}\" = verify ]";
  EXPECT_EQ(std::system(("bash -c '" + ask + "'").c_str()), 0);
  unlink(path.c_str());
  for (const Command* command : AllCommands()) {
    EXPECT_THAT(script.out, HasSubstr(std::string(command->spec.name)));
  }
}

TEST(NormalTarget, TakesABarePath) {
  EXPECT_EQ(NormalTarget("/run/kvstow.sock"), "unix:/run/kvstow.sock");
  EXPECT_EQ(NormalTarget("unix:/run/kvstow.sock"), "unix:/run/kvstow.sock");
  EXPECT_EQ(NormalTarget("host:7070"), "host:7070");
}

}  // namespace
}  // namespace kvstow
