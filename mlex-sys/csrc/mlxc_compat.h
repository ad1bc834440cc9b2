// Included before each file of mlx-c 0.6.0 when it is compiled against an installed MLX.
//
// mlx-c 0.6.0 calls the functions of MLX 0.31.2. Later versions gave some of them one more
// parameter; these overloads have the old parameters and pass the new one's default.

#pragma once

#include "mlx/compile_impl.h"
#include "mlx/fast.h"
#include "mlx/ops.h"
#include "mlx/version.h"

#if MLX_VERSION_NUMERIC >= 32001

namespace mlx::core::detail {

inline void compile_clear_cache() {
  compile_clear_cache(compile_cache());
}

inline void compile_erase(std::uintptr_t fun_id) {
  compile_erase(compile_cache(), fun_id);
}

} // namespace mlx::core::detail

#endif

#if MLX_VERSION_NUMERIC >= 32002

namespace mlx::core::fast {

inline array scaled_dot_product_attention(
    const array& queries,
    const array& keys,
    const array& values,
    const float scale,
    const std::string& mask_mode,
    std::optional<array> mask_arr,
    const std::optional<array>& sinks,
    StreamOrDevice s) {
  constexpr bool force_fused = false;
  return scaled_dot_product_attention(
      queries, keys, values, scale, mask_mode, std::move(mask_arr), sinks, force_fused, s);
}

} // namespace mlx::core::fast

#endif

#if MLX_VERSION_NUMERIC >= 32003

namespace mlx::core {

inline array gather_qmm(
    const array& x,
    const array& w,
    const array& scales,
    const std::optional<array>& biases,
    std::optional<array> lhs_indices,
    std::optional<array> rhs_indices,
    bool transpose,
    std::optional<int> group_size,
    std::optional<int> bits,
    const std::string& mode,
    bool sorted_indices,
    StreamOrDevice s) {
  const std::optional<array> global_scale = std::nullopt;
  return gather_qmm(
      x, w, scales, biases, std::move(lhs_indices), std::move(rhs_indices), transpose, group_size,
      bits, mode, global_scale, sorted_indices, s);
}

} // namespace mlx::core

#endif
