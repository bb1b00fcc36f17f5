// CUDA's runtime (libcudart) as PyTorch's CUDA build calls it: memory is real, copies are carried out, streams keep
// their order, kernels do nothing. Their arithmetic is ../arithmetic's.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <vector>

#include "device.h"
#include "memory.h"
#include "streams.h"

// The headers rename these to their newest versions; the library exports both.
#undef cudaGetDeviceProperties
#undef cudaEventElapsedTime
#undef cudaMemcpyAsync

using card::Memory;
using card::Streams;

namespace {

std::atomic<long> launches{0};
std::atomic<uintptr_t> next_handle{0x1000};

template <class Handle>
Handle new_handle() {
  return reinterpret_cast<Handle>(next_handle += 16);
}

struct SaidAtExit {
  ~SaidAtExit() {
    if (!std::getenv("CARD_TALK")) return;
    const double gib = Memory::of_the_card().most() / 1073741824.0;
    std::fprintf(stderr, "card: %ld launches, %.2f GiB at most\n", launches.load(), gib);
  }
} said_at_exit;

cudaError_t launch() {
  ++launches;
  return cudaSuccess;
}

bool is_pageable(const void* pointer) {
  return !Memory::of_the_card().is_device(pointer) && !Memory::of_the_card().is_pinned(pointer);
}

/// A copy in a stream. From pageable memory it is taken at once, as a driver does, and into it the host waits.
cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  const bool to_host = is_pageable(to), from_host = is_pageable(from);
  if (!card::is_copied(bytes) && !(to_host && from_host)) return cudaSuccess;
  if (from_host && !Streams::all().now()) {
    const char* begin = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(begin, begin + bytes);
    Streams::all().issue(stream, [=] { std::memmove(to, staged->data(), bytes); });
  } else {
    Streams::all().issue(stream, [=] { std::memmove(to, from, bytes); });
  }
  if (to_host) Streams::all().finish(stream);
  return cudaSuccess;
}

cudaError_t copy_and_wait(void* to, const void* from, size_t bytes) {
  copy(to, from, bytes, nullptr);
  Streams::all().finish(nullptr);
  return cudaSuccess;
}

cudaError_t fill(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (card::is_copied(bytes)) Streams::all().issue(stream, [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// Of the driver, what the runtime's caller asks by name: physical memory for expandable segments

std::mutex physical_lock;
std::map<unsigned long long, size_t> physical;

CUresult reserve_addresses(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void* found = Memory::of_the_card().reserve(bytes);
  *address = reinterpret_cast<CUdeviceptr>(found);
  return found ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult create_physical(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*,
                         unsigned long long) {
  if (!Memory::of_the_card().take(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard<std::mutex> guard(physical_lock);
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new_handle<void*>());
  physical[*handle] = bytes;
  return CUDA_SUCCESS;
}

CUresult release_physical(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> guard(physical_lock);
  auto found = physical.find(handle);
  if (found == physical.end()) return CUDA_SUCCESS;
  Memory::of_the_card().give_back(found->second);
  physical.erase(found);
  return CUDA_SUCCESS;
}

CUresult granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = card::kPage;
  return CUDA_SUCCESS;
}

CUresult driver_attribute(int* value, CUdevice_attribute which, CUdevice) {
  *value = card::attribute(static_cast<int>(which));
  return CUDA_SUCCESS;
}

CUresult current_context(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(1);
  return CUDA_SUCCESS;
}

CUresult nothing() { return CUDA_SUCCESS; }

void* driver_function(const std::string& name) {
  static const std::map<std::string, void*> known = {
      {"cuMemAddressReserve", reinterpret_cast<void*>(reserve_addresses)},
      {"cuMemCreate", reinterpret_cast<void*>(create_physical)},
      {"cuMemRelease", reinterpret_cast<void*>(release_physical)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(granularity)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(driver_attribute)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(current_context)}};
  auto found = known.find(name);
  return found == known.end() ? reinterpret_cast<void*>(nothing) : found->second;
}

} // namespace

// Names that are missing here are made by libraries.py: they answer "success" and do nothing.
extern "C" {

// For the arithmetic of kernels, which is work of the stream that the kernel was launched on.
int card_runs_at_once() { return Streams::all().now(); }
void card_issue(void* stream, card::Work* work) { Streams::all().issue(stream, std::move(*work)); }
void card_finish(void* stream) { Streams::all().finish(stream); }
int card_schedule(const char* name) { return Streams::all().choose(name); }

// The device
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* device, int) {
  card::describe(device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = card::attribute(which);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int) {
  std::strncpy(id, "0000:00:00.0", length);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  Streams::all().finish_all();
  return cudaSuccess;
}

// Errors
const char* cudaGetErrorName(cudaError_t) { return "error"; }
const char* cudaGetErrorString(cudaError_t) { return "error of the card"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }

// Memory. Freeing waits for the device, as CUDA does.
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = card::card_bytes();
  *free = *total - Memory::of_the_card().taken();
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  void* found = Memory::of_the_card().allocate(bytes);
  if (found) *pointer = found;
  return found ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaFree(void* pointer) {
  Streams::all().finish_all();
  Memory::of_the_card().free(pointer);
  return cudaSuccess;
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  if (posix_memalign(pointer, 512, bytes ? bytes : 1)) return cudaErrorMemoryAllocation;
  Memory::of_the_card().pin(*pointer, bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
  Streams::all().finish_all();
  Memory::of_the_card().unpin(pointer);
  std::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  Memory::of_the_card().pin(pointer, bytes);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  Streams::all().finish_all();
  Memory::of_the_card().unpin(pointer);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->type = Memory::of_the_card().is_device(pointer)   ? cudaMemoryTypeDevice
                     : Memory::of_the_card().is_pinned(pointer) ? cudaMemoryTypeHost
                                                                : cudaMemoryTypeUnregistered;
  attributes->devicePointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

// Copies
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return copy_and_wait(to, from, bytes);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  if (!card::is_copied(width * height)) return cudaSuccess;
  for (size_t row = 0; row < height; ++row)
    copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width, stream);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) { return fill(to, value, bytes, nullptr); }
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return fill(to, value, bytes, stream);
}

// Streams and events
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = new_handle<cudaStream_t>();
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Streams::all().finish(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return Streams::all().is_idle(stream) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Streams::all().wait(stream, event);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
  Streams::all().issue(stream, [=] { call(stream, cudaSuccess, data); });
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
  Streams::all().issue(stream, [=] { call(data); });
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new_handle<cudaEvent_t>();
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Streams::all().forget(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Streams::all().record(event, stream);
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return Streams::all().is_done(event) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Streams::all().finish_event(event);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  *ms = 1.0f; // time is not imitated; zero would be divided by
  return cudaSuccess;
}

// Kernels
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return launch(); }
cudaError_t __cudaLaunchKernel(...) { return launch(); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { return launch(); }
cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return launch(); }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->binaryVersion = attributes->ptxVersion = 90;
  attributes->maxThreadsPerBlock = card::attribute(cudaDevAttrMaxThreadsPerBlock);
  attributes->maxDynamicSharedSizeBytes = card::attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  attributes->numRegs = 32;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void** pointer, const void* symbol) {
  *pointer = const_cast<void*>(symbol);
  return cudaSuccess;
}

// What a compiler's launch code calls
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = *block = dim3(1, 1, 1);
  *shared = 0;
  *static_cast<void**>(stream) = nullptr;
  return cudaSuccess;
}
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(...) {}
void __cudaRegisterVar(...) {}
char __cudaInitModule(void**) { return 0; }
cudaError_t __cudaGetKernel(void** kernel, const void* function) {
  *kernel = const_cast<void*>(function);
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = driver_function(name);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

} // extern "C"
