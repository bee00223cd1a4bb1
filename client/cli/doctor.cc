#include "client/cli/doctor.h"

#include <dirent.h>
#include <dlfcn.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/cli/daemon.h"
#include "client/cli/output.h"
#include "kernels/codec/codec.h"
#include "kernels/codec/simd.h"
#include "kernels/core/device.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
// RDMA registration and pinned memory need room for an arena; below this not even a small one fits.
constexpr int64_t kMemlockWanted = 1024 * kMiB;
constexpr int64_t kOpenFilesWanted = 4096;  // RocksDB keeps its files open

std::string ReadText(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return std::string(absl::StripAsciiWhitespace(text.str()));
}

// The value of "name : value" in a /proc file; empty where there is none.
std::string ProcField(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 1));
    if (parts.size() == 2 && absl::StripAsciiWhitespace(parts[0]) == ToAbsl(name)) {
      return std::string(absl::StripAsciiWhitespace(parts[1]));
    }
  }
  return "";
}

// A field of /proc/meminfo in bytes.
int64_t MemInfoBytes(std::string_view name) {
  const std::vector<std::string> parts = absl::StrSplit(ProcField("/proc/meminfo", name), ' ');
  int64_t kib = 0;
  return absl::SimpleAtoi(parts[0], &kib) ? kib * 1024 : 0;
}

std::vector<std::string> Entries(const std::string& dir) {
  std::vector<std::string> names;
  DIR* const handle = opendir(dir.c_str());
  if (handle == nullptr) return names;
  while (const dirent* entry = readdir(handle)) {
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  }
  closedir(handle);
  std::sort(names.begin(), names.end());
  return names;
}

// A shared library for as long as this object lives.
class Library {
 public:
  explicit Library(const char* name) : handle_(dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) error_ = dlerror();
  }
  ~Library() {
    if (handle_ != nullptr) dlclose(handle_);
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  bool is_loaded() const { return handle_ != nullptr; }
  const std::string& error() const { return error_; }
  template <typename Function>
  Function* Find(const char* name) const {
    return handle_ == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(handle_, name));
  }

 private:
  void* const handle_;
  std::string error_;
};

// --- processor and memory ---

Finding Processor() {
  constexpr std::array<std::string_view, 12> kOfUse = {
      "sse4_2",      "avx2",        "fma",      "f16c",  "avx512f", "avx512bw",
      "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "sve",     "sve2"};
  const std::string flags = absl::StrCat(ProcField("/proc/cpuinfo", "flags"), " ",
                                         ProcField("/proc/cpuinfo", "Features"));
  const std::vector<std::string> known = absl::StrSplit(flags, ' ', absl::SkipEmpty());
  std::vector<std::string> found;
  for (std::string_view feature : kOfUse) {
    if (std::find(known.begin(), known.end(), feature) != known.end()) found.emplace_back(feature);
  }
  std::string model = ProcField("/proc/cpuinfo", "model name");
  if (model.empty()) model = "unknown model";
  return {"cpu", FindingState::kOk, absl::StrCat(model, "; ", absl::StrJoin(found, " ")), ""};
}

Finding Simd() {
  const std::vector<std::string_view> targets = SimdTargets();
  if (!SimdSupported() || targets.empty()) {
    return {"simd", FindingState::kWarn, "the scalar reference",
            "quantizing is many times slower here; use a CPU with AVX2, AVX-512 or NEON"};
  }
  std::vector<std::string> names(targets.begin(), targets.end());
  const Codec* codec = FindCodec(CodecId::kTq4);
  const std::string backend = codec == nullptr ? "none" : std::string(BestBackend(*codec).name);
  return {"simd", FindingState::kOk,
          absl::StrCat("backend ", backend, " on ", names.back(), "; this machine has ",
                       absl::StrJoin(names, ", ")),
          ""};
}

Finding Cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int num_usable = sched_getaffinity(0, sizeof(set), &set) == 0
                             ? CPU_COUNT(&set)
                             : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  std::string detail = absl::StrCat(num_usable, " usable of ", sysconf(_SC_NPROCESSORS_ONLN));
  const std::vector<std::string> quota = absl::StrSplit(ReadText("/sys/fs/cgroup/cpu.max"), ' ');
  double quota_us = 0;
  double period_us = 0;
  if (quota.size() == 2 && absl::SimpleAtod(quota[0], &quota_us) &&
      absl::SimpleAtod(quota[1], &period_us) && period_us > 0) {
    absl::StrAppend(&detail, ", control group allows ", quota_us / period_us);
  }
  if (num_usable < 2) {
    return {"cores", FindingState::kWarn, detail,
            "with one core the daemon and its clients take turns; give it two or more"};
  }
  return {"cores", FindingState::kOk, detail, ""};
}

Finding Memory() {
  std::string detail = absl::StrCat(FormatBytes(MemInfoBytes("MemTotal")), ", ",
                                    FormatBytes(MemInfoBytes("MemAvailable")), " available");
  const std::string limit = ReadText("/sys/fs/cgroup/memory.max");
  int64_t limit_bytes = 0;
  if (absl::SimpleAtoi(limit, &limit_bytes)) {
    absl::StrAppend(&detail, ", control group allows ", FormatBytes(limit_bytes));
  }
  return {"memory", FindingState::kOk, detail, ""};
}

Finding Memlock() {
  rlimit limit = {};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  if (limit.rlim_cur == RLIM_INFINITY) return {"memlock", FindingState::kOk, "unlimited", ""};
  const int64_t bytes = static_cast<int64_t>(limit.rlim_cur);
  const bool is_enough = bytes >= kMemlockWanted;
  return {"memlock", is_enough ? FindingState::kOk : FindingState::kWarn, FormatBytes(bytes),
          is_enough ? ""
                    : "pinned memory (GPU, RDMA) will not fit: ulimit -l unlimited, or "
                      "LimitMEMLOCK=infinity in the unit file"};
}

Finding OpenFiles() {
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  const bool is_enough =
      limit.rlim_cur == RLIM_INFINITY || static_cast<int64_t>(limit.rlim_cur) >= kOpenFilesWanted;
  return {"open files", is_enough ? FindingState::kOk : FindingState::kWarn,
          limit.rlim_cur == RLIM_INFINITY ? "unlimited" : absl::StrCat(limit.rlim_cur),
          is_enough ? "" : "a large disk tier keeps more files open: ulimit -n 65536"};
}

Finding HugePages() {
  const std::string thp = ReadText("/sys/kernel/mm/transparent_hugepage/enabled");
  const size_t open = thp.find('[');
  const size_t close = thp.find(']');
  const std::string mode =
      open != std::string::npos && close > open ? thp.substr(open + 1, close - open - 1) : "absent";
  const std::string detail = absl::StrCat(
      "transparent: ", mode, "; reserved: ", ProcField("/proc/meminfo", "HugePages_Total"), " of ",
      ProcField("/proc/meminfo", "Hugepagesize"));
  if (mode == "never" || mode == "absent") {
    return {"huge pages", FindingState::kAbsent, detail,
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"};
  }
  return {"huge pages", FindingState::kOk, detail, ""};
}

Finding SharedMemory() {
  const int fd = memfd_create("kvstow-doctor", MFD_CLOEXEC);
  if (fd < 0) {
    return {"shared memory", FindingState::kAbsent, "memfd_create is not permitted",
            "a seccomp profile forbids it; the shared-memory path cannot be used"};
  }
  close(fd);
  return {"shared memory", FindingState::kOk, "memfd works", ""};
}

// --- devices and libraries ---

Finding Gpu() {
  const Library cuda("libcuda.so.1");
  using InitFn = int(unsigned);
  using CountFn = int(int*);
  using NameFn = int(char*, int, int);
  auto* const init = cuda.Find<InitFn>("cuInit");
  auto* const get_count = cuda.Find<CountFn>("cuDeviceGetCount");
  auto* const get_name = cuda.Find<NameFn>("cuDeviceGetName");
  if (init == nullptr || get_count == nullptr || get_name == nullptr) {
    return {"gpu", FindingState::kAbsent, "no CUDA driver (libcuda.so.1)",
            "quantizing runs on the CPU; with a GPU install NVIDIA's driver, in containers "
            "--gpus all"};
  }
  int num_devices = 0;
  const int error = init(0);
  if (error != 0 || get_count(&num_devices) != 0 || num_devices == 0) {
    return {"gpu", FindingState::kAbsent,
            absl::StrCat("a driver but no device (cuInit gives ", error, ")"),
            "is the device visible to this process? nvidia-smi tells"};
  }
  std::vector<std::string> names;
  for (int i = 0; i < num_devices; ++i) {
    std::array<char, 128> name = {};
    if (get_name(name.data(), name.size(), i) == 0) names.emplace_back(name.data());
  }
  return {"gpu", FindingState::kOk, absl::StrJoin(names, ", "), ""};
}

// The hbm tier of a service here: what its own build finds, not only what there is.
Finding HbmTier() {
  const DeviceList list = ListDevices();
  if (list.devices.empty()) {
    return {"hbm tier", FindingState::kAbsent, list.why_none,
            "services keep blocks in host memory and on disk; hbm.capacity must be 0"};
  }
  return {"hbm tier", FindingState::kOk,
          absl::StrCat("possible, up to ", FormatBytes(list.devices[0].memory_bytes),
                       ": hbm.capacity, 0 unless set"),
          ""};
}

Finding Nvml() {
  const Library nvml("libnvidia-ml.so.1");
  using InitFn = int();
  using VersionFn = int(char*, unsigned);
  auto* const init = nvml.Find<InitFn>("nvmlInit_v2");
  auto* const version = nvml.Find<VersionFn>("nvmlSystemGetDriverVersion");
  auto* const shutdown = nvml.Find<InitFn>("nvmlShutdown");
  if (init == nullptr || version == nullptr || shutdown == nullptr || init() != 0) {
    return {"gpu driver", FindingState::kAbsent, "NVML (libnvidia-ml.so.1) is not usable", ""};
  }
  std::array<char, 96> text = {};
  version(text.data(), text.size());
  shutdown();
  return {"gpu driver", FindingState::kOk, text.data(), ""};
}

Finding Nccl() {
  const Library nccl("libnccl.so.2");
  auto* const get_version = nccl.Find<int(int*)>("ncclGetVersion");
  int version = 0;
  if (get_version == nullptr || get_version(&version) != 0) {
    return {"nccl", FindingState::kAbsent, "no libnccl.so.2",
            "only GPU to GPU transfers use it: apt install libnccl2"};
  }
  return {"nccl", FindingState::kOk,
          absl::StrCat(version / 10000, ".", version / 100 % 100, ".", version % 100), ""};
}

Finding Rdma() {
  const std::string root = "/sys/class/infiniband";
  std::vector<std::string> devices;
  for (const std::string& device : Entries(root)) {
    std::vector<std::string> ports;
    for (const std::string& port : Entries(absl::StrCat(root, "/", device, "/ports"))) {
      const std::string state =
          ReadText(absl::StrCat(root, "/", device, "/ports/", port, "/state"));  // "4: ACTIVE"
      ports.push_back(
          absl::StrCat(port, " ", state.substr(std::min(state.find(' ') + 1, state.size()))));
    }
    devices.push_back(absl::StrCat(device, " (port ", absl::StrJoin(ports, ", "), ")"));
  }
  if (devices.empty()) {
    return {"rdma", FindingState::kAbsent, "no device in /sys/class/infiniband",
            "transfers between machines use TCP"};
  }
  const std::string detail = absl::StrJoin(devices, "; ");
  if (!absl::StrContains(detail, "ACTIVE")) {
    return {"rdma", FindingState::kWarn, detail,
            "no port is active: cable, switch, or subnet manager"};
  }
  return {"rdma", FindingState::kOk, detail, ""};
}

Finding Ucx() {
  const Library ucx("libucp.so.0");
  auto* const version = ucx.Find<const char*()>("ucp_get_version_string");
  if (version == nullptr) {
    return {"ucx", FindingState::kAbsent, "no libucp.so.0",
            "only transfers between machines use it: apt install libucx0"};
  }
  return {"ucx", FindingState::kOk, version(), ""};
}

Finding RocksDb() {
  for (const char* name : {"librocksdb.so.7.8", "librocksdb.so.7", "librocksdb.so"}) {
    const Library rocksdb(name);
    if (rocksdb.is_loaded()) return {"rocksdb", FindingState::kOk, name, ""};
  }
  return {"rocksdb", FindingState::kAbsent, "no librocksdb.so",
          "the daemon needs it, for its disk tier: apt install librocksdb7.8"};
}

Finding Daemon() {
  const absl::StatusOr<std::string> program = FindDaemon();
  if (program.ok()) return {"kvstowd", FindingState::kOk, *program, ""};
  return {"kvstowd", FindingState::kAbsent, std::string(program.status().message()), ""};
}

}  // namespace

std::string_view FindingStateName(FindingState state) {
  switch (state) {
    case FindingState::kOk:
      return "ok";
    case FindingState::kAbsent:
      return "absent";
    case FindingState::kWarn:
      return "warn";
  }
  return "unknown";
}

std::vector<Finding> ExamineMachine() {
  return {Processor(), Simd(),         Cores(),   Memory(),  Memlock(), OpenFiles(),
          HugePages(), SharedMemory(), Gpu(),     HbmTier(), Nvml(),    Nccl(),
          Rdma(),      Ucx(),          RocksDb(), Daemon()};
}

Finding ExamineService(const Service& service) {
  const absl::StatusOr<absl::Duration> answer = service.admin->Ping(absl::Seconds(2));
  if (!answer.ok()) {
    return {"service", FindingState::kAbsent, absl::StrCat("nothing answers at ", service.target),
            "start one: kvstow serve"};
  }
  const absl::StatusOr<ServiceStat> stat = service.admin->Stat();
  if (!stat.ok()) {
    return {"service", FindingState::kWarn, std::string(stat.status().message()),
            "it answers, but is it a kvstowd of this version?"};
  }
  return {"service", FindingState::kOk,
          absl::StrCat("kvstowd ", stat->version, " at ", service.target, ", ", stat->num_blocks,
                       " blocks, up ", UptimeText(stat->uptime)),
          ""};
}

Finding ExaminePaths(const Service& service) {
  const absl::StatusOr<std::vector<ServicePath>> paths = service.admin->ListPaths();
  if (!paths.ok()) {
    return {"paths", FindingState::kAbsent, "not known: no service that tells", ""};
  }
  std::vector<std::string> words;
  for (const ServicePath& path : *paths) {
    words.push_back(path.unavailable.empty()
                        ? path.path
                        : absl::StrCat("no ", path.path, " (", path.unavailable, ")"));
  }
  words.push_back("grpc");
  return {"paths", FindingState::kOk, absl::StrJoin(words, ", "), ""};
}

}  // namespace kvstow
