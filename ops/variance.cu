#include "common.cuh"

// A block for each row of n numbers: mean, and the sum of squared deviations from it times `scale`; what the mean loses by
// rounding is taken out.
template <class T>
__global__ void moments(const T *__restrict__ x, T *__restrict__ y, T *__restrict__ mean, i64 n, double scale) {
    SHARED(double, scratch, [32]);
    const T *row = x + blockIdx.x * n;
    double sum = 0, squares = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += double(row[i]);
    T m = T(block_reduce(sum, scratch, Plus()) / double(n));
    sum = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
        double d = double(row[i]) - double(m);
        sum += d;
        squares += d * d;
    }
    sum = block_reduce(sum, scratch, Plus());
    squares = block_reduce(squares, scratch, Plus()) - sum * sum / double(n);
    if (threadIdx.x == 0) {
        y[blockIdx.x] = T((squares < 0 ? 0 : squares) * scale); // NaN stays NaN
        mean[blockIdx.x] = m;
    }
}
