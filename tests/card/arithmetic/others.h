// Smaller operators that only CUDA has, or whose CPU kernel is defined otherwise.
#pragma once

#include "randomness.h"

namespace card {

/// Copies a result into the CUDA kernel's. False where the two have different numbers of elements.
inline bool put(const Tensor& into, const Tensor& value) {
  if (!into.defined() || !value.defined()) return true;
  if (into.numel() != value.numel()) return false;
  into.copy_(into.sizes() == value.sizes() ? value : value.reshape(into.sizes()));
  return true;
}

inline void fused_dropout(const Operator&, Args& args, std::vector<Tensor>& outs, Draw draw) {
  const Tensor x = args[0].toTensor();
  const double keep = args[1].toDouble();
  auto generator = generator_of(draw);
  const Tensor mask = at::rand(x.sizes(), generator, at::TensorOptions().dtype(at::kFloat)).lt(keep);
  outs[0].copy_(x * mask / keep);
  outs[1].copy_(mask);
}

inline void masked_scale(const Operator&, Args& args, std::vector<Tensor>& outs, Draw) {
  const Tensor x = args[0].toTensor();
  outs[0].copy_(x * args[1].toTensor().to(x.scalar_type()) * args[2].toDouble());
}

/// The CPU's forward keeps a buffer for this that CUDA's does not.
inline void log_sigmoid_backward(const Operator&, Args& args, std::vector<Tensor>& outs, Draw) {
  const Tensor grad = args[0].toTensor(), x = args[1].toTensor();
  outs[0].copy_(grad.to(wide(x)) * at::sigmoid(-x.to(wide(x))));
}

/// The CPU's kernel leaves out the bag of each index where it does not need it, and keeps one size more or less.
inline void embedding_bag(const Operator& op, Args& args, std::vector<Tensor>& outs, Draw) {
  const Tensor indices = args[1].toTensor(), offsets = args[2].toTensor();
  const int64_t mode = args[op.index("mode")].toInt();
  const auto found = at::_embedding_bag(args[0].toTensor(), indices, offsets, args[3].toBool(), mode, false,
                                        tensor_of(args[op.index("per_sample_weights")]),
                                        args[op.index("include_last_offset")].toBool(),
                                        args[op.index("padding_idx")].toInt());
  outs[0].copy_(std::get<0>(found));
  const Tensor begins = offsets.slice(0, 0, outs[0].size(0)).to(at::kLong);
  const Tensor places = at::arange(indices.size(0), begins.options());
  outs[1].copy_(at::searchsorted(begins, places, false, true) - 1);
  const int64_t bags = std::min(outs[2].numel(), std::get<2>(found).numel());
  outs[2].slice(0, 0, bags).copy_(std::get<2>(found).slice(0, 0, bags));
  if (mode == 2) put(outs[3], std::get<3>(found)); // the maximum
}

/// The CPU counts floats only.
inline void histogram(const Operator& op, Args& args, std::vector<Tensor>& outs, Draw) {
  outs[0].copy_(at::histc(args[0].toTensor().to(at::kDouble), args[op.index("bins")].toInt(),
                          args[op.index("min")].toScalar(), args[op.index("max")].toScalar()));
}

inline void grid_sampler(const Operator&, Args& args, std::vector<Tensor>& outs, Draw) {
  outs[0].copy_(at::grid_sampler_2d(args[0].toTensor(), args[1].toTensor(), 0, 0, true));
}

inline void grid_sampler_backward(const Operator&, Args& args, std::vector<Tensor>& outs, Draw) {
  auto [x, grid] = at::grid_sampler_2d_backward(args[2].toTensor(), args[0].toTensor(), args[1].toTensor(), 0, 0, true,
                                                {true, true});
  outs[0].copy_(x);
  outs[1].copy_(grid);
}

/// The dimensions that a norm over the last `count` goes over.
inline std::vector<int64_t> last_dimensions(const Tensor& x, int64_t count) {
  std::vector<int64_t> found;
  for (int64_t d = x.dim() - count; d < x.dim(); ++d) found.push_back(d);
  return found;
}

/// Of statistics that it is given, the CPU's kernel keeps nothing, CUDA's what its backward reads.
inline void keep_given_statistics(const Operator& op, const Args& args, const std::vector<IValue>& results) {
  if (op.base != "native_batch_norm" || args[op.index("training")].toBool()) return;
  const Tensor mean = args[op.index("running_mean")].toTensor(), var = args[op.index("running_var")].toTensor();
  const Tensor save_mean = results[1].toTensor(), save_rstd = results[2].toTensor();
  put(save_mean, mean.to(save_mean.scalar_type()));
  put(save_rstd, at::rsqrt(var.to(save_rstd.scalar_type()) + args[op.index("eps")].toDouble()));
}

inline void rms_norm(const Operator&, Args& args, std::vector<Tensor>& outs, Draw) {
  const Tensor x = args[0].toTensor();
  const auto type = wide(x);
  const auto inner = last_dimensions(x, static_cast<int64_t>(args[1].toIntVector().size()));
  const auto weight = tensor_of(args[2]);
  const double smallest = type == at::kDouble ? std::numeric_limits<double>::epsilon()
                                              : static_cast<double>(std::numeric_limits<float>::epsilon());
  const Tensor rstd = at::rsqrt(x.to(type).pow(2).mean(inner, true) + double_of(args[3], smallest));
  Tensor y = x.to(type) * rstd;
  if (weight) y = y * weight->to(type);
  outs[0].copy_(y);
  put(outs[1], rstd);
}

inline void rms_norm_backward(const Operator& op, Args& args, std::vector<Tensor>& outs, Draw) {
  const Tensor grad = args[0].toTensor(), x = args[1].toTensor(), rstd = args[op.index("rstd")].toTensor();
  const auto type = wide(x);
  const auto inner = last_dimensions(x, static_cast<int64_t>(args[2].toIntVector().size()));
  const auto weight = tensor_of(args[op.index("weight")]);
  std::vector<int64_t> outer(x.dim() - inner.size());
  std::iota(outer.begin(), outer.end(), 0);
  const Tensor normed = x.to(type) * rstd.to(type);
  Tensor g = grad.to(type);
  if (outs[1].defined() && weight) outs[1].copy_(outer.empty() ? g * normed : (g * normed).sum(outer));
  if (weight) g = g * weight->to(type);
  if (outs[0].defined()) outs[0].copy_(rstd.to(type) * (g - normed * (g * normed).mean(inner, true)));
}

/// mm, bmm, addmm and baddbmm with another type for the result.
inline void product_in(const Operator& op, Args& args, std::vector<Tensor>& outs, Draw) {
  const auto type = args[op.index("out_dtype")].toScalarType();
  const auto factor = [&](const char* name) { return args[op.index(name)].toTensor().to(type); };
  if (op.base == "mm" || op.base == "bmm") {
    outs[0].copy_(at::matmul(factor("self"), factor("mat2")));
    return;
  }
  const bool batched = op.base == "baddbmm";
  const Tensor product = batched ? at::bmm(factor("batch1"), factor("batch2")) : at::mm(factor("mat1"), factor("mat2"));
  const auto beta = args[op.index("beta")].toScalar(), alpha = args[op.index("alpha")].toScalar();
  outs[0].copy_(beta.toDouble() == 0 ? product * alpha : factor("self") * beta + product * alpha);
}

inline void depthwise_convolution(const Operator& op, Args& args, std::vector<Tensor>& outs, Draw) {
  const Tensor x = args[0].toTensor(), w = args[1].toTensor();
  const auto stride = args[op.index("stride")].toIntVector();
  outs[0].copy_(at::convolution(x, w, tensor_of(args[op.index("bias")]), stride,
                                args[op.index("padding")].toIntVector(), args[op.index("dilation")].toIntVector(),
                                false, std::vector<int64_t>(stride.size(), 0), x.size(1)));
}

} // namespace card
