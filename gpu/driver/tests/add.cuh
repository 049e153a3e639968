template <typename T>
__device__ T add(T x, T y) {
    return x + y;
}
