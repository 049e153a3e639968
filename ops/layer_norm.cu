#include "common.cuh"

// The mean in two parts, so that small deviations from a large one keep their digits.
template <class T> struct Normal {
    T high, low, rstd;
    __device__ __forceinline__ Normal(double mean, T rstd) : high(T(mean)), low(T(mean - double(T(mean)))), rstd(rstd) {}
    __device__ __forceinline__ T operator()(T x) const { return ((x - high) - low) * rstd; }
};

// A block for each row of d numbers; `bias` may be null.
template <class T>
__global__ void layer_norm_forward(const T *__restrict__ x, const T *__restrict__ weight, const T *__restrict__ bias,
                                   T *__restrict__ y, double *__restrict__ mean, T *__restrict__ rstd, i64 d, double eps) {
    SHARED(T, scratch, [32]);
    const T *row = x + blockIdx.x * d;
    T sum = 0, rest = 0, squares = 0;
    for (i64 i = threadIdx.x; i < d; i += blockDim.x) sum += row[i];
    T near = block_reduce(sum, scratch, Plus()) / T(d);
    for (i64 i = threadIdx.x; i < d; i += blockDim.x) {
        T deviation = row[i] - near;
        rest += deviation;
        squares = math::fma(deviation, deviation, squares);
    }
    double off = double(block_reduce(rest, scratch, Plus())) / double(d);
    double variance = double(block_reduce(squares, scratch, Plus())) / double(d) - off * off;
    double m = double(near) + off;
    T r = T(1 / math::sqrt((variance < 0 ? 0 : variance) + eps));
    if (threadIdx.x == 0) {
        mean[blockIdx.x] = m;
        rstd[blockIdx.x] = r;
    }
    Normal<T> normal(m, r);
    for (i64 i = threadIdx.x; i < d; i += blockDim.x) {
        y[blockIdx.x * d + i] = math::fma(normal(row[i]), weight[i], bias ? bias[i] : T(0));
    }
}

// `dx` holds dout before.
template <class T>
__global__ void layer_norm_backward(const T *__restrict__ x, const T *__restrict__ weight, const double *__restrict__ mean,
                                    const T *__restrict__ rstd, T *dx, i64 d) {
    SHARED(T, scratch, [32]);
    const T *row = x + blockIdx.x * d;
    T *to = dx + blockIdx.x * d;
    Normal<T> normal(mean[blockIdx.x], rstd[blockIdx.x]);
    T sum = 0, dot = 0;
    for (i64 i = threadIdx.x; i < d; i += blockDim.x) {
        T g = to[i] * weight[i];
        sum += g;
        dot = math::fma(normal(row[i]), g, dot);
    }
    sum = block_reduce(sum, scratch, Plus()) / T(d);
    dot = block_reduce(dot, scratch, Plus()) / T(d);
    for (i64 i = threadIdx.x; i < d; i += blockDim.x) {
        to[i] = normal.rstd * (to[i] * weight[i] - math::fma(normal(row[i]), dot, sum));
    }
}

// Partial sums of dout x̂.
template <class T>
__global__ void layer_norm_dweight(const T *__restrict__ x, const T *__restrict__ dout, const double *__restrict__ mean,
                                   const T *__restrict__ rstd, double *__restrict__ partial, i64 rows, i64 d, i64 step) {
    auto term = [=](i64 row, i64 i) { return double(dout[row * d + i]) * double(Normal<T>(mean[row], rstd[row])(x[row * d + i])); };
    sum_columns(term, partial, rows, d, step);
}
