//! From a source to a shared object, by `g++`, once for all processes.

use std::fmt::Write as _;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use libloading::Library;

use crate::error::Error;
use crate::source::{COMMON, Source};

const HEADER: &str = include_str!("emulator.h");
const ENGINE: &str = include_str!("engine.cpp");

/// Of both halves. Sums are not contracted, so that they are the same with every compiler.
const FLAGS: [&str; 8] =
    ["-std=c++17", "-O1", "-g1", "-gdwarf-4", "-fPIC", "-ffp-contract=off", "-Wall", "-Wno-unused-function"];
/// Calls before each access to memory, and where an index is too large for its array or an integer overflows.
const CHECKED: [&str; 3] = [
    "-fsanitize=thread,alignment,bounds,signed-integer-overflow,integer-divide-by-zero,shift",
    "--param=tsan-instrument-func-entry-exit=0",
    "-Wno-unknown-pragmas",
];

/// The source's kernels and their engine.
pub(super) fn library(source: &Source) -> Result<Library, Error> {
    // Several tests ask for the same at once: the first compiles it.
    static COMPILING: Mutex<()> = Mutex::new(());
    let _one = COMPILING.lock().unwrap_or_else(PoisonError::into_inner);
    let text = whole(source);
    let mut key = DefaultHasher::new();
    (&text, source.text, HEADER, ENGINE, COMMON, source.headers, FLAGS, CHECKED).hash(&mut key);
    let folder = std::env::temp_dir().join("kumiki-emulator").join(format!("{:016x}", key.finish()));
    let file = folder.join("kernels.so");
    if !file.is_file() {
        compile(source, &text, &folder)
            .map_err(|why| Error::new(format!("{} does not compile for the emulator: {why}", source.file)))?;
    }
    // SAFETY: it has no constructors but those of the standard library.
    unsafe { Library::new(&file) }.map_err(|why| Error::new(format!("{}: {why}", file.display())))
}

/// Includes the source, and has a function for each kernel that takes its arguments by their addresses.
fn whole(source: &Source) -> String {
    let mut text = format!("#include \"emulator.h\"\n#include \"{}\"\n", source.file);
    for (i, kernel) in source.kernels.iter().enumerate() {
        let _ = writeln!(text, "extern \"C\" void kernel_{i}(void **params) {{ emulator_call({kernel}, params); }}");
    }
    text
}

fn compile(source: &Source, text: &str, folder: &Path) -> Result<(), String> {
    static ATTEMPTS: AtomicU32 = AtomicU32::new(0);
    let attempt = format!("{}.{}", std::process::id(), ATTEMPTS.fetch_add(1, Relaxed));
    let work = folder.with_extension(attempt);
    let result = (|| {
        fs::create_dir_all(&work).map_err(|why| format!("{}: {why}", work.display()))?;
        let own = [
            ("kernels.cpp", text),
            (source.file, source.text),
            ("engine.cpp", ENGINE),
            ("emulator.h", HEADER),
            ("common.cuh", COMMON),
        ];
        for (name, text) in own.iter().chain(source.headers) {
            fs::write(work.join(name), text).map_err(|why| format!("{name}: {why}"))?;
        }
        run(&work, &[&FLAGS[..], &CHECKED, &["-c", "kernels.cpp", "-o", "kernels.o"]].concat())?;
        run(&work, &[&FLAGS[..], &["-O2", "-fvisibility=hidden", "-c", "engine.cpp", "-o", "engine.o"]].concat())?;
        run(&work, &["-shared", "kernels.o", "engine.o", "-o", "kernels.so"])?;
        // Whole or not at all; another process may have been first.
        match fs::rename(&work, folder) {
            Err(why) if !folder.join("kernels.so").is_file() => Err(format!("{}: {why}", folder.display())),
            _ => Ok(()),
        }
    })();
    let _ = fs::remove_dir_all(&work);
    result
}

fn run(folder: &Path, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("g++").args(arguments).current_dir(folder).output();
    let output = output.map_err(|why| format!("the compiler g++ cannot be run ({why})"))?;
    if output.status.success() {
        return Ok(());
    }
    let messages = String::from_utf8_lossy(&output.stderr);
    let first: Vec<&str> = messages.lines().filter(|line| line.contains("error")).take(5).collect();
    Err(if first.is_empty() { messages.into_owned() } else { first.join("\n") })
}

/// The line of the source that an address of code lies in, where `addr2line` knows it.
pub(super) fn line_of(library: &Library, address: &str) -> Option<String> {
    let address = u64::from_str_radix(address.trim_start_matches("0x"), 16).ok()?;
    let (file, start) = location(library)?;
    // A return address: of what comes after the access.
    let offset = format!("{:#x}", address.checked_sub(start)?.checked_sub(1)?);
    let output = Command::new("addr2line").arg("-e").arg(file).arg(offset).output().ok()?;
    let line = String::from_utf8(output.stdout).ok()?;
    let name = line.trim().rsplit('/').next()?.split(' ').next()?;
    (!name.starts_with('?')).then(|| name.replacen(':', " line ", 1))
}

/// The file of a library, and where it lies in memory.
fn location(library: &Library) -> Option<(PathBuf, u64)> {
    // SAFETY: only its address is taken.
    let inside = unsafe { library.get::<unsafe extern "C" fn()>(b"kernel_0").ok()?.into_raw() };
    let inside = inside.as_raw_ptr() as u64;
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let mut lines = maps.lines().filter_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (from, to) = range.split_once('-')?;
        let path = rest.split_whitespace().nth(4)?;
        Some((u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?, path.to_string()))
    });
    let all: Vec<_> = lines.by_ref().collect();
    let path = &all.iter().find(|(from, to, _)| (*from..*to).contains(&inside))?.2;
    let start = all.iter().filter(|(.., other)| other == path).map(|(from, ..)| *from).min()?;
    Some((PathBuf::from(path), start))
}
