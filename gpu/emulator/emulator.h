// What a kernel's source finds on the CPU in place of CUDA's built-ins: one fiber per thread of a block (engine.cpp), and
// every access to memory checked.
//
// The source is compiled by g++ with -fsanitize=thread, which calls `__tsan_read4(address)` and its like before each access to
// memory that others may see; those functions are ours, in engine.cpp, so that nothing of that sanitizer's own is needed.
// (-fsanitize=kernel-address leaves out a store to where was just read from, and accesses to static arrays.) Shared arrays are
// declared by SHARED (common.cuh) and lie where the engine says, apart from each other.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#define KUMIKI_EMULATED 1

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __align__(n) alignas(n)

struct dim3 {
    unsigned x, y, z;
};

// What a warp does together, see engine.cpp.
enum WarpOperation { WARP_SYNC, WARP_SHUFFLE, WARP_BALLOT, WARP_MMA };

struct Shuffle {
    uint64_t value;
    int source; // of this lane: the lane whose value it wants
};
struct Mma {
    float *d;
    const unsigned *a, *b;
};

extern "C" {
// Constant within a fiber.
__attribute__((const)) dim3 emulator_thread();
__attribute__((const)) dim3 emulator_block();
__attribute__((const)) dim3 emulator_block_size();
__attribute__((const)) dim3 emulator_grid_size();
__attribute__((const)) unsigned emulator_lane();
void *emulator_dynamic_shared();
// The array of a declaration, which `tag` stands for: the same for all threads of a block.
void *emulator_shared(const void *tag, const char *name, size_t bytes);
void emulator_barrier(int line);
void emulator_warp(unsigned mask, WarpOperation operation, int line, void *payload);
// Atomics: `operation` is one of the characters below.
uint32_t emulator_atomic(void *address, char operation, char type, uint32_t value, uint32_t compare);
[[noreturn]] void emulator_trap(const char *what);
}

#define threadIdx (emulator_thread())
#define blockIdx (emulator_block())
#define blockDim (emulator_block_size())
#define gridDim (emulator_grid_size())
#define warpSize 32
#define __syncthreads() emulator_barrier(__LINE__)

// Payloads lie on the calling thread's stack.
template <class T> inline T emulator_shuffle(unsigned mask, T value, int source, int line) {
    static_assert(sizeof(T) <= 8);
    Shuffle payload{0, source};
    memcpy(&payload.value, &value, sizeof(T));
    emulator_warp(mask, WARP_SHUFFLE, line, &payload);
    memcpy(&value, &payload.value, sizeof(T));
    return value;
}
inline int emulator_lane_within(int lane, int width, int own) {
    return lane / width == own / width && lane >= 0 ? lane : own;
}
template <class T> inline T emulator_shuffle_up(unsigned mask, T value, unsigned by, int width, int line) {
    int own = emulator_lane();
    return emulator_shuffle(mask, value, emulator_lane_within(own - int(by), width, own), line);
}
template <class T> inline T emulator_shuffle_down(unsigned mask, T value, unsigned by, int width, int line) {
    int own = emulator_lane();
    return emulator_shuffle(mask, value, emulator_lane_within(own + int(by), width, own), line);
}
inline unsigned emulator_vote(unsigned mask, bool value, int line) {
    unsigned payload = value;
    emulator_warp(mask, WARP_BALLOT, line, &payload);
    return payload;
}
#define __shfl_sync(mask, value, lane) emulator_shuffle(mask, value, (lane) & 31, __LINE__)
#define __shfl_xor_sync(mask, value, by) emulator_shuffle(mask, value, int(emulator_lane()) ^ (by), __LINE__)
#define __shfl_up_sync(mask, value, by) emulator_shuffle_up(mask, value, by, 32, __LINE__)
#define __shfl_down_sync(mask, value, by) emulator_shuffle_down(mask, value, by, 32, __LINE__)
#define __ballot_sync(mask, value) emulator_vote(mask, value, __LINE__)
#define __any_sync(mask, value) (emulator_vote(mask, value, __LINE__) != 0)
#define __all_sync(mask, value) (emulator_vote(mask, !(value), __LINE__) == 0)
#define __syncwarp(...) emulator_warp(0xffffffffu __VA_OPT__(& (__VA_ARGS__)), WARP_SYNC, __LINE__, nullptr)

template <class To, class From> inline To emulator_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}
inline unsigned __float_as_uint(float x) { return emulator_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return emulator_bits<float>(x); }
inline int __float_as_int(float x) { return emulator_bits<int>(x); }
inline float __int_as_float(int x) { return emulator_bits<float>(x); }

inline unsigned atomicAdd(unsigned *p, unsigned x) { return emulator_atomic(p, '+', 'u', x, 0); }
inline int atomicAdd(int *p, int x) { return int(emulator_atomic(p, '+', 'i', unsigned(x), 0)); }
inline float atomicAdd(float *p, float x) { return __uint_as_float(emulator_atomic(p, '+', 'f', __float_as_uint(x), 0)); }
inline unsigned atomicMax(unsigned *p, unsigned x) { return emulator_atomic(p, '>', 'u', x, 0); }
inline int atomicMax(int *p, int x) { return int(emulator_atomic(p, '>', 'i', unsigned(x), 0)); }
inline unsigned atomicCAS(unsigned *p, unsigned old, unsigned x) { return emulator_atomic(p, '=', 'u', x, old); }

template <class T> inline T __ldg(const T *p) { return *p; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline void __trap() { emulator_trap("the kernel gave up (__trap)"); }

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
template <class T> inline T emulator_min(T a, T b) { return a < b ? a : b; }
template <class T> inline T emulator_max(T a, T b) { return a > b ? a : b; }
#define KUMIKI_MIN_MAX(T)                                                                                               \
    inline T min(T a, T b) { return emulator_min(a, b); }                                                               \
    inline T max(T a, T b) { return emulator_max(a, b); }
KUMIKI_MIN_MAX(int)
KUMIKI_MIN_MAX(unsigned)
KUMIKI_MIN_MAX(long long)
KUMIKI_MIN_MAX(unsigned long long)
#undef KUMIKI_MIN_MAX

// Aligned as on a card, where a misaligned access fails.
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// Calls a kernel with the arguments that `params` point to, which lie outside of what it may touch.
template <class... A, size_t... I>
__attribute__((no_sanitize("thread"))) inline void
emulator_unpack(void (*kernel)(A...), void **params, std::integer_sequence<size_t, I...>) {
    kernel(*static_cast<std::remove_reference_t<A> *>(params[I])...);
}
template <class... A>
__attribute__((no_sanitize("thread"))) inline void emulator_call(void (*kernel)(A...), void **params) {
    emulator_unpack(kernel, params, std::index_sequence_for<A...>{});
}
