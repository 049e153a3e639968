// Loops over elements for every formula. A formula is a struct with up to two numbers, a and b:
//   value(x)          of one number
//   apply(x, y)       of two; where the formula has a gradient, that of `value`, of what arrives and what was saved
// BF16 is widened, computed with in F32 and rounded once.
#pragma once
#include "common.cuh"

struct Formula {
    double a, b;
};

template <class F> __device__ __forceinline__ F formula(double a, double b) {
    F f;
    f.a = a;
    f.b = b;
    return f;
}

template <class T, class F> __global__ void map(const T *x, T *y, i64 count, double a, double b) {
    F f = formula<F>(a, b);
    GRID_STRIDE(i, count) y[i] = narrow<T>(f.value(widen(x[i])));
}

template <class T, class F> __global__ void zip(const T *x, const T *y, T *out, i64 count, double a, double b) {
    F f = formula<F>(a, b);
    GRID_STRIDE(i, count) out[i] = narrow<T>(f.apply(widen(x[i]), widen(y[i])));
}

// Of two views of the result's shape.
template <class T, class F>
__global__ void zip_views(View of_x, View of_y, const T *x, const T *y, T *out, i64 count, double a, double b) {
    F f = formula<F>(a, b);
    GRID_STRIDE(i, count) out[i] = narrow<T>(f.apply(widen(x[position(of_x, i)]), widen(y[position(of_y, i)])));
}

// `dx` where `dout` is not 0: nothing flows into what does not count.
template <class S> __device__ __forceinline__ S where_it_counts(S dout, S dx) { return dout == S(0) ? S(0) : dx; }

// σ(x) (1 - σ(x)), relatively exact however saturated σ is.
template <class S> __device__ __forceinline__ S sigmoid_slope(S x) {
    S e = math::exp(-math::abs(x)), sum = S(1) + e;
    return e / (sum * sum);
}

// Within ± bound; NaN stays NaN.
template <class S> __device__ __forceinline__ S bounded(S x, double bound) {
    return x > S(bound) ? S(bound) : x < S(-bound) ? S(-bound) : x;
}

template <class S> __device__ __forceinline__ S at_least(S x, double bound) { return x < S(bound) ? S(bound) : x; }
