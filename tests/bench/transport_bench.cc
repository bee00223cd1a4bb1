// What the paths past gRPC carry, beside the bounds of this machine in the same minutes.
//
//   transport_bench [--pool-mib N] [--rounds N] [--check]
//
// A pool of N MiB (128) is moved to or from a window of the same size, in transfers of 64 KiB,
// 1 MiB and 16 MiB; larger than any cache, so every copy goes to memory. The median of the rounds
// (5) is printed, its share of the bound, and the CPU time of both: the bound is one memcpy for
// shm, a plain TCP socket over loopback between two threads for ucx. Bytes are compared before
// anything is timed. UCX is bound to "tcp" and "lo"; its worker is a thread of this process.
// --check: exit status 1 where shm is below 0.8 of memcpy or ucx below the socket, from 1 MiB on.
#include <netinet/in.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/text.h"
#include "tests/testing/rng.h"
#include "transport/owned_fd.h"
#include "transport/shm_transport.h"
#include "transport/shm_window.h"
#include "transport/ucx.h"

namespace kvstow {
namespace {

using Bytes = absl::Span<std::byte>;

constexpr int64_t kSizes[] = {64 << 10, 1 << 20, 16 << 20};
constexpr size_t kDepth = 8;  // transfers in flight
constexpr absl::Duration kPatience = absl::Seconds(60);

void Fill(Bytes bytes, uint64_t seed) {
  testing::Rng rng(seed);
  for (size_t at = 0; at + 8 <= bytes.size(); at += 8) {
    const uint64_t word = rng.Next();
    std::memcpy(bytes.data() + at, &word, 8);
  }
}

double CpuSeconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// One way of moving the pool: medians over the rounds.
struct Measured {
  std::vector<double> seconds;
  std::vector<double> cpu_seconds;

  void Add(const std::function<void()>& move) {
    const double cpu = CpuSeconds();
    const auto start = std::chrono::steady_clock::now();
    move();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    seconds.push_back(took.count());
    cpu_seconds.push_back(CpuSeconds() - cpu);
  }
  static double Median(std::vector<double> values) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
  }
};

void CopyAll(Bytes from, Bytes to, size_t size) {
  for (size_t at = 0; at < from.size(); at += size) {
    std::memcpy(to.data() + at, from.data() + at, std::min(size, from.size() - at));
  }
}

// Two connected TCP sockets over loopback.
std::pair<OwnedFd, OwnedFd> SocketPair() {
  const OwnedFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {.sin_family = AF_INET};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  KVSTOW_CHECK(bind(listener.get(), any, length) == 0 && listen(listener.get(), 1) == 0 &&
               getsockname(listener.get(), any, &length) == 0);
  OwnedFd from(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  KVSTOW_CHECK(connect(from.get(), any, length) == 0);
  OwnedFd to(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  KVSTOW_CHECK(to.is_open());
  return {std::move(from), std::move(to)};
}

void SendAll(Bytes from, Bytes to, size_t size, const std::pair<OwnedFd, OwnedFd>& sockets) {
  std::thread sender([&] {
    for (size_t at = 0; at < from.size();) {
      const ssize_t sent = send(sockets.first.get(), from.data() + at,
                                std::min(size, from.size() - at), MSG_NOSIGNAL);
      KVSTOW_CHECK(sent > 0);
      at += static_cast<size_t>(sent);
    }
  });
  for (size_t at = 0; at < to.size();) {
    const ssize_t got =
        recv(sockets.second.get(), to.data() + at, std::min(size, to.size() - at), MSG_WAITALL);
    KVSTOW_CHECK(got > 0);
    at += static_cast<size_t>(got);
  }
  sender.join();
}

// The whole pool over a channel, kDepth transfers in flight.
void MoveAll(Channel& channel, TransferOp op, Bytes pool, size_t size) {
  std::vector<Completion> done(kDepth);
  size_t in_flight = 0;
  const auto take = [&] {
    const size_t taken = channel.Poll(absl::MakeSpan(done), kPatience);
    KVSTOW_CHECK(taken > 0);
    for (size_t i = 0; i < taken; ++i) KVSTOW_CHECK(done[i].status.ok());
    in_flight -= taken;
  };
  for (size_t at = 0; at < pool.size(); at += size) {
    if (in_flight == kDepth) take();
    KVSTOW_CHECK(channel
                     .Post({.op = op,
                            .window_offset = static_cast<int64_t>(at),
                            .local = pool.subspan(at, std::min(size, pool.size() - at)),
                            .timeout = kPatience})
                     .ok());
    ++in_flight;
  }
  while (in_flight > 0) take();
}

struct Bench {
  size_t pool_bytes = 128 << 20;
  int rounds = 5;
  bool is_right = true;
  bool is_fast = true;

  void Verify(Window& window, Channel& channel, Bytes pool) {
    for (const TransferOp op : {TransferOp::kRead, TransferOp::kWrite}) {
      Fill(window.memory(), 1);
      Fill(pool, 2);
      MoveAll(channel, op, pool, 1 << 20);
      std::vector<std::byte> want(pool.size());
      Fill(absl::MakeSpan(want), op == TransferOp::kRead ? 1 : 2);
      is_right = is_right && std::memcmp(want.data(), pool.data(), want.size()) == 0 &&
                 std::memcmp(want.data(), window.memory().data(), want.size()) == 0;
    }
  }

  void Row(const std::string& name, int64_t size, const Measured& path, const Measured& bound) {
    const double seconds = Measured::Median(path.seconds);
    const double gigabytes = static_cast<double>(pool_bytes) / 1e9;
    std::printf("%-12s%10s%9.2f%10.2f%12.2f%12.2f\n", name.c_str(), FormatBytes(size).c_str(),
                gigabytes / seconds, Measured::Median(bound.seconds) / seconds,
                Measured::Median(path.cpu_seconds) / gigabytes,
                Measured::Median(bound.cpu_seconds) / gigabytes);
    std::fflush(stdout);
  }

  void RunPath(Window& window, Channel& channel, Bytes pool) {
    Verify(window, channel, pool);
    if (!is_right) return;
    const bool is_shm = channel.path() == PathKind::kShm;
    const double least = is_shm ? 0.8 : 1.0;
    const auto sockets = SocketPair();
    for (const int64_t size : kSizes) {
      const auto bytes = static_cast<size_t>(size);
      for (const TransferOp op : {TransferOp::kRead, TransferOp::kWrite}) {
        const bool is_read = op == TransferOp::kRead;
        Measured bound;
        Measured carried;
        // In turns, so that both meet the same load of the machine.
        for (int round = 0; round < rounds; ++round) {
          bound.Add([&] {
            const Bytes from = is_read ? window.memory() : pool;
            const Bytes to = is_read ? pool : window.memory();
            if (is_shm) CopyAll(from, to, bytes);
            if (!is_shm) SendAll(from, to, bytes, sockets);
          });
          carried.Add([&] { MoveAll(channel, op, pool, bytes); });
        }
        Row(absl::StrCat(ToAbsl(PathName(channel.path())), is_read ? " read" : " write"), size,
            carried, bound);
        if (size >= 1 << 20 &&
            Measured::Median(bound.seconds) < least * Measured::Median(carried.seconds)) {
          is_fast = false;
        }
      }
    }
  }
};

template <typename T>
T OrDie(absl::StatusOr<T> value) {
  if (!value.ok()) std::fprintf(stderr, "%s\n", value.status().ToString().c_str());
  KVSTOW_CHECK(value.ok());
  return *std::move(value);
}

void RunShm(Bench& bench, Bytes pool) {
  const std::string socket =
      (std::filesystem::temp_directory_path() / absl::StrCat("kvstow-bench-", getpid())).string();
  auto transport = OrDie(ShmTransport::Listen({.socket_path = socket}));
  auto window = OrDie(
      OpenShmWindow({.socket_path = socket, .bytes = static_cast<int64_t>(bench.pool_bytes)}));
  auto channel = OrDie(transport->Attach(window->ticket(), kPatience));
  bench.RunPath(*window, *channel, pool);
}

void RunUcx(Bench& bench, Bytes pool) {
  if (!IsUcxBuilt()) {
    std::printf("ucx: not built\n");
    return;
  }
  const UcxNetwork network = {.tls = "tcp", .net_devices = "lo"};
  auto transport = OrDie(MakeUcxTransport({.network = network}));
  auto window =
      OrDie(OpenUcxWindow({.bytes = static_cast<int64_t>(bench.pool_bytes), .network = network}));
  auto channel = OrDie(transport->Attach(window->ticket(), kPatience));
  bench.RunPath(*window, *channel, pool);
}

int Main(int argc, char** argv) {
  Bench bench;
  bool is_checked = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    const int64_t value = i + 1 < argc ? std::atoll(argv[i + 1]) : 0;
    if (word == "--check") {
      is_checked = true;
    } else if (word == "--pool-mib" && value >= 1 && value <= 2048) {
      bench.pool_bytes = static_cast<size_t>(value) << 20;
      ++i;
    } else if (word == "--rounds" && value >= 1 && value <= 1000) {
      bench.rounds = static_cast<int>(value);
      ++i;
    } else {
      std::fputs("usage: transport_bench [--pool-mib 1..2048] [--rounds 1..1000] [--check]\n",
                 stderr);
      return 2;
    }
  }
  std::vector<std::byte> pool(bench.pool_bytes);
  std::printf("%-12s%10s%9s%10s%12s%12s\n", "path", "transfers", "GB/s", "of bound", "CPU s/GB",
              "of bound");
  RunShm(bench, absl::MakeSpan(pool));
  RunUcx(bench, absl::MakeSpan(pool));
  if (!bench.is_right) {
    std::fputs("bytes differ\n", stderr);
    return 1;
  }
  if (is_checked && !bench.is_fast) {
    std::fputs("a path is slower than its bound allows\n", stderr);
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace kvstow

int main(int argc, char** argv) { return kvstow::Main(argc, argv); }
