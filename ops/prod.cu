#include "common.cuh"

// A thread for each line along the middle axis of x [outer, n, inner].
template <class T> __global__ void prod_forward(const T *__restrict__ x, T *__restrict__ y, i64 n, i64 inner, i64 lines) {
    GRID_STRIDE(line, lines) {
        const T *at = x + line / inner * n * inner + line % inner;
        double product = 1;
        for (i64 r = 0; r < n; r++) product *= double(at[r * inner]);
        y[line] = T(product);
    }
}

// dout times the products of all before each element, kept in `before` of x's shape, times those of all behind it.
template <class T>
__global__ void prod_backward(const T *__restrict__ x, const T *__restrict__ dout, double *before, T *__restrict__ dx, i64 n,
                              i64 inner, i64 lines) {
    GRID_STRIDE(line, lines) {
        i64 start = line / inner * n * inner + line % inner;
        double product = double(dout[line]);
        for (i64 r = 0; r < n; r++) {
            before[start + r * inner] = product;
            product *= double(x[start + r * inner]);
        }
        product = 1;
        for (i64 r = n - 1; r >= 0; r--) {
            dx[start + r * inner] = T(before[start + r * inner] * product);
            product *= double(x[start + r * inner]);
        }
    }
}
