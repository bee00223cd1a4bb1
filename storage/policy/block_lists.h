// BlockLists: several queues over block numbers, in which a block sits in at most one queue and can
// be taken out wherever it is. For the queue-based policies.
//
// All operations are O(1). Thread safety: none.
#pragma once

#include <cstdint>
#include <vector>

#include "storage/policy/policy.h"

namespace kvstow::policy {

class BlockLists {
 public:
  explicit BlockLists(int num_lists) : lists_(static_cast<size_t>(num_lists)) {}

  // The list of `block`, or -1.
  int ListOf(BlockNumber block) const { return block < nodes_.size() ? nodes_[block].list : -1; }
  int64_t size(int list) const { return lists_[static_cast<size_t>(list)].size; }
  BlockNumber back(int list) const { return lists_[static_cast<size_t>(list)].back; }
  // The neighbour towards the front; kNone at the front.
  BlockNumber before(BlockNumber block) const { return nodes_[block].before; }

  // Takes `block` from where it is and puts it at the front: the side that leaves last.
  void PushFront(int list, BlockNumber block) { PushBehind(list, kNone, block); }

  // The same, but right behind `ahead`, which must be in `list`; kNone: at the front.
  void PushBehind(int list, BlockNumber ahead, BlockNumber block) {
    Remove(block);
    if (block >= nodes_.size()) nodes_.resize(static_cast<size_t>(block) + 1);
    List& l = lists_[static_cast<size_t>(list)];
    Node& node = nodes_[block];
    node.list = list;
    node.before = ahead;
    node.after = ahead == kNone ? l.front : nodes_[ahead].after;
    (node.before == kNone ? l.front : nodes_[node.before].after) = block;
    (node.after == kNone ? l.back : nodes_[node.after].before) = block;
    ++l.size;
  }

  // Fine for a block that is in none.
  void Remove(BlockNumber block) {
    if (ListOf(block) < 0) return;
    Node& node = nodes_[block];
    List& l = lists_[static_cast<size_t>(node.list)];
    (node.before == kNone ? l.front : nodes_[node.before].after) = node.after;
    (node.after == kNone ? l.back : nodes_[node.after].before) = node.before;
    --l.size;
    node = Node();
  }

 private:
  struct Node {
    BlockNumber before = kNone;
    BlockNumber after = kNone;
    int32_t list = -1;
  };
  struct List {
    BlockNumber front = kNone;
    BlockNumber back = kNone;
    int64_t size = 0;
  };

  std::vector<Node> nodes_;  // by block
  std::vector<List> lists_;
};

}  // namespace kvstow::policy
