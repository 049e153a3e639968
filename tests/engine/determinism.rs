//! The same seed gives bitwise the same run for any number of threads, on every SIMD level with itself.

use kumiki::ops::simd::{Level, with_level};
use kumiki::tensor::threads::with_threads;
use kumiki::train::data::Data;
use kumiki::train::settings::Settings;
use kumiki::train::trainer::{StepReport, Trainer};

/// Ten steps at a size at which every loop is worth cutting into tasks.
fn run(model: &str, dtype: &str) -> Vec<[u64; 4]> {
    let settings = Settings {
        seed: 1,
        steps: 10,
        warmup: 3,
        d_model: 64,
        params: 60_000,
        seq: 160,
        batch: 4,
        dtype: dtype.into(),
        ..Settings::preset("nano").unwrap()
    };
    let data = Data::open("math", settings.val_fraction, settings.seq).unwrap();
    let config = settings.model(model, 256).unwrap();
    let model = kumiki::models::Model::new(&config, settings.seed, settings.dtype().unwrap()).unwrap();
    let mut trainer = Trainer::new(
        model,
        settings.step_config().unwrap(),
        data.batches(settings.batch, settings.seq, settings.seed).unwrap(),
        settings.seed,
    )
    .unwrap();
    let bits = |r: StepReport| [r.step, r.loss.to_bits(), r.lr.to_bits(), r.grad_norm.to_bits()];
    (0..10).map(|_| bits(trainer.step().unwrap())).collect()
}

#[test]
fn case_43_ten_steps_are_bitwise_equal_with_1_2_and_8_threads_on_every_level() {
    let all = ["tango", "wango", "recurrent", "untied", "gau", "flash", "cem-t2-r4", "double", "encoder-decoder"];
    for level in Level::available() {
        // With F32 products tiles are not in use: that level would repeat the one below.
        let wide = if level == Level::Amx { &[][..] } else { &all };
        let narrow = ["tango", "cem-t2-r4"].map(|model| (model, "bf16"));
        for (model, dtype) in wide.iter().map(|&model| (model, "f32")).chain(narrow) {
            let logs = [1, 2, 8].map(|threads| with_threads(threads, || with_level(level, || run(model, dtype))));
            assert_eq!(logs[0], logs[1], "{model} in {dtype} on {level:?}: 1 and 2 threads");
            assert_eq!(logs[0], logs[2], "{model} in {dtype} on {level:?}: 1 and 8 threads");
            assert!(
                f64::from_bits(logs[0][9][1]) < f64::from_bits(logs[0][0][1]),
                "{model} in {dtype} on {level:?}: the loss must fall"
            );
        }
    }
    println!("levels tried: {:?}", Level::available());
    assert!(Level::available().contains(&Level::Portable));
}

#[test]
fn mixed_precision_follows_f32() {
    for model in ["tango", "wango", "untied", "gau", "cem-t2-r4", "double"] {
        let losses = |dtype| run(model, dtype).into_iter().map(|step| f64::from_bits(step[1]));
        for (step, (narrow, wide)) in losses("bf16").zip(losses("f32")).enumerate() {
            assert!(narrow != wide, "{model}, step {step}: bf16 changes nothing");
            assert!((narrow - wide).abs() < 0.005 * wide, "{model}, step {step}: {narrow} in bf16, {wide} in f32");
        }
    }
}
