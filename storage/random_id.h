// RandomId: numbers that another client cannot guess, from the kernel's generator.
#pragma once

#include <cstdint>

namespace kvstow {

// Never 0.
uint64_t RandomId();

}  // namespace kvstow
