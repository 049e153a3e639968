//! Every file of the folder in `KUMIKI_GOLDEN` (default `tests/golden`): float64 values of operators, blocks, models and
//! a short training run, made by an independent implementation. Outputs and every gradient must agree to 1e-10 in F64
//! and 2e-4 in F32. A file of a kind that this test does not know is a failure; none is skipped.
//!
//! Format: tensors `in.*`, `param.*`, `int.*`, `dout.*` (upstream gradient of `out.*`; absent where `out.loss` is the
//! loss), `out.*`, `grad.in.*`, `grad.param.*`; metadata `kind` and `config` (JSON).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kumiki::autograd::{Gradients, Tape, Var};
use kumiki::models::{
    Architecture, AttentionKind, CemConfig, DoubleDecoder, DoubleDecoderConfig, EncoderDecoder, EncoderDecoderConfig,
    GauBlock, GauConfig, GeluConfig, LanguageModel, LanguageModelConfig, MlpKind, TangoBlock, TangoConfig,
    TransformerBlock, TransformerConfig, Window,
};
use kumiki::nn::{AdamW, CemAttention, CemMlp, CemOptions, Decay, Diagonal, Init, Module, Schedule, clip_global_norm};
use kumiki::ops::{self, BlockStarts, DualAttention, DualSees, testing::difference};
use kumiki::tensor::{DType, Tensor, safetensors};
use serde_json::Value;

struct Golden {
    name: String,
    kind: String,
    config: Value,
    tensors: BTreeMap<String, Tensor>,
}

impl Golden {
    fn load(path: &Path) -> Golden {
        let contents = safetensors::load(path).unwrap_or_else(|e| panic!("{e}"));
        let meta =
            |key: &str| contents.metadata.get(key).unwrap_or_else(|| panic!("{}: no metadata `{key}`", path.display()));
        let config = serde_json::from_str(meta("config")).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let kind = meta("kind").clone();
        let mut tensors = contents.tensors;
        if kind == "lm_decoder_only" {
            // Layers are blocks here, in every language model.
            tensors = tensors.into_iter().map(|(k, t)| (k.replacen("param.layers.", "param.blocks.", 1), t)).collect();
        }
        Golden { name, kind, config, tensors }
    }

    /// The kind; for kinds that hold several architectures with the architecture.
    fn full_kind(&self) -> String {
        match self.config.get("arch").and_then(Value::as_str) {
            Some(arch) => format!("{}/{arch}", self.kind),
            None => self.kind.clone(),
        }
    }

    fn usize(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap_or_else(|| panic!("{}: no number `{key}`", self.name)) as usize
    }

    fn f64(&self, key: &str) -> f64 {
        self.config[key].as_f64().unwrap_or_else(|| panic!("{}: no number `{key}`", self.name))
    }

    fn window(&self) -> Window {
        Window {
            size: self.usize("window"),
            feature_map: self.config["feature_map"].as_str().unwrap().parse().unwrap(),
        }
    }

    fn tensor(&self, key: &str) -> &Tensor {
        self.tensors.get(key).unwrap_or_else(|| panic!("{}: no tensor `{key}`", self.name))
    }

    fn params(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().filter_map(|(k, t)| Some((k.strip_prefix("param.")?, t)))
    }

    fn close(&self, dtype: DType, what: &str, got: &Tensor, expected: &Tensor) {
        assert_eq!(got.dtype(), dtype, "{}: {what}", self.name);
        assert_eq!(
            got.len(),
            expected.len(),
            "{}: {what}: shape {:?} against {:?}",
            self.name,
            got.shape(),
            expected.shape()
        );
        let tolerance = if dtype == DType::F64 { 1e-10 } else { 2e-4 };
        if let Some(problem) = difference(&got.to_f64_vec(), &expected.to_f64_vec(), tolerance) {
            panic!("{} {dtype} {what}: {problem}", self.name);
        }
    }

    /// Walks back from the outputs and compares outputs and the gradients of inputs; parameters are the caller's.
    fn walk(&self, dtype: DType, tape: &Tape, outputs: &[(&str, &Var)], inputs: &[(&str, &Var)]) -> Gradients {
        for (name, y) in outputs {
            self.close(dtype, &format!("out.{name}"), y.value(), self.tensor(&format!("out.{name}")));
        }
        let upstream: Vec<(&Var, Tensor)> = match outputs.iter().find(|(name, _)| *name == "loss") {
            Some((_, loss)) => vec![(*loss, Tensor::ones(dtype, loss.shape()))],
            None => outputs.iter().map(|(name, y)| (*y, self.tensor(&format!("dout.{name}")).cast(dtype))).collect(),
        };
        let grads = tape.backward_from(&upstream);
        for (name, x) in inputs {
            let grad = grads.get(x).unwrap_or_else(|| panic!("{}: no gradient of {name}", self.name));
            self.close(dtype, &format!("grad.{name}"), grad, self.tensor(&format!("grad.{name}")));
        }
        grads
    }

    /// An operator with its `in.*` and `param.*` as leaves, under their names without the prefix.
    fn op(&self, dtype: DType, output: &str, f: impl Fn(&dyn Fn(&str) -> Var) -> Var) {
        let tape = Tape::new();
        let is_leaf = |k: &str| k.starts_with("in.") || k.starts_with("param.");
        let leaves: BTreeMap<&str, Var> = self
            .tensors
            .iter()
            .filter(|(k, _)| is_leaf(k))
            .map(|(k, t)| (k.as_str(), tape.leaf(t.cast(dtype))))
            .collect();
        let get = |name: &str| {
            let full = [format!("in.{name}"), format!("param.{name}")];
            full.iter()
                .find_map(|k| leaves.get(k.as_str()))
                .unwrap_or_else(|| panic!("{}: no {name}", self.name))
                .clone()
        };
        let y = f(&get);
        self.walk(dtype, &tape, &[(output, &y)], &leaves.iter().map(|(k, v)| (*k, v)).collect::<Vec<_>>());
    }

    fn load_into(&self, module: &mut impl Module) {
        let wanted = module.params().len();
        assert_eq!(wanted, self.params().count(), "{}: the file has other parameters than the module", self.name);
        module.load(|name| self.tensors.get(&format!("param.{name}"))).unwrap_or_else(|e| panic!("{}: {e}", self.name));
    }

    fn compare_param_grads(&self, dtype: DType, module: &impl Module, grads: &Gradients) {
        for (name, param) in module.params() {
            let grad = grads.of(param).unwrap_or_else(|| panic!("{}: no gradient of {name}", self.name));
            self.close(dtype, &format!("grad.param.{name}"), grad, self.tensor(&format!("grad.param.{name}")));
        }
    }

    /// A block from `h` to `y`.
    fn block<M: Module>(&self, dtype: DType, mut block: M, forward: impl Fn(&M, &Tape, &Var) -> Var) {
        self.load_into(&mut block);
        let tape = Tape::new();
        let h = tape.leaf(self.tensor("in.h").cast(dtype));
        let y = forward(&block, &tape, &h);
        let grads = self.walk(dtype, &tape, &[("y", &y)], &[("in.h", &h)]);
        self.compare_param_grads(dtype, &block, &grads);
    }

    fn blocks(&self, len: usize) -> BlockStarts {
        let starts = serde_json::from_value(self.config["block_starts"].clone());
        let starts = starts.unwrap_or_else(|e| panic!("{}: {e}", self.name));
        BlockStarts::new(vec![starts], len).unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    fn diagonal(&self) -> Diagonal {
        serde_json::from_value(self.config["diagonal"].clone()).unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    fn rank(&self) -> Option<usize> {
        Some(self.usize("preconditioner_rank")).filter(|&rank| rank > 0)
    }

    fn language_model(&self, dtype: DType) -> LanguageModel {
        let shape = |name: &str| self.tensor(&format!("param.{name}")).shape().to_vec();
        let layers = if self.kind == "lm_decoder_only" { "layers" } else { "applications" };
        let (d_model, applications) = (shape("embedding")[1], self.usize(layers));
        let arch = self.config["arch"].as_str().unwrap_or("decoder");
        let architecture = match arch {
            "tango" | "wango" => Architecture::Tango(TangoConfig {
                d_model,
                heads: self.usize("heads"),
                head_dim: self.usize("head_dim"),
                gate_width: shape("blocks.0.wg")[0],
                applications,
                tied: true,
                rope_base: 1e4,
                window: (arch == "wango").then(|| self.window()),
            }),
            "transformer_tied" | "transformer_untied" => Architecture::Transformer(TransformerConfig {
                d_model,
                heads: self.usize("heads"),
                d_ff: shape("blocks.0.w_up")[0],
                applications,
                tied: arch == "transformer_tied",
                rope_base: 1e4,
            }),
            "gau" | "flash" => Architecture::Gau(GauConfig {
                d_model,
                key_width: shape("blocks.0.wz")[0],
                gate_width: shape("blocks.0.wu")[0],
                applications,
                tied: false,
                rope_base: 1e4,
                chunk: (arch == "flash").then(|| self.usize("chunk")),
            }),
            "decoder" => Architecture::Decoder(GeluConfig {
                d_model,
                heads: self.usize("heads"),
                d_ff: shape("blocks.0.w_in")[0],
                applications,
                rope_base: 1e4,
            }),
            "cem" => Architecture::Cem(CemConfig {
                d_model,
                heads: self.usize("heads"),
                head_dim: self.usize("head_dim"),
                d_ff: shape("blocks.0.mlp.w_up")[0],
                applications,
                tied: false,
                rope_base: 1e4,
                attention: vec![AttentionKind::Cem],
                mlp: vec![MlpKind::Cem],
                diagonal: self.diagonal(),
                rank: self.rank(),
                steps: self.usize("steps"),
                eta: 1.0,
            }),
            other => panic!("{}: unknown architecture {other}", self.name),
        };
        let config = LanguageModelConfig { n_vocab: shape("embedding")[0], architecture };
        let mut model = LanguageModel::new(&config, 0, dtype).unwrap();
        self.load_into(&mut model);
        model
    }
}

fn block_tango(g: &Golden, dtype: DType) {
    let (wq, wg) = (g.tensor("param.wq").shape(), g.tensor("param.wg").shape());
    let heads = g.usize("heads");
    let config = TangoConfig {
        d_model: wq[1],
        heads,
        head_dim: wq[0] / heads,
        gate_width: wg[0],
        applications: 1,
        tied: true,
        rope_base: 1e4,
        window: (g.kind == "block_wango").then(|| g.window()),
    };
    let block = TangoBlock::new(&config, &Init::new(0, dtype));
    g.block(dtype, block, |block, tape, h| block.forward(tape, h, None));
}

fn block_transformer(g: &Golden, dtype: DType) {
    let up = g.tensor("param.w_up").shape();
    let config = TransformerConfig {
        d_model: up[1],
        heads: g.usize("heads"),
        d_ff: up[0],
        applications: 1,
        tied: true,
        rope_base: 1e4,
    };
    let block = TransformerBlock::new(&config, &Init::new(0, dtype));
    g.block(dtype, block, |block, tape, h| block.forward(tape, h, None));
}

fn block_gau(g: &Golden, dtype: DType) {
    let (wz, wu) = (g.tensor("param.wz").shape(), g.tensor("param.wu").shape());
    let config = GauConfig {
        d_model: wz[1],
        key_width: wz[0],
        gate_width: wu[0],
        applications: 1,
        tied: true,
        rope_base: 1e4,
        chunk: (g.kind == "block_flash").then(|| g.usize("chunk")),
    };
    let block = GauBlock::new(&config, &Init::new(0, dtype));
    g.block(dtype, block, |block, tape, h| block.forward(tape, h, None));
}

fn cem(g: &Golden, dtype: DType) {
    let options = CemOptions { steps: g.usize("steps"), eta: 1.0, rank: g.rank() };
    let init = Init::new(0, dtype);
    if g.kind == "cem_attention" {
        let wq = g.tensor("param.wq").shape();
        let block = CemAttention::new(wq[2], (wq[0], wq[1]), g.diagonal(), 1e4, options, &init);
        g.block(dtype, block, |block, tape, h| block.forward(tape, h, None));
    } else {
        let up = g.tensor("param.w_up").shape();
        let block = CemMlp::new(up[1], up[0], 1.0, options, &init);
        g.block(dtype, block, |block, tape, h| block.forward(tape, h));
    }
}

fn lm(g: &Golden, dtype: DType) {
    let (tokens, targets) = (g.tensor("int.tokens"), g.tensor("int.targets"));
    let model = g.language_model(dtype);
    losses(g, dtype, &model, |tape| model.logits(tape, tokens), |tape| model.loss(tape, tokens, targets));
}

/// A model through its logits, and through the loss that never holds them.
fn losses<M: Module>(
    g: &Golden,
    dtype: DType,
    model: &M,
    logits: impl Fn(&Tape) -> Var,
    direct: impl Fn(&Tape) -> Var,
) {
    for through_logits in [true, false] {
        let tape = Tape::new();
        let logits = through_logits.then(|| logits(&tape));
        let loss = match &logits {
            Some(logits) => ops::cross_entropy(logits, g.tensor("int.targets"), -1),
            None => direct(&tape),
        };
        let mut outputs = vec![("loss", &loss)];
        outputs.extend(logits.iter().map(|l| ("logits", l)));
        let grads = g.walk(dtype, &tape, &outputs, &[]);
        g.compare_param_grads(dtype, model, &grads);
    }
}

fn lm_double_decoder(g: &Golden, dtype: DType) {
    let (tokens, targets) = (g.tensor("int.tokens"), g.tensor("int.targets"));
    let (table, w_in) = (g.tensor("param.embedding").shape(), g.tensor("param.generation.0.w_in").shape());
    let config = DoubleDecoderConfig {
        n_vocab: table[0],
        d_model: table[1],
        heads: g.usize("heads"),
        d_ff: w_in[0],
        context_layers: g.usize("context_layers"),
        generation_layers: g.usize("generation_layers"),
        context_loops: 1,
        separate_kv: false,
        rope_base: 1e4,
    };
    let mut model = DoubleDecoder::new(&config, 0, dtype).unwrap();
    g.load_into(&mut model);
    let blocks = g.blocks(tokens.dim(1));
    let loss = |tape: &Tape| model.loss(tape, tokens, targets, &blocks);
    losses(g, dtype, &model, |tape| model.logits(tape, tokens, &blocks), loss);
}

fn lm_encoder_decoder(g: &Golden, dtype: DType) {
    let [source, tokens, targets] =
        ["encoder_tokens", "decoder_tokens", "targets"].map(|n| g.tensor(&format!("int.{n}")));
    let (table, w_in) = (g.tensor("param.embedding").shape(), g.tensor("param.decoder.0.w_in").shape());
    let config = EncoderDecoderConfig {
        n_vocab: table[0],
        sentinels: 0,
        d_model: table[1],
        heads: g.usize("heads"),
        d_ff: w_in[0],
        encoder_layers: g.usize("encoder_layers"),
        decoder_layers: g.usize("decoder_layers"),
        rope_base: 1e4,
    };
    let mut model = EncoderDecoder::new(&config, 0, dtype).unwrap();
    g.load_into(&mut model);
    let loss = |tape: &Tape| model.loss(tape, source, None, tokens, targets);
    losses(g, dtype, &model, |tape| model.logits(tape, source, None, tokens), loss);
}

fn train(g: &Golden, dtype: DType) {
    let mut model = g.language_model(dtype);
    let schedule = Schedule {
        peak: g.f64("lr"),
        floor: g.f64("min_lr"),
        warmup: g.usize("warmup_steps") as u64,
        total: g.usize("total_steps") as u64,
        decay: Decay::Cosine,
    };
    let mut adam = AdamW::default();
    (adam.beta1, adam.beta2, adam.eps) = (g.f64("beta1"), g.f64("beta2"), g.f64("eps"));
    adam.weight_decay = g.f64("weight_decay");
    let tokens = g.tensor("int.tokens"); // [steps, B, T + 1]
    let (steps, length) = (tokens.dim(0), tokens.dim(2));
    let (mut losses, mut norms, mut rates) = (vec![], vec![], vec![]);
    for step in 0..steps {
        let rows = tokens.select(0, step);
        let (inputs, targets) = (rows.narrow(1, 0, length - 1), rows.narrow(1, 1, length - 1));
        let tape = Tape::new();
        let loss = model.loss(&tape, &inputs, &targets);
        losses.push(loss.item());
        let mut grads = tape.backward(&loss);
        drop(tape);
        let mut params = model.params_mut();
        norms.push(clip_global_norm(&params, &mut grads, g.f64("max_grad_norm")).unwrap());
        rates.push(schedule.rate(step as u64));
        adam.step(&mut params, &grads, rates[step]).unwrap();
    }
    for (name, values) in [("out.losses", losses), ("out.grad_norms", norms), ("out.lrs", rates)] {
        g.close(dtype, name, &Tensor::from_slice(&values, &[steps]).cast(dtype), g.tensor(name));
    }
    for (name, param) in model.params() {
        let name = format!("out.param.{name}");
        g.close(dtype, &name, param.value(), g.tensor(&name));
    }
}

/// Runs a file; `false` when its kind is unknown.
fn run(g: &Golden, dtype: DType) -> bool {
    match g.kind.as_str() {
        "rms_norm" => g.op(dtype, "y", |x| ops::rms_norm(&x("x"), &x("weight"), g.f64("eps"))),
        "rope" => g.op(dtype, "y", |x| ops::rope(&x("x"), g.f64("base"), g.usize("start"))),
        "swiglu" => g.op(dtype, "y", |x| ops::swiglu(&x("gate"), &x("up"))),
        "cross_entropy" => {
            let (targets, ignore) = (g.tensor("int.targets"), g.config["ignore_index"].as_i64().unwrap());
            g.op(dtype, "loss", |x| ops::cross_entropy(&x("logits"), targets, ignore));
        }
        "causal_attention" => g.op(dtype, "y", |x| ops::causal_attention(&x("q"), &x("k"), &x("v"))),
        "gate_aggregate" => g.op(dtype, "y", |x| ops::gate_aggregate(&x("q"), &x("k"), &x("g"), &x("tau"))),
        "feature_map" => {
            let map = g.config["map"].as_str().unwrap().parse().unwrap();
            g.op(dtype, "y", |x| ops::feature_map(&x("u"), &x("tau"), map));
        }
        "windowed_prefix" => g.op(dtype, "y", |x| {
            ops::windowed_prefix(ops::WindowedPrefix {
                q: &x("q"),
                k: &x("k"),
                phi_q: &x("phi_q"),
                phi_k: &x("phi_k"),
                g: &x("g"),
                tau: &x("tau"),
                window: g.usize("window"),
            })
        }),
        "dual_attention" => {
            let blocks = g.blocks(g.tensor("in.q").dim(1));
            g.op(dtype, "y", |x| {
                let [q, k_self, v_self, k_context, v_context] =
                    ["q", "k_self", "v_self", "k_context", "v_context"].map(x);
                let (k_self, v_self, k_context, v_context) = (&k_self, &v_self, &k_context, &v_context);
                let operands = DualAttention { q: &q, k_self, v_self, k_context, v_context };
                ops::dual_attention(operands, DualSees::Blocks(&blocks))
            });
        }
        "block_tango" | "block_wango" => block_tango(g, dtype),
        "block_transformer" => block_transformer(g, dtype),
        "block_gau" | "block_flash" => block_gau(g, dtype),
        "cem_attention" | "cem_mlp" => cem(g, dtype),
        "lm" | "lm_decoder_only" => lm(g, dtype),
        "lm_double_decoder" => lm_double_decoder(g, dtype),
        "lm_encoder_decoder" => lm_encoder_decoder(g, dtype),
        "train" => train(g, dtype),
        _ => return false,
    }
    true
}

#[test]
fn golden_files() {
    let folder = std::env::var_os("KUMIKI_GOLDEN")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden"), PathBuf::from);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("cannot read {}: {e}", folder.display()));
    let mut paths: Vec<PathBuf> =
        entries.map(|e| e.unwrap().path()).filter(|p| p.extension().is_some_and(|e| e == "safetensors")).collect();
    paths.sort();
    assert!(!paths.is_empty(), "{} holds no .safetensors file", folder.display());
    let mut passed = BTreeMap::<String, usize>::new();
    for path in &paths {
        let golden = Golden::load(path);
        let kind = golden.full_kind();
        for dtype in [DType::F64, DType::F32] {
            assert!(run(&golden, dtype), "{}: kind `{kind}` is unknown", golden.name);
        }
        *passed.entry(kind).or_default() += 1;
    }
    println!("passed: {passed:?}");
}
