#include "client/cli/bench_codec.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <latch>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/codec/codec.h"
#include "kernels/codec/rotation.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

constexpr int kTokensPerPlane = 64;
constexpr int kRounds = 7;
constexpr int kMaxThreads = 256;
constexpr int64_t kScalarBytes = int64_t{4} << 20;

// Rows near a Gaussian with a mean per channel, in planes of one block.
class BenchRows {
 public:
  BenchRows(int dim, int64_t input_bytes)
      : dim_(dim),
        plane_row_bytes_(int64_t{2} * kTokensPerPlane * dim),
        num_planes_(std::max<int64_t>(1, input_bytes / plane_row_bytes_)),
        rows_(num_planes_ * plane_row_bytes_ / 2),
        rotation_(Rotation::Reflection(dim, 1)) {
    uint64_t state = 20261130;
    const auto next = [&state] {  // SplitMix64
      uint64_t z = (state += 0x9e3779b97f4a7c15u);
      z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
      z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
      return z ^ (z >> 31);
    };
    const auto gaussian = [&next] {  // sum of four uniforms, standard deviation 1
      const uint64_t r = next();
      const auto sum = static_cast<double>((r & 0xffff) + ((r >> 16) & 0xffff) +
                                           ((r >> 32) & 0xffff) + (r >> 48));
      return static_cast<float>((sum / 65535.0 - 2.0) * 1.7320508);
    };
    std::vector<float> mean(dim);
    for (float& m : mean) m = gaussian();
    for (size_t i = 0; i < rows_.size(); i += dim) {
      const float scale = 0.5f + 0.25f * static_cast<float>(next() % 8);
      for (int j = 0; j < dim; ++j) rows_[i + j] = FloatToBf16(scale * gaussian() + mean[j]);
    }
  }

  int64_t num_planes() const { return num_planes_; }
  int64_t plane_row_bytes() const { return plane_row_bytes_; }
  const std::byte* plane(int64_t i) const {
    return reinterpret_cast<const std::byte*>(rows_.data()) + i * plane_row_bytes_;
  }
  // Keys and values in turn; keys only where the codec serves no others.
  PlaneShape shape(const Codec& codec, int64_t i) const {
    PlaneShape shape{.num_tokens = kTokensPerPlane, .dim = dim_, .role = Role::kValue};
    if (codec.needs_rotation && rotation_.ok()) shape.rotation = &*rotation_;
    if (i % 2 == 0 || !codec.accepts(shape)) shape.role = Role::kKey;
    return shape;
  }

 private:
  int dim_;
  int64_t plane_row_bytes_;
  int64_t num_planes_;
  std::vector<uint16_t> rows_;
  absl::StatusOr<Rotation> rotation_;  // of codecs with a calibration; none at odd dims
};

double ThreadCpuSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

struct Timing {
  double wall_s = 0;
  double cpu_s = 0;
};

// Runs work(first, last) over [0, num_planes) split evenly among threads that start together.
template <class Work>
Timing RunThreads(int num_threads, int64_t num_planes, const Work& work) {
  using Clock = std::chrono::steady_clock;
  std::vector<Clock::time_point> begin(num_threads), end(num_threads);
  std::vector<double> cpu(num_threads);
  std::latch start(num_threads);
  const auto run = [&](int i) {
    start.arrive_and_wait();
    const double cpu_before = ThreadCpuSeconds();
    begin[i] = Clock::now();
    work(num_planes * i / num_threads, num_planes * (i + 1) / num_threads);
    end[i] = Clock::now();
    cpu[i] = ThreadCpuSeconds() - cpu_before;
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < num_threads; ++i) threads.emplace_back(run, i);
  run(0);
  for (std::thread& thread : threads) thread.join();
  Timing timing;
  timing.wall_s = std::chrono::duration<double>(*std::max_element(end.begin(), end.end()) -
                                                *std::min_element(begin.begin(), begin.end()))
                      .count();
  for (double seconds : cpu) timing.cpu_s += seconds;
  return timing;
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Scalar code runs on fewer rows, or nobody would wait for it.
int64_t NumScalarPlanes(const BenchRows& rows, int num_threads) {
  const int64_t wanted = kScalarBytes / rows.plane_row_bytes();
  return std::min(rows.num_planes(), std::max<int64_t>(num_threads, wanted));
}

// Has only the plain code of a definition: not to be judged by its speed.
bool IsReference(const Codec& codec) { return codec.id != CodecId::kRaw && codec.host.size() == 1; }

// The buffers of one codec at one dim, all touched.
struct Buffers {
  Buffers(const Codec& codec, const BenchRows& rows)
      : plane_bytes(codec.plane_bytes(rows.shape(codec, 0))),
        planes(rows.num_planes() * plane_bytes, std::byte{1}),
        decoded(rows.num_planes() * rows.plane_row_bytes(), std::byte{1}) {}
  int64_t plane_bytes;
  std::vector<std::byte> planes;
  std::vector<std::byte> decoded;
};

// Encodes and decodes planes with every backend, and leaves what they encode to in `buffers`: all
// planes, but of codecs whose scalar code is slow only those that it will be measured with.
absl::Status VerifyBytes(const Codec& codec, const BenchRows& rows, Buffers& buffers) {
  const bool is_slow = codec.needs_rotation || IsReference(codec);
  const int64_t num_compared = is_slow ? NumScalarPlanes(rows, kMaxThreads) : rows.num_planes();
  std::vector<std::byte> other(buffers.plane_bytes);
  std::vector<std::byte> want(rows.plane_row_bytes()), got(rows.plane_row_bytes());
  for (int64_t i = 0; i < rows.num_planes(); ++i) {
    const PlaneShape shape = rows.shape(codec, i);
    std::byte* plane = buffers.planes.data() + i * buffers.plane_bytes;
    const bool is_compared = i < num_compared;
    if (!is_compared && IsReference(codec)) break;
    const CodecBackend& first = is_compared ? codec.host[0] : BestBackend(codec);
    if (first.encode(shape, rows.plane(i), plane) != EncodeResult::kEncoded) {
      return absl::InternalError(absl::StrCat("codec ", std::string(codec.name), ": plane ", i,
                                              " of finite rows was not encoded"));
    }
    if (!is_compared) continue;
    codec.host[0].decode(shape, plane, want.data());
    for (const CodecBackend& backend : codec.host.subspan(1)) {
      if (!backend.supported()) continue;
      const bool encoded =
          backend.encode(shape, rows.plane(i), other.data()) == EncodeResult::kEncoded &&
          std::memcmp(other.data(), plane, buffers.plane_bytes) == 0;
      backend.decode(shape, plane, got.data());
      if (!encoded || got != want) {
        return absl::InternalError(absl::StrCat(
            "codec ", std::string(codec.name), ", backend ", std::string(backend.name), ": plane ",
            i, encoded ? " decodes" : " encodes", " to other bytes than the scalar reference"));
      }
    }
  }
  return absl::OkStatus();
}

struct Case {
  const Codec& codec;
  const CodecBackend& backend;
  const BenchRows& rows;
  bool is_encode;
  int num_threads;
};

CodecBenchLine Measure(const Case& c, Buffers& buffers) {
  const int64_t row_bytes = c.rows.plane_row_bytes();
  const bool is_scalar = c.backend.name == "scalar" && c.codec.id != CodecId::kRaw;
  const int64_t num_planes =
      is_scalar ? NumScalarPlanes(c.rows, c.num_threads) : c.rows.num_planes();
  const auto copy = [&](int64_t first, int64_t last) {
    std::memcpy(buffers.decoded.data() + first * row_bytes, c.rows.plane(first),
                (last - first) * row_bytes);
  };
  const auto code = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      std::byte* plane = buffers.planes.data() + i * buffers.plane_bytes;
      const PlaneShape shape = c.rows.shape(c.codec, i);
      if (c.is_encode) {
        c.backend.encode(shape, c.rows.plane(i), plane);
      } else {
        c.backend.decode(shape, plane, buffers.decoded.data() + i * row_bytes);
      }
    }
  };
  const double gb = static_cast<double>(num_planes * row_bytes) * 1e-9;
  const double copy_gb = static_cast<double>(c.rows.num_planes() * row_bytes) * 1e-9;
  RunThreads(c.num_threads, num_planes, code);  // warm up
  std::vector<double> rates, ratios, cpu;
  for (int round = 0; round < kRounds; ++round) {
    const Timing copied = RunThreads(c.num_threads, c.rows.num_planes(), copy);
    const Timing coded = RunThreads(c.num_threads, num_planes, code);
    rates.push_back(gb / coded.wall_s);
    ratios.push_back((gb / coded.wall_s) / (copy_gb / copied.wall_s));
    cpu.push_back(coded.cpu_s / gb);
  }
  return {.case_name = absl::StrCat(c.is_encode ? "encode/" : "decode/", std::string(c.codec.name),
                                    "/", std::string(c.backend.name), "/d",
                                    c.rows.shape(c.codec, 0).dim, "/t", c.num_threads),
          .gb_per_s = Median(rates),
          .ceiling = "memcpy",
          .ratio = Median(ratios),
          .cpu_s_per_gb = Median(cpu),
          .bits_per_value =
              16.0 * static_cast<double>(buffers.plane_bytes) / static_cast<double>(row_bytes)};
}

absl::Status CheckOptions(const CodecBenchOptions& options, std::vector<const Codec*>& codecs) {
  if (options.codecs.empty() || options.dims.empty() || options.threads.empty()) {
    return absl::InvalidArgumentError("codec benchmark: no codecs, dims or threads are given");
  }
  if (options.input_bytes < 1 || options.input_bytes > int64_t{16} << 30) {
    return absl::InvalidArgumentError(absl::StrCat(
        "codec benchmark: input is ", options.input_bytes, " bytes, want 1 to 16 GiB"));
  }
  for (int threads : options.threads) {
    if (threads >= 1 && threads <= kMaxThreads) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("codec benchmark: threads is ", threads, ", want 1 to ", kMaxThreads));
  }
  for (const std::string& name : options.codecs) {
    const Codec* codec = FindCodec(std::string_view(name));
    if (codec == nullptr) {
      std::vector<std::string> known;
      for (const Codec& each : AllCodecs()) known.emplace_back(each.name);
      return absl::InvalidArgumentError(absl::StrCat("codec benchmark: codec \"", name,
                                                     "\" is not known, want one of ",
                                                     absl::StrJoin(known, ", ")));
    }
    for (int dim : options.dims) {
      const BenchRows one_plane(dim, 1);
      if (codec->accepts(one_plane.shape(*codec, 0))) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("codec benchmark: codec \"", name, "\" does not accept head dim ", dim));
    }
    codecs.push_back(codec);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RunCodecBench(const CodecBenchOptions& options,
                           const std::function<void(const CodecBenchLine&)>& emit) {
  std::vector<const Codec*> codecs;
  KVSTOW_RETURN_IF_ERROR(CheckOptions(options, codecs));
  for (int dim : options.dims) {
    const BenchRows rows(dim, options.input_bytes);
    for (const Codec* codec : codecs) {
      Buffers buffers(*codec, rows);
      KVSTOW_RETURN_IF_ERROR(VerifyBytes(*codec, rows, buffers));
      for (const CodecBackend& backend : codec->host) {
        if (!backend.supported()) continue;
        for (bool is_encode : {true, false}) {
          for (int num_threads : options.threads) {
            emit(Measure({*codec, backend, rows, is_encode, num_threads}, buffers));
          }
        }
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace kvstow
