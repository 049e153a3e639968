// Linear attention chunk by chunk: of every chunk the sum of outer products of features and values; of these the running sums,
// from the left or from the right; and products with them.
#include "tile.cuh"

// Strides: from an entry of the batch, a token and a head to the next; rows themselves lie without gaps. A chunk meets the
// running sum of the chunks that lie `lag` and more before it, or behind it where they run from the right.
struct Prefix {
    i64 heads, time, chunk, chunks, lag, reverse, features, values, a[3], v[3], gate[3];
};

struct Chunk {
    i64 number, head, batch, start, end;
    __device__ __forceinline__ Chunk(const Prefix &p, i64 n)
        : number(n % p.chunks), head(n / p.chunks % p.heads), batch(n / p.chunks / p.heads), start(number * p.chunk),
          end(math::min(p.time, start + p.chunk)) {}
    // Of the running sums, null where nothing is summed.
    template <class T> __device__ __forceinline__ const T *state(const Prefix &p, const T *states) const {
        i64 at = p.reverse ? number + p.lag : number - p.lag;
        if (at < 0 || at >= p.chunks) return nullptr;
        return states + ((batch * p.heads + head) * p.chunks + at) * p.features * p.values;
    }
    // Over the tokens before the chunk, of which it is a mean where that is asked for.
    template <class T> __device__ __forceinline__ T factor(int mean) const { return mean && start > 0 ? T(1.0 / double(start)) : T(1); }
    template <class X> __device__ __forceinline__ const X *rows(const X *x, const i64 *strides) const {
        return x + batch * strides[0] + head * strides[2];
    }
    __device__ __forceinline__ i64 row(const Prefix &p, i64 token) const { return (batch * p.time + token) * p.heads + head; }
};

// [heads of all entries, chunks, features, values]: Σ a ⊗ v of each chunk, a block for each tile of it.
template <class T, class V, bool NARROW>
__global__ void __launch_bounds__(THREADS, 2)
prefix_states(Prefix p, const T *__restrict__ a, const V *__restrict__ v, T *__restrict__ states, int mean) {
    FACTORS(T, factors);
    Chunk chunk(p, blockIdx.x);
    i64 across = (p.values + SIZE<T> - 1) / SIZE<T>, feature = blockIdx.y / across * SIZE<T>, value = blockIdx.y % across * SIZE<T>;
    const T *rows = chunk.rows(a, p.a);
    const V *values = chunk.rows(v, p.v);
    TileSum<T, NARROW> sum;
    add_product_of_columns(sum, factors, chunk.end - chunk.start,
                           [&](int m, i64 j) { return feature + m < p.features ? rows[(chunk.start + j) * p.a[1] + feature + m] : T(0); },
                           [&](i64 j, int n) { return value + n < p.values ? widen(values[(chunk.start + j) * p.v[1] + value + n]) : T(0); });
    T factor = chunk.template factor<T>(mean);
    each(sum, [&](int m, int n, T x) {
        i64 f = feature + m, c = value + n;
        if (f < p.features && c < p.values) states[(i64(blockIdx.x) * p.features + f) * p.values + c] = x * factor;
    });
}

// The sums of the chunks before each, or behind it; `size` numbers each, of so many heads.
template <class T> __global__ void prefix_scan(T *states, i64 chunks, i64 size, int reverse, i64 count) {
    GRID_STRIDE(at, count) {
        T *first = states + at / size * chunks * size + at % size, sum = 0;
        for (i64 c = 0; c < chunks; c++) {
            T *here = first + (reverse ? chunks - 1 - c : c) * size, x = *here;
            *here = sum;
            sum += x;
        }
    }
}

// y[i] = near[i] + Σ_r a_i[r] state[r], in [B, T, H, values], and its product with the gate; each where it is there.
template <class T, class V, bool NARROW>
__global__ void __launch_bounds__(THREADS, 2)
prefix_values(Prefix p, const T *__restrict__ a, const T *__restrict__ states, const V *near, const V *__restrict__ gate, V *y,
              V *__restrict__ gated, int mean) {
    FACTORS(T, factors);
    i64 tiles = (p.chunk + SIZE<T> - 1) / SIZE<T>, column = i64(blockIdx.y) * SIZE<T>;
    Chunk chunk(p, blockIdx.x / tiles);
    i64 first = chunk.start + blockIdx.x % tiles * SIZE<T>;
    if (first >= chunk.end) return;
    const T *rows = chunk.rows(a, p.a), *state = chunk.state(p, states);
    TileSum<T, NARROW> sum;
    if (state) {
        add_product_of_terms(sum, factors, p.features,
                             [&](int m, i64 r) { return first + m < chunk.end ? rows[(first + m) * p.a[1] + r] : T(0); },
                             [&](i64 r, int n) { return column + n < p.values ? state[r * p.values + column + n] : T(0); });
    }
    T factor = chunk.template factor<T>(mean);
    each(sum, [&](int m, int n, T x) {
        i64 i = first + m, c = column + n;
        if (i >= chunk.end || c >= p.values) return;
        i64 at = chunk.row(p, i) * p.values + c;
        T value = x * factor + (near ? widen(near[at]) : T(0));
        if (y) y[at] = narrow<V>(value);
        if (gated) gated[at] = narrow<V>(value * widen(chunk.rows(gate, p.gate)[i * p.gate[1] + c]));
    });
}

// y[i][r] = Σ_c v_i[c] state[r][c], in [B, T, H, features].
template <class T, class V, bool NARROW>
__global__ void __launch_bounds__(THREADS, 2)
prefix_features(Prefix p, const V *__restrict__ v, const T *__restrict__ states, T *__restrict__ y, int mean) {
    FACTORS(T, factors);
    i64 tiles = (p.chunk + SIZE<T> - 1) / SIZE<T>, feature = i64(blockIdx.y) * SIZE<T>;
    Chunk chunk(p, blockIdx.x / tiles);
    i64 first = chunk.start + blockIdx.x % tiles * SIZE<T>;
    if (first >= chunk.end) return;
    const V *values = chunk.rows(v, p.v);
    const T *state = chunk.state(p, states);
    TileSum<T, NARROW> sum;
    if (state) {
        add_product_of_rows(sum, factors, p.values,
                            [&](int m, i64 c) { return first + m < chunk.end ? widen(values[(first + m) * p.v[1] + c]) : T(0); },
                            [&](int n, i64 c) { return feature + n < p.features ? state[(feature + n) * p.values + c] : T(0); });
    }
    T factor = chunk.template factor<T>(mean);
    each(sum, [&](int m, int n, T x) {
        i64 i = first + m, f = feature + n;
        if (i < chunk.end && f < p.features) y[chunk.row(p, i) * p.features + f] = x * factor;
    });
}
