#include "common.cuh"

// A thread for each line along the middle axis of x [outer, n, inner]: its greatest element, NaN above all, and where the first
// of those is.
template <class T>
__global__ void max_forward(const T *__restrict__ x, T *__restrict__ y, i64 *__restrict__ index, i64 n, i64 inner, i64 lines) {
    GRID_STRIDE(line, lines) {
        const T *at = x + line / inner * n * inner + line % inner;
        T top = at[0];
        i64 found = 0;
        for (i64 r = 1; r < n; r++) {
            T value = at[r * inner];
            if (value > top || (value != value && top == top)) {
                top = value;
                found = r;
            }
        }
        y[line] = top;
        index[line] = found;
    }
}

// Of x's shape: dout where the greatest was, 0 elsewhere.
template <class T>
__global__ void max_backward(const T *__restrict__ dout, const i64 *__restrict__ index, T *__restrict__ dx, i64 n, i64 inner, i64 count) {
    GRID_STRIDE(at, count) {
        i64 line = at / (n * inner) * inner + at % inner;
        dx[at] = index[line] == at / inner % n ? dout[line] : T(0);
    }
}
