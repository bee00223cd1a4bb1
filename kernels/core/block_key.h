// BlockKey: the name of a block. 256 bits, never shortened.
//
//   KeyContext context{.fingerprint = spec.Fingerprint(), .tenant = "team-a"};
//   std::vector<BlockKey> keys = ChainKeys(context, tokens, spec.tokens_per_block);
//
// A key covers the model's fingerprint, the tenant, the adapter, multimodal content and every token
// from the start of the prompt to the end of the block. It does not cover the codec or the
// parallelism: one key, one sealed record.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "kernels/core/digest.h"

namespace kvstow {

using BlockKey = Digest;
using BlockKeyHash = DigestHash;

// What, besides tokens, decides whose KV a block is.
struct KeyContext {
  Digest fingerprint;       // of the ModelSpec
  std::string tenant;       // salt of the tenant; "" is the default tenant
  std::string lora_digest;  // digest of the adapter's weights, not its name; "" for none
  std::vector<std::string> multimodal_digests;  // in prompt order
};

// The parent of a prompt's first block: SHA-256 over the length-prefixed fields
// "kvstow.chain.1", fingerprint, tenant, lora_digest, number of multimodal digests, each of them.
BlockKey RootKey(const KeyContext& context);

// SHA-256 over the length-prefixed fields "kvstow.block.1", parent, token ids (little-endian
// int32).
BlockKey ChildKey(const BlockKey& parent, absl::Span<const int32_t> block_tokens);

// SHA-256 over "kvstow.engine_block.1", RootKey(context), the engine's block hash: for engines that
// already chain their own hashes (vLLM, SGLang). `engine_hash` has at least 16 bytes.
BlockKey EngineBlockKey(const KeyContext& context, std::string_view engine_hash);

// Keys of the full blocks of `tokens`, first block first; a partial tail has no key.
// tokens.size() / tokens_per_block keys.
std::vector<BlockKey> ChainKeys(const KeyContext& context, absl::Span<const int32_t> tokens,
                                int32_t tokens_per_block);

}  // namespace kvstow
