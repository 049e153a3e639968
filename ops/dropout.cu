#include "common.cuh"

struct Key {
    unsigned words[8];
    unsigned long long stream, first; // the first word
};

__device__ __forceinline__ unsigned rotated(unsigned x, int by) { return x << by | x >> (32 - by); }
__device__ __forceinline__ void quarter_round(unsigned &a, unsigned &b, unsigned &c, unsigned &d) {
    a += b; d = rotated(d ^ a, 16);
    c += d; b = rotated(b ^ c, 12);
    a += b; d = rotated(d ^ a, 8);
    c += d; b = rotated(b ^ c, 7);
}

// 16 words of ChaCha8: the generator of the CPU, so that masks are the same wherever they are drawn.
__device__ __forceinline__ void chacha8(const Key &key, unsigned long long block, unsigned (&out)[16]) {
    unsigned x[16] = {0x61707865u, 0x3320646eu, 0x79622d32u, 0x6b206574u};
    for (int i = 0; i < 8; i++) x[4 + i] = key.words[i];
    x[12] = unsigned(block);
    x[13] = unsigned(block >> 32);
    x[14] = unsigned(key.stream);
    x[15] = unsigned(key.stream >> 32);
    for (int i = 0; i < 16; i++) out[i] = x[i];
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 4; i++) quarter_round(out[i], out[4 + i], out[8 + i], out[12 + i]);
        quarter_round(out[0], out[5], out[10], out[15]);
        quarter_round(out[1], out[6], out[11], out[12]);
        quarter_round(out[2], out[7], out[8], out[13]);
        quarter_round(out[3], out[4], out[9], out[14]);
    }
    for (int i = 0; i < 16; i++) out[i] += x[i];
}

// A thread for each 16 words, of `blocks`; elements of which the word is below `dropped` become 0, whatever they were.
template <class T>
__global__ void mask(Key key, const T *__restrict__ x, T *__restrict__ y, i64 count, i64 blocks, unsigned dropped, double scale) {
    i64 before = key.first % 16; // words of the first block that are not for these elements
    GRID_STRIDE(block, blocks) {
        unsigned words[16];
        chacha8(key, key.first / 16 + block, words);
        for (int w = 0; w < 16; w++) {
            i64 at = block * 16 + w - before;
            if (at >= 0 && at < count) y[at] = narrow<T>(words[w] < dropped ? Sum<T>(0) : widen(x[at]) * Sum<T>(scale));
        }
    }
}
