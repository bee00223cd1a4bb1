// Ranks: which KV heads of a model each tensor-parallel rank has, and blocks from the ranks of one
// number to those of another. Pure copies, bit-exact for every dtype.
//
//   // What 2 prefill ranks hold of a block, as rank 3 of 8 decode ranks wants it.
//   KVSTOW_RETURN_IF_ERROR(ReshardBlock(spec, {rank0, rank1}, {.rank = 3, .num_ranks = 8}, out));
//
// Heads are dealt out in order and evenly, per layer: n ranks have num_kv_heads / n each. Where a
// layer has fewer heads than there are ranks, n / num_kv_heads neighbours have the same head, as
// engines do it; so the one head of MLA belongs to every rank. Numbers that do not divide each
// other are refused. A rank's layout is then that of the same model with fewer heads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/core/model_spec.h"

namespace kvstow {

// KV heads [first, first + count) of each layer: those of one tensor-parallel rank. Zero: all.
struct HeadRange {
  int32_t first = 0;
  int32_t count = 0;
  bool operator==(const HeadRange&) const = default;
};

struct TpRank {
  int32_t rank = 0;  // from 0
  int32_t num_ranks = 1;
};

// The heads of one rank, of a layer with `num_kv_heads`. kInvalidArgument: a rank that is not one
// of num_ranks, or heads that so many ranks cannot share evenly.
absl::StatusOr<HeadRange> HeadsOfRank(int32_t num_kv_heads, const TpRank& rank);

// The model as each of `num_ranks` ranks has it in its memory. kInvalidArgument as HeadsOfRank and
// ModelSpec::Validate.
absl::StatusOr<ModelSpec> SpecOfRanks(const ModelSpec& model, int32_t num_ranks);

// Where a plane comes from: plane `plane_idx` of SpecOfRanks' layout at rank `rank`.
struct PlaneSource {
  int32_t rank = 0;
  int32_t plane_idx = 0;
};

// Per plane of `to`, in the order of its layout, where it lies among `from_ranks` ranks; of several
// that have it the first. Serves encoded planes as well: who encodes a plane leaves no trace in it.
absl::StatusOr<std::vector<PlaneSource>> SourcesOfRank(const ModelSpec& model, int32_t from_ranks,
                                                       const TpRank& to);

// `from` holds per rank the row form of its part of a block (BlockLayout of SpecOfRanks), `out` is
// filled with that of `to`. Ranks that `to` takes nothing from may be empty. kInvalidArgument:
// heads that the ranks cannot share, or memory of another size (names rank, found and wanted
// bytes); `out` is untouched then.
absl::Status ReshardBlock(const ModelSpec& model,
                          absl::Span<const absl::Span<const std::byte>> from, const TpRank& to,
                          absl::Span<std::byte> out);

}  // namespace kvstow
