#include "common.cuh"

// A block for each row of d numbers.
template <class T>
__global__ void rms_norm_forward(const T *__restrict__ x, const T *__restrict__ weight, T *__restrict__ y,
                                 Sum<T> *__restrict__ rstd, i64 d, double eps) {
    typedef Sum<T> S;
    SHARED(S, scratch, [32]);
    const T *row = x + blockIdx.x * d;
    S squares = 0;
    for (i64 i = threadIdx.x; i < d; i += blockDim.x) {
        S value = widen(row[i]);
        squares += value * value;
    }
    squares = block_reduce(squares, scratch, Plus());
    S r = S(1) / math::sqrt(squares / S(d) + S(eps));
    if (threadIdx.x == 0) rstd[blockIdx.x] = r;
    for (i64 i = threadIdx.x; i < d; i += blockDim.x) {
        y[blockIdx.x * d + i] = narrow<T>(widen(row[i]) * r * widen(weight[i]));
    }
}

// `dx` holds dout before.
template <class T>
__global__ void rms_norm_backward(const T *__restrict__ x, const T *__restrict__ weight, const Sum<T> *__restrict__ rstd,
                                  T *dx, i64 d) {
    typedef Sum<T> S;
    SHARED(S, scratch, [32]);
    const T *row = x + blockIdx.x * d;
    T *to = dx + blockIdx.x * d;
    S dot = 0;
    for (i64 i = threadIdx.x; i < d; i += blockDim.x) dot += widen(row[i]) * widen(weight[i]) * widen(to[i]);
    dot = block_reduce(dot, scratch, Plus());
    S r = rstd[blockIdx.x], back = dot * r * r / S(d);
    for (i64 i = threadIdx.x; i < d; i += blockDim.x) {
        to[i] = narrow<T>(r * (widen(to[i]) * widen(weight[i]) - widen(row[i]) * back));
    }
}

// Partial sums of dout x rstd.
template <class T>
__global__ void rms_norm_dweight(const T *__restrict__ x, const T *__restrict__ dout, const Sum<T> *__restrict__ rstd,
                                 double *__restrict__ partial, i64 rows, i64 d, i64 step) {
    auto term = [=](i64 row, i64 i) { return double(widen(dout[row * d + i])) * widen(x[row * d + i]) * rstd[row]; };
    sum_columns(term, partial, rows, d, step);
}
