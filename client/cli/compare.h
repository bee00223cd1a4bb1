// CompareBlocks: are the bytes that came back those of the file?
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cli/kv_file.h"

namespace kvstow {

struct KvDifference {
  int64_t num_compared_bytes = 0;
  int64_t num_different_bytes = 0;
  std::string first;  // "layer 3, K, token 64"; empty when equal
};

// Compares the blocks whose status is OK: block i of `got` with tokens [i * tokens_per_block, ...)
// of `want`. kInvalidArgument: `want` has another shape or dtype, or fewer tokens than a block asks
// for. The model's name and weights are not compared.
absl::StatusOr<KvDifference> CompareBlocks(const KvBuffer& got, const KvFile& want,
                                           absl::Span<const absl::Status> blocks);

}  // namespace kvstow
