// Admin page: the service's numbers for people, served beside the metrics: tiers, codecs, hit
// rates, traffic, leases and evictions, as tables and as plots of what passed while the page was
// open.
//
//   for (HttpPages::Page& page : AdminPages([&] { return AdminJson(view); }))
//   pages.push_back(page);
//
// The page is static; it asks for /stat.json every second and draws what changed. No key, name of a
// session, path or address is in it. At most kAdminJsonBytesMax bytes an answer.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "service/http_pages.h"
#include "storage/store_stats.h"

namespace kvstow {

// 64 codecs, some 60 counters, 18 methods: about 12 KiB.
inline constexpr size_t kAdminJsonBytesMax = 64 << 10;

struct AdminMethod {
  std::string_view name;  // "Get"
  int64_t calls = 0;
  int64_t failed = 0;  // did not end with OK
  double seconds = 0;  // of all of them
};

struct AdminView {
  std::string_view version;
  std::string_view policy;
  double uptime_s = 0;
  StoreStats store;
  int64_t calls_in_flight = 0;
  int64_t bytes_in_flight = 0;
  int64_t open_channels = 0;
  std::vector<std::pair<std::string_view, int64_t>> counters;  // by their names in the metrics
  std::vector<AdminMethod> methods;
};

std::string AdminJson(const AdminView& view);

// "/", its script and its style, and "/stat.json", made by `json`.
std::vector<HttpPages::Page> AdminPages(std::function<std::string()> json);

}  // namespace kvstow
