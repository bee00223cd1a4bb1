// Rng: seeded numbers for tests. The seed is a constant in the test; print it on failure.
#pragma once

#include <cmath>
#include <cstdint>

namespace kvstow::testing {

// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): small, and equal on every machine.
class Rng {
 public:
  explicit Rng(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // In [0, bound). bound > 0.
  uint64_t Below(uint64_t bound) { return Next() % bound; }
  // In [0, 1).
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-53; }
  // Standard normal (Box-Muller).
  double Gaussian() {
    const double u = 1.0 - Uniform();
    return std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * Uniform());
  }

 private:
  uint64_t state_;
};

}  // namespace kvstow::testing
