// Codecs: the table of KV quantization formats and of the backends that implement each of them.
//
//   const Codec* codec = FindCodec(CodecId::kTq4);
//   PlaneShape shape{.num_tokens = 64, .dim = 128, .role = Role::kKey, .dtype = DType::kBf16};
//   std::vector<std::byte> plane(codec->plane_bytes(shape));
//   EncodeResult result = BestBackend(*codec).encode(shape, rows, plane.data());
//
// A codec works on whole planes: the rows of one layer, role and KV head. The bytes it writes are a
// function of the rows alone: the scalar backend is the definition, every other backend gives the
// same bytes (tests/kernels/codec_exactness_test.cc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/core/block_layout.h"
#include "kernels/core/dtype.h"

namespace kvstow {

class Rotation;

// Stored in every record: never renumber, never reuse.
enum class CodecId : uint8_t {
  kRaw = 0,
  kInt8 = 1,
  kTq4 = 2,
  kTq3 = 3,
  kTq2 = 4,
  kTqm4 = 5,
  kTqm3 = 6,
  kTqm2 = 7,
  kInt4 = 8,
  kKivi4 = 9,
  kKivi2 = 10,
  kTq3Mixed = 11,  // "tq3.5"
  kTq2Mixed = 12,  // "tq2.5"
  kTqProd4 = 13,
  kTqProd3 = 14,
  kTqProd2 = 15,
  kOlm4 = 16,
  kOlm3 = 17,
  kOsu2 = 18,
  kOscar2 = 19,
  kGear = 20,
};

struct PlaneShape {
  int32_t num_tokens = 0;
  int32_t dim = 0;  // head_dim
  Role role = Role::kKey;
  DType dtype = DType::kBf16;  // of the rows, on both sides
  // Of the plane's layer, role and head; borrowed. Only codecs that need a calibration look at it,
  // and these accept no plane without one.
  const Rotation* rotation = nullptr;
};

enum class EncodeResult {
  kEncoded,
  // The plane holds a value that is not finite, or its scale does not fit fp16: keep the rows as
  // they are. The output holds nothing of use.
  kKeepRaw,
};

// One backend of one codec. `rows` is [num_tokens, dim] of shape.dtype, contiguous; `plane` is
// plane_bytes(shape) bytes. No alignment is assumed of either; they do not overlap. Host backends
// are finished on return. `decode` accepts any bytes (never reads or writes out of bounds): whether
// they are the right ones is the checksum's question.
struct CodecBackend {
  std::string_view name;  // "scalar", "highway", "cuda": the name used by tests and benchmarks
  bool (*supported)();    // false where this machine cannot run it
  EncodeResult (*encode)(const PlaneShape& shape, const std::byte* rows, std::byte* plane);
  void (*decode)(const PlaneShape& shape, const std::byte* plane, std::byte* rows);
};

struct Codec {
  CodecId id;
  std::string_view name;                            // "tq4"
  bool needs_rotation;                              // PlaneShape::rotation: a calibration
  bool (*accepts)(const PlaneShape& shape);         // can it encode such planes?
  int64_t (*plane_bytes)(const PlaneShape& shape);  // encoded size, a pure function of the shape
  absl::Span<const CodecBackend> host;              // [0] is the scalar reference, the fastest last
};

// Every codec of this build. The one place where a new family is listed is codec_table.cc.
absl::Span<const Codec> AllCodecs();

// nullptr where this build does not know the number or the name.
const Codec* FindCodec(CodecId id);
const Codec* FindCodec(std::string_view name);

// The last supported host backend.
const CodecBackend& BestBackend(const Codec& codec);

// Which codec each role uses.
struct CodecPair {
  CodecId k = CodecId::kRaw;
  CodecId v = CodecId::kRaw;
  bool operator==(const CodecPair&) const = default;
  CodecId of(Role role) const { return role == Role::kKey ? k : v; }
};

// A codec choice as people write it.
struct CodecChoice {
  CodecPair pair;
  // The first block of a prefix holds the attention sink and stays raw.
  bool raw_first_block = false;
  // So do the last full blocks, as many as hold this many tokens: the window that matters most at
  // few bits. A block that was sealed raw stays so when the conversation goes on.
  int32_t num_raw_last_tokens = 0;

  // The codecs of block `block_idx` of `num_blocks` full ones.
  CodecPair OfBlock(int64_t block_idx, int64_t num_blocks, int32_t tokens_per_block) const {
    const bool is_first = raw_first_block && block_idx == 0;
    const int64_t tokens_after = (num_blocks - 1 - block_idx) * tokens_per_block;
    return is_first || tokens_after < num_raw_last_tokens ? CodecPair{} : pair;
  }
};

// "raw", "int8" (both roles), "k=tqm4,v=tq4", or a preset: "lossless" (raw), "safe" (k=tqm4,v=tq4),
// "small" (k=tqm4,v=tq3), "tiny" (k=tqm3,v=tq2 and the last 64 tokens raw), each with the first
// block raw but `lossless`. kInvalidArgument names the nearest known name, or the role a codec does
// not serve (tqm* are for keys only).
absl::StatusOr<CodecChoice> ParseCodecChoice(std::string_view text);

// "tq4" when both roles agree, else "k=tqm4,v=tq4".
std::string CodecPairName(const CodecPair& pair);

// True where one of the two needs a calibration.
bool NeedsCalibration(const CodecPair& pair);

// The codec that stores a plane of `shape` when `wanted` is asked for: `wanted`, or kRaw where it
// does not accept the shape (already quantized dtypes, MLA values, odd dims).
CodecId EffectiveCodec(CodecId wanted, const PlaneShape& shape);

}  // namespace kvstow
