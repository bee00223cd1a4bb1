// Calibrations end to end: from samples to blocks that survive kill -9, and what a lost bundle
// costs.
#include "kernels/codec/calibration.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "client/cpp/admin_client.h"
#include "tests/e2e/store_fixture.h"

namespace kvstow::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

const char kSamples[] = KVSTOW_TEST_DATA "/smollm2_calibration.safetensors";
const char kKv[] = KVSTOW_TEST_DATA "/smollm2_kv.safetensors";
const char kProbe[] = KVSTOW_TEST_DATA "/smollm2_kv_probe.safetensors";

class CalibrationTest : public RunningDaemon {
 protected:
  CommandResult Kvstow(std::vector<std::string> words) const {
    words.insert(words.begin(), CliBinary());
    words.insert(words.end(), {"--target", daemon_->target()});
    return RunCommand(words, absl::Seconds(120));
  }
  std::string Path(const std::string& name) const { return folder_.path() + "/" + name; }

  // Any rotations will do where only bytes are compared.
  static Calibration Make(const Model& model) {
    std::vector<Calibration::Entry> entries;
    uint64_t seed = 1;
    for (const PlaneInfo& plane : model.layout->planes()) {
      entries.push_back({{plane.layer_idx, plane.role, plane.head_idx},
                         Rotation::Reflection(plane.dim, seed++).value()});
    }
    return Calibration::Create(model.fingerprint, Sha256("s"), std::move(entries)).value();
  }
  static void Upload(const Daemon& daemon, const Calibration& calibration) {
    const auto admin = AdminClient::Create({.target = daemon.target()}).value();
    const absl::StatusOr<ListedCalibration> listed = admin->PutCalibration(calibration.Serialize());
    ASSERT_TRUE(listed.ok()) << listed.status();
    ASSERT_EQ(listed->id, calibration.id());
  }
};

// The last line of a command's output as JSON.
nlohmann::json LastLine(const CommandResult& result) {
  const size_t end = result.output.find_last_not_of('\n');
  const size_t start = result.output.rfind('\n', end);
  return nlohmann::json::parse(
      result.output.substr(start == std::string::npos ? 0 : start + 1, end - start), nullptr,
      /*allow_exceptions=*/false);
}

TEST_F(CalibrationTest, FromSamplesToBlocksThatSurviveKillMinusNineWithTheQualityOfTheirBits) {
  StartDaemon({.dram = "64MiB", .nvme = "256MiB"});
  const CommandResult built =
      Kvstow({"calibrate", kSamples, "--upload", "-o", Path("b.kvc"), "--json"});
  ASSERT_EQ(built.status, 0) << built.output;
  const std::string id = LastLine(built).value("id", "");
  ASSERT_EQ(id.size(), 64u) << built.output;
  // The tenant under which eval looks for them.
  const CommandResult put =
      Kvstow({"put", kKv, "--codec", "olm4", "--tenant", "olm4", "--durable"});
  ASSERT_EQ(put.status, 0) << put.output;
  daemon_->Kill();
  ASSERT_TRUE(daemon_->Start()) << daemon_->log();
  const CommandResult eval =
      Kvstow({"eval", kKv, "--probe", kProbe, "--codecs", "olm4", "--rounds", "1", "--json"});
  ASSERT_EQ(eval.status, 0) << eval.output;
  const nlohmann::json verdict = LastLine(eval);
  // 4 bits and a scale of 16 bits per row of 64; 0.0095 is the error energy of Lloyd-Max.
  EXPECT_NEAR(verdict.value("bits_per_value", 0.0), 4.25, 0.01);
  EXPECT_GT(verdict.value("k_error", 0.0), 0.006);
  EXPECT_LT(verdict.value("k_error", 1.0), 0.0105);
  EXPECT_LT(verdict.value("v_error", 1.0), 0.0105);
  EXPECT_LT(verdict.value("attention_kl", 1.0), 0.03);

  daemon_->Kill();
  const std::string file = daemon_->nvme_path() + "/calibrations/" + id + ".kvc";
  ASSERT_TRUE(fs::remove(file)) << file;
  ASSERT_TRUE(daemon_->Start()) << daemon_->log();
  const CommandResult lost = Kvstow({"get", kKv, "--tenant", "olm4", "-o", Path("out"), "--json"});
  EXPECT_EQ(lost.status, 1) << lost.output;
  EXPECT_THAT(lost.output, HasSubstr("\"found\":0"));
  EXPECT_EQ(Counter("calibration_misses"), 4u);
  EXPECT_EQ(Counter("corrupt_blocks"), 0u);

  ASSERT_EQ(Kvstow({"calibration", "put", Path("b.kvc")}).status, 0);
  ASSERT_EQ(Kvstow({"put", kKv, "--codec", "olm4", "--tenant", "olm4"}).status, 0);
  EXPECT_THAT(Kvstow({"get", kKv, "--tenant", "olm4", "-o", Path("out"), "--json"}).output,
              HasSubstr("\"found\":4"));
}

TEST_F(CalibrationTest, WorkerAndServiceEncodeTheSameBytesAndAnyClientDecodesThem) {
  StartDaemon({.dram = "64MiB"});
  const Calibration calibration = Make(model_);
  Upload(*daemon_, calibration);
  const KvData kv(model_.spec, 1, 4);
  for (const std::string codec : {"olm4", "k=olm3,v=osu2", "oscar2"}) {
    const CodecChoice choice = ParseCodecChoice(codec).value();
    const KvData want = kv.AfterCodec(choice.pair, &calibration);
    for (const CompressAt where : {CompressAt::kService, CompressAt::kWorker}) {
      SCOPED_TRACE(codec);
      const std::vector<LayerRows> layers = kv.layers();
      const absl::StatusOr<PutSummary> put = client_->Put(
          model_, {.tokens = kv.tokens(), .layers = layers, .codec = choice, .compress_at = where});
      ASSERT_TRUE(put.ok()) << put.status();
      ASSERT_EQ(put->num_stored, 4) << put->first_refusal;
      EXPECT_EQ(CountHits(want), 4);
      EXPECT_EQ(CountHits(*daemon_->NewClient(), want), 4) << "a client that had to fetch it";
      ASSERT_TRUE(client_->Delete(put->keys).ok());
    }
  }
}

TEST_F(CalibrationTest, WithoutOneAPutIsRefusedAndSaysWhatToDo) {
  StartDaemon({.dram = "64MiB"});
  const KvData kv(model_.spec, 1, 2);
  const absl::StatusOr<PutSummary> put = Put(kv, "olm4");
  ASSERT_TRUE(put.ok()) << put.status();
  EXPECT_EQ(put->num_refused, 2);
  EXPECT_THAT(std::string(put->first_refusal.message()), HasSubstr("kvstow calibrate"));
}

TEST_F(CalibrationTest, APeersBlockBringsItsCalibrationAlong) {
  const TempFolder other_folder;
  Daemon other(other_folder, DaemonOptions{});
  ASSERT_TRUE(other.Start()) << other.log();
  StartDaemon({.extra_flags = {"--peers.list=" + other.target()}});
  const auto other_client = other.NewClient();
  ASSERT_TRUE(other_client->RegisterModel(model_.spec).ok());
  const Calibration calibration = Make(model_);
  Upload(other, calibration);
  const KvData kv(model_.spec, 1, 4);
  const std::vector<LayerRows> layers = kv.layers();
  const absl::StatusOr<PutSummary> put = other_client->Put(
      model_, {.tokens = kv.tokens(), .layers = layers, .codec = ParseCodecChoice("olm4").value()});
  ASSERT_TRUE(put.ok()) << put.status();
  const KvData want = kv.AfterCodec(ParseCodecChoice("olm4")->pair, &calibration);
  EXPECT_EQ(CountHits(want), 4);
  other.Kill();
  EXPECT_EQ(CountHits(want), 4) << "from our own memory, with our own calibration";
  EXPECT_EQ(Counter("peer_fetched"), 4u);
}

}  // namespace
}  // namespace kvstow::testing
