//! Huge pages for large buffers: one entry of the translation caches then serves 2 MiB instead of 4 KiB.

const HUGE: usize = 2 << 20;

/// Asks the system to use huge pages for the whole ones in `len` bytes from `start` on, best before they are first
/// written. It is a wish: where it cannot be had (another system than Linux, a kernel without them, a small buffer)
/// nothing changes.
pub fn prefer_huge_pages(start: *mut u8, len: usize) {
    let skipped = start.align_offset(HUGE);
    let whole = len.saturating_sub(skipped) / HUGE * HUGE;
    if whole > 0 {
        advise(start.wrapping_add(skipped), whole);
    }
}

#[cfg(target_os = "linux")]
fn advise(start: *mut u8, len: usize) {
    // SAFETY: this advice changes neither contents nor rights of any memory; its answer does not matter.
    unsafe { libc::madvise(start.cast(), len, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise(_: *mut u8, _: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_stay_whatever_the_extent() {
        for len in [0, 1, HUGE - 1, HUGE, 3 * HUGE + 5] {
            let mut data = vec![7u8; len];
            prefer_huge_pages(data.as_mut_ptr(), len);
            assert!(data.iter().all(|&x| x == 7), "{len}");
        }
        prefer_huge_pages(std::ptr::dangling_mut::<u64>().cast(), 0);
    }
}
