#include "storage/policy/sessions.h"

#include <algorithm>

namespace kvstow::policy {
namespace {

// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) of one value.
uint64_t Mix(uint64_t z) {
  z += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace

void ContinueIf(const Request& parent, Request& request) {
  if (request.seen_blocks < std::max(2, parent.full_blocks)) return;
  request.continues = true;
  request.parent = parent.number;
  request.parent_tokens = parent.input_tokens + parent.output_tokens;
  request.turn = parent.turn + 1;
}

std::vector<Request> FindSessions(const Trace& trace) {
  std::vector<Request> requests;
  requests.reserve(trace.requests.size());
  std::vector<uint32_t> last_user(trace.num_distinct, kNone);
  for (size_t i = 0; i < trace.requests.size(); ++i) {
    const TraceRequest& from = trace.requests[i];
    Request r;
    r.number = i;
    r.time_s = from.time_s;
    r.input_tokens = from.input_tokens;
    r.output_tokens = from.output_tokens;
    r.num_blocks = from.num_blocks;
    r.full_blocks = static_cast<int32_t>(from.input_tokens / trace.block_tokens);
    const absl::Span<const BlockNumber> chain = trace.Chain(i);
    while (r.seen_blocks < r.num_blocks &&
           last_user[chain[static_cast<size_t>(r.seen_blocks)]] != kNone) {
      ++r.seen_blocks;
    }
    if (r.seen_blocks > 0) {
      const Request& parent = requests[last_user[chain[static_cast<size_t>(r.seen_blocks) - 1]]];
      ContinueIf(parent, r);
    }
    for (const BlockNumber block : chain) last_user[block] = static_cast<uint32_t>(i);
    requests.push_back(r);
  }
  return requests;
}

std::vector<bool> ChooseAnnouncedEnds(const std::vector<Request>& requests, double probability,
                                      uint64_t seed) {
  std::vector<uint64_t> session(requests.size());
  std::vector<bool> is_end(requests.size(), true);
  for (size_t i = 0; i < requests.size(); ++i) {
    session[i] = requests[i].continues ? session[requests[i].parent] : i;
    if (requests[i].continues) is_end[requests[i].parent] = false;
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    const double u = static_cast<double>(Mix(Mix(seed) ^ session[i]) >> 11) * 0x1p-53;
    if (u >= probability) is_end[i] = false;
  }
  return is_end;
}

Future::Future(const Trace& trace, const std::vector<Request>& requests)
    : return_time_(requests.size(), kNever), next_use_(trace.blocks.size(), kNoUse) {
  for (const Request& r : requests) {
    if (r.continues) return_time_[r.parent] = std::min(return_time_[r.parent], r.time_s);
  }
  first_.reserve(requests.size());
  for (const TraceRequest& r : trace.requests) first_.push_back(r.first_block);
  std::vector<uint32_t> upcoming(trace.num_distinct, kNoUse);
  for (size_t i = requests.size(); i-- > 0;) {
    const TraceRequest& r = trace.requests[i];
    for (int32_t j = 0; j < r.num_blocks; ++j) {
      const uint64_t at = r.first_block + static_cast<uint64_t>(j);
      next_use_[at] = upcoming[trace.blocks[at]];
      upcoming[trace.blocks[at]] = static_cast<uint32_t>(i);
    }
  }
}

}  // namespace kvstow::policy
