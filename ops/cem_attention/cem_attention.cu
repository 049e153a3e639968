// CEM's attention, of which the keys are the values and scores have a second part, beta (x ⊙ d)·ĥ, that all heads of a group
// share. Blocks as in attention.cu; those that sum over the heads of a group take them one after the other.
#include "tile.cuh"

// q, dc [B, T_q, H, K], x, dm [B, T_q, D] and history [B, T_k, D] are contiguous; of k from an entry of the batch, a token and a
// head to the next. Without a diagonal there are no groups, and D is 0.
struct Cem {
    i64 heads, queries, keys, width, d_model, groups, k[3];
    double beta;
};

#define OPERANDS(T)                                                                                                     \
    Cem p, const T *__restrict__ q, const T *__restrict__ k, const T *__restrict__ x, const T *__restrict__ history,     \
        const T *__restrict__ d, const T *__restrict__ lse

// What tiles of pairs are made of, for one entry of the batch.
template <class T> struct Entry {
    const Cem &p;
    i64 batch;
    const T *k, *history, *d;

    __device__ __forceinline__ Entry(const Cem &p, i64 batch, const T *k, const T *history, const T *d)
        : p(p), batch(batch), k(k + batch * p.k[0]), history(history + batch * p.keys * p.d_model), d(d) {}
    __device__ __forceinline__ i64 token(i64 i) const { return batch * p.queries + i; }
    __device__ __forceinline__ i64 group(i64 head) const { return p.groups ? head / (p.heads / p.groups) : 0; }
    __device__ __forceinline__ bool sees(i64 i, i64 j) const { return i < p.queries && j <= i + p.keys - p.queries; }
    __device__ __forceinline__ i64 last_key(i64 i) const { return math::min(p.queries, i + SIZE<T>) + p.keys - p.queries; }
    __device__ __forceinline__ i64 first_query(i64 j) const { return math::max(i64(0), j - (p.keys - p.queries)) / SIZE<T> * SIZE<T>; }
    // Numbers of rows, 0 where there is none.
    __device__ __forceinline__ T at_head(const T *rows, i64 i, i64 head, i64 c) const {
        return i < p.queries && c < p.width ? rows[(token(i) * p.heads + head) * p.width + c] : T(0);
    }
    __device__ __forceinline__ T key(i64 j, i64 head, i64 c) const {
        return j < p.keys && c < p.width ? k[j * p.k[1] + head * p.k[2] + c] : T(0);
    }
    // Of x or dm, times the diagonal.
    __device__ __forceinline__ T scaled(const T *rows, i64 i, i64 group, i64 c) const {
        return i < p.queries && c < p.d_model ? rows[token(i) * p.d_model + c] * d[group * p.d_model + c] : T(0);
    }
    __device__ __forceinline__ T past(i64 j, i64 c) const { return j < p.keys && c < p.d_model ? history[j * p.d_model + c] : T(0); }

    // rows_i·k_j of a head, and (rows_i ⊙ d)·ĥ_j of a group.
    template <bool NARROW>
    __device__ __forceinline__ void add_keys(TileSum<T, NARROW> &sum, Factors<T> &factors, const T *rows, i64 head, i64 i, i64 j) const {
        add_product_of_rows(sum, factors, p.width, [&](int m, i64 c) { return at_head(rows, i + m, head, c); },
                            [&](int n, i64 c) { return key(j + n, head, c); });
    }
    template <bool NARROW>
    __device__ __forceinline__ void add_past(TileSum<T, NARROW> &sum, Factors<T> &factors, const T *rows, i64 group, i64 i, i64 j) const {
        add_product_of_rows(sum, factors, p.d_model, [&](int m, i64 c) { return scaled(rows, i + m, group, c); },
                            [&](int n, i64 c) { return past(j + n, c); });
    }
};

// The context Σ_j p_ij k_j [B, T_q, H, K], and log-sum-exps [B, T_q, H].
template <class T, bool NARROW>
__global__ void __launch_bounds__(THREADS, 2)
cem_forward(OPERANDS(T), T *__restrict__ context, T *__restrict__ sums_out) {
    SHARED(T, weights, [SIZE<T>][SIZE<T> + 1]);
    SHARED(T, tops, [SIZE<T>]);
    SHARED(T, sums, [SIZE<T>]);
    SHARED(T, shrink, [SIZE<T>]);
    FACTORS(T, factors);
    RunningSoftmax<T> softmax{tops, sums, shrink};
    i64 tiles = (p.queries + SIZE<T> - 1) / SIZE<T>, first = blockIdx.x % tiles * SIZE<T>, n = blockIdx.x / tiles;
    i64 head = n % p.heads, column = i64(blockIdx.y) * SIZE<T>;
    Entry<T> entry(p, n / p.heads, k, history, d);
    softmax.begin();
    TileSum<T, NARROW> sum;
    i64 last = entry.last_key(first);
    for (i64 j = 0; j < last; j += SIZE<T>) {
        TileSum<T, NARROW> scores;
        entry.add_keys(scores, factors, q, head, first, j);
        entry.add_past(scores, factors, x, entry.group(head), first, j);
        __syncthreads();
        each(scores, [&](int m, int n, T s) { weights[m][n] = entry.sees(first + m, j + n) ? s * T(p.beta) : -math::infinity<T>(); });
        __syncthreads();
        softmax.step(weights);
        __syncthreads();
        each(sum, [&](int m, int, T &y) { y *= shrink[m]; });
        add_product(sum, factors, int(math::min(i64(SIZE<T>), last - j)), [&](int m, int t) { return weights[m][t]; },
                    [&](int t, int n) { return entry.key(j + t, head, column + n); });
    }
    __syncthreads();
    each(sum, [&](int m, int n, T y) {
        i64 i = first + m, c = column + n;
        // Every query sees a key, its own.
        if (i < p.queries && c < p.width) context[(entry.token(i) * p.heads + head) * p.width + c] = y / sums[m];
    });
    if (column == 0 && threadIdx.x < SIZE<T> && first + threadIdx.x < p.queries) {
        sums_out[entry.token(first + threadIdx.x) * p.heads + head] = tops[threadIdx.x] + math::log(sums[threadIdx.x]);
    }
}

// The mixtures Σ_j (Σ_h p_ij) ĥ_j of every group, [B, T_q, G, D].
template <class T, bool NARROW> __global__ void __launch_bounds__(THREADS, 2) cem_mix(OPERANDS(T), T *__restrict__ mix) {
    SHARED(T, weights, [SIZE<T>][SIZE<T> + 1]);
    FACTORS(T, factors);
    i64 tiles = (p.queries + SIZE<T> - 1) / SIZE<T>, first = blockIdx.x % tiles * SIZE<T>, n = blockIdx.x / tiles;
    i64 group = n % p.groups, heads = p.heads / p.groups, column = i64(blockIdx.y) * SIZE<T>;
    Entry<T> entry(p, n / p.groups, k, history, d);
    TileSum<T, NARROW> sum;
    i64 last = entry.last_key(first);
    for (i64 j = 0; j < last; j += SIZE<T>) {
        TileSum<T, NARROW> base, total;
        entry.add_past(base, factors, x, group, first, j);
        for (i64 head = group * heads; head < (group + 1) * heads; head++) {
            TileSum<T, NARROW> scores = base;
            entry.add_keys(scores, factors, q, head, first, j);
            each(total, scores, [&](int m, int n, T &all, T s) {
                i64 i = first + m;
                if (entry.sees(i, j + n)) all += math::exp(s * T(p.beta) - lse[entry.token(i) * p.heads + head]);
            });
        }
        __syncthreads();
        each(total, [&](int m, int n, T w) { weights[m][n] = w; });
        add_product(sum, factors, int(math::min(i64(SIZE<T>), last - j)), [&](int m, int t) { return weights[m][t]; },
                    [&](int t, int n) { return entry.past(j + t, column + n); });
    }
    each(sum, [&](int m, int n, T y) {
        i64 i = first + m, c = column + n;
        if (i < p.queries && c < p.d_model) mix[(entry.token(i) * p.groups + group) * p.d_model + c] = y;
    });
}

// Of every pair the weight p over the score, and over its gradient dp the slope beta p (dp - delta).
template <class T, bool NARROW>
__device__ __forceinline__ void to_slopes(const Entry<T> &entry, TileSum<T, NARROW> &scores, TileSum<T, NARROW> &products,
                                          const T *lse, const T *delta, i64 head, i64 i, i64 j) {
    const Cem &p = entry.p;
    each(scores, products, [&](int m, int n, T &s, T &dp) {
        T weight = 0, slope = 0;
        if (entry.sees(i + m, j + n)) {
            i64 row = entry.token(i + m) * p.heads + head;
            weight = math::exp(s * T(p.beta) - lse[row]);
            slope = T(p.beta) * weight * (dp - delta[row]);
        }
        s = weight;
        dp = slope;
    });
}

#define ARRIVED(T) const T *__restrict__ dc, const T *__restrict__ dm

// delta = Σ_j p_ij dp_ij, [B, T_q, H].
template <class T, bool NARROW>
__global__ void __launch_bounds__(THREADS, 2) cem_delta(OPERANDS(T), ARRIVED(T), T *__restrict__ delta) {
    SHARED(T, weights, [SIZE<T>][SIZE<T> + 1]);
    FACTORS(T, factors);
    constexpr int EACH = THREADS / SIZE<T>;
    int row = threadIdx.x / EACH, part = threadIdx.x % EACH;
    i64 tiles = (p.queries + SIZE<T> - 1) / SIZE<T>, first = blockIdx.x % tiles * SIZE<T>, n = blockIdx.x / tiles, head = n % p.heads;
    Entry<T> entry(p, n / p.heads, k, history, d);
    T total = 0;
    i64 last = entry.last_key(first), group = entry.group(head);
    for (i64 j = 0; j < last; j += SIZE<T>) {
        TileSum<T, NARROW> scores, products;
        entry.add_keys(scores, factors, q, head, first, j);
        entry.add_past(scores, factors, x, group, first, j);
        entry.add_keys(products, factors, dc, head, first, j);
        entry.add_past(products, factors, dm, group, first, j);
        __syncthreads();
        each(scores, products, [&](int m, int n, T s, T dp) {
            i64 i = first + m;
            weights[m][n] = entry.sees(i, j + n) ? dp * math::exp(s * T(p.beta) - lse[entry.token(i) * p.heads + head]) : T(0);
        });
        __syncthreads();
        for (int n = part; n < SIZE<T>; n += EACH) total += weights[row][n];
    }
    for (int by = EACH / 2; by > 0; by /= 2) total += __shfl_xor_sync(0xffffffffu, total, by);
    if (part == 0 && first + row < p.queries) delta[entry.token(first + row) * p.heads + head] = total;
}

// dq = Σ_j slope k_j, [B, T_q, H, K].
template <class T, bool NARROW>
__global__ void __launch_bounds__(THREADS, 2)
cem_backward_queries(OPERANDS(T), ARRIVED(T), const T *__restrict__ delta, T *__restrict__ dq) {
    SHARED(T, slopes, [SIZE<T>][SIZE<T> + 1]);
    FACTORS(T, factors);
    i64 tiles = (p.queries + SIZE<T> - 1) / SIZE<T>, first = blockIdx.x % tiles * SIZE<T>, n = blockIdx.x / tiles;
    i64 head = n % p.heads, column = i64(blockIdx.y) * SIZE<T>;
    Entry<T> entry(p, n / p.heads, k, history, d);
    TileSum<T, NARROW> sum;
    i64 last = entry.last_key(first), group = entry.group(head);
    for (i64 j = 0; j < last; j += SIZE<T>) {
        TileSum<T, NARROW> scores, products;
        entry.add_keys(scores, factors, q, head, first, j);
        entry.add_past(scores, factors, x, group, first, j);
        entry.add_keys(products, factors, dc, head, first, j);
        entry.add_past(products, factors, dm, group, first, j);
        to_slopes(entry, scores, products, lse, delta, head, first, j);
        __syncthreads();
        each(products, [&](int m, int n, T slope) { slopes[m][n] = slope; });
        add_product(sum, factors, int(math::min(i64(SIZE<T>), last - j)), [&](int m, int t) { return slopes[m][t]; },
                    [&](int t, int n) { return entry.key(j + t, head, column + n); });
    }
    each(sum, [&](int m, int n, T y) {
        i64 i = first + m, c = column + n;
        if (i < p.queries && c < p.width) dq[(entry.token(i) * p.heads + head) * p.width + c] = y;
    });
}

// Σ_j (Σ_h slope) ĥ_j of every group, [B, T_q, G, D]: what passes by the projection.
template <class T, bool NARROW>
__global__ void __launch_bounds__(THREADS, 2)
cem_backward_direct(OPERANDS(T), ARRIVED(T), const T *__restrict__ delta, T *__restrict__ pull) {
    SHARED(T, slopes, [SIZE<T>][SIZE<T> + 1]);
    FACTORS(T, factors);
    i64 tiles = (p.queries + SIZE<T> - 1) / SIZE<T>, first = blockIdx.x % tiles * SIZE<T>, n = blockIdx.x / tiles;
    i64 group = n % p.groups, heads = p.heads / p.groups, column = i64(blockIdx.y) * SIZE<T>;
    Entry<T> entry(p, n / p.groups, k, history, d);
    TileSum<T, NARROW> sum;
    i64 last = entry.last_key(first);
    for (i64 j = 0; j < last; j += SIZE<T>) {
        TileSum<T, NARROW> total;
        for (i64 head = group * heads; head < (group + 1) * heads; head++) {
            TileSum<T, NARROW> scores, products;
            entry.add_past(scores, factors, x, group, first, j);
            entry.add_past(products, factors, dm, group, first, j);
            entry.add_keys(scores, factors, q, head, first, j);
            entry.add_keys(products, factors, dc, head, first, j);
            to_slopes(entry, scores, products, lse, delta, head, first, j);
            each(total, products, [&](int, int, T &all, T slope) { all += slope; });
        }
        __syncthreads();
        each(total, [&](int m, int n, T slope) { slopes[m][n] = slope; });
        add_product(sum, factors, int(math::min(i64(SIZE<T>), last - j)), [&](int m, int t) { return slopes[m][t]; },
                    [&](int t, int n) { return entry.past(j + t, column + n); });
    }
    each(sum, [&](int m, int n, T y) {
        i64 i = first + m, c = column + n;
        if (i < p.queries && c < p.d_model) pull[(entry.token(i) * p.groups + group) * p.d_model + c] = y;
    });
}

// dk_j = Σ_i (p_ij dc_i + slope q_i), [B, T_k, H, K].
template <class T, bool NARROW>
__global__ void __launch_bounds__(THREADS, 2)
cem_backward_keys(OPERANDS(T), ARRIVED(T), const T *__restrict__ delta, T *__restrict__ dk) {
    SHARED(T, weights, [SIZE<T>][SIZE<T> + 1]);
    FACTORS(T, factors);
    i64 tiles = (p.keys + SIZE<T> - 1) / SIZE<T>, first = blockIdx.x % tiles * SIZE<T>, n = blockIdx.x / tiles;
    i64 head = n % p.heads, column = i64(blockIdx.y) * SIZE<T>;
    Entry<T> entry(p, n / p.heads, k, history, d);
    i64 group = entry.group(head);
    TileSum<T, NARROW> sum;
    for (i64 i = entry.first_query(first); i < p.queries; i += SIZE<T>) {
        int some = int(math::min(i64(SIZE<T>), p.queries - i));
        TileSum<T, NARROW> scores, products;
        entry.add_keys(scores, factors, q, head, i, first);
        entry.add_past(scores, factors, x, group, i, first);
        entry.add_keys(products, factors, dc, head, i, first);
        entry.add_past(products, factors, dm, group, i, first);
        to_slopes(entry, scores, products, lse, delta, head, i, first);
        __syncthreads();
        each(scores, [&](int m, int n, T weight) { weights[m][n] = weight; });
        add_product(sum, factors, some, [&](int m, int t) { return weights[t][m]; },
                    [&](int t, int n) { return entry.at_head(dc, i + t, head, column + n); });
        __syncthreads();
        each(products, [&](int m, int n, T slope) { weights[m][n] = slope; });
        add_product(sum, factors, some, [&](int m, int t) { return weights[t][m]; },
                    [&](int t, int n) { return entry.at_head(q, i + t, head, column + n); });
    }
    each(sum, [&](int m, int n, T y) {
        i64 j = first + m, c = column + n;
        if (j < p.keys && c < p.width) dk[((entry.batch * p.keys + j) * p.heads + head) * p.width + c] = y;
    });
}

// dĥ_j = Σ_i Σ_groups (Σ_h p_ij) (dm_i ⊙ d) + (Σ_h slope) (x_i ⊙ d), [B, T_k, D].
template <class T, bool NARROW>
__global__ void __launch_bounds__(THREADS, 2)
cem_backward_history(OPERANDS(T), ARRIVED(T), const T *__restrict__ delta, T *__restrict__ dhistory) {
    SHARED(T, weights, [SIZE<T>][SIZE<T> + 1]);
    FACTORS(T, factors);
    i64 tiles = (p.keys + SIZE<T> - 1) / SIZE<T>, first = blockIdx.x % tiles * SIZE<T>, heads = p.heads / p.groups;
    i64 column = i64(blockIdx.y) * SIZE<T>;
    Entry<T> entry(p, blockIdx.x / tiles, k, history, d);
    TileSum<T, NARROW> sum;
    for (i64 group = 0; group < p.groups; group++) {
        for (i64 i = entry.first_query(first); i < p.queries; i += SIZE<T>) {
            int some = int(math::min(i64(SIZE<T>), p.queries - i));
            // Weights are added up in shared memory, each by one thread: registers do not suffice for both.
            TileSum<T, NARROW> slopes;
            for (i64 head = group * heads; head < (group + 1) * heads; head++) {
                TileSum<T, NARROW> scores, products;
                entry.add_past(scores, factors, x, group, i, first);
                entry.add_past(products, factors, dm, group, i, first);
                entry.add_keys(scores, factors, q, head, i, first);
                entry.add_keys(products, factors, dc, head, i, first);
                to_slopes(entry, scores, products, lse, delta, head, i, first);
                bool more = head > group * heads;
                each(scores, [&](int m, int n, T weight) { weights[m][n] = more ? weights[m][n] + weight : weight; });
                each(slopes, products, [&](int, int, T &all, T slope) { all += slope; });
            }
            add_product(sum, factors, some, [&](int m, int t) { return weights[t][m]; },
                        [&](int t, int n) { return entry.scaled(dm, i + t, group, column + n); });
            __syncthreads();
            each(slopes, [&](int m, int n, T slope) { weights[m][n] = slope; });
            add_product(sum, factors, some, [&](int m, int t) { return weights[t][m]; },
                        [&](int t, int n) { return entry.scaled(x, i + t, group, column + n); });
        }
    }
    each(sum, [&](int m, int n, T y) {
        i64 j = first + m, c = column + n;
        if (j < p.keys && c < p.d_model) dhistory[(entry.batch * p.keys + j) * p.d_model + c] = y;
    });
}
