#include "common.cuh"

// A block for each row of n numbers: y = shift + ln sum, sum = Σ exp(x - shift).
template <class T>
__global__ void logsumexp_forward(const T *__restrict__ x, T *__restrict__ y, double *__restrict__ shift, double *__restrict__ sum, i64 n) {
    SHARED(T, scratch, [32]);
    SHARED(double, wide, [32]);
    const T *row = x + blockIdx.x * n;
    T top = -math::infinity<T>();
    double total = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) top = math::max(top, row[i]);
    top = block_reduce(top, scratch, Larger());
    // Of a row without a finite maximum the plain sum is 0, infinite or NaN, as it should be.
    T centre = top - top == T(0) ? top : T(0);
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) total += double(math::exp(row[i] - centre));
    total = block_reduce(total, wide, Plus());
    if (threadIdx.x == 0) {
        shift[blockIdx.x] = double(centre);
        sum[blockIdx.x] = total;
        y[blockIdx.x] = T(double(centre) + math::log(total));
    }
}

template <class T>
__global__ void logsumexp_backward(const T *__restrict__ x, const double *__restrict__ shift, const double *__restrict__ sum,
                                   const T *__restrict__ dout, T *__restrict__ dx, i64 n) {
    SHARED(double, scratch, [32]);
    const T *row = x + blockIdx.x * n;
    T *to = dx + blockIdx.x * n, centre = T(shift[blockIdx.x]), infinity = math::infinity<T>();
    double total = sum[blockIdx.x], d = double(dout[blockIdx.x]);
    if (total == double(infinity)) {
        // The infinite elements share it.
        double count = 0;
        for (i64 i = threadIdx.x; i < n; i += blockDim.x) count += row[i] == infinity ? 1 : 0;
        count = block_reduce(count, scratch, Plus());
        for (i64 i = threadIdx.x; i < n; i += blockDim.x) to[i] = row[i] == infinity ? T(d / count) : T(0);
        return;
    }
    T scale = total == 0 ? T(0) : T(d / total);
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) to[i] = total == 0 ? T(0) : math::exp(row[i] - centre) * scale;
}
