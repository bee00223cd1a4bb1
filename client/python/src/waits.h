// Waits: calls that take time, without the GIL, and interruptible where Python delivers signals.
//
//   auto request = std::make_shared<GetArgs>(...);   // owns the arrays
//   GetSummary got = Wait<absl::StatusOr<GetSummary>>(request, [client, r = request.get()] {
//     return client->Get(r->model, r->keys, r->layers);
//   });
//
// On the main thread the work runs on a thread of its own while this one looks for signals every
// kSignalPoll: Ctrl-C ends the wait, not the work. `keep` (the arrays) then lives until the work is
// over, and is dropped by a later call. On other threads the work runs where it was called.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/time/time.h"

namespace kvstow::python {

inline constexpr absl::Duration kSignalPoll = absl::Milliseconds(50);

// Runs `work`, which must not touch Python and must own, or borrow from `keep`, all that it uses.
// Raises KeyboardInterrupt, or whatever else a signal handler raised.
void RunInterruptibly(std::shared_ptr<void> keep, std::function<void()> work);

// Remembers the thread on which signals are handled, and the process. Called at import.
void RememberMainThread();

// kFailedPrecondition after a fork of a process that has used gRPC: its threads are not here.
// Called by everything that would call the service. Remembers the first process that asks.
void RaiseIfForked();
bool IsForked();

template <typename T>
T Wait(std::shared_ptr<void> keep, std::function<T()> work) {
  auto result = std::make_shared<std::optional<T>>();
  RunInterruptibly(std::move(keep), [result, work = std::move(work)] { result->emplace(work()); });
  return *std::move(*result);
}

}  // namespace kvstow::python
