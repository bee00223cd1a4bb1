#include "kernels/core/text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace kvstow {
namespace {

struct Unit {
  std::string_view name;
  double bytes;
};

constexpr std::array<Unit, 10> kUnits = {{
    {"", 1.0},
    {"B", 1.0},
    {"KiB", 1024.0},
    {"MiB", 1024.0 * 1024},
    {"GiB", 1024.0 * 1024 * 1024},
    {"TiB", 1024.0 * 1024 * 1024 * 1024},
    {"KB", 1e3},
    {"MB", 1e6},
    {"GB", 1e9},
    {"TB", 1e12},
}};

int EditDistance(std::string_view a, std::string_view b) {
  std::vector<int> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({substituted, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

}  // namespace

absl::StatusOr<int64_t> ParseBytes(std::string_view text) {
  const std::string trimmed(absl::StripAsciiWhitespace(ToAbsl(text)));
  const size_t unit_idx = std::min(trimmed.find_first_not_of("0123456789."), trimmed.size());
  const std::string number = trimmed.substr(0, unit_idx);
  const std::string unit(absl::StripAsciiWhitespace(trimmed.substr(unit_idx)));
  double value = 0;
  const auto* found =
      std::find_if(kUnits.begin(), kUnits.end(), [&](const Unit& u) { return u.name == unit; });
  if (number.empty() || found == kUnits.end() || !absl::SimpleAtod(number, &value)) {
    return absl::InvalidArgumentError(
        absl::StrCat("size \"", trimmed,
                     "\" is not a number with a unit (B, KiB, MiB, GiB, TiB, KB, MB, GB, TB)"));
  }
  const double bytes = value * found->bytes;
  if (!(bytes < 9e18)) {
    return absl::InvalidArgumentError(absl::StrCat("size \"", trimmed, "\" does not fit 63 bits"));
  }
  return static_cast<int64_t>(bytes);
}

std::string FormatBytes(int64_t bytes) {
  if (bytes < 1024 && bytes > -1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes);
  constexpr std::array<std::string_view, 4> kNames = {"KiB", "MiB", "GiB", "TiB"};
  size_t unit_idx = 0;
  value /= 1024;
  while (std::fabs(value) >= 1024 && unit_idx + 1 < kNames.size()) {
    value /= 1024;
    ++unit_idx;
  }
  return absl::StrFormat("%.3g %s", value, std::string(kNames[unit_idx]));
}

absl::StatusOr<absl::Duration> ParseDuration(std::string_view text) {
  absl::Duration duration;
  if (!absl::ParseDuration(ToAbsl(text), &duration) || duration == absl::InfiniteDuration() ||
      duration < absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("duration \"", ToAbsl(text),
                     "\" is not a positive number with a unit (ms, s, m, h), for example 30s"));
  }
  return duration;
}

std::string NearestName(std::string_view name, const std::vector<std::string>& candidates) {
  std::string best;
  int best_distance = std::numeric_limits<int>::max();
  for (const std::string& candidate : candidates) {
    const int distance = EditDistance(name, candidate);
    const int allowed =
        std::max<int>(2, static_cast<int>(std::max(name.size(), candidate.size()) / 3));
    if (distance <= allowed && distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

std::string HtmlText(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

}  // namespace kvstow
