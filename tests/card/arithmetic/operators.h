// How each operator of ATen is treated: read from its schema, and for few from the lists below.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>

#include <map>
#include <optional>
#include <set>
#include <string>

#include "values.h"

namespace card {

/// Rule 3. Results of these have a size that the device tells the host, or the CUDA kernel needs libraries that are not
/// imitated.
inline const std::set<std::string> kHostFirst = {
    "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
    "bincount", "repeat_interleave", "nonzero_static", "equal",
    // cuSOLVER, cuFFT, MAGMA
    "geqrf", "ormqr", "orgqr", "cholesky", "cholesky_inverse", "_cholesky_solve_helper", "triangular_solve", "_fft_r2c",
    "_fft_c2c", "_fft_c2r", "lu_unpack", "lu_solve", "linalg_cholesky_ex", "linalg_inv_ex", "linalg_lu",
    "linalg_lu_factor_ex", "linalg_lu_solve", "linalg_solve_triangular", "linalg_qr", "linalg_eig", "linalg_eigvals",
    "linalg_householder_product", "linalg_ldl_factor_ex", "linalg_ldl_solve", "linalg_lstsq", "_linalg_svd",
    "_linalg_eigh", "_linalg_eigvals", "_linalg_det", "_linalg_slogdet", "_linalg_solve_ex", "linalg_matrix_exp"};

/// These call an operator that is wrapped itself.
inline const std::set<std::string> kTransparent = {
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"};

/// These keep fp32 statistics of 16 bit tensors, where the CPU's kernels keep them in 16 bit.
inline const std::set<std::string> kWithWideStatistics = {
    "native_layer_norm",        "native_layer_norm_backward",
    "native_group_norm",        "native_group_norm_backward",
    "native_batch_norm",        "native_batch_norm_backward",
    "_batch_norm_with_update",  "batch_norm_backward",
    "_native_batch_norm_legit", "_fused_rms_norm",
    "_weight_norm_interface",   "_weight_norm_interface_backward"};

/// Allocation and metadata: nothing to compute. (Operators that return views are found by their schema.)
inline const std::set<std::string> kNothingToCompute = {"empty",
                                                        "empty_strided",
                                                        "resize_",
                                                        "resize",
                                                        "set_",
                                                        "resize_as_",
                                                        "_resize_output_",
                                                        "record_stream",
                                                        "pin_memory",
                                                        "_pin_memory",
                                                        "is_pinned",
                                                        "_cudnn_init_dropout_state",
                                                        "_empty_affine_quantized",
                                                        "_fused_sdp_choice",
                                                        "_local_scalar_dense",
                                                        "_coalesced_",
                                                        "_copy_from",
                                                        "_copy_from_and_resize",
                                                        "_make_per_tensor_quantized_tensor",
                                                        "_make_per_channel_quantized_tensor",
                                                        "_cudnn_rnn_flatten_weight",
                                                        "_nested_tensor_from_mask",
                                                        "to_sparse",
                                                        "_to_sparse",
                                                        "_to_sparse_csr",
                                                        "_to_sparse_csc",
                                                        "_to_sparse_bsr",
                                                        "_to_sparse_bsc",
                                                        "_sparse_coo_tensor_with_dims",
                                                        "_efficientzerotensor"};

/// These write running statistics, which their schema does not say.
inline const std::set<std::string> kWritesUnsaid = {"native_batch_norm", "cudnn_batch_norm", "batch_norm_gather_stats",
                                                    "batch_norm_gather_stats_with_counts"};

struct Operator {
  const c10::FunctionSchema* schema;
  std::string name;    // aten::add.Tensor
  std::string base;    // add
  bool writes = false; // into its arguments
  bool random = false;
  bool host_first = false;
  bool transparent = false;
  bool wide_statistics = false;
  int generator_at = -1;

  /// What is known of an operator; nothing where its kernel need not be wrapped.
  static std::optional<Operator> of(const c10::OperatorHandle& handle);

  size_t index(const char* argument) const {
    auto found = schema->argumentIndexWithName(argument);
    TORCH_CHECK(found.has_value(), "card: ", name, " has no argument ", argument);
    return *found;
  }

  size_t arguments() const { return schema->arguments().size(); }
  size_t returns() const { return schema->returns().size(); }

  bool writes_argument(size_t i) const {
    const auto* alias = schema->arguments()[i].alias_info();
    return alias && alias->isWrite();
  }

  /// Whether a result is memory of its own, not one of the arguments.
  bool makes_result(size_t i) const { return !schema->returns()[i].alias_info(); }
};

inline bool holds_tensors(const c10::TypePtr& type) {
  return type->isSubtypeOf(*c10::TensorType::get()) || type->isSubtypeOf(*c10::ListType::ofTensors());
}

inline std::optional<Operator> Operator::of(const c10::OperatorHandle& handle) {
  if (!handle.hasSchema() || handle.schema().name().rfind("aten::", 0) != 0) return std::nullopt;
  const auto& schema = handle.schema();
  Operator made{&schema};
  made.name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  made.base = schema.name().substr(6);
  if (kNothingToCompute.count(made.base)) return std::nullopt;
  bool returns_tensors = false;
  for (const auto& result : schema.returns()) {
    returns_tensors |= holds_tensors(result.type());
    if (result.alias_info() && !result.alias_info()->isWrite()) return std::nullopt; // a view
  }
  for (size_t i = 0; i < made.arguments(); ++i) {
    const auto& type = schema.arguments()[i].type();
    if (type->kind() == c10::TypeKind::StorageType) return std::nullopt;
    if (type->str().find("Generator") != std::string::npos) made.generator_at = static_cast<int>(i);
    made.writes |= made.writes_argument(i);
  }
  made.writes |= kWritesUnsaid.count(made.base) > 0;
  made.host_first = kHostFirst.count(made.base) > 0;
  if (!returns_tensors && !made.writes && !made.host_first) return std::nullopt;
  made.random = made.generator_at >= 0 || handle.hasTag(at::Tag::nondeterministic_seeded);
  made.transparent = kTransparent.count(made.base) > 0;
  made.wide_statistics = kWithWideStatistics.count(made.base) > 0;
  return made;
}

} // namespace card
