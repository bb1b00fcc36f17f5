// The device that the card says it is: an H100 of 80 GB.
#pragma once

#include <cuda_runtime_api.h>

#include <cstring>

#include "memory.h"

namespace card {

constexpr const char* kName = "NVIDIA H100 80GB HBM3";

inline int attribute(int which) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      return 1024;
    case cudaDevAttrMaxBlockDimZ:
      return 64;
    case cudaDevAttrMaxGridDimX:
      return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return 49152;
    case cudaDevAttrWarpSize:
      return 32;
    case cudaDevAttrMultiProcessorCount:
      return 132;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return 2048;
    case cudaDevAttrComputeCapabilityMajor:
      return 9;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return 233472;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return 232448;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return 32;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return 65536;
    case cudaDevAttrL2CacheSize:
      return 52428800;
    case cudaDevAttrClockRate:
      return 1980000;
    case cudaDevAttrMemoryClockRate:
      return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth:
      return 5120;
    case cudaDevAttrTextureAlignment:
      return 512;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrCooperativeLaunch:
      return 1;
    default:
      return 0;
  }
}

inline void describe(cudaDeviceProp* device) {
  std::memset(device, 0, sizeof *device);
  std::strcpy(device->name, kName);
  device->totalGlobalMem = card_bytes();
  device->major = attribute(cudaDevAttrComputeCapabilityMajor);
  device->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  device->warpSize = attribute(cudaDevAttrWarpSize);
  device->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
  device->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  device->maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
  for (int i = 0; i < 3; ++i) {
    device->maxThreadsDim[i] = attribute(cudaDevAttrMaxBlockDimX + i);
    device->maxGridSize[i] = attribute(cudaDevAttrMaxGridDimX + i);
  }
  device->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  device->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  device->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  device->regsPerBlock = device->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerBlock);
  device->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  device->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
  device->textureAlignment = attribute(cudaDevAttrTextureAlignment);
  device->unifiedAddressing = device->concurrentKernels = 1;
}

} // namespace card
