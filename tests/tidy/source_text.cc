#include "tests/tidy/source_text.h"

#include <algorithm>
#include <cctype>
#include <regex>

namespace kvstow::tidy {
namespace {

bool IsWordChar(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

void Blank(std::string& text, size_t begin, size_t end) {
  for (size_t i = begin; i < std::min(end, text.size()); ++i) {
    if (text[i] != '\n') text[i] = ' ';
  }
}

// End of the literal that starts at `begin` (a quote), one past the closing quote.
size_t EndOfLiteral(std::string_view text, size_t begin) {
  const char quote = text[begin];
  size_t i = begin + 1;
  while (i < text.size() && text[i] != quote && text[i] != '\n') i += text[i] == '\\' ? 2 : 1;
  return std::min(i + 1, text.size());
}

// End of R"delimiter(...)delimiter", `begin` at the R.
size_t EndOfRawString(std::string_view text, size_t begin) {
  const size_t open = text.find('(', begin);
  if (open == std::string_view::npos) return text.size();
  const std::string close = ")" + std::string(text.substr(begin + 2, open - begin - 2)) + "\"";
  const size_t end = text.find(close, open);
  return end == std::string_view::npos ? text.size() : end + close.size();
}

// End of a preprocessor directive, with its continuation lines.
size_t EndOfDirective(std::string_view text, size_t begin) {
  size_t end = text.find('\n', begin);
  while (end != std::string_view::npos && end > 0 && text[end - 1] == '\\') {
    end = text.find('\n', end + 1);
  }
  return end == std::string_view::npos ? text.size() : end;
}

bool StartsLine(std::string_view text, size_t at) {
  while (at > 0 && (text[at - 1] == ' ' || text[at - 1] == '\t')) --at;
  return at == 0 || text[at - 1] == '\n';
}

// A quote inside a number (1'000) is a separator, not a literal.
bool IsDigitSeparator(std::string_view text, size_t at) {
  return text[at] == '\'' && at > 0 &&
         std::isxdigit(static_cast<unsigned char>(text[at - 1])) != 0 && at + 1 < text.size() &&
         std::isxdigit(static_cast<unsigned char>(text[at + 1])) != 0;
}

std::string BlankParts(std::string_view text, bool strings_and_directives) {
  std::string out(text);
  size_t i = 0;
  while (i < text.size()) {
    size_t end = i;
    bool blank = strings_and_directives;
    if (text.substr(i, 2) == "//") {
      end = std::min(text.find('\n', i), text.size());
      blank = true;
    } else if (text.substr(i, 2) == "/*") {
      const size_t close = text.find("*/", i + 2);
      end = close == std::string_view::npos ? text.size() : close + 2;
      blank = true;
    } else if (text.substr(i, 2) == "R\"" && (i == 0 || !IsWordChar(text[i - 1]))) {
      end = EndOfRawString(text, i);
    } else if (text[i] == '"' || (text[i] == '\'' && !IsDigitSeparator(text, i))) {
      end = EndOfLiteral(text, i);
    } else if (strings_and_directives && text[i] == '#' && StartsLine(text, i)) {
      end = EndOfDirective(text, i);
    }
    if (end == i) {
      ++i;
      continue;
    }
    if (blank) Blank(out, i, end);
    i = end;
  }
  return out;
}

enum class ScopeKind { kNamespace, kClass, kFunction, kOther };

ScopeKind KindOf(const std::string& head, ScopeKind outer) {
  static const std::regex kNamespace(R"((^|\s)(namespace|extern)\b)");
  static const std::regex kType(R"((^|\s)(class|struct|union|enum)\s)");
  const bool at_declarations = outer == ScopeKind::kNamespace || outer == ScopeKind::kClass;
  if (!at_declarations) return ScopeKind::kOther;
  const bool has_parameters = head.find('(') != std::string::npos;
  if (!has_parameters && std::regex_search(head, kNamespace)) return ScopeKind::kNamespace;
  const size_t first_paren = head.find('(');
  if (std::regex_search(head.substr(0, first_paren), kType) &&
      (!has_parameters || head.find("ABSL_") != std::string::npos ||
       head.find("alignas") != std::string::npos)) {
    return ScopeKind::kClass;
  }
  static const std::regex kInitializer(R"(=\s*$)");
  if (has_parameters && !std::regex_search(head, kInitializer)) return ScopeKind::kFunction;
  return ScopeKind::kOther;
}

std::string Trim(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())) != 0) {
    text.remove_prefix(1);
  }
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())) != 0) {
    text.remove_suffix(1);
  }
  return std::string(text);
}

// One pass over the code, keeping the stack of open braces.
class ScopeScanner {
 public:
  explicit ScopeScanner(std::string_view code) : code_(code) {}

  Scopes Scan() {
    for (at_ = 0; at_ < code_.size(); ++at_) {
      const char c = code_[at_];
      if (c == '\n') ++line_;
      if (c == '(') ++parens_;
      if (c == ')') --parens_;
      if (c == '{') Open();
      if (c == '}') Close();
      if (c == ';' && parens_ == 0) EndStatement();
      if (c == ':' && IsAccessLabel()) StartStatement();
    }
    return std::move(found_);
  }

 private:
  struct OpenScope {
    ScopeKind kind;
    Scope scope;
    int outer_parens;
  };

  ScopeKind outer() const { return open_.empty() ? ScopeKind::kNamespace : open_.back().kind; }

  void StartStatement() { statement_start_ = at_ + 1; }

  bool IsAccessLabel() const {
    static const std::regex kLabel(R"(^(public|private|protected)$)");
    return std::regex_match(Trim(code_.substr(statement_start_, at_ - statement_start_)), kLabel);
  }

  void EndStatement() {
    static const std::regex kMutex(
        R"((^|\s)(kvstow::)?(Mutex|std::mutex|std::shared_mutex)\s+\w+)");
    const std::string statement = Trim(code_.substr(statement_start_, at_ - statement_start_));
    if (outer() == ScopeKind::kClass && std::regex_search(statement, kMutex)) {
      ++open_.back().scope.num_mutexes;
    }
    StartStatement();
  }

  void Open() {
    const std::string_view raw = code_.substr(statement_start_, at_ - statement_start_);
    Scope scope;
    scope.head = Trim(raw);
    const size_t first = raw.find_first_not_of(" \t\n");
    const std::string_view from_head = raw.substr(first == std::string_view::npos ? 0 : first);
    scope.first_line =
        line_ - static_cast<int>(std::count(from_head.begin(), from_head.end(), '\n'));
    // Braces inside a parameter list or of a member initializer are values, not bodies.
    const ScopeKind kind = parens_ > 0 ? ScopeKind::kOther : KindOf(scope.head, outer());
    open_.push_back({kind, std::move(scope), parens_});
    if (kind != ScopeKind::kOther) {
      parens_ = 0;
      StartStatement();
    }
  }

  void Close() {
    if (open_.empty()) return;
    OpenScope closed = std::move(open_.back());
    open_.pop_back();
    closed.scope.last_line = line_;
    if (closed.kind == ScopeKind::kFunction) found_.functions.push_back(closed.scope);
    if (closed.kind == ScopeKind::kClass) found_.classes.push_back(closed.scope);
    if (closed.kind != ScopeKind::kOther) {
      parens_ = closed.outer_parens;
      StartStatement();
    }
  }

  std::string_view code_;
  size_t at_ = 0;
  size_t statement_start_ = 0;
  int line_ = 1;
  int parens_ = 0;
  std::vector<OpenScope> open_;
  Scopes found_;
};

}  // namespace

std::string BlankCommentsAndStrings(std::string_view text) { return BlankParts(text, true); }

std::string BlankComments(std::string_view text) { return BlankParts(text, false); }

Scopes FindScopes(std::string_view code) { return ScopeScanner(code).Scan(); }

int CountParameters(std::string_view head) {
  const size_t open = head.find('(');
  if (open == std::string_view::npos) return 0;
  int depth = 0;
  int commas = 0;
  bool is_empty = true;
  for (size_t i = open; i < head.size(); ++i) {
    const char c = head[i];
    if (c == '(' || c == '<' || c == '[' || c == '{') ++depth;
    if (c == ')' || c == ']' || c == '}' || (c == '>' && head[i - 1] != '-')) --depth;
    if (depth == 0) break;
    if (c == ',' && depth == 1) ++commas;
    if (i > open && std::isspace(static_cast<unsigned char>(c)) == 0) is_empty = false;
  }
  return is_empty ? 0 : commas + 1;
}

std::vector<std::string_view> SplitLines(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    lines.push_back(text.substr(0, end));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return lines;
}

}  // namespace kvstow::tidy
