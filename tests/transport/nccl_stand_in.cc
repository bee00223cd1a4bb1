// Stands in for libnccl.so and libcudart.so in the tests of the NCCL path: the same functions with
// the same ABI, over unix sockets and host memory, two ranks only.
//
// Streams run in order on a thread of their own. As with the real one, a transfer whose peer is
// gone does not end by itself: it spins until the communicator is aborted. On request it
// misbehaves, see KvstowStandInMode; its version can be set by NCCL_STAND_IN_VERSION.
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>

#include "kernels/core/mutex.h"

namespace {

using kvstow::CondVar;
using kvstow::Mutex;
using kvstow::MutexLock;

enum Mode { kWell, kHang, kFail, kAbortHangs, kLie };
std::atomic<int> mode{kWell};

constexpr int kSuccess = 0;
constexpr int kSystemError = 2;
constexpr int kRemoteError = 6;
constexpr int kInProgress = 7;
constexpr int kCudaNotReady = 600;

struct UniqueId {
  char bytes[128];
};

struct Stream {
  Mutex mutex;
  CondVar changed;
  std::deque<std::function<void()>> work;
  bool is_ending = false;
  bool has_ended = false;

  Stream() {
    std::thread([this] { Run(); }).detach();
  }
  ~Stream() {
    MutexLock lock(&mutex);
    is_ending = true;
    changed.SignalAll();
    while (!has_ended) changed.WaitFor(&mutex, absl::Hours(1));
  }
  void Add(std::function<void()> one) {
    MutexLock lock(&mutex);
    work.push_back(std::move(one));
    changed.SignalAll();
  }
  void Run() {
    while (true) {
      std::function<void()> one;
      {
        MutexLock lock(&mutex);
        while (work.empty() && !is_ending) changed.WaitFor(&mutex, absl::Hours(1));
        if (work.empty()) {
          has_ended = true;
          changed.SignalAll();
          return;
        }
        one = std::move(work.front());
        work.pop_front();
      }
      one();
    }
  }
};

struct Comm {
  std::atomic<int> fd{-1};
  std::atomic<int> state{kInProgress};
  std::atomic<bool> is_aborted{false};
  std::thread connecting;
  Mutex mutex;
  CondVar aborted;

  ~Comm() {
    if (fd >= 0) close(fd);
  }
  void Abort() {
    MutexLock lock(&mutex);
    is_aborted = true;
    aborted.SignalAll();
  }
  void SpinUntilAborted() {
    MutexLock lock(&mutex);
    while (!is_aborted) aborted.WaitFor(&mutex, absl::Hours(1));
  }
  // False when aborted.
  bool AwaitReady(int descriptor, int16_t events) {
    while (!is_aborted) {
      pollfd entry = {.fd = descriptor, .events = events};
      if (poll(&entry, 1, 10) > 0) return true;
    }
    return false;
  }
  void Move(bool is_send, char* bytes, size_t count) {
    if (mode == kHang || mode == kAbortHangs) return SpinUntilAborted();
    if (mode == kFail) {
      state = kSystemError;
      return SpinUntilAborted();
    }
    for (size_t at = 0; at < count;) {
      if (!AwaitReady(fd, is_send ? POLLOUT : POLLIN)) return;
      const ssize_t moved = is_send ? send(fd, bytes + at, count - at, MSG_DONTWAIT | MSG_NOSIGNAL)
                                    : recv(fd, bytes + at, count - at, MSG_DONTWAIT);
      if (moved > 0) {
        at += static_cast<size_t>(moved);
      } else if (moved == 0 || errno != EAGAIN) {
        state = kRemoteError;
        return SpinUntilAborted();
      }
    }
    if (mode == kLie && !is_send) bytes[count / 2] ^= 1;
  }
};

struct Event {
  std::shared_ptr<std::atomic<bool>> has_passed = std::make_shared<std::atomic<bool>>(true);
};

// Listening sockets of ids that this process made, until rank 0 takes them.
struct Listeners {
  Mutex mutex;
  std::map<std::string, int> fds;
};
Listeners& AllListeners() {
  static auto* const listeners = new Listeners;
  return *listeners;
}

sockaddr_un AddressOf(const UniqueId& id) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, id.bytes, 32);  // abstract: no file
  return address;
}

int TakeListener(const UniqueId& id) {
  MutexLock lock(&AllListeners().mutex);
  const auto it = AllListeners().fds.find(std::string(id.bytes, 32));
  if (it == AllListeners().fds.end()) return -1;
  const int fd = it->second;
  AllListeners().fds.erase(it);
  return fd;
}

void Connect(Comm& comm, const UniqueId& id, int rank) {
  int fd = -1;
  if (rank == 0) {
    const int listener = TakeListener(id);
    if (comm.AwaitReady(listener, POLLIN)) fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    close(listener);
  } else {
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_un address = AddressOf(id);
    if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
      close(fd);
      fd = -1;
    }
  }
  comm.fd = fd;
  comm.state = fd >= 0 ? kSuccess : kRemoteError;
}

// A handle is a pointer to a shared one: streams keep a communicator until their work has ended.
std::shared_ptr<Comm>& CommOf(void* handle) { return *static_cast<std::shared_ptr<Comm>*>(handle); }

// What a caller may have to leave behind where an abort hangs: reachable, so that it is no leak.
struct Kept {
  Mutex mutex;
  std::set<void*> pointers;
  void Add(void* pointer) {
    MutexLock lock(&mutex);
    pointers.insert(pointer);
  }
  void Remove(void* pointer) {
    MutexLock lock(&mutex);
    pointers.erase(pointer);
  }
};
Kept& AllKept() {
  static auto* const kept = new Kept;
  return *kept;
}

int Enqueue(bool is_send, void* bytes, size_t count, void* comm_of, void* stream) {
  const std::shared_ptr<Comm> comm = CommOf(comm_of);
  if (comm->state != kSuccess) return comm->state;
  static_cast<Stream*>(stream)->Add([=] { comm->Move(is_send, static_cast<char*>(bytes), count); });
  return kInProgress;  // as one that does not block may say at any time
}

}  // namespace

extern "C" {

void KvstowStandInMode(int new_mode) { mode = new_mode; }

int ncclGetVersion(int* version) {
  const char* const set = std::getenv("NCCL_STAND_IN_VERSION");
  *version = set == nullptr ? 22809 : std::atoi(set);
  return kSuccess;
}

const char* ncclGetErrorString(int result) {
  return result == kRemoteError ? "remote process exited" : "stand-in error";
}

int ncclGetUniqueId(UniqueId* id) {
  *id = {};
  unsigned char random[16];
  if (getrandom(random, sizeof(random), 0) != sizeof(random)) return kSystemError;
  for (int i = 0; i < 16; ++i) {
    id->bytes[2 * i] = static_cast<char>('a' + random[i] / 16);
    id->bytes[2 * i + 1] = static_cast<char>('a' + random[i] % 16);
  }
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_un address = AddressOf(*id);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(fd, 1) != 0) {
    return kSystemError;
  }
  MutexLock lock(&AllListeners().mutex);
  AllListeners().fds[std::string(id->bytes, 32)] = fd;
  return kSuccess;
}

int ncclCommInitRankConfig(void** comm_of, int num_ranks, UniqueId id, int rank, void*) {
  if (num_ranks != 2 || rank < 0 || rank > 1) return kSystemError;
  auto* const comm = new std::shared_ptr<Comm>(std::make_shared<Comm>());
  (*comm)->connecting = std::thread([raw = comm->get(), id, rank] { Connect(*raw, id, rank); });
  *comm_of = comm;
  return kInProgress;
}

int ncclCommGetAsyncError(void* comm, int* state) {
  *state = CommOf(comm)->state;
  return kSuccess;
}

int ncclCommAbort(void* comm_of) {
  const std::shared_ptr<Comm> comm = CommOf(comm_of);
  while (mode == kAbortHangs) poll(nullptr, 0, 10);
  comm->Abort();
  comm->connecting.join();
  if (comm->fd >= 0) shutdown(comm->fd, SHUT_RDWR);
  delete static_cast<std::shared_ptr<Comm>*>(comm_of);
  return kSuccess;
}

int ncclSend(const void* bytes, size_t count, int, int, void* comm, void* stream) {
  return Enqueue(true, const_cast<void*>(bytes), count, comm, stream);
}
int ncclRecv(void* bytes, size_t count, int, int, void* comm, void* stream) {
  return Enqueue(false, bytes, count, comm, stream);
}

int cudaSetDevice(int device) { return device == 0 ? kSuccess : 101; }
int cudaMalloc(void** memory, size_t bytes) {
  if (posix_memalign(memory, 4096, bytes) != 0) return 2;
  AllKept().Add(*memory);
  return kSuccess;
}
int cudaFree(void* memory) {
  AllKept().Remove(memory);
  std::free(memory);
  return kSuccess;
}
int cudaMemset(void* memory, int value, size_t bytes) {
  std::memset(memory, value, bytes);
  return kSuccess;
}
int cudaDeviceSynchronize() { return kSuccess; }
int cudaStreamCreateWithFlags(void** stream, unsigned) {
  *stream = new Stream;
  AllKept().Add(*stream);
  return kSuccess;
}
int cudaStreamDestroy(void* stream) {
  AllKept().Remove(stream);
  delete static_cast<Stream*>(stream);
  return kSuccess;
}
int cudaEventCreateWithFlags(void** event, unsigned) {
  *event = new Event;
  AllKept().Add(*event);
  return kSuccess;
}
int cudaEventDestroy(void* event) {
  AllKept().Remove(event);
  delete static_cast<Event*>(event);
  return kSuccess;
}
int cudaEventRecord(void* event, void* stream) {
  const auto has_passed = static_cast<Event*>(event)->has_passed;
  *has_passed = false;
  static_cast<Stream*>(stream)->Add([has_passed] { *has_passed = true; });
  return kSuccess;
}
int cudaEventQuery(void* event) {
  return *static_cast<Event*>(event)->has_passed ? kSuccess : kCudaNotReady;
}

}  // extern "C"
