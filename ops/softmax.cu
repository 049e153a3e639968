#include "common.cuh"

// A block for each row of n numbers. With `log`, the logarithm.
template <class T> __global__ void softmax_forward(const T *__restrict__ x, T *__restrict__ y, i64 n, int log) {
    typedef Sum<T> S;
    SHARED(S, scratch, [32]);
    const T *row = x + blockIdx.x * n;
    T *to = y + blockIdx.x * n;
    S top = -math::infinity<S>(), sum = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) top = math::max(top, widen(row[i]));
    top = block_reduce(top, scratch, Larger());
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += math::exp(widen(row[i]) - top);
    sum = block_reduce(sum, scratch, Plus());
    S ln = math::log(sum), scale = S(1) / sum;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
        S shifted = widen(row[i]) - top;
        to[i] = narrow<T>(log ? shifted - ln : math::exp(shifted) * scale);
    }
}

// `dx` holds dout before.
template <class T> __global__ void softmax_backward(const T *__restrict__ y, T *dx, i64 n, int log) {
    typedef Sum<T> S;
    SHARED(S, scratch, [32]);
    const T *row = y + blockIdx.x * n;
    T *to = dx + blockIdx.x * n;
    S sum = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += widen(to[i]) * (log ? S(1) : widen(row[i]));
    sum = block_reduce(sum, scratch, Plus());
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
        S dout = widen(to[i]), value = widen(row[i]);
        to[i] = narrow<T>(log ? dout - math::exp(value) * sum : value * (dout - sum));
    }
}
