// The road from files and flags to the configuration message; declared in server_config.h.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/message.h>
#include <google/protobuf/text_format.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/core/check.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"
#include "server_config.pb.h"
#include "service/server_config.h"

namespace kvstow {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using google::protobuf::TextFormat;

// What --help says of a field. Names come from the message; the test holds both to each other.
struct FieldHelp {
  std::string_view name;
  std::string_view default_text;  // "" is a default too; see `default_note`
  std::string_view default_note;  // how --help shows the default where the text alone is unclear
  std::string_view example;
  std::string_view what;
};

constexpr std::array<FieldHelp, 34> kFields = {{
    {"listen.unix_socket", "/tmp/kvstow.sock", "", "/run/kvstow/kvstow.sock",
     "path of the unix socket; empty for none"},
    {"listen.tcp", "", "none", "127.0.0.1:7070", "TCP address; port 0 takes a free one"},
    {"dram.capacity", "1GiB", "", "8GiB", "bytes of the memory tier, populated at start"},
    {"dram.headroom", "", "1/128 of the capacity", "64MiB",
     "bytes kept free between turns, for new blocks to compete with old ones"},
    {"nvme.path", "", "none", "/var/lib/kvstow", "directory of the disk tier"},
    {"nvme.capacity", "", "8GiB with a path", "100GiB", "bytes the disk tier may hold"},
    {"nvme.write_behind_max", "", "256MiB with a path", "1GiB",
     "sealed bytes that may wait for the disk"},
    {"nvme.admission", "", "all", "second-sight",
     "what is written unasked: all, or second-sight: what a second turn has used"},
    {"nvme.writes_per_day", "", "no limit", "1TiB", "bytes a day written unasked"},
    {"tickets.write_deadline", "30s", "", "10s", "how long a writer may hold a reservation"},
    {"tickets.reuse_delay", "30s", "", "10s",
     "wait after that before a dead writer's memory is used again"},
    {"tickets.max", "65536", "", "1024", "reservations at once"},
    {"leases.max_ttl", "5m", "", "30s", "longest lease a reader gets"},
    {"leases.max", "65536", "", "1024", "leases at once"},
    {"limits.worker_threads", "", "one per core", "4",
     "threads that encode, decode, read the disk"},
    {"limits.queue", "4096", "", "1024", "work items that may wait for these threads"},
    {"limits.calls_in_flight", "256", "", "64", "Put, Get and Verify calls at once"},
    {"limits.bytes_in_flight", "512MiB", "", "1GiB", "bytes held for these calls"},
    {"limits.blocks", "", "10000000, fewer where they take half the memory beside dram", "1000000",
     "blocks known at once; of memory each takes 500 bytes or more beside its own"},
    {"channels.shm_socket", "auto", "auto: listen.unix_socket with .shm after it",
     "/run/kvstow/shm.sock", "socket over which workers share memory; empty for none"},
    {"channels.max", "256", "", "64", "windows of workers at once"},
    {"channels.window_bytes", "4GiB", "", "1GiB", "bytes of all windows together"},
    {"channels.ucx", "false", "", "true", "windows of trusted workers elsewhere, by UCX"},
    {"channels.ucx_tls", "", "what UCX finds", "tcp", "as UCX_TLS"},
    {"channels.ucx_devices", "", "all", "eth0", "as UCX_NET_DEVICES"},
    {"peers.list", "", "none", "unix:/run/b.sock,10.0.0.2:7070",
     "services asked for what is missing here"},
    {"peers.timeout", "2s", "", "500ms", "what a peer may cost a call"},
    {"metrics.address", "", "none", "127.0.0.1:9400",
     "address of the admin page and the Prometheus metrics"},
    {"policy.name", "rtv", "", "lru",
     "which block leaves next: rtv, lru, s3fifo, arc, gdsf or hazard"},
    {"policy.turn_gap", "5s", "", "1s", "calls on one prompt within this time are one turn"},
    {"policy.ttl", "", "never", "24h", "blocks unused for so long leave by themselves"},
    {"guard.mode", "on", "", "off",
     "on: layers that codecs would spoil stay raw; off: only those of plans that were set"},
    {"hbm.capacity", "0", "0, none", "16GiB",
     "bytes of the first GPU's memory for a tier above the memory tier"},
    {"log.level", "info", "", "warning", "debug, info, warning or error"},
}};
constexpr FieldHelp kDrainTimeout = {"drain_timeout", "10s", "", "30s",
                                     "how long SIGTERM waits for calls in flight"};

const FieldHelp* FindHelp(std::string_view name) {
  if (name == kDrainTimeout.name) return &kDrainTimeout;
  for (const FieldHelp& help : kFields) {
    if (help.name == name) return &help;
  }
  return nullptr;
}

// A leaf of the message: the field and the message it sits in.
struct Leaf {
  Message* message = nullptr;
  const FieldDescriptor* field = nullptr;
};

Leaf FindLeaf(v1::ServerConfig& config, const std::string& name) {
  const size_t dot = name.find('.');
  const Descriptor* descriptor = config.GetDescriptor();
  if (dot == std::string::npos) {
    const FieldDescriptor* field = descriptor->FindFieldByName(name);
    if (field == nullptr || field->message_type() != nullptr) return {};
    return {&config, field};
  }
  const FieldDescriptor* section = descriptor->FindFieldByName(name.substr(0, dot));
  if (section == nullptr || section->message_type() == nullptr) return {};
  const FieldDescriptor* field = section->message_type()->FindFieldByName(name.substr(dot + 1));
  if (field == nullptr) return {};
  return {config.GetReflection()->MutableMessage(&config, section), field};
}

// Sets a leaf from text. kInvalidArgument for text that is no such number.
absl::Status SetLeaf(const Leaf& leaf, const std::string& text) {
  const Reflection* reflection = leaf.message->GetReflection();
  switch (leaf.field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      reflection->SetString(leaf.message, leaf.field, text);
      return absl::OkStatus();
    case FieldDescriptor::CPPTYPE_UINT32: {
      uint32_t value = 0;
      if (!absl::SimpleAtoi(text, &value)) break;
      reflection->SetUInt32(leaf.message, leaf.field, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_UINT64: {
      uint64_t value = 0;
      if (!absl::SimpleAtoi(text, &value)) break;
      reflection->SetUInt64(leaf.message, leaf.field, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_BOOL: {
      if (text != "true" && text != "false") {
        return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" is not true or false"));
      }
      reflection->SetBool(leaf.message, leaf.field, text == "true");
      return absl::OkStatus();
    }
    default:
      KVSTOW_CHECK(false && "a configuration field of a type that flags cannot set");
  }
  return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" is not a whole number"));
}

std::string DidYouMean(std::string_view prefix, const std::string& nearest) {
  if (nearest.empty()) return "; kvstowd --help lists all";
  return absl::StrCat("; did you mean ", ToAbsl(prefix), nearest, "?");
}

// Keeps the first error of the text-format parser and says it in our words.
class FirstError final : public google::protobuf::io::ErrorCollector {
 public:
  // The column is left out: it is that of the token after the one in question.
  void AddError(int line, google::protobuf::io::ColumnNumber, const std::string& message) override {
    if (text_.empty()) text_ = absl::StrCat(line + 1, ": ", Reword(message));
  }
  const std::string& text() const { return text_; }

 private:
  // The parser says: Message type "kvstow.v1.DramConfig" has no field named "capactiy".
  static std::string Reword(const std::string& message) {
    constexpr std::string_view kTypeMark = "Message type \"";
    constexpr std::string_view kNameMark = "\" has no field named \"";
    const size_t name_at = message.find(kNameMark);
    if (message.rfind(kTypeMark, 0) != 0 || name_at == std::string::npos) return message;
    const std::string type = message.substr(kTypeMark.size(), name_at - kTypeMark.size());
    const size_t begin = name_at + kNameMark.size();
    const std::string name = message.substr(begin, message.find('"', begin) - begin);
    const Descriptor* root = v1::ServerConfig::descriptor();
    std::string section;
    std::vector<std::string> known;
    for (int i = 0; i < root->field_count(); ++i) {
      const FieldDescriptor* field = root->field(i);
      if (type == root->full_name()) known.push_back(field->name());
      if (field->message_type() == nullptr || field->message_type()->full_name() != type) continue;
      section = field->name() + ".";
      for (int j = 0; j < field->message_type()->field_count(); ++j) {
        known.push_back(field->message_type()->field(j)->name());
      }
    }
    return absl::StrCat("unknown key \"", section, name, "\"",
                        DidYouMean(section, NearestName(name, known)));
  }

  std::string text_;
};

absl::Status MergeConfigFile(const std::string& path, v1::ServerConfig& config) {
  std::error_code error;
  std::ifstream in(path, std::ios::binary);
  if (!in || std::filesystem::is_directory(path, error)) {
    return absl::NotFoundError(absl::StrCat("config file ", path, " cannot be read"));
  }
  const std::string text(std::istreambuf_iterator<char>(in), {});
  return MergeConfigText(text, path, config);
}

// One flag as it stands on the command line.
struct Flag {
  std::string name;  // without the dashes
  std::string value;
  bool has_value = false;
};

absl::Status CheckFlag(const Flag& flag) {
  if (flag.name == "help" || flag.name == "version") {
    if (!flag.has_value) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("flag --", flag.name, " takes no value"));
  }
  const FieldHelp* help = FindHelp(flag.name);
  if (help == nullptr && flag.name != "config") {
    std::vector<std::string> known = ConfigFieldNames();
    known.insert(known.end(), {"config", "help", "version"});
    return absl::InvalidArgumentError(absl::StrCat(
        "unknown flag --", flag.name, DidYouMean("--", NearestName(flag.name, known))));
  }
  if (flag.has_value) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("flag --", flag.name, " needs a value, for example --", flag.name, "=",
                   help == nullptr ? "/etc/kvstow/kvstowd.textproto" : ToAbsl(help->example)));
}

absl::StatusOr<std::vector<Flag>> SplitFlags(const std::vector<std::string>& args) {
  std::vector<Flag> flags;
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string& arg = args[i];
    if (arg == "-h") {
      flags.push_back({.name = "help"});
      continue;
    }
    if (arg.rfind("--", 0) != 0 || arg.size() == 2) {
      // The value of a misspelt flag is not what is wrong here.
      for (const Flag& flag : flags) KVSTOW_RETURN_IF_ERROR(CheckFlag(flag));
      return absl::InvalidArgumentError(
          absl::StrCat("unexpected argument \"", arg, "\": flags look like --dram.capacity=8GiB"));
    }
    const size_t equals = arg.find('=');
    if (equals != std::string::npos) {
      flags.push_back({arg.substr(2, equals - 2), arg.substr(equals + 1), true});
      continue;
    }
    Flag flag = {.name = arg.substr(2)};
    const bool takes_value = flag.name == "config" || FindHelp(flag.name) != nullptr;
    if (takes_value && i + 1 < args.size() && args[i + 1].rfind("--", 0) != 0) {
      flag.value = args[++i];
      flag.has_value = true;
    }
    flags.push_back(flag);
  }
  return flags;
}

}  // namespace

std::vector<std::string> ConfigFieldNames() {
  std::vector<std::string> names;
  const Descriptor* root = v1::ServerConfig::descriptor();
  for (int i = 0; i < root->field_count(); ++i) {
    const FieldDescriptor* field = root->field(i);
    if (field->message_type() == nullptr) {
      names.push_back(field->name());
      continue;
    }
    for (int j = 0; j < field->message_type()->field_count(); ++j) {
      names.push_back(absl::StrCat(field->name(), ".", field->message_type()->field(j)->name()));
    }
  }
  return names;
}

v1::ServerConfig DefaultConfig(const Machine& machine) {
  v1::ServerConfig config;
  for (const std::string& name : ConfigFieldNames()) {
    const FieldHelp* help = FindHelp(name);
    KVSTOW_CHECK(help != nullptr);
    if (help->default_text.empty()) continue;
    KVSTOW_CHECK(SetLeaf(FindLeaf(config, name), std::string(help->default_text)).ok());
  }
  config.mutable_limits()->set_worker_threads(static_cast<uint32_t>(machine.num_cores));
  return config;
}

absl::Status MergeConfigText(std::string_view text, std::string_view file_name,
                             v1::ServerConfig& config) {
  FirstError error;
  TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  // Parse refuses a key given twice, Merge lays the values over those that are there.
  v1::ServerConfig alone;
  if (!parser.ParseFromString(std::string(text), &alone) ||
      !parser.MergeFromString(std::string(text), &config)) {
    return absl::InvalidArgumentError(
        absl::StrCat("config ", ToAbsl(file_name), ":", error.text()));
  }
  return absl::OkStatus();
}

absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& args,
                                             const Machine& machine) {
  KVSTOW_ASSIGN_OR_RETURN(const std::vector<Flag> flags, SplitFlags(args));
  CommandLine line;
  std::set<std::string> seen;
  v1::ServerConfig config = DefaultConfig(machine);
  for (const Flag& flag : flags) {
    KVSTOW_RETURN_IF_ERROR(CheckFlag(flag));
    if (flag.name == "help") line.action = CommandLine::Action::kHelp;
    if (flag.name == "version") line.action = CommandLine::Action::kVersion;
    if (!seen.insert(flag.name).second) {
      return absl::InvalidArgumentError(absl::StrCat("flag --", flag.name, " is given twice"));
    }
  }
  if (line.action != CommandLine::Action::kServe) return line;
  // The file first, wherever it stands: flags win.
  for (const Flag& flag : flags) {
    if (flag.name == "config") KVSTOW_RETURN_IF_ERROR(MergeConfigFile(flag.value, config));
  }
  for (const Flag& flag : flags) {
    if (flag.name == "config") continue;
    const absl::Status status = SetLeaf(FindLeaf(config, flag.name), flag.value);
    if (!status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(flag.name, ": ", status.message()));
    }
  }
  KVSTOW_ASSIGN_OR_RETURN(line.options, OptionsFromConfig(config, machine));
  return line;
}

std::string HelpText(const Machine& machine) {
  std::string text =
      "kvstowd: keeps LLM KV caches, compressed, in memory and on disk, and serves them by gRPC.\n"
      "\n"
      "usage: kvstowd [--config FILE] [--SECTION.FIELD=VALUE ...]\n"
      "       kvstowd --dram.capacity=8GiB --nvme.path=/var/lib/kvstow --nvme.capacity=100GiB\n"
      "\n"
      "  --config FILE   a text-format file of the same fields: dram { capacity: \"8GiB\" };\n"
      "                  flags win over the file\n"
      "  --help          this page\n"
      "  --version       the version\n"
      "\n"
      "Sizes: B, KiB, MiB, GiB, TiB, KB, MB, GB, TB. Durations: ms, s, m, h.\n"
      "\n";
  for (const std::string& name : ConfigFieldNames()) {
    const FieldHelp& help = *FindHelp(name);
    std::string_view shown = help.default_note.empty() ? help.default_text : help.default_note;
    std::string cores;
    if (name == "limits.worker_threads") {
      cores = absl::StrCat(ToAbsl(shown), ", ", machine.num_cores, " here");
      shown = cores;
    }
    absl::StrAppendFormat(&text, "  --%s=%s\n      %s (default: %s)\n", name,
                          std::string(help.example), std::string(help.what), std::string(shown));
  }
  absl::StrAppend(
      &text,
      "\nExit status: 0 after a drained stop, 1 when it cannot start, 2 for wrong use or "
      "configuration.\n");
  return text;
}

}  // namespace kvstow
