#include "elementwise.cuh"

struct Add : Formula {
    template <class S> __device__ S apply(S x, S y) const { return x + y; }
};
struct Sub : Formula {
    template <class S> __device__ S apply(S x, S y) const { return x - y; }
};
struct Mul : Formula {
    template <class S> __device__ S apply(S x, S y) const { return x * y; }
};
struct Div : Formula {
    template <class S> __device__ S apply(S x, S y) const { return x / y; }
};
struct NegDiv : Formula {
    template <class S> __device__ S apply(S x, S y) const { return -(x / y); }
};
