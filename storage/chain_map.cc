#include "storage/chain_map.h"

#include <utility>

#include "kernels/core/check.h"

namespace kvstow {

using policy::kNone;

ChainMap::ChainMap(uint64_t seen_entries, std::function<bool(BlockNumber)> remembers)
    : by_key_(0, HashOf{&nodes_}, EqualTo{&nodes_}),
      seen_(seen_entries),
      remembers_(std::move(remembers)) {}

BlockNumber ChainMap::Find(const BlockKey& key) const {
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? kNone : *found;
}

BlockNumber ChainMap::Add(const BlockKey& key, BlockNumber parent) {
  BlockNumber number;
  if (free_.empty()) {
    number = static_cast<BlockNumber>(nodes_.size());
    KVSTOW_CHECK(number != kNone);
    nodes_.emplace_back();
  } else {
    number = free_.back();
    free_.pop_back();
    nodes_[number] = Node();
  }
  nodes_[number].key = key;
  nodes_[number].last_turn = seen_.Find(BlockKeyHash()(key));
  by_key_.insert(number);
  if (parent != kNone) SetParent(number, parent);
  return number;
}

void ChainMap::SetParent(BlockNumber number, BlockNumber parent) {
  Node& node = nodes_[number];
  KVSTOW_CHECK(node.parent == kNone && parent != number);
  node.parent = parent;
  node.chain_idx = nodes_[parent].chain_idx + 1;
  Hold(parent);
}

void ChainMap::Release(BlockNumber number) {
  // The last child's going may be the parent's end, and so on upward.
  while (number != kNone) {
    Node& node = nodes_[number];
    KVSTOW_CHECK(node.refs > 0);
    if (--node.refs > 0) return;
    const BlockNumber parent = node.parent;
    if (node.last_turn != 0) seen_.Put(BlockKeyHash()(node.key), node.last_turn);
    node.parent = kNone;
    node.chain_idx = 0;
    node.is_used = false;
    dormant_.push_back(number);
    LookAtDormant();
    number = parent;
  }
}

void ChainMap::LookAtDormant() {
  for (int i = 0; i < 2 && !dormant_.empty(); ++i) {
    const BlockNumber number = dormant_.front();
    dormant_.pop_front();
    // Awake again, or freed by another entry of the queue.
    const auto it = by_key_.find(number);
    if (nodes_[number].refs > 0 || it == by_key_.end()) continue;
    if (remembers_(number)) {
      dormant_.push_back(number);
      continue;
    }
    by_key_.erase(it);
    free_.push_back(number);
  }
}

int64_t ChainMap::memory_bytes() const {
  return static_cast<int64_t>(nodes_.capacity() * sizeof(Node) +
                              by_key_.capacity() * (sizeof(BlockNumber) + 1) +
                              (free_.capacity() + dormant_.size()) * sizeof(BlockNumber)) +
         seen_.memory_bytes();
}

}  // namespace kvstow
