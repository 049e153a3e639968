// Attention without a T x T array. A block has one tile of an output, [queries, columns of values] forward, and meets the keys
// tile by tile; backward likewise one of dq, dk or dv. Outputs wider than a tile have several blocks, each with scores of
// its own: no width is too large, and no sum is shared by blocks.
#include "tile.cuh"

enum { ALL, CAUSAL, OWN_BLOCK, EARLIER_BLOCKS };

// Keys of which a query sees some, by the enumeration above. Strides: from an entry of the batch, a token and a head to the
// next; rows themselves lie without gaps.
struct Set {
    i64 keys, sees, k[3], v[3];
};

struct Problem {
    i64 heads, queries, width, values, sets, squared, start_rows, q[3], gate[3];
    Set set[2];
    double scale;
};

#define OPERANDS(T, V)                                                                                                  \
    Problem p, const T *__restrict__ q, const T *__restrict__ k, const V *__restrict__ v, const unsigned *__restrict__ mask, \
        const T *__restrict__ k2, const V *__restrict__ v2, const unsigned *__restrict__ mask2,                        \
        const i64 *__restrict__ starts, const unsigned *__restrict__ pairs

// The queries of a head and one set of its keys.
template <class T, class V> struct Head {
    i64 batch, head, heads, queries, width, values;
    Set set;
    const T *q, *k;
    const V *v;
    const unsigned *mask, *pairs;
    const i64 *starts;
    i64 q_step;

    __device__ __forceinline__ Head(const Problem &p, i64 n, bool second, const T *q, const T *k, const V *v,
                                    const unsigned *mask, const T *k2, const V *v2, const unsigned *mask2,
                                    const i64 *starts, const unsigned *pairs)
        : batch(n / p.heads), head(n % p.heads), heads(p.heads), queries(p.queries), width(p.width), values(p.values),
          set(p.set[0]), pairs(pairs), starts(starts ? starts + batch * p.start_rows : nullptr), q_step(p.q[1]) {
        if (second) set = p.set[1];
        this->q = q + batch * p.q[0] + head * p.q[2];
        this->k = (second ? k2 : k) + batch * set.k[0] + head * set.k[2];
        this->v = (second ? v2 : v) + batch * set.v[0] + head * set.v[2];
        this->mask = second ? mask2 : mask;
        if (this->mask) this->mask += batch * set.keys;
        if (pairs) this->pairs += batch * set.keys * queries;
    }

    __device__ __forceinline__ bool is_key(i64 j) const { return j < set.keys && (!mask || mask[j]); }
    __device__ __forceinline__ bool sees(i64 i, i64 j) const {
        if (i >= queries || !is_key(j) || (pairs && !pairs[j * queries + i])) return false;
        switch (set.sees) {
        case CAUSAL: return j <= i + set.keys - queries;
        case OWN_BLOCK: return starts[i] <= j && j <= i;
        case EARLIER_BLOCKS: return j < starts[i];
        default: return true;
        }
    }
    // The keys that queries of [i, end) may see lie between these.
    __device__ __forceinline__ i64 first_key(i64 i) const { return set.sees == OWN_BLOCK ? starts[i] : 0; }
    __device__ __forceinline__ i64 last_key(i64 end) const {
        switch (set.sees) {
        case CAUSAL: return end + set.keys - queries;
        case OWN_BLOCK: return end;
        case EARLIER_BLOCKS: return starts[end - 1];
        default: return set.keys;
        }
    }
    // No query before this one sees a key from j on.
    __device__ __forceinline__ i64 first_query(i64 j) const {
        switch (set.sees) {
        case CAUSAL: return math::max(i64(0), j - (set.keys - queries));
        case OWN_BLOCK: return j;
        default: return 0;
        }
    }
    // Whether some of the queries [i, end) may see some of the keys [j, last).
    __device__ __forceinline__ bool meet(i64 i, i64 end, i64 j, i64 last) const {
        switch (set.sees) {
        case OWN_BLOCK: return starts[i] < last;
        case EARLIER_BLOCKS: return j < starts[end - 1];
        default: return true;
        }
    }

    // Numbers of rows, 0 where there is none; of keys that nobody may see neither, whatever they hold.
    __device__ __forceinline__ T query(i64 i, i64 c) const { return i < queries ? q[i * q_step + c] : T(0); }
    __device__ __forceinline__ T key(i64 j, i64 c) const { return is_key(j) ? k[j * set.k[1] + c] : T(0); }
    __device__ __forceinline__ T value(i64 j, i64 c) const {
        return c < values && is_key(j) ? widen(v[j * set.v[1] + c]) : T(0);
    }
    // Rows of contiguous tensors [B, T_q, H, ..], [B, T_k, H, ..]; and of [B, H, T_q].
    __device__ __forceinline__ i64 query_row(i64 i) const { return (batch * queries + i) * heads + head; }
    __device__ __forceinline__ i64 key_row(i64 j) const { return (batch * set.keys + j) * heads + head; }
    __device__ __forceinline__ i64 of_head(i64 i) const { return (batch * heads + head) * queries + i; }
};

#define HEAD(second) Head<T, V> head(p, n, second, q, k, v, mask, k2, v2, mask2, starts, pairs)

// relu(x), NaN where x is.
template <class T> __device__ __forceinline__ T relu(T x) { return x < T(0) ? T(0) : x; }

// Where they are asked for: out [B, T_q, H, G], its product with the gate, and the logarithms of sums [B, H, T_q], +inf for
// a query without keys, so that exp(s - lse) is its weight in any case.
template <class T, class V, bool NARROW>
__global__ void __launch_bounds__(THREADS, 2)
attention_forward(OPERANDS(T, V), const V *__restrict__ gate, V *__restrict__ out, V *__restrict__ gated, T *__restrict__ lse) {
    SHARED(T, weights, [SIZE<T>][SIZE<T> + 1]);
    SHARED(T, tops, [SIZE<T>]);
    SHARED(T, sums, [SIZE<T>]);
    SHARED(T, shrink, [SIZE<T>]);
    FACTORS(T, factors);
    RunningSoftmax<T> softmax{tops, sums, shrink};
    i64 tiles = (p.queries + SIZE<T> - 1) / SIZE<T>, n = blockIdx.x / tiles;
    i64 first = blockIdx.x % tiles * SIZE<T>, end = math::min(p.queries, first + SIZE<T>), column = i64(blockIdx.y) * SIZE<T>;
    softmax.begin();
    TileSum<T, NARROW> sum;
    for (int s = 0; s < p.sets; s++) {
        HEAD(s == 1);
        i64 last = head.last_key(end);
        for (i64 j = head.first_key(first); j < last; j += SIZE<T>) {
            TileSum<T, NARROW> scores;
            add_product_of_rows(scores, factors, p.width, [&](int m, i64 c) { return head.query(first + m, c); },
                                [&](int n, i64 c) { return head.key(j + n, c); });
            __syncthreads();
            each(scores, [&](int m, int n, T score) {
                T weight = score * T(p.scale), hidden = p.squared ? T(0) : -math::infinity<T>();
                if (p.squared) weight = relu(weight) * relu(weight);
                weights[m][n] = head.sees(first + m, j + n) ? weight : hidden;
            });
            __syncthreads();
            if (!p.squared) {
                softmax.step(weights);
                __syncthreads();
                each(sum, [&](int m, int, T &x) { x *= shrink[m]; });
            }
            add_product(sum, factors, int(math::min(i64(SIZE<T>), last - j)), [&](int m, int k) { return weights[m][k]; },
                        [&](int k, int n) { return head.value(j + k, column + n); });
        }
    }
    __syncthreads();
    HEAD(false);
    each(sum, [&](int m, int n, T x) {
        i64 i = first + m, c = column + n;
        if (i >= p.queries || c >= p.values) return;
        // A query that sees no key gives 0.
        T y = p.squared ? x : sums[m] == T(0) ? T(0) : x / sums[m];
        i64 at = head.query_row(i) * p.values + c;
        if (out) out[at] = narrow<V>(y);
        if (gated) gated[at] = narrow<V>(y * widen(gate[head.batch * p.gate[0] + i * p.gate[1] + head.head * p.gate[2] + c]));
    });
    if (lse && column == 0 && threadIdx.x < SIZE<T> && first + threadIdx.x < p.queries) {
        T total = sums[threadIdx.x];
        lse[head.of_head(first + threadIdx.x)] =
            total == T(0) ? math::infinity<T>() : tops[threadIdx.x] + math::log(total);
    }
}

// What arrives, of contiguous [B, T_q, H, G], a warp for each row: with a gate, dout times the gate and, over `out`, dout times
// the output. delta [B, T_q, H] is the sum of the former times the output.
template <class T, class V>
__global__ void attention_arrive(Problem p, const V *__restrict__ gate, V *dout, V *out, T *__restrict__ delta, i64 rows) {
    i64 row = i64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    i64 head = row % p.heads, i = row / p.heads % p.queries, batch = row / p.heads / p.queries;
    T sum = 0;
    for (i64 c = threadIdx.x % 32; c < p.values; c += 32) {
        i64 at = row * p.values + c;
        T d = widen(dout[at]), y = widen(out[at]), arrived = d;
        if (gate) {
            arrived = d * widen(gate[batch * p.gate[0] + i * p.gate[1] + head * p.gate[2] + c]);
            dout[at] = narrow<V>(arrived);
            out[at] = narrow<V>(d * y);
        }
        sum = math::fma(arrived, y, sum);
    }
    sum = warp_reduce(sum, Plus());
    if (threadIdx.x % 32 == 0) delta[row] = sum;
}

// From [B, H, T_q] to [B, T_q, H], where a query without keys has -inf.
template <class T>
__global__ void attention_shown_lse(const T *__restrict__ lse, T *__restrict__ out, i64 heads, i64 queries, i64 count) {
    GRID_STRIDE(at, count) {
        i64 head = at % heads, i = at / heads % queries, batch = at / heads / queries;
        T x = lse[(batch * heads + head) * queries + i];
        out[at] = x == math::infinity<T>() ? -x : x;
    }
}

// Weight and slope of a pair, from the products of its rows; the slope times the scale, for it is multiplied with rows.
template <class T> struct Pair {
    T weight, slope;
    __device__ __forceinline__ Pair(const Problem &p, T qk, T dv, T lse, T delta) {
        T score = qk * T(p.scale);
        if (p.squared) {
            weight = relu(score) * relu(score);
            slope = T(2) * relu(score) * dv * T(p.scale);
        } else {
            weight = math::exp(score - lse);
            slope = weight * (dv - delta) * T(p.scale);
        }
    }
};

// For softmax.
#define ARRIVED(T, V) const V *__restrict__ dout, const T *__restrict__ lse, const T *__restrict__ delta

template <class T, class V, bool NARROW>
__global__ void __launch_bounds__(THREADS, 2) attention_backward_queries(OPERANDS(T, V), ARRIVED(T, V), T *__restrict__ dq) {
    SHARED(T, slopes, [SIZE<T>][SIZE<T> + 1]);
    FACTORS(T, factors);
    i64 tiles = (p.queries + SIZE<T> - 1) / SIZE<T>, n = blockIdx.x / tiles;
    i64 first = blockIdx.x % tiles * SIZE<T>, end = math::min(p.queries, first + SIZE<T>), column = i64(blockIdx.y) * SIZE<T>;
    TileSum<T, NARROW> sum;
    for (int s = 0; s < p.sets; s++) {
        HEAD(s == 1);
        i64 last = head.last_key(end);
        for (i64 j = head.first_key(first); j < last; j += SIZE<T>) {
            TileSum<T, NARROW> scores, products;
            add_product_of_rows(scores, factors, p.width, [&](int m, i64 c) { return head.query(first + m, c); },
                                [&](int n, i64 c) { return head.key(j + n, c); });
            auto arrived = [&](int m, i64 c) {
                return first + m < p.queries ? widen(dout[head.query_row(first + m) * p.values + c]) : T(0);
            };
            add_product_of_rows(products, factors, p.values, arrived, [&](int n, i64 c) { return head.value(j + n, c); });
            __syncthreads();
            each(scores, products, [&](int m, int n, T qk, T dv) {
                i64 i = first + m;
                T slope = 0;
                if (head.sees(i, j + n)) {
                    slope = Pair<T>(p, qk, dv, lse ? lse[head.of_head(i)] : T(0), delta ? delta[head.query_row(i)] : T(0)).slope;
                }
                slopes[m][n] = slope;
            });
            add_product(sum, factors, int(math::min(i64(SIZE<T>), last - j)), [&](int m, int k) { return slopes[m][k]; },
                        [&](int k, int n) { return column + n < p.width ? head.key(j + k, column + n) : T(0); });
        }
    }
    HEAD(false);
    each(sum, [&](int m, int n, T x) {
        if (first + m < p.queries && column + n < p.width) dq[head.query_row(first + m) * p.width + column + n] = x;
    });
}

// Of the first set. Blocks of one head and tile of keys have, from `part` on, those of dk and then those of dv.
template <class T, class V, bool NARROW>
__global__ void __launch_bounds__(THREADS, 2)
attention_backward_keys(OPERANDS(T, V), ARRIVED(T, V), i64 part, T *__restrict__ dk, V *__restrict__ dv) {
    SHARED(T, weights, [SIZE<T>][SIZE<T> + 1]);
    FACTORS(T, factors);
    i64 keys = p.set[0].keys, tiles = (keys + SIZE<T> - 1) / SIZE<T>, n = blockIdx.x / tiles;
    i64 first = blockIdx.x % tiles * SIZE<T>, last = math::min(keys, first + SIZE<T>);
    i64 of_dk = (p.width + SIZE<T> - 1) / SIZE<T>;
    part += blockIdx.y;
    bool for_k = part < of_dk;
    i64 column = (for_k ? part : part - of_dk) * SIZE<T>;
    HEAD(false);
    TileSum<T, NARROW> sum;
    for (i64 i = head.first_query(first) / SIZE<T> * SIZE<T>; i < p.queries; i += SIZE<T>) {
        i64 end = math::min(p.queries, i + SIZE<T>);
        if (!head.meet(i, end, first, last)) continue;
        auto arrived = [&](i64 m, i64 c) {
            return i + m < p.queries ? widen(dout[head.query_row(i + m) * p.values + c]) : T(0);
        };
        TileSum<T, NARROW> scores, products;
        add_product_of_rows(scores, factors, p.width, [&](int m, i64 c) { return head.query(i + m, c); },
                            [&](int n, i64 c) { return head.key(first + n, c); });
        if (for_k) {
            add_product_of_rows(products, factors, p.values, arrived, [&](int n, i64 c) { return head.value(first + n, c); });
        }
        __syncthreads();
        each(scores, products, [&](int m, int n, T qk, T dv) {
            i64 at = i + m;
            T x = 0;
            if (head.sees(at, first + n)) {
                Pair<T> pair(p, qk, dv, lse ? lse[head.of_head(at)] : T(0), delta ? delta[head.query_row(at)] : T(0));
                x = for_k ? pair.slope : pair.weight;
            }
            weights[m][n] = x;
        });
        add_product(sum, factors, int(end - i), [&](int m, int k) { return weights[k][m]; }, [&](int k, int n) {
            if (for_k) return column + n < p.width ? head.query(i + k, column + n) : T(0);
            return column + n < p.values ? arrived(k, column + n) : T(0);
        });
    }
    each(sum, [&](int m, int n, T x) {
        i64 j = first + m, c = column + n;
        if (j >= keys) return;
        if (for_k && c < p.width) dk[head.key_row(j) * p.width + c] = x;
        if (!for_k && c < p.values) dv[head.key_row(j) * p.values + c] = narrow<V>(x);
    });
}
