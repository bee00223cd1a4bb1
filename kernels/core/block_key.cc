#include "kernels/core/block_key.h"

#include "kernels/core/check.h"

namespace kvstow {

BlockKey RootKey(const KeyContext& context) {
  DigestBuilder builder("kvstow.chain.1");
  builder.Add(context.fingerprint).Add(context.tenant).Add(context.lora_digest);
  builder.AddU64(context.multimodal_digests.size());
  for (const std::string& digest : context.multimodal_digests) builder.Add(digest);
  return builder.Finish();
}

BlockKey ChildKey(const BlockKey& parent, absl::Span<const int32_t> block_tokens) {
  return DigestBuilder("kvstow.block.1").Add(parent).AddTokens(block_tokens).Finish();
}

BlockKey EngineBlockKey(const KeyContext& context, std::string_view engine_hash) {
  KVSTOW_CHECK(engine_hash.size() >= 16);
  return DigestBuilder("kvstow.engine_block.1").Add(RootKey(context)).Add(engine_hash).Finish();
}

std::vector<BlockKey> ChainKeys(const KeyContext& context, absl::Span<const int32_t> tokens,
                                int32_t tokens_per_block) {
  KVSTOW_CHECK(tokens_per_block > 0);
  const size_t num_blocks = tokens.size() / tokens_per_block;
  std::vector<BlockKey> keys;
  keys.reserve(num_blocks);
  BlockKey parent = RootKey(context);
  for (size_t i = 0; i < num_blocks; ++i) {
    parent = ChildKey(parent, tokens.subspan(i * tokens_per_block, tokens_per_block));
    keys.push_back(parent);
  }
  return keys;
}

}  // namespace kvstow
