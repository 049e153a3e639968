//! Tests of the whole engine in one binary: each test binary is linked anew, which takes longer than its tests.

mod common;
mod determinism;
mod double;
mod golden;
mod models;
