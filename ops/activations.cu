#include "elementwise.cuh"

struct Sigmoid : Formula {
    template <class S> __device__ S value(S x) const { return math::sigmoid(x); }
    template <class S> __device__ S apply(S dout, S x) const { return dout * sigmoid_slope(x); }
};

struct Silu : Formula {
    template <class S> __device__ S value(S x) const { return at_least(x, -1e9) * math::sigmoid(x); }
    template <class S> __device__ S apply(S dout, S x) const {
        S s = math::sigmoid(x);
        return dout * (s * (S(1) - s) * bounded(x, 1e9) + s);
    }
};

// x σ(x (c + d x²)), c and d of the tanh form.
struct Gelu : Formula {
    static __device__ double c() { return 2 * 0.7978845608028654; }
    static __device__ double d() { return c() * 0.044715; }
    template <class S> __device__ S gate(S x) const { return math::sigmoid(x * (S(c()) + S(d()) * x * x)); }
    template <class S> __device__ S value(S x) const { return at_least(x, -100) * gate(bounded(x, 100)); }
    template <class S> __device__ S apply(S dout, S x) const {
        x = bounded(x, 100);
        S s = gate(x);
        return dout * (s * (S(1) - s) * x * (S(c()) + S(3 * d()) * x * x) + s);
    }
};

// a is β.
struct Softplus : Formula {
    template <class S> __device__ S value(S x) const {
        return math::max(S(0), x) + math::log1p(math::exp(-math::abs(x * S(a)))) * S(1 / a);
    }
    template <class S> __device__ S apply(S dout, S x) const { return dout * math::sigmoid(x * S(a)); }
};

struct Relu : Formula {
    template <class S> __device__ S value(S x) const { return math::max(x, S(0)); }
    template <class S> __device__ S apply(S dout, S x) const { return x > S(0) ? dout : S(0); }
};

struct ReluSquared : Formula {
    template <class S> __device__ S value(S x) const {
        S y = math::max(x, S(0));
        return y * y;
    }
    template <class S> __device__ S apply(S dout, S x) const {
        S y = math::max(x, S(0));
        return dout * (y + y);
    }
};
