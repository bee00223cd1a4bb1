// The style of the tree as a test. Each rule is first shown to find a planted fault.
#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/tidy/rules.h"
#include "tests/tidy/source_text.h"

namespace kvstow::tidy {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<std::string> Rules(const Findings& findings) {
  std::vector<std::string> rules;
  for (const Finding& finding : findings) rules.push_back(finding.rule);
  return rules;
}

std::string Describe(const Findings& findings) {
  std::string text;
  for (const Finding& finding : findings) {
    text += finding.path + ":" + std::to_string(finding.line) + ": [" + finding.rule + "] " +
            finding.message + "\n";
  }
  return text;
}

// What git knows or would add; where there is no git, everything outside build folders.
std::vector<std::string> ListFiles(const std::string& root) {
  std::vector<std::string> paths;
  const std::string command =
      "git -C '" + root + "' ls-files --cached --others --exclude-standard 2>/dev/null";
  if (FILE* pipe = popen(command.c_str(), "r"); pipe != nullptr) {
    std::array<char, 4096> line;
    while (fgets(line.data(), line.size(), pipe) != nullptr) {
      std::string path(line.data());
      while (!path.empty() && path.back() == '\n') path.pop_back();
      if (std::filesystem::is_regular_file(root + "/" + path)) paths.push_back(path);
    }
    pclose(pipe);
  }
  if (!paths.empty()) return paths;
  for (auto it = std::filesystem::recursive_directory_iterator(root);
       it != std::filesystem::recursive_directory_iterator(); ++it) {
    const std::string name = it->path().filename().string();
    if (it->is_directory() && (name == ".git" || name == "build" || name == ".venv")) {
      it.disable_recursion_pending();
    } else if (it->is_regular_file()) {
      paths.push_back(std::filesystem::relative(it->path(), root).string());
    }
  }
  return paths;
}

std::string ReadText(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  std::stringstream text;
  text << stream.rdbuf();
  return text.str();
}

std::vector<File> LoadTree() {
  const std::string root = KVSTOW_SOURCE_DIR;
  std::vector<std::string> paths = ListFiles(root);
  std::sort(paths.begin(), paths.end());
  std::vector<File> files;
  for (const std::string& path : paths) {
    const bool is_data = path.rfind("tests/data/", 0) == 0 && path.find(".md") == std::string::npos;
    files.push_back({path, is_data ? std::string() : ReadText(root + "/" + path)});
  }
  return files;
}

TEST(Tidy, TreeFollowsTheStyle) {
  const std::vector<File> files = LoadTree();
  ASSERT_GT(files.size(), 50u) << "the tree was not found at " << KVSTOW_SOURCE_DIR;
  Findings findings;
  const auto add = [&](const Findings& more) {
    findings.insert(findings.end(), more.begin(), more.end());
  };
  for (const File& file : files) add(CheckFile(file));
  add(CheckRegistered(files));
  add(CheckOwnHeaders(files));
  add(CheckDocuments(files));
  Findings left;
  const std::vector<Exception> exceptions = ParseExceptions(
      ReadText(std::string(KVSTOW_SOURCE_DIR) + "/tests/tidy/exceptions.txt"), left);
  const Findings rest = ApplyExceptions(findings, exceptions);
  left.insert(left.end(), rest.begin(), rest.end());
  EXPECT_TRUE(left.empty()) << left.size() << " findings\n" << Describe(left);
}

TEST(TidyRules, DependenciesPointDownOnly) {
  const auto findings = [](const char* path, const char* header) {
    return Rules(CheckIncludes({path, std::string("#include \"") + header + "\"\n"}));
  };
  EXPECT_THAT(findings("kernels/core/digest.cc", "kernels/codec/codec.h"), ElementsAre("include"));
  EXPECT_THAT(findings("kernels/codec/tq.cc", "kernels/layout/planes.h"), ElementsAre("include"));
  EXPECT_THAT(findings("storage/tier.h", "proto/convert.h"), ElementsAre("include"));
  EXPECT_THAT(findings("storage/tier.h", "kvstow/v1/data.pb.h"), ElementsAre("include"));
  EXPECT_THAT(findings("client/cli/put.cc", "storage/record.h"), ElementsAre("include"));
  EXPECT_THAT(findings("client/cli/put.cc", "service/server.h"), ElementsAre("include"));
  EXPECT_THAT(findings("service/server.cc", "client/cli/args.h"), ElementsAre("include"));
  EXPECT_THAT(findings("service/server.cc", "tests/testing/rng.h"), ElementsAre("include"));
  EXPECT_THAT(findings("service/server.cc", "storage/tiered_store.h"), IsEmpty());
  EXPECT_THAT(findings("service/peer_set.cc", "client/cpp/kv_client.h"), IsEmpty());
  EXPECT_THAT(findings("kernels/codec/tq.cc", "kernels/core/dtype.h"), IsEmpty());
  EXPECT_THAT(findings("tests/e2e/x_test.cc", "client/cpp/kv_client.h"), IsEmpty());
}

TEST(TidyRules, CommentedIncludesDoNotCount) {
  EXPECT_THAT(CheckIncludes({"storage/tier.h", "// #include \"proto/convert.h\"\n"}), IsEmpty());
}

TEST(TidyRules, EachHeavyLibraryHasOneDoor) {
  const auto findings = [](const char* path, const char* header) {
    return Rules(CheckDoors({path, std::string("#include <") + header + ">\n"}));
  };
  EXPECT_THAT(findings("storage/tiered_store.cc", "rocksdb/db.h"), ElementsAre("door"));
  EXPECT_THAT(findings("storage/nvme_tier.h", "rocksdb/db.h"), ElementsAre("door"));
  EXPECT_THAT(findings("storage/nvme_tier.cc", "rocksdb/db.h"), IsEmpty());
  EXPECT_THAT(findings("storage/record.cc", "grpcpp/grpcpp.h"), ElementsAre("door"));
  EXPECT_THAT(findings("kernels/core/text.cc", "google/protobuf/message.h"), ElementsAre("door"));
  EXPECT_THAT(findings("service/server.cc", "prometheus/exposer.h"), ElementsAre("door"));
  EXPECT_THAT(findings("service/metrics.cc", "prometheus/exposer.h"), IsEmpty());
  EXPECT_THAT(findings("kernels/core/block_key.cc", "openssl/sha.h"), ElementsAre("door"));
  EXPECT_THAT(findings("storage/record.cc", "xxhash.h"), ElementsAre("door"));
  EXPECT_THAT(findings("storage/record.cc", "hwy/highway.h"), ElementsAre("door"));
  EXPECT_THAT(findings("kernels/codec/tq.cc", "cuda_runtime.h"), ElementsAre("door"));
  EXPECT_THAT(findings("kernels/codec/tq.cu", "cuda_runtime.h"), IsEmpty());
  EXPECT_THAT(findings("transport/transport.h", "nccl.h"), ElementsAre("door"));
  EXPECT_THAT(findings("transport/transport.h", "ucp/api/ucp.h"), ElementsAre("door"));
  EXPECT_THAT(findings("storage/tier.h", "rados/librados.h"), ElementsAre("door"));
  EXPECT_THAT(findings("storage/tier.h", "curl/curl.h"), ElementsAre("door"));
  EXPECT_THAT(findings("client/cli/main.cc", "gtest/gtest.h"), ElementsAre("door"));
  EXPECT_THAT(findings("client/cpp/kv_client.cc", "pybind11/pybind11.h"), ElementsAre("door"));
  EXPECT_THAT(findings("client/python/src/module.cc", "pybind11/pybind11.h"), IsEmpty());
}

TEST(TidyRules, LinesFilesAndHeadersAreBounded) {
  EXPECT_THAT(Rules(CheckSizes({"a.cc", std::string(101, 'x') + "\n"})), ElementsAre("columns"));
  EXPECT_THAT(CheckSizes({"a.cc", std::string(100, 'x') + "\n"}), IsEmpty());
  std::string lines;
  for (int i = 0; i < 201; ++i) lines += "\n";
  EXPECT_THAT(Rules(CheckSizes({"a.h", lines})), ElementsAre("file-lines"));
  EXPECT_THAT(CheckSizes({"a.cc", lines}), IsEmpty());
  for (int i = 0; i < 400; ++i) lines += "\n";
  EXPECT_THAT(Rules(CheckSizes({"a.cc", lines})), ElementsAre("file-lines"));
}

std::string FunctionOfLines(int num_lines) {
  std::string text = "namespace a {\nclass B {\n public:\n  int F(int x) const {\n";
  for (int i = 0; i < num_lines - 2; ++i) text += "    x += \"}\"[0];  // }\n";
  return text + "  }\n};\n}  // namespace a\n";
}

TEST(TidyRules, FunctionsHaveAtMost60Lines) {
  EXPECT_THAT(Rules(CheckSizes({"a.cc", FunctionOfLines(61)})), ElementsAre("function-lines"));
  EXPECT_THAT(CheckSizes({"a.cc", FunctionOfLines(60)}), IsEmpty());
}

TEST(TidyRules, FunctionsHaveAtMost5Parameters) {
  EXPECT_THAT(Rules(CheckSizes({"a.cc", "void F(int a, int b, int c, int d, int e, int f) {}\n"})),
              ElementsAre("parameters"));
  EXPECT_THAT(CheckSizes({"a.cc", "void F(int a, std::map<int, int> b, int c, int d, int e) {}\n"}),
              IsEmpty());
}

TEST(TidyRules, ClassesHaveAtMostOneMutex) {
  const std::string two = "class A {\n  Mutex a_;\n  mutable Mutex b_;\n};\n";
  const std::string nested = "class A {\n  struct S {\n    Mutex a_;\n  };\n  Mutex b_;\n};\n";
  EXPECT_THAT(Rules(CheckSizes({"a.cc", two})), ElementsAre("mutexes"));
  EXPECT_THAT(CheckSizes({"a.cc", nested}), IsEmpty());
}

TEST(TidyRules, HeadersSayWhatTheyAreAndArePragmaOnce) {
  EXPECT_THAT(CheckHeader({"a.h", "// A: what it is.\n#pragma once\n"}), IsEmpty());
  EXPECT_THAT(Rules(CheckHeader({"a.h", "\n#pragma once\n"})), ElementsAre("header"));
  EXPECT_THAT(Rules(CheckHeader({"a.h", "// A: what it is.\nint x;\n"})), ElementsAre("header"));
  EXPECT_THAT(Rules(CheckHeader({"a.h", "// A.\n#ifndef A_H_\n#define A_H_\n#endif\n"})),
              ElementsAre("header", "header"));
}

TEST(TidyRules, NamesSayWhatThingsAre) {
  const auto findings = [](const char* text) { return Rules(CheckNames({"storage/a.h", text})); };
  EXPECT_THAT(findings("class BlockManager {\n"), ElementsAre("name"));
  EXPECT_THAT(findings("struct PutHelper final {\n"), ElementsAre("name"));
  EXPECT_THAT(findings("class StoreImpl : public Store {\n"), ElementsAre("name"));
  EXPECT_THAT(findings("class TierBase {\n"), ElementsAre("name"));
  EXPECT_THAT(findings("struct Impl {\n"), IsEmpty());
  EXPECT_THAT(findings("class DramTier final : public Tier {\n"), IsEmpty());
  EXPECT_THAT(Rules(CheckNames({"storage/string_util.h", ""})), ElementsAre("name"));
  EXPECT_THAT(CheckNames({"storage/tier.h", ""}), IsEmpty());
}

TEST(TidyRules, BannedCallsAreFound) {
  const auto findings = [](const char* path, const char* text) {
    return Rules(CheckCalls({path, text}));
  };
  for (const char* text :
       {"absl::Mutex mutex_;", "std::mutex mutex_;", "std::random_device device;",
        "int x = rand();", "absl::SleepFor(absl::Seconds(1));", "std::this_thread::sleep_for(1s);",
        "usleep(10);", "std::getenv(\"HOME\");", "throw 1;", "assert(x);", "using namespace std;",
        "std::cerr << 1;"}) {
    EXPECT_THAT(findings("storage/a.cc", text), ElementsAre("call")) << text;
  }
  EXPECT_THAT(findings("storage/a.cc", "// usleep(10)\nconst char* s = \"rand()\";"), IsEmpty());
  EXPECT_THAT(findings("tests/a.cc", "std::getenv(\"HOME\");"), IsEmpty());
  EXPECT_THAT(findings("kernels/core/mutex.h", "std::mutex mutex_;"), IsEmpty());
}

TEST(TidyRules, OnlyTheHousesMacrosAreDefined) {
  EXPECT_THAT(Rules(CheckCalls({"a.cc", "#define MAX(a, b) a\n"})), ElementsAre("macro"));
  EXPECT_THAT(CheckCalls({"a.h", "#define KVSTOW_CHECK(x) x\n"}), IsEmpty());
}

TEST(TidyRules, MachinePathsAndUnfinishedWorkAreFound) {
  EXPECT_THAT(Rules(CheckWords({"a.md", std::string("see /wo") + "rk/main\n"})),
              ElementsAre("word"));
  EXPECT_THAT(Rules(CheckWords({"a.cc", std::string("// TO") + "DO: later\n"})),
              ElementsAre("word"));
  EXPECT_THAT(CheckWords({"a.md", "a network/worker/thing\n"}), IsEmpty());
}

TEST(TidyRules, EverySourceIsRegistered) {
  const std::vector<File> files = {
      {"storage/CMakeLists.txt", "add_library(s a.cc)  # b.cc is not named\n"},
      {"storage/a.cc", ""},
      {"storage/b.cc", ""},
      {"tests/CMakeLists.txt", "kvstow_add_test(x SOURCES ${CMAKE_SOURCE_DIR}/tests/s/x_test.cc)"},
      {"tests/s/x_test.cc", ""},
      {"tests/s/y_test.cc", ""},
      {"tests/t/CMakeLists.txt", "foreach(name a b)\n  add(${name}_test.cc)\nendforeach()\n"},
      {"tests/t/a_test.cc", ""},
      {"tests/t/b_test.cc", ""},
      {"tests/t/c_test.cc", ""}};
  const Findings findings = CheckRegistered(files);
  ASSERT_EQ(findings.size(), 3u) << Describe(findings);
  EXPECT_EQ(findings[0].path, "storage/b.cc");
  EXPECT_EQ(findings[1].path, "tests/s/y_test.cc");
  EXPECT_EQ(findings[2].path, "tests/t/c_test.cc");
}

TEST(TidyRules, ASourceIncludesItsOwnHeaderFirst) {
  const std::vector<File> files = {
      {"storage/a.h", ""},
      {"storage/a.cc", "#include \"storage/a.h\"\n#include <map>\n"},
      {"storage/b.h", ""},
      {"storage/b.cc", "// b\n#include <map>\n#include \"storage/b.h\"\n"},
      {"storage/c.cc", "#include <map>\n"}};
  const Findings findings = CheckOwnHeaders(files);
  ASSERT_EQ(findings.size(), 1u) << Describe(findings);
  EXPECT_EQ(findings[0].path, "storage/b.cc");
}

TEST(TidyRules, RequiredPagesExistAndLinksLeadSomewhere) {
  const Findings missing = CheckDocuments({{"README.md", "[x](storage/none.md) [y](#here)\n"}});
  const auto has = [&](const std::string& path, const std::string& text) {
    return std::any_of(missing.begin(), missing.end(), [&](const Finding& finding) {
      return finding.path == path && finding.message.find(text) != std::string::npos;
    });
  };
  EXPECT_TRUE(has("storage/FORMAT.md", "missing"));
  EXPECT_TRUE(has("README.md", "storage/none.md"));
  EXPECT_FALSE(has("README.md", "missing"));
  EXPECT_FALSE(has("README.md", "#here"));
}

TEST(TidyRules, ExceptionsNeedAReasonAndMustExcuseSomething) {
  Findings findings;
  const std::vector<Exception> exceptions = ParseExceptions(
      "# comment\n\nname a.h because the word is the field's own\nname b.h x\n", findings);
  EXPECT_THAT(Rules(findings), ElementsAre("exception"));
  ASSERT_EQ(exceptions.size(), 2u);
  const Findings left =
      ApplyExceptions({{"name", "a.h", 1, ""}, {"call", "a.h", 1, ""}}, exceptions);
  EXPECT_THAT(Rules(left), ElementsAre("call", "exception"));
  const Findings folder = ApplyExceptions({{"name", "a/b.h", 1, ""}, {"name", "ab.h", 1, ""}},
                                          {{"name", "a/", "kept as its authors wrote it", 1}});
  ASSERT_EQ(folder.size(), 1u);
  EXPECT_EQ(folder[0].path, "ab.h");
}

TEST(SourceText, BlankingKeepsLinesAndPositions) {
  const std::string text = "int a = 1'000;  // b\nauto c = R\"x({\n)x\";\nchar d = '{';\n";
  const std::string code = BlankCommentsAndStrings(text);
  EXPECT_EQ(code.size(), text.size());
  EXPECT_EQ(std::count(code.begin(), code.end(), '\n'), std::count(text.begin(), text.end(), '\n'));
  EXPECT_EQ(code.find('{'), std::string::npos);
  EXPECT_NE(code.find("1'000;"), std::string::npos);
}

TEST(SourceText, FunctionsAreFoundWithTheirLines) {
  const std::string code =
      "namespace a {\nint F(int x,\n      int y) {\n  if (x) {\n    return 1;\n  }\n  return "
      "y;\n}\n"
      "const int kTable[] = {1, 2};\nstruct S {\n  int g() const { return 1; }\n};\n}\n";
  const Scopes scopes = FindScopes(code);
  ASSERT_EQ(scopes.functions.size(), 2u);
  EXPECT_EQ(scopes.functions[0].first_line, 2);
  EXPECT_EQ(scopes.functions[0].last_line, 8);
  EXPECT_EQ(scopes.functions[1].num_lines(), 1);
  ASSERT_EQ(scopes.classes.size(), 1u);
}

}  // namespace
}  // namespace kvstow::tidy
