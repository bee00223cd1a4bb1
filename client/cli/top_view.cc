#include "client/cli/top_view.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/output.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

using Json = nlohmann::ordered_json;

std::string Bytes(double bytes) { return FormatBytes(static_cast<int64_t>(bytes)); }

// Counters of the time between two answers.
class Rates {
 public:
  Rates(const ServiceStat& before, const ServiceStat& now, double seconds)
      : before_(before), now_(now), seconds_(seconds), is_same_(now.uptime >= before.uptime) {}

  double Grown(const std::string& counter) const {
    const double now = Value(now_, counter);
    return is_same_ ? std::max(0.0, now - Value(before_, counter)) : now;
  }
  double seconds() const { return seconds_; }
  double PerSecond(const std::string& counter) const { return Grown(counter) / seconds_; }
  // NaN where nothing was counted.
  static double Share(double part, double whole) {
    return whole > 0 ? part / whole : std::numeric_limits<double>::quiet_NaN();
  }
  double hits() const { return Grown("hbm_hits") + Grown("dram_hits") + Grown("nvme_hits"); }

 private:
  static double Value(const ServiceStat& stat, const std::string& counter) {
    const auto found = stat.counters.find(counter);
    return found == stat.counters.end() ? 0 : static_cast<double>(found->second);
  }

  const ServiceStat& before_;
  const ServiceStat& now_;
  const double seconds_;
  const bool is_same_;
};

std::string Percent(double share) {
  return share != share ? "-" : absl::StrFormat("%.1f %%", 100 * share);
}

double FullShare(const ServiceTier& tier) {
  return tier.capacity_bytes == 0
             ? 0
             : static_cast<double>(tier.used_bytes) / static_cast<double>(tier.capacity_bytes);
}

std::string TiersText(const ServiceStat& now, const Rates& rates) {
  constexpr int kBar = 20;
  Table table({"TIER", "BLOCKS", "USED", "CAPACITY", "FULL", "", "HITS/S", "EVICTIONS/S"});
  for (const ServiceTier& tier : now.tiers) {
    const double share = FullShare(tier);
    const int filled = std::clamp(static_cast<int>(share * kBar + 0.5), 0, kBar);
    table.AddRow({tier.tier, absl::StrCat(tier.num_blocks),
                  Bytes(static_cast<double>(tier.used_bytes)),
                  Bytes(static_cast<double>(tier.capacity_bytes)), Percent(share),
                  absl::StrCat("[", std::string(filled, '#'), std::string(kBar - filled, '.'), "]"),
                  FormatNumber(rates.PerSecond(tier.tier + "_hits"), 1),
                  FormatNumber(rates.PerSecond(tier.tier + "_evictions"), 1)});
  }
  return table.Text();
}

std::string CodecsText(const ServiceStat& now) {
  Table table({"CODEC", "BLOCKS", "STORED", "KV", "RATIO"});
  for (const ServiceCodec& codec : now.codecs) {
    const double ratio = Rates::Share(static_cast<double>(codec.logical_bytes),
                                      static_cast<double>(codec.record_bytes));
    table.AddRow({codec.codec, absl::StrCat(codec.num_blocks),
                  Bytes(static_cast<double>(codec.record_bytes)),
                  Bytes(static_cast<double>(codec.logical_bytes)),
                  ratio != ratio ? "-" : FormatNumber(ratio, 2)});
  }
  return table.Text();
}

std::string TrafficText(const Rates& rates) {
  const auto bytes = [&](std::initializer_list<const char*> counters) {
    double sum = 0;
    for (const char* counter : counters) sum += rates.PerSecond(counter);
    return absl::StrCat(Bytes(sum), "/s");
  };
  const auto count = [&](const char* counter) { return FormatNumber(rates.PerSecond(counter), 1); };
  Table table({"TRAFFIC", "PER S", "OF IT", "SHARE"});
  table.AddRow({"blocks read",
                FormatNumber((rates.hits() + rates.Grown("misses")) / rates.seconds(), 1), "found",
                Percent(Rates::Share(rates.hits(), rates.hits() + rates.Grown("misses")))});
  table.AddRow({"keys looked up", count("lookups"), "found",
                Percent(Rates::Share(rates.Grown("lookup_hits"), rates.Grown("lookups")))});
  table.AddRow({"turns", count("turns"), "follow-ups",
                Percent(Rates::Share(rates.Grown("follow_up_turns"), rates.Grown("turns")))});
  table.AddRow({"blocks sealed", count("seals"), "", ""});
  table.AddRow({"put", bytes({"put_rows_bytes", "put_encoded_bytes"}), "", ""});
  table.AddRow({"get", bytes({"get_rows_bytes", "get_encoded_bytes"}), "", ""});
  table.AddRow({"disk written", bytes({"nvme_bytes_written"}), "", ""});
  table.AddRow({"disk read", bytes({"nvme_bytes_read"}), "", ""});
  return table.Text();
}

}  // namespace

std::string TopText(const ServiceStat& before, const ServiceStat& now, double seconds) {
  const Rates rates(before, now, seconds);
  std::string text = absl::StrFormat(
      "kvstowd %s, up %s, policy %s, %s resident (index %s, policy %s)\n"
      "%d blocks, %d open tickets, %d leases, %s pinned, %s waiting for the disk\n\n",
      now.version, UptimeText(now.uptime), now.policy.empty() ? "?" : now.policy,
      Bytes(static_cast<double>(now.resident_bytes)), Bytes(static_cast<double>(now.index_bytes)),
      Bytes(static_cast<double>(now.policy_bytes)), now.num_blocks, now.open_tickets,
      now.open_leases, Bytes(static_cast<double>(now.pinned_bytes)),
      Bytes(static_cast<double>(now.write_behind_bytes)));
  absl::StrAppend(&text, TiersText(now, rates), "\n\n", TrafficText(rates), "\n");
  if (!now.codecs.empty()) absl::StrAppend(&text, "\n", CodecsText(now), "\n");
  // What should not happen, when it does.
  std::string trouble;
  for (const char* counter : {"corrupt_blocks", "nvme_write_errors", "leases_expired",
                              "tickets_expired", "demotions_dropped", "bad_checksums"}) {
    const double grown = rates.Grown(counter);
    if (grown > 0) absl::StrAppendFormat(&trouble, "  %s +%.0f", counter, grown);
  }
  if (!trouble.empty()) absl::StrAppend(&text, "\nsince the last look:", trouble, "\n");
  return text;
}

nlohmann::ordered_json TopJson(const ServiceStat& before, const ServiceStat& now, double seconds) {
  const Rates rates(before, now, seconds);
  const auto share = [](double part, double whole) {
    return whole > 0 ? Json(part / whole) : Json(nullptr);
  };
  Json tiers = Json::array();
  for (const ServiceTier& tier : now.tiers) {
    tiers.push_back({{"tier", tier.tier},
                     {"blocks", tier.num_blocks},
                     {"used_bytes", tier.used_bytes},
                     {"capacity_bytes", tier.capacity_bytes},
                     {"full", FullShare(tier)},
                     {"hits_per_s", rates.PerSecond(tier.tier + "_hits")},
                     {"evictions_per_s", rates.PerSecond(tier.tier + "_evictions")}});
  }
  Json codecs = Json::array();
  for (const ServiceCodec& codec : now.codecs) {
    codecs.push_back({{"codec", codec.codec},
                      {"blocks", codec.num_blocks},
                      {"record_bytes", codec.record_bytes},
                      {"logical_bytes", codec.logical_bytes}});
  }
  Json per_s = Json::object();
  for (const auto& [name, value] : now.counters) per_s[name] = rates.PerSecond(name);
  return {{"seconds", seconds},
          {"policy", now.policy},
          {"blocks", now.num_blocks},
          {"open_tickets", now.open_tickets},
          {"open_leases", now.open_leases},
          {"pinned_bytes", now.pinned_bytes},
          {"write_behind_bytes", now.write_behind_bytes},
          {"resident_bytes", now.resident_bytes},
          {"hit_share", share(rates.hits(), rates.hits() + rates.Grown("misses"))},
          {"lookup_hit_share", share(rates.Grown("lookup_hits"), rates.Grown("lookups"))},
          {"follow_up_share", share(rates.Grown("follow_up_turns"), rates.Grown("turns"))},
          {"tiers", tiers},
          {"codecs", codecs},
          {"per_s", per_s}};
}

}  // namespace kvstow
