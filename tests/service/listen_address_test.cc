#include "service/listen_address.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "tests/service/temp_dir.h"

namespace kvstow {
namespace {

namespace fs = std::filesystem;
using ::kvstow::testing::TempDir;

// A bound unix socket, listening while the object lives.
class UnixListener {
 public:
  explicit UnixListener(const std::string& path) : fd_(socket(AF_UNIX, SOCK_STREAM, 0)) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(fd_, 1), 0);
  }
  ~UnixListener() { close(fd_); }

 private:
  const int fd_;
};

TEST(FreeUnixSocket, StaleSocketIsRemoved) {
  const TempDir dir;
  const std::string path = dir.path() + "/s";
  { const UnixListener dead(path); }
  ASSERT_TRUE(fs::exists(path));
  EXPECT_TRUE(FreeUnixSocket(path).ok());
  EXPECT_FALSE(fs::exists(path));
}

TEST(FreeUnixSocket, LiveSocketIsRefusedAndStays) {
  const TempDir dir;
  const std::string path = dir.path() + "/s";
  const UnixListener live(path);
  const absl::Status status = FreeUnixSocket(path);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), absl::StrCat("listen.unix_socket ", path, ": address in use"));
  EXPECT_TRUE(fs::exists(path));
}

TEST(FreeUnixSocket, OtherFileIsRefusedAndStays) {
  const TempDir dir;
  const std::string path = dir.path() + "/s";
  std::ofstream(path) << "precious";
  const absl::Status status = FreeUnixSocket(path);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(),
            absl::StrCat("listen.unix_socket ", path, ": a file that is no socket is in the way"));
  EXPECT_TRUE(fs::exists(path));
}

TEST(FreeUnixSocket, MissingFolderIsNamed) {
  const absl::Status status = FreeUnixSocket("/nonexistent/s");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(),
            "listen.unix_socket /nonexistent/s: folder /nonexistent does not exist");
}

TEST(CheckTcpAddressIsFree, PortInUseIsNamed) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(fd, 1), 0);
  socklen_t length = sizeof(address);
  ASSERT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length), 0);
  const std::string text = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  const absl::Status status = CheckTcpAddressIsFree("listen.tcp", text);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), absl::StrCat("listen.tcp ", text, ": address in use"));
  close(fd);
  EXPECT_TRUE(CheckTcpAddressIsFree("listen.tcp", text).ok());
}

TEST(CheckTcpAddressIsFree, PortZeroIsFree) {
  EXPECT_TRUE(CheckTcpAddressIsFree("listen.tcp", "127.0.0.1:0").ok());
}

TEST(CheckTcpAddressIsFree, ForeignAddressIsRefusedWithTheReason) {
  // TEST-NET-1 (RFC 5737): no machine has it.
  const absl::Status status = CheckTcpAddressIsFree("listen.tcp", "192.0.2.1:0");
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), "listen.tcp 192.0.2.1:0: Cannot assign requested address");
}

}  // namespace
}  // namespace kvstow
