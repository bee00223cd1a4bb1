#include "tests/tidy/rules.h"

#include <algorithm>
#include <array>
#include <regex>
#include <set>
#include <string_view>

#include "tests/tidy/source_text.h"

namespace kvstow::tidy {
namespace {

bool StartsWith(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

bool EndsWith(std::string_view text, std::string_view suffix) {
  return text.size() >= suffix.size() && text.substr(text.size() - suffix.size()) == suffix;
}

bool StartsWithAny(std::string_view text, const std::vector<std::string_view>& prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(),
                     [&](std::string_view prefix) { return StartsWith(text, prefix); });
}

struct Include {
  std::string target;
  int line = 0;
};

std::vector<Include> IncludesOf(const File& file) {
  static const std::regex kInclude(R"re(^\s*#\s*include\s+["<]([^">]+)[">])re");
  const std::string code = BlankComments(file.text);
  std::vector<Include> includes;
  int line_number = 0;
  for (std::string_view line : SplitLines(code)) {
    ++line_number;
    if (line.find("include") == std::string_view::npos) continue;
    std::cmatch match;
    if (std::regex_search(line.data(), line.data() + line.size(), match, kInclude)) {
      includes.push_back({match[1].str(), line_number});
    }
  }
  return includes;
}

// Which of our folders the files of a folder may include. The first row whose folder fits counts.
struct IncludeRow {
  std::string_view folder;
  std::vector<std::string_view> allowed;
};

const std::vector<IncludeRow>& IncludeTable() {
  static const auto* table = new std::vector<IncludeRow>{
      {"kernels/core/", {"kernels/core/"}},
      {"kernels/codec/", {"kernels/core/", "kernels/codec/"}},
      {"kernels/layout/", {"kernels/core/", "kernels/layout/"}},
      {"kernels/select/", {"kernels/core/", "kernels/select/"}},
      {"kernels/project/", {"kernels/core/", "kernels/project/"}},
      {"transport/", {"kernels/core/", "transport/"}},
      {"proto/", {"kernels/", "proto/", "kvstow/v1/"}},
      {"storage/", {"kernels/", "storage/"}},
      // A service is a client of its peers.
      {"service/",
       {"kernels/", "transport/", "proto/", "storage/", "service/", "client/cpp/", "kvstow/v1/"}},
      {"client/", {"kernels/", "transport/", "proto/", "client/", "kvstow/v1/"}},
      {"tests/",
       {"kernels/", "transport/", "proto/", "storage/", "service/", "client/", "tests/",
        "kvstow/v1/"}},
  };
  return *table;
}

const std::vector<std::string_view>& OurFolders() {
  static const auto* folders =
      new std::vector<std::string_view>{"kernels/", "transport/", "proto/", "storage/",
                                        "service/", "client/",    "tests/", "kvstow/v1/"};
  return *folders;
}

struct Door {
  std::string_view library;
  std::regex header;
  std::regex may_include;  // paths
  std::string_view where;  // for people
};

// Tests may open a library's own door where they look at what it wrote; each such file is named in
// exceptions.txt with its reason.
const std::vector<Door>& Doors() {
  static const auto* doors = new std::vector<Door>{
      {"RocksDB", std::regex("^rocksdb/"), std::regex("^storage/nvme_tier\\.cc$"),
       "storage/nvme_tier.cc"},
      {"gRPC and protobuf", std::regex("^(grpc|grpcpp|google/protobuf)/|\\.pb\\.h$"),
       std::regex("^(proto|service|client|tests)/"), "proto/, service/, client/"},
      {"prometheus-cpp", std::regex("^prometheus/"), std::regex("^service/metrics\\.(h|cc)$"),
       "service/metrics.h and .cc"},
      {"OpenSSL", std::regex("^openssl/"), std::regex("^kernels/core/digest\\.cc$"),
       "kernels/core/digest.cc"},
      {"xxHash", std::regex("^xxhash\\.h$"), std::regex("^kernels/core/checksum\\.cc$"),
       "kernels/core/checksum.cc"},
      {"Highway", std::regex("^hwy/"), std::regex("^kernels/.*(\\.cc|-inl\\.h)$"),
       "sources of kernels/"},
      {"Eigen", std::regex("^Eigen/"), std::regex("^kernels/codec/calibration_builder\\.cc$"),
       "kernels/codec/calibration_builder.cc"},
      {"CUDA", std::regex("^(cuda|cooperative_groups|cub/|mma\\.h)"), std::regex("\\.cuh?$"),
       ".cu and .cuh files"},
      {"NCCL", std::regex("^nccl\\.h$"), std::regex("^transport/nccl_[a-z_]*\\.(cc|cu)$"),
       "transport/nccl_*"},
      {"UCX", std::regex("^(ucp|ucs|uct|ucm)/"), std::regex("^transport/ucx_[a-z_]*\\.cc$"),
       "transport/ucx_*.cc"},
      {"librados", std::regex("^rados/"), std::regex("^storage/rados_tier\\.cc$"),
       "storage/rados_tier.cc"},
      {"libcurl", std::regex("^curl/"), std::regex("^storage/s3_tier\\.cc$"), "storage/s3_tier.cc"},
      {"civetweb", std::regex("^(civetweb|CivetServer)\\.h$"),
       std::regex("^service/http_pages\\.cc$"), "service/http_pages.cc"},
      {"nlohmann-json", std::regex("^nlohmann/"),
       std::regex("^(client|tests)/|^service/admin_page\\.cc$"),
       "client/, tests/ and service/admin_page.cc"},
      {"pybind11", std::regex("^pybind11/|^Python\\.h$"), std::regex("^client/python/src/"),
       "client/python/src/"},
      {"GoogleTest", std::regex("^(gtest|gmock)/"), std::regex("^tests/"), "tests/"},
      {"Google Benchmark", std::regex("^benchmark/"), std::regex("^tests/bench/"), "tests/bench/"},
  };
  return *doors;
}

int CodePoints(std::string_view line) {
  return static_cast<int>(std::count_if(line.begin(), line.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0u) != 0x80u;
  }));
}

void CheckFunctions(const File& file, const Scopes& scopes, Findings& findings) {
  static const std::regex kTest(R"(^(TYPED_|DISABLED_)?TEST(_P|_F)?\s*\()");
  constexpr int kMaxLines = 60;
  constexpr int kMaxParameters = 5;
  for (const Scope& function : scopes.functions) {
    const std::string name = function.head.substr(0, function.head.find('('));
    if (function.num_lines() > kMaxLines) {
      findings.push_back({"function-lines", file.path, function.first_line,
                          name + " has " + std::to_string(function.num_lines()) +
                              " lines, at most 60: name its parts"});
    }
    const int parameters = CountParameters(function.head);
    if (parameters > kMaxParameters && !std::regex_search(function.head, kTest)) {
      findings.push_back({"parameters", file.path, function.first_line,
                          name + " has " + std::to_string(parameters) +
                              " parameters, at most 5: use an options struct"});
    }
  }
  for (const Scope& type : scopes.classes) {
    if (type.num_mutexes > 1) {
      findings.push_back({"mutexes", file.path, type.first_line,
                          type.head + " has " + std::to_string(type.num_mutexes) +
                              " mutexes, at most 1: split the class"});
    }
  }
}

struct BannedCall {
  std::vector<std::string_view> hints;  // plain words of which one must be there: regexes are slow
  std::regex pattern;
  std::string_view instead;
  std::regex exempt;  // paths
};

const std::vector<BannedCall>& BannedCalls() {
  static const std::regex kNowhere("^$");
  static const auto* calls = new std::vector<BannedCall>{
      {{"absl::"},
       std::regex("absl::(Mutex|MutexLock|CondVar)\\b"),
       "use kernels/core/mutex.h: the thread sanitizer does not see Abseil's",
       kNowhere},
      {{"std::"},
       std::regex("std::(mutex|lock_guard|unique_lock|scoped_lock|condition_variable)\\b"),
       "use kernels/core/mutex.h, which carries thread-safety annotations",
       std::regex("^kernels/core/mutex\\.h$")},
      {{"rand"},
       std::regex("std::random_device|\\b(s?rand|random|drand48)\\s*\\(\\s*\\)"),
       "no hidden randomness: pass a seed, or tests/testing/rng.h",
       kNowhere},
      {{"leep"},
       std::regex("absl::SleepFor|this_thread::sleep|\\b(u|nano)?sleep\\s*\\("),
       "no sleeps: wait for an event with a deadline, or use FakeClock",
       kNowhere},
      {{"getenv"},
       std::regex("\\b(secure_)?getenv\\s*\\("),
       "no environment variables: configuration comes from the file and flags",
       std::regex("^tests/|main\\.cc$")},
      {{"std::"},
       std::regex("\\bstd::format\\b|\\bstd::expected\\b"),
       "not in g++ 12: use absl::StrCat, StatusOr",
       kNowhere},
      {{"throw"}, std::regex("\\bthrow\\b"), "nothing throws: return absl::Status", kNowhere},
      {{"assert"}, std::regex("\\bassert\\s*\\("), "use KVSTOW_CHECK or KVSTOW_DCHECK", kNowhere},
      {{"namespace"}, std::regex("\\busing namespace\\b"), "name what you use", kNowhere},
      {{"FRIEND"}, std::regex("\\bFRIEND_TEST\\b"), "tests use public interfaces only", kNowhere},
      {{"std::c"},
       std::regex("\\bstd::(cout|cerr)\\b"),
       "use Log, or std::fputs in a command line tool",
       std::regex("^(tests|client/cli)/")},
  };
  return *calls;
}

bool IsText(const std::string& path) {
  static const std::regex kText(
      "\\.(h|cc|cu|cuh|proto|md|txt|sh|cmake|yaml|yml|json|textproto)$|"
      "(^|/)(run|LICENSE|\\.clang-[a-z]+)$");
  return std::regex_search(path, kText);
}

}  // namespace

bool IsCxx(const std::string& path) {
  return EndsWith(path, ".h") || EndsWith(path, ".cc") || EndsWith(path, ".cu") ||
         EndsWith(path, ".cuh");
}

Findings CheckIncludes(const File& file) {
  Findings findings;
  const auto row =
      std::find_if(IncludeTable().begin(), IncludeTable().end(),
                   [&](const IncludeRow& r) { return StartsWith(file.path, r.folder); });
  for (const Include& include : IncludesOf(file)) {
    if (!StartsWithAny(include.target, OurFolders())) continue;
    if (row == IncludeTable().end()) {
      findings.push_back({"include", file.path, include.line, "this folder has no include rule"});
    } else if (!StartsWithAny(include.target, row->allowed)) {
      findings.push_back({"include", file.path, include.line,
                          std::string(row->folder) + " must not include " + include.target +
                              ": dependencies point down only"});
    }
  }
  return findings;
}

Findings CheckDoors(const File& file) {
  Findings findings;
  for (const Include& include : IncludesOf(file)) {
    for (const Door& door : Doors()) {
      if (std::regex_search(include.target, door.header) &&
          !std::regex_search(file.path, door.may_include)) {
        findings.push_back({"door", file.path, include.line,
                            include.target + ": " + std::string(door.library) +
                                " is included only in " + std::string(door.where)});
      }
    }
  }
  return findings;
}

Findings CheckSizes(const File& file) {
  constexpr int kMaxColumns = 100;
  Findings findings;
  const std::vector<std::string_view> lines = SplitLines(file.text);
  for (size_t i = 0; i < lines.size(); ++i) {
    if (CodePoints(lines[i]) > kMaxColumns) {
      findings.push_back({"columns", file.path, static_cast<int>(i + 1),
                          std::to_string(CodePoints(lines[i])) + " columns, at most 100"});
    }
  }
  if (!IsCxx(file.path)) return findings;
  const size_t most = EndsWith(file.path, ".h") ? 200 : 600;
  if (lines.size() > most) {
    findings.push_back({"file-lines", file.path, 0,
                        std::to_string(lines.size()) + " lines, at most " + std::to_string(most) +
                            ": split it by purpose"});
  }
  CheckFunctions(file, FindScopes(BlankCommentsAndStrings(file.text)), findings);
  return findings;
}

Findings CheckHeader(const File& file) {
  Findings findings;
  if (!EndsWith(file.path, ".h")) return findings;
  static const std::regex kGuard(R"((^|\n)#ifndef\s+\w+_H_?\s*\n#define)");
  static const std::regex kPerTarget(R"(HWY_TARGET_TOGGLE)");  // Highway includes these repeatedly
  if (!StartsWith(file.text, "// ")) {
    findings.push_back({"header", file.path, 1, "begins with a comment: its purpose in one line"});
  }
  if (std::regex_search(file.text, kGuard)) {
    findings.push_back({"header", file.path, 0, "#pragma once, not an include guard"});
  }
  if (file.text.find("\n#pragma once\n") == std::string::npos &&
      !std::regex_search(file.text, kPerTarget)) {
    findings.push_back({"header", file.path, 0, "has no #pragma once"});
  }
  return findings;
}

Findings CheckNames(const File& file) {
  Findings findings;
  static const std::regex kFile(
      R"((^|/)([a-z0-9_]*_)?(utils?|helpers?|manager|misc|common)(_test)?\.)");
  if (std::regex_search(file.path, kFile)) {
    findings.push_back(
        {"name", file.path, 0, "the file's name says nothing: put it where its data is"});
  }
  if (!IsCxx(file.path)) return findings;
  static const std::regex kType(R"((^|\s)(class|struct)\s+(ABSL_\w+\s+)?(\w+)[^;]*[{:])");
  static const std::regex kBanned(
      R"((Manager|Helper|Helpers|Util|Utils|\wImpl|\wBase)$|^(Manager|Helper|Util))");
  const std::string code = BlankCommentsAndStrings(file.text);
  int line_number = 0;
  for (std::string_view view : SplitLines(code)) {
    ++line_number;
    const std::string line(view);
    std::smatch match;
    if (line.find("class") == std::string::npos && line.find("struct") == std::string::npos) {
      continue;
    }
    if (!std::regex_search(line, match, kType)) continue;
    const std::string name = match[4].str();
    if (std::regex_search(name, kBanned)) {
      findings.push_back({"name", file.path, line_number,
                          name + ": say what it is (no Manager, Helper, Util, Base, Impl)"});
    }
  }
  return findings;
}

Findings CheckCalls(const File& file) {
  Findings findings;
  if (!IsCxx(file.path)) return findings;
  const std::string code = BlankCommentsAndStrings(file.text);
  int line_number = 0;
  for (std::string_view view : SplitLines(code)) {
    ++line_number;
    const std::string line(view);
    for (const BannedCall& call : BannedCalls()) {
      const bool may_match =
          std::any_of(call.hints.begin(), call.hints.end(),
                      [&](std::string_view hint) { return line.find(hint) != std::string::npos; });
      if (!may_match) continue;
      std::smatch match;
      if (std::regex_search(line, match, call.pattern) &&
          !std::regex_search(file.path, call.exempt)) {
        findings.push_back(
            {"call", file.path, line_number, match.str() + ": " + std::string(call.instead)});
      }
    }
  }
  static const std::regex kDefine(R"(^\s*#\s*define\s+(\w+))");
  static const std::regex kAllowed(
      "^(KVSTOW_(CHECK|DCHECK|RETURN_IF_ERROR|ASSIGN_OR_RETURN|HD|CONCAT_\\w*|\\w+_IMPL_)|"
      "HWY_TARGET_INCLUDE)$");
  const std::string directives = BlankComments(file.text);
  line_number = 0;
  for (std::string_view view : SplitLines(directives)) {
    ++line_number;
    if (view.find("define") == std::string_view::npos) continue;
    const std::string line(view);
    std::smatch match;
    if (std::regex_search(line, match, kDefine)) {
      const std::string name = match[1].str();
      const bool is_per_target = file.text.find("HWY_TARGET_TOGGLE") != std::string::npos;
      if (!std::regex_match(name, kAllowed) && !is_per_target) {
        findings.push_back({"macro", file.path, line_number, name + ": a function or a constant"});
      }
    }
  }
  return findings;
}

Findings CheckWords(const File& file) {
  Findings findings;
  if (!IsText(file.path)) return findings;
  // Written in pieces so that this file does not find itself.
  static const std::array<std::string, 6> kWords = {
      std::string("/wo") + "rk/", std::string("../sha") + "red", std::string("TO") + "DO",
      std::string("FIX") + "ME",  std::string("XX") + "X",       std::string("place") + "holder"};
  int line_number = 0;
  for (std::string_view line : SplitLines(file.text)) {
    ++line_number;
    for (const std::string& word : kWords) {
      const size_t at = line.find(word);
      if (at == std::string_view::npos) continue;
      const size_t after = at + word.size();
      const bool inside_word =
          (at > 0 && std::isalnum(static_cast<unsigned char>(line[at - 1])) != 0) ||
          (word.back() != '/' && after < line.size() &&
           std::isupper(static_cast<unsigned char>(line[after])) != 0);
      if (inside_word) continue;
      findings.push_back({"word", file.path, line_number,
                          word + ": no path of one machine and no unfinished work in the tree"});
    }
  }
  return findings;
}

Findings CheckFile(const File& file) {
  Findings all;
  const auto add = [&](const Findings& findings) {
    all.insert(all.end(), findings.begin(), findings.end());
  };
  if (IsCxx(file.path)) {
    add(CheckIncludes(file));
    add(CheckDoors(file));
    add(CheckHeader(file));
    add(CheckCalls(file));
  }
  if (IsCxx(file.path) || EndsWith(file.path, ".proto")) add(CheckSizes(file));
  add(CheckNames(file));
  add(CheckWords(file));
  return all;
}

}  // namespace kvstow::tidy
