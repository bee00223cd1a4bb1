// The wire must not change under clients that exist: every message, field, enum value and call of
// kvstow.v1 stands in proto/descriptor.golden, one a line.
//
// Something was added on purpose:  descriptor_test --write  adds its lines to the golden file.
// It refuses to take a line out: a number, name or type that was sent once is never changed.
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <set>
#include <string>

#include "kvstow/v1/calibrations.pb.h"
#include "kvstow/v1/channels.pb.h"
#include "kvstow/v1/control.pb.h"
#include "kvstow/v1/data.pb.h"
#include "kvstow/v1/model.pb.h"

namespace {

using google::protobuf::Descriptor;
using google::protobuf::EnumDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::FileDescriptor;
using google::protobuf::MethodDescriptor;
using google::protobuf::ServiceDescriptor;

constexpr char kGoldenPath[] = KVSTOW_SOURCE_DIR "/proto/descriptor.golden";
constexpr char kHeading[] = "# The wire of kvstow.v1. Written by: descriptor_test --write";

std::string NumberText(int number) {
  std::string text = std::to_string(number);
  return text.size() < 2 ? "0" + text : text;
}

std::string FieldLine(const FieldDescriptor& field) {
  std::string type = field.type_name();
  if (field.message_type() != nullptr) type = field.message_type()->full_name();
  if (field.enum_type() != nullptr) type = field.enum_type()->full_name();
  std::string line = "field " + field.containing_type()->full_name() + " " +
                     NumberText(field.number()) + " " + field.name() + " " + type;
  line += field.is_map() ? " map" : field.is_repeated() ? " repeated" : " single";
  if (field.is_repeated() && field.is_packable()) line += field.is_packed() ? " packed" : " loose";
  if (field.real_containing_oneof() != nullptr) {
    line += " oneof=" + field.real_containing_oneof()->name();
  }
  return line + " json=" + field.json_name();
}

void AddMessage(const Descriptor& message, std::set<std::string>& lines) {
  lines.insert("message " + message.full_name());
  for (int i = 0; i < message.field_count(); ++i) lines.insert(FieldLine(*message.field(i)));
  for (int i = 0; i < message.nested_type_count(); ++i) AddMessage(*message.nested_type(i), lines);
}

void AddEnum(const EnumDescriptor& type, std::set<std::string>& lines) {
  for (int i = 0; i < type.value_count(); ++i) {
    lines.insert("enum " + type.full_name() + " " + NumberText(type.value(i)->number()) + " " +
                 type.value(i)->name());
  }
}

void AddService(const ServiceDescriptor& service, std::set<std::string>& lines) {
  for (int i = 0; i < service.method_count(); ++i) {
    const MethodDescriptor& method = *service.method(i);
    lines.insert("rpc /" + service.full_name() + "/" + method.name() + " (" +
                 (method.client_streaming() ? "stream " : "") + method.input_type()->full_name() +
                 ") returns (" + (method.server_streaming() ? "stream " : "") +
                 method.output_type()->full_name() + ")");
  }
}

std::set<std::string> CurrentLines() {
  std::set<std::string> lines;
  for (const FileDescriptor* file :
       {kvstow::v1::ModelSpec::descriptor()->file(),
        kvstow::v1::LookupRequest::descriptor()->file(), kvstow::v1::PutFrame::descriptor()->file(),
        kvstow::v1::OpenChannelRequest::descriptor()->file(),
        kvstow::v1::CalibrationInfo::descriptor()->file()}) {
    for (int i = 0; i < file->message_type_count(); ++i) AddMessage(*file->message_type(i), lines);
    for (int i = 0; i < file->enum_type_count(); ++i) AddEnum(*file->enum_type(i), lines);
    for (int i = 0; i < file->service_count(); ++i) AddService(*file->service(i), lines);
  }
  return lines;
}

std::set<std::string> GoldenLines() {
  std::set<std::string> lines;
  std::ifstream file(kGoldenPath);
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line[0] != '#') lines.insert(line);
  }
  return lines;
}

// Lines of `a` that `b` has not, one a row.
std::string Difference(const std::set<std::string>& a, const std::set<std::string>& b) {
  std::string text;
  for (const std::string& line : a) {
    if (b.count(line) == 0) text += "  " + line + "\n";
  }
  return text;
}

TEST(Descriptor, NothingOnTheWireWasChangedOrTakenAway) {
  const std::set<std::string> golden = GoldenLines();
  ASSERT_GT(golden.size(), 100u) << "cannot read " << kGoldenPath;
  EXPECT_EQ(Difference(golden, CurrentLines()), "")
      << "these lines of " << kGoldenPath << " no longer hold: clients that exist would break";
}

TEST(Descriptor, WhatWasAddedIsInTheGoldenFile) {
  EXPECT_EQ(Difference(CurrentLines(), GoldenLines()), "")
      << "new on the wire; if that is meant: descriptor_test --write";
}

int WriteGolden() {
  const std::set<std::string> lines = CurrentLines();
  const std::string gone = Difference(GoldenLines(), lines);
  if (!gone.empty()) {
    std::fprintf(stderr, "not written: these lines no longer hold\n%s", gone.c_str());
    return 1;
  }
  std::ofstream file(kGoldenPath);
  file << kHeading << "\n";
  for (const std::string& line : lines) file << line << "\n";
  file.close();
  if (!file) {
    std::fprintf(stderr, "cannot write %s\n", kGoldenPath);
    return 1;
  }
  std::printf("%zu lines in %s\n", lines.size(), kGoldenPath);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (argc > 1 && std::strcmp(argv[1], "--write") == 0) return WriteGolden();
  return RUN_ALL_TESTS();
}
