// KVSTOW_RETURN_IF_ERROR and KVSTOW_ASSIGN_OR_RETURN: pass a failed absl::Status to the caller.
//
//   KVSTOW_RETURN_IF_ERROR(tier.Put(key, record));
//   KVSTOW_ASSIGN_OR_RETURN(BlockRef block, tier.Get(key));
//
// Pitfalls: KVSTOW_ASSIGN_OR_RETURN expands to several statements, so it needs braces around it
// after an `if`. A lambda that uses either macro needs an explicit return type.
// The shapes are those of Abseil's later macros, so that moving to them is a rename.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define KVSTOW_RETURN_IF_ERROR(expr)                                \
  do {                                                              \
    if (absl::Status kvstow_status = (expr); !kvstow_status.ok()) { \
      return kvstow_status;                                         \
    }                                                               \
  } while (false)

#define KVSTOW_ASSIGN_OR_RETURN(lhs, expr) \
  KVSTOW_ASSIGN_OR_RETURN_IMPL_(KVSTOW_CONCAT_(kvstow_status_or_, __LINE__), lhs, expr)

// Private below this line.
#define KVSTOW_CONCAT_INNER_(a, b) a##b
#define KVSTOW_CONCAT_(a, b) KVSTOW_CONCAT_INNER_(a, b)
#define KVSTOW_ASSIGN_OR_RETURN_IMPL_(result, lhs, expr) \
  auto result = (expr);                                  \
  if (!result.ok()) return result.status();              \
  lhs = *std::move(result)
