#include "elementwise.cuh"

// x^n by squaring.
template <class S> __device__ __forceinline__ S whole_power(S x, int n) {
    S result = 1, square = x;
    for (int rest = n < 0 ? -n : n; rest > 0; rest /= 2) {
        if (rest % 2 == 1) result = result * square;
        square = square * square;
    }
    return n < 0 ? S(1) / result : result;
}

// a is the exponent, whole.
struct WholePow : Formula {
    template <class S> __device__ S value(S x) const { return whole_power(x, int(a)); }
    template <class S> __device__ S apply(S dout, S x) const {
        return a == 0 ? S(0) : where_it_counts(dout, dout * S(a) * whole_power(x, int(a) - 1));
    }
};

// a is twice the exponent, odd.
struct HalfPow : Formula {
    template <class S> __device__ S value(S x) const { return whole_power(math::sqrt(x), int(a)); }
    template <class S> __device__ S apply(S dout, S x) const {
        return where_it_counts(dout, dout * S(a / 2) * whole_power(math::sqrt(x), int(a) - 2));
    }
};

// a is the exponent.
struct Pow : Formula {
    template <class S> __device__ S value(S x) const { return S(math::pow(double(x), a)); }
    template <class S> __device__ S apply(S dout, S x) const {
        return where_it_counts(dout, dout * S(a) * S(math::pow(double(x), a - 1)));
    }
};
