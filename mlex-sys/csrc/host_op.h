// Operations of MLX's graph that a function of the host computes. Declared in the manner of
// mlx-c, so that the bindings are generated with its own.

#ifndef MLEX_HOST_OP_H
#define MLEX_HOST_OP_H

#include "mlx/c/array.h"
#include "mlx/c/stream.h"
#include "mlx/c/vector.h"

#ifdef __cplusplus
extern "C" {
#endif

/// The memory of an array while a host operation runs. Strides are in elements.
typedef struct mlx_host_view_ {
  void* data;
  const int* shape;
  const int64_t* strides;
  size_t ndim;
  size_t size;
  mlx_dtype dtype;
} mlx_host_view;

/// Called on the thread that evaluates the operation, when it is about to be scheduled. What it
/// returns is passed to the function.
typedef void* (*mlx_host_begin)(void* context);

/// Computes the outputs. Called on the thread of the operation's stream, after what the inputs
/// depend on. Must not call MLX or throw.
typedef void (*mlx_host_function)(
    void* context,
    void* evaluation,
    const mlx_host_view* inputs,
    size_t inputs_num,
    const mlx_host_view* outputs,
    size_t outputs_num);

/// What an output is. `in_place` is the input whose content it starts with, in the same buffer
/// where nothing else refers to it; -1 for an output that starts with undefined content.
typedef struct mlx_host_output_ {
  const int* shape;
  size_t ndim;
  mlx_dtype dtype;
  int in_place;
} mlx_host_output;

/// Puts an operation into the graph. `contiguous[i]` asks for input i in row-major order without
/// gaps. `context` belongs to the operation, whatever comes of the call: `destroy` is called on
/// it once, after the last use.
int mlx_host_op(
    mlx_vector_array* res,
    const char* name,
    const mlx_vector_array inputs,
    const bool* contiguous,
    const mlx_host_output* outputs,
    size_t outputs_num,
    mlx_host_begin begin,
    mlx_host_function function,
    void* context,
    void (*destroy)(void*),
    const mlx_stream s);

#ifdef __cplusplus
}
#endif

#endif
