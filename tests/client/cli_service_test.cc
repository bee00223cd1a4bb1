// The command line against a real daemon: what a user types, what is printed, the exit status.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "client/cli/commands.h"
#include "client/cpp/safetensors.h"
#include "tests/e2e/daemon.h"
#include "tests/e2e/process.h"
#include "tests/testing/rng.h"
#include "tests/testing/sanitizer.h"

namespace kvstow {
namespace {

using testing::Daemon;
using ::testing::HasSubstr;
using testing::TempFolder;
using Json = nlohmann::json;

const char kFixture[] = KVSTOW_TEST_DATA "/smollm2_kv.safetensors";
const char kProbe[] = KVSTOW_TEST_DATA "/smollm2_kv_probe.safetensors";

struct Result {
  int status = 0;
  std::string out;
  std::string err;

  std::vector<Json> lines() const {
    std::vector<Json> parsed;
    std::istringstream text(out);
    for (std::string line; std::getline(text, line);) parsed.push_back(Json::parse(line));
    return parsed;
  }
};

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// A KV file of one small layer: 4 KiB of rows in a block of 32 tokens.
void WriteSmallFile(const std::string& path, int64_t num_tokens) {
  constexpr int64_t kRowBytes = 32 * 2;
  testing::Rng rng(7);
  std::vector<int32_t> tokens(num_tokens);
  for (int32_t& token : tokens) token = static_cast<int32_t>(rng.Below(50000));
  std::vector<uint16_t> rows(num_tokens * kRowBytes / 2);
  for (uint16_t& value : rows) value = static_cast<uint16_t>(0x3c00 + rng.Below(0x400));  // 1 to 2
  const auto bytes = [](const auto& values) {
    return absl::Span<const std::byte>(reinterpret_cast<const std::byte*>(values.data()),
                                       values.size() * sizeof(values[0]));
  };
  SafetensorsWriter writer;
  writer.SetMetadata({{"model", "small"}, {"weights", "w"}, {"tokens_per_block", "32"}});
  ASSERT_TRUE(writer.Add("token_ids", TensorType::kI32, {num_tokens}, bytes(tokens)).ok());
  ASSERT_TRUE(writer.Add("k.0", TensorType::kF16, {num_tokens, 1, 32}, bytes(rows)).ok());
  ASSERT_TRUE(writer.Add("v.0", TensorType::kF16, {num_tokens, 1, 32}, bytes(rows)).ok());
  ASSERT_TRUE(writer.Write(path).ok());
}

class CliService : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(daemon_.Start()) << daemon_.log(); }

  Result Kvstow(std::vector<std::string> words) {
    words.push_back("--target=" + daemon_.target());
    std::ostringstream out;
    std::ostringstream err;
    const int status = RunCli(words, {out, err});
    return {status, out.str(), err.str()};
  }
  std::string Path(const std::string& name) const { return folder_.path() + "/" + name; }

  TempFolder folder_;
  Daemon daemon_{folder_, {.dram = "128MiB", .nvme = "256MiB"}};
};

TEST_F(CliService, RawComesBackAsTheSameFile) {
  const Result put = Kvstow({"put", kFixture, "--codec=raw", "--json"});
  ASSERT_EQ(put.status, 0) << put.err;
  EXPECT_EQ(put.lines()[0]["stored"], 4);
  EXPECT_EQ(put.lines()[0]["sent_bytes"], 5898240);
  EXPECT_GE(put.lines()[0]["bits_per_value"], 16.0);
  const Result got = Kvstow({"get", kFixture, "-o", Path("back"), "--compare", kFixture});
  EXPECT_EQ(got.status, 0) << got.err;
  EXPECT_TRUE(ReadFile(Path("back")) == ReadFile(kFixture));
  const Result again = Kvstow({"put", kFixture, "--codec=safe", "--json"});
  EXPECT_EQ(again.lines()[0]["existing"], 4);  // one key, one record: the codec is not in the key
  EXPECT_EQ(again.lines()[0]["sent_bytes"], 0);
}

TEST_F(CliService, WhereTheQuantizerRunsDoesNotChangeTheBytes) {
  for (const char* where : {"service", "worker"}) {
    const std::string compress = std::string("--compress-at=") + where;
    const std::string tenant = std::string("--tenant=") + where;
    ASSERT_EQ(Kvstow({"put", kFixture, "--codec=safe", compress, tenant}).status, 0);
    ASSERT_EQ(Kvstow({"get", kFixture, tenant, "-o", Path(where)}).status, 0);
  }
  EXPECT_TRUE(ReadFile(Path("service")) == ReadFile(Path("worker")));
}

TEST_F(CliService, LossyCodecsDifferAndExitWith1) {
  ASSERT_EQ(Kvstow({"put", kFixture, "--codec=int8"}).status, 0);
  const Result got = Kvstow({"get", kFixture, "--compare", kFixture});
  EXPECT_EQ(got.status, 1);
  EXPECT_THAT(got.err, HasSubstr("bytes differ"));
}

TEST_F(CliService, MissesExitWith1UnlessAllowed) {
  const Result miss = Kvstow({"get", kFixture, "--tenant=nobody"});
  EXPECT_EQ(miss.status, 1);
  EXPECT_THAT(miss.err, HasSubstr("4 of 4 blocks are not there"));
  EXPECT_EQ(Kvstow({"get", kFixture, "--tenant=nobody", "--allow-missing"}).status, 0);
  const Result no_file = Kvstow({"get", kFixture, "--tenant=nobody", "-o", Path("none")});
  EXPECT_EQ(no_file.status, 1);
  EXPECT_FALSE(std::filesystem::exists(Path("none")));
}

TEST_F(CliService, LeftoverTokensAreSaidAndLeftOut) {
  WriteSmallFile(Path("small"), 70);
  EXPECT_EQ(Kvstow({"put", Path("small"), "--json"}).lines()[0]["leftover_tokens"], 6);
  EXPECT_THAT(Kvstow({"put", Path("small")}).out, HasSubstr("the last 6 tokens"));
  const Result got = Kvstow({"get", Path("small"), "-o", Path("back")});
  EXPECT_EQ(got.status, 0) << got.err;
  EXPECT_THAT(got.out, HasSubstr("the last 6 tokens"));
  const auto back = SafetensorsFile::Open(Path("back"));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_TRUE(back->Expect("k.0", TensorType::kF16, {64, 1, 32}).ok());
  EXPECT_TRUE(back->Expect("token_ids", TensorType::kI32, {64}).ok());
}

TEST_F(CliService, TopShowsRatesOfWhatHappenedInBetween) {
  ASSERT_EQ(Kvstow({"put", kFixture, "--codec=safe"}).status, 0);
  const Result text = Kvstow({"top", "--once", "--interval=20ms"});
  EXPECT_EQ(text.status, 0) << text.err;
  for (const char* part : {"policy rtv", "TIER", "dram", "nvme", "CODEC", "blocks read"}) {
    EXPECT_THAT(text.out, HasSubstr(part));
  }
  EXPECT_EQ(text.out.find('\x1b'), std::string::npos);  // no terminal, no control characters
  const Result json = Kvstow({"top", "--count=3", "--interval=20ms", "--json"});
  ASSERT_EQ(json.lines().size(), 3u) << json.err;
  for (const Json& line : json.lines()) {
    EXPECT_EQ(line["policy"], "rtv");
    EXPECT_EQ(line["blocks"], 4);
    EXPECT_EQ(line["per_s"]["seals"], 0);
    EXPECT_TRUE(line["hit_share"].is_null());
    EXPECT_EQ(line["tiers"][0]["tier"], "dram");
  }
}

TEST_F(CliService, LsPagesThroughEverythingAndAgreesWithKeyAndStat) {
  WriteSmallFile(Path("small"), 1100 * 32);
  ASSERT_EQ(Kvstow({"put", Path("small"), "--codec=raw"}).status, 0);
  std::set<std::string> keys;
  for (const Json& line : Kvstow({"key", Path("small"), "--json"}).lines())
    keys.insert(line["key"]);
  EXPECT_EQ(keys.size(), 1100u);
  std::set<std::string> listed;
  uint64_t record_bytes = 0;
  for (const Json& line : Kvstow({"ls", "--json"}).lines()) {
    listed.insert(line["key"]);
    record_bytes += line["record_bytes"].get<uint64_t>();
    EXPECT_EQ(line["model"], "small");
  }
  EXPECT_EQ(listed, keys);
  const Json stat = Kvstow({"stat", "--json"}).lines()[0];
  EXPECT_EQ(stat["blocks"], 1100);
  EXPECT_EQ(stat["tiers"][0]["tier"], "dram");
  EXPECT_EQ(stat["tiers"][0]["sealed_bytes"], record_bytes);
  EXPECT_EQ(stat["codecs"][0]["codec"], "raw");
  EXPECT_EQ(stat["codecs"][0]["record_bytes"], record_bytes);
}

TEST_F(CliService, GetTakesKeysWithoutAFile) {
  ASSERT_EQ(Kvstow({"put", kFixture, "--codec=raw"}).status, 0);
  std::string keys;
  for (const Json& line : Kvstow({"key", kFixture, "--json"}).lines()) {
    keys += (keys.empty() ? "" : ",") + line["key"].get<std::string>();
  }
  const Result got = Kvstow({"get", "--keys", keys, "-o", Path("back"), "--compare", kFixture});
  EXPECT_EQ(got.status, 0) << got.err;
  const auto back = SafetensorsFile::Open(Path("back"));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(*back->FindMetadata("model"), "SmolLM2-135M-Instruct");
}

TEST_F(CliService, DeleteForgetsTheTenantsBlocksOnly) {
  ASSERT_EQ(Kvstow({"put", kFixture, "--tenant=a"}).status, 0);
  ASSERT_EQ(Kvstow({"put", kFixture, "--tenant=b"}).status, 0);
  EXPECT_THAT(Kvstow({"delete", kFixture, "--tenant=a"}).out, HasSubstr("deleted 4 of 4"));
  EXPECT_EQ(Kvstow({"get", kFixture, "--tenant=a"}).status, 1);
  EXPECT_EQ(Kvstow({"get", kFixture, "--tenant=b"}).status, 0);
  EXPECT_THAT(Kvstow({"delete", kFixture, "--tenant=a"}).out, HasSubstr("deleted 0 of 4"));
}

TEST_F(CliService, VerifyNamesABadRecordOnDiskOnce) {
  ASSERT_EQ(Kvstow({"put", kFixture, "--codec=raw", "--durable"}).status, 0);
  EXPECT_EQ(Kvstow({"verify"}).status, 0);
  ASSERT_EQ(daemon_.Terminate(), 0);
  for (const auto& entry : std::filesystem::recursive_directory_iterator(daemon_.nvme_path())) {
    if (entry.path().extension() != ".blob" || entry.file_size() < 5'000'000) continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(2'000'000);
    const char flipped = static_cast<char>(file.get() ^ 1);
    file.seekp(2'000'000);
    file.put(flipped);
  }
  ASSERT_TRUE(daemon_.Start()) << daemon_.log();
  const Result bad = Kvstow({"verify", "--json"});
  EXPECT_EQ(bad.status, 1);
  ASSERT_EQ(bad.lines()[0]["bad"], 1) << bad.out;
  EXPECT_THAT(Kvstow({"key", kFixture}).out,
              HasSubstr(bad.lines()[0]["bad_keys"][0].get<std::string>()));
  EXPECT_EQ(Kvstow({"verify"}).status, 0);  // dropped: now it is a miss
  const Result got = Kvstow({"get", kFixture, "--compare", kFixture, "--allow-missing", "--json"});
  EXPECT_EQ(got.status, 0) << got.err;
  EXPECT_EQ(got.lines()[0]["found"], 3);
}

TEST_F(CliService, EvalKeepsItsBoundsAndSeesAWrongCodec) {
  const std::string probe = std::string("--probe=") + kProbe;
  const Result kept = Kvstow({"eval", kFixture, probe, "--codecs=raw,int8,safe,tiny", "--put",
                              "--check", "--rounds=1", "--json"});
  EXPECT_EQ(kept.status, 0) << kept.err;
  ASSERT_EQ(kept.lines().size(), 4u);
  const Json raw = kept.lines()[0];
  EXPECT_EQ(raw["different_bytes"], 0);
  EXPECT_EQ(raw["bits_per_value"], 16.0);
  EXPECT_EQ(kept.lines()[1]["bits_per_value"], 8.25);  // d = 64: 8 bits and a scale of 16
  for (const Json& line : kept.lines()) EXPECT_GT(line["put_ratio"], 0) << line;
  // The same figures by layer and head: bits of keys and values are those of the whole.
  const std::string csv = Path("heads.csv");
  const std::string page = Path("eval.html");
  const Result heads = Kvstow({"eval", kFixture, probe, "--codecs=safe", "--rounds=1", "--by-head",
                               "--csv=" + csv, "--html=" + page});
  EXPECT_EQ(heads.status, 0) << heads.err;
  EXPECT_THAT(heads.out, HasSubstr("LAYER  HEAD"));
  std::ifstream csv_file(csv);
  const std::string csv_text(std::istreambuf_iterator<char>(csv_file), {});
  EXPECT_EQ(std::count(csv_text.begin(), csv_text.end(), '\n'), 1 + 1 + 30 * 3);
  EXPECT_THAT(csv_text, HasSubstr("\n\"safe\",29,2,"));
  EXPECT_TRUE(std::ifstream(page).good());
  // Throwaway tenants are gone again.
  EXPECT_EQ(Kvstow({"stat", "--json"}).lines()[0]["blocks"], 16);
  // A tenant named raw whose blocks are not.
  ASSERT_EQ(Kvstow({"put", kFixture, "--codec=int8", "--tenant=wrong-raw"}).status, 0);
  const Result broken = Kvstow(
      {"eval", kFixture, probe, "--codecs=raw", "--tenant-prefix=wrong-", "--check", "--rounds=1"});
  EXPECT_EQ(broken.status, 1);
  EXPECT_THAT(broken.err, HasSubstr("bytes differ"));
  EXPECT_THAT(broken.out, HasSubstr("BROKEN"));
  // What was never put is said with the command that puts it.
  const Result missing = Kvstow({"eval", kFixture, probe, "--codecs=tq4"});
  EXPECT_EQ(missing.status, 1);
  EXPECT_THAT(missing.err, HasSubstr("--codec tq4 --tenant tq4"));
}

TEST_F(CliService, PingWaitsForADaemonThatStartsLater) {
  daemon_.Kill();
  testing::ChildProcess ping(
      {testing::CliBinary(), "ping", "--wait=60s", "--target=" + daemon_.target()});
  ASSERT_TRUE(daemon_.Start()) << daemon_.log();
  EXPECT_EQ(ping.WaitForExit(absl::Seconds(60)), 0) << ping.output();
  EXPECT_THAT(ping.output(), HasSubstr("answers in"));
}

TEST_F(CliService, DoctorFindsTheServiceAndItsVersion) {
  const Result doctor = Kvstow({"doctor", "--json"});
  EXPECT_EQ(doctor.status, 0);
  const Json service = doctor.lines().back();
  EXPECT_EQ(service["what"], "service");
  EXPECT_EQ(service["state"], "ok");
  EXPECT_THAT(service["found"].get<std::string>(), HasSubstr(std::string(CliVersion())));
}

// As a process of its own: it forks. Once against the daemon here, once with its own.
TEST_F(CliService, BenchVerifiesBytesAndReportsEachPathBesideItsCeiling) {
  for (const std::string& target : {"--target=" + daemon_.target(), std::string()}) {
    std::vector<std::string> words = {
        testing::CliBinary(), "bench",  "--path=shm,grpc", "--preset=lossless,safe",
        "--total=8MiB",       "--json", "--rounds=1",      "--blocks-per-call=4"};
    if (!target.empty()) words.push_back(target);
    testing::ChildProcess bench(words);
    ASSERT_EQ(bench.WaitForExit(absl::Seconds(120)), 0) << bench.output();
    const std::vector<Json> lines = Result{0, bench.output(), ""}.lines();
    ASSERT_EQ(lines.size(), 15u) << bench.output();
    EXPECT_EQ(lines[0]["case"], "memcpy");
    const auto expect_line = [&](int i, const std::string& name, const std::string& ceiling) {
      EXPECT_EQ(lines[i]["case"], name);
      EXPECT_EQ(lines[i]["ceiling"], ceiling);
      EXPECT_GT(lines[i]["ratio"], 0);
      EXPECT_GE(lines[i]["p99_ms"], lines[i]["p50_ms"]);
      EXPECT_TRUE(lines[i].contains("cpu_s_per_gb"));
    };
    expect_line(5, "shm/put", "memcpy");
    expect_line(6, "shm/get", "memcpy");
    expect_line(7, "shm/copy/put", "memcpy");
    expect_line(8, "shm/copy/get", "memcpy");
    expect_line(9, "shm/safe/put", "memcpy");
    expect_line(11, "grpc/put", "socket/unix/put");
    expect_line(12, "grpc/get", "socket/unix/get");
    expect_line(14, "grpc/safe/get", "socket/unix/get");
  }
  EXPECT_EQ(Kvstow({"stat", "--json"}).lines()[0]["blocks"], 0);  // it cleans up
}

// So slow a wire that nothing but the wire counts, however busy the machine is.
TEST_F(CliService, OverASlowWireQuantizedBlocksComeAsMuchFasterAsTheyAreSmaller) {
  testing::ChildProcess bench({testing::CliBinary(), "bench", "--path=grpc", "--wire-limit=25MB/s",
                               "--preset=lossless,safe", "--total=8MiB", "--blocks-per-call=4",
                               "--rounds=1", "--json", "--target=" + daemon_.target()});
  ASSERT_EQ(bench.WaitForExit(absl::Seconds(120)), 0) << bench.output();
  const std::vector<Json> lines = Result{0, bench.output(), ""}.lines();
  ASSERT_EQ(lines.size(), 5u) << bench.output();
  EXPECT_EQ(lines[0]["case"], "wire");
  EXPECT_EQ(lines[0]["gb_per_s"], 0.025);
  for (const int lossless : {1, 2}) {
    EXPECT_EQ(lines[lossless]["ceiling"], "wire");
    EXPECT_GT(lines[lossless]["ratio"], 0.7) << bench.output();
    EXPECT_LT(lines[lossless]["ratio"], 1.1) << "faster than the wire: " << bench.output();
  }
  EXPECT_EQ(lines[4]["case"], "grpc/safe/get");
  EXPECT_EQ(lines[4]["ceiling"], "grpc/get");
  if (testing::kIsSanitized) return;  // its codecs are slower than any wire
  for (const int safe : {3, 4}) EXPECT_GT(lines[safe]["ratio"], 3.3) << bench.output();
}

}  // namespace
}  // namespace kvstow
