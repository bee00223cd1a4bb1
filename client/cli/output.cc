#include "client/cli/output.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

constexpr absl::Duration kQuiet = absl::Milliseconds(500);   // shorter work shows no bar
constexpr absl::Duration kRedraw = absl::Milliseconds(100);  // a terminal needs no more
constexpr int kBarWidth = 30;
constexpr std::string_view kWipeLine = "\r\x1b[K";

const Clock& ThisMachinesClock() {
  static const RealClock clock;
  return clock;
}

bool IsNumeric(const std::string& cell) {
  if (cell.empty()) return false;
  const size_t digit_idx = cell[0] == '-' || cell[0] == '+' ? 1 : 0;
  if (cell == "-") return true;
  return cell.size() > digit_idx && std::isdigit(static_cast<unsigned char>(cell[digit_idx]));
}

}  // namespace

void Output::Line(std::string_view text) {
  if (!is_json_) out_ << text << std::endl;
}

void Output::Json(const nlohmann::ordered_json& object) {
  if (!is_json_) return;
  out_ << object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace)
       << std::endl;
}

void Output::Raw(std::string_view text) { out_ << text << std::flush; }

void Output::Note(std::string_view text) { err_ << text << std::endl; }

std::string Table::Text() const {
  std::vector<size_t> widths;
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  // A header stands where the cells under it stand.
  std::vector<bool> is_right(widths.size(), rows_.size() > 1);
  for (size_t r = 1; r < rows_.size(); ++r) {
    for (size_t i = 0; i < rows_[r].size(); ++i) {
      if (!rows_[r][i].empty() && !IsNumeric(rows_[r][i])) is_right[i] = false;
    }
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string pad(widths[i] - row[i].size(), ' ');
      absl::StrAppend(&line, i == 0 ? "" : "  ", is_right[i] ? pad + row[i] : row[i] + pad);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&text, text.empty() ? "" : "\n", line);
  }
  return text;
}

Progress::Progress(Output& output, std::string label, uint64_t total, const Clock& clock)
    : output_(output),
      label_(std::move(label)),
      total_(total),
      clock_(clock),
      start_(clock.Now()),
      last_drawn_(start_) {}

Progress::Progress(Output& output, std::string label, uint64_t total)
    : Progress(output, std::move(label), total, ThisMachinesClock()) {}

Progress::~Progress() {
  if (is_drawn_) output_.err() << kWipeLine << std::flush;
}

void Progress::Update(uint64_t done) {
  if (!output_.err_is_terminal()) return;
  const absl::Time now = clock_.Now();
  if (now - start_ < kQuiet || now - last_drawn_ < kRedraw) return;
  last_drawn_ = now;
  is_drawn_ = true;
  output_.err() << kWipeLine << ProgressText(label_, done, total_) << std::flush;
}

std::string ProgressText(std::string_view label, uint64_t done, uint64_t total) {
  done = std::min(done, total);
  const double share = total == 0 ? 1.0 : static_cast<double>(done) / static_cast<double>(total);
  const int filled = static_cast<int>(share * kBarWidth);
  return absl::StrFormat("%s [%s%s] %3.0f %%  %d/%d", std::string(label), std::string(filled, '#'),
                         std::string(kBarWidth - filled, ' '), std::floor(share * 100), done,
                         total);
}

std::string FormatNumber(double value, int digits) {
  return absl::StrFormat("%.*f", digits, value);
}

std::string FormatShort(double value) {
  if (std::isnan(value)) return "-";
  return absl::StrFormat("%.3g", value);
}

std::string UptimeText(absl::Duration uptime) {
  if (uptime < absl::Seconds(1)) return "0s";
  return absl::FormatDuration(absl::Trunc(uptime, absl::Seconds(1)));
}

double MedianOf(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double PercentileOf(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double rank = std::ceil(share * static_cast<double>(values.size()));
  return values[std::clamp<int64_t>(static_cast<int64_t>(rank) - 1, 0,
                                    static_cast<int64_t>(values.size()) - 1)];
}

}  // namespace kvstow
