// Doctor: what this machine can do for kvstow, and why not.
//
//   for (const Finding& finding : ExamineMachine()) { ... }
//
// Everything optional (GPU, NCCL, RDMA, UCX) is looked for at run time, as the service does it;
// that it is absent is never an error.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "client/cli/connect.h"

namespace kvstow {

enum class FindingState { kOk, kAbsent, kWarn };

std::string_view FindingStateName(FindingState state);  // "ok", "absent", "warn"

struct Finding {
  std::string name;  // "memlock"
  FindingState state = FindingState::kOk;
  std::string detail;  // what was found
  std::string hint;    // what to do about it; empty when nothing need be done
};

std::vector<Finding> ExamineMachine();
Finding ExamineService(const Service& service);
// Which way bytes may go between this machine's workers and the service.
Finding ExaminePaths(const Service& service);

}  // namespace kvstow
