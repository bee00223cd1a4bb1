#include "tests/e2e/sequences.h"

namespace kvstow::testing {

std::string_view CodecOf(uint64_t sequence) {
  constexpr std::string_view kCodecs[] = {"raw", "int8", "k=tqm4,v=tq4"};
  return kCodecs[sequence % 3];
}

CodecChoice ChoiceOf(uint64_t sequence) { return ParseCodecChoice(CodecOf(sequence)).value(); }

KvData DataOf(uint64_t sequence) { return KvData(SmallModel(), sequence, kBlocksPerSequence); }

std::vector<BlockKey> KeysOf(const Model& model, const KvData& data) {
  return ChainKeys({.fingerprint = model.fingerprint}, data.tokens(), model.spec.tokens_per_block);
}

SequenceRead ReadSequence(KvClient& client, const Model& model, uint64_t sequence) {
  const KvData data = DataOf(sequence);
  const KvData want = data.AfterCodec(ChoiceOf(sequence).pair);
  const KvData got = KvData::Empty(SmallModel(), kBlocksPerSequence);
  const std::vector<LayerRows> layers = got.layers();
  const absl::StatusOr<GetSummary> summary = client.Get(model, KeysOf(model, data), layers);
  SequenceRead read;
  read.call = summary.status();
  for (int block = 0; block < kBlocksPerSequence; ++block) {
    if (summary.ok()) read.blocks[block] = summary->blocks[block];
    const bool is_hit = summary.ok() && summary->blocks[block].ok();
    // What came damaged may be written in part: shared memory is checked while it is copied.
    const bool is_free = summary.ok() && absl::IsDataLoss(summary->blocks[block]);
    const bool is_right = is_hit ? got.EqualsBlock(want, block) : is_free || got.IsUntouched(block);
    if (is_hit && is_right) ++read.num_hits;
    if (!is_right) ++read.num_wrong;
  }
  return read;
}

}  // namespace kvstow::testing
