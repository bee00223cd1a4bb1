// Block keys: equal bytes with another implementation, and no two different blocks under one key.
#include "kernels/core/block_key.h"

#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace kvstow {
namespace {

KeyContext Context() {
  KeyContext context;
  for (int i = 0; i < 32; ++i) context.fingerprint.bytes[i] = static_cast<std::byte>(i);
  context.tenant = "team-a";
  context.lora_digest = "sha256:lora";
  context.multimodal_digests = {"img-1", "img-2"};
  return context;
}

// Computed with Python's hashlib from the written definition.
TEST(BlockKey, GivesTheKeysOfAnotherImplementation) {
  EXPECT_EQ(RootKey({}).ToHex(),
            "891f167644d5c4787c4c77968d44bc8165d95f195ec0a6d2aa1ee312819fe1d9");
  EXPECT_EQ(RootKey(Context()).ToHex(),
            "a2557a7590fce092368f4068c83a0610a2eadbfde19409e8a0f6179c62aa158f");
  const std::vector<int32_t> tokens = {1, -2, 300, 70000, 5, 6, 7, 8, 9};
  const std::vector<BlockKey> keys = ChainKeys(Context(), tokens, 4);
  ASSERT_EQ(keys.size(), 2u);  // the ninth token is a partial block
  EXPECT_EQ(keys[0].ToHex(), "7edcdd06017e8b49ce9536cd310e3122ba99ca665bab4a685757a9e85623469c");
  EXPECT_EQ(keys[1].ToHex(), "4d35035440fcbd475cbc9d6727b75dba9e7ca06433252e027f28a5ff04eecee3");
  EXPECT_EQ(EngineBlockKey(Context(), "0123456789abcdef").ToHex(),
            "b5872cdbd7bf930b3addc8a3336fabe4ec718e3459ff68007d3cf4ce6dfbc3a5");
}

TEST(BlockKey, AnyOneFieldChangedGivesAnotherKey) {
  std::vector<KeyContext> contexts(9, Context());
  contexts[1].fingerprint.bytes[31] ^= std::byte{1};
  contexts[2].tenant = "team-b";
  contexts[3].tenant = "";
  contexts[4].lora_digest = "sha256:lorb";
  contexts[5].multimodal_digests = {"img-2", "img-1"};
  contexts[6].multimodal_digests = {"img-1img-2"};
  contexts[7].multimodal_digests.clear();
  contexts[8].tenant = "team-asha256:lora";  // the same characters, cut elsewhere
  contexts[8].lora_digest = "";
  const std::vector<int32_t> tokens = {1, 2, 3, 4};
  std::set<std::string> keys;
  for (const KeyContext& context : contexts) {
    keys.insert(ChainKeys(context, tokens, 4)[0].ToHex());
    keys.insert(RootKey(context).ToHex());
    keys.insert(EngineBlockKey(context, std::string(16, 'h')).ToHex());
  }
  EXPECT_EQ(keys.size(), 3 * contexts.size());
}

TEST(BlockKey, EveryTokenFromTheStartCounts) {
  std::vector<int32_t> tokens(256);
  std::iota(tokens.begin(), tokens.end(), 0);
  const std::vector<BlockKey> want = ChainKeys(Context(), tokens, 64);
  ASSERT_EQ(want.size(), 4u);
  for (size_t i = 0; i < tokens.size(); ++i) {
    std::vector<int32_t> other = tokens;
    other[i] ^= 1 << 20;
    const std::vector<BlockKey> got = ChainKeys(Context(), other, 64);
    for (size_t block = 0; block < 4; ++block) {
      EXPECT_EQ(got[block] == want[block], block < i / 64) << "token " << i << " block " << block;
    }
  }
}

TEST(BlockKey, TokensAreCountedInWholeBlocks) {
  const std::vector<int32_t> tokens(200, 7);
  const absl::Span<const int32_t> all(tokens);
  EXPECT_TRUE(ChainKeys(Context(), {}, 64).empty());
  EXPECT_TRUE(ChainKeys(Context(), all.first(1), 64).empty());
  EXPECT_TRUE(ChainKeys(Context(), all.first(63), 64).empty());
  EXPECT_EQ(ChainKeys(Context(), all.first(64), 64).size(), 1u);
  EXPECT_EQ(ChainKeys(Context(), all.first(127), 64).size(), 1u);
  EXPECT_EQ(ChainKeys(Context(), all.first(192), 64).size(), 3u);
  EXPECT_EQ(ChainKeys(Context(), all, 64), ChainKeys(Context(), all.first(192), 64));
  // The same tokens in blocks of another size are other blocks.
  EXPECT_NE(ChainKeys(Context(), all.first(128), 64)[1],
            ChainKeys(Context(), all.first(128), 128)[0]);
  // Equal blocks at different places have different keys.
  const std::vector<BlockKey> keys = ChainKeys(Context(), all, 64);
  EXPECT_NE(keys[0], keys[1]);
}

TEST(BlockKeyDeathTest, EngineHashesAreNeverShort) {
  EXPECT_DEATH(EngineBlockKey(Context(), "short"), "check failed");
}

}  // namespace
}  // namespace kvstow
