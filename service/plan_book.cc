#include "service/plan_book.h"

#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/core/check.h"
#include "kernels/core/log.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/synced_file.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".plan";
// Lines of a file besides the plan itself. To CodecPlan::Parse they are comments, so that a file is
// a plan for every tool that reads one.
constexpr char kDerivedLine[] = "# derived by the guard";
constexpr char kSetLine[] = "# set by an operator";
constexpr char kReasonMark[] = "# raw: ";

std::string FileName(const Digest& fingerprint) {
  return absl::StrCat(fingerprint.ToHex(), ToAbsl(kSuffix));
}

std::string FileText(const ModelPlan& plan) {
  std::string text = plan.origin == PlanOrigin::kDerived ? kDerivedLine : kSetLine;
  for (const std::string& reason : plan.reasons) absl::StrAppend(&text, "\n", kReasonMark, reason);
  for (const absl::string_view item : absl::StrSplit(plan.codecs.Text(), ',', absl::SkipEmpty())) {
    absl::StrAppend(&text, "\n", item);
  }
  return text + "\n";
}

PlanRef NewPlan(CodecPlan codecs, PlanOrigin origin, std::vector<std::string> reasons = {}) {
  const Digest id = codecs.Id();
  return std::make_shared<const ModelPlan>(
      ModelPlan{std::move(codecs), id, origin, std::move(reasons)});
}

absl::StatusOr<PlanRef> ReadPlan(const fs::path& path) {
  KVSTOW_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path, CodecPlan::kMaxTextBytes));
  PlanOrigin origin = PlanOrigin::kSet;
  std::vector<std::string> reasons;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    if (line == kDerivedLine) origin = PlanOrigin::kDerived;
    if (absl::ConsumePrefix(&line, kReasonMark)) reasons.emplace_back(line);
  }
  KVSTOW_ASSIGN_OR_RETURN(CodecPlan codecs, CodecPlan::Parse(text));
  return NewPlan(std::move(codecs), origin, std::move(reasons));
}

// Without a calibration a calibrated codec takes no plane, which says nothing about those of a
// block that has one.
bool StoreAlike(const RegisteredModel& model, int32_t plane_idx, const CodecPair& a,
                const CodecPair& b) {
  const Role role = model.layout().plane(plane_idx).role;
  if (a.of(role) == b.of(role)) return true;
  if (NeedsCalibration(CodecPair{.k = a.of(role), .v = b.of(role)})) return false;
  return model.codec_of(plane_idx, a) == model.codec_of(plane_idx, b);
}

}  // namespace

bool NeedsCalibration(const RegisteredModel& model, const CodecPair& codecs,
                      const ModelPlan* plan) {
  if (plan == nullptr) return NeedsCalibration(codecs);
  for (int32_t i = 0; i < model.layout().num_layers(); ++i) {
    if (NeedsCalibration(plan->codecs.PairFor(i, codecs))) return true;
  }
  return false;
}

RegisteredModel::Plan PlannedBlock(const RegisteredModel& model, const CodecPair& codecs,
                                   const ModelPlan* plan, const Calibration* calibration) {
  RegisteredModel::Plan block = model.PlanFor(codecs, calibration);
  if (plan == nullptr || plan->codecs.empty()) return block;
  auto sizes = std::make_shared<std::vector<uint32_t>>();
  sizes->reserve(block.unit_bytes->size());
  for (int32_t i = 0; i < model.layout().num_planes(); ++i) {
    const int32_t layer_idx = model.layout().plane(i).layer_idx;
    const CodecPair pair = plan->codecs.PairFor(layer_idx, block.codecs);
    sizes->push_back(model.unit_bytes(i, model.codec_of(i, pair, calibration)));
  }
  block.unit_bytes = std::move(sizes);
  return block;
}

absl::StatusOr<std::unique_ptr<PlanBook>> PlanBook::Open(const std::string& directory,
                                                         bool derives) {
  std::unique_ptr<PlanBook> book(new PlanBook(directory, derives));
  if (!directory.empty()) KVSTOW_RETURN_IF_ERROR(book->Load());
  return book;
}

absl::Status PlanBook::Load() {
  return LoadSyncedFiles(directory_, kSuffix,
                         [this](const fs::path& path) -> absl::Status {
                           KVSTOW_ASSIGN_OR_RETURN(const Digest fingerprint,
                                                   Digest::FromHex(path.stem().string()));
                           KVSTOW_ASSIGN_OR_RETURN(PlanRef plan, ReadPlan(path));
                           Replace(fingerprint, std::move(plan));
                           return absl::OkStatus();
                         })
      .status();
}

PlanRef PlanBook::Current(const Digest& fingerprint) const {
  MutexLock lock(&mutex_);
  const auto entry = entries_.find(fingerprint);
  return entry == entries_.end() ? nullptr : entry->second.current;
}

absl::StatusOr<PlanRef> PlanBook::Find(const Digest& fingerprint, const Digest& plan_id) const {
  if (plan_id.is_zero()) return PlanRef();
  MutexLock lock(&mutex_);
  const auto entry = entries_.find(fingerprint);
  if (entry != entries_.end()) {
    const PlanRef& current = entry->second.current;
    if (current != nullptr && current->id == plan_id) return current;
    for (const PlanRef& plan : entry->second.past) {
      if (plan->id == plan_id) return plan;
    }
  }
  return absl::AbortedError("the plan of the model has changed meanwhile: reserve again");
}

PlanRef PlanBook::ForRequest(const Digest& fingerprint, const PlanRef& current,
                             const CodecPlan& layers) {
  if (layers.empty()) return current;
  CodecPlan merged = current == nullptr ? layers : current->codecs.Over(layers);
  if (current != nullptr && merged == current->codecs) return current;
  PlanRef plan = NewPlan(std::move(merged), PlanOrigin::kRequest);
  MutexLock lock(&mutex_);
  Remember(plan, entries_[fingerprint]);
  return plan;
}

void PlanBook::Remember(const PlanRef& plan, Entry& entry) {
  std::erase_if(entry.past, [&](const PlanRef& past) { return past->id == plan->id; });
  entry.past.push_back(plan);
  if (entry.past.size() > kPlansKept) entry.past.erase(entry.past.begin());
}

void PlanBook::Replace(const Digest& fingerprint, PlanRef plan) {
  MutexLock lock(&mutex_);
  Entry& entry = entries_[fingerprint];
  if (entry.current != nullptr) Remember(entry.current, entry);
  entry.current = std::move(plan);
  entry.stats.clear();
  entry.is_seen.clear();
  entry.num_seen = entry.num_useless = 0;
}

bool PlanBook::IsWatching(const Digest& fingerprint) const {
  return derives_ && Current(fingerprint) == nullptr;
}

bool PlanBook::NeedsPlane(const RegisteredModel& model, int32_t plane_idx) {
  if (!derives_) return false;
  MutexLock lock(&mutex_);
  Entry& entry = entries_[model.fingerprint()];
  if (entry.current != nullptr) return false;
  const auto num_planes = static_cast<size_t>(model.layout().num_planes());
  entry.stats.resize(num_planes);
  entry.is_seen.resize(num_planes);
  return !entry.is_seen[plane_idx];
}

void PlanBook::Observe(const RegisteredModel& model, int32_t plane_idx, CodecId codec,
                       absl::Span<const std::byte> unit, const Calibration* calibration) {
  if (!NeedsPlane(model, plane_idx)) return;
  const PlaneShape shape = model.shape(plane_idx, calibration);
  PlaneStats stats;
  if (codec == CodecId::kRaw) {
    stats = MeasurePlane(shape, unit.data());
  } else {
    std::vector<std::byte> rows(model.layout().plane(plane_idx).row_bytes);
    BestBackend(*FindCodec(codec)).decode(shape, unit.data(), rows.data());
    stats = MeasurePlane(shape, rows.data());
  }
  if (!AddPlane(model, plane_idx, stats)) return;
  const PlanRef plan = Current(model.fingerprint());
  Log(Severity::kInfo, "plan derived",
      {{"model", model.spec().name},
       {"plan",
        plan == nullptr || plan->codecs.empty() ? "nothing stays raw" : plan->codecs.Text()}});
  if (const absl::Status written = WriteCurrent(model.fingerprint()); !written.ok()) {
    Log(Severity::kWarning, "plan not written: it ends with this process",
        {{"model", model.spec().name}, {"reason", std::string(written.message())}});
  }
}

bool PlanBook::AddPlane(const RegisteredModel& model, int32_t plane_idx, const PlaneStats& stats) {
  MutexLock lock(&mutex_);
  Entry& entry = entries_[model.fingerprint()];
  // Another writer was faster, with this plane or with the last.
  if (entry.current != nullptr || entry.is_seen.empty() || entry.is_seen[plane_idx]) return false;
  // Rows that are never quantized have nothing to guard.
  const bool is_useful = stats.is_usable || !IsFloatDType(model.layout().dtype());
  if (is_useful) {
    entry.stats[plane_idx] = stats;
    entry.is_seen[plane_idx] = true;
    ++entry.num_seen;
  } else {
    ++entry.num_useless;
  }
  const bool is_complete = entry.num_seen == model.layout().num_planes();
  if (!is_complete && entry.num_useless < kUselessPlanesMax) return false;
  GuardVerdict verdict = DerivePlan(model.layout(), entry.stats);
  entry.current =
      NewPlan(std::move(verdict.plan), PlanOrigin::kDerived, std::move(verdict.reasons));
  entry.stats.clear();
  entry.is_seen.clear();
  return true;
}

absl::Status PlanBook::CheckSeal(const RegisteredModel& model, const RecordMeta& meta) const {
  const PlanRef current = Current(model.fingerprint());
  const bool is_raw = meta.codecs == CodecPair{};
  if (is_raw || current == nullptr || current->id == meta.plan_id) return absl::OkStatus();
  KVSTOW_ASSIGN_OR_RETURN(const PlanRef reserved, Find(model.fingerprint(), meta.plan_id));
  if (current->codecs.empty()) return absl::OkStatus();
  for (int32_t i = 0; i < model.layout().num_planes(); ++i) {
    const int32_t layer_idx = model.layout().plane(i).layer_idx;
    const CodecPair told =
        reserved == nullptr ? meta.codecs : reserved->codecs.PairFor(layer_idx, meta.codecs);
    const CodecPair wanted = current->codecs.PairFor(layer_idx, told);
    if (StoreAlike(model, i, told, wanted)) continue;
    return absl::AbortedError(absl::StrCat("block ", meta.key.ToHex(), ": the plan of the model (",
                                           current->codecs.Text(),
                                           ") came after the block was reserved, and stores layer ",
                                           layer_idx, " otherwise: put the block again"));
  }
  return absl::OkStatus();
}

absl::StatusOr<PlanRef> PlanBook::Set(const RegisteredModel& model, const CodecPlan& codecs) {
  KVSTOW_RETURN_IF_ERROR(codecs.CheckFits(model.layout()));
  PlanRef plan = NewPlan(codecs, PlanOrigin::kSet);
  Replace(model.fingerprint(), plan);
  KVSTOW_RETURN_IF_ERROR(WriteCurrent(model.fingerprint()));
  return plan;
}

absl::Status PlanBook::Clear(const Digest& fingerprint) {
  Replace(fingerprint, nullptr);
  return WriteCurrent(fingerprint);
}

absl::Status PlanBook::WriteCurrent(const Digest& fingerprint) const {
  if (directory_.empty()) return absl::OkStatus();
  // Who changes the plan while this writes comes here as well, and this then writes that plan: the
  // last file is of the last plan.
  PlanRef plan = Current(fingerprint);
  while (true) {
    if (plan != nullptr) {
      KVSTOW_RETURN_IF_ERROR(WriteSyncedFile(directory_, FileName(fingerprint), FileText(*plan)));
    } else {
      std::error_code error;
      fs::remove(fs::path(directory_) / FileName(fingerprint), error);
      if (error) {
        return absl::UnavailableError(
            absl::StrCat("remove ", FileName(fingerprint), ": ", error.message()));
      }
    }
    PlanRef now = Current(fingerprint);
    if (now == plan) return absl::OkStatus();
    plan = std::move(now);
  }
}

}  // namespace kvstow
