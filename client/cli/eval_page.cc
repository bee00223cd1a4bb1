#include "client/cli/eval_page.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/output.h"
#include "kernels/core/check.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

constexpr double kWidth = 720;
constexpr double kHeight = 360;
constexpr double kLeft = 56;
constexpr double kRight = 120;  // names of the dots
constexpr double kTop = 16;
constexpr double kBottom = 44;
constexpr double kCell = 18;  // of a heat map

constexpr std::string_view kHead =
    "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
    "<meta name=\"viewport\" content=\"width=device-width\">\n<title>kvstow eval</title>\n<style>\n"
    ":root{color-scheme:light dark;--line:#8884}\n"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}\n"
    "svg{max-width:100%;height:auto;font:12px system-ui,sans-serif;fill:currentColor}\n"
    "svg .grid{stroke:var(--line)}svg .dot{fill:#0072b2}svg "
    ".cell{fill:#d55e00;stroke:var(--line)}\n"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}\n"
    "td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid var(--line)}\n"
    "td:first-child,th:first-child{text-align:left}div{overflow-x:auto}\n"
    "</style></head><body>\n";

// Whole powers of ten around positive numbers.
struct LogRange {
  double least = 0;
  double most = 1;

  double Share(double value) const {
    if (!(value > 0)) return 0;
    return std::clamp((std::log10(value) - least) / (most - least), 0.0, 1.0);
  }
};

template <class Values>
LogRange RangeOf(const Values& values) {
  double least = std::numeric_limits<double>::infinity();
  double most = 0;
  for (double value : values) {
    if (!(value > 0) || !std::isfinite(value)) continue;
    least = std::min(least, value);
    most = std::max(most, value);
  }
  if (most == 0) return {};
  const double low = std::floor(std::log10(least));
  // The sum turns a zero below zero, which would be written so, into a plain one.
  return {low, std::max(std::ceil(std::log10(most)), low + 1) + 0.0};
}

// Attention KL over bits per value. A codec without loss stands on the lower edge.
class RatePlot {
 public:
  explicit RatePlot(const EvalReport& report) : report_(report) {
    std::vector<double> kls;
    for (const JudgedCodec& judged : report.codecs) {
      kls.push_back(judged.quality.total.attention_kl);
      most_bits_ = std::max(most_bits_, std::ceil(judged.bits_per_value));
    }
    kl_ = RangeOf(kls);
  }

  std::string Svg() const {
    std::string out = absl::StrFormat(
        "<svg viewBox=\"0 0 %g %g\" role=\"img\" aria-label=\"attention KL over bits per "
        "value\">\n",
        kWidth, kHeight);
    for (double power = kl_.least; power <= kl_.most; ++power) {
      const double y = Y(std::pow(10, power));
      absl::StrAppendFormat(&out,
                            "<line class=\"grid\" x1=\"%g\" x2=\"%g\" y1=\"%.1f\" y2=\"%.1f\"/>"
                            "<text x=\"%g\" y=\"%.1f\" text-anchor=\"end\">1e%g</text>\n",
                            kLeft, kWidth - kRight, y, y, kLeft - 6, y + 4, power);
    }
    for (double bits = 0; bits <= most_bits_; bits += most_bits_ > 8 ? 2 : 1) {
      absl::StrAppendFormat(&out, "<text x=\"%.1f\" y=\"%g\" text-anchor=\"middle\">%g</text>\n",
                            X(bits), kHeight - kBottom + 18, bits);
    }
    for (const JudgedCodec& judged : report_.codecs) out += Dot(judged);
    return absl::StrCat(
        out,
        absl::StrFormat("<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">bits per value</text>",
                        (kLeft + kWidth - kRight) / 2, kHeight - 6),
        "\n</svg>\n");
  }

 private:
  double X(double bits) const { return kLeft + bits / most_bits_ * (kWidth - kLeft - kRight); }
  double Y(double kl) const { return kTop + (1 - kl_.Share(kl)) * (kHeight - kTop - kBottom); }

  std::string Dot(const JudgedCodec& judged) const {
    const double kl = judged.quality.total.attention_kl;
    const std::string name = HtmlText(judged.codec);
    return absl::StrFormat(
        "<circle class=\"dot\" cx=\"%.1f\" cy=\"%.1f\" r=\"4\"><title>%s: %.3f bits, KL "
        "%.3g</title></circle><text x=\"%.1f\" y=\"%.1f\">%s</text>\n",
        X(judged.bits_per_value), Y(kl), name, judged.bits_per_value, kl,
        X(judged.bits_per_value) + 7, Y(kl) - 5, name);
  }

  const EvalReport& report_;
  double most_bits_ = 1;
  LogRange kl_;
};

// A column per layer, a row per KV head; the darker, the larger the attention KL. One scale for all
// codecs of a report.
std::string HeatMap(const JudgedCodec& judged, const LogRange& range) {
  const QualityMap& map = judged.quality;
  std::string out = absl::StrFormat(
      "<svg width=\"%g\" viewBox=\"0 0 %g %g\" role=\"img\" aria-label=\"attention KL of %s by "
      "layer "
      "and KV head\">\n",
      kLeft + kCell * map.num_layers, kLeft + kCell * map.num_layers,
      kCell * (map.num_heads + 1) + 4, HtmlText(judged.codec));
  for (int32_t layer_idx = 0; layer_idx < map.num_layers; ++layer_idx) {
    for (int32_t head_idx = 0; head_idx < map.num_heads; ++head_idx) {
      const Quality& cell = map.at(layer_idx, head_idx);
      absl::StrAppendFormat(
          &out,
          "<rect class=\"cell\" x=\"%g\" y=\"%g\" width=\"%g\" height=\"%g\" fill-opacity=\"%.2f\">"
          "<title>layer %d, head %d: KL %.3g, output error %.3g, K %.3g, V %.3g</title></rect>\n",
          kLeft + kCell * layer_idx, kCell * head_idx, kCell, kCell, range.Share(cell.attention_kl),
          layer_idx, head_idx, cell.attention_kl, cell.output_error, cell.k_error, cell.v_error);
    }
    if (layer_idx % 5 == 0) {
      absl::StrAppendFormat(&out, "<text x=\"%g\" y=\"%g\">%d</text>\n",
                            kLeft + kCell * layer_idx + 2, kCell * (map.num_heads + 1) - 2,
                            layer_idx);
    }
  }
  for (int32_t head_idx = 0; head_idx < map.num_heads; ++head_idx) {
    absl::StrAppendFormat(&out, "<text x=\"%g\" y=\"%g\" text-anchor=\"end\">head %d</text>\n",
                          kLeft - 6, kCell * head_idx + 13, head_idx);
  }
  return out + "</svg>\n";
}

std::string TableOf(const EvalReport& report) {
  std::string out =
      "<div><table><tr><th>codec</th><th>bits per value</th><th>K error</th><th>V error</th>"
      "<th>attention KL</th><th>output error</th></tr>\n";
  for (const JudgedCodec& judged : report.codecs) {
    const Quality& total = judged.quality.total;
    absl::StrAppend(&out, "<tr><td>", HtmlText(judged.codec), "</td><td>",
                    FormatNumber(judged.bits_per_value, 3));
    for (double figure : {total.k_error, total.v_error, total.attention_kl, total.output_error}) {
      absl::StrAppend(&out, "</td><td>", FormatShort(figure));
    }
    out += "</td></tr>\n";
  }
  return out + "</table></div>\n";
}

}  // namespace

std::string EvalPage(const EvalReport& report) {
  KVSTOW_CHECK(!report.codecs.empty());
  std::vector<double> kls;
  for (const JudgedCodec& judged : report.codecs) {
    for (const Quality& cell : judged.quality.cells) kls.push_back(cell.attention_kl);
  }
  const LogRange range = RangeOf(kls);
  std::string out(kHead);
  absl::StrAppend(
      &out, "<h1>kvstow eval: ", HtmlText(report.model), "</h1>\n<p>", report.num_tokens,
      " tokens, judged by ", report.num_queries,
      " queries of each query head. Errors are squares over squares; the KL of attention "
      "is in nats, exact against decoded.</p>\n",
      RatePlot(report).Svg(), TableOf(report),
      "<h2>Where</h2>\n<p>Attention KL by layer and KV head, from 1e", range.least,
      " (empty) to 1e", range.most, " (full).</p>\n");
  for (const JudgedCodec& judged : report.codecs) {
    absl::StrAppend(&out, "<h3>", HtmlText(judged.codec), "</h3>\n<div>", HeatMap(judged, range),
                    "</div>\n");
  }
  return out + "</body></html>\n";
}

}  // namespace kvstow
