#include "storage/tier.h"

#include "kernels/core/check.h"

namespace kvstow {

std::string_view TierName(TierKind kind) {
  switch (kind) {
    case TierKind::kHbm:
      return "hbm";
    case TierKind::kDram:
      return "dram";
    case TierKind::kNvme:
      return "nvme";
    case TierKind::kShared:
      return "shared";
  }
  KVSTOW_CHECK(false);
}

}  // namespace kvstow
