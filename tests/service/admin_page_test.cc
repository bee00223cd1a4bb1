// The pages beside the metrics: what they answer, what they forbid, and that they stay small.
#include "service/admin_page.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "service/metrics.h"
#include "tests/service/server_fixture.h"

namespace kvstow {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// Sends a request as it stands; the whole answer.
std::string Ask(int port, const std::string& request) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const timeval timeout{.tv_sec = 10, .tv_usec = 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(write(fd, request.data(), request.size()), static_cast<ssize_t>(request.size()));
  std::string answer;
  char buffer[65536];
  for (ssize_t n = 0; (n = read(fd, buffer, sizeof(buffer))) > 0;) {
    answer.append(buffer, static_cast<size_t>(n));
  }
  close(fd);
  return answer;
}

std::string Fetch(int port, const std::string& path) {
  return Ask(port, absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: localhost\r\n\r\n"));
}

std::string BodyOf(const std::string& answer) { return answer.substr(answer.find("\r\n\r\n") + 4); }

class AdminPageTest : public ::kvstow::testing::ServerFixture {
 protected:
  void SetUp() override {
    options_.metrics_address = "127.0.0.1:0";
    Start();
  }
  int port() { return server_->metrics_port(); }
};

TEST_F(AdminPageTest, PageAndItsPartsCarryAPolicyThatForbidsTheRest) {
  for (const char* path : {"/", "/admin.js", "/admin.css", "/stat.json", "/metrics"}) {
    EXPECT_THAT(Fetch(port(), path),
                AllOf(StartsWith("HTTP/1.1 200 OK\r\n"),
                      HasSubstr("Content-Security-Policy: default-src 'none'; script-src 'self';"),
                      HasSubstr("frame-ancestors 'none'"), HasSubstr("nosniff")))
        << path;
  }
  // What the policy would stop: the page must need none of it.
  const std::string page = BodyOf(Fetch(port(), "/"));
  EXPECT_THAT(page, AllOf(HasSubstr("<script src=\"/admin.js\">"), Not(HasSubstr("http")),
                          Not(HasSubstr("<style")), Not(HasSubstr(" style=")),
                          Not(HasSubstr(" onclick="))));
  const std::string script = BodyOf(Fetch(port(), "/admin.js"));
  EXPECT_THAT(script,
              AllOf(HasSubstr("/stat.json"), Not(HasSubstr("innerHTML")), Not(HasSubstr("eval("))));
}

TEST_F(AdminPageTest, OtherPathsAndMethodsAreRefused) {
  for (const char* path : {"/x", "/../etc/passwd", "/%2e%2e/etc/passwd", "/stat.json/", "//"}) {
    const std::string answer = Fetch(port(), path);
    EXPECT_THAT(answer, Not(StartsWith("HTTP/1.1 200"))) << path;
    EXPECT_THAT(answer, Not(HasSubstr("root:"))) << path;
  }
  for (const char* method : {"POST", "PUT", "DELETE"}) {
    EXPECT_THAT(
        Ask(port(), absl::StrCat(method, " / HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n")),
        StartsWith("HTTP/1.1 405"))
        << method;
  }
  const std::string head = Ask(port(), "HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_THAT(head, StartsWith("HTTP/1.1 200 OK"));
  EXPECT_EQ(BodyOf(head), "");
}

TEST_F(AdminPageTest, NumbersAreThoseOfTheStoreAndNoKeyIsAmongThem) {
  const ModelRef model = Register(SmallSpec());
  Store(model, Key(1), MakeRows(*model, 1), "raw");
  Store(model, Key(2), MakeRows(*model, 1), "int8");
  Get({Key(1), Key(50)}, v1::FORM_ENCODED);
  const std::string text = BodyOf(Fetch(port(), "/stat.json"));
  const auto json = nlohmann::json::parse(text);
  EXPECT_EQ(json["blocks"], 2);
  EXPECT_EQ(json["policy"], "rtv");
  EXPECT_EQ(json["tiers"][0]["tier"], "dram");
  EXPECT_EQ(json["tiers"][0]["blocks"], 2);
  EXPECT_EQ(json["tiers"][0]["capacity_bytes"], 32 << 20);
  EXPECT_EQ(json["codecs"].size(), 2u);
  EXPECT_EQ(json["codecs"][0]["codec"], "raw");  // the larger one first
  EXPECT_EQ(json["counters"]["seals"], 2);
  EXPECT_EQ(json["counters"]["dram_hits"], 1);
  EXPECT_EQ(json["counters"]["misses"], 1);
  int64_t gets = -1;
  for (const auto& method : json["methods"]) {
    if (method["method"] == "Get") gets = method["calls"];
  }
  EXPECT_EQ(gets, 1);
  EXPECT_GT(json["uptime_s"], 0);
  EXPECT_THAT(text, AllOf(Not(HasSubstr(Key(1).ToHex())), Not(HasSubstr(options_.unix_socket)),
                          Not(HasSubstr("/tmp"))));
}

// As many codecs, counters and methods as there can be, all numbers as long as they get.
TEST(AdminJson, StaysBoundedWithEverythingAtItsMost) {
  constexpr int64_t kMost = int64_t{1} << 62;
  AdminView view{.version = "0.1.0", .policy = "hazard", .uptime_s = 1e9};
  for (const TierKind kind : {TierKind::kHbm, TierKind::kDram, TierKind::kNvme}) {
    view.store.tiers.push_back({kind, kMost, kMost, kMost, kMost, kMost});
  }
  for (int k = 0; k < 20; ++k) {
    for (int v = 0; v < 20; ++v) {
      CodecStats codec;
      codec.num_blocks = codec.record_bytes = codec.logical_bytes = kMost - 20 * k - v;
      view.store.codecs.push_back(codec);
    }
  }
  view.counters = StoreCounters(view.store);
  for (auto& counter : view.counters) counter.second = kMost;
  for (int i = 0; i < kNumMethods; ++i) {
    view.methods.push_back({MethodName(static_cast<Method>(i)), kMost, kMost, 1e12});
  }
  const std::string text = AdminJson(view);
  EXPECT_LT(text.size(), kAdminJsonBytesMax / 2);
  const auto json = nlohmann::json::parse(text);
  EXPECT_EQ(json["codecs"].size(), 64u);
  EXPECT_EQ(json["codecs"][0]["blocks"], kMost);
  EXPECT_EQ(json["methods"].size(), static_cast<size_t>(kNumMethods));
}

}  // namespace
}  // namespace kvstow
