#include "common.cuh"

// A block for each row of n logits: their log-sum-exp, and the loss. A target of -1 is ignored.
template <class T>
__global__ void cross_entropy_forward(const T *__restrict__ x, const i64 *__restrict__ targets, double *__restrict__ lse,
                                      double *__restrict__ losses, i64 n) {
    SHARED(T, scratch, [32]);
    SHARED(double, wide, [32]);
    const T *row = x + blockIdx.x * n;
    i64 target = targets[blockIdx.x];
    T top = -math::infinity<T>();
    double sum = 0, total = 0;
    if (target >= 0) {
        for (i64 i = threadIdx.x; i < n; i += blockDim.x) top = math::max(top, row[i]);
        top = block_reduce(top, scratch, Larger());
        T shift = top == -math::infinity<T>() ? T(0) : top;
        for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += double(math::exp(row[i] - shift));
        total = double(shift) + math::log(block_reduce(sum, wide, Plus()));
    }
    if (threadIdx.x == 0) {
        lse[blockIdx.x] = total;
        losses[blockIdx.x] = target < 0 ? 0 : total - double(row[target]);
    }
}

// (softmax - [target]) weight, a weight for each row.
template <class T>
__global__ void cross_entropy_backward(const T *__restrict__ x, const i64 *__restrict__ targets, const double *__restrict__ lse,
                                       const T *__restrict__ weights, T *__restrict__ dx, i64 n) {
    const T *row = x + blockIdx.x * n;
    i64 target = targets[blockIdx.x];
    double total = lse[blockIdx.x];
    T high = T(total), low = T(total - double(high)), weight = weights[blockIdx.x];
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
        T shifted = (row[i] - high) - low, dlogit = math::exp(shifted) * weight;
        if (i == target) dlogit = math::expm1(shifted) * weight;
        dx[blockIdx.x * n + i] = target < 0 ? T(0) : dlogit;
    }
}
