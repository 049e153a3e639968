#include "common.cuh"

// Rows of [B, T, H, width] that lie so far apart, themselves without gaps.
struct Rows {
    i64 time, heads, width, strides[3];
};

template <class T> __device__ __forceinline__ const T *row_of(const T *x, const Rows &rows, i64 row) {
    i64 token = row / rows.heads;
    return x + token / rows.time * rows.strides[0] + token % rows.time * rows.strides[1] + row % rows.heads * rows.strides[2];
}

template <class T> __device__ __forceinline__ T inverse_norm(const T *x, i64 width, double eps) {
    T squares = 0;
    for (i64 c = threadIdx.x % 32; c < width; c += 32) squares = math::fma(x[c], x[c], squares);
    return T(1) / math::sqrt(warp_reduce(squares, Plus()) + T(eps));
}

// A warp for each row.
template <class T>
__global__ void unit_rows(Rows rows, const T *__restrict__ x, const T *__restrict__ factors, T *__restrict__ y, i64 count, double eps) {
    i64 row = i64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= count) return;
    const T *from = row_of(x, rows, row);
    T factor = inverse_norm(from, rows.width, eps) * (factors ? factors[row % rows.heads] : T(1));
    for (i64 c = threadIdx.x % 32; c < rows.width; c += 32) y[row * rows.width + c] = from[c] * factor;
}

// `dx` holds dout before; `along` gets x̂·dout of each row.
template <class T>
__global__ void unit_rows_backward(Rows rows, const T *__restrict__ x, const T *__restrict__ factors, T *dx,
                                   T *__restrict__ along, i64 count, double eps) {
    i64 row = i64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= count) return;
    const T *from = row_of(x, rows, row);
    T *to = dx + row * rows.width;
    T r = inverse_norm(from, rows.width, eps), sum = 0;
    for (i64 c = threadIdx.x % 32; c < rows.width; c += 32) sum = math::fma(from[c], to[c], sum);
    sum = r * warp_reduce(sum, Plus());
    if (threadIdx.x % 32 == 0) along[row] = sum;
    T factor = r * (factors ? factors[row % rows.heads] : T(1));
    for (i64 c = threadIdx.x % 32; c < rows.width; c += 32) to[c] = factor * (to[c] - from[c] * r * sum);
}
