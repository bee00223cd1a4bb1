#include "storage/policy_state.h"

#include <unistd.h>

#include <bit>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/core/check.h"
#include "kernels/core/checksum.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/synced_file.h"

namespace kvstow {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr char kName[] = "policy.state";
constexpr char kMagic[8] = {'K', 'V', 'S', 'T', 'P', 'O', 'L', '\n'};
constexpr uint32_t kVersion = 1;
constexpr size_t kNameBytes = 16;  // of a policy, padded with zeros
constexpr uint32_t kTiersMax = 4;

struct FileHeader {
  char magic[8];
  uint32_t version;
  uint32_t num_tiers;
  char policy[kNameBytes];
};

uint64_t ChecksumOf(std::string_view bytes) {
  return Xxh3({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()});
}

template <typename T>
void Append(std::string& out, const T& value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Takes a value from the front; false where there are too few bytes.
template <typename T>
bool Take(std::string_view& bytes, T& value) {
  if (bytes.size() < sizeof(value)) return false;
  std::memcpy(&value, bytes.data(), sizeof(value));
  bytes.remove_prefix(sizeof(value));
  return true;
}

// A list: its length, then its items as they are in memory.
template <typename T>
void AppendList(std::string& out, const std::vector<T>& items) {
  Append(out, static_cast<uint64_t>(items.size()));
  if (!items.empty()) {
    out.append(reinterpret_cast<const char*>(items.data()), items.size() * sizeof(T));
  }
}

template <typename T>
bool TakeList(std::string_view& bytes, std::vector<T>& items) {
  uint64_t count = 0;
  if (!Take(bytes, count) || count > bytes.size() / sizeof(T)) return false;
  items.resize(count);
  if (count > 0) std::memcpy(items.data(), bytes.data(), count * sizeof(T));
  bytes.remove_prefix(count * sizeof(T));
  return true;
}

// A turn as it is stored.
struct StoredTurn {
  uint64_t number;
  double time_s;
  int64_t input_tokens;
  int64_t output_tokens;
  int64_t parent_tokens;
  uint64_t parent;
  int32_t num_blocks;
  int32_t full_blocks;
  int32_t seen_blocks;
  int32_t turn;
  uint64_t continues;
};
static_assert(sizeof(StoredTurn) == 72 && sizeof(TurnHistory::Block) == 40 &&
              sizeof(TurnHistory::Session) == 24);

StoredTurn Stored(const policy::Request& turn) {
  return {turn.number,        turn.time_s, turn.input_tokens, turn.output_tokens,
          turn.parent_tokens, turn.parent, turn.num_blocks,   turn.full_blocks,
          turn.seen_blocks,   turn.turn,   turn.continues};
}

policy::Request Unstored(const StoredTurn& turn) {
  return {.number = turn.number,
          .time_s = turn.time_s,
          .input_tokens = turn.input_tokens,
          .output_tokens = turn.output_tokens,
          .num_blocks = turn.num_blocks,
          .full_blocks = turn.full_blocks,
          .seen_blocks = turn.seen_blocks,
          .turn = turn.turn,
          .continues = turn.continues != 0,
          .parent = turn.parent,
          .parent_tokens = turn.parent_tokens};
}

std::string PathOf(const std::string& dir) { return (std::filesystem::path(dir) / kName).string(); }

}  // namespace

std::string EncodePolicyState(const PolicyState& state) {
  KVSTOW_CHECK(state.policy.size() < kNameBytes && state.learned.size() <= kTiersMax);
  FileHeader header = {};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kVersion;
  header.num_tiers = static_cast<uint32_t>(state.learned.size());
  std::memcpy(header.policy, state.policy.data(), state.policy.size());
  std::string out;
  Append(out, header);
  for (const std::vector<double>& numbers : state.learned) AppendList(out, numbers);
  std::vector<StoredTurn> turns;
  for (const policy::Request& turn : state.history.turns) turns.push_back(Stored(turn));
  AppendList(out, turns);
  AppendList(out, state.history.blocks);
  AppendList(out, state.history.sessions);
  Append(out, ChecksumOf(out));
  KVSTOW_CHECK(static_cast<int64_t>(out.size()) <= kPolicyStateBytesMax);
  return out;
}

absl::StatusOr<PolicyState> DecodePolicyState(std::string_view bytes) {
  const auto damaged = [&](std::string_view what) {
    return absl::DataLossError(
        absl::StrCat("policy state of ", bytes.size(), " bytes: ", std::string(what)));
  };
  FileHeader header;
  uint64_t checksum = 0;
  if (bytes.size() < sizeof(header) + sizeof(checksum)) return damaged("too short");
  if (static_cast<int64_t>(bytes.size()) > kPolicyStateBytesMax) return damaged("too long");
  std::string_view rest = bytes.substr(0, bytes.size() - sizeof(checksum));
  std::memcpy(&checksum, bytes.data() + rest.size(), sizeof(checksum));
  if (checksum != ChecksumOf(rest)) return damaged("its checksum differs");
  Take(rest, header);
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) return damaged("no such file");
  if (header.version != kVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("policy state of version ", header.version, ", this build reads ", kVersion));
  }
  if (header.policy[kNameBytes - 1] != '\0' || header.num_tiers > kTiersMax) {
    return damaged("bad header");
  }
  PolicyState state{.policy = header.policy};
  for (uint32_t i = 0; i < header.num_tiers; ++i) {
    if (!TakeList(rest, state.learned.emplace_back())) return damaged("bad list of numbers");
  }
  std::vector<StoredTurn> turns;
  if (!TakeList(rest, turns) || !TakeList(rest, state.history.blocks) ||
      !TakeList(rest, state.history.sessions)) {
    return damaged("bad list of turns");
  }
  for (const StoredTurn& turn : turns) state.history.turns.push_back(Unstored(turn));
  if (!rest.empty()) return damaged("bytes left over");
  if (!state.history.IsSound()) return damaged("its turns cannot have been");
  return state;
}

absl::Status WritePolicyState(const std::string& dir, const PolicyState& state) {
  return WriteSyncedFile(dir, kName, EncodePolicyState(state));
}

absl::StatusOr<PolicyState> ReadPolicyState(const std::string& dir) {
  RemoveUnfinishedWrites(dir, kName);
  KVSTOW_ASSIGN_OR_RETURN(const std::string bytes,
                          ReadWholeFile(PathOf(dir), kPolicyStateBytesMax));
  return DecodePolicyState(bytes);
}

void SetPolicyStateAside(const std::string& dir) {
  const std::string path = PathOf(dir);
  if (rename(path.c_str(), (path + ".broken").c_str()) != 0) unlink(path.c_str());
}

}  // namespace kvstow
