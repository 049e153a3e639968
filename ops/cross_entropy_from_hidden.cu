#include "common.cuh"

// A block for each row of n logits: its loss and, where gradients are wanted, over the row (softmax - [target]) scale. A
// target of -1 is ignored.
template <class T>
__global__ void cross_entropy_rows(T *logits, const i64 *__restrict__ targets, double *__restrict__ losses, i64 n,
                                   double scale, int gradients) {
    typedef Sum<T> S;
    SHARED(S, scratch, [32]);
    T *row = logits + blockIdx.x * n;
    i64 target = targets[blockIdx.x];
    if (target < 0) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        for (i64 i = threadIdx.x; i < n; i += blockDim.x) row[i] = narrow<T>(S(0));
        return;
    }
    S top = -math::infinity<S>(), sum = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) top = math::max(top, widen(row[i]));
    top = block_reduce(top, scratch, Larger());
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += math::exp(widen(row[i]) - top);
    sum = block_reduce(sum, scratch, Plus());
    if (threadIdx.x == 0) losses[blockIdx.x] = double(top) + math::log(double(sum)) - double(widen(row[target]));
    if (!gradients) return;
    __syncthreads(); // the target's logit has been read
    S inverse = S(1) / sum;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
        S p = math::exp(widen(row[i]) - top) * inverse;
        row[i] = narrow<T>((p - (i == target ? S(1) : S(0))) * S(scale));
    }
}
