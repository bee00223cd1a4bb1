// SourceText: a C++ file with its comments and strings blanked, and the functions and classes in
// it.
//
//   const std::string code = BlankCommentsAndStrings(text);   // same length, same line breaks
//   for (const Scope& function : FindFunctions(code)) { ... function.num_lines() ... }
//
// No compiler: braces and the words before them. Enough for the rules of this house, where
// clang-format decides how code is laid out.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kvstow::tidy {

// Replaces every character of comments, string literals, character literals and preprocessor
// directives by a space. Line breaks stay, so positions and line numbers stay true.
std::string BlankCommentsAndStrings(std::string_view text);

// Replaces comments only.
std::string BlankComments(std::string_view text);

struct Scope {
  std::string head;  // what stands before the brace: a signature, "class Name final : public Base"
  int first_line = 0;   // 1-based, of the head
  int last_line = 0;    // of the closing brace
  int num_mutexes = 0;  // classes only: members of type Mutex, nested classes apart
  int num_lines() const { return last_line - first_line + 1; }
};

struct Scopes {
  std::vector<Scope> functions;  // definitions at namespace or class scope; lambdas belong to them
  std::vector<Scope> classes;
};

// `code`: from BlankCommentsAndStrings.
Scopes FindScopes(std::string_view code);

// Parameters of a function's head; 0 for `()`. Commas inside <> and () are not separators.
int CountParameters(std::string_view head);

std::vector<std::string_view> SplitLines(std::string_view text);

}  // namespace kvstow::tidy
