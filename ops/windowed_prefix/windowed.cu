// WANGO's gate: exact weights near by, products of features far away. Tiles of queries meet the keys from `lag` tiles before
// them on pair by pair; what lies before that is in running sums of tiles (prefix.cu). Blocks as in attention.cu.
#include "tile.cuh"

// Strides: from an entry of the batch, a token and a head to the next; rows themselves lie without gaps. q is tau q̂, k is k̂.
struct Windowed {
    i64 heads, time, window, lag, width, features, values, q[3], k[3], phi_q[3], phi_k[3], g[3], v[3];
};

#define OPERANDS(T, V)                                                                                                  \
    Windowed p, const T *__restrict__ q, const T *__restrict__ k, const T *__restrict__ phi_q, const T *__restrict__ phi_k, \
        const V *__restrict__ g, const T *__restrict__ tau

template <class T, class V> struct Head {
    const Windowed &p;
    i64 n, batch, head, tiles;
    const T *q, *k, *phi_q, *phi_k;
    const V *g;
    T tau;

    __device__ __forceinline__ Head(const Windowed &p, i64 n, const T *q, const T *k, const T *phi_q, const T *phi_k, const V *g,
                                    const T *tau)
        : p(p), n(n), batch(n / p.heads), head(n % p.heads), tiles((p.time + SIZE<T> - 1) / SIZE<T>), q(of(q, p.q)), k(of(k, p.k)),
          phi_q(of(phi_q, p.phi_q)), phi_k(of(phi_k, p.phi_k)), g(of(g, p.g)), tau(tau[head]) {}
    template <class X> __device__ __forceinline__ const X *of(const X *x, const i64 *strides) const {
        return x + batch * strides[0] + head * strides[2];
    }
    // A number of a row, 0 where there is none.
    template <class X> __device__ __forceinline__ T at(const X *x, const i64 *strides, i64 token, i64 c, i64 width) const {
        return token < p.time && c < width ? widen(x[token * strides[1] + c]) : T(0);
    }
    // Rows of contiguous [B, T, H, ..], and of [B, H, T].
    __device__ __forceinline__ i64 row(i64 i) const { return (batch * p.time + i) * p.heads + head; }
    __device__ __forceinline__ i64 of_head(i64 i) const { return n * p.time + i; }
    // The running sums of so many numbers that a tile meets; null where there are none.
    __device__ __forceinline__ const T *state(const T *states, i64 tile, i64 size) const {
        return tile < 0 || tile >= tiles ? nullptr : states + (n * tiles + tile) * size;
    }
    __device__ __forceinline__ bool is_pair(i64 i, i64 j) const { return i < p.time && j <= i; }
    __device__ __forceinline__ bool is_near(i64 i, i64 j) const { return j > i - p.window; }
    // Whether a tile of queries and one of keys have pairs of either sort.
    __device__ __forceinline__ bool some_near(i64 i, i64 j) const { return is_near(i, j + SIZE<T> - 1); }
    __device__ __forceinline__ bool some_far(i64 i, i64 j) const { return !is_near(i + SIZE<T> - 1, j); }

    // Scores, and products of features, as far as there are pairs for them.
    template <bool NARROW>
    __device__ __forceinline__ void pairs(i64 i, i64 j, Factors<T> &factors, TileSum<T, NARROW> &scores, TileSum<T, NARROW> &far) const {
        if (some_near(i, j)) {
            add_product_of_rows(scores, factors, p.width, [&](int m, i64 c) { return at(q, p.q, i + m, c, p.width); },
                                [&](int n, i64 c) { return at(k, p.k, j + n, c, p.width); });
        }
        if (some_far(i, j)) {
            add_product_of_rows(far, factors, p.features, [&](int m, i64 c) { return at(phi_q, p.phi_q, i + m, c, p.features); },
                                [&](int n, i64 c) { return at(phi_k, p.phi_k, j + n, c, p.features); });
        }
    }
};

// The gate [B, T, H, G], its product with v, each where it is asked for, and the sums of weights [B, H, T].
template <class T, class V, bool NARROW>
__global__ void __launch_bounds__(THREADS, 2)
windowed_forward(OPERANDS(T, V), const T *__restrict__ sums, const T *__restrict__ phi_sums, const V *__restrict__ v,
                 V *__restrict__ gate, V *__restrict__ gated, T *__restrict__ den) {
    SHARED(T, weights, [SIZE<T>][SIZE<T> + 1]);
    SHARED(T, totals, [SIZE<T>]);
    FACTORS(T, factors);
    i64 tiles = (p.time + SIZE<T> - 1) / SIZE<T>, tile = blockIdx.x % tiles, first = tile * SIZE<T>, column = i64(blockIdx.y) * SIZE<T>;
    Head<T, V> head(p, blockIdx.x / tiles, q, k, phi_q, phi_k, g, tau);
    constexpr int EACH = THREADS / SIZE<T>;
    int row = threadIdx.x / EACH, part = threadIdx.x % EACH;
    T total = 0; // of this thread's share of its row's weights
    TileSum<T, NARROW> sum;
    for (i64 j = math::max(i64(0), tile - p.lag) * SIZE<T>; j <= first; j += SIZE<T>) {
        TileSum<T, NARROW> scores, far;
        head.pairs(first, j, factors, scores, far);
        __syncthreads();
        each(scores, far, [&](int m, int n, T score, T product) {
            bool near = head.is_near(first + m, j + n);
            weights[m][n] = !head.is_pair(first + m, j + n) ? T(0) : near ? math::exp(score - head.tau) : product;
        });
        __syncthreads();
        for (int n = part; n < SIZE<T>; n += EACH) total += weights[row][n];
        add_product(sum, factors, int(math::min(i64(SIZE<T>), p.time - j)), [&](int m, int k) { return weights[m][k]; },
                    [&](int k, int n) { return head.at(head.g, p.g, j + k, column + n, p.values); });
    }
    const T *state = head.state(sums, tile - p.lag, p.features * p.values), *of_phi = head.state(phi_sums, tile - p.lag, p.features);
    if (state) {
        add_product_of_terms(sum, factors, p.features, [&](int m, i64 r) { return head.at(head.phi_q, p.phi_q, first + m, r, p.features); },
                             [&](i64 r, int n) { return column + n < p.values ? state[r * p.values + column + n] : T(0); });
        for (i64 r = part; r < p.features; r += EACH) total += head.at(head.phi_q, p.phi_q, first + row, r, p.features) * of_phi[r];
    }
    for (int by = EACH / 2; by > 0; by /= 2) total += __shfl_xor_sync(0xffffffffu, total, by);
    if (part == 0) {
        totals[row] = total;
        if (column == 0 && first + row < p.time) den[head.of_head(first + row)] = total;
    }
    __syncthreads();
    each(sum, [&](int m, int n, T x) {
        i64 i = first + m, c = column + n;
        if (i >= p.time || c >= p.values) return;
        // A query all of whose weights underflow gives 0.
        T y = totals[m] == T(0) ? T(0) : x / totals[m];
        i64 at = head.row(i) * p.values + c;
        if (gate) gate[at] = narrow<V>(y);
        if (gated) gated[at] = narrow<V>(y * head.at(head.of(v, p.v), p.v, i, c, p.values));
    });
}

// dout [B, T, H, G] and its product with the gate [B, T, H], each divided by the sum of weights [B, H, T].
template <class T, class V>
__global__ void windowed_divide(V *dout, T *delta, const T *__restrict__ den, i64 heads, i64 time, i64 values, i64 count) {
    GRID_STRIDE(at, count) {
        i64 row = at / values, head = row % heads, i = row / heads % time, batch = row / heads / time;
        T sum = den[(batch * heads + head) * time + i], inverse = sum == T(0) ? T(0) : T(1) / sum;
        dout[at] = narrow<V>(widen(dout[at]) * inverse);
        if (at % values == 0) delta[row] *= inverse;
    }
}

// From d = dḡ / den, and delta = d·ḡ. Blocks of one head and tile of queries have, by `part`, those of dq and then those of dphi_q;
// the first of them also a share of dtau.
template <class T, class V, bool NARROW>
__global__ void __launch_bounds__(THREADS, 2)
windowed_backward_queries(OPERANDS(T, V), const T *__restrict__ sums, const T *__restrict__ phi_sums, const V *__restrict__ d,
                          const T *__restrict__ delta, T *__restrict__ dq, T *__restrict__ dphi_q, double *__restrict__ dtau) {
    SHARED(T, slopes, [SIZE<T>][SIZE<T> + 1]);
    SHARED(double, scratch, [32]);
    FACTORS(T, factors);
    i64 tiles = (p.time + SIZE<T> - 1) / SIZE<T>, tile = blockIdx.x % tiles, first = tile * SIZE<T>;
    i64 of_dq = math::max(i64(1), (p.width + SIZE<T> - 1) / SIZE<T>), part = blockIdx.y;
    bool near = part < of_dq;
    i64 column = (near ? part : part - of_dq) * SIZE<T>, wide = near ? p.width : p.features;
    Head<T, V> head(p, blockIdx.x / tiles, q, k, phi_q, phi_k, g, tau);
    auto arrived = [&](int m, i64 c) { return first + m < p.time ? widen(d[head.row(first + m) * p.values + c]) : T(0); };
    double along = 0;
    TileSum<T, NARROW> sum;
    for (i64 j = math::max(i64(0), tile - p.lag) * SIZE<T>; j <= first; j += SIZE<T>) {
        if (near ? !head.some_near(first, j) : !head.some_far(first, j)) continue;
        TileSum<T, NARROW> scores, products;
        if (near) {
            add_product_of_rows(scores, factors, p.width, [&](int m, i64 c) { return head.at(head.q, p.q, first + m, c, p.width); },
                                [&](int n, i64 c) { return head.at(head.k, p.k, j + n, c, p.width); });
        }
        add_product_of_rows(products, factors, p.values, arrived, [&](int n, i64 c) { return head.at(head.g, p.g, j + n, c, p.values); });
        __syncthreads();
        each(scores, products, [&](int m, int n, T score, T product) {
            i64 i = first + m;
            T slope = 0;
            if (head.is_pair(i, j + n) && head.is_near(i, j + n) == near) {
                slope = product - delta[head.row(i)];
                if (near) {
                    slope *= math::exp(score - head.tau);
                    along += double(slope) * double(score / head.tau - T(1));
                }
            }
            slopes[m][n] = slope;
        });
        add_product(sum, factors, int(math::min(i64(SIZE<T>), p.time - j)), [&](int m, int k) { return slopes[m][k]; }, [&](int k, int n) {
            return near ? head.at(head.k, p.k, j + k, column + n, p.width) : head.at(head.phi_k, p.phi_k, j + k, column + n, p.features);
        });
    }
    const T *state = near ? nullptr : head.state(sums, tile - p.lag, p.features * p.values);
    const T *of_phi = near ? nullptr : head.state(phi_sums, tile - p.lag, p.features);
    if (state) {
        add_product_of_rows(sum, factors, p.values, arrived,
                            [&](int n, i64 c) { return column + n < p.features ? state[(column + n) * p.values + c] : T(0); });
    }
    each(sum, [&](int m, int n, T x) {
        i64 i = first + m, c = column + n;
        if (i >= p.time || c >= wide) return;
        if (of_phi) x -= delta[head.row(i)] * of_phi[c];
        (near ? dq : dphi_q)[head.row(i) * wide + c] = x;
    });
    if (part == 0) {
        along = block_reduce(along, scratch, Plus());
        if (threadIdx.x == 0) dtau[blockIdx.x] = along;
    }
}

// Likewise of dk, dphi_k and dg, with the running sums over d from the right.
template <class T, class V, bool NARROW>
__global__ void __launch_bounds__(THREADS, 2)
windowed_backward_keys(OPERANDS(T, V), const T *__restrict__ sums, const T *__restrict__ phi_sums, const V *__restrict__ d,
                       const T *__restrict__ delta, T *__restrict__ dk, T *__restrict__ dphi_k, V *__restrict__ dg) {
    SHARED(T, weights, [SIZE<T>][SIZE<T> + 1]);
    FACTORS(T, factors);
    enum { KEY, FEATURE, GATE };
    i64 tiles = (p.time + SIZE<T> - 1) / SIZE<T>, tile = blockIdx.x % tiles, first = tile * SIZE<T>;
    i64 of_dk = (p.width + SIZE<T> - 1) / SIZE<T>, of_dphi = (p.features + SIZE<T> - 1) / SIZE<T>, part = blockIdx.y;
    int kind = part < of_dk ? KEY : part < of_dk + of_dphi ? FEATURE : GATE;
    i64 column = (kind == KEY ? part : kind == FEATURE ? part - of_dk : part - of_dk - of_dphi) * SIZE<T>;
    i64 wide = kind == KEY ? p.width : kind == FEATURE ? p.features : p.values;
    Head<T, V> head(p, blockIdx.x / tiles, q, k, phi_q, phi_k, g, tau);
    TileSum<T, NARROW> sum;
    for (i64 t = tile; t <= math::min(tiles - 1, tile + p.lag); t++) {
        i64 i = t * SIZE<T>;
        if (kind == KEY && !head.some_near(i, first)) continue;
        if (kind == FEATURE && !head.some_far(i, first)) continue;
        auto arrived = [&](i64 m, i64 c) { return i + m < p.time && c < p.values ? widen(d[head.row(i + m) * p.values + c]) : T(0); };
        // The scores of near pairs, but that a gate's pairs come one after the other as near and as far ones.
        TileSum<T, NARROW> scores, products;
        if (kind == GATE) {
            head.pairs(i, first, factors, scores, products);
        } else {
            if (kind == KEY) {
                add_product_of_rows(scores, factors, p.width, [&](int m, i64 c) { return head.at(head.q, p.q, i + m, c, p.width); },
                                    [&](int n, i64 c) { return head.at(head.k, p.k, first + n, c, p.width); });
            }
            add_product_of_rows(products, factors, p.values, arrived,
                                [&](int n, i64 c) { return head.at(head.g, p.g, first + n, c, p.values); });
        }
        __syncthreads();
        each(scores, products, [&](int m, int n, T score, T product) {
            i64 at = i + m;
            bool near = head.is_near(at, first + n);
            T x = 0;
            if (head.is_pair(at, first + n)) {
                T weight = near && kind != FEATURE ? math::exp(score - head.tau) : T(0);
                if (kind == GATE) x = near ? weight : product;
                if (kind == KEY && near) x = weight * (product - delta[head.row(at)]);
                if (kind == FEATURE && !near) x = product - delta[head.row(at)];
            }
            weights[m][n] = x;
        });
        add_product(sum, factors, int(math::min(i64(SIZE<T>), p.time - i)), [&](int m, int k) { return weights[k][m]; }, [&](int k, int n) {
            if (kind == KEY) return head.at(head.q, p.q, i + k, column + n, p.width);
            if (kind == FEATURE) return head.at(head.phi_q, p.phi_q, i + k, column + n, p.features);
            return arrived(k, column + n);
        });
    }
    const T *state = kind == KEY ? nullptr : head.state(sums, tile + p.lag, p.features * p.values);
    const T *of_phi = kind == FEATURE ? head.state(phi_sums, tile + p.lag, p.features) : nullptr;
    if (state && kind == FEATURE) {
        add_product_of_rows(sum, factors, p.values, [&](int m, i64 c) { return head.at(head.g, p.g, first + m, c, p.values); },
                            [&](int n, i64 c) { return column + n < p.features ? state[(column + n) * p.values + c] : T(0); });
    }
    if (state && kind == GATE) {
        add_product_of_terms(sum, factors, p.features, [&](int m, i64 r) { return head.at(head.phi_k, p.phi_k, first + m, r, p.features); },
                             [&](i64 r, int n) { return column + n < p.values ? state[r * p.values + column + n] : T(0); });
    }
    each(sum, [&](int m, int n, T x) {
        i64 j = first + m, c = column + n;
        if (j >= p.time || c >= wide) return;
        if (of_phi) x -= of_phi[c];
        i64 at = head.row(j) * wide + c;
        if (kind == KEY) dk[at] = x;
        if (kind == FEATURE) dphi_k[at] = x;
        if (kind == GATE) dg[at] = narrow<V>(x);
    });
}
