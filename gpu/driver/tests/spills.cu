// Wants 96 values in the 64 registers that a thread of so large a block can have.
__global__ void __launch_bounds__(1024) crowded(float *x, int rounds) {
    float all[96];
#pragma unroll
    for (int i = 0; i < 96; i++) all[i] = x[i * 1024 + threadIdx.x];
    for (int round = 0; round < rounds; round++) {
#pragma unroll
        for (int i = 0; i < 96; i++) all[i] = all[i] * all[(i + 7) % 96] + x[round];
    }
#pragma unroll
    for (int i = 0; i < 96; i++) x[i * 1024 + threadIdx.x] = all[i];
}
