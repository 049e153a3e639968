// What the kernels share: types, conversions, reductions in a fixed order, tensor cores. Needs no header of CUDA's, so that
// the driver and its compiler are enough; compiled for the CPU, too (gpu/emulator).
#pragma once

typedef long long i64;

// Of a thread of a grid with one axis, over `count` elements.
#define GRID_STRIDE(i, count)                                                                                           \
    for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < (count); i += i64(gridDim.x) * blockDim.x)

// A shared array, `SHARED(float, tile, [32][33]);`, and the dynamic shared memory of the launch as one.
#ifdef KUMIKI_EMULATED
#define SHARED(type, name, shape)                                                                                       \
    typedef type name##_shape shape;                                                                                    \
    static char name##_tag;                                                                                             \
    name##_shape &name = *static_cast<name##_shape *>(emulator_shared(&name##_tag, #name, sizeof(name##_shape)))
#define DYNAMIC_SHARED(type, name) type *name = static_cast<type *>(emulator_dynamic_shared())
#else
#define SHARED(type, name, shape) __shared__ __align__(16) type name shape
#define DYNAMIC_SHARED(type, name)                                                                                      \
    extern __shared__ __align__(128) unsigned char kumiki_dynamic_shared[];                                             \
    type *name = reinterpret_cast<type *>(kumiki_dynamic_shared)
#endif

// --- Numbers ----------------------------------------------------------------------------------------------------------

struct bf16 {
    unsigned short bits;
};

// The type in which numbers of type T are computed with.
template <class T> struct SumOf {
    typedef T type;
};
template <> struct SumOf<bf16> {
    typedef float type;
};
template <class T> using Sum = typename SumOf<T>::type;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }

// To the nearest, and of two as near to the even one; NaN stays NaN.
__device__ __forceinline__ bf16 round_to_bf16(float x) {
    unsigned bits = __float_as_uint(x);
    bf16 out;
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        out.bits = (unsigned short)(bits >> 16 | 0x40u);
    } else {
        out.bits = (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    }
    return out;
}

template <class T> __device__ __forceinline__ T narrow(Sum<T> x) { return x; }
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) { return round_to_bf16(x); }

// Two numbers of BF16 in one register, the first in its lower half.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
#ifdef KUMIKI_EMULATED
    return unsigned(round_to_bf16(low).bits) | unsigned(round_to_bf16(high).bits) << 16;
#else
    unsigned both; // the same, in one instruction
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#endif
}

// One name for both precisions.
namespace math {
__device__ __forceinline__ float exp(float x) { return ::expf(x); }
__device__ __forceinline__ double exp(double x) { return ::exp(x); }
__device__ __forceinline__ float expm1(float x) { return ::expm1f(x); }
__device__ __forceinline__ double expm1(double x) { return ::expm1(x); }
__device__ __forceinline__ float log(float x) { return ::logf(x); }
__device__ __forceinline__ double log(double x) { return ::log(x); }
__device__ __forceinline__ float log1p(float x) { return ::log1pf(x); }
__device__ __forceinline__ double log1p(double x) { return ::log1p(x); }
__device__ __forceinline__ float tanh(float x) { return ::tanhf(x); }
__device__ __forceinline__ double tanh(double x) { return ::tanh(x); }
__device__ __forceinline__ float sqrt(float x) { return ::sqrtf(x); }
__device__ __forceinline__ double sqrt(double x) { return ::sqrt(x); }
__device__ __forceinline__ float pow(float x, float y) { return ::powf(x, y); }
__device__ __forceinline__ double pow(double x, double y) { return ::pow(x, y); }
__device__ __forceinline__ float sin(float x) { return ::sinf(x); }
__device__ __forceinline__ double sin(double x) { return ::sin(x); }
__device__ __forceinline__ float cos(float x) { return ::cosf(x); }
__device__ __forceinline__ double cos(double x) { return ::cos(x); }
__device__ __forceinline__ float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
__device__ __forceinline__ double fma(double a, double b, double c) { return ::fma(a, b, c); }
// NaN wins, as it does on the CPU.
template <class T> __device__ __forceinline__ T max(T a, T b) { return a > b || a != a ? a : b; }
template <class T> __device__ __forceinline__ T min(T a, T b) { return a < b || a != a ? a : b; }
template <class T> __device__ __forceinline__ T abs(T x) { return x < T(0) ? -x : x; }
template <class T> __device__ __forceinline__ T infinity() { return T(__int_as_float(0x7f800000)); }
// 1 / (1 + e^-x)
template <class T> __device__ __forceinline__ T sigmoid(T x) { return T(1) / (T(1) + exp(-x)); }
} // namespace math

// --- Views ------------------------------------------------------------------------------------------------------------

// Where element i of a view lies, in row-major order of its shape.
struct View {
    i64 shape[8], strides[8], rank;
};
__device__ __forceinline__ i64 position(const View &view, i64 i) {
    i64 at = 0;
    for (int axis = 7; axis >= 0; axis--) {
        if (axis < view.rank) {
            at += i % view.shape[axis] * view.strides[axis];
            i /= view.shape[axis];
        }
    }
    return at;
}

// --- Reductions, in an order that depends on nothing but the size of the block ------------------------------------------

struct Plus {
    template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return a + b; }
};
struct Larger {
    template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return math::max(a, b); }
};

// Of the 32 numbers of a warp, given to each lane.
template <class T, class Op> __device__ __forceinline__ T warp_reduce(T x, Op op) {
    for (int by = 16; by > 0; by /= 2) {
        x = op(x, __shfl_xor_sync(0xffffffffu, x, by));
    }
    return x;
}

// Of the numbers of a block of one axis and whole warps, given to each thread. `scratch` has 32 numbers in shared memory, and
// may be used again at once.
template <class T, class Op> __device__ __forceinline__ T block_reduce(T x, T *scratch, Op op) {
    x = warp_reduce(x, op);
    int warps = blockDim.x / 32;
    if (warps == 1) {
        return x;
    }
    if (threadIdx.x % 32 == 0) {
        scratch[threadIdx.x / 32] = x;
    }
    __syncthreads();
    T all = scratch[0];
    for (int w = 1; w < warps; w++) {
        all = op(all, scratch[w]);
    }
    __syncthreads();
    return all;
}

// Partial sums over rows: of `step` rows each, for 32 columns a block of 32 x 8 threads, in double precision and in an order
// that depends on the shape only. partial[blockIdx.y][column] = Σ term(row, column).
template <class Term>
__device__ __forceinline__ void sum_columns(Term term, double *partial, i64 rows, i64 columns, i64 step) {
    SHARED(double, sums, [8][32]);
    i64 column = i64(blockIdx.x) * 32 + threadIdx.x;
    i64 first = i64(blockIdx.y) * step, end = math::min(rows, first + step);
    double sum = 0;
    if (column < columns) {
        for (i64 row = first + threadIdx.y; row < end; row += 8) sum += term(row, column);
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < columns) {
        for (int y = 1; y < 8; y++) sum += sums[y][threadIdx.x];
        partial[i64(blockIdx.y) * columns + column] = sum;
    }
}

// --- Tensor cores -----------------------------------------------------------------------------------------------------

// D[16, 8] += A[16, 16] B[16, 8], factors of BF16, by the 32 lanes of a warp. With g = lane / 4 and p = 2 (lane % 4):
//   a[0]: A[g][p..p+2]   a[1]: A[g+8][p..]   a[2]: A[g][p+8..]   a[3]: A[g+8][p+8..]
//   b[0]: B[p..p+2][g]   b[1]: B[p+8..][g]
//   d[0..2]: D[g][p..p+2]   d[2..4]: D[g+8][p..p+2]
// each pair with its first number in the lower half.
#ifdef KUMIKI_EMULATED
#define mma_m16n8k16(d, a, b) emulator_mma(d, a, b, __LINE__)
inline void emulator_mma(float *d, const unsigned *a, const unsigned *b, int line) {
    Mma payload{d, a, b};
    emulator_warp(0xffffffffu, WARP_MMA, line, &payload);
}
#else
__device__ __forceinline__ void mma_m16n8k16(float *d, const unsigned *a, const unsigned *b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif
