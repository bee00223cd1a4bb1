// TopView: what `kvstow top` shows, from two answers of Stat: gauges as they are, counters as
// rates.
//
//   output.Raw(TopText(before, now, seconds));
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "client/cpp/admin_client.h"

namespace kvstow {

// `seconds`: from one answer to the other, more than 0. Where the service was started anew in
// between, its counters count from then.
std::string TopText(const ServiceStat& before, const ServiceStat& now, double seconds);

// The same figures. Rates end in `_per_s`; shares are from 0 to 1, null where nothing was asked
// for.
nlohmann::ordered_json TopJson(const ServiceStat& before, const ServiceStat& now, double seconds);

}  // namespace kvstow
