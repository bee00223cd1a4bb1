// ValueOrder: extents ordered by value per block, where the value has a part of its own (the index,
// "how soon does the session return") and a part that all extents of a kind share.
//
// The score of an extent, lowest leaves first, with S the mean number of blocks of a request:
//   done   (returned, or over)     1e-6 / (1 + age) x the factor of its kind below
//   tail   (deepest block partial) index x T / S            T: how often a return hits the tail
//   whole  (no block of the prompt missing)
//                                  index x (alpha / owned + (1 - alpha) / S)
//   part   (the rest)              index x (1 - alpha) / S
// S and T move with every request. So there is a heap per kind, and for `whole` per number of owned
// blocks, each ordered by the index alone; a decision compares the tops. Nothing is ever re-keyed
// because S or T moved, and the choice is exactly the lowest score (owned counts above 256 are
// rounded down by at most 5 %; by then the term is small).
//
// O(log n) per change, O(number of distinct owned counts) per decision. Thread safety: none.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "storage/policy/block_tree.h"
#include "storage/policy/keyed_heaps.h"
#include "storage/policy/policy.h"

namespace kvstow::policy {

class ValueOrder {
 public:
  ValueOrder(const BlockTree& tree, double alpha);

  // Running means.
  void OnRequest(const Request& request) {
    blocks_per_request_ += 0.005 * (request.num_blocks - blocks_per_request_);
  }
  void OnReturn(bool has_hit_tail);

  // Files the extent under `key`, which orders as the index does; takes it out when it may not
  // shrink or is gone.
  void Set(ExtentSlot slot, double key, bool is_done);

  // The key alone has changed. Fine for an extent that is not filed, or is done.
  void Rekey(ExtentSlot slot, double key);

  // The deepest block of the extent with the lowest score; kNone. `index_of` turns a key into the
  // index of now.
  template <typename IndexOf>
  BlockNumber ChooseVictim(int tier, double now_s, IndexOf index_of) const {
    Best best;
    const auto& words = filled_[static_cast<size_t>(tier)];
    for (size_t word = 0; word < words.size(); ++word) {
      for (uint64_t bits = words[word]; bits != 0; bits &= bits - 1) {
        const int kind = static_cast<int>(word * 64) + __builtin_ctzll(bits);
        const KeyedHeaps::Entry& top = heaps_.top(tier * kKinds + kind);
        const double index = kind == kDone ? DoneIndex(top.element, now_s) : index_of(top.key.key);
        const double score = index * (kind == kDone ? Factor(KindOf(top.element)) : Factor(kind));
        if (best.element == kNone || score < best.score ||
            (score == best.score && top.key.tie < best.tie)) {
          best = {score, top.key.tie, top.element};
        }
      }
    }
    return best.element == kNone ? kNone : tree_.extent(best.element).deepest;
  }

 private:
  enum Kind { kDone, kTail, kPart, kWhole };  // kWhole + i: owns Owned(i) blocks
  static constexpr int kKinds = 512;
  struct Best {
    double score = 0;
    uint64_t tie = 0;
    ExtentSlot element = kNone;
  };

  int KindOf(ExtentSlot slot) const;
  double Factor(int kind) const;  // score / index
  double DoneIndex(ExtentSlot slot, double now_s) const;
  void Mark(int tier, int kind);

  const BlockTree& tree_;
  const double alpha_;
  std::vector<int32_t> owned_;  // the counts told apart, ascending
  KeyedHeaps heaps_;            // by tier, then kind
  std::array<std::array<uint64_t, kKinds / 64>, kTiersMax> filled_{};  // kinds that have extents
  double blocks_per_request_ = 20;
  double returns_ = 0;
  double tail_hits_ = 0;
};

}  // namespace kvstow::policy
