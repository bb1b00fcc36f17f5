// A card that is not there: CUDA's runtime, driver and management library as far as PyTorch's caching allocator calls
// them. It hands out addresses, counts bytes and refuses what exceeds CARD_BYTES; nothing else happens. Built twice,
// as libcudart.so.N and as libnvidia-ml.so.1.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <string_view>

#undef cudaGetDeviceProperties

namespace {

constexpr size_t kPage = size_t{2} << 20;

size_t card_bytes() {
  const char* given = std::getenv("CARD_BYTES");
  return given ? std::strtoull(given, nullptr, 10) : size_t{80} << 30;
}

size_t taken = 0;
unsigned long long next_address = 0x7f0000000000ULL;
unsigned long long next_handle = 1;
std::map<unsigned long long, size_t> sizes; // of segments by address, of physical memory by handle

unsigned long long addresses(size_t size) {
  const auto found = next_address;
  next_address += (size + kPage - 1) / kPage * kPage;
  return found;
}

bool take(unsigned long long key, size_t size) {
  if (taken + size > card_bytes()) {
    return false;
  }
  taken += size;
  sizes[key] = size;
  return true;
}

void give_back(unsigned long long key) {
  const auto found = sizes.find(key);
  if (found != sizes.end()) {
    taken -= found->second;
    sizes.erase(found);
  }
}

CUresult reserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
  *address = addresses(size);
  return CUDA_SUCCESS;
}

CUresult create(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp*, unsigned long long) {
  *handle = next_handle++;
  return take(*handle, size) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult release(CUmemGenericAllocationHandle handle) {
  give_back(handle);
  return CUDA_SUCCESS;
}

CUresult granularity(size_t* size, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *size = kPage;
  return CUDA_SUCCESS;
}

CUresult attribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult nothing() {
  return CUDA_SUCCESS;
}

} // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

const char* cudaGetErrorName(cudaError_t) {
  return "error";
}

const char* cudaGetErrorString(cudaError_t) {
  return "error";
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {
  std::memset(found, 0, sizeof *found);
  found->totalGlobalMem = card_bytes();
  found->major = 9;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = card_bytes();
  *free = *total - taken;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** address, size_t size) {
  const auto found = addresses(size);
  *address = reinterpret_cast<void*>(found);
  return take(found, size) ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void* address) {
  give_back(reinterpret_cast<unsigned long long>(address));
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned int, unsigned long long, cudaDriverEntryPointQueryResult* status) {
  static const std::map<std::string_view, void*> known = {
      {"cuMemAddressReserve", reinterpret_cast<void*>(reserve)},
      {"cuMemCreate", reinterpret_cast<void*>(create)},
      {"cuMemRelease", reinterpret_cast<void*>(release)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(granularity)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(attribute)},
  };
  const auto found = known.find(name);
  *function = found == known.end() ? reinterpret_cast<void*>(nothing) : found->second;
  if (status) {
    *status = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}

} // extern "C"

// What is called and need not do anything. Declared by assembler name, for the headers know other arguments.
#define SUCCEEDS(name)                  \
  extern "C" int card_##name() __asm__(#name); \
  extern "C" int card_##name() {        \
    return 0;                           \
  }

SUCCEEDS(cudaSetDevice)
SUCCEEDS(cudaGetLastError)
SUCCEEDS(cudaThreadExchangeStreamCaptureMode)
SUCCEEDS(cudaDeviceGetStreamPriorityRange)
SUCCEEDS(cudaDeviceEnablePeerAccess)
SUCCEEDS(cudaDeviceGetDefaultMemPool)
SUCCEEDS(cudaDeviceSynchronize)
SUCCEEDS(cudaEventCreateWithFlags)
SUCCEEDS(cudaEventDestroy)
SUCCEEDS(cudaEventElapsedTime)
SUCCEEDS(cudaEventQuery)
SUCCEEDS(cudaEventRecord)
SUCCEEDS(cudaEventSynchronize)
SUCCEEDS(cudaFreeAsync)
SUCCEEDS(cudaGraphNodeGetDependencies)
SUCCEEDS(cudaIpcCloseMemHandle)
SUCCEEDS(cudaIpcGetMemHandle)
SUCCEEDS(cudaIpcOpenMemHandle)
SUCCEEDS(cudaMallocAsync)
SUCCEEDS(cudaMemPoolGetAttribute)
SUCCEEDS(cudaMemPoolSetAccess)
SUCCEEDS(cudaMemPoolSetAttribute)
SUCCEEDS(cudaMemPoolTrimTo)
SUCCEEDS(cudaMemcpy)
SUCCEEDS(cudaMemcpyAsync)
SUCCEEDS(cudaMemcpyPeerAsync)
SUCCEEDS(cudaStreamCreateWithPriority)
SUCCEEDS(cudaStreamGetCaptureInfo)
SUCCEEDS(cudaStreamQuery)
SUCCEEDS(cudaStreamSynchronize)
SUCCEEDS(cudaStreamWaitEvent)
SUCCEEDS(nvmlInit_v2)
SUCCEEDS(nvmlDeviceGetHandleByPciBusId_v2)
SUCCEEDS(nvmlDeviceGetGpuFabricInfoV)
SUCCEEDS(nvmlDeviceGetNvLinkRemoteDeviceType)
SUCCEEDS(nvmlDeviceGetNvLinkRemotePciInfo_v2)
SUCCEEDS(nvmlDeviceGetComputeRunningProcesses)
SUCCEEDS(nvmlSystemGetCudaDriverVersion_v2)
