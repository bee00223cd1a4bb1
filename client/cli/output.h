// Output: what a command prints: text for people or one JSON object per line, and a progress bar.
//
//   output.Line("4 blocks");                          // text mode only
//   output.Json({{"blocks", 4}});                     // --json only
//   Progress progress(output, "verify", num_blocks);  // standard error, only on a terminal
//   progress.Update(num_checked);
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "kernels/core/clock.h"

namespace kvstow {

class Output {
 public:
  // The streams must outlive this object.
  Output(std::ostream& out, std::ostream& err, bool is_json, bool err_is_terminal)
      : out_(out), err_(err), is_json_(is_json), err_is_terminal_(err_is_terminal) {}

  bool is_json() const { return is_json_; }
  bool err_is_terminal() const { return err_is_terminal_; }

  void Line(std::string_view text);                 // nothing under --json
  void Json(const nlohmann::ordered_json& object);  // nothing without --json
  void Raw(std::string_view text);                  // in both modes, as it is
  void Note(std::string_view text);                 // a line on standard error, in both modes
  std::ostream& err() { return err_; }

 private:
  std::ostream& out_;
  std::ostream& err_;
  const bool is_json_;
  const bool err_is_terminal_;
};

// Columns as wide as their widest cell, two spaces apart; a column of numbers (with or without
// units) stands to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
  void AddRow(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  // Without a line end after the last row.
  std::string Text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// A bar on standard error. It shows up only on a terminal and only when the work takes longer than
// half a second, so scripts and short work never see it.
class Progress {
 public:
  // `clock` must outlive this object.
  Progress(Output& output, std::string label, uint64_t total, const Clock& clock);
  Progress(Output& output, std::string label, uint64_t total);  // on the clock of this machine
  ~Progress();                                                  // wipes the bar
  void Update(uint64_t done);
  void SetTotal(uint64_t total) { total_ = total; }

 private:
  Output& output_;
  const std::string label_;
  uint64_t total_;
  const Clock& clock_;
  const absl::Time start_;
  absl::Time last_drawn_;
  bool is_drawn_ = false;
};

// The bar's text: "verify [#####     ]  50 %  5/10". Total 0 counts as done.
std::string ProgressText(std::string_view label, uint64_t done, uint64_t total);

std::string FormatNumber(double value, int digits);  // fixed digits after the point
std::string FormatShort(double value);               // three significant digits, "-" for NaN
std::string UptimeText(absl::Duration uptime);       // whole seconds: "1h2m3s", "0s"
double MedianOf(std::vector<double> values);         // 0 for none
// The value below which `share` of the values lie (nearest rank); 0 for none.
double PercentileOf(std::vector<double> values, double share);

}  // namespace kvstow
