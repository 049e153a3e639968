//! Tiles (AMX-BF16): a block of 32 x 32 sums is four tiles; a step multiplies two tiles of A with two of B.

use std::arch::asm;
use std::sync::OnceLock;

use kumiki_tensor::bf16;

/// Whether the CPU has the instructions and the kernel lets this process use them (asked for once).
pub(crate) fn is_available() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| super::dot::is_available() && in_cpu() && permitted())
}

fn in_cpu() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const TILES: u32 = 1 << 24 | 1 << 22; // AMX-TILE, AMX-BF16
    let most = __cpuid(0).eax;
    most >= 7 && __cpuid_count(7, 0).edx & TILES == TILES
}

/// Linux saves the tiles of a process only after it was asked to: `arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)`.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const REQUEST_PERMISSION: u64 = 0x1023;
    const TILE_DATA: u64 = 18;
    let answer: i64;
    // SAFETY: a system call that reads its two arguments, which are numbers; the kernel uses rcx and r11.
    unsafe {
        asm!(
            "syscall", inlateout("rax") ARCH_PRCTL => answer, in("rdi") REQUEST_PERMISSION, in("rsi") TILE_DATA,
            lateout("rcx") _, lateout("r11") _, options(nostack)
        );
    }
    answer == 0
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// The shapes of the eight tiles: 16 rows of 64 bytes each.
#[repr(C, align(64))]
struct Config([u8; 64]);

static CONFIG: Config = {
    let mut bytes = [0; 64];
    bytes[0] = 1; // the palette
    let mut tile = 0;
    while tile < 8 {
        bytes[16 + 2 * tile] = 64;
        bytes[48 + tile] = 16;
        tile += 1;
    }
    Config(bytes)
};

/// Runs `f` on a thread whose tiles have their shapes, and gives the tiles back.
///
/// # Safety
/// [`is_available`]; `f` does not panic into code that would use tiles of other shapes.
pub(super) unsafe fn with_tiles<R>(f: impl FnOnce() -> R) -> R {
    struct Release;
    impl Drop for Release {
        fn drop(&mut self) {
            // SAFETY: the CPU has tiles; nobody needs these any more.
            unsafe { asm!("tilerelease", options(nostack, nomem)) };
        }
    }
    // SAFETY: the CPU has tiles, and CONFIG is 64 bytes of a valid configuration.
    unsafe { asm!("ldtilecfg [{}]", in(reg) CONFIG.0.as_ptr(), options(nostack, readonly)) };
    let _release = Release;
    f()
}

/// `c[32, 32] = a b`, or `c += a b`, of one panel of A and one of B over `steps` steps of `step_len` numbers, of which the
/// first part counts; rows of c are `c_stride` apart.
///
/// # Safety
/// Inside [`with_tiles`]; the panels hold `steps` steps, `c` is valid for its rows, and `steps > 0`.
#[inline]
pub(super) unsafe fn block(
    steps: usize,
    step_len: usize,
    a: *const bf16,
    b: *const bf16,
    c: *mut f32,
    c_stride: usize,
    add: bool,
) {
    // SAFETY: as the caller warrants.
    unsafe {
        begin(c, c_stride, add);
        asm!(
            "2:",
            "tileloadd tmm4, [{a} + {line}]",
            "tileloadd tmm6, [{b} + {line}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {line} + 1024]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a} + {line} + 1024]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "add {a}, {step}",
            "add {b}, {step}",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "dec {steps}",
            "jnz 2b",
            a = inout(reg) a => _, b = inout(reg) b => _, steps = inout(reg) steps => _, line = in(reg) 64usize,
            step = in(reg) 2 * step_len, options(nostack, readonly)
        );
        end(c, c_stride);
    }
}

/// As [`block`], of panels whose numbers are in three parts, `x = h + m + l`: the six products that F32 can tell apart,
/// `h h' + h m' + m h' + h l' + m m' + l h'`. Their steps are those of [`three`](super::three).
///
/// # Safety
/// As [`block`].
#[inline]
pub(super) unsafe fn block_of_three(
    steps: usize,
    a: *const bf16,
    b: *const bf16,
    c: *mut f32,
    c_stride: usize,
    add: bool,
) {
    // SAFETY: as the caller warrants.
    unsafe {
        begin(c, c_stride, add);
        asm!(
            "2:",
            // h l'
            "tileloadd tmm4, [{a} + {line}]",
            "tileloadd tmm6, [{b} + {line} + 4096]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {line} + 5120]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a} + {line} + 1024]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // h m'
            "tileloadd tmm6, [{b} + {line} + 2048]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {line} + 3072]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // h h'
            "tileloadd tmm6, [{b} + {line}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {line} + 1024]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // l h'
            "tileloadd tmm4, [{a} + {line} + 4096]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a} + {line} + 5120]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // m h'
            "tileloadd tmm4, [{a} + {line} + 2048]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a} + {line} + 3072]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // m m'
            "tileloadd tmm6, [{b} + {line} + 2048]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {line} + 3072]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "add {a}, 6144",
            "add {b}, 6144",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "dec {steps}",
            "jnz 2b",
            a = inout(reg) a => _, b = inout(reg) b => _, steps = inout(reg) steps => _, line = in(reg) 64usize,
            options(nostack, readonly)
        );
        end(c, c_stride);
    }
}

/// Tiles 0 to 3 become the sums in c, or zero.
///
/// # Safety
/// As [`block`].
#[inline(always)]
unsafe fn begin(c: *const f32, c_stride: usize, add: bool) {
    // SAFETY: as the caller warrants.
    unsafe {
        if add {
            asm!(
                "tileloadd tmm0, [{c} + {row}]",
                "tileloadd tmm1, [{c} + {row} + 64]",
                "tileloadd tmm2, [{d} + {row}]",
                "tileloadd tmm3, [{d} + {row} + 64]",
                c = in(reg) c, d = in(reg) c.wrapping_add(16 * c_stride), row = in(reg) 4 * c_stride,
                options(nostack, readonly)
            );
        } else {
            asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
        }
    }
}

/// They are written to c.
///
/// # Safety
/// As [`block`].
#[inline(always)]
unsafe fn end(c: *mut f32, c_stride: usize) {
    // SAFETY: as the caller warrants.
    unsafe {
        asm!(
            "tilestored [{c} + {row}], tmm0",
            "tilestored [{c} + {row} + 64], tmm1",
            "tilestored [{d} + {row}], tmm2",
            "tilestored [{d} + {row} + 64], tmm3",
            c = in(reg) c, d = in(reg) c.wrapping_add(16 * c_stride), row = in(reg) 4 * c_stride,
            options(nostack)
        );
    }
}
