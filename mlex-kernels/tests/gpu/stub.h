// A stand-in for the GPU's languages: enough of Metal and of CUDA that a kernel compiles as C++,
// and runs on a CPU with 32 coroutines for the lanes of one group.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <ucontext.h>
#include <vector>

using std::exp;
typedef unsigned int uint;
struct uint3 {
  uint x, y, z;
};

// The lane that runs, and what each has given to the others.
inline uint stub_lane;
inline float stub_values[32];
inline bool stub_done[32];
inline ucontext_t stub_scheduler, stub_lanes[32];
inline std::function<void(uint)> stub_body;

// Lets all other lanes run up to here.
inline void stub_wait() {
  uint lane = stub_lane;
  swapcontext(&stub_lanes[lane], &stub_scheduler);
}

// The value that another lane gives.
inline float stub_exchange(float mine, uint lane) {
  stub_values[stub_lane] = mine;
  stub_wait();
  float other = stub_values[lane];
  stub_wait();
  return other;
}

// Metal
#define device
#define constant
namespace metal {
inline float simd_sum(float x) {
  stub_values[stub_lane] = x;
  stub_wait();
  float sum = 0.0f;
  for (float value : stub_values) {
    sum += value;
  }
  stub_wait();
  return sum;
}
} // namespace metal

// CUDA
#define __global__
#define __device__
inline uint3 threadIdx, blockIdx, blockDim;
inline float __shfl_xor_sync(uint, float x, int offset) {
  return stub_exchange(x, stub_lane ^ uint(offset));
}

inline void stub_enter() {
  uint lane = stub_lane;
  stub_body(lane);
  stub_done[lane] = true;
}

// Runs `body(lane, row, plane)` for every place of the grid, the lanes of a group together.
inline void stub_run(uint rows, uint planes, std::function<void(uint, uint, uint)> body) {
  static std::vector<char> stacks[32];
  for (uint place = 0; place < rows * planes; ++place) {
    stub_body = [&](uint lane) { body(lane, place % rows, place / rows); };
    for (uint lane = 0; lane < 32; ++lane) {
      stacks[lane].resize(1 << 16);
      stub_done[lane] = false;
      getcontext(&stub_lanes[lane]);
      stub_lanes[lane].uc_stack.ss_sp = stacks[lane].data();
      stub_lanes[lane].uc_stack.ss_size = stacks[lane].size();
      stub_lanes[lane].uc_link = &stub_scheduler;
      makecontext(&stub_lanes[lane], stub_enter, 0);
    }
    for (bool running = true; running;) {
      running = false;
      for (stub_lane = 0; stub_lane < 32; ++stub_lane) {
        if (!stub_done[stub_lane]) {
          uint lane = stub_lane;
          swapcontext(&stub_scheduler, &stub_lanes[lane]);
          stub_lane = lane;
          running = true;
        }
      }
    }
  }
}

inline std::vector<float> stub_read(size_t count) {
  std::vector<float> values(count);
  if (std::fread(values.data(), sizeof(float), count, stdin) != count) {
    std::fprintf(stderr, "too little input\n");
    std::exit(1);
  }
  return values;
}

inline void stub_write(const std::vector<float>& values) {
  std::fwrite(values.data(), sizeof(float), values.size(), stdout);
}
