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

// Σ dout x rstd over `step` rows each, of 32 columns a block of 32 x 8 threads: partial[blockIdx.y][column].
template <class T>
__global__ void rms_norm_dweight(const T *__restrict__ x, const T *__restrict__ dout, const Sum<T> *__restrict__ rstd,
                                 double *__restrict__ partial, i64 rows, i64 d, i64 step) {
    SHARED(double, sums, [8][32]);
    i64 column = i64(blockIdx.x) * 32 + threadIdx.x;
    i64 first = i64(blockIdx.y) * step, end = math::min(rows, first + step);
    double sum = 0;
    if (column < d) {
        for (i64 row = first + threadIdx.y; row < end; row += 8) {
            sum += double(widen(dout[row * d + column])) * widen(x[row * d + column]) * rstd[row];
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < d) {
        for (int y = 1; y < 8; y++) sum += sums[y][threadIdx.x];
        partial[i64(blockIdx.y) * d + column] = sum;
    }
}
