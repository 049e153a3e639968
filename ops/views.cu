#include "common.cuh"

// y[o, j, i] = x[o, j - start, i] where there is such an entry, else 0: x [outer, len, inner], y [outer, size, inner].
template <class T>
__global__ void between_zeros(const T *__restrict__ x, T *__restrict__ y, i64 start, i64 len, i64 size, i64 inner, i64 count) {
    GRID_STRIDE(at, count) {
        i64 row = at / inner, o = row / size, j = row % size - start;
        y[at] = j >= 0 && j < len ? x[(o * len + j) * inner + at % inner] : narrow<T>(Sum<T>(0));
    }
}
