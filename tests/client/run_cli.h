// RunKvstow: a command of `kvstow` in this process, and what it printed.
//
//   const CliResult help = RunKvstow({"help", "put"});
//   EXPECT_EQ(help.status, 0) << help.err;
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "client/cli/commands.h"

namespace kvstow::testing {

struct CliResult {
  int status = 0;
  std::string out;
  std::string err;
};

inline CliResult RunKvstow(const std::vector<std::string>& words) {
  std::ostringstream out;
  std::ostringstream err;
  const int status = RunCli(words, {out, err});
  return {status, out.str(), err.str()};
}

}  // namespace kvstow::testing
