#include "service/verify_call.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kernels/core/status_macros.h"
#include "proto/convert.h"
#include "proto/status.h"

namespace kvstow {

VerifyCall* VerifyCall::Start(const ServiceParts& parts, const v1::VerifyRequest& request) {
  auto* call = new VerifyCall(parts);
  const absl::Status status = call->Open(request);
  if (status.ok()) {
    call->SubmitStep();
  } else {
    call->End(status);
  }
  return call;
}

absl::Status VerifyCall::Open(const v1::VerifyRequest& request) {
  KVSTOW_ASSIGN_OR_RETURN(keys_, KeysFromBytes(request.keys(), "keys", 0));
  KVSTOW_ASSIGN_OR_RETURN(permit_, parts_.admission->AdmitCall(kCallBytes));
  is_all_ = keys_.empty();
  num_total_ = is_all_ ? parts_.store->Stats().num_blocks : static_cast<int64_t>(keys_.size());
  return absl::OkStatus();
}

void VerifyCall::SubmitStep() {
  const absl::Status submitted = parts_.control->Submit([this] { Step(); });
  if (!submitted.ok()) End(submitted);
}

std::vector<BlockKey> VerifyCall::NextKeys() {
  std::vector<BlockKey> keys;
  if (is_all_) {
    for (const BlockInfo& block : parts_.store->List(after_, kBlocksPerStep)) {
      keys.push_back(block.key);
    }
    if (!keys.empty()) after_ = keys.back();
    return keys;
  }
  const auto begin = keys_.begin() + num_checked_;
  const int64_t left = static_cast<int64_t>(keys_.size()) - num_checked_;
  keys.assign(begin, begin + std::min(left, kBlocksPerStep));
  return keys;
}

void VerifyCall::Step() {
  if (is_cancelled_) {
    End(absl::CancelledError("the client is gone"));
    return;
  }
  progress_.Clear();
  const std::vector<BlockKey> keys = NextKeys();
  for (const BlockKey& key : keys) {
    const absl::Status status = parts_.store->Verify(key);
    // A block that is not here, or no longer, is a miss and not a bad one.
    if (status.code() == absl::StatusCode::kUnavailable) {
      End(status);
      return;
    }
    if (!status.ok() && status.code() != absl::StatusCode::kNotFound) {
      progress_.add_bad_keys(std::string(key.AsStringView()));
    }
  }
  num_checked_ += static_cast<int64_t>(keys.size());
  // Blocks come and go while we walk.
  num_total_ = std::max(num_total_, num_checked_);
  const bool is_done = is_all_ ? static_cast<int64_t>(keys.size()) < kBlocksPerStep
                               : num_checked_ == static_cast<int64_t>(keys_.size());
  if (is_done) num_total_ = num_checked_;
  progress_.set_num_checked(static_cast<uint64_t>(num_checked_));
  progress_.set_num_total(static_cast<uint64_t>(num_total_));
  progress_.set_done(is_done);
  StartWrite(&progress_);
}

void VerifyCall::OnWriteDone(bool ok) {
  if (!ok) {
    End(absl::CancelledError("the client is gone"));
  } else if (progress_.done()) {
    End(absl::OkStatus());
  } else {
    SubmitStep();
  }
}

void VerifyCall::End(const absl::Status& status) {
  timer_.Done(status.code());
  permit_ = Permit();
  Finish(ToGrpcStatus(WithRetryHint(status)));
}

}  // namespace kvstow
