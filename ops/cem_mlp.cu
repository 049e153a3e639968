#include "common.cuh"

// From u over `du` and da over `dgate`, all [N, F]: a = SiLU(u) gate, du = da gate SiLU'(u), dgate = da SiLU(u).
template <class T> __global__ void cem_mlp_slopes(const T *__restrict__ gate, T *__restrict__ a, T *du, T *dgate, i64 count) {
    typedef Sum<T> S;
    GRID_STRIDE(i, count) {
        S g = widen(gate[i]), u = widen(du[i]), da = widen(dgate[i]), s = math::sigmoid(u), silu = u * s;
        a[i] = narrow<T>(silu * g);
        du[i] = narrow<T>(da * g * s * (S(1) + u * (S(1) - s)));
        dgate[i] = narrow<T>(da * silu);
    }
}
