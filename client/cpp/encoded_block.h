// EncodedBlock: a block as the store keeps it, for tools, tests and services that pass it on.
//
//   KVSTOW_ASSIGN_OR_RETURN(std::vector<EncodedBlock> blocks, client->GetEncoded(model, keys));
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "kernels/codec/calibration.h"
#include "kernels/codec/codec.h"

namespace kvstow {

// What the store keeps of a block, fetched without decoding.
struct EncodedUnit {
  CodecId codec = CodecId::kRaw;
  uint64_t xxh3 = 0;  // as it was sealed with: who passes the unit on passes this on as well
  std::vector<std::byte> bytes;
};
struct EncodedBlock {
  absl::Status status;
  std::vector<EncodedUnit> units;
  std::shared_ptr<const Calibration> calibration;  // that they need; null: none
};

}  // namespace kvstow
