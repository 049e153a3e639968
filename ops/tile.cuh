// Products of tiles: what attention-like operators are made of. A block of 128 threads has the sums of one tile in its
// registers, and the factors in shared memory, so many terms at a time. Factors are read through functions of a row and a
// term, and are 0 where there is none.
#pragma once
#include "common.cuh"

constexpr int THREADS = 128;
// Terms that lie in shared memory at a time: whole steps of tensor cores.
constexpr int DEPTH = 32;
// Rows, and columns, of a tile.
template <class T> constexpr int SIZE = sizeof(T) == 8 ? 32 : 64;

// The sums of a tile. A thread has those of 8 apart rows and 16 apart columns; or, where products are narrow, of factors
// rounded to BF16, a warp has 16 whole rows, as tensor cores give them.
template <class T, bool NARROW> struct TileSum {
    static constexpr int I = SIZE<T> / 8, J = SIZE<T> / 16;
    T sum[I][J];

    __device__ __forceinline__ TileSum() {
        for (int i = 0; i < I; i++)
            for (int j = 0; j < J; j++) sum[i][j] = 0;
    }
    static __device__ __forceinline__ int row(int i, int) { return threadIdx.x / 16 + 8 * i; }
    static __device__ __forceinline__ int column(int, int j) { return threadIdx.x % 16 + 16 * j; }

    // sum[m][n] += Σ_k a(m, k) b(k, n) over k < depth, at most DEPTH; 0 from there to the next multiple of 16.
    template <class A, class B> __device__ __forceinline__ void add(int depth, A a, B b) {
#pragma unroll 4
        for (int k = 0; k < depth; k++) {
            T x[I], y[J];
            for (int i = 0; i < I; i++) x[i] = a(row(i, 0), k);
            for (int j = 0; j < J; j++) y[j] = b(k, column(0, j));
            for (int i = 0; i < I; i++)
                for (int j = 0; j < J; j++) sum[i][j] = math::fma(x[i], y[j], sum[i][j]);
        }
    }
};

template <> struct TileSum<float, true> {
    static constexpr int I = SIZE<float> / 8, J = 4;
    float sum[I][J];

    __device__ __forceinline__ TileSum() {
        for (int i = 0; i < I; i++)
            for (int j = 0; j < J; j++) sum[i][j] = 0;
    }
    static __device__ __forceinline__ int row(int, int j) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + j / 2 * 8; }
    static __device__ __forceinline__ int column(int i, int j) { return 8 * i + threadIdx.x % 4 * 2 + j % 2; }

    template <class A, class B> __device__ __forceinline__ void add(int depth, A a, B b) {
        int m = row(0, 0), g = threadIdx.x % 32 / 4;
        for (int k = threadIdx.x % 4 * 2; k < depth; k += 16) {
            unsigned x[4] = {pack_bf16(a(m, k), a(m, k + 1)), pack_bf16(a(m + 8, k), a(m + 8, k + 1)),
                             pack_bf16(a(m, k + 8), a(m, k + 9)), pack_bf16(a(m + 8, k + 8), a(m + 8, k + 9))};
            for (int i = 0; i < I; i++) {
                int n = 8 * i + g;
                unsigned y[2] = {pack_bf16(b(k, n), b(k + 1, n)), pack_bf16(b(k + 8, n), b(k + 9, n))};
                mma_m16n8k16(sum[i], x, y);
            }
        }
    }
};

// f(row, column, sum) of every sum that the thread has.
template <class S, class F> __device__ __forceinline__ void each(S &tile, F f) {
    for (int i = 0; i < S::I; i++)
        for (int j = 0; j < S::J; j++) f(S::row(i, j), S::column(i, j), tile.sum[i][j]);
}

// f(row, column, sum, sum) of two tiles.
template <class S, class F> __device__ __forceinline__ void each(S &tile, S &other, F f) {
    for (int i = 0; i < S::I; i++)
        for (int j = 0; j < S::J; j++) f(S::row(i, j), S::column(i, j), tile.sum[i][j], other.sum[i][j]);
}

// The shared memory of factors.
template <class T> struct Factors {
    T (&left)[SIZE<T>][DEPTH + 1], (&right)[DEPTH][SIZE<T> + 1];
};
#define FACTORS(T, name)                                                                                                \
    SHARED(T, name##_left, [SIZE<T>][DEPTH + 1]);                                                                       \
    SHARED(T, name##_right, [DEPTH][SIZE<T> + 1]);                                                                      \
    Factors<T> name{name##_left, name##_right}

// Terms that are left, of at most DEPTH, for whole steps of tensor cores.
template <bool NARROW> __device__ __forceinline__ int terms(i64 left) {
    int some = int(math::min(i64(DEPTH), left));
    return NARROW ? (some + 15) / 16 * 16 : some;
}

// What lies in shared memory, of so many terms that are left.
template <class T, bool NARROW>
__device__ __forceinline__ void add_loaded(TileSum<T, NARROW> &sum, Factors<T> &factors, i64 left) {
    __syncthreads();
    sum.add(terms<NARROW>(left), [&](int m, int k) { return factors.left[m][k]; },
            [&](int k, int n) { return factors.right[k][n]; });
}

// Products of factors that both come from global memory, a(m, k) and b(k, n) or b(n, k). Which neighbours in memory are read
// by neighbouring threads is what tells the three apart.
template <class T, bool NARROW, class A, class B>
__device__ __forceinline__ void add_product_of_rows(TileSum<T, NARROW> &sum, Factors<T> &factors, i64 depth, A a, B b) {
    for (i64 from = 0; from < depth; from += DEPTH) {
        __syncthreads();
        for (int at = threadIdx.x; at < SIZE<T> * DEPTH; at += THREADS) {
            int row = at / DEPTH, k = at % DEPTH;
            bool is = from + k < depth;
            factors.left[row][k] = is ? a(row, from + k) : T(0);
            factors.right[k][row] = is ? b(row, from + k) : T(0);
        }
        add_loaded(sum, factors, depth - from);
    }
}
// The terms of the first factor lie side by side, and the columns of the second one.
template <class T, bool NARROW, class A, class B>
__device__ __forceinline__ void add_product_of_terms(TileSum<T, NARROW> &sum, Factors<T> &factors, i64 depth, A a, B b) {
    for (i64 from = 0; from < depth; from += DEPTH) {
        __syncthreads();
        for (int at = threadIdx.x; at < SIZE<T> * DEPTH; at += THREADS) {
            int row = at / DEPTH, k = at % DEPTH;
            factors.left[row][k] = from + k < depth ? a(row, from + k) : T(0);
            int term = at / SIZE<T>, n = at % SIZE<T>;
            factors.right[term][n] = from + term < depth ? b(from + term, n) : T(0);
        }
        add_loaded(sum, factors, depth - from);
    }
}
// The rows of the first factor lie side by side, and the columns of the second one: a sum of outer products.
template <class T, bool NARROW, class A, class B>
__device__ __forceinline__ void add_product_of_columns(TileSum<T, NARROW> &sum, Factors<T> &factors, i64 depth, A a, B b) {
    for (i64 from = 0; from < depth; from += DEPTH) {
        __syncthreads();
        for (int at = threadIdx.x; at < SIZE<T> * DEPTH; at += THREADS) {
            int term = at / SIZE<T>, n = at % SIZE<T>;
            bool is = from + term < depth;
            factors.left[n][term] = is ? a(n, from + term) : T(0);
            factors.right[term][n] = is ? b(from + term, n) : T(0);
        }
        add_loaded(sum, factors, depth - from);
    }
}

// The first factor from shared memory, and 0 beyond `depth`, the second one from global memory: sum[m][n] += Σ_k a(m, k) b(k, n).
template <class T, bool NARROW, class A, class B>
__device__ __forceinline__ void add_product(TileSum<T, NARROW> &sum, Factors<T> &factors, int depth, A a, B b) {
    for (int from = 0; from < depth; from += DEPTH) {
        __syncthreads();
        for (int at = threadIdx.x; at < DEPTH * SIZE<T>; at += THREADS) {
            int k = at / SIZE<T>, n = at % SIZE<T>;
            factors.right[k][n] = from + k < depth ? b(from + k, n) : T(0);
        }
        __syncthreads();
        sum.add(terms<NARROW>(depth - from), [&](int m, int k) { return a(m, from + k); },
                [&](int k, int n) { return factors.right[k][n]; });
    }
}

// Scores become weights under a running maximum, some threads of a warp for each row.
template <class T> struct RunningSoftmax {
    T (&tops)[SIZE<T>], (&sums)[SIZE<T>], (&shrink)[SIZE<T>];

    __device__ __forceinline__ void begin() {
        if (threadIdx.x < SIZE<T>) {
            tops[threadIdx.x] = -math::infinity<T>();
            sums[threadIdx.x] = 0;
        }
    }
    __device__ __forceinline__ void step(T (&scores)[SIZE<T>][SIZE<T> + 1]) {
        constexpr int EACH = THREADS / SIZE<T>;
        int row = threadIdx.x / EACH, part = threadIdx.x % EACH;
        T top = -math::infinity<T>(), total = 0, before = tops[row];
        for (int n = part; n < SIZE<T>; n += EACH) top = math::max(top, scores[row][n]);
        for (int by = EACH / 2; by > 0; by /= 2) top = math::max(top, __shfl_xor_sync(0xffffffffu, top, by));
        top = math::max(top, before);
        T base = top == -math::infinity<T>() ? T(0) : top;
        for (int n = part; n < SIZE<T>; n += EACH) {
            T weight = math::exp(scores[row][n] - base);
            scores[row][n] = weight;
            total += weight;
        }
        for (int by = EACH / 2; by > 0; by /= 2) total += __shfl_xor_sync(0xffffffffu, total, by);
        __syncwarp();
        if (part == 0) {
            T by = before == top ? T(1) : math::exp(before - base);
            shrink[row] = by;
            sums[row] = sums[row] * by + total;
            tops[row] = top;
        }
    }
};
