#include "client/python/src/waits.h"

#include <unistd.h>

#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/python/src/errors.h"
#include "kernels/core/mutex.h"

namespace kvstow::python {

namespace py = pybind11;

namespace {

// One piece of work on its own thread.
class Job {
 public:
  void MarkDone() {
    MutexLock lock(&mutex_);
    is_done_ = true;
    done_.SignalAll();
  }
  bool is_done() {
    MutexLock lock(&mutex_);
    return is_done_;
  }
  // False: not done yet.
  bool WaitFor(absl::Duration timeout) {
    MutexLock lock(&mutex_);
    if (!is_done_) done_.WaitFor(&mutex_, timeout);
    return is_done_;
  }

 private:
  Mutex mutex_;
  CondVar done_;
  bool is_done_ ABSL_GUARDED_BY(mutex_) = false;
};

// What Ctrl-C left running, and the memory that it uses. Guarded by the GIL; never destroyed, since
// the threads may outlive the interpreter.
struct Abandoned {
  std::shared_ptr<Job> job;
  std::shared_ptr<void> keep;
};
std::vector<Abandoned>& AbandonedJobs() {
  static auto* jobs = new std::vector<Abandoned>;
  return *jobs;
}

void DropFinishedJobs() {
  std::vector<Abandoned>& jobs = AbandonedJobs();
  std::vector<Abandoned> running;
  for (Abandoned& entry : jobs) {
    if (!entry.job->is_done()) running.push_back(std::move(entry));
  }
  jobs.swap(running);
}

unsigned long main_thread = 0;
pid_t first_user = 0;

}  // namespace

void RememberMainThread() {
  main_thread =
      py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
}

bool IsForked() { return first_user != 0 && first_user != getpid(); }

void RaiseIfForked() {
  if (first_user == 0) first_user = getpid();
  if (!IsForked()) return;
  Raise(absl::FailedPreconditionError(absl::StrCat(
      "process ", getpid(), " was forked from process ", first_user,
      ", which had used kvstow: a connection does not survive a fork. Start workers with the "
      "\"spawn\" or \"forkserver\" method, or make the first client after the fork")));
}

void RunInterruptibly(std::shared_ptr<void> keep, std::function<void()> work) {
  if (PyThread_get_thread_ident() != main_thread) {
    const py::gil_scoped_release release;
    work();
    return;
  }
  DropFinishedJobs();
  auto job = std::make_shared<Job>();
  std::thread thread([job, work = std::move(work)]() mutable {
    work();
    work = nullptr;  // what it owned is gone before anyone is told
    job->MarkDone();
  });
  while (true) {
    bool is_done = false;
    {
      const py::gil_scoped_release release;
      is_done = job->WaitFor(kSignalPoll);
    }
    if (is_done) break;
    if (PyErr_CheckSignals() == 0) continue;
    AbandonedJobs().push_back({.job = job, .keep = std::move(keep)});
    thread.detach();
    RaisePythonError();
  }
  thread.join();
}

}  // namespace kvstow::python
