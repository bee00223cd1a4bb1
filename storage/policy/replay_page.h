// ReplayPage: the results of kvstow-replay as one HTML file with curves over capacity.
//
// The page holds everything it shows: its styles, its curves as SVG, its numbers as a table. It
// loads nothing and runs nothing.
#pragma once

#include <string>

#include "storage/policy/replay_report.h"

namespace kvstow::policy {

std::string FormatPage(const ReplayReport& report);

}  // namespace kvstow::policy
