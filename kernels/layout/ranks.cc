#include "kernels/layout/ranks.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/core/block_layout.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

// The first of the ranks that have head `head_idx`. The numbers divide each other.
int32_t RankOfHead(int32_t num_kv_heads, int32_t head_idx, int32_t num_ranks) {
  return num_ranks <= num_kv_heads ? head_idx / (num_kv_heads / num_ranks)
                                   : head_idx * (num_ranks / num_kv_heads);
}

}  // namespace

absl::StatusOr<HeadRange> HeadsOfRank(int32_t num_kv_heads, const TpRank& rank) {
  if (rank.num_ranks < 1 || rank.rank < 0 || rank.rank >= rank.num_ranks) {
    return absl::InvalidArgumentError(absl::StrCat("ranks: rank is ", rank.rank, " of ",
                                                   rank.num_ranks,
                                                   ", want one from 0 to num_ranks - 1"));
  }
  if (num_kv_heads >= 1 && num_kv_heads % rank.num_ranks == 0) {
    const int32_t count = num_kv_heads / rank.num_ranks;
    return HeadRange{.first = rank.rank * count, .count = count};
  }
  if (num_kv_heads >= 1 && rank.num_ranks % num_kv_heads == 0) {
    return HeadRange{.first = rank.rank / (rank.num_ranks / num_kv_heads), .count = 1};
  }
  return absl::InvalidArgumentError(
      absl::StrCat("ranks: ", rank.num_ranks, " ranks cannot share ", num_kv_heads,
                   " KV heads evenly, want numbers of which one divides the other"));
}

absl::StatusOr<ModelSpec> SpecOfRanks(const ModelSpec& model, int32_t num_ranks) {
  KVSTOW_RETURN_IF_ERROR(model.Validate());
  ModelSpec spec = model;
  for (LayerGroup& group : spec.groups) {
    KVSTOW_ASSIGN_OR_RETURN(const HeadRange heads,
                            HeadsOfRank(group.num_kv_heads, {.num_ranks = num_ranks}));
    group.num_kv_heads = heads.count;
  }
  return spec;
}

absl::StatusOr<std::vector<PlaneSource>> SourcesOfRank(const ModelSpec& model, int32_t from_ranks,
                                                       const TpRank& to) {
  KVSTOW_ASSIGN_OR_RETURN(const ModelSpec from_spec, SpecOfRanks(model, from_ranks));
  KVSTOW_ASSIGN_OR_RETURN(const BlockLayout from, BlockLayout::Create(from_spec));
  std::vector<PlaneSource> sources;
  for (const LayerGroup& group : model.groups) {
    KVSTOW_ASSIGN_OR_RETURN(const HeadRange heads, HeadsOfRank(group.num_kv_heads, to));
    const int32_t from_count = std::max(1, group.num_kv_heads / from_ranks);
    for (int32_t layer = group.first_layer; layer < group.first_layer + group.num_layers; ++layer) {
      for (const Role role : {Role::kKey, Role::kValue}) {
        if ((role == Role::kKey ? group.k_dim : group.v_dim) == 0) continue;
        for (int32_t head = heads.first; head < heads.first + heads.count; ++head) {
          sources.push_back({.rank = RankOfHead(group.num_kv_heads, head, from_ranks),
                             .plane_idx = from.plane_idx(layer, role, head % from_count)});
        }
      }
    }
  }
  return sources;
}

absl::Status ReshardBlock(const ModelSpec& model,
                          absl::Span<const absl::Span<const std::byte>> from, const TpRank& to,
                          absl::Span<std::byte> out) {
  const auto from_ranks = static_cast<int32_t>(from.size());
  KVSTOW_ASSIGN_OR_RETURN(const std::vector<PlaneSource> sources,
                          SourcesOfRank(model, from_ranks, to));
  KVSTOW_ASSIGN_OR_RETURN(const ModelSpec from_spec, SpecOfRanks(model, from_ranks));
  KVSTOW_ASSIGN_OR_RETURN(const ModelSpec to_spec, SpecOfRanks(model, to.num_ranks));
  KVSTOW_ASSIGN_OR_RETURN(const BlockLayout from_layout, BlockLayout::Create(from_spec));
  KVSTOW_ASSIGN_OR_RETURN(const BlockLayout to_layout, BlockLayout::Create(to_spec));
  const auto check = [](int32_t rank, size_t found, const BlockLayout& layout) -> absl::Status {
    if (found == static_cast<size_t>(layout.block_bytes())) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("ranks: the part of rank ", rank, " has ", found,
                                                   " bytes, want ", layout.block_bytes()));
  };
  KVSTOW_RETURN_IF_ERROR(check(to.rank, out.size(), to_layout));
  for (const PlaneSource& source : sources) {
    KVSTOW_RETURN_IF_ERROR(check(source.rank, from[source.rank].size(), from_layout));
  }
  for (int32_t i = 0; i < to_layout.num_planes(); ++i) {
    const PlaneInfo& plane = to_layout.plane(i);
    const PlaneSource& source = sources[i];
    std::memcpy(out.data() + plane.row_offset,
                from[source.rank].data() + from_layout.plane(source.plane_idx).row_offset,
                static_cast<size_t>(plane.row_bytes));
  }
  return absl::OkStatus();
}

}  // namespace kvstow
