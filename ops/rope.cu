#include "common.cuh"

// Rotates [B, T, H, K], from x to y, which may be the same. A thread for each pair of each position, for all entries of the
// batch and heads, so that its angle is computed once, in double precision. Row t is at positions[t], or without those at
// first + t step.
template <class T>
__global__ void rope(const T *x, T *y, const i64 *__restrict__ positions, i64 first, i64 step, double base, i64 batch,
                     i64 time, i64 heads, i64 width) {
    typedef Sum<T> S;
    i64 half = width / 2;
    GRID_STRIDE(at, time * half) {
        i64 t = at / half, i = at % half;
        double position = double(positions ? positions[t] : first + t * step);
        double angle = position * math::pow(base, -2.0 * double(i) / double(width));
        S sine = S(math::sin(angle)), cosine = S(math::cos(angle));
        for (i64 row = 0; row < batch * heads; row++) {
            i64 from = ((row / heads * time + t) * heads + row % heads) * width + i;
            S a = widen(x[from]), b = widen(x[from + half]);
            y[from] = narrow<T>(a * cosine - b * sine);
            y[from + half] = narrow<T>(a * sine + b * cosine);
        }
    }
}
