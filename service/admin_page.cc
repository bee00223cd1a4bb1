#include "service/admin_page.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "kernels/core/check.h"
#include "service/admin_assets.h"

namespace kvstow {
namespace {

using Json = nlohmann::ordered_json;

// Pairs of codecs beyond these, the least used ones, are left out.
constexpr size_t kCodecsMax = 64;

Json TiersJson(const StoreStats& store) {
  Json tiers = Json::array();
  for (const TierStats& tier : store.tiers) {
    tiers.push_back({{"tier", TierName(tier.kind)},
                     {"blocks", tier.num_blocks},
                     {"capacity_bytes", tier.capacity_bytes},
                     {"used_bytes", tier.used_bytes},
                     {"sealed_bytes", tier.sealed_bytes},
                     {"reserved_bytes", tier.reserved_bytes}});
  }
  return tiers;
}

Json CodecsJson(std::vector<CodecStats> codecs) {
  std::sort(codecs.begin(), codecs.end(), [](const CodecStats& a, const CodecStats& b) {
    return a.record_bytes > b.record_bytes;
  });
  if (codecs.size() > kCodecsMax) codecs.resize(kCodecsMax);
  Json rows = Json::array();
  for (const CodecStats& codec : codecs) {
    rows.push_back({{"codec", CodecPairName(codec.codecs)},
                    {"blocks", codec.num_blocks},
                    {"record_bytes", codec.record_bytes},
                    {"logical_bytes", codec.logical_bytes}});
  }
  return rows;
}

}  // namespace

std::string AdminJson(const AdminView& view) {
  const StoreStats& store = view.store;
  Json counters = Json::object();
  for (const auto& [name, value] : view.counters) counters[std::string(name)] = value;
  Json methods = Json::array();
  for (const AdminMethod& method : view.methods) {
    methods.push_back({{"method", method.name},
                       {"calls", method.calls},
                       {"failed", method.failed},
                       {"seconds", method.seconds}});
  }
  const Json json = {{"version", view.version},
                     {"policy", view.policy},
                     {"uptime_s", view.uptime_s},
                     {"blocks", store.num_blocks},
                     {"index_bytes", store.index_bytes},
                     {"policy_bytes", store.policy_bytes},
                     {"open_tickets", store.open_tickets},
                     {"open_leases", store.open_leases},
                     {"open_channels", view.open_channels},
                     {"pinned_bytes", store.pinned_bytes},
                     {"hint_pinned_blocks", store.hint_pinned_blocks},
                     {"write_behind_bytes", store.write_behind_bytes},
                     {"calls_in_flight", view.calls_in_flight},
                     {"bytes_in_flight", view.bytes_in_flight},
                     {"tiers", TiersJson(store)},
                     {"codecs", CodecsJson(store.codecs)},
                     {"counters", std::move(counters)},
                     {"methods", std::move(methods)}};
  std::string text = json.dump();
  KVSTOW_CHECK(text.size() <= kAdminJsonBytesMax);
  return text;
}

std::vector<HttpPages::Page> AdminPages(std::function<std::string()> json) {
  const auto fixed = [](std::string_view text) { return [text] { return std::string(text); }; };
  return {{"/", "text/html", fixed(kAdminHtml)},
          {"/admin.css", "text/css", fixed(kAdminCss)},
          {"/admin.js", "text/javascript", fixed(kAdminJs)},
          {"/stat.json", "application/json", std::move(json)}};
}

}  // namespace kvstow
