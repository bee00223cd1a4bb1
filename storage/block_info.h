// What is known of a block without touching its bytes: plain values for lists, statistics, the
// index.
#pragma once

#include <cstdint>

#include "kernels/codec/codec.h"
#include "kernels/core/block_key.h"
#include "kernels/core/digest.h"

namespace kvstow {

struct Location {
  bool in_hbm = false;
  bool in_dram = false;
  bool in_nvme = false;
  bool present() const { return in_hbm || in_dram || in_nvme; }
  bool operator==(const Location&) const = default;
};

// What List and Stat tell of a block, without touching its bytes.
struct BlockInfo {
  BlockKey key;
  Digest fingerprint;
  CodecPair codecs;
  Location location;
  int32_t num_tokens = 0;
  int64_t record_bytes = 0;
  int64_t logical_bytes = 0;
  bool is_pinned = false;
};

struct CodecStats {
  CodecPair codecs;
  int64_t num_blocks = 0;
  int64_t record_bytes = 0;
  int64_t logical_bytes = 0;
};

}  // namespace kvstow
