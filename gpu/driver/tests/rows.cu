// Sums of rows: a template over the type, static shared memory, a header of its own.
#include "common.cuh"
#include "add.cuh"

template <typename T>
__global__ void row_sum(const T *x, T *sums, int columns) {
    __shared__ T parts[64];
    T sum = 0;
    for (int column = threadIdx.x; column < columns; column += 64) {
        sum = add(sum, x[(long long)blockIdx.x * columns + column]);
    }
    parts[threadIdx.x] = sum;
    __syncthreads();
    for (int half = 32; half > 0; half /= 2) {
        if (threadIdx.x < half) parts[threadIdx.x] = add(parts[threadIdx.x], parts[threadIdx.x + half]);
        __syncthreads();
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = parts[0];
}

// More shared memory than a block has unless it is asked for, when launched with enough of it.
extern "C" __global__ void reverse(float *x, int count) {
    DYNAMIC_SHARED(float, room);
    for (int i = threadIdx.x; i < count; i += blockDim.x) room[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) x[i] = room[count - 1 - i];
}
