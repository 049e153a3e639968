// The tensors' own operations: copies of views with conversion, filling, accumulating, sums of rows.
#include "common.cuh"

template <class From, class To> struct Convert {
    static __device__ __forceinline__ To of(From x) { return narrow<To>(Sum<To>(widen(x))); }
};
template <class T> struct Convert<T, T> {
    static __device__ __forceinline__ T of(T x) { return x; }
};

// y[i] = x at place i of the view.
template <class From, class To> __global__ void copy(View view, const From *__restrict__ x, To *__restrict__ y, i64 count) {
    GRID_STRIDE(i, count) y[i] = Convert<From, To>::of(x[position(view, i)]);
}

// To the place of a part within each row.
template <class T> __global__ void put(const T *__restrict__ x, T *__restrict__ y, i64 piece, i64 row, i64 start, i64 count) {
    GRID_STRIDE(i, count) y[i / piece * row + start + i % piece] = x[i];
}

template <class T> struct Constant {
    static __device__ __forceinline__ T of(double x) { return T(x); }
};
template <> struct Constant<bf16> {
    static __device__ __forceinline__ bf16 of(double x) { return round_to_bf16(float(x)); }
};

template <class T> __global__ void fill(T *__restrict__ y, double value, i64 count) {
    GRID_STRIDE(i, count) y[i] = Constant<T>::of(value);
}

template <class T> __global__ void add_assign(T *__restrict__ sum, const T *__restrict__ x, i64 count) {
    GRID_STRIDE(i, count) sum[i] = narrow<T>(widen(sum[i]) + widen(x[i]));
}

template <class T> __global__ void scale(T *__restrict__ x, double factor, i64 count) {
    GRID_STRIDE(i, count) x[i] = narrow<T>(widen(x[i]) * Sum<T>(factor));
}

// A sum of squares for each block.
template <class T> __global__ void sum_squares(const T *__restrict__ x, double *__restrict__ partial, i64 count) {
    SHARED(double, scratch, [32]);
    double sum = 0;
    GRID_STRIDE(i, count) sum += double(widen(x[i])) * double(widen(x[i]));
    sum = block_reduce(sum, scratch, Plus());
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

template <class T>
__global__ void sum_rows(const T *__restrict__ x, double *__restrict__ partial, i64 rows, i64 columns, i64 step) {
    sum_columns([=](i64 row, i64 column) { return double(widen(x[row * columns + column])); }, partial, rows, columns, step);
}

template <class T> __global__ void sum_parts(const double *__restrict__ partial, T *__restrict__ y, i64 parts, i64 columns) {
    GRID_STRIDE(column, columns) {
        double sum = 0;
        for (i64 part = 0; part < parts; part++) sum += partial[part * columns + column];
        y[column] = narrow<T>(Sum<T>(sum));
    }
}
