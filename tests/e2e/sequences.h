// Sequences: blocks whose every byte follows from a number, for processes that share nothing else.
//
//   const KvData data = DataOf(17);
//   client.Put(model, {.tokens = data.tokens(), .layers = data.layers(), .codec = ChoiceOf(17)});
//   const SequenceRead read = ReadSequence(client, model, 17);  // in any process
//   if (read.num_wrong > 0) ...
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "client/cpp/kv_client.h"
#include "tests/e2e/kv_data.h"

namespace kvstow::testing {

inline constexpr int kBlocksPerSequence = 2;

std::string_view CodecOf(uint64_t sequence);  // raw, int8 and k=tqm4,v=tq4 in turn
CodecChoice ChoiceOf(uint64_t sequence);
KvData DataOf(uint64_t sequence);  // of SmallModel()
std::vector<BlockKey> KeysOf(const Model& model, const KvData& data);

// What a Get of a whole sequence brought.
struct SequenceRead {
  absl::Status call;  // not OK: nothing came
  std::array<absl::Status, kBlocksPerSequence> blocks;
  int num_hits = 0;
  int num_wrong = 0;  // other bytes than were put, or rows of a block that missed were touched
};

SequenceRead ReadSequence(KvClient& client, const Model& model, uint64_t sequence);

}  // namespace kvstow::testing
