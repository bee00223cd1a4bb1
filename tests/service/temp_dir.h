// TempDir: a directory that goes with the object.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <string>

namespace kvstow::testing {

class TempDir {
 public:
  TempDir() {
    char name[] = "/tmp/kvstow_test_XXXXXX";
    path_ = mkdtemp(name);
  }
  ~TempDir() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace kvstow::testing
