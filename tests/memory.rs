//! Memory of training steps. The counters are those of the whole process, so that this binary holds one test.

use kumiki::tensor::{memory_stats, reset_peak, threads};
use kumiki::train::data::Data;
use kumiki::train::scaling;
use kumiki::train::settings::Settings;
use kumiki::train::trainer::Trainer;
use kumiki::train::zoo::Suite;

/// On one thread, where the peak is exact: more threads hold a few tiles more when they happen to work side by side.
#[test]
fn the_peak_of_a_step_does_not_grow_and_a_steady_step_asks_the_system_for_nothing() {
    for model in models() {
        threads::with_threads(1, || train(&model, "f32"));
    }
    for model in ["tango", "wango", "gau", "flash", "cem-t2-per_head"] {
        threads::with_threads(1, || train(model, "bf16"));
    }
    threads::with_threads(1, memory_of_a_token_does_not_grow_with_the_sequence);
}

/// All of the TANGO suite, and of the CEM suite what differs in what is kept.
fn models() -> Vec<String> {
    let cem = ["llama", "cem-t1", "cem-t2-per_head", "cem-attention-t2-r4", "cem-mlp-t2"];
    Suite::Tango.models().iter().chain(&cem).map(|&name| name.to_owned()).collect()
}

fn memory_of_a_token_does_not_grow_with_the_sequence() {
    let models = models();
    let nano = Settings::preset("nano").unwrap();
    let rows = scaling::measure(&nano, &models, 256, &[64, 1024], 1, |_, _, _| {}).unwrap();
    assert_eq!(rows.len(), 2 * models.len());
    for pair in rows.chunks_exact(2) {
        let [short, long] = pair else { unreachable!() };
        println!("{}: {:.0} and {:.0} bytes a token", short.model, short.token_bytes, long.token_bytes);
        // A T×T array of one head and one application would add 4096 bytes.
        assert!(long.token_bytes < short.token_bytes + 1024.0, "{short:?} {long:?}");
        assert!(short.token_bytes > 1000.0, "{short:?}");
    }
}

fn train(model: &str, dtype: &str) {
    let settings = Settings { dtype: dtype.into(), steps: 200, seq: 32, batch: 2, ..Settings::preset("nano").unwrap() };
    let data = Data::open("math", settings.val_fraction, settings.seq).unwrap();
    let config = settings.model(model, 256).unwrap();
    let model_of_run = kumiki::models::Model::new(&config, 0, settings.dtype().unwrap()).unwrap();
    let mut trainer = Trainer::new(
        model_of_run,
        settings.step_config().unwrap(),
        data.batches(settings.batch, settings.seq, settings.seed).unwrap(),
        0,
    )
    .unwrap();
    let mut memory_of_step = || {
        reset_peak();
        trainer.step().unwrap();
        memory_stats()
    };
    (0..5).for_each(|_| _ = memory_of_step());
    let early = memory_of_step();
    (6..199).for_each(|_| _ = memory_of_step());
    let late = memory_of_step();
    assert_eq!(late.peak, early.peak, "{model} {dtype}: peak bytes of step 200 and of step 6");
    assert_eq!(late.live, early.live, "{model} {dtype}: live bytes after step 200 and after step 6");
    assert_eq!(late.system_allocations, early.system_allocations, "{model} {dtype}: buffers asked from the system");
}
