// PlaneCodec: a codec for the planes of one role, on Python arrays and without a service.
//
//   const PlaneCodec codec(PlaneCodec::Wanted{.codec = "tqm4", .role = "k", .dim = 128});
//   py::bytes kept_raw = codec.Encode(rows, planes);   // rows: [tokens, heads, dim]
//   codec.Decode(planes, kept_raw, rows_back);
//
// Everything here needs the GIL and gives it up while the codec works. Errors are raised.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>

#include "client/python/src/host_array.h"
#include "kernels/codec/codec.h"
#include "kernels/codec/rotation.h"

namespace kvstow::python {

class PlaneCodec {
 public:
  struct Wanted {
    std::string codec;
    std::string role;  // "k" or "v"
    std::string dtype = "bf16";
    int32_t dim = 0;
    int32_t tokens_per_block = 64;
    pybind11::object rotation = pybind11::none();  // int16 [dim, dim], for calibrated codecs
  };

  explicit PlaneCodec(const Wanted& wanted);

  // The codec that the store would use: `raw` where the one that was asked for does not take such
  // planes.
  std::string name() const { return std::string(codec_->name); }
  int64_t plane_bytes() const { return codec_->plane_bytes(shape_); }

  // Encodes whole blocks: `rows` [tokens, heads, dim] into `planes`, uint8 [blocks, heads,
  // plane_bytes], contiguous. One byte per plane comes back, 1 where the plane has to be kept raw
  // (its rows are not finite, or too large); what `planes` holds there is of no use.
  pybind11::bytes Encode(const pybind11::object& rows, const pybind11::object& planes) const;
  // The inverse; planes that are kept raw are left alone in `rows`.
  void Decode(const pybind11::object& planes, const std::string& kept_raw,
              const pybind11::object& rows) const;

 private:
  struct Blocks {
    std::shared_ptr<HostArray> rows_array;
    std::shared_ptr<HostArray> planes_array;
    RowsView rows;
    std::byte* planes = nullptr;
    int64_t num_blocks = 0;
    int64_t num_heads = 0;
  };

  Blocks Open(const pybind11::object& rows, const pybind11::object& planes,
              bool rows_are_written) const;
  // The bytes of one token's row of a plane.
  std::byte* RowAt(const Blocks& blocks, int64_t plane_idx, int64_t token) const;

  const Codec* codec_ = nullptr;
  PlaneShape shape_;
  std::shared_ptr<const Rotation> rotation_;
};

// (k, v, first block raw, last tokens raw) of a pair or a preset.
pybind11::tuple CodecChoiceToPython(const std::string& text);
// Of "safe,layer0-1.k=int8": what is left without the layers, and (role, layer, codec) of these.
pybind11::tuple LayersToPython(const std::string& text);
// (id in hexadecimal, rotations) of a bundle's bytes; a rotation is (layer, role, KV head, dim,
// int16 [dim, dim] as bytes).
pybind11::tuple BundleToPython(const std::string& bytes);
// (name, needs a calibration) of every codec of this build.
pybind11::list CodecsToPython();

}  // namespace kvstow::python
