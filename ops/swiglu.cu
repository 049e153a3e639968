#include "elementwise.cuh"

struct Gated : Formula {
    template <class S> __device__ S apply(S gate, S up) const { return gate * math::sigmoid(gate) * up; }
};

// `dup` holds dout before.
template <class T>
__global__ void swiglu_backward(const T *__restrict__ gate, const T *__restrict__ up, T *dup, T *__restrict__ dgate, i64 count) {
    typedef Sum<T> S;
    GRID_STRIDE(i, count) {
        S g = widen(gate[i]), dout = widen(dup[i]);
        // σ(g) and σ(-g) from one exponential that cannot overflow.
        S e = math::exp(-math::abs(g)), large = S(1) / (S(1) + e), small = e * large;
        S s = g < S(0) ? small : large, rest = g < S(0) ? large : small;
        dgate[i] = narrow<T>(dout * widen(up[i]) * s * (S(1) + g * rest));
        dup[i] = narrow<T>(dout * g * s);
    }
}
