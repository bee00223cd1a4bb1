// BlockReceiver: turns the frames of a Get into whole, checked blocks. Private to the client
// library.
//
// A block is complete when every unit that is wanted is there and fits: key, fingerprint, order,
// codec, length and XXH3. Only then is it handed on; until then, and for ever where something is
// wrong, nothing of it is seen. Units in memory that another process may change are handed on
// without the last of these checks: who reads them checks what was read. Holds one block.
//
// Thread safety: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/cpp/calibration_cache.h"
#include "client/cpp/kv_client.h"
#include "proto/frames.h"

namespace kvstow {

// What was asked for of a complete block: its units in plane order, as they are stored.
struct ReceivedBlock {
  struct Unit {
    CodecId codec = CodecId::kRaw;
    uint64_t xxh3 = 0;
    bool is_checked = true;  // false: `xxh3` is what the bytes should have
    absl::Span<const std::byte> bytes;
  };
  int32_t block_idx = 0;
  std::vector<Unit> units;
  std::shared_ptr<const Calibration> calibration;  // that the units need; null: none
};

// What a check finds wrong: kDataLoss.
absl::Status ChecksumDiffers(int32_t plane_idx);

// Where a service that writes raw units in place has them.
struct PlacedUnits {
  absl::Span<std::byte> memory;   // the window
  std::vector<uint64_t> offsets;  // in the window, of each plane of the first block

  uint64_t OffsetOf(size_t plane, int64_t block_idx, int64_t unit_bytes) const {
    return offsets[plane] + static_cast<uint64_t>(block_idx * unit_bytes);
  }
};

// Bytes of these units of a block at most, each aligned as in a payload.
int64_t MaxBlockBytes(const BlockLayout& layout, absl::Span<const int32_t> planes);

class BlockReceiver {
 public:
  // Block i of the frames is block `places[i]` of what the caller asked for, and is called so.
  // `planes`: those that were asked for, ascending. All three must outlive this.
  BlockReceiver(const Model& model, CalibrationCache& calibrations,
                absl::Span<const int32_t> planes, absl::Span<const BlockKey> keys,
                absl::Span<const int32_t> places);

  // Raw units may be there, those of all blocks within the memory. Must outlive this.
  void ExpectPlaced(const PlacedUnits* placed) { placed_ = placed; }

  // Takes the next frame. Returns the block that it completes, valid until the next call, or null.
  // An error is one of the stream: what comes after it has no meaning.
  absl::StatusOr<const ReceivedBlock*> OnFrame(const GetFrameHeader& header,
                                               const FramePayload& payload);

  // The block that was handed on last did not stand its reader's check.
  void Refuse(const absl::Status& why) { EndCorrupt(std::string(why.message())); }

  // No more frames: blocks without an end get `status`, or kDataLoss where that is OK.
  void OnEnd(const absl::Status& status);

  // Per key, after OnEnd: OK, kNotFound, kDataLoss, or why it did not come.
  const std::vector<absl::Status>& statuses() const { return statuses_; }
  // Blocks that came and did not stand the checks.
  const std::vector<BlockKey>& corrupt_keys() const { return corrupt_; }
  // After OnEnd: forgets the blocks that the stream had not come to an end of, for somebody who
  // asks for them again. Those before keep their statuses: their rows may be written.
  void DropUnfinished() { statuses_.resize(static_cast<size_t>(num_finished_)); }
  // Blocks of which the service said something.
  int64_t num_answered() const { return num_answered_; }
  int64_t received_bytes() const { return received_bytes_; }

 private:
  enum class Progress { kNone, kSome, kDone };

  void StartBlock(int64_t block_idx);
  absl::Status CheckFirstFrame(const GetFrameHeader& header) const;
  // May ask the service for it. kNotFound: it has none of that name.
  absl::Status FindCalibration(const GetFrameHeader& header);
  absl::Status TakeUnits(const GetFrameHeader& header, const FramePayload& frame);
  absl::Status TakePlaced(const GetFrameHeader& header);
  absl::StatusOr<CodecId> CheckUnit(int32_t plane_idx, uint32_t codec, uint32_t unit_bytes) const;
  void End(absl::StatusCode code, const std::string& why);
  void EndCorrupt(const std::string& why);

  const Model& model_;
  CalibrationCache& calibrations_;
  const absl::Span<const int32_t> planes_;
  const absl::Span<const BlockKey> keys_;
  const absl::Span<const int32_t> places_;
  std::vector<absl::Status> statuses_;
  std::vector<BlockKey> corrupt_;
  int64_t num_answered_ = 0;
  int64_t num_finished_ = 0;  // when the stream ended
  int64_t received_bytes_ = 0;

  const PlacedUnits* placed_ = nullptr;

  // The block in progress.
  int64_t block_idx_ = -1;
  Progress progress_ = Progress::kDone;
  std::deque<FramePayload> payloads_;    // units point into them: they must not move
  std::unique_ptr<std::byte[]> memory_;  // for units that came in pieces; holds a whole block
  int64_t memory_bytes_ = 0;
  int64_t used_bytes_ = 0;
  ReceivedBlock block_;
};

}  // namespace kvstow
