#include "common.cuh"

// Rows of contiguous [B, T, S], each times 1 / sqrt(S (i+1)) for its position i, of which the first is `start`.
template <class T> __global__ void scale_by_position(const T *__restrict__ x, T *__restrict__ y, i64 count, i64 time, i64 width, i64 start) {
    GRID_STRIDE(i, count) y[i] = x[i] * T(1 / math::sqrt(double(width) * double(start + i / width % time + 1)));
}
