// LSTM and GRU cells, which CUDA fuses into one kernel that keeps the gates for backward.
#pragma once

#include "randomness.h"

namespace card {

inline Tensor plus_if(const Tensor& t, const std::optional<Tensor>& bias) { return bias ? t + *bias : t; }

inline void lstm_cell(const Operator& op, Args& args, std::vector<Tensor>& outs, Draw) {
  const auto type = wide(args[0].toTensor());
  const Tensor sum = plus_if(args[0].toTensor(), tensor_of(args[op.index("input_bias")])).to(type) +
                     plus_if(args[1].toTensor(), tensor_of(args[op.index("hidden_bias")])).to(type);
  const auto gates = sum.chunk(4, 1);
  const Tensor i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  const Tensor cell = f * args[2].toTensor().to(type) + i * g;
  outs[0].copy_(o * cell.tanh());
  outs[1].copy_(cell);
  outs[2].copy_(at::cat({i, f, g, o}, 1).view(outs[2].sizes()));
}

inline void lstm_cell_backward(const Operator&, Args& args, std::vector<Tensor>& outs, Draw) {
  const Tensor old_cell = args[2].toTensor(), cell = args[3].toTensor(), kept = args[4].toTensor();
  const auto grad_y = tensor_of(args[0]), grad_cell = tensor_of(args[1]);
  const auto gates = kept.view({kept.size(0), -1}).chunk(4, 1);
  const Tensor i = gates[0], f = gates[1], g = gates[2], o = gates[3], bent = cell.tanh();
  const Tensor gy = grad_y ? *grad_y : at::zeros_like(cell), gc = grad_cell ? *grad_cell : at::zeros_like(cell);
  const Tensor grad = gy * o * (1 - bent * bent) + gc;
  const Tensor all = at::cat(
      {grad * g * i * (1 - i), grad * old_cell * f * (1 - f), grad * i * (1 - g * g), gy * bent * o * (1 - o)}, 1);
  outs[0].copy_(all);
  outs[1].copy_(grad * f);
  if (outs[2].defined() && outs[2].numel()) outs[2].copy_(all.sum(0));
}

inline void gru_cell(const Operator& op, Args& args, std::vector<Tensor>& outs, Draw) {
  const auto x = plus_if(args[0].toTensor(), tensor_of(args[op.index("input_bias")])).chunk(3, 1);
  const auto h = plus_if(args[1].toTensor(), tensor_of(args[op.index("hidden_bias")])).chunk(3, 1);
  const Tensor old = args[2].toTensor(), reset = (x[0] + h[0]).sigmoid(), keep = (x[1] + h[1]).sigmoid();
  const Tensor fresh = (x[2] + reset * h[2]).tanh();
  outs[0].copy_(fresh + keep * (old - fresh));
  outs[1].copy_(at::cat({reset, keep, fresh, old, h[2]}, 1).view(outs[1].sizes()));
}

inline void gru_cell_backward(const Operator&, Args& args, std::vector<Tensor>& outs, Draw) {
  const Tensor grad = args[0].toTensor(), kept = args[1].toTensor();
  const auto parts = kept.view({kept.size(0), -1}).chunk(5, 1);
  const Tensor reset = parts[0], keep = parts[1], fresh = parts[2], old = parts[3], hidden = parts[4];
  const Tensor to_keep = grad * (old - fresh) * keep * (1 - keep), to_fresh = grad * (1 - keep) * (1 - fresh * fresh);
  const Tensor to_reset = to_fresh * hidden * reset * (1 - reset);
  const Tensor to_input = at::cat({to_reset, to_keep, to_fresh}, 1);
  const Tensor to_hidden = at::cat({to_reset, to_keep, to_fresh * reset}, 1);
  outs[0].copy_(to_input);
  outs[1].copy_(to_hidden);
  outs[2].copy_(grad * keep);
  if (outs[3].defined() && outs[3].numel()) outs[3].copy_(to_input.sum(0));
  if (outs[4].defined() && outs[4].numel()) outs[4].copy_(to_hidden.sum(0));
}

} // namespace card
