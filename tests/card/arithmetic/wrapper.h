// One CUDA kernel of ATen, wrapped: see the rules in arithmetic.cpp.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <map>
#include <mutex>

#include "cells.h"
#include "cudnn.h"
#include "others.h"

// The runtime's: work of a stream, in its order.
extern "C" int card_runs_at_once();
extern "C" void card_issue(void* stream, std::function<void()>* work);
extern "C" void card_finish(void* stream);
extern "C" int card_schedule(const char* name);

namespace card {

enum class Mode { off, small, all };

struct Settings {
  std::atomic<Mode> mode{Mode::off};
  size_t small_bytes = size_t{1} << 20;   // up to so many bytes of arguments and results are computed in mode "small"
  size_t whole_bytes = size_t{256} << 20; // the same for integers and booleans: masks and position ids choose kernels
};
inline Settings settings;

/// What happened, for CARD_TALK.
class Tally {
 public:
  void note(const std::string& kind, const std::string& op) {
    std::lock_guard<std::mutex> guard(lock_);
    ++noted_[kind][op];
  }
  std::string text() {
    std::lock_guard<std::mutex> guard(lock_);
    std::string said;
    for (auto& [kind, operators] : noted_) {
      said += kind + ":";
      for (auto& [op, times] : operators) said += " " + op + " x" + std::to_string(times);
      said += "\n";
    }
    return said;
  }

 private:
  std::mutex lock_;
  std::map<std::string, std::map<std::string, long>> noted_;
};
inline Tally tally;

/// Rule 2: above 0 inside a kernel that writes into its arguments, where nothing else computes.
inline thread_local int depth = 0;
struct Deeper {
  bool on;
  explicit Deeper(bool on = true) : on(on) { depth += on; }
  ~Deeper() { depth -= on; }
};

/// Below autograd, autocast, functorch and Python.
struct BelowEverything {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard without{
      c10::autocast_dispatch_keyset |
      DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PythonDispatcher,
                      DispatchKey::Functionalize, DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchVmapMode,
                      DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode})};
};

inline void* current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

/// `work` as work of the current stream.
inline void issue(std::function<void()> work) {
  if (card_runs_at_once()) {
    work();
    return;
  }
  std::function<void()> guarded = [work = std::move(work)] {
    BelowEverything below;
    Deeper deeper;
    work();
  };
  card_issue(current_stream(), &guarded);
}

/// Fills `outs` (aliases of the results) from `args` (aliases of the arguments), where the CPU's kernel cannot.
using Emulation = std::function<void(const Operator&, Args& args, std::vector<Tensor>& outs, Draw)>;
/// In place of the CUDA kernel, with arguments of the card; nothing where the kernel itself should run.
using Replacement = std::function<std::optional<Replaced>(const Operator&, const Args& args)>;

inline const std::map<std::string, Emulation> kEmulations = {
    {"_flash_attention_forward", flash_forward},
    {"_flash_attention_backward", flash_backward},
    {"_efficient_attention_forward", efficient_forward},
    {"_efficient_attention_backward", efficient_backward},
    {"_thnn_fused_lstm_cell", lstm_cell},
    {"_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward},
    {"_thnn_fused_gru_cell", gru_cell},
    {"_thnn_fused_gru_cell_backward", gru_cell_backward},
    {"_fused_dropout", fused_dropout},
    {"_masked_scale", masked_scale},
    {"log_sigmoid_backward", log_sigmoid_backward},
    {"histc", histogram},
    {"_embedding_bag", embedding_bag},
    {"_embedding_bag_forward_only", embedding_bag},
    {"cudnn_grid_sampler", grid_sampler},
    {"cudnn_grid_sampler_backward", grid_sampler_backward},
    {"_fused_rms_norm", rms_norm},
    {"_fused_rms_norm_backward", rms_norm_backward},
    {"_conv_depthwise2d", depthwise_convolution},
    {"conv_depthwise3d", depthwise_convolution}};

inline const std::map<std::string, Replacement> kReplacements = {
    {"cudnn_convolution", convolution},
    {"cudnn_convolution_transpose", convolution},
    {"convolution_backward", convolution_backward},
    {"cudnn_batch_norm", batch_norm},
    {"cudnn_batch_norm_backward", batch_norm_backward},
    {"_scaled_dot_product_cudnn_attention", cudnn_attention},
    {"_cudnn_attention_forward", cudnn_attention},
    {"_scaled_dot_product_cudnn_attention_backward", cudnn_attention_backward},
    {"_cudnn_attention_backward", cudnn_attention_backward}};

template <class Table>
auto* found_in(const Table& table, const std::string& name) {
  auto found = table.find(name);
  return found == table.end() ? nullptr : &found->second;
}

class Wrapper final : public c10::OperatorKernel {
 public:
  Wrapper(c10::SafeKernelFunction cuda, std::optional<c10::SafeKernelFunction> cpu, Operator op)
      : cuda_(std::move(cuda)), cpu_(std::move(cpu)), op_(std::move(op)) {
    static const Emulation kProductIn = product_in;
    static const std::set<std::string> kProducts = {"mm", "bmm", "addmm", "baddbmm"};
    emulation_ = found_in(kEmulations, op_.base);
    replacement_ = found_in(kReplacements, op_.base);
    if (kProducts.count(op_.base) && op_.schema->argumentIndexWithName("out_dtype")) emulation_ = &kProductIn;
  }

  bool computes() const { return cpu_ || emulation_ || replacement_; }

  void operator()(const c10::OperatorHandle& handle, DispatchKeySet keys, Stack* stack) {
    if (leaves_alone()) {
      cuda_.callBoxed(handle, keys, stack);
      return;
    }
    const Args args(stack->end() - op_.arguments(), stack->end());
    if (has_strange_layout(args)) {
      cuda_.callBoxed(handle, keys, stack);
      tally.note("not computed", op_.name + " (layout)");
      return;
    }
    const Draw draw = draw_of(op_, args);
    if (op_.host_first) {
      answer_on_host(handle, args, draw, stack);
    } else if (!replacement_ || !replace(args, stack)) {
      {
        Deeper deeper(op_.writes);
        cuda_.callBoxed(handle, keys, stack);
      }
      if (depth == 0) compute(handle, args, draw, stack);
    }
  }

 private:
  bool leaves_alone() const {
    if (settings.mode == Mode::off || op_.transparent) return true;
    return depth > 0 && !op_.host_first && !replacement_;
  }

  static bool has_strange_layout(const Args& args) {
    bool strange = false;
    for (const auto& v : args)
      for_each_tensor(
          v, [&](const Tensor& t) { strange |= on_card(t) && (!is_plain(t) || (t.numel() && !t.storage().data())); });
    return strange;
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Rules 1 and 2: after the CUDA kernel

  void compute(const c10::OperatorHandle& handle, const Args& args, Draw draw, Stack* stack) const {
    BelowEverything below;
    Deeper deeper;
    const std::vector<IValue> results(stack->end() - op_.returns(), stack->end());
    if (settings.mode == Mode::small && !is_wanted(args, results)) { // Rule 5
      blank(args, results);
      return;
    }
    try {
      const bool at_once = host_waits_for(args);
      if (at_once) card_finish(current_stream());
      const auto work = [this, handle, args = aliases(args), results = aliases_of(results), draw] {
        fill(handle, args, results, draw);
      };
      at_once ? work() : issue(work);
    } catch (const std::exception&) {
      if (settings.mode == Mode::all) throw;
      tally.note("not computed", op_.name);
      blank(args, results);
    }
  }

  /// Fills results that are memory of their own; what is written into arguments is there already.
  void fill(const c10::OperatorHandle& handle, const Args& args, const std::vector<IValue>& results, Draw draw) const {
    if (emulation_) {
      Args on_cpu = for_cpu(args, false);
      std::vector<Tensor> outs;
      for (const auto& v : results) outs.push_back(v.isTensor() ? v.toTensor() : Tensor());
      (*emulation_)(op_, on_cpu, outs, draw);
      return;
    }
    const Stack found = on_cpu(handle, args, draw);
    for (size_t i = 0; i < op_.returns(); ++i) {
      if (!op_.makes_result(i)) continue;
      const auto into = tensors_of(results[i]), from = tensors_of(found[i]);
      for (size_t j = 0; j < std::min(into.size(), from.size()); ++j)
        if (!put(into[j], from[j])) tally.note("results of other sizes", op_.name);
    }
    keep_given_statistics(op_, args, results);
  }

  /// Rule 5: whether all that a call reads and makes is small, or integers.
  bool is_wanted(const Args& args, const std::vector<IValue>& results) const {
    bool whole_numbers = true;
    size_t bytes = 0;
    const auto see = [&](const Tensor& t) {
      if (t.layout() != c10::kStrided) return;
      bytes += t.nbytes();
      whole_numbers &= c10::isIntegralType(t.scalar_type(), true);
    };
    for (const auto& v : args) for_each_tensor(v, see);
    for (size_t i = 0; i < results.size(); ++i)
      if (i >= op_.returns() || op_.makes_result(i)) for_each_tensor(results[i], see);
    return bytes <= (whole_numbers ? settings.whole_bytes : settings.small_bytes);
  }

  /// What is not computed is zero, so that nobody reads what another tensor left there.
  void blank(const Args& args, const std::vector<IValue>& results) const {
    for (size_t i = 0; i < results.size(); ++i)
      if (op_.makes_result(i)) for_each_tensor(results[i], clear);
    for (size_t i = 0; i < args.size(); ++i)
      if (op_.writes_argument(i)) for_each_tensor(args[i], clear);
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Arguments for work that waits in a stream: it owns no memory of the card, see `alias_of`

  bool is_non_blocking(const Args& args) const {
    const auto i = op_.schema->argumentIndexWithName("non_blocking");
    return i && args[*i].toBool();
  }

  /// Whether the call returns only when its work has run: it writes memory of the host that is pageable, or blocks.
  bool host_waits_for(const Args& args) const {
    if (card_runs_at_once()) return false;
    bool waits = false;
    for (size_t i = 0; i < args.size(); ++i)
      if (op_.writes_argument(i))
        for_each_tensor(args[i],
                        [&](const Tensor& t) { waits |= t.is_cpu() && !(is_non_blocking(args) && t.is_pinned()); });
    return waits;
  }

  Args aliases(const Args& args) const {
    Args made;
    for (size_t i = 0; i < args.size(); ++i)
      made.push_back(changed(args[i], [&](const Tensor& t) {
        if (!t.defined()) return t;
        if (on_card(t)) return alias_of(t);
        if (card_runs_at_once() || op_.writes_argument(i)) return t;
        if (is_non_blocking(args) && t.is_pinned()) return alias_of(t); // read when the copy runs
        Tensor now = t.clone();                                         // read when the call is made
        if (t.unsafeGetTensorImpl()->is_wrapped_number()) now.unsafeGetTensorImpl()->set_wrapped_number(true);
        return now;
      }));
    return made;
  }

  /// An argument that was written is needed by emulations alone: the CPU's kernel writes into its own.
  std::vector<IValue> aliases_of(const std::vector<IValue>& results) const {
    std::vector<IValue> made;
    for (size_t i = 0; i < results.size(); ++i) {
      const bool is_filled = emulation_ || op_.makes_result(i);
      made.push_back(is_filled ? changed(results[i], [](const Tensor& t) { return host(t); }) : IValue());
    }
    return made;
  }

  // -------------------------------------------------------------------------------------------------------------------
  // The CPU's kernel

  /// `args` as the CPU's kernel takes them; in fp32 where `widen` says so.
  Args for_cpu(const Args& args, bool widen) const {
    Args made;
    for (size_t i = 0; i < args.size(); ++i) {
      const IValue& v = args[i];
      if (v.isDevice() && v.toDevice().is_cuda()) {
        made.emplace_back(c10::Device(c10::kCPU));
      } else if (v.isBool() && op_.schema->arguments()[i].name() == "pin_memory") {
        made.emplace_back(false);
      } else {
        made.push_back(changed(v, [&](const Tensor& t) { return widen && is_16_bit(t) ? t.to(at::kFloat) : t; }));
      }
    }
    return made;
  }

  /// The CPU's results; computed in fp32 where its kernel knows no 16 bit, or keeps statistics in 16 bit.
  Stack on_cpu(const c10::OperatorHandle& handle, const Args& args, Draw draw) const {
    TORCH_CHECK_NOT_IMPLEMENTED(cpu_.has_value(), "card: no arithmetic for ", op_.name);
    bool any_16_bit = false;
    for (const auto& v : args) for_each_tensor(v, [&](const Tensor& t) { any_16_bit |= is_16_bit(t); });
    if (!(any_16_bit && op_.wide_statistics)) {
      try {
        return called(handle, for_cpu(args, false), draw);
      } catch (const c10::Error&) {
        if (!any_16_bit) throw;
        tally.note("computed in fp32", op_.name);
      }
    }
    const Args widened = for_cpu(args, true);
    Stack found = called(handle, widened, draw);
    if (op_.writes) write_back(args, widened);
    return found;
  }

  /// What was written into fp32 copies goes where it belongs.
  void write_back(const Args& args, const Args& widened) const {
    for (size_t i = 0; i < args.size(); ++i) {
      if (!op_.writes_argument(i) && !kWritesUnsaid.count(op_.base)) continue;
      const auto from = tensors_of(widened[i]), into = tensors_of(args[i]);
      for (size_t j = 0; j < into.size(); ++j)
        if (is_16_bit(into[j]) && from[j].scalar_type() == at::kFloat) into[j].copy_(from[j]);
    }
  }

  Stack called(const c10::OperatorHandle& handle, Args args, Draw draw) const {
    Stack stack = std::move(args);
    adapt(stack);
    const DispatchKeySet cpu(DispatchKey::CPU);
    if (op_.generator_at >= 0) {
      stack[op_.generator_at] = generator_of(draw);
      cpu_->callBoxed(handle, cpu, &stack);
    } else if (op_.random) {
      CpuGeneratorAt at(draw);
      cpu_->callBoxed(handle, cpu, &stack);
    } else {
      cpu_->callBoxed(handle, cpu, &stack);
    }
    return stack;
  }

  /// Arguments that the CPU's softmax does not take: results wider than inputs.
  void adapt(Stack& args) const {
    if ((op_.base == "_softmax" || op_.base == "_log_softmax") && args[2].toBool()) {
      args[0] = args[0].toTensor().to(at::kFloat);
      args[2] = false;
    } else if (op_.base == "_softmax_backward_data" || op_.base == "_log_softmax_backward_data") {
      args[3] = args[0].toTensor().scalar_type();
    }
  }

  // -------------------------------------------------------------------------------------------------------------------
  // In place of the CUDA kernel

  bool replace(const Args& args, Stack* stack) const {
    BelowEverything below;
    const auto replaced = (*replacement_)(op_, args);
    if (!replaced) return false;
    torch::jit::drop(*stack, op_.arguments());
    stack->insert(stack->end(), replaced->results.begin(), replaced->results.end());
    if (depth > 0) return true;
    Deeper deeper;
    if (settings.mode == Mode::all || is_wanted(args, replaced->results))
      issue(replaced->work);
    else
      for (const auto& v : replaced->results) for_each_tensor(v, clear);
    return true;
  }

  /// Rule 3: the CPU's answer first, then memory of the card for it.
  void answer_on_host(const c10::OperatorHandle& handle, const Args& args, Draw draw, Stack* stack) const {
    BelowEverything below;
    Deeper deeper;
    card_finish(current_stream());
    Args readable;
    for (size_t i = 0; i < args.size(); ++i)
      readable.push_back(changed(args[i], [&](const Tensor& t) {
        // What is written gets memory of its own: its size is not known yet.
        return op_.writes_argument(i) ? at::empty({0}, t.options().device(at::kCPU)) : host(t);
      }));
    const Stack found = on_cpu(handle, readable, draw);
    torch::jit::drop(*stack, op_.arguments());
    if (op_.writes)
      write_answers(args, found, stack);
    else
      push_answers(args, found, stack);
  }

  void write_answers(const Args& args, const Stack& found, Stack* stack) const {
    size_t next = 0;
    for (size_t i = 0; i < args.size(); ++i) {
      if (!op_.writes_argument(i)) continue;
      const Tensor out = args[i].toTensor(), from = found[next++].toTensor();
      out.resize_(from.sizes());
      if (out.numel()) host(out).copy_(from);
      stack->emplace_back(out);
    }
  }

  static void push_answers(const Args& args, const Stack& found, Stack* stack) {
    auto device = c10::Device(c10::kCUDA, c10::DeviceIndex(0));
    for (const auto& v : args)
      for_each_tensor(v, [&](const Tensor& t) {
        if (on_card(t)) device = t.device();
      });
    for (const auto& v : found)
      stack->push_back(changed(v, [&](const Tensor& t) {
        if (!t.defined()) return t;
        const Tensor made = at::empty_strided(t.sizes(), t.strides(), t.options().device(device));
        if (made.numel()) host(made).copy_(t);
        return made;
      }));
  }

  c10::SafeKernelFunction cuda_;
  std::optional<c10::SafeKernelFunction> cpu_;
  Operator op_;
  const Emulation* emulation_ = nullptr;
  const Replacement* replacement_ = nullptr;
};

} // namespace card
