// Rules: the style of the tree as functions from a file to what is wrong with it.
//
//   for (const Finding& finding : CheckFile({.path = "storage/tier.h", .text = text})) { ... }
//
// Each rule has a name, which tests/tidy/exceptions.txt uses, and says what to do instead.
#pragma once

#include <string>
#include <vector>

namespace kvstow::tidy {

struct File {
  std::string path;  // from the root, with forward slashes
  std::string text;
};

struct Finding {
  std::string rule;
  std::string path;
  int line = 0;  // 1-based; 0: the whole file
  std::string message;
};

using Findings = std::vector<Finding>;

// Rules about one file.
Findings CheckIncludes(const File& file);  // "include": who may include whom
Findings CheckDoors(const File& file);     // "door": one door per heavy library
Findings CheckSizes(const File& file);     // "columns", "file-lines", "function-lines",
                                           // "parameters", "mutexes"
Findings CheckHeader(const File& file);    // "header": #pragma once, purpose comment
Findings CheckNames(const File& file);     // "name": banned words in type and file names
Findings CheckCalls(const File& file);     // "call": banned functions and types; "macro"
Findings CheckWords(const File& file);     // "word": paths of a machine, unfinished work
Findings CheckFile(const File& file);      // all of the above

// Rules about the tree.
Findings CheckRegistered(const std::vector<File>& files);  // "registered": sources in CMakeLists
Findings CheckOwnHeaders(const std::vector<File>& files);  // "own-header": included first
Findings CheckDocuments(const std::vector<File>& files);   // "document": required pages, links

// A line of exceptions.txt: `rule path reason`. A path that ends in a slash is a whole folder.
struct Exception {
  std::string rule;
  std::string path;
  std::string reason;
  int line = 0;
};

// Lines that are empty or start with # are skipped. A line without a reason is a finding.
std::vector<Exception> ParseExceptions(const std::string& text, Findings& findings);

// What is left of `findings`, and a finding for each exception that excuses nothing.
Findings ApplyExceptions(const Findings& findings, const std::vector<Exception>& exceptions);

// True for C++ and CUDA sources and headers.
bool IsCxx(const std::string& path);

}  // namespace kvstow::tidy
