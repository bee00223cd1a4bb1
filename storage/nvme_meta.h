// What the disk tier keeps of a block beside its record: enough to rebuild the index at start
// without reading the records. FORMAT.md has the bytes.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "kernels/core/block_key.h"
#include "storage/block_info.h"

namespace kvstow {

inline constexpr size_t kNvmeMetaBytes = 60;

// 60 bytes with a CRC32C that covers the key too.
std::string EncodeNvmeMeta(const BlockInfo& block);

// nullopt where the bytes are damaged, belong to another key, or are of another version.
std::optional<BlockInfo> DecodeNvmeMeta(const BlockKey& key, std::string_view bytes);

}  // namespace kvstow
