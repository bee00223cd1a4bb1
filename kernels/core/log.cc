#include "kernels/core/log.h"

#include <unistd.h>

#include <atomic>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace kvstow {
namespace {

std::atomic<Severity> min_severity{Severity::kInfo};

bool NeedsQuotes(const std::string& value) {
  if (value.empty()) return true;
  for (unsigned char c : value) {
    if (c <= ' ' || c == '"' || c == '\\' || c >= 0x7f) return true;
  }
  return false;
}

}  // namespace

void SetMinLogSeverity(Severity severity) { min_severity = severity; }

void Log(Severity severity, std::string_view event, std::initializer_list<LogField> fields) {
  if (severity < min_severity.load(std::memory_order_relaxed)) return;
  constexpr char kLetters[] = {'D', 'I', 'W', 'E'};
  std::string line = absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone());
  line += ' ';
  line += kLetters[static_cast<int>(severity)];
  line += ' ';
  line += event;
  for (const auto& [name, value] : fields) {
    line += ' ';
    line += name;
    line += '=';
    if (NeedsQuotes(value)) {
      absl::StrAppend(&line, "\"", absl::Utf8SafeCEscape(value), "\"");
    } else {
      line += value;
    }
  }
  line += '\n';
  // One write per line: lines of several threads do not mix. A lost log line is not an error.
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace kvstow
