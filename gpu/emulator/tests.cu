#include "common.cuh"

// The softmax of rows of n numbers, a block for each.
template <class T> __global__ void row_softmax(const T *__restrict__ x, T *__restrict__ y, int n) {
    SHARED(Sum<T>, scratch, [32]);
    const T *row = x + i64(blockIdx.x) * n;
    Sum<T> top = -math::infinity<Sum<T>>(), sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) top = math::max(top, widen(row[i]));
    top = block_reduce(top, scratch, Larger());
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += math::exp(widen(row[i]) - top);
    sum = block_reduce(sum, scratch, Plus());
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        y[i64(blockIdx.x) * n + i] = narrow<T>(math::exp(widen(row[i]) - top) / sum);
    }
}

// C[16, 8] = A[16, 16] B[16, 8] of one warp.
__global__ void tile_product(const bf16 *a, const bf16 *b, float *c) {
    int g = threadIdx.x / 4, p = threadIdx.x % 4 * 2;
    auto pair = [](bf16 low, bf16 high) { return unsigned(low.bits) | unsigned(high.bits) << 16; };
    unsigned of_a[4], of_b[2];
    for (int i = 0; i < 4; i++) {
        const bf16 *from = a + (g + i % 2 * 8) * 16 + p + i / 2 * 8;
        of_a[i] = pair(from[0], from[1]);
    }
    for (int i = 0; i < 2; i++) {
        of_b[i] = pair(b[(p + i * 8) * 8 + g], b[(p + i * 8 + 1) * 8 + g]);
    }
    float d[4] = {0, 0, 0, 0};
    mma_m16n8k16(d, of_a, of_b);
    for (int i = 0; i < 4; i++) c[(g + i / 2 * 8) * 8 + p + i % 2] = d[i];
}

__global__ void count(unsigned *counter, float *sum) {
    atomicAdd(counter, 1u);
    atomicAdd(sum, 0.5f);
    SHARED(int, most, [1]);
    if (threadIdx.x == 0) most[0] = -1;
    __syncthreads();
    atomicMax(most, int(threadIdx.x));
    __syncthreads();
    if (threadIdx.x == 0) atomicMax(counter + 1, unsigned(most[0]));
}

__global__ void round_all(const float *x, bf16 *y, i64 n) {
    GRID_STRIDE(i, n) y[i] = round_to_bf16(x[i]);
}

__global__ void lanes(int *out) {
    int lane = threadIdx.x % 32;
    out[threadIdx.x] = __shfl_sync(~0u, lane, 5) + 100 * __shfl_up_sync(~0u, lane, 1) + 10000 * __shfl_down_sync(~0u, lane, 2);
    unsigned votes = __ballot_sync(~0u, lane % 3 == 0);
    if (lane == 0) out[threadIdx.x] = int(__popc(votes));
}

__global__ void passes_a_struct(float2 pair, double x, float *out) {
    DYNAMIC_SHARED(float, room);
    room[threadIdx.x] = pair.x;
    __syncthreads();
    out[threadIdx.x] = room[blockDim.x - 1 - threadIdx.x] + pair.y * float(x);
}

// --- One fault each ---------------------------------------------------------------------------------------------------

__global__ void reads_beyond(const float *x, float *y, int at) { y[0] = x[at]; }
__global__ void writes_before(float *y, int by) { *(y - by) = 1; }
__global__ void writes_beyond_shared(float *y, int at) {
    SHARED(float, first, [8]);
    SHARED(float, second, [8]);
    if (threadIdx.x < 8) second[threadIdx.x] = first[threadIdx.x] = 0;
    __syncthreads();
    float *start = first;
    if (threadIdx.x == 3) start[at] = 1;
    __syncthreads();
    y[threadIdx.x] = first[threadIdx.x % 8] + second[threadIdx.x % 8];
}
__global__ void writes_beyond_dynamic(float *y, int at) {
    DYNAMIC_SHARED(float, room);
    room[threadIdx.x + at] = 1;
    y[threadIdx.x] = room[threadIdx.x + at];
}
__global__ void reads_what_nothing_wrote(float *y) {
    SHARED(float, room, [64]);
    if (threadIdx.x < 32) room[threadIdx.x] = 1;
    __syncthreads();
    y[threadIdx.x] = room[threadIdx.x];
}
__global__ void races(float *y) {
    SHARED(float, room, [64]);
    room[threadIdx.x] = 1;
    y[threadIdx.x] = room[0];
}
__global__ void overwrites_what_others_read(float *y) {
    SHARED(float, room, [64]);
    room[threadIdx.x] = 1;
    __syncthreads();
    float x = room[63 - threadIdx.x];
    room[threadIdx.x] = x + 1;
    y[threadIdx.x] = x;
}
__global__ void in_its_warp(float *y) {
    SHARED(float, room, [64]);
    room[threadIdx.x] = float(threadIdx.x);
    __syncwarp();
    y[threadIdx.x] = room[threadIdx.x ^ 31];
}
__global__ void increments_together(float *y) {
    SHARED(float, sum, [1]);
    if (threadIdx.x == 0) sum[0] = 0;
    __syncthreads();
    sum[0] += 1;
    __syncthreads();
    y[threadIdx.x] = sum[0];
}
__global__ void in_turns_in_its_warp(float *y) {
    SHARED(float, sum, [1]);
    if (threadIdx.x == 0) sum[0] = 1;
    __syncwarp();
    float seen = sum[0];
    __syncwarp();
    if (threadIdx.x == 0) sum[0] = sum[0] + 1;
    __syncwarp();
    y[threadIdx.x] = seen + sum[0];
}
__global__ void diverges(float *y) {
    if (threadIdx.x < 40) __syncthreads();
    y[threadIdx.x] = 1;
}
__global__ void diverges_between_two(float *y) {
    if (threadIdx.x < 40) {
        __syncthreads();
    } else {
        y[threadIdx.x] = 1;
        __syncthreads();
    }
}
__global__ void leaves_its_warp(float *y) {
    float x = 1;
    if (threadIdx.x != 7) x = __shfl_xor_sync(0xffffffffu, x, 1);
    y[threadIdx.x] = x;
}
__global__ void is_misaligned(float *y) { *reinterpret_cast<float4 *>(y + 1) = float4{1, 2, 3, 4}; }
__global__ void gives_up(float *y) {
    if (y[0] != 12345) __trap();
}
__global__ void overflows(float *y, int n) { y[(n * n) % 3] = 1; }
__global__ void leaves_its_array(float *y, int n) {
    float own[4] = {1, 2, 3, 4};
    for (int i = 0; i < 4; i++) own[i] += y[i];
    y[0] = own[n];
}
