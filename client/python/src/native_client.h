// NativeClient, NativeSession: KvClient, AdminClient and PutSession as the extension module has
// them. The Python side (kvstow/client.py) is what users see; it checks and documents.
//
// Every method needs the GIL and gives it up while it waits. Errors are raised.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>

#include "client/cpp/admin_client.h"
#include "client/cpp/kv_client.h"

namespace kvstow::python {

class NativeSession {
 public:
  NativeSession(Model model, int64_t first_block, int64_t num_blocks,
                std::shared_ptr<PutSession> session)
      : model_(std::move(model)),
        first_block_(first_block),
        num_blocks_(num_blocks),
        session_(std::move(session)) {}
  ~NativeSession();

  // Row 0 of the arrays is the first token of `first_block`. `v` is None for layers without values.
  void PutLayer(int32_t layer_idx, const pybind11::object& k, const pybind11::object& v);
  pybind11::dict Finish();
  void Abort();

 private:
  std::shared_ptr<PutSession> Open() const;

  const Model model_;
  const int64_t first_block_;
  const int64_t num_blocks_;
  std::shared_ptr<PutSession> session_;  // null when finished or aborted
};

class NativeClient {
 public:
  explicit NativeClient(const pybind11::dict& options);
  ~NativeClient();
  void Close();

  Model RegisterModel(const pybind11::object& spec);
  Model GetModel(const std::string& fingerprint);
  pybind11::dict Lookup(const std::string& keys);
  // `request` has the attributes of kvstow/client.py's _PutRequest.
  pybind11::dict Put(const Model& model, const pybind11::object& request);
  std::unique_ptr<NativeSession> StartPut(const Model& model, const pybind11::object& request);
  // `layers`: a sequence of (k, v).
  pybind11::dict Get(const Model& model, const std::string& keys, const pybind11::object& layers,
                     int64_t first_token);
  int64_t Delete(const std::string& keys);
  std::shared_ptr<WindowBuffer> NewWindowBuffer(int64_t bytes);

  pybind11::dict Stat();
  double Ping(double timeout);
  pybind11::dict ListBlocks(const std::string& page_token, int32_t page_size,
                            const std::string& fingerprint);
  pybind11::tuple Verify(const std::string& keys);
  pybind11::tuple Acquire(const std::string& keys, double ttl);
  void Release(uint64_t lease_id);

  std::string breaker_state() const;
  int64_t corrupt_blocks() const;

 private:
  std::shared_ptr<KvClient> Kv() const;
  std::shared_ptr<AdminClient> Admin() const;

  std::shared_ptr<KvClient> kv_;
  std::shared_ptr<AdminClient> admin_;
};

}  // namespace kvstow::python
