// Arithmetic for the card. Every CUDA kernel of ATen runs as it is: it allocates, checks, dispatches, and launches
// kernels that do nothing. Then the CPU's kernel of the same operator computes, on tensors over the same memory.
//
// Rule 1  The CUDA kernel runs first. What it allocates, and what it asks of the generator, is the CUDA build's own.
// Rule 2  Values come from the CPU's kernel, once. Inside an operator that writes into its arguments nothing else
//         computes, for it would count twice; inside an operator that returns new tensors everything may.
// Rule 3  A CUDA kernel that reads on the host what the device computed (`nonzero`) does not run: the CPU's answer
//         comes first, and gives the shape.
// Rule 4  Random numbers are a function of the CUDA generator's seed and offset as they stood before the call.
// Rule 5  In mode "small" only integers, booleans and small tensors are computed. All else is zero, and takes no
// memory.
#include <torch/library.h>

#include "wrapper.h"

namespace card {
namespace {

/// The dispatcher warns of each kernel that is registered over another.
struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::optional<c10::SafeKernelFunction> cpu_kernel(const c10::OperatorHandle& handle) {
  if (!handle.hasComputedKernelForDispatchKey(DispatchKey::CPU)) return std::nullopt;
  return handle.getComputedKernelForDispatchKey(DispatchKey::CPU);
}

std::string wrap_all() {
  static std::vector<c10::RegistrationHandleRAII> kept;
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard quiet(&silent);
  auto& dispatcher = c10::Dispatcher::singleton();
  long without = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto handle = dispatcher.findOp(name);
    if (!handle) continue;
    // copy_ has one kernel for all devices.
    if (!handle->hasKernelForDispatchKey(DispatchKey::CUDA) && name.name != "aten::copy_") continue;
    auto op = Operator::of(*handle);
    if (!op) continue;
    auto cuda = handle->getComputedKernelForDispatchKey(DispatchKey::CUDA);
    auto wrapper = std::make_unique<Wrapper>(cuda, cpu_kernel(*handle), *op);
    without += !wrapper->computes();
    kept.push_back(dispatcher.registerImpl(name, DispatchKey::CUDA,
                                           c10::KernelFunction::makeFromBoxedFunctor<Wrapper>(std::move(wrapper)),
                                           std::nullopt, nullptr, "card"));
  }
  return std::to_string(kept.size()) + " CUDA kernels wrapped, " + std::to_string(without) +
         " of them without arithmetic";
}

void set_mode(const std::string& mode) {
  static const std::map<std::string, Mode> modes = {{"off", Mode::off}, {"small", Mode::small}, {"all", Mode::all}};
  const auto found = modes.find(mode);
  TORCH_CHECK(found != modes.end(), "CARD_ARITHMETIC is off, small or all, not ", mode);
  TORCH_CHECK(found->second == Mode::all || card_runs_at_once(), "CARD_STREAMS needs CARD_ARITHMETIC=all, not ", mode);
  settings.mode = found->second;
}

void set_schedule(const std::string& name) {
  TORCH_CHECK(name == "now" || settings.mode == Mode::all, "a schedule of streams needs CARD_ARITHMETIC=all");
  TORCH_CHECK(card_schedule(name.c_str()), "there is no schedule ", name, "; see runtime/streams.h");
}

std::string start(const std::string& mode, int64_t small_bytes, int64_t whole_bytes) {
  settings.small_bytes = small_bytes;
  settings.whole_bytes = whole_bytes;
  static const std::string said = wrap_all();
  set_mode(mode);
  return said;
}

} // namespace
} // namespace card

TORCH_LIBRARY(card, library) {
  library.def("start(str mode, int small_bytes, int whole_bytes) -> str", card::start);
  library.def("mode(str mode) -> ()", [](const std::string& mode) { card::set_mode(mode); });
  library.def("streams(str schedule) -> ()", [](const std::string& name) { card::set_schedule(name); });
  library.def("alias(Tensor t) -> Tensor", [](const at::Tensor& t) { return card::host(t); });
  library.def("report() -> str", [] { return card::tally.text(); });
}
