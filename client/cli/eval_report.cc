#include "client/cli/eval_report.h"

#include <cerrno>
#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/core/check.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

// What stands before the figures of a line.
struct Place {
  std::string layer;
  std::string head;
};

std::string CsvLine(const JudgedCodec& judged, const Place& place, double k_bits, double v_bits,
                    const Quality& quality) {
  // Codecs' names have commas in them, never quotes.
  return absl::StrFormat("\"%s\",%s,%s,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g\n", judged.codec, place.layer,
                         place.head, k_bits, v_bits, quality.k_error, quality.v_error,
                         quality.attention_kl, quality.output_error);
}

double MeanOf(const std::vector<double>& values) {
  double sum = 0;
  for (double value : values) sum += value;
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

}  // namespace

std::string EvalCsv(const EvalReport& report) {
  std::string out = "codec,layer,kv_head,k_bits,v_bits,k_error,v_error,attention_kl,output_error\n";
  for (const JudgedCodec& judged : report.codecs) {
    const QualityMap& map = judged.quality;
    KVSTOW_CHECK(judged.k_bits.size() == map.cells.size() &&
                 judged.v_bits.size() == map.cells.size());
    out += CsvLine(judged, {"all", "all"}, MeanOf(judged.k_bits), MeanOf(judged.v_bits), map.total);
    for (size_t i = 0; i < map.cells.size(); ++i) {
      const int32_t cell_idx = static_cast<int32_t>(i);
      const Place place{absl::StrCat(cell_idx / map.num_heads),
                        absl::StrCat(cell_idx % map.num_heads)};
      out += CsvLine(judged, place, judged.k_bits[i], judged.v_bits[i], map.cells[i]);
    }
  }
  return out;
}

absl::Status WriteTextFile(const std::string& path, std::string_view text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (file) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(path, ": cannot be written: ", std::strerror(errno)));
}

}  // namespace kvstow
