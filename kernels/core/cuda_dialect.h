// The dialect our CUDA kernels are written in, as a thin layer over the CUDA runtime.
//
// A kernel file includes this under nvcc and tests/simt/simt.h under the host compiler, where the
// same names run every CUDA thread as a fiber on the CPU. SIMT_NS keeps the two builds apart.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

#define SIMT_EMULATED 0
#define SIMT_NS gpu
#define SIMT_SHARED(T, name, ...) __shared__ T name __VA_ARGS__
#define SIMT_DYNAMIC_SHARED(T, name)                                    \
  extern __shared__ __align__(16) unsigned char simt_dynamic_shared_[]; \
  T* const name = reinterpret_cast<T*>(simt_dynamic_shared_)

namespace simt {

// Enqueues `kernel` on `stream`; the result is that of the launch, not of the kernel's work.
template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), dim3 grid, dim3 block, std::size_t shared_bytes,
                   cudaStream_t stream, A&&... args) {
  kernel<<<grid, block, shared_bytes, stream>>>(static_cast<P>(std::forward<A>(args))...);
  return cudaGetLastError();
}

}  // namespace simt
