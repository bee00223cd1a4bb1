// Connect: the service named by --target, and errors that say what to do next.
//
//   KVSTOW_ASSIGN_OR_RETURN(Service service, Connect(args));
//   const absl::StatusOr<ServiceStat> stat = service.admin->Stat();
//   if (!stat.ok()) return service.Explain(stat.status());
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cli/args.h"
#include "client/cli/kv_file.h"
#include "client/cpp/admin_client.h"
#include "client/cpp/kv_client.h"

namespace kvstow {

struct Service {
  std::string target;
  std::unique_ptr<KvClient> kv;
  std::unique_ptr<AdminClient> admin;

  // The same code; where the service does not answer, the message gets the command that helps.
  absl::Status Explain(const absl::Status& status) const;
};

// "/tmp/x.sock" -> "unix:/tmp/x.sock"; anything else stays.
std::string NormalTarget(const std::string& text);

// Reads --target and --timeout. Makes no call: that the service is there shows at the first one.
absl::StatusOr<Service> Connect(const Args& args);
absl::StatusOr<Service> ConnectTo(const std::string& target, absl::Duration timeout);

// --model, --weights, --rope, --tokenizer, --tokens-per-block: the options that change what a file
// says of itself, and their values.
inline constexpr Option kModelOption = {"model", "NAME", "instead of the file's model"};
inline constexpr Option kWeightsOption = {"weights", "DIGEST", "instead of the file's weights"};
inline constexpr Option kRopeOption = {"rope", "TEXT",
                                       "instead of the file's rope_base and layout"};
inline constexpr Option kTokenizerOption = {"tokenizer", "DIGEST",
                                            "instead of the file's tokenizer"};
inline constexpr Option kTokensPerBlockOption = {"tokens-per-block", "N",
                                                 "tokens of a block, a multiple of 32 (64)"};
absl::StatusOr<KvFileOverrides> ReadOverrides(const Args& args);

// --tenant and --lora.
inline constexpr Option kTenantOption = {"tenant", "NAME",
                                         "whose blocks; the default tenant is \"\""};
inline constexpr Option kLoraOption = {"lora", "HEX",
                                       "digest of the adapter's weights, at most 64 bytes"};
absl::StatusOr<KeyContext> ReadContext(const Args& args, const ModelSpec& spec);

// --calibration: the id, or the beginning of one, of a bundle that the service keeps for the model.
// Zero without the option: the model's only one. A usage error where none or several begin so.
inline constexpr Option kCalibrationOption = {
    "calibration", "HEX", "for calibrated codecs: which bundle, if the model has several"};
absl::StatusOr<Digest> ReadCalibration(const Args& args, const Service& service,
                                       const Digest& fingerprint);
// The one of `list` whose id begins with `prefix`. Usage errors.
absl::StatusOr<Digest> FindCalibration(absl::Span<const ListedCalibration> list,
                                       const std::string& prefix);

// What the service says of these blocks. Blocks that are gone are not in the result. Reads the
// whole list of the model, at most `kFindPagesMax` pages of 10,000 blocks.
inline constexpr int kFindPagesMax = 100;
absl::StatusOr<std::vector<ListedBlock>> FindBlocks(AdminClient& admin, const Digest& fingerprint,
                                                    absl::Span<const BlockKey> keys);

}  // namespace kvstow
