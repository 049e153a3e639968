//! kumiki's CUDA tier: device, buffers, launches. There is no CUDA support yet; this crate says so plainly.

/// Whether a CUDA device can be used.
///
/// # Errors
/// Always, with the reason: this build has no CUDA support yet.
pub fn availability() -> Result<(), String> {
    Err("no CUDA support yet: kumiki runs on the CPU only".into())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_stub_says_what_it_is() {
        assert!(super::availability().unwrap_err().contains("no CUDA support yet"));
    }
}
