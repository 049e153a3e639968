// Runs the blocks of a launch one after another, each with a fiber per thread, and judges every access to memory that the
// instrumented kernels announce. A fault ends the launch with a sentence; what faults is not done.
#include "emulator.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <sys/mman.h>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace {

constexpr size_t STACK = 128 * 1024;
constexpr unsigned MOST_THREADS = 1024;

// A buffer of the device.
struct Region {
    uintptr_t start;
    size_t bytes;
};

// --- Fibers -----------------------------------------------------------------------------------------------------------

#if defined(__x86_64__)
using Context = void *;
extern "C" void emulator_switch(Context *from, Context to);
asm(".text\n"
    ".type emulator_switch, @function\n"
    ".globl emulator_switch\n"
    ".hidden emulator_switch\n"
    "emulator_switch:\n"
    "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    "movq %rsp, (%rdi)\n"
    "movq %rsi, %rsp\n"
    "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
    "ret\n");
void switch_to(Context &from, Context &to) { emulator_switch(&from, to); }
void prepare(Context &context, char *stack, void (*entry)()) {
    // Six registers and the return address; a function begins with its stack 8 beyond a multiple of 16.
    void **top = reinterpret_cast<void **>(stack + STACK) - 1;
    *--top = reinterpret_cast<void *>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    context = top;
}
#else
using Context = ucontext_t;
void switch_to(Context &from, Context &to) { swapcontext(&from, &to); }
void prepare(Context &context, char *stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}
#endif

enum State { RUNS, AT_BARRIER, AT_WARP, FINISHED };

struct Fiber {
    Context context;
    State state;
    int line;
    unsigned mask;
    WarpOperation operation;
    void *payload;
};

// --- Shared memory ----------------------------------------------------------------------------------------------------

constexpr uint16_t NOBODY = 0xffff, SEVERAL = 0xfffe;

// Of one byte: who wrote it last, who has read it, and when. Moments are counts of barriers, of the block and of the warp;
// those of the block go on over all blocks of a launch, so that nothing need be cleared between them.
struct Shadow {
    uint64_t write_moment, read_moment;
    uint32_t write_warp_moment, read_warp_moment;
    uint16_t writer, reader, reader_warp;
};

// Bytes before and after each array that are nobody's: an access there is one that missed the array.
constexpr size_t GAP = 4096;

struct SharedArray {
    const void *tag;
    const char *name;
    uintptr_t start;
    size_t bytes;
    std::vector<char> room;
    std::vector<Shadow> shadow;
};

SharedArray shared_array(const void *tag, const char *name, size_t bytes) {
    SharedArray array{tag, name, 0, bytes, std::vector<char>(bytes + 2 * GAP + 128), {}};
    array.start = (reinterpret_cast<uintptr_t>(array.room.data()) + GAP + 127) / 128 * 128;
    array.shadow.assign(bytes, Shadow{0, 0, 0, 0, NOBODY, NOBODY, NOBODY});
    return array;
}

// --- A launch ---------------------------------------------------------------------------------------------------------

struct Launch {
    void (*kernel)(void **);
    void **params;
    dim3 grid, size, block;
    unsigned threads;
    std::vector<Region> regions;
    size_t recent_region = 0;
    std::vector<SharedArray> shared;
    size_t recent_shared = 0;
    size_t static_bytes = 0;
    std::vector<Fiber> fibers;
    std::vector<uint32_t> warp_moments;
    uint64_t moment = 1, block_start = 1;
    unsigned current = 0;
    Context scheduler;
    bool failed = false;
    std::string message;
};

Launch *launch;
char *stacks;

char *stack_of(unsigned thread) { return stacks + size_t(thread) * STACK; }

dim3 index_of(unsigned thread) {
    dim3 size = launch->size;
    return {thread % size.x, thread / size.x % size.y, thread / size.x / size.y};
}

std::string place(dim3 at) {
    char text[64];
    snprintf(text, sizeof text, "(%u, %u, %u)", at.x, at.y, at.z);
    return text;
}

// Ends the launch from within a fiber, which is never resumed.
[[noreturn]] void fail(const std::string &what, void *where) {
    char address[32] = "";
    if (where) snprintf(address, sizeof address, "\n%p", where);
    launch->failed = true;
    launch->message = "block " + place(launch->block) + ", thread " + place(index_of(launch->current)) + ": " + what + address;
    switch_to(launch->fibers[launch->current].context, launch->scheduler);
    __builtin_unreachable();
}

std::string named_before(const SharedArray &array, uintptr_t address, size_t bytes, bool write) {
    return std::string(write ? "a write" : "a read") + " of " + std::to_string(bytes) + " bytes " +
           std::to_string(array.start - address) + " bytes before shared " + array.name;
}

void check_shared(SharedArray &array, uintptr_t address, size_t bytes, bool write, bool atomic, void *where) {
    Launch &l = *launch;
    unsigned thread = l.current, warp = thread / 32;
    uint32_t warp_moment = l.warp_moments[warp];
    size_t offset = address - array.start;
    auto named = [&](const char *what) {
        return std::string(what) + " of " + std::to_string(bytes) + " bytes at byte " + std::to_string(offset) + " of shared " + array.name;
    };
    if (address < array.start) fail(named_before(array, address, bytes, write), where);
    if (offset + bytes > array.bytes) {
        fail(named(write ? "a write" : "a read") + ", which has " + std::to_string(array.bytes), where);
    }
    for (size_t i = offset; i < offset + bytes; i++) {
        Shadow &s = array.shadow[i];
        bool written = s.writer != NOBODY && s.write_moment >= l.block_start;
        // Whether another thread's access came without a barrier between.
        bool write_unordered = written && s.writer != thread && s.write_moment == l.moment &&
                               !(s.writer / 32u == warp && s.write_warp_moment != warp_moment);
        if (write_unordered && !atomic) {
            fail(named(write ? "a write" : "a read") + " that thread " + std::to_string(s.writer) + " writes, with no barrier between", where);
        }
        if (!write && !written) fail(named("a read") + ", which nothing wrote", where);
        if (write) {
            bool read = s.reader != NOBODY && s.read_moment == l.moment && s.reader != thread &&
                        !(s.reader_warp == warp && s.read_warp_moment != warp_moment);
            if (read && !atomic) {
                std::string reader = s.reader == SEVERAL ? "other threads read" : "thread " + std::to_string(s.reader) + " reads";
                fail(named("a write") + " that " + reader + ", with no barrier between", where);
            }
            s.writer = thread;
            s.write_moment = l.moment;
            s.write_warp_moment = warp_moment;
        }
        if (!write && !atomic) {
            // Reads before the warp's last operation are ordered before writes of the warp by it, and those of other warps meet
            // this read as well.
            bool ordered = s.reader_warp == warp && s.read_warp_moment != warp_moment;
            if (s.reader == NOBODY || s.read_moment != l.moment || ordered) {
                s.reader = thread;
                s.reader_warp = warp;
            } else {
                if (s.reader_warp != warp) s.reader_warp = SEVERAL;
                if (s.reader != thread) s.reader = SEVERAL;
            }
            s.read_moment = l.moment;
            s.read_warp_moment = warp_moment;
        }
    }
}

void check(uintptr_t address, size_t bytes, bool write, void *where, bool atomic = false) {
    if (!launch || launch->failed) return;
    Launch &l = *launch;
    uintptr_t stack = reinterpret_cast<uintptr_t>(stack_of(l.current));
    if (address >= stack && address + bytes <= stack + STACK) return;
    if (address % (bytes & -bytes) && bytes <= 16) {
        fail((write ? "a write of " : "a read of ") + std::to_string(bytes) + " bytes at an address that is no multiple of it", where);
    }
    if (l.recent_region < l.regions.size()) {
        Region &r = l.regions[l.recent_region];
        if (address >= r.start && address + bytes <= r.start + r.bytes) return;
    }
    for (size_t i = 0; i < l.shared.size(); i++) {
        SharedArray &array = l.shared[(l.recent_shared + i) % l.shared.size()];
        if (address + GAP >= array.start && address < array.start + array.bytes + GAP) {
            l.recent_shared = (l.recent_shared + i) % l.shared.size();
            return check_shared(array, address, bytes, write, atomic, where);
        }
    }
    // The regions before and after it.
    auto after = std::upper_bound(l.regions.begin(), l.regions.end(), address, [](uintptr_t a, const Region &r) { return a < r.start; });
    bool has_before = after != l.regions.begin(), has_after = after != l.regions.end();
    if (has_before && address + bytes <= after[-1].start + after[-1].bytes) {
        l.recent_region = size_t(after - l.regions.begin()) - 1;
        return;
    }
    // Told of the nearer one.
    constexpr uintptr_t FAR = 1 << 20;
    uintptr_t beyond = has_before ? address - std::min(address, after[-1].start + after[-1].bytes) : FAR;
    uintptr_t short_of = has_after ? after->start - address : FAR;
    std::string what = (write ? "a write of " : "a read of ") + std::to_string(bytes) + " bytes ";
    if (beyond < FAR && beyond <= short_of) {
        fail(what + "at byte " + std::to_string(address - after[-1].start) + " of a buffer of " + std::to_string(after[-1].bytes), where);
    }
    if (short_of < FAR) fail(what + std::to_string(short_of) + " bytes before a buffer of " + std::to_string(after->bytes), where);
    fail(what + "at an address where no buffer of this device lies", where);
}

// --- The scheduler ----------------------------------------------------------------------------------------------------

void enter() {
    launch->kernel(launch->params);
    launch->fibers[launch->current].state = FINISHED;
    switch_to(launch->fibers[launch->current].context, launch->scheduler);
    __builtin_unreachable();
}

void wait() { switch_to(launch->fibers[launch->current].context, launch->scheduler); }

// The value of element (row, column) of the 16 x 16 factor A, the 16 x 8 factor B and the place of (row, column) of D, as
// the PTX manual lays them over the lanes of mma.m16n8k16.
float half_of(unsigned pair, int which) { return __uint_as_float((which ? pair >> 16 : pair & 0xffff) << 16); }

void perform(unsigned first, unsigned mask, WarpOperation operation) {
    std::vector<Fiber> &fibers = launch->fibers;
    auto payload = [&](unsigned lane) { return fibers[first + lane].payload; };
    if (operation == WARP_SHUFFLE) {
        uint64_t values[32];
        for (unsigned lane = 0; lane < 32; lane++)
            if (mask >> lane & 1) values[lane] = static_cast<Shuffle *>(payload(lane))->value;
        for (unsigned lane = 0; lane < 32; lane++) {
            if (!(mask >> lane & 1)) continue;
            Shuffle *shuffle = static_cast<Shuffle *>(payload(lane));
            // From a lane that does not take part nothing comes: a value that shows.
            shuffle->value = mask >> shuffle->source & 1 ? values[shuffle->source] : ~uint64_t(0);
        }
    } else if (operation == WARP_BALLOT) {
        unsigned votes = 0;
        for (unsigned lane = 0; lane < 32; lane++)
            if (mask >> lane & 1 && *static_cast<unsigned *>(payload(lane))) votes |= 1u << lane;
        for (unsigned lane = 0; lane < 32; lane++)
            if (mask >> lane & 1) *static_cast<unsigned *>(payload(lane)) = votes;
    } else if (operation == WARP_MMA) {
        float a[16][16], b[16][8];
        for (unsigned lane = 0; lane < 32; lane++) {
            Mma *m = static_cast<Mma *>(payload(lane));
            unsigned group = lane / 4, pair = lane % 4 * 2;
            for (int i = 0; i < 4; i++)
                for (int h = 0; h < 2; h++) a[group + i % 2 * 8][pair + i / 2 * 8 + h] = half_of(m->a[i], h);
            for (int i = 0; i < 2; i++)
                for (int h = 0; h < 2; h++) b[pair + i * 8 + h][group] = half_of(m->b[i], h);
        }
        for (unsigned lane = 0; lane < 32; lane++) {
            Mma *m = static_cast<Mma *>(payload(lane));
            unsigned group = lane / 4, pair = lane % 4 * 2;
            for (int i = 0; i < 4; i++) {
                unsigned row = group + i / 2 * 8, column = pair + i % 2;
                float sum = m->d[i];
                for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][column];
                m->d[i] = sum;
            }
        }
    }
}

std::string where_it_waits(unsigned thread) {
    Fiber &f = launch->fibers[thread];
    std::string name = "thread " + place(index_of(thread));
    switch (f.state) {
    case AT_BARRIER: return name + " waits at the barrier of line " + std::to_string(f.line);
    case AT_WARP: return name + " waits for its warp in line " + std::to_string(f.line);
    case FINISHED: return name + " has finished";
    default: return name + " runs";
    }
}

void stop(unsigned thread, const std::string &what) {
    launch->current = thread;
    launch->failed = true;
    launch->message = "block " + place(launch->block) + ": " + what;
}

// Releases the lanes of a warp's operation when all of its mask have come to it.
bool release_warp(unsigned thread) {
    std::vector<Fiber> &fibers = launch->fibers;
    Fiber &f = fibers[thread];
    unsigned first = thread / 32 * 32;
    unsigned there = std::min(32u, launch->threads - first);
    unsigned mask = f.operation == WARP_SYNC && there < 32 ? f.mask & ((1u << there) - 1) : f.mask;
    if (there < 32 && mask >> there) {
        stop(thread, where_it_waits(thread) + " for lanes that the block does not have");
        return false;
    }
    for (unsigned lane = 0; lane < there; lane++) {
        if (!(mask >> lane & 1)) continue;
        Fiber &other = fibers[first + lane];
        if (other.state != AT_WARP || other.operation != f.operation || other.line != f.line || other.mask != f.mask) return false;
    }
    perform(first, mask, f.operation);
    for (unsigned lane = 0; lane < there; lane++)
        if (mask >> lane & 1) fibers[first + lane].state = RUNS;
    launch->warp_moments[first / 32]++;
    return true;
}

void run_block(bool backwards) {
    Launch &l = *launch;
    l.moment++;
    l.block_start = l.moment;
    for (unsigned i = 0; i < l.threads; i++) {
        l.fibers[i].state = RUNS;
        prepare(l.fibers[i].context, stack_of(i), enter);
    }
    for (unsigned finished = 0;;) {
        bool progress = false;
        for (unsigned k = 0; k < l.threads; k++) {
            unsigned i = backwards ? l.threads - 1 - k : k;
            if (l.fibers[i].state != RUNS) continue;
            l.current = i;
            switch_to(l.scheduler, l.fibers[i].context);
            if (l.failed) return;
            progress = true;
            finished += l.fibers[i].state == FINISHED;
            if (l.fibers[i].state == AT_WARP) release_warp(i);
            if (l.failed) return;
        }
        if (finished == l.threads) return;
        if (progress) continue;
        // All who still run wait; at one barrier, or for ever.
        for (unsigned i = 0; i < l.threads; i++) {
            Fiber &f = l.fibers[i], &first = l.fibers[0];
            if (f.state == AT_BARRIER && f.line == first.line && first.state == AT_BARRIER) continue;
            return stop(i, where_it_waits(0) + ", " + where_it_waits(i));
        }
        for (unsigned i = 0; i < l.threads; i++) l.fibers[i].state = RUNS;
        l.moment++;
    }
}

} // namespace

// --- Called by kernels ------------------------------------------------------------------------------------------------

extern "C" {
dim3 emulator_thread() { return index_of(launch->current); }
dim3 emulator_block() { return launch->block; }
dim3 emulator_block_size() { return launch->size; }
dim3 emulator_grid_size() { return launch->grid; }
unsigned emulator_lane() { return launch->current % 32; }
void *emulator_shared(const void *tag, const char *name, size_t bytes) {
    for (SharedArray &array : launch->shared)
        if (array.tag == tag) return reinterpret_cast<void *>(array.start);
    launch->static_bytes += bytes;
    if (launch->static_bytes > 48 * 1024) {
        fail("shared arrays of " + std::to_string(launch->static_bytes) + " bytes with " + name + ", of 49152 that there are", nullptr);
    }
    launch->shared.push_back(shared_array(tag, name, bytes));
    return reinterpret_cast<void *>(launch->shared.back().start);
}
void *emulator_dynamic_shared() { return emulator_shared(nullptr, "", 0); }

void emulator_barrier(int line) {
    Fiber &f = launch->fibers[launch->current];
    f.state = AT_BARRIER;
    f.line = line;
    wait();
}

void emulator_warp(unsigned mask, WarpOperation operation, int line, void *payload) {
    unsigned lane = launch->current % 32;
    if (!(mask >> lane & 1)) fail("in line " + std::to_string(line) + " it is not in the mask of its own warp operation", nullptr);
    Fiber &f = launch->fibers[launch->current];
    f.state = AT_WARP;
    f.line = line;
    f.mask = mask;
    f.operation = operation;
    f.payload = payload;
    wait();
}

uint32_t emulator_atomic(void *address, char operation, char type, uint32_t value, uint32_t compare) {
    check(reinterpret_cast<uintptr_t>(address), 4, false, __builtin_return_address(0), true);
    uint32_t *p = static_cast<uint32_t *>(address), old = *p;
    switch (operation) {
    case '+': *p = type == 'f' ? __float_as_uint(__uint_as_float(old) + __uint_as_float(value)) : old + value; break;
    case '>': *p = type == 'i' ? uint32_t(max(int(old), int(value))) : max(old, value); break;
    case '=': *p = old == compare ? value : old; break;
    }
    check(reinterpret_cast<uintptr_t>(address), 4, true, __builtin_return_address(0), true);
    return old;
}

void emulator_trap(const char *what) { fail(what, __builtin_return_address(0)); }

// `order` is 0, or 1 to run blocks and threads backwards: what depends on it is wrong on a card. Gives 0, or 1 with a message.
__attribute__((visibility("default"))) int emulator_launch(void (*kernel)(void **), const unsigned *grid, const unsigned *block, unsigned shared, void **params,
                    const Region *regions, size_t count, int order, char *message, size_t capacity) {
    if (!stacks) {
        void *memory = mmap(nullptr, MOST_THREADS * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) {
            snprintf(message, capacity, "no memory for the stacks of its threads");
            return 1;
        }
        stacks = static_cast<char *>(memory);
    }
    Launch l;
    l.kernel = kernel;
    l.params = params;
    l.grid = {grid[0], grid[1], grid[2]};
    l.size = {block[0], block[1], block[2]};
    l.threads = block[0] * block[1] * block[2];
    l.regions.assign(regions, regions + count);
    l.fibers.resize(l.threads);
    l.warp_moments.resize((l.threads + 31) / 32);
    l.shared.push_back(shared_array(nullptr, "dynamic memory", shared));
    launch = &l;
    uint64_t blocks = uint64_t(grid[0]) * grid[1] * grid[2];
    for (uint64_t k = 0; k < blocks && !l.failed; k++) {
        uint64_t i = order ? blocks - 1 - k : k;
        l.block = {unsigned(i % grid[0]), unsigned(i / grid[0] % grid[1]), unsigned(i / grid[0] / grid[1])};
        run_block(order != 0);
    }
    launch = nullptr;
    if (l.failed) snprintf(message, capacity, "%s", l.message.c_str());
    return l.failed;
}

// --- Called by what the compiler inserts ------------------------------------------------------------------------------

#define KUMIKI_ACCESS(n)                                                                                                \
    void __tsan_read##n(uintptr_t address) { check(address, n, false, __builtin_return_address(0)); }                   \
    void __tsan_write##n(uintptr_t address) { check(address, n, true, __builtin_return_address(0)); }                   \
    void __tsan_unaligned_read##n(uintptr_t address) { check(address, n, false, __builtin_return_address(0)); }         \
    void __tsan_unaligned_write##n(uintptr_t address) { check(address, n, true, __builtin_return_address(0)); }
KUMIKI_ACCESS(1)
KUMIKI_ACCESS(2)
KUMIKI_ACCESS(4)
KUMIKI_ACCESS(8)
KUMIKI_ACCESS(16)
void __tsan_read_range(uintptr_t address, size_t n) { check(address, n, false, __builtin_return_address(0)); }
void __tsan_write_range(uintptr_t address, size_t n) { check(address, n, true, __builtin_return_address(0)); }
void __tsan_init() {}

// Each is given a description that begins with a file, a line and a column.
struct Location {
    const char *file;
    uint32_t line, column;
};
void undefined(const Location *at, const std::string &what) {
    if (launch && !launch->failed) fail(what + " in line " + std::to_string(at->line), nullptr);
}
struct Mismatch {
    Location at;
    const void *type;
    unsigned char log_alignment, kind;
};
void __ubsan_handle_type_mismatch_v1(Mismatch *m, uintptr_t) {
    undefined(&m->at, "an access at an address that is no multiple of " + std::to_string(1u << m->log_alignment));
}
void __ubsan_handle_out_of_bounds(Location *at, uintptr_t) { undefined(at, "an index outside of its array"); }
void __ubsan_handle_add_overflow(Location *at, uintptr_t, uintptr_t) { undefined(at, "a sum that overflows"); }
void __ubsan_handle_sub_overflow(Location *at, uintptr_t, uintptr_t) { undefined(at, "a difference that overflows"); }
void __ubsan_handle_mul_overflow(Location *at, uintptr_t, uintptr_t) { undefined(at, "a product that overflows"); }
void __ubsan_handle_negate_overflow(Location *at, uintptr_t) { undefined(at, "a negation that overflows"); }
void __ubsan_handle_divrem_overflow(Location *at, uintptr_t, uintptr_t) { undefined(at, "a division by zero, or one that overflows"); }
void __ubsan_handle_shift_out_of_bounds(Location *at, uintptr_t, uintptr_t) { undefined(at, "a shift by too many bits"); }
}
