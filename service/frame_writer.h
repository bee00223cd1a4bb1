// WriteFrame: the units of one PutFrame into the place that their ticket reserved, encoded on the
// way where they came as rows. For worker threads: encodes and hashes.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "proto/frames.h"
#include "service/metrics.h"
#include "service/model_registry.h"
#include "service/plan_book.h"
#include "service/service_parts.h"
#include "storage/tiered_store.h"

namespace kvstow {

// What a ticket was reserved for.
struct TicketPlan {
  TicketId ticket = 0;
  RecordMeta meta;
  ModelRef model;
  CalibrationRef calibration;   // null: the record names none
  PlanRef layers;               // null: none when it was reserved
  PlanBook* watcher = nullptr;  // who wants to see the planes; null: nobody

  CodecPair CodecsOf(int32_t plane_idx) const {
    if (layers == nullptr) return meta.codecs;
    return layers->codecs.PairFor(model->layout().plane(plane_idx).layer_idx, meta.codecs);
  }
};

// kNotFound, kDeadlineExceeded: the ticket. kNotFound: its model. kAborted: its plan.
// kFailedPrecondition: its calibration.
absl::StatusOr<TicketPlan> FindTicketPlan(const ServiceParts& parts, TicketId ticket);

struct WriteOutcome {
  uint32_t num_units = 0;  // accepted, repeats of the same bytes among them
  // Why the rest of the frame was not taken. What was accepted before stays: sending the frame
  // again is always right.
  //   kInvalidArgument  units out of range, a wrong size or codec, other bytes sent before
  //   kDataLoss         a unit's bytes do not have the checksum that came with them
  //   others            from the store, about the ticket
  absl::Status fault;
};

// Where the units of a frame are: in its payload, or, where the header has unit_offset, each where
// `load` finds it.
struct FrameUnits {
  FramePayload payload;
  std::function<absl::StatusOr<FramePayload>(uint64_t offset, uint64_t bytes)> load;
};

WriteOutcome WriteFrame(TieredStore& store, const TicketPlan& plan, const PutFrameHeader& header,
                        const FrameUnits& from, TransferCounters& counters);

}  // namespace kvstow
