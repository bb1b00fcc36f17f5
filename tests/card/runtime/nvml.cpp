// NVML as PyTorch asks it: one device, nothing shared with another, no other process on it.
#include <cstring>

namespace {
constexpr int kSuccess = 0, kNotSupported = 3;
}

extern "C" {

int nvmlInit_v2() { return kSuccess; }
int nvmlShutdown() { return kSuccess; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = reinterpret_cast<void*>(1);
  return kSuccess;
}
int nvmlDeviceGetGpuFabricInfoV(void*, void* info) {
  std::memset(static_cast<char*>(info) + 4, 0, 24); // behind the version: its state is "not supported"
  return kSuccess;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return kNotSupported; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return kNotSupported; }
int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, void*) {
  *count = 0;
  return kSuccess;
}
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return kSuccess;
}
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return kSuccess;
}

} // extern "C"
