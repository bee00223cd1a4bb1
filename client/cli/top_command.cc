// top: what a service is doing, until it is stopped.
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cli/commands.h"
#include "client/cli/connect.h"
#include "client/cli/top_view.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

constexpr absl::Duration kIntervalMin = absl::Milliseconds(10);
// To the upper left, without what stood there: the rest of an older, longer picture too.
constexpr std::string_view kRedraw = "\x1b[H\x1b[J";

constexpr Option kTopOptions[] = {
    {"interval", "TIME", "how long each picture looks", "1s"},
    {"count", "N", "pictures; 0 for no end", "0"},
    {"once", "", "one picture, as --count=1"},
};

absl::Status RunTop(const Args& args, Output& output) {
  KVSTOW_ASSIGN_OR_RETURN(const absl::Duration interval, args.Duration("interval"));
  if (interval < kIntervalMin) {
    return UsageError(absl::StrCat("--interval is ", absl::FormatDuration(interval),
                                   ", want at least ", absl::FormatDuration(kIntervalMin)));
  }
  KVSTOW_ASSIGN_OR_RETURN(int64_t count, args.Int("count", 0, 1'000'000'000));
  if (args.Has("once")) count = 1;
  KVSTOW_ASSIGN_OR_RETURN(const Service service, Connect(args));
  absl::StatusOr<ServiceStat> before = service.admin->Stat();
  absl::Time before_at = absl::Now();
  if (!before.ok()) return service.Explain(before.status());
  const bool redraws = count != 1 && !output.is_json() && isatty(STDOUT_FILENO) != 0;
  for (int64_t i = 0; count == 0 || i < count; ++i) {
    absl::SleepFor(interval);
    absl::StatusOr<ServiceStat> now = service.admin->Stat();
    if (!now.ok()) return service.Explain(now.status());
    const absl::Time now_at = absl::Now();
    // A clock that was set back makes no rate.
    const double seconds = absl::ToDoubleSeconds(std::max(now_at - before_at, kIntervalMin));
    output.Json(TopJson(*before, *now, seconds));
    if (!output.is_json()) {
      output.Raw(absl::StrCat(redraws ? std::string(kRedraw) : "", TopText(*before, *now, seconds),
                              redraws || count == 1 ? "" : "\n"));
    }
    before = std::move(now);
    before_at = now_at;
  }
  return absl::OkStatus();
}

constexpr Command kTopCommands[] = {
    {{.name = "top",
      .summary = "tiers, hits and traffic of the service, live",
      .details = "Each picture shows the rates since the one before. With --json one object per "
                 "picture.",
      .options = kTopOptions,
      .example = "kvstow top --once --json"},
     &RunTop},
};

}  // namespace

absl::Span<const Command> TopCommands() { return kTopCommands; }

}  // namespace kvstow
