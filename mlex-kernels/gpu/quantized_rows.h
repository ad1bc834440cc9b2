template <int COUNT>
struct alignas(4 * COUNT) Words {
  unsigned int word[COUNT];
};

template <bool HALF>
__device__ inline void multiply(float* c, unsigned int a0, unsigned int a1, unsigned int a2,
                                unsigned int a3, unsigned int b0, unsigned int b1) {
  if constexpr (HALF) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// The product of `count` rows of x with 16 rows of a weight from `first` on, as far as this warp
// has it, added to `totals`. Warps take turns at the groups, and the tensor cores multiply 16 rows
// by 16 columns with up to 8 rows of x. A lane of the four that share a row has GROUP / 4
// neighbouring numbers of a group. Which column is which does not matter to a sum, so the eight
// nibbles of a word go to the multiplication as they lie: 0 and 4, 1 and 5, 2 and 6, 3 and 7, and
// x is laid out to match.
template <int GROUP, int WARPS, bool HALF, typename SCALE, typename BIAS>
__device__ inline void multiply_rows(const void* x, int count, int columns, const unsigned int* w,
                                     const SCALE* scales, const BIAS* biases, int rows, int first,
                                     float (*totals)[8][16]) {
  constexpr int WORDS = GROUP / 32;
  // A nibble in the lowest bits of the mantissa of 128 (bfloat16) or 1024 (float16) is exact; what
  // it is too large by is taken off by the sum of x.
  constexpr unsigned int RAISED = HALF ? 0x64006400u : 0x43004300u;
  constexpr unsigned int ONES = HALF ? 0x3c003c00u : 0x3f803f80u;
  constexpr float RAISE = HALF ? 1024.0f : 128.0f;
  constexpr unsigned int NIBBLES = 0x000f000fu;

  const int groups = columns / GROUP;
  const int warp = threadIdx.y;
  const int part = threadIdx.x & 3;
  const int place = threadIdx.x >> 2;
  const size_t row_a = min(first + place, rows - 1);
  const size_t row_b = min(first + place + 8, rows - 1);
  const unsigned int* words_a = w + row_a * (columns / 8) + part * WORDS;
  const unsigned int* words_b = w + row_b * (columns / 8) + part * WORDS;
  // Of this lane's row of x, in its bits.
  const unsigned short* numbers = static_cast<const unsigned short*>(x) + size_t(place) * columns;
  const bool aligned = (reinterpret_cast<size_t>(x) & 15) == 0;

  float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
  for (int group = warp; group < groups; group += WARPS) {
    const Words<WORDS> a = *reinterpret_cast<const Words<WORDS>*>(words_a + group * (GROUP / 8));
    const Words<WORDS> b = *reinterpret_cast<const Words<WORDS>*>(words_b + group * (GROUP / 8));
    const size_t at_a = row_a * groups + group;
    const size_t at_b = row_b * groups + group;
    const float scale_a = static_cast<float>(scales[at_a]);
    const float scale_b = static_cast<float>(scales[at_b]);
    const float bias_a = static_cast<float>(biases[at_a]);
    const float bias_b = static_cast<float>(biases[at_b]);
    float product[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (place < count) {
        const unsigned short* at = numbers + group * GROUP + (part * WORDS + i) * 8;
        if (aligned) {
          v = *reinterpret_cast<const uint4*>(at);
        } else {
          v.x = at[0] | (unsigned(at[1]) << 16);
          v.y = at[2] | (unsigned(at[3]) << 16);
          v.z = at[4] | (unsigned(at[5]) << 16);
          v.w = at[6] | (unsigned(at[7]) << 16);
        }
      }
      const unsigned int x04 = __byte_perm(v.x, v.z, 0x5410);
      const unsigned int x15 = __byte_perm(v.x, v.z, 0x7632);
      const unsigned int x26 = __byte_perm(v.y, v.w, 0x5410);
      const unsigned int x37 = __byte_perm(v.y, v.w, 0x7632);
      const unsigned int p = a.word[i];
      const unsigned int q = b.word[i];
      multiply<HALF>(product, (p & NIBBLES) | RAISED, (q & NIBBLES) | RAISED,
                     ((p >> 4) & NIBBLES) | RAISED, ((q >> 4) & NIBBLES) | RAISED, x04, x15);
      multiply<HALF>(product, ((p >> 8) & NIBBLES) | RAISED, ((q >> 8) & NIBBLES) | RAISED,
                     ((p >> 12) & NIBBLES) | RAISED, ((q >> 12) & NIBBLES) | RAISED, x26, x37);
      multiply<HALF>(sum, ONES, ONES, ONES, ONES, x04, x15);
      multiply<HALF>(sum, ONES, ONES, ONES, ONES, x26, x37);
    }
    total[0] += scale_a * product[0] + (bias_a - RAISE * scale_a) * sum[0];
    total[1] += scale_a * product[1] + (bias_a - RAISE * scale_a) * sum[1];
    total[2] += scale_b * product[2] + (bias_b - RAISE * scale_b) * sum[0];
    total[3] += scale_b * product[3] + (bias_b - RAISE * scale_b) * sum[1];
  }
  totals[warp][2 * part][place] = total[0];
  totals[warp][2 * part + 1][place] = total[1];
  totals[warp][2 * part][place + 8] = total[2];
  totals[warp][2 * part + 1][place + 8] = total[3];
}

// What the warps have of row `at` of x and row `row` of the 16.
template <int WARPS>
__device__ inline float sum_of_warps(const float (*totals)[8][16], int at, int row) {
  float result = 0.0f;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    result += totals[i][at][row];
  }
  return result;
}
