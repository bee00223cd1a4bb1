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
// Cost: O(log n) per change. A decision scores the tops that changed, all of them (at most 512)
// once per request, and takes the best of 64 per change: independent of n. Thread safety: none.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <vector>

#include "storage/policy/block_tree.h"
#include "storage/policy/keyed_heaps.h"
#include "storage/policy/policy.h"

namespace kvstow::policy {

class ValueOrder {
 public:
  ValueOrder(const BlockTree& tree, double alpha);

  // Running means.
  void OnRequest(const Request& request);
  void OnReturn(bool has_hit_tail);

  // The running means, to go on from in a later process. Restore: false where they can be none.
  static constexpr int kMeans = 3;
  std::array<double, kMeans> Means() const { return {blocks_per_request_, returns_, tail_hits_}; }
  bool Restore(const std::array<double, kMeans>& means);

  // Files the extent under `key`, which orders as the index does; takes it out when it may not
  // shrink or is gone.
  void Set(ExtentSlot slot, double key, bool is_done);

  // The key alone has changed. Fine for an extent that is not filed, or is done.
  void Rekey(ExtentSlot slot, double key);

  // The deepest block of the extent with the lowest score; kNone. `index_of` turns a key into the
  // index of now.
  template <typename IndexOf>
  BlockNumber ChooseVictim(int tier, double now_s, IndexOf index_of) {
    Tops& tops = tops_[static_cast<size_t>(tier)];
    if (tops.version != version_ || tops.now_s != now_s) {
      tops.stale.fill(~uint64_t{0});
      tops.version = version_;
      tops.now_s = now_s;
    }
    for (size_t word = 0; word < kWords; ++word) {
      if (tops.stale[word] == 0) continue;
      for (uint64_t bits = tops.stale[word] & tops.filled[word]; bits != 0; bits &= bits - 1) {
        const int kind = static_cast<int>(word) * 64 + std::countr_zero(bits);
        const KeyedHeaps::Entry& top = heaps_.top(tier * kKinds + kind);
        const double score = kind == kDone
                                 ? DoneIndex(top.element, now_s) * Factor(KindOf(top.element))
                                 : index_of(top.key.key) * Factor(kind);
        tops.of_kind[static_cast<size_t>(kind)] = {score, top.key.tie, top.element};
      }
      tops.stale[word] = 0;
      tops.of_word[word] = BestOfWord(tops, word);
    }
    Top best;
    for (const Top& top : tops.of_word) {
      if (top.IsBefore(best)) best = top;
    }
    return best.element == kNone ? kNone : tree_.extent(best.element).deepest;
  }

 private:
  enum Kind { kDone, kTail, kPart, kWhole };  // kWhole + i: owns Owned(i) blocks
  static constexpr int kKinds = 512;
  static constexpr size_t kWords = kKinds / 64;
  struct Top {
    double score = std::numeric_limits<double>::infinity();
    uint64_t tie = std::numeric_limits<uint64_t>::max();
    ExtentSlot element = kNone;

    bool IsBefore(const Top& other) const {
      return score < other.score || (score == other.score && tie < other.tie);
    }
  };
  // What a tier's heaps have on top. Bits: 64 kinds to a word.
  struct Tops {
    std::array<uint64_t, kWords> filled{};  // the heap has extents
    std::array<uint64_t, kWords> stale{};   // its top may have changed
    std::array<Top, kKinds> of_kind;        // valid where filled and not stale
    std::array<Top, kWords> of_word;        // the best of each word
    uint64_t version = 0;                   // of S and T, when all were scored
    double now_s = 0;                       // likewise
  };

  static Top BestOfWord(const Tops& tops, size_t word);
  int KindOf(ExtentSlot slot) const;
  double Factor(int kind) const;  // score / index
  double DoneIndex(ExtentSlot slot, double now_s) const;
  void Mark(int tier, int kind);

  const BlockTree& tree_;
  const double alpha_;
  std::vector<int32_t> owned_;  // the counts told apart, ascending
  KeyedHeaps heaps_;            // by tier, then kind
  std::vector<Tops> tops_;      // by tier
  uint64_t version_ = 0;        // grows when S or T moves
  double blocks_per_request_ = 20;
  double returns_ = 0;
  double tail_hits_ = 0;
};

}  // namespace kvstow::policy
