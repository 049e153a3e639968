#include "elementwise.cuh"

struct Exp : Formula {
    template <class S> __device__ S value(S x) const { return math::exp(x); }
    template <class S> __device__ S apply(S dout, S y) const { return where_it_counts(dout, dout * y); }
};

struct Log : Formula {
    template <class S> __device__ S value(S x) const { return math::log(x); }
    template <class S> __device__ S apply(S dout, S x) const { return where_it_counts(dout, dout / x); }
};

struct Sqrt : Formula {
    template <class S> __device__ S value(S x) const { return math::sqrt(x); }
    template <class S> __device__ S apply(S dout, S y) const { return where_it_counts(dout, dout / (y + y)); }
};

struct Abs : Formula {
    template <class S> __device__ S value(S x) const { return x < S(0) ? -x : x + S(0); }
    template <class S> __device__ S apply(S dout, S x) const { return x > S(0) ? dout : x < S(0) ? -dout : S(0); }
};

// Between a and b.
struct Clamp : Formula {
    template <class S> __device__ S value(S x) const { return x < S(a) ? S(a) : x > S(b) ? S(b) : x; }
    template <class S> __device__ S apply(S dout, S x) const { return x >= S(a) && x <= S(b) ? dout : S(0); }
};

struct Tanh : Formula {
    template <class S> __device__ S value(S x) const { return math::tanh(x); }
    template <class S> __device__ S apply(S dout, S x) const { return dout * S(4) * sigmoid_slope(x + x); }
};

struct Scale : Formula {
    template <class S> __device__ S value(S x) const { return x * S(a); }
};

struct Shift : Formula {
    template <class S> __device__ S value(S x) const { return x + S(a); }
};
