#include "storage/segment_map.h"

#include <utility>

#include "kernels/core/check.h"

namespace kvstow {

void SegmentMap::AddSegment(uint32_t segment_idx, std::shared_ptr<Segment> segment) {
  MutexLock lock(&mutex_);
  KVSTOW_CHECK(segments_.try_emplace(segment_idx, Usage{.segment = std::move(segment)}).second);
}

void SegmentMap::RemoveSegment(uint32_t segment_idx) {
  std::shared_ptr<Segment> segment;  // its end deletes files: after the lock
  MutexLock lock(&mutex_);
  const auto found = segments_.find(segment_idx);
  if (found == segments_.end()) return;
  KVSTOW_CHECK(found->second.live_records == 0 && found->second.live_bytes == 0);
  segment = std::move(found->second.segment);
  segments_.erase(found);
}

void SegmentMap::Count(const Stored& stored, int64_t sign) {
  Usage& usage = segments_.at(stored.segment_idx);
  const int64_t bytes = sign * (stored.record_bytes + kEntryBytes);
  usage.live_records += sign;
  usage.live_bytes += bytes;
  live_bytes_ += bytes;
}

bool SegmentMap::Add(const BlockKey& key, uint32_t segment_idx, int64_t record_bytes) {
  KVSTOW_CHECK(record_bytes >= 0 && record_bytes <= UINT32_MAX);
  MutexLock lock(&mutex_);
  const Stored stored{segment_idx, static_cast<uint32_t>(record_bytes)};
  if (!records_.try_emplace(key, stored).second) return false;
  Count(stored, +1);
  return true;
}

bool SegmentMap::Move(const BlockKey& key, uint32_t from, uint32_t to) {
  MutexLock lock(&mutex_);
  const auto found = records_.find(key);
  if (found == records_.end() || found->second.segment_idx != from) return false;
  Count(found->second, -1);
  found->second.segment_idx = to;
  Count(found->second, +1);
  return true;
}

bool SegmentMap::Drop(const BlockKey& key) {
  MutexLock lock(&mutex_);
  const auto found = records_.find(key);
  if (found == records_.end()) return false;
  Count(found->second, -1);
  dropped_.push_back({found->second.segment_idx, key});
  records_.erase(found);
  return true;
}

std::optional<SegmentMap::Place> SegmentMap::Find(const BlockKey& key) const {
  MutexLock lock(&mutex_);
  const auto found = records_.find(key);
  if (found == records_.end()) return std::nullopt;
  return Place{found->second.segment_idx, found->second.record_bytes,
               segments_.at(found->second.segment_idx).segment};
}

bool SegmentMap::Contains(const BlockKey& key) const {
  MutexLock lock(&mutex_);
  return records_.contains(key);
}

void SegmentMap::ForEach(
    const std::function<void(const BlockKey& key, int64_t record_bytes)>& visit) const {
  std::vector<std::pair<BlockKey, int64_t>> records;
  {
    MutexLock lock(&mutex_);
    records.reserve(records_.size());
    for (const auto& [key, stored] : records_) records.emplace_back(key, stored.record_bytes);
  }
  for (const auto& [key, record_bytes] : records) visit(key, record_bytes);
}

std::vector<SegmentMap::DroppedRecord> SegmentMap::TakeDropped() {
  MutexLock lock(&mutex_);
  return std::exchange(dropped_, {});
}

void SegmentMap::ReturnDropped(const std::vector<DroppedRecord>& dropped) {
  MutexLock lock(&mutex_);
  dropped_.insert(dropped_.end(), dropped.begin(), dropped.end());
}

bool SegmentMap::has_dropped() const {
  MutexLock lock(&mutex_);
  return !dropped_.empty();
}

int64_t SegmentMap::live_bytes() const {
  MutexLock lock(&mutex_);
  return live_bytes_;
}

int64_t SegmentMap::live_bytes(uint32_t segment_idx) const {
  MutexLock lock(&mutex_);
  const auto found = segments_.find(segment_idx);
  return found == segments_.end() ? 0 : found->second.live_bytes;
}

int64_t SegmentMap::live_records(uint32_t segment_idx) const {
  MutexLock lock(&mutex_);
  const auto found = segments_.find(segment_idx);
  return found == segments_.end() ? 0 : found->second.live_records;
}

std::vector<BlockKey> SegmentMap::KeysOf(uint32_t segment_idx) const {
  MutexLock lock(&mutex_);
  std::vector<BlockKey> keys;
  for (const auto& [key, stored] : records_) {
    if (stored.segment_idx == segment_idx) keys.push_back(key);
  }
  return keys;
}

}  // namespace kvstow
