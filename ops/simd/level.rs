//! Which vectors the CPU has, and the overrides: `KUMIKI_SIMD` for a run, [`with_level`] for a test.

use std::cell::Cell;
use std::sync::OnceLock;

/// A set of vector instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The `wide` crate with what the build's target guarantees: SSE2, NEON, wasm SIMD or plain arrays.
    Portable,
    /// 256-bit vectors and fused multiply-add.
    Avx2,
    /// 512-bit vectors (F, DQ, VL).
    Avx512,
    /// The same, and tiles for products of BF16 numbers (AMX-BF16).
    Amx,
}

impl Level {
    /// The levels that this CPU can run, narrowest first.
    #[must_use]
    pub fn available() -> Vec<Self> {
        [Self::Portable, Self::Avx2, Self::Avx512, Self::Amx].into_iter().filter(|level| level.is_available()).collect()
    }

    /// Whether this CPU can run the level.
    #[must_use]
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = || std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma");
            let avx512 = || {
                std::is_x86_feature_detected!("avx512f")
                    && std::is_x86_feature_detected!("avx512dq")
                    && std::is_x86_feature_detected!("avx512vl")
            };
            match self {
                Self::Portable => true,
                Self::Avx2 => avx2(),
                Self::Avx512 => avx2() && avx512(),
                Self::Amx => avx2() && avx512() && crate::gemm::has_amx(),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Portable
        }
    }

    /// As `KUMIKI_SIMD` spells it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
        }
    }
}

impl std::fmt::Display for Level {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

fn names(levels: &[Level]) -> String {
    levels.iter().map(|level| level.name()).collect::<Vec<_>>().join(", ")
}

/// The level that `KUMIKI_SIMD` asks for, else the widest.
fn choose(asked: Option<&str>, available: &[Level]) -> Result<Level, String> {
    let Some(text) = asked else {
        return Ok(*available.last().expect("the portable level is always there"));
    };
    available.iter().copied().find(|level| level.name() == text.trim()).ok_or_else(|| {
        format!("KUMIKI_SIMD must be a level that this CPU has, one of {}; found `{text}`", names(available))
    })
}

/// The level that `KUMIKI_SIMD` asks for, else the widest: for programs that answer a wrong value with a sentence.
///
/// # Errors
/// When the variable is set to something else than a level that this CPU has.
pub fn configured_level() -> Result<Level, String> {
    choose(std::env::var("KUMIKI_SIMD").ok().as_deref(), &Level::available())
}

thread_local! {
    static OVERRIDE: Cell<Option<Level>> = const { Cell::new(None) };
}

/// The level in use on this thread.
///
/// # Panics
/// At the first call, when `KUMIKI_SIMD` is set to something else than a level that this CPU has.
#[inline]
#[must_use]
pub fn level() -> Level {
    static CHOSEN: OnceLock<Level> = OnceLock::new();
    if let Some(level) = OVERRIDE.get() {
        return level;
    }
    *CHOSEN.get_or_init(|| configured_level().unwrap_or_else(|error| panic!("{error}")))
}

/// Runs `f` at `level`: for tests and measurements.
///
/// `f` runs on a rayon pool of its own, with as many threads as loops here would use; the level holds on all of them
/// and nowhere else, so tests that run meanwhile are not disturbed. A pool made *inside* `f` does not inherit the
/// level: write `with_threads(n, || with_level(level, f))`, never the other way round.
///
/// # Panics
/// When this CPU cannot run the level.
pub fn with_level<R: Send>(level: Level, f: impl FnOnce() -> R + Send) -> R {
    assert!(level.is_available(), "with_level: this CPU has no {}, only {}", level.name(), names(&Level::available()));
    rayon::ThreadPoolBuilder::new()
        .num_threads(kumiki_tensor::threads::current_threads())
        .start_handler(move |_| OVERRIDE.set(Some(level)))
        .build()
        .expect("the operating system refused to start worker threads")
        .install(f)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_chooses_among_available_levels() {
        let here = [Level::Portable, Level::Avx2];
        assert_eq!(choose(None, &here), Ok(Level::Avx2));
        assert_eq!(choose(Some("portable"), &here), Ok(Level::Portable));
        for bad in ["avx512", "AVX9", ""] {
            let error = choose(Some(bad), &here).unwrap_err();
            assert!(error.contains("KUMIKI_SIMD") && error.contains("portable, avx2"), "{error}");
            assert!(error.ends_with(&format!("`{bad}`")), "{error}");
        }
    }

    #[test]
    fn an_override_holds_on_every_worker_and_ends() {
        use rayon::prelude::*;
        let before = level();
        for wanted in Level::available() {
            let seen = with_level(wanted, || (0..1000).into_par_iter().map(|_| level()).collect::<Vec<_>>());
            assert!(seen.iter().all(|&found| found == wanted));
        }
        assert_eq!(level(), before);
    }
}
