// EvalPage: the results of `kvstow eval` as one HTML file: rate against distortion, and where in
// the model the distortion is.
//
// The page holds everything it shows: styles, plots as SVG, numbers as a table. It loads nothing
// and runs nothing.
#pragma once

#include <string>

#include "client/cli/eval_report.h"

namespace kvstow {

// At least one codec.
std::string EvalPage(const EvalReport& report);

}  // namespace kvstow
