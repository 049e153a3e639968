//! A tape frees what it saved when it is dropped. Alone in its binary: the byte counters are those of the whole process.

use kumiki_autograd::{Param, Tape, Var, checkpoint};
use kumiki_ops::{concat, dropout, embedding, gather, index_select, l2_normalize, linear, matmul, narrow, transpose};
use kumiki_tensor::{DType, Rng, Tensor, memory_stats};

struct Model {
    embedding: Param,
    weight: Param,
}

/// A forward pass through every operator that saves something, tracked.
fn forward(model: &Model, ids: &Tensor, step: u64) -> Var {
    let tape = Tape::training(Rng::new(step));
    let table = tape.param(&model.embedding);
    let x = embedding(&table, ids); // [2, 9, 16]
    let q = l2_normalize(&linear(&x, &tape.param(&model.weight)), 1e-12);
    let scores = dropout(&tape, &matmul(&q, &transpose(&x, 1, 2)), 0.5); // [2, 9, 9]
    let weight = model.weight.clone();
    let h = checkpoint(&tape, &[&scores, &x], move |tape, v| {
        dropout(tape, &linear(&matmul(&v[0], &v[1]), &tape.param(&weight)), 0.5)
    });
    let h = concat(&[&h, &narrow(&x, 2, 0, 4)], 2); // [2, 9, 20]
    let h = index_select(&h, 0, &Tensor::from_slice(&[1i64, 1], &[2]));
    let out = gather(&h, 2, &Tensor::zeros(DType::I64, &[2, 9, 1]));
    assert!(out.requires_grad() && tape.summary().saved_bytes() > 0);
    out
}

#[test]
fn case_45_tapes_without_a_backward_are_freed() {
    let mut rng = Rng::new(45);
    let model = Model {
        embedding: Param::new(rng.normal(DType::F32, &[11, 16], 0.0, 1.0)),
        weight: Param::new(rng.normal(DType::F32, &[16, 16], 0.0, 1.0)),
    };
    let ids = rng.ids(DType::I64, &[2, 9], 11);
    let before = memory_stats().live;
    let mut at_10 = 0;
    // The newest output is kept, as a training loop keeps its last loss; with it lives one tape.
    let mut last = None;
    for step in 1..=1000 {
        last = Some(forward(&model, &ids, step));
        if step == 10 {
            at_10 = memory_stats().live;
        }
    }
    assert!(at_10 > before, "one tape is alive");
    assert_eq!(memory_stats().live, at_10, "bytes after 1000 passes and after 10");
    drop(last);
    assert_eq!(memory_stats().live, before);
}
