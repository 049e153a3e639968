//! What can be tested without a card: that what is missing is said in one sentence, and, where NVRTC is, compilation.

use std::fs;

use super::nvrtc::Compiler;
use super::{compile, cublaslt};
use crate::cache::Cache;
use crate::device::Device;
use crate::source::Source;

static ROWS: Source = Source {
    file: "rows.cu",
    text: include_str!("rows.cu"),
    headers: &[("add.cuh", include_str!("add.cuh"))],
    kernels: &["row_sum<float>", "row_sum<double>", "reverse"],
};
static SPILLS: Source =
    Source { file: "spills.cu", text: include_str!("spills.cu"), headers: &[], kernels: &["crowded"] };
static BROKEN: Source =
    Source { file: "broken.cu", text: include_str!("broken.cu"), headers: &[], kernels: &["broken"] };

/// NVRTC, if it is here. Where `KUMIKI_NVRTC` names it, it must be.
fn nvrtc(test: &str) -> Option<&'static Compiler> {
    match Compiler::get() {
        Ok(compiler) => Some(compiler),
        Err(e) if std::env::var_os("KUMIKI_NVRTC").is_some() => panic!("{e}"),
        Err(e) => {
            println!("{test} is skipped: {e}");
            None
        }
    }
}

#[test]
fn a_device_that_cannot_be_opened_says_why_in_one_line() {
    // No machine has so many.
    let sentence = Device::open(999).unwrap_err().to_string();
    assert!(sentence.starts_with("cuda:999: ") && !sentence.contains('\n'), "{sentence}");
    match crate::availability() {
        Ok(()) => assert!(sentence.contains("there is no such device, only "), "{sentence}"),
        Err(e) => {
            let sentence = e.to_string();
            println!("{sentence}");
            assert!(sentence.starts_with("cuda:0: ") && !sentence.contains('\n'), "{sentence}");
        }
    }
}

#[test]
fn missing_libraries_are_named_with_what_to_do() {
    let sentence = Compiler::find(None, &["libkumiki-none.so"]).err().unwrap().to_string();
    for part in ["no NVRTC", "libkumiki-none.so", "pip install nvidia-cuda-nvrtc", "CUDA toolkit", "KUMIKI_NVRTC"] {
        assert!(sentence.contains(part) && !sentence.contains('\n'), "{sentence}");
    }
    let sentence = Compiler::find(Some("/nowhere/libnvrtc.so"), &[]).err().unwrap().to_string();
    assert!(sentence.contains("/nowhere/libnvrtc.so cannot be loaded"), "{sentence}");
    let sentence = cublaslt::find(None, &["libkumiki-none.so"]).err().unwrap().to_string();
    for part in ["no cuBLASLt", "libkumiki-none.so", "CUDA toolkit", "KUMIKI_CUBLASLT"] {
        assert!(sentence.contains(part) && !sentence.contains('\n'), "{sentence}");
    }
}

#[test]
fn kernels_compile_and_tell_what_they_need() {
    if nvrtc("kernels_compile_and_tell_what_they_need").is_none() {
        return;
    }
    for architecture in ["sm_80", "sm_90"] {
        let rows = compile(&ROWS, architecture).unwrap();
        println!("{architecture}: {rows:#?}");
        assert!(rows.iter().map(|k| k.kernel.as_str()).eq(ROWS.kernels.iter().copied()));
        assert!(rows.iter().map(|k| k.shared).eq([256, 512, 0]), "{rows:?}");
        assert!(rows.iter().all(|k| (8..=64).contains(&k.registers) && k.spill_stores + k.spill_loads + k.stack == 0));
        let crowded = &compile(&SPILLS, architecture).unwrap()[0];
        println!("{architecture}: {crowded:#?}");
        assert!(crowded.spill_stores >= 64 && crowded.spill_loads >= 64 && crowded.stack >= 64, "{crowded:?}");
        assert!(crowded.registers <= 64, "{crowded:?}");
    }
}

#[test]
fn what_does_not_compile_says_where_and_why() {
    let Some(compiler) = nvrtc("what_does_not_compile_says_where_and_why") else { return };
    let sentence = compile(&BROKEN, "sm_80").unwrap_err().to_string();
    for part in ["broken.cu does not compile for sm_80 with NVRTC", "broken.cu(2)", "no_such_thing"] {
        assert!(sentence.contains(part), "{sentence}");
    }
    let missing = Source { kernels: &["row_sum<float>", "nothing<int>"], ..ROWS };
    let sentence = compiler.compile(&missing, "sm_80", &[]).unwrap_err().to_string();
    assert!(sentence.contains("nothing"), "{sentence}");
    let zero = Source { text: "a\0b", ..BROKEN };
    assert!(compile(&zero, "sm_80").unwrap_err().to_string().contains("a zero in its text"));
    assert!(compile(&ROWS, "compute_80").unwrap_err().to_string().contains("no architecture"));
}

#[test]
fn compiled_sources_come_back_from_the_cache() {
    let Some(compiler) = nvrtc("compiled_sources_come_back_from_the_cache") else { return };
    let folder = std::env::temp_dir().join(format!("kumiki-nvrtc-{}", std::process::id()));
    let cache = Cache::at(&folder);
    let compiled = compiler.cached(&ROWS, "sm_80", &cache).unwrap();
    assert!(compiled.image.starts_with(b"\x7fELF"));
    assert_eq!(compiled.lowered, ["_Z7row_sumIfEvPKT_PS0_i", "_Z7row_sumIdEvPKT_PS0_i", "reverse"]);
    assert_eq!(compiler.cached(&ROWS, "sm_80", &cache).unwrap(), compiled);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);

    // Another architecture, another text and another header are other entries.
    let ptx = compiler.cached(&ROWS, "compute_80", &cache).unwrap();
    assert!(ptx.image.windows(6).any(|part| part == b".entry") && ptx.image.ends_with(b"\0"));
    let text = Source { text: concat!(include_str!("rows.cu"), "\n"), ..ROWS };
    compiler.cached(&text, "sm_80", &cache).unwrap();
    let header = Source { headers: &[("add.cuh", concat!(include_str!("add.cuh"), "\n"))], ..ROWS };
    compiler.cached(&header, "sm_80", &cache).unwrap();
    let entries: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(entries.len(), 4);

    // An entry is believed: one that was changed, checksum and all, would show. A damaged one is compiled again.
    for entry in &entries {
        fs::write(entry, "damaged").unwrap();
    }
    assert_eq!(compiler.cached(&ROWS, "sm_80", &cache).unwrap(), compiled);
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn cards_that_the_compiler_does_not_know_get_ptx() {
    let Some(compiler) = nvrtc("cards_that_the_compiler_does_not_know_get_ptx") else { return };
    assert_eq!(compiler.target((8, 0)).unwrap(), "sm_80");
    assert_eq!(compiler.target((9, 0)).unwrap(), "sm_90");
    assert!(compiler.target((99, 0)).unwrap().starts_with("compute_"));
    assert!(compiler.target((1, 0)).unwrap_err().to_string().contains("does not know cards as old"));
}
