#include "common.cuh"

// y[o, j, i] = x[o, ids[j], i], of x [outer, size, inner].
template <class T>
__global__ void take_rows(const T *__restrict__ x, const i64 *__restrict__ ids, T *__restrict__ y, i64 size, i64 chosen,
                          i64 inner, i64 count) {
    GRID_STRIDE(at, count) {
        i64 row = at / inner, o = row / chosen;
        y[at] = x[(o * size + ids[row % chosen]) * inner + at % inner];
    }
}

// y[o, id, i] = Σ x[o, order[p], i] over starts[id] <= p < starts[id + 1], of x [outer, chosen, inner], in that order.
template <class T>
__global__ void add_rows(const T *__restrict__ x, const i64 *__restrict__ starts, const i64 *__restrict__ order,
                         T *__restrict__ y, i64 size, i64 chosen, i64 inner, i64 count) {
    GRID_STRIDE(at, count) {
        i64 row = at / inner, o = row / size, id = row % size;
        double sum = 0;
        for (i64 p = starts[id]; p < starts[id + 1]; p++) sum += widen(x[(o * chosen + order[p]) * inner + at % inner]);
        y[at] = narrow<T>(Sum<T>(sum));
    }
}
