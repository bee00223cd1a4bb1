#include "storage/policy/replay_report.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace kvstow::policy {
namespace {

constexpr int kNameWidth = 26;

// 12288 -> "12,288"
std::string WithCommas(int64_t value) {
  std::string text = absl::StrCat(value);
  for (int64_t at = static_cast<int64_t>(text.size()) - 3; at > 0; at -= 3) {
    text.insert(static_cast<size_t>(at), 1, ',');
  }
  return text;
}

std::string CapacityTable(const ReplayReport& report) {
  std::string out = absl::StrFormat(
      "\nOne tier. Follow-up turns that found their whole history / blocks found, %%, by capacity "
      "in "
      "blocks\n%-*s",
      kNameWidth, "");
  for (const int64_t blocks : report.options.blocks) {
    absl::StrAppendFormat(&out, "%15s", WithCommas(blocks));
  }
  out += "\n";
  for (const ReplayRow& row : report.rows) {
    absl::StrAppendFormat(&out, "%-*s", kNameWidth, RowName(row));
    for (const SimResult& result : row.by_capacity) {
      absl::StrAppendFormat(&out, "%15s",
                            absl::StrFormat("%.1f / %.1f", 100 * result.full_hit_rate(),
                                            100 * result.block_hit_rate()));
    }
    out += "\n";
  }
  return out;
}

std::string TierTable(const ReplayReport& report) {
  std::string sizes;
  for (const int64_t blocks : report.options.tiers) {
    absl::StrAppend(&sizes, sizes.empty() ? "" : " / ", WithCommas(blocks));
  }
  std::string out = absl::StrFormat(
      "\nTiers of %s blocks. Hits by tier, %%; time to first token, s; blocks written per request\n"
      "%-*s%22s%12s%8s%8s%8s%8s%22s\n",
      sizes, kNameWidth, "", "hits", "whole, %", "follow", "p95", "all", "p95", "written");
  for (const ReplayRow& row : report.rows) {
    const SimResult& r = row.tiers;
    std::string hits;
    std::string written;
    for (size_t tier = 0; tier < report.options.tiers.size(); ++tier) {
      absl::StrAppendFormat(&hits, "%s%.1f", tier == 0 ? "" : " / ",
                            100 * r.tier_hit_rate(static_cast<int>(tier)));
      absl::StrAppendFormat(&written, "%s%.1f", tier == 0 ? "" : " / ",
                            static_cast<double>(r.written[tier]) /
                                static_cast<double>(std::max<int64_t>(1, r.requests)));
    }
    absl::StrAppendFormat(&out, "%-*s%22s%12.1f%8.3f%8.3f%8.3f%8.3f%22s\n", kNameWidth,
                          RowName(row), hits, 100 * r.full_hit_rate(), r.mean_follow_up_ttft_s,
                          r.p95_follow_up_ttft_s, r.mean_ttft_s, r.p95_ttft_s, written);
  }
  return out;
}

const ReplayRow* FindRow(const ReplayReport& report, std::string_view policy, bool has_hints) {
  for (const ReplayRow& row : report.rows) {
    if (row.policy == policy && (row.session_over > 0) == has_hints) return &row;
  }
  return nullptr;
}

// What the hints bought, when there is a row with and one without.
std::string HintLine(const ReplayReport& report) {
  if (report.options.tiers.empty()) return "";
  const ReplayRow* hinted = FindRow(report, "rtv", true);
  const ReplayRow* plain = FindRow(report, "rtv", false);
  if (hinted == nullptr || plain == nullptr) return "";
  const double with_hints = hinted->tiers.mean_follow_up_ttft_s;
  const auto change = [&](const ReplayRow* row) {
    return 100 * (with_hints / row->tiers.mean_follow_up_ttft_s - 1);
  };
  std::string out = absl::StrFormat(
      "\nValue of hints: %g %% of the sessions announce their end; first tokens of follow-ups come "
      "after %.3f s, %+.1f %% against rtv without hints",
      100 * hinted->session_over, with_hints, change(plain));
  const ReplayRow* lru = FindRow(report, "lru", false);
  if (lru != nullptr) absl::StrAppendFormat(&out, ", %+.1f %% against lru", change(lru));
  return out + ".\n";
}

std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&out, "\\u%04x", c);
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string JsonResult(const SimResult& r, size_t num_tiers) {
  std::string hits;
  std::string written;
  for (size_t tier = 0; tier < num_tiers; ++tier) {
    absl::StrAppend(&hits, tier == 0 ? "" : ",", r.hits[tier]);
    absl::StrAppend(&written, tier == 0 ? "" : ",", r.written[tier]);
  }
  return absl::StrFormat(
      "\"requests\":%d,\"follow_ups\":%d,\"blocks\":%d,\"full_hits\":%d,\"full_hit_rate\":%.6f,"
      "\"block_hit_rate\":%.6f,\"hits\":[%s],\"written\":[%s],\"mean_ttft_s\":%.6f,"
      "\"p95_ttft_s\":%.6f,\"mean_follow_up_ttft_s\":%.6f,\"p95_follow_up_ttft_s\":%.6f,"
      "\"evictions\":%d",
      r.requests, r.follow_ups, r.blocks, r.full_hits, r.full_hit_rate(), r.block_hit_rate(), hits,
      written, r.mean_ttft_s, r.p95_ttft_s, r.mean_follow_up_ttft_s, r.p95_follow_up_ttft_s,
      r.evictions);
}

}  // namespace

std::string RowName(const ReplayRow& row) {
  if (row.session_over == 0) return row.policy;
  return absl::StrFormat("%s, %g %% say over", row.policy, 100 * row.session_over);
}

std::string FormatTable(const ReplayReport& report) {
  std::string out = absl::StrFormat(
      "%s: %s requests in %.0f min, %s of them follow-ups; %s prompt blocks of %d tokens, %s "
      "different; the first %g %% are not scored\n",
      report.options.trace_path, WithCommas(report.num_requests), report.span_s / 60,
      WithCommas(report.num_follow_ups), WithCommas(report.num_blocks), report.options.block_tokens,
      WithCommas(report.num_distinct), 100 * report.options.warmup);
  if (!report.options.blocks.empty()) out += CapacityTable(report);
  if (!report.options.tiers.empty()) out += TierTable(report) + HintLine(report);
  return out;
}

std::string FormatJson(const ReplayReport& report) {
  std::string out = absl::StrFormat(
      "{\"trace\":{\"path\":%s,\"requests\":%d,\"follow_ups\":%d,\"blocks\":%d,"
      "\"distinct_blocks\":%d,\"span_s\":%.3f,\"block_tokens\":%d},\"warmup\":%g,\"policies\":[",
      Quoted(report.options.trace_path), report.num_requests, report.num_follow_ups,
      report.num_blocks, report.num_distinct, report.span_s, report.options.block_tokens,
      report.options.warmup);
  for (size_t i = 0; i < report.rows.size(); ++i) {
    const ReplayRow& row = report.rows[i];
    absl::StrAppendFormat(&out,
                          "%s\n{\"policy\":%s,\"session_over\":%g,\"seconds\":%.3f,"
                          "\"capacities\":[",
                          i == 0 ? "" : ",", Quoted(row.policy), row.session_over, row.seconds);
    for (size_t j = 0; j < row.by_capacity.size(); ++j) {
      absl::StrAppendFormat(&out, "%s\n {\"capacity\":%d,%s}", j == 0 ? "" : ",",
                            report.options.blocks[j], JsonResult(row.by_capacity[j], 1));
    }
    out += "]";
    if (!report.options.tiers.empty()) {
      std::string sizes;
      for (const int64_t blocks : report.options.tiers) {
        absl::StrAppend(&sizes, sizes.empty() ? "" : ",", blocks);
      }
      absl::StrAppendFormat(&out, ",\n \"tiers\":{\"capacities\":[%s],%s}", sizes,
                            JsonResult(row.tiers, report.options.tiers.size()));
    }
    out += "}";
  }
  return out + "\n]}\n";
}

}  // namespace kvstow::policy
