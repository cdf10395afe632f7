// Many rows times affine-quantised weights: what rows_qmm.metal and rows_qmm_gathered.metal share.
//
// The product is computed transposed, y^T = W x^T, so that one lane's two elements of a weight fragment come
// from one weight row: it unpacks them from a 16-byte piece of that row that it holds in registers, and no
// weight passes through threadgroup memory. A sum over k may be taken in any order, so the k's of a fragment
// are chosen for whole loads: column 2j + e of a weight fragment, and row 2j + e of an activation fragment,
// stand for k = k0 + j * PIECE + 8 * octet + 4 * e + step.
//
// Weights become float before the product and sums are float; nothing is rounded to 16 bits on the way.
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>

// Fragments and pieces stay in registers only where their index is known when the loop is compiled.
#define UNROLLED _Pragma("clang loop unroll(full)")

// The place of a lane in an 8x8 fragment: it holds (row, col) and (row, col + 1).
struct FragmentPlace {
  int row;
  int col;
};

inline FragmentPlace fragment_place(int lane) {
  FragmentPlace p;
  p.row = ((lane / 4) & 4) + (lane / 2) % 4;
  p.col = ((lane / 4) & 2) * 2 + (lane % 2) * 2;
  return p;
}

// Weights `step` and `step + 4` of the eight weights of an octet, still integers.
template <int BITS>
inline float2 unpack_pair(uint4 piece, int octet, int step) {
  if (BITS == 4) {
    const uint word = piece[octet];
    return float2(float((word >> (4 * step)) & 15), float((word >> (4 * step + 16)) & 15));
  }
  return float2(float((piece[2 * octet] >> (8 * step)) & 255), float((piece[2 * octet + 1] >> (8 * step)) & 255));
}

// Adds to sums[t * MT + m], the product of weight rows first_n + 8 t .. + 7 with activation rows 8 m .. + 7,
// over the k's of one of SK slices. Rows past `rows` count as zero; weight rows past N repeat the last one.
template <typename T, typename ST, int GS, int BITS, int MT, int NT, int SK>
inline void accumulate(
    thread simdgroup_matrix<float, 8, 8>* sums,
    const device T* x,
    const device uint* w,
    const device ST* scales,
    const device ST* biases,
    int rows,
    int N,
    int K,
    int first_n,
    int slice,
    int lane) {
  constexpr int PIECE = 128 / BITS;  // weights in 16 bytes; a piece never straddles two groups
  constexpr int OCTETS = PIECE / 8;
  constexpr int CHUNK = 4 * PIECE;   // k's of one turn of the loop
  const FragmentPlace at = fragment_place(lane);
  const int words = K / 32 * BITS;   // 32-bit words of a weight row
  const int groups = K / GS;

  for (int k0 = slice * CHUNK; k0 < K; k0 += SK * CHUNK) {
    const int k_weight = k0 + at.col / 2 * PIECE;
    uint4 piece[NT];
    float scale[NT];
    float bias[NT];
    UNROLLED
    for (int t = 0; t < NT; t++) {
      piece[t] = uint4(0, 0, 0, 0);
      scale[t] = 0;
      bias[t] = 0;
      if (k_weight < K) {
        const int n = min(first_n + 8 * t + at.row, N - 1);
        piece[t] = *(const device uint4*)(w + n * words + k_weight * BITS / 32);
        scale[t] = float(scales[n * groups + k_weight / GS]);
        bias[t] = float(biases[n * groups + k_weight / GS]);
      }
    }
    UNROLLED
    for (int octet = 0; octet < OCTETS; octet++) {
      const int k_row = k0 + at.row / 2 * PIECE + 8 * octet + 4 * (at.row % 2);
      float4 even[MT];
      float4 odd[MT];
      UNROLLED
      for (int m = 0; m < MT; m++) {
        even[m] = float4(0.0f, 0.0f, 0.0f, 0.0f);
        odd[m] = float4(0.0f, 0.0f, 0.0f, 0.0f);
        const int row = 8 * m + at.col;
        if (k_row < K && row < rows) {
          UNROLLED
          for (int i = 0; i < 4; i++) {
            even[m][i] = float(x[row * K + k_row + i]);
          }
        }
        if (k_row < K && row + 1 < rows) {
          UNROLLED
          for (int i = 0; i < 4; i++) {
            odd[m][i] = float(x[(row + 1) * K + k_row + i]);
          }
        }
      }
      UNROLLED
      for (int step = 0; step < 4; step++) {
        simdgroup_matrix<float, 8, 8> columns[MT];
        UNROLLED
        for (int m = 0; m < MT; m++) {
          columns[m].thread_elements()[0] = even[m][step];
          columns[m].thread_elements()[1] = odd[m][step];
        }
        UNROLLED
        for (int t = 0; t < NT; t++) {
          const float2 pair = unpack_pair<BITS>(piece[t], octet, step);
          simdgroup_matrix<float, 8, 8> weights;
          weights.thread_elements()[0] = fma(scale[t], pair[0], bias[t]);
          weights.thread_elements()[1] = fma(scale[t], pair[1], bias[t]);
          UNROLLED
          for (int m = 0; m < MT; m++) {
            simdgroup_multiply_accumulate(sums[t * MT + m], weights, columns[m], sums[t * MT + m]);
          }
        }
      }
    }
  }
}

// Lays the sums of one SIMD-group into its slice of threadgroup memory, one row of `width` floats for each
// activation row.
template <int MT, int NT>
inline void lay_down(threadgroup float* slice, thread simdgroup_matrix<float, 8, 8>* sums, int width, int lane) {
  const FragmentPlace at = fragment_place(lane);
  UNROLLED
  for (int t = 0; t < NT; t++) {
    UNROLLED
    for (int m = 0; m < MT; m++) {
      slice[(8 * m + at.col) * width + 8 * t + at.row] = sums[t * MT + m].thread_elements()[0];
      slice[(8 * m + at.col + 1) * width + 8 * t + at.row] = sums[t * MT + m].thread_elements()[1];
    }
  }
}
