#include "storage/random_id.h"

#include <sys/random.h>

#include "kernels/core/check.h"

namespace kvstow {

uint64_t RandomId() {
  uint64_t id = 0;
  // Eight bytes are never split, and once the kernel's pool is up the call does not fail.
  while (id == 0) KVSTOW_CHECK(getrandom(&id, sizeof(id), 0) == sizeof(id));
  return id;
}

}  // namespace kvstow
