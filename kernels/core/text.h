// Text: how sizes, durations and near misses of names are read and written, the same everywhere.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace kvstow {

// absl::string_view is a type of its own in Debian's Abseil; this is the one place that converts.
inline absl::string_view ToAbsl(std::string_view text) { return {text.data(), text.size()}; }

// "64MiB", "1.5 GiB", "512KiB", "4096" (bytes), "2GB" (10^9). kInvalidArgument names the units.
absl::StatusOr<int64_t> ParseBytes(std::string_view text);

// "1.5 GiB", "64 KiB", "312 B": three significant digits, binary units.
std::string FormatBytes(int64_t bytes);

// "250ms", "30s", "10m", "1h30m"; a bare "0" too. kInvalidArgument names the units; negative and
// infinite durations are refused.
absl::StatusOr<absl::Duration> ParseDuration(std::string_view text);

// The candidate with the smallest edit distance to `name`, or "" when none is near (distance over
// 1/3 of the longer name, at least 2).
std::string NearestName(std::string_view name, const std::vector<std::string>& candidates);

// `text` as it may stand in HTML and SVG, in attributes too: & < > " are written as entities.
std::string HtmlText(std::string_view text);

}  // namespace kvstow
