// KvClient: what an inference engine links to put KV into kvstow and to get it back.
//
//   KVSTOW_ASSIGN_OR_RETURN(auto client, KvClient::Create({.target = "unix:/run/kvstow.sock"}));
//   KVSTOW_ASSIGN_OR_RETURN(Model model, client->RegisterModel(spec));
//   KVSTOW_ASSIGN_OR_RETURN(PutSummary put, client->Put(model, {.context = context,
//                               .tokens = tokens, .layers = layers, .codec = codec}));
//   KVSTOW_ASSIGN_OR_RETURN(GetSummary got, client->Get(model, keys, layers));
//   // got.num_leading blocks are in `layers`; the engine computes the rest.
//
// Losing the service costs latency, never correctness: every call ends by its deadline, and while
// the breaker is open calls answer kUnavailable at once. Bytes are checked (XXH3 of every unit, key
// and fingerprint of every block) before they count as come; what fails is a miss.
//
// Thread safety: all methods may be called at once. PutSession: one thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/breaker.h"
#include "client/cpp/client_options.h"
#include "client/cpp/conversation.h"
#include "client/cpp/encoded_block.h"
#include "client/cpp/window_buffer.h"
#include "kernels/codec/codec.h"
#include "kernels/codec/codec_plan.h"
#include "kernels/core/block_key.h"
#include "kernels/core/block_layout.h"
#include "kernels/core/model_spec.h"
#include "kernels/layout/planes.h"
#include "kernels/layout/ranks.h"

namespace kvstow {

enum class CompressAt { kService, kWorker };  // where quantization runs

struct Model {  // registered
  ModelSpec spec;
  Digest fingerprint;
  std::shared_ptr<const BlockLayout> layout;
};

// The engine's memory of one layer; token 0 of each view is token 0 of the prompt. `v` is unused
// for layers without values (MLA).
struct LayerRows {
  RowsView k;
  RowsView v;
};

struct PutRequest {
  KeyContext context;                  // context.fingerprint is filled in from the model
  absl::Span<const int32_t> tokens;    // of the whole prompt
  absl::Span<const LayerRows> layers;  // one per layer
  CodecChoice codec;
  CodecPlan layer_codecs;   // of layers that are to have others; the model's plan goes over it
  int32_t first_block = 0;  // earlier blocks are left alone and their rows are not read
  CompressAt compress_at = CompressAt::kService;
  bool durable = false;  // return when the blocks would survive kill -9
  // Not all: this is one rank of several, each of which puts its own heads of the same blocks; the
  // views begin with head `heads.first`. A block can be read when the last of them has put its
  // part; where one does not come the service forgets the block after a while.
  HeadRange heads;
  Conversation conversation;
  Digest calibration_id;  // for codecs that need one; zero: the model's only one
  // For Put: called on the calling thread after each batch of blocks. May be empty.
  std::function<void(int64_t num_done, int64_t num_blocks)> progress;
};

struct PutSummary {
  std::vector<BlockKey> keys;  // of all full blocks
  int32_t num_stored = 0;      // sealed by this call
  int32_t num_existing = 0;    // there before: nothing was sent
  int32_t num_shared = 0;  // with `heads`: put in part, and sealed by another rank, sooner or later
  int32_t num_refused = 0;  // at a limit; `first_refusal` says which
  absl::Status first_refusal;
  int64_t num_leftover_tokens = 0;  // after the last full block: not stored
  int64_t sent_bytes = 0;           // payload on the wire
};

struct LookupSummary {
  std::vector<BlockKey> keys;
  std::vector<uint8_t> locations;  // LocationBit values of control.proto, per key
  int32_t num_leading = 0;
  LoadAdvice advice;  // if it was asked for and num_leading is not 0
};

// Layers [first_layer, first_layer + num_layers) are in the caller's memory for every block whose
// status is OK, each unit checked.
struct LayersReady {
  int32_t first_layer = 0;
  int32_t num_layers = 0;
  absl::Span<const absl::Status> blocks;  // per key, so far
};

struct GetOptions {
  // Views begin with head `heads.first`. Layers with one head only (MLA) come whole.
  HeadRange heads;
  // Not empty: layers come in order, each of all blocks before the next one, and this is called on
  // the calling thread as soon as they are there, so that the first can be used while the others
  // are on their way and are written. A block may fail at a later layer: then what came of it
  // stays written, its status is not OK from then on, and it must be computed anew as a whole.
  std::function<void(const LayersReady&)> on_layers;
};

struct GetSummary {
  int32_t num_leading = 0;           // blocks of the prefix that are now in the caller's memory
  std::vector<absl::Status> blocks;  // per key: OK, kNotFound, kDataLoss (checked and refused)
  int64_t received_bytes = 0;        // payload on the wire
};

struct ClientState;  // private to the library
class PutSession;

class KvClient {
 public:
  // Connects lazily: never waits for the service. kInvalidArgument for bad options.
  static absl::StatusOr<std::unique_ptr<KvClient>> Create(const KvClientOptions& options);
  ~KvClient();

  absl::StatusOr<Model> RegisterModel(const ModelSpec& spec);
  absl::StatusOr<Model> GetModel(const Digest& fingerprint);

  // kInvalidArgument: no keys, or more than 65,536.
  absl::StatusOr<LookupSummary> Lookup(absl::Span<const BlockKey> keys,
                                       const LookupOptions& options = {});
  // One call for a whole prompt. kInvalidArgument: no tokens or more than 1,048,576.
  absl::StatusOr<LookupSummary> Lookup(const Model& model, const KeyContext& context,
                                       absl::Span<const int32_t> tokens);

  // Stores the full blocks of a prompt.
  //   kInvalidArgument  fewer tokens than one block, wrong number of layers, no block left after
  //                     `first_block`; nothing was sent
  absl::StatusOr<PutSummary> Put(const Model& model, const PutRequest& request);

  // The same layer by layer: upload layer l while layer l + 1 is computed. `request.layers` may be
  // empty. The session aborts what was not finished when it is destroyed.
  absl::StatusOr<std::unique_ptr<PutSession>> StartPut(const Model& model,
                                                       const PutRequest& request);

  // Fills `layers` with the blocks named by `keys`: block i holds tokens
  // [first_token + i * tokens_per_block, ...). A block that misses leaves its rows untouched (but
  // see window_buffer.h), unless it came damaged (kDataLoss): shared memory is checked while it is
  // copied. An error: nothing came. Where the call broke off later, `blocks` says which blocks did
  // not come.
  absl::StatusOr<GetSummary> Get(const Model& model, absl::Span<const BlockKey> keys,
                                 absl::Span<const LayerRows> layers, int64_t first_token = 0,
                                 const GetOptions& options = {});

  // The units as they are stored, checked; for tools, services and tests. `timeout`: of the whole
  // call, where it is less than data_timeout.
  absl::StatusOr<std::vector<EncodedBlock>> GetEncoded(
      const Model& model, absl::Span<const BlockKey> keys,
      absl::Duration timeout = absl::InfiniteDuration());

  absl::StatusOr<int64_t> Delete(absl::Span<const BlockKey> keys);

  // As large as asked for, 4 GiB at most. kUnavailable: no shared memory; the text says why.
  absl::StatusOr<std::unique_ptr<WindowBuffer>> NewWindowBuffer(int64_t bytes);

  // The path that bytes take now: "shm", or "grpc (why not a faster one)".
  std::string ExplainPath() const;
  // Counters of this client; "closed", "open", "half-open".
  BreakerState breaker_state() const;
  int64_t corrupt_blocks() const;  // refused by this client's checks

 private:
  explicit KvClient(std::shared_ptr<ClientState> state);
  std::shared_ptr<ClientState> state_;
};

// A put in progress.
class PutSession {
 public:
  ~PutSession();
  // Sends the planes of one layer of all blocks. Each layer once, in any order. Returns when the
  // rows are read: the caller may overwrite them.
  absl::Status PutLayer(int32_t layer_idx, const LayerRows& rows);
  // Seals. kFailedPrecondition: layers are missing.
  absl::StatusOr<PutSummary> Finish();

 private:
  friend class KvClient;
  struct State;
  explicit PutSession(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace kvstow
