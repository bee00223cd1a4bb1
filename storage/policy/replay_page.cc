#include "storage/policy/replay_page.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/core/text.h"

namespace kvstow::policy {
namespace {

constexpr double kWidth = 720;
constexpr double kHeight = 360;
constexpr double kLeft = 56;
constexpr double kRight = 190;  // names of the curves
constexpr double kTop = 16;
constexpr double kBottom = 44;
// Told apart in pairs and by people who do not see all colours (Okabe and Ito), then repeated.
constexpr std::array<std::string_view, 7> kColours = {"#0072b2", "#e69f00", "#009e73", "#d55e00",
                                                      "#cc79a7", "#56b4e9", "#6b5b00"};

constexpr std::string_view kHead =
    "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
    "<meta name=\"viewport\" content=\"width=device-width\">\n<title>kvstow "
    "replay</title>\n<style>\n"
    ":root{color-scheme:light dark;--line:#8884}\n"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}\n"
    "svg{width:100%;height:auto;font:12px system-ui,sans-serif;fill:currentColor}\n"
    "svg .grid{stroke:var(--line)}svg polyline{fill:none;stroke-width:2}\n"
    "svg .oracle{stroke-dasharray:5 4}\n"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}\n"
    "td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid var(--line)}\n"
    "td:first-child,th:first-child{text-align:left}div{overflow-x:auto}\n"
    "</style></head><body>\n";

bool IsOracle(const std::string& policy) {
  const auto& kinds = AllPolicies();
  return std::any_of(kinds.begin(), kinds.end(),
                     [&](const PolicyKind& kind) { return kind.name == policy && kind.is_oracle; });
}

// A curve: percent over capacity.
struct Curve {
  std::string name;
  std::vector<double> percent;
  std::string_view colour;
  bool is_oracle = false;
};

class Chart {
 public:
  // `capacities`: at least one, any order.
  Chart(const std::vector<int64_t>& capacities, double most)
      : capacities_(capacities),
        least_x_(
            std::log(static_cast<double>(*std::min_element(capacities.begin(), capacities.end())))),
        most_x_(
            std::log(static_cast<double>(*std::max_element(capacities.begin(), capacities.end())))),
        most_(std::clamp(10 * std::ceil(most / 10), 10.0, 100.0)) {}

  std::string Svg(std::string_view label, std::vector<Curve> curves) const {
    std::string out =
        absl::StrFormat("<svg viewBox=\"0 0 %g %g\" role=\"img\" aria-label=\"%s\">\n", kWidth,
                        kHeight, HtmlText(label));
    out += Axes();
    for (const Curve& curve : curves) out += Line(curve);
    return out + Names(std::move(curves)) + "</svg>\n";
  }

 private:
  double X(int64_t capacity) const {
    const double span = most_x_ - least_x_;
    const double share =
        span == 0 ? .5 : (std::log(static_cast<double>(capacity)) - least_x_) / span;
    return kLeft + share * (kWidth - kLeft - kRight);
  }
  double Y(double percent) const {
    return kTop + (1 - percent / most_) * (kHeight - kTop - kBottom);
  }

  std::string Axes() const {
    std::string out;
    for (int i = 0; i <= 5; ++i) {
      const double percent = most_ * i / 5;
      absl::StrAppendFormat(&out,
                            "<line class=\"grid\" x1=\"%g\" x2=\"%g\" y1=\"%.1f\" y2=\"%.1f\"/>"
                            "<text x=\"%g\" y=\"%.1f\" text-anchor=\"end\">%g %%</text>\n",
                            kLeft, kWidth - kRight, Y(percent), Y(percent), kLeft - 6,
                            Y(percent) + 4, percent);
    }
    for (const int64_t capacity : capacities_) {
      absl::StrAppendFormat(&out, "<text x=\"%.1f\" y=\"%g\" text-anchor=\"middle\">%d</text>\n",
                            X(capacity), kHeight - kBottom + 18, capacity);
    }
    absl::StrAppendFormat(&out, "<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">blocks</text>\n",
                          (kLeft + kWidth - kRight) / 2, kHeight - 6);
    return out;
  }

  std::string Line(const Curve& curve) const {
    std::string points;
    std::string dots;
    for (size_t i = 0; i < curve.percent.size(); ++i) {
      const double x = X(capacities_[i]);
      const double y = Y(curve.percent[i]);
      absl::StrAppendFormat(&points, "%s%.1f,%.1f", i == 0 ? "" : " ", x, y);
      absl::StrAppendFormat(
          &dots,
          "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"><title>%s, %d blocks: "
          "%.1f %%</title></circle>\n",
          x, y, std::string(curve.colour), HtmlText(curve.name), capacities_[i], curve.percent[i]);
    }
    return absl::StrFormat("<polyline class=\"%s\" stroke=\"%s\" points=\"%s\"/>\n%s",
                           curve.is_oracle ? "oracle" : "rule", std::string(curve.colour), points,
                           dots);
  }

  // At the right end of the curves, in their order, none above another.
  std::string Names(std::vector<Curve> curves) const {
    constexpr double kStep = 15;
    std::sort(curves.begin(), curves.end(),
              [](const Curve& a, const Curve& b) { return a.percent.back() > b.percent.back(); });
    std::string out;
    double next = kTop;
    for (size_t i = 0; i < curves.size(); ++i) {
      const double last = kHeight - 8 - kStep * static_cast<double>(curves.size() - 1 - i);
      const double y = std::min(std::max(next, Y(curves[i].percent.back()) + 4), last);
      next = y + kStep;
      absl::StrAppendFormat(&out, "<text x=\"%g\" y=\"%.1f\" fill=\"%s\">%s</text>\n",
                            kWidth - kRight + 12, y, std::string(curves[i].colour),
                            HtmlText(curves[i].name));
    }
    return out;
  }

  const std::vector<int64_t>& capacities_;
  const double least_x_;
  const double most_x_;
  const double most_;
};

std::string CurveChart(const ReplayReport& report, std::string_view label,
                       double (*rate)(const SimResult& result)) {
  std::vector<Curve> curves;
  double most = 0;
  for (size_t i = 0; i < report.rows.size(); ++i) {
    const ReplayRow& row = report.rows[i];
    Curve curve{.name = RowName(row),
                .colour = kColours[i % kColours.size()],
                .is_oracle = IsOracle(row.policy)};
    for (const SimResult& result : row.by_capacity) {
      curve.percent.push_back(100 * rate(result));
      most = std::max(most, curve.percent.back());
    }
    curves.push_back(std::move(curve));
  }
  return Chart(report.options.blocks, most).Svg(label, std::move(curves));
}

std::string TierRows(const ReplayReport& report) {
  std::string out =
      "<div><table><tr><th>policy</th><th>whole histories</th><th>blocks found</th>"
      "<th>first token, follow-ups</th><th>95th percentile</th><th>all</th></tr>\n";
  for (const ReplayRow& row : report.rows) {
    const SimResult& r = row.tiers;
    absl::StrAppendFormat(&out,
                          "<tr><td>%s</td><td>%.1f %%</td><td>%.1f %%</td><td>%.3f s</td>"
                          "<td>%.3f s</td><td>%.3f s</td></tr>\n",
                          HtmlText(RowName(row)), 100 * r.full_hit_rate(), 100 * r.block_hit_rate(),
                          r.mean_follow_up_ttft_s, r.p95_follow_up_ttft_s, r.mean_ttft_s);
  }
  return out + "</table></div>\n";
}

}  // namespace

std::string FormatPage(const ReplayReport& report) {
  const ReplayOptions& options = report.options;
  std::string out(kHead);
  absl::StrAppendFormat(
      &out,
      "<h1>Which block leaves next</h1>\n<p>%s: %d requests in %.0f minutes, %d of them follow-up "
      "turns; %d prompt blocks of %d tokens, %d different. Simulated; the first %g %% are not "
      "scored. Dashed: oracles, which know the future.</p>\n",
      HtmlText(options.trace_path), report.num_requests, report.span_s / 60, report.num_follow_ups,
      report.num_blocks, options.block_tokens, report.num_distinct, 100 * options.warmup);
  if (!options.blocks.empty() && !report.rows.empty()) {
    out += "<h2>Follow-up turns that found their whole history</h2>\n";
    out += CurveChart(report, "whole histories found, by capacity",
                      [](const SimResult& r) { return r.full_hit_rate(); });
    out += "<h2>Blocks found</h2>\n";
    out += CurveChart(report, "blocks found, by capacity",
                      [](const SimResult& r) { return r.block_hit_rate(); });
  }
  if (!options.tiers.empty()) {
    std::string sizes;
    for (const int64_t blocks : options.tiers) {
      absl::StrAppend(&sizes, sizes.empty() ? "" : " / ", blocks);
    }
    absl::StrAppend(&out, "<h2>Tiers of ", sizes, " blocks</h2>\n", TierRows(report));
  }
  return out + "</body></html>\n";
}

}  // namespace kvstow::policy
