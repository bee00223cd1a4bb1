#include "kernels/codec/codec_plan.h"

#include <algorithm>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

constexpr char kLayer[] = "layer";
constexpr char kWanted[] = "want layerN=CODEC, layerN.k=CODEC, layerN.v=CODEC or layerA-B=CODEC";

absl::Status BadItem(const std::string& item, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("plan item \"", item, "\": ", what));
}

// One item: codecs of a range of layers.
struct Item {
  int32_t first_layer = 0;
  int32_t last_layer = 0;
  bool for_role[2] = {true, true};
  CodecId codec = CodecId::kRaw;
};

absl::StatusOr<int32_t> ReadLayer(const std::string& item, const std::string& digits) {
  int32_t layer_idx = -1;
  const bool is_number = !digits.empty() && digits.find_first_not_of("0123456789") == digits.npos &&
                         absl::SimpleAtoi(digits, &layer_idx);
  if (is_number && layer_idx < ModelSpec::kMaxLayers) return layer_idx;
  return BadItem(item, absl::StrCat("\"", digits, "\" is no layer of 0 to ",
                                    ModelSpec::kMaxLayers - 1, "; ", kWanted));
}

// A codec that can store the roles of the item.
absl::Status ReadCodec(const std::string& text, const std::string& name, Item& item) {
  const absl::StatusOr<CodecChoice> choice =
      ParseCodecChoice(item.for_role[1] ? (item.for_role[0] ? name : absl::StrCat("k=raw,v=", name))
                                        : absl::StrCat("k=", name, ",v=raw"));
  if (!choice.ok()) return BadItem(text, std::string(choice.status().message()));
  const Codec* codec = FindCodec(std::string_view(name));
  if (codec == nullptr) {
    return BadItem(text, absl::StrCat("\"", name, "\" is a preset, want one codec"));
  }
  if (codec->needs_rotation) {
    return BadItem(
        text, absl::StrCat("codec \"", name, "\" needs a calibration, which a plan does not name"));
  }
  item.codec = codec->id;
  return absl::OkStatus();
}

absl::StatusOr<Item> ReadItem(const std::string& text) {
  const std::vector<std::string> sides = absl::StrSplit(text, '=');
  if (sides.size() != 2 || !sides[0].starts_with(kLayer)) return BadItem(text, kWanted);
  std::string layers = sides[0].substr(sizeof(kLayer) - 1);
  Item item;
  if (layers.ends_with(".k") || layers.ends_with(".v")) {
    item.for_role[layers.back() == 'k' ? 1 : 0] = false;
    layers.resize(layers.size() - 2);
  }
  const size_t dash = layers.find('-');
  KVSTOW_ASSIGN_OR_RETURN(item.first_layer, ReadLayer(text, layers.substr(0, dash)));
  item.last_layer = item.first_layer;
  if (dash != std::string::npos) {
    KVSTOW_ASSIGN_OR_RETURN(item.last_layer, ReadLayer(text, layers.substr(dash + 1)));
    if (item.last_layer < item.first_layer) return BadItem(text, "the range ends before it starts");
  }
  KVSTOW_RETURN_IF_ERROR(ReadCodec(text, sides[1], item));
  return item;
}

}  // namespace

absl::StatusOr<CodecPlan> CodecPlan::Parse(std::string_view text) {
  if (text.size() > kMaxTextBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("plan: ", text.size(), " bytes, want at most ", kMaxTextBytes));
  }
  CodecPlan plan;
  for (const absl::string_view line : absl::StrSplit(ToAbsl(text), '\n')) {
    const absl::string_view code = line.substr(0, line.find('#'));
    for (const absl::string_view word : absl::StrSplit(code, ',')) {
      std::string item_text(absl::StripAsciiWhitespace(word));
      if (item_text.empty()) continue;
      KVSTOW_ASSIGN_OR_RETURN(const Item item, ReadItem(item_text));
      for (int32_t layer_idx = item.first_layer; layer_idx <= item.last_layer; ++layer_idx) {
        for (const Role role : {Role::kKey, Role::kValue}) {
          if (!item.for_role[static_cast<size_t>(role)]) continue;
          const bool is_new = plan.codecs_.try_emplace({layer_idx, role}, item.codec).second;
          if (!is_new) {
            return BadItem(item_text, absl::StrCat(role == Role::kKey ? "keys" : "values",
                                                   " of layer ", layer_idx, " are given twice"));
          }
        }
      }
    }
  }
  return plan;
}

std::optional<CodecId> CodecPlan::Find(int32_t layer_idx, Role role) const {
  const auto found = codecs_.find({layer_idx, role});
  if (found == codecs_.end()) return std::nullopt;
  return found->second;
}

CodecId CodecPlan::CodecFor(int32_t layer_idx, Role role, CodecId asked) const {
  return asked == CodecId::kRaw ? asked : Find(layer_idx, role).value_or(asked);
}

CodecPlan CodecPlan::Over(const CodecPlan& below) const {
  CodecPlan merged = below;
  for (const auto& [place, codec] : codecs_) {
    const auto [entry, is_new] = merged.codecs_.try_emplace(place, codec);
    if (!is_new && entry->second != CodecId::kRaw) entry->second = codec;
  }
  return merged;
}

absl::Status CodecPlan::CheckFits(const BlockLayout& layout) const {
  for (const auto& [place, codec] : codecs_) {
    const auto& [layer_idx, role] = place;
    const std::string name = absl::StrCat("plan: layer ", layer_idx);
    if (layer_idx >= layout.num_layers()) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ", the model has layers 0 to ", layout.num_layers() - 1));
    }
    const int32_t plane_idx = layout.plane_idx(layer_idx, role, 0);
    if (plane_idx < 0) {
      return absl::InvalidArgumentError(absl::StrCat(name, ": the layer has no values"));
    }
    const PlaneShape shape = {.num_tokens = layout.tokens_per_block(),
                              .dim = layout.plane(plane_idx).dim,
                              .role = role,
                              .dtype = layout.dtype()};
    if (EffectiveCodec(codec, shape) != codec) {
      return absl::InvalidArgumentError(absl::StrCat(
          name, ": codec \"", ToAbsl(FindCodec(codec)->name), "\" does not take rows of ",
          shape.dim, " values of ", ToAbsl(DTypeName(shape.dtype)), "; use raw"));
    }
  }
  return absl::OkStatus();
}

std::string CodecPlan::Text() const {
  std::string text;
  for (const Role role : {Role::kKey, Role::kValue}) {
    for (auto first = codecs_.begin(); first != codecs_.end(); ++first) {
      const auto& [layer_idx, first_role] = first->first;
      if (first_role != role) continue;
      if (layer_idx > 0 && Find(layer_idx - 1, role) == first->second) continue;  // within a run
      int32_t last = layer_idx;
      while (Find(last + 1, role) == first->second) ++last;
      absl::StrAppend(&text, text.empty() ? "" : ",", kLayer, layer_idx);
      if (last > layer_idx) absl::StrAppend(&text, "-", last);
      absl::StrAppend(&text,
                      role == Role::kKey ? ".k=" : ".v=", ToAbsl(FindCodec(first->second)->name));
    }
  }
  return text;
}

Digest CodecPlan::Id() const { return DigestBuilder("kvstow codec plan").Add(Text()).Finish(); }

absl::StatusOr<LayeredText> SplitLayers(std::string_view text) {
  LayeredText split;
  std::string layers;
  for (const absl::string_view word : absl::StrSplit(ToAbsl(text), ',')) {
    const bool is_layer = absl::StartsWith(absl::StripLeadingAsciiWhitespace(word), kLayer);
    std::string& to = is_layer ? layers : split.choice;
    absl::StrAppend(&to, to.empty() ? "" : ",", word);
  }
  KVSTOW_ASSIGN_OR_RETURN(split.layers, CodecPlan::Parse(layers));
  return split;
}

}  // namespace kvstow
