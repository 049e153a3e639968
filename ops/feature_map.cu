#include "common.cuh"

enum { HYPERBOLIC, ELU1, TAYLOR2 };

// What depends on tau alone: its root, and the logarithm of the common factor.
template <class T> struct Factors {
    T root, log;
    __device__ __forceinline__ Factors(int map, i64 width, T tau) {
        i64 terms = map == HYPERBOLIC ? 2 * width : map == ELU1 ? width : 1;
        root = math::sqrt(tau);
        log = T(-0.5) * (tau + T(math::log(double(terms < 1 ? 1 : terms))));
    }
};

// The features of a pair of numbers a <= b come in this order.
__device__ __forceinline__ i64 pair_at(i64 a, i64 b, i64 width) { return 1 + width + a * width - a * (a - 1) / 2 + b - a; }

constexpr double DIAGONAL = 0.70710678118654752440;

// Of unit rows u [rows, width]; the head of a row is its number modulo that of heads. A warp for each row.
template <class T>
__global__ void feature_map(int map, const T *__restrict__ u, const T *__restrict__ tau, T *__restrict__ y, i64 rows, i64 heads,
                            i64 width, i64 features) {
    i64 row = i64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const T *from = u + row * width;
    T *to = y + row * features, t = tau[row % heads];
    Factors<T> f(map, width, t);
    T factor = math::exp(f.log);
    if (map == TAYLOR2 && threadIdx.x % 32 == 0) to[0] = factor;
    for (i64 a = threadIdx.x % 32; a < width; a += 32) {
        T x = from[a];
        if (map == HYPERBOLIC) {
            to[a] = math::exp(f.log + x * f.root);
            to[width + a] = math::exp(f.log - x * f.root);
        } else if (map == ELU1) {
            to[a] = factor * (x > T(0) ? x + T(1) : math::exp(x));
        } else {
            to[1 + a] = factor * f.root * x;
            for (i64 b = a; b < width; b++) to[pair_at(a, b, width)] = factor * t * x * from[b] * (a == b ? T(DIAGONAL) : T(1));
        }
    }
}

// The gradient of u, and of tau a share of each row.
template <class T>
__global__ void feature_map_backward(int map, const T *__restrict__ u, const T *__restrict__ tau, const T *__restrict__ y,
                                     const T *__restrict__ dy, T *__restrict__ du, double *__restrict__ dtau, i64 rows, i64 heads,
                                     i64 width, i64 features) {
    i64 row = i64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    u += row * width;
    y += row * features;
    dy += row * features;
    T t = tau[row % heads];
    Factors<T> f(map, width, t);
    T factor = math::exp(f.log);
    // Shares of the common factor, of its root, and of tau itself.
    double whole = 0, along = 0, pairs = 0;
    for (i64 i = threadIdx.x % 32; i < features; i += 32) whole += double(y[i]) * double(dy[i]);
    for (i64 a = threadIdx.x % 32; a < width; a += 32) {
        T x = u[a], slope;
        if (map == HYPERBOLIC) {
            slope = y[a] * dy[a] - y[width + a] * dy[width + a];
            along += double(x * slope);
            slope *= f.root;
        } else if (map == ELU1) {
            slope = dy[a] * (x > T(0) ? factor : y[a]); // below 0 the derivative of exp is the feature itself
        } else {
            T sum = f.root * dy[1 + a];
            along += double(factor * dy[1 + a] * x);
            for (i64 b = 0; b < width; b++) {
                T d = b < a ? dy[pair_at(b, a, width)] : dy[pair_at(a, b, width)];
                if (b == a) d *= T(2 * DIAGONAL);
                sum += t * d * u[b];
                pairs += double(factor * d * x * u[b]) / 2; // each pair twice
            }
            slope = factor * sum;
        }
        du[row * width + a] = slope;
    }
    whole = warp_reduce(whole, Plus());
    along = warp_reduce(along, Plus());
    pairs = warp_reduce(pairs, Plus());
    if (threadIdx.x % 32 == 0) dtau[row] = -0.5 * whole + along / (2 * double(f.root)) + pairs;
}
