// cuDNN. PyTorch's callers of it allocate results and hand cuDNN a graph; the card replaces the callers, allocates what
// they allocate, and leaves the arithmetic to the CPU. Workspaces of convolutions and batch norm's reserve are not imitated.
#pragma once

#include <algorithm>
#include <numeric>

#include "attention.h"

namespace card {

/// In place of a CUDA kernel: results, and the work that fills them.
struct Replaced {
  std::vector<IValue> results;
  std::function<void()> work;
};

inline Tensor like(const Tensor& t, at::IntArrayRef sizes, at::MemoryFormat format) {
  return at::empty(sizes, t.options().memory_format(format));
}
inline Tensor like(const Tensor& t) { return like(t, t.sizes(), t.suggest_memory_format()); }

inline void put_if(const Tensor& into, const Tensor& value) {
  if (into.defined()) into.copy_(value);
}

// ---------------------------------------------------------------------------------------------------------------------
// Convolutions

/// The layout that cuDNN's convolution runs in: channels last where either operand is.
inline at::MemoryFormat convolution_format(const Tensor& x, const Tensor& w) {
  const auto any = [&](at::MemoryFormat f) { return x.suggest_memory_format() == f || w.suggest_memory_format() == f; };
  if (x.dim() == 4 && any(at::MemoryFormat::ChannelsLast)) return at::MemoryFormat::ChannelsLast;
  if (x.dim() == 5 && any(at::MemoryFormat::ChannelsLast3d)) return at::MemoryFormat::ChannelsLast3d;
  return at::MemoryFormat::Contiguous;
}

struct Convolution {
  std::vector<int64_t> stride, padding, dilation, output_padding;
  int64_t groups = 1;
  bool transposed = false;

  Convolution(const Operator& op, const Args& args)
      : stride(args[op.index("stride")].toIntVector()),
        padding(args[op.index("padding")].toIntVector()),
        dilation(args[op.index("dilation")].toIntVector()),
        output_padding(padding.size(), 0),
        groups(args[op.index("groups")].toInt()) {
    if (op.schema->argumentIndexWithName("output_padding"))
      output_padding = args[op.index("output_padding")].toIntVector();
    if (auto said = op.schema->argumentIndexWithName("transposed")) transposed = args[*said].toBool();
    if (op.base == "cudnn_convolution_transpose") transposed = true;
  }

  Tensor operator()(const Tensor& x, const Tensor& w) const {
    return at::convolution(x, w, std::nullopt, stride, padding, dilation, transposed, output_padding, groups);
  }
};

inline std::optional<Replaced> convolution(const Operator& op, const Args& args) {
  const Tensor x = args[0].toTensor(), w = args[1].toTensor();
  const Convolution convolve(op, args);
  const auto meta = [](const Tensor& t) { return at::empty(t.sizes(), t.options().device(at::kMeta)); };
  const auto format = convolution_format(x, w);
  const Tensor out = like(x, convolve(meta(x), meta(w)).sizes(), format);
  const Tensor x_in_format = x.contiguous(format), w_in_format = w.contiguous(format); // alive while cuDNN runs
  return Replaced{{out}, [=, x = host(x), w = host(w), out = host(out)] { out.copy_(convolve(x, w)); }};
}

inline std::optional<Replaced> convolution_backward(const Operator& op, const Args& args) {
  const Tensor grad = args[0].toTensor(), x = args[1].toTensor(), w = args[2].toTensor();
  if (!at::globalContext().userEnabledCuDNN() || !on_card(x)) return std::nullopt;
  const auto mask = args[op.index("output_mask")].toBoolList();
  const std::array<bool, 3> wanted{mask[0], mask[1], mask[2]};
  const Convolution form(op, args);
  const auto format = convolution_format(x, w);
  // Alive while cuDNN runs.
  const Tensor grad_in_format = grad.contiguous(format), x_in_format = x.contiguous(format),
               w_in_format = w.contiguous(format);
  const Tensor grad_x = wanted[0] ? like(x, x.sizes(), format) : Tensor();
  const Tensor grad_w = wanted[1] ? like(w, w.sizes(), format) : Tensor();
  const Tensor grad_bias = wanted[2] ? at::empty({grad.size(1)}, grad.options()) : Tensor();
  const auto bias = args[3].isNone() ? std::optional<std::vector<int64_t>>() : args[3].toIntVector();
  const auto work = [=, grad = host(grad), x = host(x), w = host(w), grad_x = host(grad_x), grad_w = host(grad_w),
                     grad_bias = host(grad_bias)] {
    const auto sizes = bias ? at::OptionalIntArrayRef(*bias) : at::OptionalIntArrayRef();
    auto [dx, dw, db] = at::convolution_backward(grad, x, w, sizes, form.stride, form.padding, form.dilation,
                                                 form.transposed, form.output_padding, form.groups, wanted);
    put_if(grad_x, dx);
    put_if(grad_w, dw);
    put_if(grad_bias, db);
  };
  return Replaced{{grad_x, grad_w, grad_bias}, work};
}

// ---------------------------------------------------------------------------------------------------------------------
// Batch norm, whose statistics are fp32

inline Tensor widened(const Tensor& t) { return is_16_bit(t) ? t.to(at::kFloat) : t; }

inline std::optional<Replaced> batch_norm(const Operator& op, const Args& args) {
  const Tensor x = args[0].toTensor(), w = args[1].toTensor();
  const bool training = args[op.index("training")].toBool();
  const int64_t kept = training ? x.size(1) : 0;
  const Tensor out = like(x), save_mean = at::empty({kept}, w.options()), save_rstd = at::empty({kept}, w.options());
  const Tensor reserve = at::empty({0}, x.options().dtype(at::kByte));
  const auto bias = host(tensor_of(args[2])), mean = host(tensor_of(args[3])), var = host(tensor_of(args[4]));
  const double momentum = args[6].toDouble(), epsilon = args[7].toDouble();
  const auto work = [=, x = host(x), w = host(w), out = host(out), save_mean = host(save_mean),
                     save_rstd = host(save_rstd)] {
    auto [y, m, r] = at::native_batch_norm(widened(x), w, bias, mean, var, training, momentum, epsilon);
    out.copy_(y);
    if (!training) return;
    save_mean.copy_(m);
    save_rstd.copy_(r);
  };
  return Replaced{{out, save_mean, save_rstd, reserve}, work};
}

inline std::optional<Replaced> batch_norm_backward(const Operator& op, const Args& args) {
  const Tensor x = args[0].toTensor(), grad = args[1].toTensor(), w = args[2].toTensor();
  const Tensor grad_in_format = grad.contiguous(x.suggest_memory_format()); // alive while cuDNN runs
  const Tensor grad_x = like(x), grad_w = at::empty(w.sizes(), w.options()), grad_bias = at::empty_like(grad_w);
  const auto named = [&](const char* name) { return host(tensor_of(args[op.index(name)])); };
  const auto mean = named("running_mean"), var = named("running_var");
  const auto save_mean = named("save_mean"), save_var = named("save_var");
  const double epsilon = args[op.index("epsilon")].toDouble();
  const auto work = [=, x = host(x), grad = host(grad), w = host(w), grad_x = host(grad_x), grad_w = host(grad_w),
                     grad_bias = host(grad_bias)] {
    auto [dx, dw, db] = at::native_batch_norm_backward(widened(grad), widened(x), w, mean, var, save_mean, save_var,
                                                       true, epsilon, {true, true, true});
    grad_x.copy_(dx);
    grad_w.copy_(dw);
    grad_bias.copy_(db);
  };
  return Replaced{{grad_x, grad_w, grad_bias}, work};
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention

/// Memory of `sizes` in the order of the dimensions of `t`, as cuDNN's caller allocates its output.
inline Tensor laid_out_as(const Tensor& t, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> order(t.dim()), strides(t.dim());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return t.stride(i) > t.stride(j); });
  int64_t step = 1;
  for (auto i = order.rbegin(); i != order.rend(); ++i) {
    strides[*i] = step;
    step *= sizes[*i];
  }
  return at::empty_strided(sizes, strides, t.options());
}

inline Attention cudnn_form(const Operator& op, const Args& args, const Tensor& q, const std::optional<Tensor>& bias) {
  Attention form;
  form.dropout = args[op.index("dropout_p")].toDouble();
  form.causal = args[op.index("is_causal")].toBool() ? Attention::Causal::top_left : Attention::Causal::no;
  form.scale = scale_of(op, args, q);
  form.bias = host(bias);
  return form;
}

/// One number is drawn for each probability, four at a time.
inline Draw drawn_for(const Tensor& q, const Tensor& k) {
  auto generator = at::globalContext().defaultGenerator(q.device());
  const Draw draw = draw_of(generator);
  const int64_t numbers = q.size(0) * q.size(1) * q.size(2) * k.size(2);
  generator.set_offset(draw.offset + static_cast<uint64_t>((numbers + 3) / 4 * 4));
  return draw;
}

inline std::optional<Replaced> cudnn_attention(const Operator& op, const Args& args) {
  require_none(op, args, {"cum_seq_q"});
  const Tensor q = args[0].toTensor(), k = args[1].toTensor(), v = args[2].toTensor();
  auto form = cudnn_form(op, args, q, tensor_of(args[3]));
  const Tensor seed = at::empty({}, q.options().dtype(at::kLong)), offset = at::empty_like(seed);
  if (form.dropout > 0) form.draw = drawn_for(q, k);
  const Tensor out = laid_out_as(q, {q.size(0), q.size(1), q.size(2), v.size(3)});
  Tensor lse;
  if (args[op.index("compute_log_sumexp")].toBool())
    lse = at::empty({q.size(0), q.size(1), q.size(2), 1}, q.options().dtype(at::kFloat));
  const auto keep_draw = [=, seed = host(seed), offset = host(offset)] {
    put_word(seed, 0, form.draw.seed);
    put_word(offset, 0, form.draw.offset);
  };
  const auto work = [=, q = host(q), k = host(k), v = host(v), out = host(out), lse = host(lse)] {
    keep_draw();
    auto [y, l] = attend(q, k, v, form);
    out.copy_(y);
    put_if(lse, l.unsqueeze(-1));
  };
  return Replaced{{out, lse, Tensor(), Tensor(), q.size(2), k.size(2), seed, offset, Tensor()}, work};
}

/// Bytes that cudnn-frontend 1.23 adds to its engine's (`CompositeSDPABackwardNode`): a gradient of q to accumulate in
/// and one sum a row, in float32. The gradients of grouped keys and values are made for every head, then summed.
inline int64_t backward_workspace(const Tensor& q, const Tensor& k, const Tensor& v) {
  const int64_t heads = q.size(0) * q.size(1);
  const int64_t grouped = k.size(1) < q.size(1) ? heads * k.size(2) * (q.size(3) + v.size(3)) * q.itemsize() : 0;
  return heads * q.size(2) * (q.size(3) + 1) * 4 + grouped;
}

inline std::optional<Replaced> cudnn_attention_backward(const Operator& op, const Args& args) {
  const Tensor grad = args[0].toTensor(), q = args[1].toTensor(), k = args[2].toTensor(), v = args[3].toTensor();
  const Tensor out = args[4].toTensor(), lse = args[5].toTensor();
  auto form = cudnn_form(op, args, q, tensor_of(args[op.index("attn_bias")]));
  const Tensor seed = host(args[op.index("philox_seed")].toTensor());
  const Tensor offset = host(args[op.index("philox_offset")].toTensor());
  // cuDNN wants the gradient laid out as the output; the copy is alive while it runs.
  const Tensor same = grad.strides() == out.strides() ? grad : laid_out_as(out, out.sizes().vec());
  const Tensor grad_q = at::empty_like(q), grad_k = at::empty_like(k), grad_v = at::empty_like(v);
  const Tensor workspace = at::empty({backward_workspace(q, k, v)}, q.options().dtype(at::kByte));
  const auto work = [=, grad = host(grad), q = host(q), k = host(k), v = host(v), out = host(out), lse = host(lse),
                     grad_q = host(grad_q), grad_k = host(grad_k), grad_v = host(grad_v)]() mutable {
    if (form.dropout > 0) form.draw = {word(seed, 0), word(offset, 0)};
    const auto found = attend_backward(grad, q, k, v, out, lse.squeeze(-1), form);
    grad_q.copy_(found.q);
    grad_k.copy_(found.k);
    grad_v.copy_(found.v);
  };
  return Replaced{{grad_q, grad_k, grad_v}, work};
}

} // namespace card
