//! What compiled kernels need of a multiprocessor, as the assembler reports it: spills appear nowhere in a cubin.

use super::nvrtc::Compiler;
use crate::error::Error;
use crate::source::Source;

/// What a kernel needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelResources {
    /// As in [`Source::kernels`].
    pub kernel: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of static shared memory of a block.
    pub shared: u32,
    /// Bytes of a thread's stack, spilled registers and indexed arrays among them.
    pub stack: u32,
    /// Bytes of registers written to memory because there were too few.
    pub spill_stores: u32,
    /// Bytes of them read again.
    pub spill_loads: u32,
}

/// Compiles a source for an architecture (`sm_90`). Needs NVRTC, but neither a card nor a driver.
///
/// # Errors
/// When there is no NVRTC, or the source does not compile: the first lines of the compiler's log.
pub fn compile(source: &Source, architecture: &str) -> Result<Vec<KernelResources>, Error> {
    if !architecture.starts_with("sm_") {
        return Err(Error::new(format!("{architecture} is no architecture of a card, such as sm_90")));
    }
    let (compiled, log) = Compiler::get()?.compile(source, architecture, &["--ptxas-options=-v"])?;
    let named = source.kernels.iter().zip(&compiled.lowered);
    named
        .map(|(kernel, lowered)| {
            of(kernel, lowered, &log)
                .ok_or_else(|| Error::new(format!("{}: the log says nothing of {kernel}:\n{log}", source.file)))
        })
        .collect()
}

/// From the lines of the log between `Compiling entry function 'lowered'` and the next such line:
/// `416 bytes stack frame, 808 bytes spill stores, 832 bytes spill loads` after `Function properties for lowered`, and
/// `Used 32 registers, used 1 barriers, 256 bytes smem, ...`, where what is not used may be left out.
fn of(kernel: &str, lowered: &str, log: &str) -> Option<KernelResources> {
    const ENTRY: &str = "Compiling entry function ";
    let quoted = format!("'{lowered}'");
    let lines = log.lines().skip_while(|line| !(line.contains(ENTRY) && line.contains(&quoted))).skip(1);
    let lines: Vec<&str> = lines.take_while(|line| !line.contains(ENTRY)).collect();
    // Functions that were not inlined have properties, too.
    let own = lines.iter().position(|line| line.trim_end().ends_with(&format!("Function properties for {lowered}")))?;
    let stack = lines.get(own + 1)?;
    let used = lines.iter().find(|line| line.contains(" registers"))?;
    Some(KernelResources {
        kernel: kernel.to_owned(),
        registers: number_before(used, "registers")?,
        shared: number_before(used, "bytes smem").unwrap_or(0),
        stack: number_before(stack, "bytes stack frame")?,
        spill_stores: number_before(stack, "bytes spill stores")?,
        spill_loads: number_before(stack, "bytes spill loads")?,
    })
}

fn number_before(line: &str, words: &str) -> Option<u32> {
    line.split_once(words)?.0.split_whitespace().next_back()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1aIfEvv' for 'sm_80'
ptxas info    : Function properties for helper
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for _Z1aIfEvv
ptxas         .     416 bytes stack frame, 808 bytes spill stores, 832 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 416 bytes cumulative stack size, 256 bytes smem, 364 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1av' for 'sm_80'
ptxas info    : Function properties for _Z1av
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 9 registers, 360 bytes cmem[0]
";

    #[test]
    fn the_log_is_read_kernel_by_kernel() {
        let first = of("a<float>", "_Z1aIfEvv", LOG).unwrap();
        assert_eq!((first.registers, first.shared, first.stack), (32, 256, 416));
        assert_eq!((first.spill_stores, first.spill_loads), (808, 832));
        let second = of("a", "_Z1av", LOG).unwrap();
        assert_eq!((second.registers, second.shared, second.stack, second.spill_stores), (9, 0, 0, 0));
        assert_eq!(of("b", "_Z1bv", LOG), None);
    }
}
