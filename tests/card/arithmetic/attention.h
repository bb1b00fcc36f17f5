// Attention as CUDA's fused kernels define it: the log-sum-exp is kept, and the dropout mask is drawn again in backward
// from the seed and offset that forward kept.
#pragma once

#include <cmath>
#include <tuple>
#include <utility>

#include "randomness.h"

namespace card {

struct Attention {
  enum class Causal { no, top_left, bottom_right };
  double scale = 0, dropout = 0;
  Causal causal = Causal::no;
  int64_t left = -1, right = -1; // of a window; -1: none
  std::optional<Tensor> bias;
  Draw draw;
};

/// True where a query must not look.
inline Tensor forbidden(const Attention& form, int64_t rows, int64_t columns) {
  const auto i = at::arange(rows, at::kLong).unsqueeze(1), j = at::arange(columns, at::kLong).unsqueeze(0);
  const int64_t shift = columns - rows;
  Tensor found = at::zeros({rows, columns}, at::kBool);
  if (form.causal == Attention::Causal::top_left) found = found.logical_or(j > i);
  if (form.causal == Attention::Causal::bottom_right) found = found.logical_or(j > i + shift);
  if (form.left >= 0) found = found.logical_or(j < i + shift - form.left);
  if (form.right >= 0) found = found.logical_or(j > i + shift + form.right);
  return found;
}

/// q: [batch, heads, queries, dim]; k: [batch, heads, keys, dim]
inline Tensor scores(const Tensor& q, const Tensor& k, const Attention& form) {
  Tensor found = at::matmul(q, k.transpose(-1, -2)) * form.scale;
  if (form.bias) found = found + form.bias->to(found.scalar_type());
  if (form.causal == Attention::Causal::no && form.left < 0 && form.right < 0) return found;
  return found.masked_fill(forbidden(form, found.size(-2), found.size(-1)), -INFINITY);
}

/// exp(-inf + inf) is what a query sees that may look nowhere: nothing.
inline Tensor probabilities(const Tensor& scores, const Tensor& lse) {
  return at::exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0, 0.0, 0.0);
}

inline Tensor dropout_mask(const Tensor& like, const Attention& form) {
  auto generator = generator_of(form.draw);
  const auto drawn = at::rand(like.sizes(), generator, at::TensorOptions().dtype(at::kFloat));
  return drawn.ge(form.dropout).to(like.scalar_type()) / (1 - form.dropout);
}

/// Heads of keys and values shared by several heads of queries (GQA), and their gradients summed again.
inline Tensor repeated(const Tensor& t, int64_t heads) {
  return t.size(1) == heads ? t : t.repeat_interleave(heads / t.size(1), 1);
}
inline Tensor summed(const Tensor& t, int64_t heads) {
  if (t.size(1) == heads) return t;
  return t.reshape({t.size(0), heads, t.size(1) / heads, t.size(2), t.size(3)}).sum(2);
}

/// Output and log-sum-exp of [batch, heads, sequence, dim].
inline std::pair<Tensor, Tensor> attend(Tensor q, Tensor k, Tensor v, const Attention& form) {
  const auto type = wide(q);
  q = q.to(type);
  k = repeated(k.to(type), q.size(1));
  v = repeated(v.to(type), q.size(1));
  const Tensor s = scores(q, k, form), lse = at::logsumexp(s, -1);
  Tensor p = probabilities(s, lse);
  if (form.dropout > 0) p = p * dropout_mask(p, form);
  return {at::matmul(p, v), lse};
}

struct AttentionGradients {
  Tensor q, k, v, scores;
};

inline AttentionGradients attend_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, const Tensor& lse,
                                          const Attention& form) {
  const auto type = wide(q);
  const int64_t key_heads = k.size(1), value_heads = v.size(1);
  grad = grad.to(type);
  out = out.to(type);
  q = q.to(type);
  k = repeated(k.to(type), q.size(1));
  v = repeated(v.to(type), q.size(1));
  const Tensor p = probabilities(scores(q, k, form), lse.to(type));
  Tensor dropped = p, grad_p = at::matmul(grad, v.transpose(-1, -2));
  if (form.dropout > 0) {
    const Tensor mask = dropout_mask(p, form);
    dropped = p * mask;
    grad_p = grad_p * mask;
  }
  const Tensor grad_s = p * (grad_p - (grad * out).sum(-1, true));
  return {at::matmul(grad_s, k) * form.scale, summed(at::matmul(grad_s.transpose(-1, -2), q) * form.scale, key_heads),
          summed(at::matmul(dropped.transpose(-1, -2), grad), value_heads), grad_s};
}

// ---------------------------------------------------------------------------------------------------------------------
// What the operators' arguments say

inline void require_none(const Operator& op, const Args& args, std::initializer_list<const char*> names) {
  for (const auto* name : names) {
    const auto i = op.schema->argumentIndexWithName(name);
    TORCH_CHECK_NOT_IMPLEMENTED(!i || args[*i].isNone(), "card: no arithmetic for ", op.name, " with ", name);
  }
}

inline uint64_t word(const Tensor& t, int64_t i) { return static_cast<const uint64_t*>(t.const_data_ptr())[i]; }
inline void put_word(const Tensor& t, int64_t i, uint64_t value) { static_cast<uint64_t*>(t.data_ptr())[i] = value; }

inline std::vector<int64_t> numbers(const Tensor& t) {
  const auto flat = t.to(at::kLong).contiguous();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

inline double scale_of(const Operator& op, const Args& args, const Tensor& q) {
  return double_of(args[op.index("scale")], 1 / std::sqrt(static_cast<double>(q.size(-1))));
}

inline Attention flash_form(const Operator& op, const Args& args, const Draw& draw) {
  Attention form;
  form.dropout = args[op.index("dropout_p")].toDouble();
  form.causal = args[op.index("is_causal")].toBool() ? Attention::Causal::bottom_right : Attention::Causal::no;
  form.scale = scale_of(op, args, args[op.index("query")].toTensor());
  form.left = int_of(args[op.index("window_size_left")], -1);
  form.right = int_of(args[op.index("window_size_right")], -1);
  form.draw = draw;
  return form;
}

inline Attention efficient_form(const Operator& op, const Args& args, const Draw& draw) {
  require_none(op, args, {"window_size", "seqlen_k"});
  Attention form;
  form.dropout = args[op.index("dropout_p")].toDouble();
  form.causal = static_cast<Attention::Causal>(args[op.index("custom_mask_type")].toInt());
  form.scale = scale_of(op, args, args[op.index("query")].toTensor());
  form.bias = tensor_of(args[op.index("bias")]);
  form.draw = draw;
  return form;
}

// ---------------------------------------------------------------------------------------------------------------------
// Layouts: these kernels take [batch, sequence, heads, dim], or sequences one behind the other, [tokens, heads, dim]

inline Tensor heads_first(const Tensor& t) { return t.transpose(1, 2); }

/// Where sequences begin in a packed tensor, and where the last ends.
using Starts = std::vector<int64_t>;

inline Tensor sequence(const Tensor& packed, const Starts& starts, size_t i) {
  return packed.slice(0, starts[i], starts[i + 1]).transpose(0, 1).unsqueeze(0);
}
inline void put_sequence(const Tensor& packed, const Starts& starts, size_t i, const Tensor& value) {
  packed.slice(0, starts[i], starts[i + 1]).copy_(value.squeeze(0).transpose(0, 1));
}

/// The log-sum-exp of one packed sequence: [heads, tokens], or a row of [sequences, heads, longest].
inline Tensor lse_of_sequence(const Tensor& lse, const Starts& starts, size_t i) {
  if (lse.dim() == 2) return lse.slice(1, starts[i], starts[i + 1]);
  return lse[i].slice(-1, 0, starts[i + 1] - starts[i]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Flash attention

inline void flash_forward(const Operator& op, Args& args, std::vector<Tensor>& outs, Draw draw) {
  require_none(op, args, {"seqused_k", "alibi_slopes", "block_table", "q_descale", "k_descale", "v_descale"});
  const Tensor q = args[0].toTensor(), k = args[1].toTensor(), v = args[2].toTensor();
  const auto form = flash_form(op, args, draw);
  if (outs[2].numel() >= 2) {
    put_word(outs[2], 0, draw.seed);
    put_word(outs[2], 1, draw.offset);
  }
  const auto cumulative = tensor_of(args[op.index("cum_seq_q")]);
  if (!cumulative) {
    auto [out, lse] = attend(heads_first(q), heads_first(k), heads_first(v), form);
    heads_first(outs[0]).copy_(out);
    outs[1].slice(-1, 0, lse.size(-1)).copy_(lse);
    return;
  }
  const auto q_starts = numbers(*cumulative), k_starts = numbers(args[op.index("cum_seq_k")].toTensor());
  for (size_t i = 0; i + 1 < q_starts.size(); ++i) {
    auto [out, lse] = attend(sequence(q, q_starts, i), sequence(k, k_starts, i), sequence(v, k_starts, i), form);
    put_sequence(outs[0], q_starts, i, out);
    lse_of_sequence(outs[1], q_starts, i).copy_(lse.squeeze(0));
  }
}

inline void flash_backward(const Operator& op, Args& args, std::vector<Tensor>& outs, Draw) {
  const Tensor grad = args[0].toTensor(), q = args[1].toTensor(), k = args[2].toTensor(), v = args[3].toTensor();
  const Tensor out = args[4].toTensor(), lse = args[5].toTensor(), kept = args[op.index("rng_state")].toTensor();
  auto form = flash_form(op, args, {});
  if (form.dropout > 0) form.draw = {word(kept, 0), word(kept, 1)};
  const auto cumulative = tensor_of(args[op.index("cum_seq_q")]);
  if (!cumulative) {
    const auto found = attend_backward(heads_first(grad), heads_first(q), heads_first(k), heads_first(v),
                                       heads_first(out), lse.slice(-1, 0, q.size(1)), form);
    heads_first(outs[0]).copy_(found.q);
    heads_first(outs[1]).copy_(found.k);
    heads_first(outs[2]).copy_(found.v);
    return;
  }
  const auto q_starts = numbers(*cumulative), k_starts = numbers(args[op.index("cum_seq_k")].toTensor());
  for (size_t i = 0; i + 1 < q_starts.size(); ++i) {
    const auto found = attend_backward(sequence(grad, q_starts, i), sequence(q, q_starts, i), sequence(k, k_starts, i),
                                       sequence(v, k_starts, i), sequence(out, q_starts, i),
                                       lse_of_sequence(lse, q_starts, i).unsqueeze(0), form);
    put_sequence(outs[0], q_starts, i, found.q);
    put_sequence(outs[1], k_starts, i, found.k);
    put_sequence(outs[2], k_starts, i, found.v);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory-efficient attention. Its packed sequences lie in a batch of one.

inline void efficient_forward(const Operator& op, Args& args, std::vector<Tensor>& outs, Draw draw) {
  const Tensor q = args[0].toTensor(), k = args[1].toTensor(), v = args[2].toTensor();
  const auto form = efficient_form(op, args, draw);
  if (outs[2].defined() && outs[2].numel() == 1) put_word(outs[2], 0, draw.seed);
  if (outs[3].defined() && outs[3].numel() == 1) put_word(outs[3], 0, draw.offset);
  const bool keeps_lse = outs[1].defined() && outs[1].numel();
  const auto cumulative = tensor_of(args[op.index("cu_seqlens_q")]);
  if (!cumulative) {
    auto [out, lse] = attend(heads_first(q), heads_first(k), heads_first(v), form);
    heads_first(outs[0]).copy_(out);
    if (!keeps_lse) return;
    outs[1].fill_(INFINITY); // rows that only fill up a block
    outs[1].slice(-1, 0, lse.size(-1)).copy_(lse);
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(!form.bias, "card: packed sequences with a bias");
  const auto q_starts = numbers(*cumulative), k_starts = numbers(args[op.index("cu_seqlens_k")].toTensor());
  for (size_t i = 0; i + 1 < q_starts.size(); ++i) {
    auto [out, lse] =
        attend(sequence(q[0], q_starts, i), sequence(k[0], k_starts, i), sequence(v[0], k_starts, i), form);
    put_sequence(outs[0][0], q_starts, i, out);
    if (keeps_lse) outs[1][i].slice(-1, 0, lse.size(-1)).copy_(lse.squeeze(0));
  }
}

inline void efficient_backward(const Operator& op, Args& args, std::vector<Tensor>& outs, Draw) {
  const Tensor grad = args[0].toTensor(), q = args[1].toTensor(), k = args[2].toTensor(), v = args[3].toTensor();
  const Tensor out = args[5].toTensor(), lse = args[op.index("logsumexp")].toTensor();
  auto form = efficient_form(op, args, {});
  if (form.dropout > 0)
    form.draw = {word(args[op.index("philox_seed")].toTensor(), 0),
                 word(args[op.index("philox_offset")].toTensor(), 0)};
  const auto cumulative = tensor_of(args[op.index("cu_seqlens_q")]);
  if (!cumulative) {
    const auto found = attend_backward(heads_first(grad), heads_first(q), heads_first(k), heads_first(v),
                                       heads_first(out), lse.slice(-1, 0, q.size(1)), form);
    heads_first(outs[0]).copy_(found.q);
    heads_first(outs[1]).copy_(found.k);
    heads_first(outs[2]).copy_(found.v);
    if (outs[3].defined() && outs[3].numel()) outs[3].copy_(at::sum_to(found.scores, outs[3].sizes()));
    return;
  }
  const auto q_starts = numbers(*cumulative), k_starts = numbers(args[op.index("cu_seqlens_k")].toTensor());
  for (size_t i = 0; i + 1 < q_starts.size(); ++i) {
    const auto found =
        attend_backward(sequence(grad[0], q_starts, i), sequence(q[0], q_starts, i), sequence(k[0], k_starts, i),
                        sequence(v[0], k_starts, i), sequence(out[0], q_starts, i),
                        lse_of_sequence(lse, q_starts, i).unsqueeze(0), form);
    put_sequence(outs[0][0], q_starts, i, found.q);
    put_sequence(outs[1][0], k_starts, i, found.k);
    put_sequence(outs[2][0], k_starts, i, found.v);
  }
}

} // namespace card
