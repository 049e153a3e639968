#include "common.cuh"

// A thread for each line along the middle axis of x [outer, n, inner].
template <class T>
__global__ void running_sums(const T *__restrict__ x, T *__restrict__ y, i64 n, i64 inner, int from_end, i64 lines) {
    GRID_STRIDE(line, lines) {
        i64 start = line / inner * n * inner + line % inner;
        double sum = 0;
        for (i64 r = 0; r < n; r++) {
            i64 at = start + (from_end ? n - 1 - r : r) * inner;
            sum += double(x[at]);
            y[at] = T(sum);
        }
    }
}
