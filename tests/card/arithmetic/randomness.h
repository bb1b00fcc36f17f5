// Rule 4: numbers are a function of the CUDA generator's seed and offset as they stood before the call.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

#include "operators.h"

namespace card {

struct Draw {
  uint64_t seed = 0, offset = 0;
};

inline Draw draw_of(const at::Generator& generator) { return {generator.current_seed(), generator.get_offset()}; }

/// The generator that a call of a random operator uses: the one it is given, or the device's.
inline Draw draw_of(const Operator& op, const Args& args) {
  if (!op.random) return {};
  at::Generator generator;
  if (op.generator_at >= 0 && !args[op.generator_at].isNone()) generator = args[op.generator_at].toGenerator();
  if (!generator.defined() || generator.device().is_cpu())
    generator = at::globalContext().defaultGenerator(c10::Device(c10::kCUDA, c10::DeviceIndex(0)));
  return draw_of(generator);
}

inline uint64_t mixed(uint64_t x) { // splitmix64
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

/// A seed for the CPU's generator, which keeps 32 bits of it.
inline uint64_t cpu_seed(const Draw& draw) { return mixed(mixed(draw.seed) ^ draw.offset) & 0xffffffffull; }

inline at::Generator generator_of(const Draw& draw) { return at::make_generator<at::CPUGeneratorImpl>(cpu_seed(draw)); }

/// The CPU's own generator stands, for as long as this lives, where a draw of the card puts it; one thread at a time.
class CpuGeneratorAt {
 public:
  explicit CpuGeneratorAt(const Draw& draw)
      : alone_(lock()), generator_(at::detail::getDefaultCPUGenerator()), before_(generator_.get_state()) {
    generator_.set_current_seed(cpu_seed(draw));
  }
  ~CpuGeneratorAt() { generator_.set_state(before_); }

 private:
  static std::mutex& lock() {
    static std::mutex one;
    return one;
  }
  std::lock_guard<std::mutex> alone_;
  at::Generator generator_;
  Tensor before_;
};

} // namespace card
