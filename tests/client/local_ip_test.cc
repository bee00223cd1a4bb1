// Which address a service can connect back to.
#include "client/cpp/local_ip.h"

#include "gtest/gtest.h"

namespace kvstow {
namespace {

TEST(LocalIp, IsTheOneThatTheRouteToTheServiceUses) {
  for (const auto& [target, ip] :
       {std::pair{"unix:/run/kvstow.sock", "127.0.0.1"}, std::pair{"127.0.0.1:7411", "127.0.0.1"},
        std::pair{"127.0.0.9:7411", "127.0.0.1"}}) {
    const absl::StatusOr<std::string> found = LocalIpTowards(target);
    ASSERT_TRUE(found.ok()) << target << ": " << found.status();
    EXPECT_EQ(*found, ip) << target;
  }
}

TEST(LocalIp, SaysWhyThereIsNone) {
  for (const char* target : {"localhost", "999.1.1.1:80", "127.0.0.1:port"}) {
    const absl::Status status = LocalIpTowards(target).status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << target << ": " << status;
  }
}

}  // namespace
}  // namespace kvstow
