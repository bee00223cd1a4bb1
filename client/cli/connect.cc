#include "client/cli/connect.h"

#include <unordered_set>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

constexpr int32_t kFindPageSize = 10'000;  // the largest the service gives

}  // namespace

absl::Status Service::Explain(const absl::Status& status) const {
  if (status.ok()) return status;
  std::string message(status.message());
  if (status.code() == absl::StatusCode::kUnavailable) {
    const bool is_unix = absl::StartsWith(target, "unix:");
    absl::StrAppend(&message, "; start one: kvstow serve ",
                    is_unix ? "--listen.unix_socket=" : "--listen.tcp=",
                    is_unix ? target.substr(5) : target, " (or is --target wrong?)");
  } else if (status.code() == absl::StatusCode::kDeadlineExceeded) {
    absl::StrAppend(&message, "; look at kvstow stat, or give more time with --timeout");
  } else {
    return status;
  }
  return absl::Status(status.code(), message);
}

std::string NormalTarget(const std::string& text) {
  return absl::StartsWith(text, "/") ? absl::StrCat("unix:", text) : text;
}

absl::StatusOr<Service> ConnectTo(const std::string& target, absl::Duration timeout) {
  KvClientOptions options;
  options.target = NormalTarget(target);
  options.data_timeout = timeout;
  options.control_timeout = std::min(options.control_timeout, timeout);
  Service service;
  service.target = options.target;
  KVSTOW_ASSIGN_OR_RETURN(service.kv, KvClient::Create(options));
  KVSTOW_ASSIGN_OR_RETURN(service.admin, AdminClient::Create(options));
  return service;
}

absl::StatusOr<Service> Connect(const Args& args) {
  KVSTOW_ASSIGN_OR_RETURN(const absl::Duration timeout, args.Duration("timeout"));
  absl::StatusOr<Service> service = ConnectTo(args.Text("target"), timeout);
  if (!service.ok()) return UsageError(std::string(service.status().message()));
  return service;
}

absl::StatusOr<KvFileOverrides> ReadOverrides(const Args& args) {
  KvFileOverrides overrides{.model = args.Text("model"),
                            .weights = args.Text("weights"),
                            .rope = args.Text("rope"),
                            .tokenizer = args.Text("tokenizer")};
  if (args.Has("tokens-per-block")) {
    KVSTOW_ASSIGN_OR_RETURN(const int64_t tokens,
                            args.Int("tokens-per-block", 32, ModelSpec::kMaxTokensPerBlock));
    overrides.tokens_per_block = static_cast<int32_t>(tokens);
  }
  return overrides;
}

absl::StatusOr<KeyContext> ReadContext(const Args& args, const ModelSpec& spec) {
  KeyContext context{.fingerprint = spec.Fingerprint(), .tenant = args.Text("tenant")};
  const std::string lora = args.Text("lora");
  const bool is_hex = lora.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos;
  if (!is_hex || lora.size() % 2 != 0 || lora.size() > 128) {
    return UsageError(absl::StrCat("--lora is \"", lora,
                                   "\", want the adapter's digest: an even number of hexadecimal "
                                   "digits, at most 128"));
  }
  context.lora_digest = absl::HexStringToBytes(lora);
  return context;
}

absl::StatusOr<Digest> FindCalibration(absl::Span<const ListedCalibration> list,
                                       const std::string& prefix) {
  Digest found;
  int num_found = 0;
  for (const ListedCalibration& listed : list) {
    if (!listed.id.ToHex().starts_with(prefix)) continue;
    found = listed.id;
    ++num_found;
  }
  if (num_found == 1) return found;
  return UsageError(absl::StrCat("calibration \"", prefix, "\": ", num_found, " of ", list.size(),
                                 " at the service begin so, want one (kvstow calibration ls)"));
}

absl::StatusOr<Digest> ReadCalibration(const Args& args, const Service& service,
                                       const Digest& fingerprint) {
  if (!args.Has("calibration")) return Digest();
  const absl::StatusOr<std::vector<ListedCalibration>> list =
      service.admin->ListCalibrations(fingerprint);
  if (!list.ok()) return service.Explain(list.status());
  return FindCalibration(*list, args.Text("calibration"));
}

absl::StatusOr<std::vector<ListedBlock>> FindBlocks(AdminClient& admin, const Digest& fingerprint,
                                                    absl::Span<const BlockKey> keys) {
  const std::unordered_set<BlockKey, BlockKeyHash> wanted(keys.begin(), keys.end());
  std::vector<ListedBlock> found;
  ListOptions options{.page_size = kFindPageSize, .fingerprint = fingerprint};
  for (int page_idx = 0; page_idx < kFindPagesMax && found.size() < wanted.size(); ++page_idx) {
    KVSTOW_ASSIGN_OR_RETURN(BlockPage page, admin.ListBlocks(options));
    for (ListedBlock& block : page.blocks) {
      if (wanted.contains(block.key)) found.push_back(std::move(block));
    }
    if (page.next_page_token.empty()) break;
    options.page_token = page.next_page_token;
  }
  return found;
}

}  // namespace kvstow
