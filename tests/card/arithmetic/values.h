// Tensors of the card as tensors of the CPU over the same memory, and values that hold tensors.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <sys/mman.h>

#include <cstring>
#include <functional>
#include <optional>
#include <vector>

namespace card {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;
using Args = std::vector<IValue>;

inline bool on_card(const Tensor& t) { return t.defined() && t.is_cuda(); }

inline bool is_plain(const Tensor& t) {
  const auto* impl = t.unsafeGetTensorImpl();
  return t.layout() == c10::kStrided && impl->has_storage() && !t.is_quantized() && !impl->is_python_dispatch() &&
         !impl->key_set().has(DispatchKey::NestedTensor);
}

/// A CPU tensor over the memory of `t`. It does not own it: while work waits in a stream, the allocator may give the
/// memory to somebody else, as on a GPU.
inline Tensor alias_of(const Tensor& t) {
  auto* storage = t.storage().unsafeGetStorageImpl();
  void* memory = const_cast<void*>(storage->data());
  c10::Storage same(c10::Storage::use_byte_size_t(), storage->nbytes(), c10::DataPtr(memory, c10::Device(c10::kCPU)),
                    nullptr, false);
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(same), DispatchKeySet(DispatchKey::CPU), t.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

inline Tensor host(const Tensor& t) { return on_card(t) ? alias_of(t) : t; }
inline std::optional<Tensor> host(const std::optional<Tensor>& t) {
  return t ? std::optional<Tensor>(host(*t)) : std::nullopt;
}

inline bool is_16_bit(const Tensor& t) {
  return t.defined() && (t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16);
}

/// The type that CUDA's kernels accumulate in.
inline c10::ScalarType wide(const Tensor& t) { return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

using Change = std::function<Tensor(const Tensor&)>;

/// `v` with each of its tensors replaced; in lists of tensors and of optional tensors too.
inline IValue changed(const IValue& v, const Change& change) {
  if (v.isTensor()) return change(v.toTensor());
  if (v.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor t : v.toTensorList()) out.push_back(change(t));
    return out;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const std::optional<Tensor> t : v.toOptionalTensorList())
      out.push_back(t && t->defined() ? std::optional<Tensor>(change(*t)) : t);
    return out;
  }
  return v;
}

inline void for_each_tensor(const IValue& v, const std::function<void(const Tensor&)>& see) {
  changed(v, [&](const Tensor& t) {
    if (t.defined()) see(t);
    return t;
  });
}

/// Each tensor of `v`, undefined ones too, so that two values of one form can be gone through side by side.
inline std::vector<Tensor> tensors_of(const IValue& v) {
  std::vector<Tensor> found;
  changed(v, [&](const Tensor& t) {
    found.push_back(t);
    return t;
  });
  return found;
}

inline std::optional<Tensor> tensor_of(const IValue& v) {
  if (v.isNone() || !v.toTensor().defined()) return std::nullopt;
  return v.toTensor();
}

inline double double_of(const IValue& v, double otherwise) { return v.isNone() ? otherwise : v.toDouble(); }
inline int64_t int_of(const IValue& v, int64_t otherwise) { return v.isNone() ? otherwise : v.toInt(); }

/// Zeros without touching memory: whole pages are given back to the system, which reads them as zeros.
inline void clear(const Tensor& t) {
  constexpr uintptr_t page = 4096;
  if (!t.defined() || !is_plain(t) || !t.numel() || !t.is_non_overlapping_and_dense()) return;
  if (!t.is_cuda() && !t.is_cpu()) return;
  const auto begin = reinterpret_cast<uintptr_t>(t.const_data_ptr()), end = begin + t.numel() * t.itemsize();
  if (!begin) return;
  const auto first = (begin + page - 1) / page * page, last = end / page * page;
  if (last <= first + 16 * page) {
    std::memset(reinterpret_cast<void*>(begin), 0, end - begin);
    return;
  }
  std::memset(reinterpret_cast<void*>(begin), 0, first - begin);
  std::memset(reinterpret_cast<void*>(last), 0, end - last);
  madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

} // namespace card
