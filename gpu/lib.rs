//! kumiki's CUDA tier: device, buffers, launches.
//!
//! There is nothing of it yet but the answer to the question whether it can be used.

/// Whether CUDA can be used here.
///
/// # Errors
/// Always for now, with the sentence to show.
pub fn availability() -> Result<(), String> {
    Err("no CUDA support yet; run on the CPU with --device cpu, the default".to_owned())
}

#[cfg(test)]
mod tests {
    #[test]
    fn case_44_the_answer_is_a_plain_sentence() {
        assert!(super::availability().unwrap_err().contains("no CUDA support yet"));
    }
}
