// CUDA's driver (libcuda) as Triton, Inductor's launcher and PyTorch call it: modules load, kernels launch and do
// nothing.
#include <cuda.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// The headers rename these to their newest versions; the library exports both.
#undef cuDevicePrimaryCtxRelease
#undef cuModuleGetGlobal
#undef cuCtxGetDevice

// The runtime's, where it is loaded; the driver may be loaded alone.
extern "C" int cudaDeviceGetAttribute(int*, int, int) __attribute__((weak));
extern "C" int cudaMemGetInfo(size_t*, size_t*) __attribute__((weak));

namespace {

std::atomic<long> launched{0};
std::atomic<uintptr_t> next_handle{0x100000};

template <class Handle>
CUresult give_new(Handle* handle) {
  *handle = reinterpret_cast<Handle>(next_handle += 64);
  return CUDA_SUCCESS;
}

CUresult launch() {
  ++launched;
  return CUDA_SUCCESS;
}

struct SaidAtExit {
  ~SaidAtExit() {
    if (std::getenv("CARD_TALK") && launched)
      std::fprintf(stderr, "card: %ld kernels launched through the driver\n", launched.load());
  }
} said_at_exit;

} // namespace

// libraries.py reads from this file which names are made: `API name(`.
#define API extern "C" CUresult

API cuInit(unsigned) { return CUDA_SUCCESS; }
API cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
API cuDeviceGet(CUdevice* device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}
API cuDeviceGetCount(int* count) {
  *count = 1;
  return CUDA_SUCCESS;
}
API cuDeviceGetName(char* name, int length, CUdevice) {
  std::strncpy(name, "NVIDIA H100 80GB HBM3", length);
  return CUDA_SUCCESS;
}
API cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice device) {
  *value = 0;
  return cudaDeviceGetAttribute ? static_cast<CUresult>(cudaDeviceGetAttribute(value, which, device)) : CUDA_SUCCESS;
}
API cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = reinterpret_cast<CUcontext>(1);
  return CUDA_SUCCESS;
}
API cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return CUDA_SUCCESS;
}
API cuCtxGetCurrent(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(1);
  return CUDA_SUCCESS;
}
API cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}
API cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 1 << 20;
  return CUDA_SUCCESS;
}
API cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API cuCtxSynchronize() { return CUDA_SUCCESS; }
API cuGetErrorString(CUresult, const char** text) {
  *text = "error of the card";
  return CUDA_SUCCESS;
}
API cuGetErrorName(CUresult, const char** text) {
  *text = "error";
  return CUDA_SUCCESS;
}
API cuMemGetInfo(size_t* free, size_t* total) {
  return cudaMemGetInfo ? static_cast<CUresult>(cudaMemGetInfo(free, total)) : CUDA_SUCCESS;
}
API cuPointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr pointer) {
  if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *static_cast<CUdeviceptr*>(value) = pointer;
  else
    *static_cast<int*>(value) = 0;
  return CUDA_SUCCESS;
}

// Modules and kernels
API cuModuleLoad(CUmodule* module, const char*) { return give_new(module); }
API cuModuleLoadData(CUmodule* module, const void*) { return give_new(module); }
API cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) { return give_new(module); }
API cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
API cuModuleGetFunction(CUfunction* function, CUmodule, const char*) { return give_new(function); }
API cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}
API cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API cuFuncLoad(CUfunction) { return CUDA_SUCCESS; }
API cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**,
                   void**) {
  return launch();
}
API cuLaunchCooperativeKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                              CUstream, void**) {
  return launch();
}
API cuLaunchKernelEx(const CUlaunchConfig*, CUfunction, void**, void**) { return launch(); }
API cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = 16;
  return CUDA_SUCCESS;
}
API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  *blocks = 2;
  return CUDA_SUCCESS;
}
API cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                           const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                           CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  std::memset(map, 0, sizeof *map);
  return CUDA_SUCCESS;
}
API cuLinkCreate(unsigned, CUjit_option*, void**, CUlinkState* state) { return give_new(state); }
API cuLinkAddData(CUlinkState, CUjitInputType, void*, size_t, const char*, unsigned, CUjit_option*, void**) {
  return CUDA_SUCCESS;
}
API cuLinkComplete(CUlinkState, void** cubin, size_t* bytes) {
  static char nothing[8];
  *cubin = nothing;
  *bytes = sizeof nothing;
  return CUDA_SUCCESS;
}
API cuLinkDestroy(CUlinkState) { return CUDA_SUCCESS; }
