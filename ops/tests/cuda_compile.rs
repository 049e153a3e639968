//! Every kernel compiles for cards, by CUDA's own compiler: no card is needed for that. Prints what each takes.

use kumiki_gpu::compile;

#[test]
fn every_kernel_compiles_for_cards_and_spills_nothing() {
    let sources = kumiki_tensor::cuda::SOURCES.iter().chain(kumiki_ops::CUDA_SOURCES);
    for source in sources {
        for architecture in ["sm_80", "sm_90"] {
            let kernels = match compile(source, architecture) {
                Ok(kernels) => kernels,
                Err(why) if why.to_string().contains("no NVRTC") && std::env::var_os("KUMIKI_NVRTC").is_none() => {
                    println!("skipped: {why}");
                    return;
                }
                Err(why) => panic!("{why}"),
            };
            assert!(kernels.len() == source.kernels.len());
            for k in kernels {
                println!(
                    "{architecture} {:<20} {:<36} {:>3} registers {:>6} bytes shared {:>4} spilled",
                    source.file,
                    k.kernel,
                    k.registers,
                    k.shared,
                    k.spill_stores + k.spill_loads
                );
                assert!(k.spill_stores + k.spill_loads == 0, "{architecture} {}: {} spills", source.file, k.kernel);
            }
        }
    }
}
