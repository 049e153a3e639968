// Attention without a T x T array: blocks of 128 threads take 16 queries and meet 32 keys, a lane each, at a time. A first,
// plain version, in the precision of its operands: products are sums of single factors, not of tensor cores.
#include "common.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32, QUERIES = 16, KEYS = 32;

struct Problem {
    i64 heads, queries, keys, width, values;
    // From an entry of the batch, a token and a head to the next; rows themselves lie without gaps.
    i64 q[3], k[3], v[3];
    i64 causal;
    double scale;
};

// Which keys the queries of a block may see, and where their rows are.
template <class T> struct Tile {
    const Problem &p;
    const unsigned *mask;
    i64 batch, head;

    __device__ __forceinline__ const T *row(const T *x, const i64 *strides, i64 token) const {
        return x + batch * strides[0] + token * strides[1] + head * strides[2];
    }
    // Of the contiguous tensors [B, T_q, H, width].
    __device__ __forceinline__ i64 query_row(i64 i) const { return (batch * p.queries + i) * p.heads + head; }
    __device__ __forceinline__ i64 key_row(i64 j) const { return (batch * p.keys + j) * p.heads + head; }
    __device__ __forceinline__ bool is_key(i64 j) const { return j < p.keys && (!mask || mask[batch * p.keys + j]); }
    __device__ __forceinline__ bool sees(i64 i, i64 j) const {
        return i < p.queries && is_key(j) && (!p.causal || j <= i + p.keys - p.queries);
    }
    // The keys that some query before `end` sees lie before this.
    __device__ __forceinline__ i64 last_key(i64 end) const {
        return p.causal ? math::min(p.keys, end + p.keys - p.queries) : p.keys;
    }
    // Rows of queries, and of keys that may be seen, to shared memory; 0 for others, whatever they hold.
    __device__ __forceinline__ void load_queries(const T *x, const i64 *strides, i64 first, int width, T *to) const {
        for (int at = threadIdx.x; at < QUERIES * width; at += THREADS) {
            i64 i = first + at / width;
            to[at / width * (width + 1) + at % width] = i < p.queries ? row(x, strides, i)[at % width] : T(0);
        }
    }
    __device__ __forceinline__ void load_keys(const T *x, const i64 *strides, i64 first, int width, T *to) const {
        for (int at = threadIdx.x; at < KEYS * width; at += THREADS) {
            i64 j = first + at / width;
            to[at / width * (width + 1) + at % width] = is_key(j) ? row(x, strides, j)[at % width] : T(0);
        }
    }
};

// Row m of `a` times row n of `b`, of so many numbers, one apart from the width.
template <class T> __device__ __forceinline__ T dot(const T *a, const T *b, int m, int n, int width) {
    T sum = 0;
    for (int i = 0; i < width; i++) sum = math::fma(a[m * (width + 1) + i], b[n * (width + 1) + i], sum);
    return sum;
}

template <class T>
__global__ void __launch_bounds__(THREADS, 2)
attention_forward(Problem p, const T *__restrict__ q, const T *__restrict__ k, const T *__restrict__ v,
                  const unsigned *__restrict__ mask, T *__restrict__ out, T *__restrict__ lse) {
    int width = int(p.width), values = int(p.values); // positions within a tile are small
    SHARED(T, weights, [QUERIES][KEYS]);
    SHARED(T, tops, [QUERIES]);
    SHARED(T, sums, [QUERIES]);
    SHARED(T, shrink, [QUERIES]);
    DYNAMIC_SHARED(T, room);
    T *queries = room, *keys = queries + QUERIES * (width + 1), *sum = keys + KEYS * (width + 1); // sum [16][values]
    Tile<T> tile{p, mask, blockIdx.z, blockIdx.y};
    i64 first = i64(blockIdx.x) * QUERIES;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    tile.load_queries(q, p.q, first, width, queries);
    for (int at = threadIdx.x; at < QUERIES * values; at += THREADS) sum[at] = 0;
    if (threadIdx.x < QUERIES) {
        tops[threadIdx.x] = -math::infinity<T>();
        sums[threadIdx.x] = 0;
    }
    i64 end = tile.last_key(math::min(p.queries, first + QUERIES));
    for (i64 j = 0; j < end; j += KEYS) {
        __syncthreads();
        tile.load_keys(k, p.k, j, width, keys);
        __syncthreads();
        for (int m = warp; m < QUERIES; m += WARPS) {
            bool seen = tile.sees(first + m, j + lane);
            T score = seen ? dot(queries, keys, m, lane, width) * T(p.scale) : -math::infinity<T>();
            T before = tops[m], top = math::max(before, warp_reduce(score, Larger()));
            T weight = seen ? math::exp(score - top) : T(0);
            T total = warp_reduce(weight, Plus());
            weights[m][lane] = weight;
            __syncwarp();
            if (lane == 0) {
                T by = before == top ? T(1) : math::exp(before - top);
                shrink[m] = by;
                sums[m] = sums[m] * by + total;
                tops[m] = top;
            }
            __syncwarp();
        }
        __syncthreads();
        for (int g = threadIdx.x; g < values; g += THREADS) {
            T acc[QUERIES];
            for (int m = 0; m < QUERIES; m++) acc[m] = sum[m * values + g] * shrink[m];
#pragma unroll 4
            for (int n = 0; n < KEYS; n++) {
                T value = tile.is_key(j + n) ? tile.row(v, p.v, j + n)[g] : T(0);
                for (int m = 0; m < QUERIES; m++) acc[m] = math::fma(weights[m][n], value, acc[m]);
            }
            for (int m = 0; m < QUERIES; m++) sum[m * values + g] = acc[m];
        }
    }
    __syncthreads();
    // A query that sees no key gives 0.
    for (int at = threadIdx.x; at < QUERIES * values; at += THREADS) {
        int m = at / values;
        if (first + m < p.queries) {
            out[tile.query_row(first + m) * values + at % values] = sums[m] > T(0) ? sum[at] / sums[m] : T(0);
        }
    }
    if (threadIdx.x < QUERIES && first + threadIdx.x < p.queries) {
        lse[tile.query_row(first + threadIdx.x)] = tops[threadIdx.x] + math::log(sums[threadIdx.x]);
    }
}

// delta = Σ dout out, a warp for each row.
template <class T>
__global__ void attention_delta(const T *__restrict__ dout, const T *__restrict__ out, T *__restrict__ delta, i64 rows, i64 values) {
    i64 row = i64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    T sum = 0;
    for (i64 g = threadIdx.x % 32; g < values; g += 32) sum += dout[row * values + g] * out[row * values + g];
    sum = warp_reduce(sum, Plus());
    if (threadIdx.x % 32 == 0) delta[row] = sum;
}

// What both passes of the backward share: weight and slope of a pair, from the loaded rows.
template <class T> struct Rows {
    T *q, *dout, *k, *v;
    __device__ Rows(T *room, const Problem &p) {
        q = room;
        dout = q + QUERIES * (p.width + 1);
        k = dout + QUERIES * (p.values + 1);
        v = k + KEYS * (p.width + 1);
    }
    __device__ __forceinline__ T *rest(const Problem &p) const { return v + KEYS * (p.values + 1); }
    __device__ __forceinline__ void pair(const Tile<T> &tile, i64 i, i64 j, int m, int n, const T *lse, const T *delta,
                                         T &weight, T &slope) const {
        weight = slope = 0;
        if (tile.sees(i, j)) {
            const Problem &p = tile.p;
            i64 row = tile.query_row(i);
            weight = math::exp(dot(q, k, m, n, p.width) * T(p.scale) - lse[row]);
            slope = weight * (dot(dout, v, m, n, p.values) - delta[row]) * T(p.scale);
        }
    }
};

// A block for each 16 queries.
template <class T>
__global__ void __launch_bounds__(THREADS, 2)
attention_backward_queries(Problem p, const T *__restrict__ q, const T *__restrict__ k, const T *__restrict__ v,
                           const unsigned *__restrict__ mask, const T *__restrict__ dout, const T *__restrict__ lse,
                           const T *__restrict__ delta, T *__restrict__ dq) {
    int width = int(p.width), values = int(p.values); // positions within a tile are small
    SHARED(T, slopes, [QUERIES][KEYS]);
    DYNAMIC_SHARED(T, room);
    Rows<T> rows(room, p);
    T *sum = rows.rest(p); // [16][width]
    Tile<T> tile{p, mask, blockIdx.z, blockIdx.y};
    i64 first = i64(blockIdx.x) * QUERIES;
    i64 of_dout[3] = {p.queries * p.heads * values, p.heads * values, values};
    tile.load_queries(q, p.q, first, width, rows.q);
    tile.load_queries(dout, of_dout, first, values, rows.dout);
    for (int at = threadIdx.x; at < QUERIES * width; at += THREADS) sum[at] = 0;
    i64 end = tile.last_key(math::min(p.queries, first + QUERIES));
    for (i64 j = 0; j < end; j += KEYS) {
        __syncthreads();
        tile.load_keys(k, p.k, j, width, rows.k);
        tile.load_keys(v, p.v, j, values, rows.v);
        __syncthreads();
        for (int at = threadIdx.x; at < QUERIES * KEYS; at += THREADS) {
            T weight, slope;
            rows.pair(tile, first + at / KEYS, j + at % KEYS, at / KEYS, at % KEYS, lse, delta, weight, slope);
            slopes[at / KEYS][at % KEYS] = slope;
        }
        __syncthreads();
        for (int at = threadIdx.x; at < QUERIES * width; at += THREADS) {
            T acc = sum[at];
            for (int n = 0; n < KEYS; n++) acc = math::fma(slopes[at / width][n], rows.k[n * (width + 1) + at % width], acc);
            sum[at] = acc;
        }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < QUERIES * width; at += THREADS) {
        i64 i = first + at / width;
        if (i < p.queries) dq[tile.query_row(i) * width + at % width] = sum[at];
    }
}

// A block for each 32 keys.
template <class T>
__global__ void __launch_bounds__(THREADS, 2)
attention_backward_keys(Problem p, const T *__restrict__ q, const T *__restrict__ k, const T *__restrict__ v,
                        const unsigned *__restrict__ mask, const T *__restrict__ dout, const T *__restrict__ lse,
                        const T *__restrict__ delta, T *__restrict__ dk, T *__restrict__ dv) {
    int width = int(p.width), values = int(p.values); // positions within a tile are small
    SHARED(T, weights, [QUERIES][KEYS]);
    SHARED(T, slopes, [QUERIES][KEYS]);
    DYNAMIC_SHARED(T, room);
    Rows<T> rows(room, p);
    T *sum_k = rows.rest(p), *sum_v = sum_k + KEYS * width; // [32][width], [32][values]
    Tile<T> tile{p, mask, blockIdx.z, blockIdx.y};
    i64 first = i64(blockIdx.x) * KEYS;
    i64 of_dout[3] = {p.queries * p.heads * values, p.heads * values, values};
    tile.load_keys(k, p.k, first, width, rows.k);
    tile.load_keys(v, p.v, first, values, rows.v);
    for (int at = threadIdx.x; at < KEYS * (width + values); at += THREADS) sum_k[at] = 0;
    // The first query that sees the first key.
    i64 start = p.causal ? math::max(i64(0), first - (p.keys - p.queries)) / QUERIES * QUERIES : 0;
    for (i64 i = start; i < p.queries; i += QUERIES) {
        __syncthreads();
        tile.load_queries(q, p.q, i, width, rows.q);
        tile.load_queries(dout, of_dout, i, values, rows.dout);
        __syncthreads();
        for (int at = threadIdx.x; at < QUERIES * KEYS; at += THREADS) {
            T weight, slope;
            rows.pair(tile, i + at / KEYS, first + at % KEYS, at / KEYS, at % KEYS, lse, delta, weight, slope);
            weights[at / KEYS][at % KEYS] = weight;
            slopes[at / KEYS][at % KEYS] = slope;
        }
        __syncthreads();
        for (int at = threadIdx.x; at < KEYS * width; at += THREADS) {
            T acc = sum_k[at];
            for (int m = 0; m < QUERIES; m++) acc = math::fma(slopes[m][at / width], rows.q[m * (width + 1) + at % width], acc);
            sum_k[at] = acc;
        }
        for (int at = threadIdx.x; at < KEYS * values; at += THREADS) {
            T acc = sum_v[at];
            for (int m = 0; m < QUERIES; m++) acc = math::fma(weights[m][at / values], rows.dout[m * (values + 1) + at % values], acc);
            sum_v[at] = acc;
        }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < KEYS * width; at += THREADS) {
        i64 j = first + at / width;
        if (j < p.keys) dk[tile.key_row(j) * width + at % width] = sum_k[at];
    }
    for (int at = threadIdx.x; at < KEYS * values; at += THREADS) {
        i64 j = first + at / values;
        if (j < p.keys) dv[tile.key_row(j) * values + at % values] = sum_v[at];
    }
}
