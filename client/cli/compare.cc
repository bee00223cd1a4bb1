#include "client/cli/compare.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

// Adds the differences of one block in one (layer, role).
void CompareRows(absl::Span<const std::byte> got, absl::Span<const std::byte> want,
                 const std::string& where, KvDifference& difference) {
  difference.num_compared_bytes += static_cast<int64_t>(got.size());
  if (std::memcmp(got.data(), want.data(), got.size()) == 0) return;
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i]) continue;
    if (difference.num_different_bytes++ == 0) difference.first = where;
  }
}

}  // namespace

absl::StatusOr<KvDifference> CompareBlocks(const KvBuffer& got, const KvFile& want,
                                           absl::Span<const absl::Status> blocks) {
  const ModelSpec& spec = got.spec();
  if (spec.groups != want.spec().groups || spec.kv_dtype != want.spec().kv_dtype) {
    return absl::InvalidArgumentError(absl::StrCat(
        want.path(), ": its layers or dtype are not those of what was fetched (",
        ToAbsl(DTypeName(spec.kv_dtype)), ", ", spec.num_layers(), " layers; the file: ",
        ToAbsl(DTypeName(want.spec().kv_dtype)), ", ", want.spec().num_layers(), " layers)"));
  }
  KvDifference difference;
  for (size_t block_idx = 0; block_idx < blocks.size(); ++block_idx) {
    if (!blocks[block_idx].ok()) continue;
    const int64_t first_token = static_cast<int64_t>(block_idx) * spec.tokens_per_block;
    const int64_t end_token = first_token + spec.tokens_per_block;
    if (end_token > static_cast<int64_t>(want.tokens().size())) {
      return absl::InvalidArgumentError(absl::StrCat(want.path(), ": has ", want.tokens().size(),
                                                     " tokens, block ", block_idx, " needs ",
                                                     end_token));
    }
    for (int32_t layer_idx = 0; layer_idx < spec.num_layers(); ++layer_idx) {
      for (Role role : {Role::kKey, Role::kValue}) {
        const auto rows = [&](absl::Span<const LayerRows> layers) {
          const size_t begin =
              RowBytes(spec, layers[layer_idx], layer_idx, role, first_token).size();
          return RowBytes(spec, layers[layer_idx], layer_idx, role, end_token).subspan(begin);
        };
        CompareRows(rows(got.layers()), rows(want.layers()),
                    absl::StrCat("layer ", layer_idx, role == Role::kKey ? ", K" : ", V",
                                 ", tokens ", first_token, " to ", end_token - 1),
                    difference);
      }
    }
  }
  return difference;
}

}  // namespace kvstow
