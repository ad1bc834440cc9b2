#include "host_op.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/c/private/mlx.h"
#include "mlx/primitives.h"

namespace mx = mlx::core;

namespace {

// What a node, its copies in traces and its scheduled task share.
struct Context {
  std::string name;
  std::vector<bool> contiguous;
  std::vector<int> in_place;
  mlx_host_begin begin;
  mlx_host_function function;
  void* context;
  void (*destroy)(void*);

  Context(mlx_host_begin begin, mlx_host_function function, void* context, void (*destroy)(void*))
      : begin(begin), function(function), context(context), destroy(destroy) {}
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() {
    destroy(context);
  }
};

// An array's memory, owned apart from the array, which may be gone when the task runs. MLX keeps
// the buffers themselves until then.
struct View {
  char* data;
  std::vector<int> shape;
  std::vector<int64_t> strides;
  size_t size;
  size_t itemsize;
  mlx_dtype dtype;

  explicit View(mx::array& a)
      : data(a.size() == 0 ? nullptr : a.data<char>()),
        shape(a.shape().begin(), a.shape().end()),
        strides(a.strides().begin(), a.strides().end()),
        size(a.size()),
        itemsize(a.itemsize()),
        dtype(mlx_dtype_to_c(a.dtype())) {}

  mlx_host_view as_c() const {
    return {data, shape.data(), strides.data(), shape.size(), size, dtype};
  }
};

// Copies a strided array, which has a dimension at least, to `out`, row-major, and makes the view
// one of `out`.
void pack(View& view, char* out) {
  size_t rank = view.shape.size();
  std::vector<int> index(rank, 0);
  const char* in = view.data;
  size_t inner = view.shape[rank - 1];
  int64_t step = view.strides[rank - 1] * int64_t(view.itemsize);
  char* to = out;
  for (size_t done = 0; done < view.size; done += inner) {
    if (step == int64_t(view.itemsize)) {
      std::memcpy(to, in, inner * view.itemsize);
      to += inner * view.itemsize;
    } else {
      const char* from = in;
      for (size_t i = 0; i < inner; i++, from += step, to += view.itemsize) {
        std::memcpy(to, from, view.itemsize);
      }
    }
    for (size_t axis = rank - 1; axis-- > 0;) {
      int64_t stride = view.strides[axis] * int64_t(view.itemsize);
      in += stride;
      if (++index[axis] < view.shape[axis]) {
        break;
      }
      in -= stride * view.shape[axis];
      index[axis] = 0;
    }
  }
  int64_t stride = 1;
  for (size_t axis = rank; axis-- > 0; stride *= view.shape[axis]) {
    view.strides[axis] = stride;
  }
  view.data = out;
}

struct Task {
  std::shared_ptr<Context> context;
  void* evaluation;
  std::vector<View> inputs;
  std::vector<View> outputs;
  // Inputs to be packed, with the memory for it.
  std::vector<std::pair<size_t, std::unique_ptr<char[]>>> packed;
  // Outputs to be filled from an input that could not be given away.
  std::vector<std::pair<size_t, size_t>> copied;

  void operator()() {
    for (auto& [input, memory] : packed) {
      pack(inputs[input], memory.get());
    }
    for (auto [output, input] : copied) {
      auto& from = inputs[input];
      std::memcpy(outputs[output].data, from.data, from.size * from.itemsize);
    }
    std::vector<mlx_host_view> in, out;
    for (auto& view : inputs) {
      in.push_back(view.as_c());
    }
    for (auto& view : outputs) {
      out.push_back(view.as_c());
    }
    context->function(
        context->context, evaluation, in.data(), in.size(), out.data(), out.size());
  }
};

class HostOp : public mx::Primitive {
 public:
  HostOp(mx::Stream stream, std::shared_ptr<Context> context)
      : Primitive(stream), context_(std::move(context)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto task = std::make_shared<Task>();
    task->context = context_;
    // Each output holds the inputs, which MLX lets go of after this. Now, the one that is
    // evaluated is enough: an input that several hold cannot be given away.
    for (auto& out : outputs) {
      if (&out.inputs() != &inputs && !out.is_tracer()) {
        out.inputs().clear();
      }
    }
    for (size_t i = 0; i < outputs.size(); i++) {
      auto& out = outputs[i];
      int from = context_->in_place[i];
      if (from < 0 || out.size() == 0) {
        out.set_data(mx::allocator::malloc(out.nbytes()));
        continue;
      }
      auto& in = inputs[from];
      if (in.is_donatable() && in.flags().row_contiguous &&
          in.buffer_size() >= out.nbytes()) {
        out.copy_shared_buffer(in);
      } else {
        out.set_data(mx::allocator::malloc(out.nbytes()));
        task->copied.emplace_back(i, from);
      }
    }
    for (size_t i = 0; i < inputs.size(); i++) {
      auto in = inputs[i];
      task->inputs.emplace_back(in);
      // What lies before the data pointer is out of a slice's reach.
      auto& strides = in.strides();
      bool backwards = std::any_of(strides.begin(), strides.end(), [](auto s) { return s < 0; });
      bool wanted = context_->contiguous[i] || backwards;
      if (wanted && !in.flags().row_contiguous && in.size() > 0) {
        task->packed.emplace_back(i, std::make_unique<char[]>(in.nbytes()));
      }
    }
    for (auto& out : outputs) {
      task->outputs.emplace_back(out);
    }
    task->evaluation = context_->begin(context_->context);
    mx::cpu::get_command_encoder(stream()).dispatch([task] { (*task)(); });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error(context_->name + " runs on the CPU only");
  }

  const char* name() const override {
    return context_->name.c_str();
  }

  // The default throws, which refuses a compilation that is to serve other shapes: the function
  // was made for those that the node was built with.

 private:
  std::shared_ptr<Context> context_;
};

} // namespace

extern "C" int mlx_host_op(
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
    const mlx_stream s) {
  try {
    auto shared = std::make_shared<Context>(begin, function, context, destroy);
    shared->name = name;
    auto& arrays = mlx_vector_array_get_(inputs);
    shared->contiguous.assign(contiguous, contiguous + arrays.size());
    auto stream = mlx_stream_get_(s);
    if (stream.device != mx::Device::cpu) {
      throw std::invalid_argument("a host operation needs a stream of the CPU");
    }
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> dtypes;
    for (size_t i = 0; i < outputs_num; i++) {
      auto& out = outputs[i];
      shapes.emplace_back(out.shape, out.shape + out.ndim);
      dtypes.push_back(mlx_dtype_to_cpp(out.dtype));
      if (out.in_place >= 0) {
        if (size_t(out.in_place) >= arrays.size() || !shared->contiguous[out.in_place] ||
            arrays[out.in_place].shape() != shapes.back() ||
            arrays[out.in_place].dtype() != dtypes.back()) {
          throw std::invalid_argument("an output in place needs a contiguous input of its shape and dtype");
        }
      }
      shared->in_place.push_back(out.in_place);
    }
    auto made = mx::array::make_arrays(
        std::move(shapes), dtypes, std::make_shared<HostOp>(stream, shared), arrays);
    mlx_vector_array_set_(*res, std::move(made));
    return 0;
  } catch (std::exception& e) {
    mlx_error(e.what());
    return 1;
  }
}
