// The rules of rules.h that look at the whole tree, and the exceptions.
#include <algorithm>
#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "tests/tidy/rules.h"
#include "tests/tidy/source_text.h"

namespace kvstow::tidy {
namespace {

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

// "a/b/../c" -> "a/c"
std::string Normalize(const std::string& path) {
  std::vector<std::string> parts;
  std::stringstream stream(path);
  std::string part;
  while (std::getline(stream, part, '/')) {
    if (part.empty() || part == ".") continue;
    if (part == ".." && !parts.empty()) {
      parts.pop_back();
    } else {
      parts.push_back(part);
    }
  }
  std::string out;
  for (const std::string& p : parts) out += (out.empty() ? "" : "/") + p;
  return out;
}

// Replaces ${x} by each item of a foreach(x item ...), so that loops over names count as naming.
std::vector<std::string> Expand(const std::string& word,
                                const std::multimap<std::string, std::string>& loops) {
  const size_t open = word.find("${");
  const size_t close = word.find('}');
  if (open == std::string::npos || close == std::string::npos) return {word};
  const std::string variable = word.substr(open + 2, close - open - 2);
  const auto [first, last] = loops.equal_range(variable);
  std::vector<std::string> words;
  for (auto it = first; it != last; ++it) {
    words.push_back(word.substr(0, open) + it->second + word.substr(close + 1));
  }
  // ${CMAKE_SOURCE_DIR}/path leaves "/path", which is a path from the root.
  if (words.empty()) words.push_back(word.substr(close + 1));
  return words;
}

std::multimap<std::string, std::string> LoopsOf(const std::string& code) {
  static const std::regex kLoop(R"(foreach\(\s*(\w+)\s+(?:IN\s+ITEMS\s+)?([^)]*)\))");
  std::multimap<std::string, std::string> loops;
  for (auto it = std::sregex_iterator(code.begin(), code.end(), kLoop);
       it != std::sregex_iterator(); ++it) {
    std::stringstream items((*it)[2].str());
    std::string item;
    while (items >> item) loops.emplace((*it)[1].str(), item);
  }
  return loops;
}

// The files that the CMakeLists.txt of `folder` names: every word with a source's ending, as a path
// from the root.
std::set<std::string> NamedSources(const std::string& folder, const std::string& text) {
  static const std::regex kComment(R"(#[^\n]*)");
  static const std::regex kSource(R"([A-Za-z0-9_./${}-]+\.(cc|cu|proto))");
  const std::string code = std::regex_replace(text, kComment, "");
  const std::multimap<std::string, std::string> loops = LoopsOf(code);
  std::set<std::string> named;
  for (auto it = std::sregex_iterator(code.begin(), code.end(), kSource);
       it != std::sregex_iterator(); ++it) {
    for (const std::string& word : Expand(it->str(), loops)) {
      named.insert(Normalize(folder + "/" + word));
      named.insert(Normalize(word));
    }
  }
  return named;
}

bool IsExternal(const std::string& link) {
  return link.empty() || link[0] == '#' || link.find("://") != std::string::npos ||
         link.rfind("mailto:", 0) == 0;
}

void CheckLinks(const File& page, const std::set<std::string>& paths, Findings& findings) {
  static const std::regex kLink(R"(\]\(([^)\s]+)\))");
  int line_number = 0;
  for (std::string_view view : SplitLines(page.text)) {
    ++line_number;
    const std::string line(view);
    for (auto it = std::sregex_iterator(line.begin(), line.end(), kLink);
         it != std::sregex_iterator(); ++it) {
      std::string link = (*it)[1].str();
      if (IsExternal(link)) continue;
      link = link.substr(0, link.find('#'));
      const std::string target = Normalize(FolderOf(page.path) + "/" + link);
      const bool is_folder = std::any_of(paths.begin(), paths.end(), [&](const std::string& path) {
        return path.rfind(target + "/", 0) == 0;
      });
      if (paths.count(target) == 0 && !is_folder) {
        findings.push_back({"document", page.path, line_number,
                            "links to " + link + ", which is not in the tree"});
      }
    }
  }
}

}  // namespace

Findings CheckRegistered(const std::vector<File>& files) {
  static const std::regex kSource(
      R"(^(kernels|transport|proto|storage|service|client|tests)/.*\.(cc|cu|proto)$)");
  std::set<std::string> named;
  for (const File& file : files) {
    if (file.path != "CMakeLists.txt" && file.path.find("/CMakeLists.txt") == std::string::npos) {
      continue;
    }
    named.merge(NamedSources(FolderOf(file.path), file.text));
  }
  Findings findings;
  for (const File& file : files) {
    if (std::regex_search(file.path, kSource) && named.count(file.path) == 0) {
      findings.push_back(
          {"registered", file.path, 0, "no CMakeLists.txt names it: it is neither built nor run"});
    }
  }
  return findings;
}

Findings CheckOwnHeaders(const std::vector<File>& files) {
  static const std::regex kInclude("(?:^|\n)#include [\"<]([^\">]+)[\">]");
  std::set<std::string> paths;
  for (const File& file : files) paths.insert(file.path);
  Findings findings;
  for (const File& file : files) {
    if (!file.path.ends_with(".cc")) continue;
    const std::string header = file.path.substr(0, file.path.size() - 2) + "h";
    if (paths.count(header) == 0) continue;
    std::smatch first;
    // Within its folder a file may be called by its name alone.
    if (std::regex_search(file.text, first, kInclude) && !header.ends_with(first[1].str())) {
      findings.push_back({"own-header", file.path, 0,
                          "include " + header + " first: so the header is seen to stand alone"});
    }
  }
  return findings;
}

Findings CheckDocuments(const std::vector<File>& files) {
  static const std::vector<std::string> kRequired = {
      "README.md",         "CONTRIBUTING.md",     "CHANGELOG.md",      "LICENSE",
      "proto/README.md",   "transport/README.md", "kernels/README.md", "storage/README.md",
      "storage/FORMAT.md", "service/README.md",   "client/README.md",  "deploy/README.md",
      "tests/README.md",   "tests/data/README.md"};
  std::set<std::string> paths;
  for (const File& file : files) paths.insert(file.path);
  Findings findings;
  for (const std::string& path : kRequired) {
    if (paths.count(path) == 0) {
      findings.push_back({"document", path, 0, "is missing: every folder says what it is"});
    }
  }
  for (const File& file : files) {
    if (file.path.size() > 3 && file.path.substr(file.path.size() - 3) == ".md") {
      CheckLinks(file, paths, findings);
    }
  }
  return findings;
}

std::vector<Exception> ParseExceptions(const std::string& text, Findings& findings) {
  std::vector<Exception> exceptions;
  int line_number = 0;
  for (std::string_view view : SplitLines(text)) {
    ++line_number;
    if (view.empty() || view[0] == '#') continue;
    std::stringstream stream{std::string(view)};
    Exception exception;
    exception.line = line_number;
    stream >> exception.rule >> exception.path;
    std::getline(stream >> std::ws, exception.reason);
    if (exception.reason.size() < 10) {
      findings.push_back({"exception", "tests/tidy/exceptions.txt", line_number,
                          "a line is `rule path reason`, and the reason says why"});
    }
    exceptions.push_back(exception);
  }
  return exceptions;
}

Findings ApplyExceptions(const Findings& findings, const std::vector<Exception>& exceptions) {
  Findings left;
  std::set<int> used;
  for (const Finding& finding : findings) {
    const auto match =
        std::find_if(exceptions.begin(), exceptions.end(), [&](const Exception& exception) {
          const bool is_folder = exception.path.back() == '/';
          return exception.rule == finding.rule &&
                 (is_folder ? finding.path.rfind(exception.path, 0) == 0
                            : finding.path == exception.path);
        });
    if (match == exceptions.end()) {
      left.push_back(finding);
    } else {
      used.insert(match->line);
    }
  }
  for (const Exception& exception : exceptions) {
    if (used.count(exception.line) == 0) {
      left.push_back({"exception", "tests/tidy/exceptions.txt", exception.line,
                      exception.rule + " " + exception.path + " excuses nothing: remove the line"});
    }
  }
  return left;
}

}  // namespace kvstow::tidy
