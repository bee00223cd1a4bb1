#include "storage/nvme_tier.h"

#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/listener.h>
#include <rocksdb/metadata.h>
#include <rocksdb/sst_file_reader.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "kernels/core/log.h"
#include "kernels/core/mutex.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"
#include "storage/nvme_dir.h"
#include "storage/segment_device.h"
#include "storage/segment_store.h"

namespace kvstow {
namespace {

// Values below it stay in the table files.
constexpr int64_t kMinBlobBytes = 4096;
// Longest wait for a flush that RocksDB called done: 30 s, looking again now and then.
constexpr int kFlushWaits = 3000;
constexpr absl::Duration kFlushWait = absl::Milliseconds(10);
// Tables of a segment that are not merged yet.
constexpr size_t kTablesMax = 32;
constexpr char kSegmentPrefix[] = "seg-";
// Entries of a segment: kMetaPrefix and kRecordPrefix, each followed by the 32 bytes of the key.
constexpr char kMetaPrefix[] = "m";
constexpr char kRecordPrefix[] = "d";

rocksdb::Slice ToSlice(absl::Span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string EntryName(const char* prefix, const BlockKey& key) {
  return absl::StrCat(prefix, ToAbsl(key.AsStringView()));
}

std::string SegmentName(uint32_t segment) {
  return absl::StrFormat("%s%010u", kSegmentPrefix, segment);
}

std::optional<uint32_t> SegmentOfName(absl::string_view name) {
  uint32_t segment = 0;
  if (!absl::ConsumePrefix(&name, kSegmentPrefix) || !absl::SimpleAtoi(name, &segment)) {
    return std::nullopt;
  }
  return segment;
}

// The database itself is damaged, as opposed to the disk being full, absent or forbidden.
bool IsBroken(const rocksdb::Status& status) {
  return status.IsCorruption() || status.IsPathNotFound() ||
         (status.IsIOError() && status.ToString().find("No such file") != std::string::npos);
}

absl::Status DiskError(const char* what, const rocksdb::Status& status) {
  return absl::UnavailableError(absl::StrCat("disk tier: ", what, ": ", status.ToString()));
}

rocksdb::ReadOptions ReadOptions() {
  rocksdb::ReadOptions options;
  options.verify_checksums = false;  // the record carries its own, much faster, checksums
  options.fill_cache = false;
  return options;
}

rocksdb::WriteOptions WriteOptions() {
  rocksdb::WriteOptions options;
  options.disableWAL = true;  // a cache: what was not flushed may be lost
  return options;
}

// Tells what RocksDB's own threads do, and keeps it from looking for free space by itself, every
// few seconds and for good: SegmentStore asks when there is something to write.
class FlushListener final : public rocksdb::EventListener {
 public:
  void OnFlushCompleted(rocksdb::DB* /*db*/, const rocksdb::FlushJobInfo& /*info*/) override {
    changed_.SignalAll();
  }
  void OnBackgroundError(rocksdb::BackgroundErrorReason /*reason*/,
                         rocksdb::Status* /*error*/) override {
    num_failures_.fetch_add(1);
    changed_.SignalAll();
  }
  void OnErrorRecoveryBegin(rocksdb::BackgroundErrorReason /*reason*/, rocksdb::Status /*error*/,
                            bool* auto_recovery) override {
    *auto_recovery = false;
  }
  int64_t num_failures() const { return num_failures_.load(); }
  // Until a flush has ended or failed, or `timeout`.
  void WaitForChange(absl::Duration timeout) {
    MutexLock lock(&mutex_);
    changed_.WaitFor(&mutex_, timeout);
  }

 private:
  std::atomic<int64_t> num_failures_ = 0;
  Mutex mutex_;
  CondVar changed_;
};

// A manifest holds every file and every change since it was begun. Too small, it would be written
// anew at each flush.
int64_t ManifestBytesMax(int64_t capacity_bytes) {
  return std::clamp(capacity_bytes / 128, int64_t{2} << 20, int64_t{32} << 20);
}

rocksdb::DBOptions DatabaseOptions(int64_t capacity_bytes,
                                   std::shared_ptr<FlushListener> listener) {
  rocksdb::DBOptions options;
  options.create_if_missing = true;
  options.max_background_jobs = 2;
  options.max_open_files = 512;
  options.skip_stats_update_on_db_open = true;
  options.avoid_flush_during_shutdown = true;  // done before, where a failure can be told
  options.max_bgerror_resume_count = 0;        // as FlushListener
  options.listeners.push_back(std::move(listener));
  // The files beside tables and blobs, within SlackBytes.
  options.info_log_level = rocksdb::WARN_LEVEL;
  options.max_log_file_size = 1 << 20;
  options.keep_log_file_num = 2;
  options.max_manifest_file_size = static_cast<uint64_t>(ManifestBytesMax(capacity_bytes));
  options.manifest_preallocation_size = 64 << 10;
  options.allow_fallocate = false;
  options.stats_dump_period_sec = 0;
  options.stats_persist_period_sec = 0;
  return options;
}

rocksdb::ColumnFamilyOptions SegmentOptions() {
  static_assert(SegmentStore::kFlushBytesMax < (64 << 20));
  rocksdb::BlockBasedTableOptions table;
  table.checksum = rocksdb::kXXH3;
  table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
  table.block_cache = rocksdb::NewLRUCache(1 << 20);
  rocksdb::ColumnFamilyOptions options;
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  options.compression = rocksdb::kNoCompression;
  options.enable_blob_files = true;
  options.min_blob_size = kMinBlobBytes;
  options.blob_file_size = uint64_t{256} << 20;
  options.blob_compression_type = rocksdb::kNoCompression;
  // Segments go as a whole: nothing to collect. Tables are merged by MergeTables.
  options.enable_blob_garbage_collection = false;
  options.disable_auto_compactions = true;
  // We flush, at SegmentStore::kFlushBytesMax, so that a failure has a caller.
  options.write_buffer_size = size_t{256} << 20;
  options.arena_block_size = 1 << 20;
  options.max_write_buffer_number = 4;
  return options;
}

// A segment's column family. Its files go, once it was dropped, with the last user.
class FamilySegment final : public Segment {
 public:
  FamilySegment(rocksdb::DB* db, rocksdb::ColumnFamilyHandle* family) : db_(db), family_(family) {}
  ~FamilySegment() override { db_->DestroyColumnFamilyHandle(family_); }
  rocksdb::ColumnFamilyHandle* family() const { return family_; }

 private:
  rocksdb::DB* const db_;
  rocksdb::ColumnFamilyHandle* const family_;
};

rocksdb::ColumnFamilyHandle* FamilyOf(const Segment& segment) {
  return static_cast<const FamilySegment&>(segment).family();
}

// A record read from disk. Nothing in it belongs to the database, which it may outlive.
struct DiskRead {
  rocksdb::PinnableSlice pinned;
  std::string copied;
};

class RocksDevice final : public SegmentDevice {
 public:
  explicit RocksDevice(int64_t capacity_bytes)
      : capacity_bytes_(capacity_bytes), segment_options_(SegmentOptions()) {}
  ~RocksDevice() override {
    for (rocksdb::ColumnFamilyHandle* family : other_families_) {
      db_->DestroyColumnFamilyHandle(family);
    }
  }

  // Opens or makes the database. kDataLoss: it is there and broken; kUnavailable: anything else.
  absl::StatusOr<std::map<uint32_t, std::shared_ptr<Segment>>> Open(const std::string& path);

  absl::StatusOr<std::shared_ptr<Segment>> Create(uint32_t segment_idx) override;
  absl::Status Write(Segment& segment, const BlockKey& key, std::string_view meta,
                     absl::Span<const std::byte> record) override;
  absl::Status Erase(Segment& segment, const BlockKey& key) override;
  absl::Status Flush(Segment& segment) override;
  absl::Status Delete(Segment& segment) override;
  absl::Status Resume() override;
  absl::StatusOr<BlockRef> Read(const Segment& segment, const BlockKey& key) const override;
  absl::Status Scan(
      const Segment& segment,
      const std::function<void(const BlockKey& key, std::string_view meta)>& visit) const override;
  int64_t FileBytes(const Segment& segment) const override;

 private:
  void MergeTables(rocksdb::ColumnFamilyHandle* family);

  const int64_t capacity_bytes_;
  const rocksdb::ColumnFamilyOptions segment_options_;
  const std::shared_ptr<FlushListener> flushes_ = std::make_shared<FlushListener>();
  std::unique_ptr<rocksdb::DB> db_;
  std::vector<rocksdb::ColumnFamilyHandle*> other_families_;
};

absl::StatusOr<std::map<uint32_t, std::shared_ptr<Segment>>> RocksDevice::Open(
    const std::string& path) {
  const auto failed = [](const char* what, const rocksdb::Status& status) {
    const absl::Status error = DiskError(what, status);
    return IsBroken(status) ? absl::DataLossError(error.message()) : error;
  };
  std::vector<std::string> names = {rocksdb::kDefaultColumnFamilyName};
  std::error_code missing;
  if (std::filesystem::exists(path + "/CURRENT", missing)) {
    names.clear();
    const rocksdb::Status status =
        rocksdb::DB::ListColumnFamilies(DatabaseOptions(capacity_bytes_, flushes_), path, &names);
    if (!status.ok()) return failed("list of segments", status);
  }
  std::vector<rocksdb::ColumnFamilyDescriptor> families;
  for (const std::string& name : names) families.emplace_back(name, segment_options_);
  std::vector<rocksdb::ColumnFamilyHandle*> handles;
  rocksdb::DB* db = nullptr;
  const rocksdb::Status status =
      rocksdb::DB::Open(DatabaseOptions(capacity_bytes_, flushes_), path, families, &handles, &db);
  if (!status.ok()) return failed("open", status);
  db_.reset(db);
  std::map<uint32_t, std::shared_ptr<Segment>> segments;
  for (size_t i = 0; i < handles.size(); ++i) {
    const std::optional<uint32_t> number = SegmentOfName(names[i]);
    if (number.has_value()) {
      segments[*number] = std::make_shared<FamilySegment>(db, handles[i]);
    } else {
      other_families_.push_back(handles[i]);
    }
  }
  return segments;
}

absl::StatusOr<std::shared_ptr<Segment>> RocksDevice::Create(uint32_t segment_idx) {
  rocksdb::ColumnFamilyHandle* family = nullptr;
  const rocksdb::Status status =
      db_->CreateColumnFamily(segment_options_, SegmentName(segment_idx), &family);
  if (!status.ok()) return DiskError("new segment", status);
  return std::make_shared<FamilySegment>(db_.get(), family);
}

absl::Status RocksDevice::Write(Segment& segment, const BlockKey& key, std::string_view meta,
                                absl::Span<const std::byte> record) {
  rocksdb::WriteBatch batch;
  batch.Put(FamilyOf(segment), EntryName(kMetaPrefix, key), {meta.data(), meta.size()});
  batch.Put(FamilyOf(segment), EntryName(kRecordPrefix, key), ToSlice(record));
  const rocksdb::Status status = db_->Write(WriteOptions(), &batch);
  return status.ok() ? absl::OkStatus() : DiskError("write", status);
}

absl::Status RocksDevice::Erase(Segment& segment, const BlockKey& key) {
  const rocksdb::Status status =
      db_->Delete(WriteOptions(), FamilyOf(segment), EntryName(kMetaPrefix, key));
  return status.ok() ? absl::OkStatus() : DiskError("erase", status);
}

absl::Status RocksDevice::Flush(Segment& segment) {
  const int64_t num_failures = flushes_->num_failures();
  rocksdb::FlushOptions flush;
  flush.wait = true;
  flush.allow_write_stall = true;
  const rocksdb::Status status = db_->Flush(flush, FamilyOf(segment));
  if (!status.ok()) return DiskError("flush", status);
  // RocksDB 7.8 after Resume: Flush may come back with OK before anything is written. Nobody else
  // writes now, so memory that still waits is ours.
  uint64_t num_waiting = 0;
  for (int i = 0; i < kFlushWaits; ++i) {
    if (!db_->GetIntProperty(FamilyOf(segment), rocksdb::DB::Properties::kNumImmutableMemTable,
                             &num_waiting) ||
        num_waiting == 0 || flushes_->num_failures() != num_failures) {
      break;
    }
    flushes_->WaitForChange(kFlushWait);
  }
  if (num_waiting > 0) {
    return absl::UnavailableError(
        absl::StrCat("disk tier: flush: ", num_waiting, " tables of memory were not written"));
  }
  MergeTables(FamilyOf(segment));
  return absl::OkStatus();
}

// Every flush adds a table that a reader may have to ask. Many make one now and then; the records,
// in blob files, stay where they are. Only when all tables are sound: a damaged block met by a
// compaction would stop the database, while a reader that meets it loses one record.
void RocksDevice::MergeTables(rocksdb::ColumnFamilyHandle* family) {
  rocksdb::ColumnFamilyMetaData meta;
  db_->GetColumnFamilyMetaData(family, &meta);
  if (meta.levels.empty() || meta.levels[0].files.size() < kTablesMax) return;
  const rocksdb::Options options(db_->GetDBOptions(), segment_options_);
  for (const rocksdb::LevelMetaData& level : meta.levels) {
    for (const rocksdb::SstFileMetaData& file : level.files) {
      rocksdb::SstFileReader reader(options);
      if (!reader.Open(file.db_path + file.name).ok() || !reader.VerifyChecksum().ok()) return;
    }
  }
  // A failure changes nothing: the tables stay as they are, or the next write tells.
  db_->CompactRange(rocksdb::CompactRangeOptions(), family, nullptr, nullptr)
      .PermitUncheckedError();
}

absl::Status RocksDevice::Delete(Segment& segment) {
  const rocksdb::Status status = db_->DropColumnFamily(FamilyOf(segment));
  return status.ok() ? absl::OkStatus() : DiskError("delete segment", status);
}

absl::Status RocksDevice::Resume() {
  // Twice: after the first, 7.8 may still count as stopped; the second then writes what waits.
  rocksdb::Status status = db_->Resume();
  if (status.ok()) status = db_->Resume();
  return status.ok() ? absl::OkStatus() : DiskError("resume", status);
}

absl::StatusOr<BlockRef> RocksDevice::Read(const Segment& segment, const BlockKey& key) const {
  auto read = std::make_shared<DiskRead>();
  const rocksdb::Status status =
      db_->Get(ReadOptions(), FamilyOf(segment), EntryName(kRecordPrefix, key), &read->pinned);
  if (status.IsNotFound()) {
    return absl::NotFoundError(absl::StrCat("disk tier: no record of block ", key.ToHex()));
  }
  if (IsBroken(status)) {
    return absl::DataLossError(
        absl::StrCat("disk tier: block ", key.ToHex(), ": ", status.ToString()));
  }
  if (!status.ok()) return DiskError("read", status);
  rocksdb::Slice value = read->pinned;
  if (static_cast<int64_t>(value.size()) < kMinBlobBytes) {
    // Small values are pinned inside the database's memory.
    read->copied = value.ToString();
    read->pinned.Reset();
    value = read->copied;
  }
  const absl::Span<const std::byte> bytes(reinterpret_cast<const std::byte*>(value.data()),
                                          value.size());
  return BlockRef(std::move(read), bytes);
}

absl::Status RocksDevice::Scan(
    const Segment& segment,
    const std::function<void(const BlockKey& key, std::string_view meta)>& visit) const {
  rocksdb::ReadOptions options = ReadOptions();
  options.verify_checksums = true;  // few bytes, and a damaged block is noticed as such
  const auto visit_entry = [&](const rocksdb::Iterator& at) {
    rocksdb::Slice name = at.key();
    name.remove_prefix(1);
    const absl::StatusOr<BlockKey> key = Digest::FromBytes({name.data(), name.size()}, "key");
    if (key.ok()) visit(*key, {at.value().data(), at.value().size()});
  };
  std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator(options, FamilyOf(segment)));
  std::string last;
  for (it->Seek(kMetaPrefix); it->Valid() && it->key().starts_with(kMetaPrefix); it->Next()) {
    visit_entry(*it);
    last = it->key().ToString();
  }
  const rocksdb::Status status = it->status();
  if (status.ok()) return absl::OkStatus();
  // A damaged block of a table: what lies behind it is reached from the other end.
  it.reset(db_->NewIterator(options, FamilyOf(segment)));
  for (it->SeekToLast(); it->Valid() && it->key().starts_with(kMetaPrefix); it->Prev()) {
    if (it->key().ToString() <= last) break;
    visit_entry(*it);
  }
  return absl::DataLossError(status.ToString());
}

int64_t RocksDevice::FileBytes(const Segment& segment) const {
  uint64_t table_bytes = 0;
  uint64_t blob_bytes = 0;
  db_->GetIntProperty(FamilyOf(segment), rocksdb::DB::Properties::kTotalSstFilesSize, &table_bytes);
  db_->GetIntProperty(FamilyOf(segment), rocksdb::DB::Properties::kTotalBlobFileSize, &blob_bytes);
  return static_cast<int64_t>(table_bytes + blob_bytes);
}

}  // namespace

absl::Status NvmeOptions::Validate() const {
  if (path.empty()) return absl::InvalidArgumentError("disk tier: path is empty");
  if (capacity_bytes < NvmeTier::kCapacityMin) {
    return absl::InvalidArgumentError(absl::StrCat("disk tier: capacity_bytes is ", capacity_bytes,
                                                   ", want at least ", NvmeTier::kCapacityMin));
  }
  return absl::OkStatus();
}

// In the order of their building; they end in reverse.
struct NvmeTier::Parts {
  Parts(const NvmeOptions& options, DirLock lock)
      : options(options),
        lock(std::move(lock)),
        device(options.capacity_bytes),
        store(options.capacity_bytes, &device, options.clock) {}
  const NvmeOptions options;
  const DirLock lock;
  RocksDevice device;
  SegmentStore store;
  OpenReport report;
};

absl::StatusOr<std::unique_ptr<NvmeTier>> NvmeTier::Open(
    const NvmeOptions& options, const std::function<void(const BlockInfo&)>& found) {
  KVSTOW_RETURN_IF_ERROR(options.Validate());
  KVSTOW_ASSIGN_OR_RETURN(DirLock lock, DirLock::Acquire(options.path));
  auto parts = std::make_unique<Parts>(options, std::move(lock));
  const std::string path = DatabasePath(options.path);
  auto segments = parts->device.Open(path);
  if (absl::IsDataLoss(segments.status())) {
    Log(Severity::kError, "disk tier: the database is broken: set aside, starting empty",
        {{"path", path}, {"error", std::string(segments.status().message())}});
    KVSTOW_RETURN_IF_ERROR(SetDatabaseAside(options.path));
    ++parts->report.dirs_set_aside;
    segments = parts->device.Open(path);
  }
  KVSTOW_RETURN_IF_ERROR(segments.status());
  KVSTOW_ASSIGN_OR_RETURN(parts->report.blocks_lost,
                          parts->store.Adopt(*std::move(segments), found));
  return std::unique_ptr<NvmeTier>(new NvmeTier(std::move(parts)));
}

NvmeTier::NvmeTier(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

NvmeTier::~NvmeTier() {
  absl::Status status = Flush();
  if (status.ok()) status = FlushDrops();
  if (status.ok()) return;
  Log(Severity::kError, "disk tier: the last flush failed",
      {{"path", parts_->options.path}, {"error", std::string(status.message())}});
}

const NvmeTier::OpenReport& NvmeTier::open_report() const { return parts_->report; }
absl::Status NvmeTier::MakeRoom(int64_t bytes) { return parts_->store.MakeRoom(bytes); }
absl::Status NvmeTier::FlushDrops() { return parts_->store.FlushDrops(); }
bool NvmeTier::has_unflushed() const { return parts_->store.has_unflushed(); }
int64_t NvmeTier::live_bytes() const { return parts_->store.map().live_bytes(); }
int64_t NvmeTier::live_bytes_max() const { return parts_->store.live_bytes_max(); }
absl::Status NvmeTier::Put(const BlockKey& key, absl::Span<const std::byte> record) {
  return parts_->store.Put(key, record);
}
absl::StatusOr<BlockRef> NvmeTier::Get(const BlockKey& key) { return parts_->store.Get(key); }
void NvmeTier::Drop(const BlockKey& key) { parts_->store.Drop(key); }
void NvmeTier::ForEach(
    const std::function<void(const BlockKey& key, int64_t record_bytes)>& visit) const {
  parts_->store.map().ForEach(visit);
}
absl::Status NvmeTier::Flush() { return parts_->store.Flush(); }
int64_t NvmeTier::SlackBytes(int64_t capacity_bytes) {
  return (int64_t{12} << 20) + 2 * ManifestBytesMax(capacity_bytes);
}
int64_t NvmeTier::used_bytes() const { return parts_->store.used_bytes(); }
int64_t NvmeTier::capacity_bytes() const { return parts_->options.capacity_bytes; }

}  // namespace kvstow
