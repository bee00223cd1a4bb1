#include "storage/policy/trace_fields.h"

#include <array>
#include <charconv>
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow::policy {
namespace {

constexpr std::array<std::string_view, 4> kNames = {"timestamp", "input_length", "output_length",
                                                    "hash_ids"};
constexpr int kHashIds = 3;
constexpr int kDepthMax = 32;  // of arrays and objects inside fields that are skipped

bool IsBlank(char c) { return c == ' ' || c == '\t' || c == '\r'; }

std::string_view Trim(std::string_view text) {
  while (!text.empty() && IsBlank(text.front())) text.remove_prefix(1);
  while (!text.empty() && IsBlank(text.back())) text.remove_suffix(1);
  return text;
}

absl::Status Wrong(std::string_view field, std::string_view found, std::string_view wanted) {
  constexpr size_t kShown = 40;
  return absl::InvalidArgumentError(absl::StrCat("field ", ToAbsl(field), ": found `",
                                                 ToAbsl(found.substr(0, kShown)), "`, ",
                                                 ToAbsl(wanted)));
}

absl::Status ParseWhole(std::string_view field, std::string_view text, int64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) {
    return Wrong(field, text, "expected a whole number");
  }
  return absl::OkStatus();
}

absl::Status ParseId(std::string_view text, uint64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) {
    return Wrong("hash_ids", text, "expected whole numbers from 0 to 2^64 - 1");
  }
  return absl::OkStatus();
}

absl::Status ParseTime(std::string_view text, double& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty() ||
      !std::isfinite(value)) {
    return Wrong("timestamp", text, "expected milliseconds");
  }
  return absl::OkStatus();
}

// A number field; `hash_ids` has its own function.
absl::Status ParseNumber(int field, std::string_view text, TraceFields& fields) {
  switch (field) {
    case 0:
      return ParseTime(text, fields.timestamp_ms);
    case 1:
      return ParseWhole(kNames[1], text, fields.input_length);
    default:
      return ParseWhole(kNames[2], text, fields.output_length);
  }
}

// Walks over one line of JSON. It reads what a trace needs, and skips every other well-formed
// value.
class JsonLine {
 public:
  explicit JsonLine(std::string_view text) : rest_(text) {}

  char Peek() {
    while (!rest_.empty() && IsBlank(rest_.front())) rest_.remove_prefix(1);
    return rest_.empty() ? '\0' : rest_.front();
  }

  absl::Status Expect(char c) {
    if (Peek() != c) {
      return absl::InvalidArgumentError(absl::StrCat("found `", ToAbsl(rest_.substr(0, 20)),
                                                     "` where `", std::string(1, c),
                                                     "` was expected"));
    }
    rest_.remove_prefix(1);
    return absl::OkStatus();
  }

  bool Accept(char c) {
    if (Peek() != c) return false;
    rest_.remove_prefix(1);
    return true;
  }

  // Escapes are left as they are: no name that we look for has one.
  absl::StatusOr<std::string_view> String() {
    KVSTOW_RETURN_IF_ERROR(Expect('"'));
    for (size_t i = 0; i < rest_.size(); ++i) {
      if (rest_[i] == '\\') {
        ++i;
      } else if (rest_[i] == '"') {
        const std::string_view text = rest_.substr(0, i);
        rest_.remove_prefix(i + 1);
        return text;
      }
    }
    return absl::InvalidArgumentError("a string without its closing quote");
  }

  // A number, true, false or null: up to the next separator.
  std::string_view Scalar() {
    Peek();
    size_t size = 0;
    while (size < rest_.size() && rest_[size] != ',' && rest_[size] != ']' && rest_[size] != '}') {
      ++size;
    }
    const std::string_view text = Trim(rest_.substr(0, size));
    rest_.remove_prefix(size);
    return text;
  }

  absl::Status SkipValue(int depth) {
    if (depth > kDepthMax) return absl::InvalidArgumentError("nested more than 32 deep");
    switch (Peek()) {
      case '"':
        return String().status();
      case '[':
      case '{':
        return SkipGroup(depth);
      default:
        break;
    }
    if (Scalar().empty()) return absl::InvalidArgumentError("a value is missing");
    return absl::OkStatus();
  }

 private:
  absl::Status SkipGroup(int depth) {
    const bool is_object = Peek() == '{';
    const char close = is_object ? '}' : ']';
    rest_.remove_prefix(1);
    if (Accept(close)) return absl::OkStatus();
    do {
      if (is_object) {
        KVSTOW_RETURN_IF_ERROR(String().status());
        KVSTOW_RETURN_IF_ERROR(Expect(':'));
      }
      KVSTOW_RETURN_IF_ERROR(SkipValue(depth + 1));
    } while (Accept(','));
    return Expect(close);
  }

  std::string_view rest_;
};

absl::Status ParseIdArray(JsonLine& json, std::vector<uint64_t>& ids) {
  ids.clear();
  KVSTOW_RETURN_IF_ERROR(json.Expect('['));
  if (json.Accept(']')) return absl::OkStatus();
  do {
    uint64_t id = 0;
    KVSTOW_RETURN_IF_ERROR(ParseId(json.Scalar(), id));
    ids.push_back(id);
  } while (json.Accept(','));
  return json.Expect(']');
}

int FieldOf(std::string_view name) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<int>(i);
  }
  return -1;
}

absl::Status Missing(int field) {
  return absl::InvalidArgumentError(
      absl::StrCat("field ", ToAbsl(kNames[static_cast<size_t>(field)]), " is missing"));
}

std::vector<std::string_view> SplitCsv(std::string_view line) {
  std::vector<std::string_view> cells;
  for (;;) {
    const size_t comma = line.find(',');
    cells.push_back(Trim(line.substr(0, comma)));
    if (comma == std::string_view::npos) return cells;
    line.remove_prefix(comma + 1);
  }
}

}  // namespace

absl::Status ParseJsonLine(std::string_view line, TraceFields& fields) {
  JsonLine json(line);
  bool is_found[4] = {};
  KVSTOW_RETURN_IF_ERROR(json.Expect('{'));
  if (!json.Accept('}')) {
    do {
      KVSTOW_ASSIGN_OR_RETURN(const std::string_view name, json.String());
      KVSTOW_RETURN_IF_ERROR(json.Expect(':'));
      const int field = FieldOf(name);
      if (field < 0) {
        KVSTOW_RETURN_IF_ERROR(json.SkipValue(0));
        continue;
      }
      if (is_found[field]) {
        return absl::InvalidArgumentError(absl::StrCat("field ", ToAbsl(name), " is given twice"));
      }
      is_found[field] = true;
      if (field == kHashIds) {
        KVSTOW_RETURN_IF_ERROR(ParseIdArray(json, fields.hash_ids));
      } else {
        KVSTOW_RETURN_IF_ERROR(ParseNumber(field, json.Scalar(), fields));
      }
    } while (json.Accept(','));
    KVSTOW_RETURN_IF_ERROR(json.Expect('}'));
  }
  if (json.Peek() != '\0') return absl::InvalidArgumentError("text after the closing brace");
  for (int field = 0; field < 4; ++field) {
    if (!is_found[field]) return Missing(field);
  }
  return absl::OkStatus();
}

absl::StatusOr<CsvColumns> ParseCsvHeader(std::string_view line) {
  CsvColumns columns;
  for (const std::string_view cell : SplitCsv(line)) {
    const int field = FieldOf(cell);
    if (field >= 0) {
      if (columns.index[field] >= 0) {
        return absl::InvalidArgumentError(absl::StrCat("column ", ToAbsl(cell), " is named twice"));
      }
      columns.index[field] = columns.count;
    }
    ++columns.count;
  }
  for (int field = 0; field < 4; ++field) {
    if (columns.index[field] < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the header does not name the column ", ToAbsl(kNames[static_cast<size_t>(field)]),
          "; it must name timestamp, input_length, output_length and hash_ids"));
    }
  }
  return columns;
}

absl::Status ParseCsvLine(std::string_view line, const CsvColumns& columns, TraceFields& fields) {
  const std::vector<std::string_view> cells = SplitCsv(line);
  if (static_cast<int>(cells.size()) != columns.count) {
    return absl::InvalidArgumentError(
        absl::StrCat("has ", cells.size(), " columns, the header has ", columns.count));
  }
  for (int field = 0; field < kHashIds; ++field) {
    const std::string_view cell = cells[static_cast<size_t>(columns.index[field])];
    if (cell.empty()) return Missing(field);
    KVSTOW_RETURN_IF_ERROR(ParseNumber(field, cell, fields));
  }
  fields.hash_ids.clear();
  std::string_view ids = cells[static_cast<size_t>(columns.index[kHashIds])];
  if (ids.empty()) return Missing(kHashIds);
  while (!ids.empty()) {
    const size_t space = ids.find(' ');
    uint64_t id = 0;
    KVSTOW_RETURN_IF_ERROR(ParseId(ids.substr(0, space), id));
    fields.hash_ids.push_back(id);
    ids = space == std::string_view::npos ? std::string_view() : Trim(ids.substr(space));
  }
  return absl::OkStatus();
}

}  // namespace kvstow::policy
