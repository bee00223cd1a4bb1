// Sessions: which request of a trace continues which, found from the prompt blocks alone; and what
// the future of each is, for oracles and for scoring.
//
//   const std::vector<Request> requests = FindSessions(trace);
//   const Future future(trace, requests);
//
// The rule: the parent of a request is the last request that contained its deepest block seen
// before. It continues the parent if that depth is at least max(2, whole blocks of the parent's
// prompt): the old prompt is there entire, and it is more than a shared greeting.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "storage/policy/policy.h"
#include "storage/policy/trace.h"

namespace kvstow::policy {

// The rule for one request whose seen_blocks are known: makes it the next turn of `parent`, the
// last request that contained the deepest of them, if it is one.
void ContinueIf(const Request& parent, Request& request);

// One per request of the trace; Request::number is the index.
std::vector<Request> FindSessions(const Trace& trace);

// Which sessions announce their end: the share `probability` of them, chosen by `seed`. True for
// the last request of each branch of a chosen session.
std::vector<bool> ChooseAnnouncedEnds(const std::vector<Request>& requests, double probability,
                                      uint64_t seed);

// What only an oracle knows.
class Future {
 public:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  static constexpr uint32_t kNoUse = std::numeric_limits<uint32_t>::max();

  Future(const Trace& trace, const std::vector<Request>& requests);

  // When the session sends its next turn; kNever.
  double ReturnTime(uint64_t request) const { return return_time_[request]; }
  // The next request that uses the block at `chain_idx` of `request`'s prompt; kNoUse.
  uint32_t NextUse(uint64_t request, int32_t chain_idx) const {
    return next_use_[first_[request] + static_cast<uint64_t>(chain_idx)];
  }

 private:
  std::vector<double> return_time_;
  std::vector<uint64_t> first_;
  std::vector<uint32_t> next_use_;
};

}  // namespace kvstow::policy
