// Log: one structured line per event on standard error.
//
//   Log(Severity::kInfo, "tier opened", {{"tier", "nvme"}, {"blocks", absl::StrCat(n)}});
//
// Format: `2026-11-30T12:00:00.123Z I tier opened tier=nvme blocks=17`; values with spaces, quotes
// or control characters are quoted and escaped, so a line is always one line. Never called with a
// lock held. Misses are not logged.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

namespace kvstow {

enum class Severity { kDebug, kInfo, kWarning, kError };

using LogField = std::pair<std::string_view, std::string>;

void Log(Severity severity, std::string_view event, std::initializer_list<LogField> fields = {});

// Lines below `severity` are dropped. kInfo at start. Thread safe.
void SetMinLogSeverity(Severity severity);

}  // namespace kvstow
