// CodecPlan: the layers and roles of a model that are stored with another codec than a writer asks
// for.
//
//   KVSTOW_ASSIGN_OR_RETURN(const CodecPlan plan, CodecPlan::Parse("layer0.k=raw, layer27.k=raw"));
//   plan.CodecFor(0, Role::kKey, CodecId::kTqm4);    // kRaw: the plan says so
//   plan.CodecFor(5, Role::kKey, CodecId::kTqm4);    // kTqm4: as asked for
//   plan.CodecFor(9, Role::kValue, CodecId::kRaw);   // kRaw: raw is asked for, and stays
//
// As text a plan is a list of items between commas or line ends: `layerN.k=CODEC`,
// `layerN.v=CODEC`, `layerN=CODEC` (both), `layerA-B...` (a range). '#' starts a comment.
// Thread safety: as a plain value.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/codec/codec.h"
#include "kernels/core/block_layout.h"
#include "kernels/core/digest.h"
#include "kernels/core/model_spec.h"

namespace kvstow {

class CodecPlan {
 public:
  // Longest text that Parse reads: all layers of the largest model, with comments.
  static constexpr size_t kMaxTextBytes = size_t{256} << 10;

  // Changes nothing.
  CodecPlan() = default;

  // kInvalidArgument names the item and what is wrong with it: an unknown codec and the nearest, a
  // codec that does not serve the role or needs a calibration, a layer given twice or beyond
  // ModelSpec::kMaxLayers.
  static absl::StatusOr<CodecPlan> Parse(std::string_view text);

  void Set(int32_t layer_idx, Role role, CodecId codec) { codecs_[{layer_idx, role}] = codec; }
  std::optional<CodecId> Find(int32_t layer_idx, Role role) const;
  bool empty() const { return codecs_.empty(); }
  bool operator==(const CodecPlan&) const = default;

  // The codec that stores a plane: the plan's where it has one and `asked` is not raw.
  CodecId CodecFor(int32_t layer_idx, Role role, CodecId asked) const;
  CodecPair PairFor(int32_t layer_idx, const CodecPair& asked) const {
    return {.k = CodecFor(layer_idx, Role::kKey, asked.k),
            .v = CodecFor(layer_idx, Role::kValue, asked.v)};
  }

  // This plan where it has a codec, else `below`; what is raw below stays raw.
  CodecPlan Over(const CodecPlan& below) const;

  // kInvalidArgument: a layer that a model of `layout` does not have, or a codec that does not take
  // its rows.
  absl::Status CheckFits(const BlockLayout& layout) const;

  // Canonical: equal plans give equal texts, and Parse gives the plan again. Keys, then values,
  // each by layer with runs as ranges, commas between; empty for a plan that changes nothing.
  std::string Text() const;
  // SHA-256 of a domain tag and Text(). Never zero: a plan that changes nothing has one too.
  Digest Id() const;

 private:
  std::map<std::pair<int32_t, Role>, CodecId> codecs_;
};

// A codec choice as people write it, with the layers that are to have another: "safe,layer0=raw",
// "k=tqm4,v=tq3,layer0-1.k=int8".
struct LayeredText {
  std::string choice;  // for ParseCodecChoice: what is left without the layers
  CodecPlan layers;
};
// kInvalidArgument as CodecPlan::Parse; `choice` is not looked at.
absl::StatusOr<LayeredText> SplitLayers(std::string_view text);

}  // namespace kvstow
