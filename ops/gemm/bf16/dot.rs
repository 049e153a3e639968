//! AVX512-BF16: one instruction adds two products to each of 16 sums.

use std::arch::x86_64::*;

use kumiki_tensor::bf16;

use super::pack::{STEP, STEP_LEN};

/// Whether the CPU has the instructions.
pub(crate) fn is_available() -> bool {
    std::is_x86_feature_detected!("avx512bf16")
        && std::is_x86_feature_detected!("avx512bw")
        && std::is_x86_feature_detected!("avx512vl")
}

/// Rows whose sums are in registers together.
const ROWS: usize = 8;

/// As [`amx::block`](super::amx::block), of the same panels.
///
/// # Safety
/// [`is_available`]; the panels hold `steps` steps, and `c` is valid for its rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn block(steps: usize, a: *const bf16, b: *const bf16, c: *mut f32, c_stride: usize, add: bool) {
    for first in (0..32).step_by(ROWS) {
        let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
        // SAFETY: as the caller warrants; a panel's step is two tiles of 16 rows of 32 numbers.
        unsafe {
            let c = c.add(first * c_stride);
            if add {
                for (i, row) in sums.iter_mut().enumerate() {
                    *row = [0, 16].map(|j| _mm512_loadu_ps(c.add(i * c_stride + j)));
                }
            }
            for step in 0..steps {
                let a = a.add(step * STEP_LEN + first * STEP).cast::<i32>();
                let b = b.add(step * STEP_LEN).cast::<i32>();
                for pair in 0..STEP / 2 {
                    let columns = [0, 16 * 16].map(|tile| bits(_mm512_loadu_si512(b.add(tile + pair * 16).cast())));
                    for (i, row) in sums.iter_mut().enumerate() {
                        let x = bits(_mm512_set1_epi32(a.add(i * STEP / 2 + pair).read_unaligned()));
                        for (sum, column) in row.iter_mut().zip(columns) {
                            *sum = _mm512_dpbf16_ps(*sum, x, column);
                        }
                    }
                }
            }
            for (i, row) in sums.iter().enumerate() {
                for (j, &sum) in row.iter().enumerate() {
                    _mm512_storeu_ps(c.add(i * c_stride + 16 * j), sum);
                }
            }
        }
    }
}

#[inline(always)]
fn bits(x: __m512i) -> __m512bh {
    // SAFETY: both are 512 bits of any kind.
    unsafe { std::mem::transmute(x) }
}
