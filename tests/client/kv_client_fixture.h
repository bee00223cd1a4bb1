// KvClientTest: a client, a model, an engine's memory with KV in it and one without, and a fake
// service on a socket of its own.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "client/cpp/kv_client.h"
#include "tests/client/fake_service.h"
#include "tests/testing/rng.h"

namespace kvstow::testing {

inline constexpr int32_t kTokensPerBlock = 32;
inline constexpr int32_t kNumTokens = 3 * kTokensPerBlock + 5;

inline ModelSpec ToySpec() {
  ModelSpec spec;
  spec.name = "toy";
  spec.weights = "sha256:1";
  spec.kv_dtype = DType::kBf16;
  spec.groups = {{0, 2, LayerKind::kFull, 2, 64, 64}, {2, 1, LayerKind::kMla, 1, 96, 0}};
  spec.tokens_per_block = kTokensPerBlock;
  return spec;
}

// An engine's memory: [num_tokens, num_kv_heads, dim] of each layer and role.
struct EngineMemory {
  explicit EngineMemory(const BlockLayout& layout, int64_t num_tokens = kNumTokens) {
    for (int32_t l = 0; l < layout.num_layers(); ++l) {
      int64_t num_heads[2] = {0, 0};
      int64_t bytes[2] = {0, 0};
      for (int32_t i = 0; i < layout.num_planes_of_layer(l); ++i) {
        const PlaneInfo& plane = layout.plane(layout.first_plane_of_layer(l) + i);
        const int role = static_cast<int>(plane.role);
        ++num_heads[role];
        bytes[role] = plane.row_bytes / layout.tokens_per_block();
      }
      for (int role = 0; role < 2; ++role) {
        memory.emplace_back(num_tokens * num_heads[role] * bytes[role], std::byte{0xee});
      }
      LayerRows rows;
      rows.k = {memory[2 * l].data(), num_heads[0] * bytes[0], bytes[0]};
      if (num_heads[1] > 0) rows.v = {memory[2 * l + 1].data(), num_heads[1] * bytes[1], bytes[1]};
      layers.push_back(rows);
    }
  }
  // Finite bf16 values around one.
  void Fill(uint64_t seed) {
    Rng rng(seed);
    for (std::vector<std::byte>& plane : memory) {
      for (size_t i = 0; i + 1 < plane.size(); i += 2) {
        const uint16_t bits = FloatToBf16(static_cast<float>(rng.Gaussian()));
        std::memcpy(&plane[i], &bits, 2);
      }
    }
  }
  // Any bytes, fast.
  void FillBytes(uint64_t seed) {
    Rng rng(seed);
    for (std::vector<std::byte>& plane : memory) {
      for (size_t i = 0; i + 8 <= plane.size(); i += 8) {
        const uint64_t bits = rng.Next();
        std::memcpy(&plane[i], &bits, 8);
      }
    }
  }
  std::vector<std::vector<std::byte>> memory;  // K and V of each layer
  std::vector<LayerRows> layers;
};

// Bytes of tokens [first, first + count) of every plane.
inline std::vector<std::vector<std::byte>> TokensOf(const EngineMemory& memory, int64_t first,
                                                    int64_t count) {
  std::vector<std::vector<std::byte>> out;
  for (size_t i = 0; i < memory.memory.size(); ++i) {
    const LayerRows& rows = memory.layers[i / 2];
    const int64_t stride = i % 2 == 0 ? rows.k.token_stride_bytes : rows.v.token_stride_bytes;
    const std::byte* from = memory.memory[i].data() + first * stride;
    out.emplace_back(from, from + count * stride);
  }
  return out;
}

inline bool IsUntouched(const EngineMemory& memory, int64_t first, int64_t count) {
  for (const auto& bytes : TokensOf(memory, first, count)) {
    for (const std::byte b : bytes) {
      if (b != std::byte{0xee}) return false;
    }
  }
  return true;
}

inline std::vector<int32_t> Tokens(int32_t count = kNumTokens) {
  std::vector<int32_t> tokens(count);
  for (int32_t i = 0; i < count; ++i) tokens[i] = 7 * i + 1;
  return tokens;
}

inline std::string SocketPath() {
  const ::testing::TestInfo* info = ::testing::UnitTest::GetInstance()->current_test_info();
  // The name is not in it: a socket's path has at most 107 bytes.
  return "/tmp/kvstow_kv_client_test." + std::to_string(getpid()) + "." +
         std::to_string(std::hash<std::string>()(info->name()) % 1000000);
}

class KvClientTest : public ::testing::Test {
 protected:
  void SetUp() override {
    options_.target = server_.target();
    client_ = *KvClient::Create(options_);
    absl::StatusOr<Model> model = client_->RegisterModel(ToySpec());
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *model;
    source_ = std::make_unique<EngineMemory>(*model_.layout);
    source_->Fill(1);
    target_ = std::make_unique<EngineMemory>(*model_.layout);
  }
  ~KvClientTest() override { unlink(server_.target().substr(5).c_str()); }

  void UseTimeouts(absl::Duration control, absl::Duration data) {
    options_.control_timeout = control;
    options_.data_timeout = data;
    client_ = *KvClient::Create(options_);
  }

  PutRequest Request(const std::string& codec = "raw") {
    return {.tokens = tokens_, .layers = source_->layers, .codec = *ParseCodecChoice(codec)};
  }
  PutSummary PutAll(const std::string& codec = "raw") {
    absl::StatusOr<PutSummary> put = client_->Put(model_, Request(codec));
    EXPECT_TRUE(put.ok()) << put.status();
    return *put;
  }
  // Block `block_idx` of `target_` holds what `source_` holds.
  void ExpectBlock(int32_t block_idx) {
    EXPECT_EQ(TokensOf(*target_, block_idx * kTokensPerBlock, kTokensPerBlock),
              TokensOf(*source_, block_idx * kTokensPerBlock, kTokensPerBlock))
        << "block " << block_idx;
  }

  FakeServer server_{SocketPath()};
  FakeService& service_ = server_.service;
  KvClientOptions options_;
  std::unique_ptr<KvClient> client_;
  Model model_;
  std::vector<int32_t> tokens_ = Tokens();
  std::unique_ptr<EngineMemory> source_;
  std::unique_ptr<EngineMemory> target_;
};

}  // namespace kvstow::testing
