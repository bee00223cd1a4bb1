// ChainMap: small numbers for block keys, and which block each one follows in its prompt.
//
//   BlockNumber number = map.Find(key);
//   if (number == kNone) number = map.Add(key, parent);
//   map.Hold(number);      // while it is stored, being written or named by a call
//   map.Release(number);   // the last release frees the number
//
// A number lives while it is held or has children that live; so the way from a block up to the
// first of its prompt is whole even where blocks on it are gone. A parent is set before its
// children exist and changes only while there are none: there are no cycles.
//
// A number sleeps after its last release as long as `remembers` says so, for policies whose ghosts
// are numbers: the same key then gets the same number again. (Two sleepers are looked at for each
// that comes, so there are at most about twice as many as are remembered.)
//
// Costs 56 bytes per number and about 8 for the way from the key. Thread safety: none.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "kernels/core/block_key.h"
#include "storage/policy/policy.h"
#include "storage/policy/seen_table.h"

namespace kvstow {

using policy::BlockNumber;

class ChainMap {
 public:
  struct Node {
    BlockKey key;
    uint64_t last_turn = 0;  // that used its key; 0: none that is known
    BlockNumber parent = policy::kNone;
    uint32_t refs = 0;  // holds and children
    int32_t chain_idx = 0;
    uint8_t unclaimed = 0;   // by tier: found there at the start and not used since
    uint8_t aside = 0;       // by tier: in use, not offered for now
    bool is_pinned = false;  // by a hint
    bool is_used = false;    // by last_turn, since it has its number: it is on that turn's chain
    bool is_again = false;   // used by more than one turn
  };

  // `seen_entries`: blocks that are gone whose last turn is remembered.
  ChainMap(uint64_t seen_entries, std::function<bool(BlockNumber)> remembers);
  ChainMap(const ChainMap&) = delete;
  ChainMap& operator=(const ChainMap&) = delete;

  BlockNumber Find(const BlockKey& key) const;
  // The key must not be known. `parent` may be kNone. Held by nobody yet.
  BlockNumber Add(const BlockKey& key, BlockNumber parent);
  // `number` must have no parent and no children.
  void SetParent(BlockNumber number, BlockNumber parent);

  void Hold(BlockNumber number) { ++nodes_[number].refs; }
  void Release(BlockNumber number);

  Node& node(BlockNumber number) { return nodes_[number]; }
  const Node& node(BlockNumber number) const { return nodes_[number]; }

  // Numbers are below this; those whose node has no refs mean nothing.
  BlockNumber end() const { return static_cast<BlockNumber>(nodes_.size()); }
  int64_t size() const { return static_cast<int64_t>(by_key_.size()); }
  int64_t memory_bytes() const;

 private:
  // The set holds numbers and compares the keys behind them.
  struct HashOf {
    using is_transparent = void;
    const std::vector<Node>* nodes;
    size_t operator()(BlockNumber number) const { return BlockKeyHash()((*nodes)[number].key); }
    size_t operator()(const BlockKey& key) const { return BlockKeyHash()(key); }
  };
  struct EqualTo {
    using is_transparent = void;
    const std::vector<Node>* nodes;
    bool operator()(BlockNumber a, BlockNumber b) const { return a == b; }
    bool operator()(BlockNumber a, const BlockKey& b) const { return (*nodes)[a].key == b; }
    bool operator()(const BlockKey& a, BlockNumber b) const { return (*nodes)[b].key == a; }
  };

  void LookAtDormant();

  std::vector<Node> nodes_;
  absl::flat_hash_set<BlockNumber, HashOf, EqualTo> by_key_;
  std::vector<BlockNumber> free_;
  std::deque<BlockNumber> dormant_;  // those with refs again are skipped
  policy::SeenTable seen_;
  const std::function<bool(BlockNumber)> remembers_;
};

}  // namespace kvstow
