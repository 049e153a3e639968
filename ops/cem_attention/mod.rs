//! `cem_attention`: one step of Causal Energy Minimization's attention, from the point to the direction downhill.
//!
//! Per token `i`, with heads `h` of width K, `β = K^-1/2`, `R_i` the rotation of position `i`, the point `x` (normed) and
//! the history `ĥ`, of which the keys `k_j = R_j W_K ĥ_j` are given:
//!
//! ```text
//! s_ij = β ( q_i·k_j + x_i·(d_h ⊙ ĥ_j) )      q_i = R_i W_Q x_i           j <= i
//! E_i  = -(1/β) Σ_h log Σ_j exp(s_ij)
//! m_i  = -∂E_i/∂x_i = Σ_h [ W_Qᵀ R_iᵀ c_i + d_h ⊙ μ_i ]    c_i = Σ_j p_ij k_j,   μ_i = Σ_j p_ij ĥ_j,   p = softmax_j(s)
//! ```
//!
//! So the value is the key, read back in the query's frame, and the output projection is the query projection transposed.
//! The diagonal `d` is absent, shared by the heads `[D]`, or one per head `[H, D]`; heads of one diagonal are a *group*,
//! which has one product of scores `x·(d ⊙ ĥ)` and one of values `Σ_j (Σ_h p_ij) ĥ_j`, whatever its number of heads.
//!
//! Backward, for `dm`: `dc_i = R_i W_Q dm_i`, `dμ_i = d ⊙ dm_i`, `dp_ij = dc_i·k_j + dμ_i·ĥ_j`,
//! `ds_ij = p_ij (dp_ij - Σ_l p_il dp_il)`; with it `dq_i = β Σ_j ds_ij k_j`, `dk_j = Σ_i (p_ij dc_i + β ds_ij q_i)`,
//! and with the sums `P`, `S` of `p` and `ds` over a group's heads `dĥ_j = Σ_i (P_ij dμ_i + β S_ij d ⊙ x_i)`,
//! `dd = Σ_i (μ_i ⊙ dm_i + β x_i ⊙ Σ_j S_ij ĥ_j)`; `W_Q` gets its parts from both directions.
//!
//! A task has a tile of 48 or, packed, 64 queries and *all* keys that they see, so that a row of weights is whole before it is
//! used: neither a running maximum nor, in the backward, saved sums are needed, and a group's heads can be summed. That
//! takes `6 T` numbers for each of them a thread; no `T×T` array exists.
//! Saved: x, W_Q, k, q, R_iᵀ c_i, log-sum-exps `[B, T, H]`; with a diagonal d, ĥ, μ.
//! Cost: products `4 HK D` a token, `4 HK + 4 D` operations a visible pair and group forward (`4 HK` without a diagonal,
//! as plain attention), `10 HK + 10 D` backward. A shared diagonal on HK = D thus doubles the pairs' cost; one per head
//! multiplies it by `1 + H`.
//! Source: Causal Energy Minimization, arXiv 2605.07588.

mod backward;
mod cuda;
mod forward;
mod kernels;
mod products;
#[cfg(test)]
mod tests;

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::{DType, Tensor, dispatch_real, threads};

use crate::attention_tiles::{Number, Rows};
use crate::cast::cast;
use crate::count::count;
use crate::matmul::{add_matrices, matrices};
use crate::registry::{BenchCase, OpCase};
use crate::rope::rotate;
use crate::simd::Real;
use crate::sums::sum_axes;

pub(crate) use cuda::KERNELS as CUDA_KERNELS;

/// Where an energy was evaluated: what it is there, and the way down.
pub struct CemStep {
    /// `m = -∇E`, `[B, T, D]`.
    pub direction: Var,
    /// The energy of every token, `[B, T]`, without gradient; absent where it costs something and was not asked for.
    pub energy: Option<Tensor>,
}

/// The part of the scores that passes by the projections.
#[derive(Clone, Copy)]
pub struct CemDiagonal<'a> {
    /// `[D]` for all heads, or `[H, D]`.
    pub d: &'a Var,
    /// The history ĥ, `[B, T_k, D]`.
    pub history: &'a Var,
}

/// Energy and direction at `x` `[B, T_q, D]`, for `wq` `[H, K, D]` and rotated keys `k` `[B, T_k, H, K]`. Queries are the
/// last of the keys' sequence: query `i` is at position `i + T_k - T_q` and sees the keys up to there.
///
/// # Panics
/// When shapes or dtypes do not fit, an axis H, K or D is 0, K is odd, or `T_q > T_k`.
#[track_caller]
pub fn cem_attention(x: &Var, wq: &Var, k: &Var, diagonal: Option<CemDiagonal>, rope_base: f64) -> CemStep {
    check(x, wq, k, diagonal);
    assert!(rope_base > 0.0 && rope_base.is_finite(), "cem_attention: rope_base must be positive, got {rope_base}");
    if x.dtype() != DType::BF16 {
        return run(x, wq, k, diagonal, rope_base);
    }
    let wide = |x: &Var| cast(x, DType::F32);
    let both = diagonal.map(|CemDiagonal { d, history }| (wide(d), wide(history)));
    let diagonal = both.as_ref().map(|(d, history)| CemDiagonal { d, history });
    let CemStep { direction, energy } = run(&wide(x), &wide(wq), &wide(k), diagonal, rope_base);
    CemStep { direction: cast(&direction, DType::BF16), energy }
}

#[track_caller]
fn check(x: &Var, wq: &Var, k: &Var, diagonal: Option<CemDiagonal>) {
    let shapes = || {
        let more = diagonal.map(|g| format!(", d {:?}, history {:?}", g.d.shape(), g.history.shape()));
        format!("x {:?}, wq {:?}, k {:?}{}", x.shape(), wq.shape(), k.shape(), more.unwrap_or_default())
    };
    assert!(
        x.rank() == 3 && wq.rank() == 3 && k.rank() == 4,
        "cem_attention: x must be [B, T_q, D], wq [H, K, D], k [B, T_k, H, K], got {}",
        shapes()
    );
    let (d_model, heads, width) = (x.dim(2), wq.dim(0), wq.dim(1));
    assert!(wq.dim(2) == d_model, "cem_attention: wq must be [H, K, D={d_model}]: {}", shapes());
    assert!(
        k.dim(0) == x.dim(0) && k.dim(2) == heads && k.dim(3) == width,
        "cem_attention: k must be [B={}, T_k, H={heads}, K={width}]: {}",
        x.dim(0),
        shapes()
    );
    assert!(x.dim(1) <= k.dim(1), "cem_attention: queries are the last of the keys, so T_q <= T_k: {}", shapes());
    assert!(heads > 0 && width > 0 && d_model > 0, "cem_attention: H, K and D must be positive: {}", shapes());
    assert!(width.is_multiple_of(2), "cem_attention: K={width} is odd, but rotations need pairs: {}", shapes());
    if let Some(CemDiagonal { d, history }) = diagonal {
        assert!(
            d.shape() == [d_model] || d.shape() == [heads, d_model],
            "cem_attention: d must be [D={d_model}] or [H={heads}, D={d_model}]: {}",
            shapes()
        );
        assert!(
            history.shape() == [x.dim(0), k.dim(1), d_model],
            "cem_attention: history must be [B={}, T_k={}, D={d_model}]: {}",
            x.dim(0),
            k.dim(1),
            shapes()
        );
    }
    let others = [wq, k].into_iter().chain(diagonal.iter().flat_map(|g| [g.d, g.history]));
    assert!(
        x.dtype().is_float() && others.clone().all(|other| other.dtype() == x.dtype()),
        "cem_attention: operands must be of one float dtype, got {:?}",
        std::iter::once(x).chain(others).map(Var::dtype).collect::<Vec<_>>()
    );
}

fn run(x: &Var, wq: &Var, k: &Var, diagonal: Option<CemDiagonal>, rope_base: f64) -> CemStep {
    let [batch, queries, d_model] = [x.dim(0), x.dim(1), x.dim(2)];
    let (heads, width) = (wq.dim(0), wq.dim(1));
    let rows = batch * queries;
    let flat = wq.value().reshape(&[heads * width, d_model]);
    let x_rows = x.value().contiguous().reshape(&[rows, d_model]);
    let others = diagonal.iter().flat_map(|g| [g.d, g.history]);
    let narrow = [x, wq, k].into_iter().chain(others).any(Var::is_narrow);
    let mut saved = CemAttentionBackward {
        q: matrices(&x_rows, &flat.transpose(0, 1), narrow).reshape(&[batch, queries, heads, width]),
        x: x_rows,
        wq: flat,
        k: Rows::<f32>::prepare(k.value()),
        diagonal: diagonal.map(|CemDiagonal { d, history }| {
            let d = d.value().contiguous();
            let groups = d.len() / d_model;
            Diagonal { d: d.reshape(&[groups, d_model]), history: history.value().contiguous(), mix: None }
        }),
        context: None,
        lse: None,
        rope_base,
        per_head: diagonal.is_some_and(|g| g.d.rank() == 2),
        narrow,
    };
    let positions = saved.positions();
    rotate(&mut saved.q, None, rope_base, &positions);
    let keys = k.dim(1);
    count(|c| {
        // Pairs of a query and a key that it sees.
        let pairs = batch * (0..queries).map(|i| keys - queries + i + 1).sum::<usize>();
        let groups = saved.diagonal.as_ref().map_or(0, |diagonal| diagonal.d.dim(0));
        c.projection += (2 * rows * heads * width * d_model) as u64;
        c.pair += 2 * (pairs * (heads * width + groups * d_model)) as u64;
    });
    let on_cuda = saved.q.cuda().is_some();
    let forward::Attended { context, mix, lse } = dispatch_real!("cem_attention", x.dtype(), E => {
        if on_cuda { cuda::forward(&saved) } else { saved.with_problem::<E, _>(forward::forward) }
    });
    let mut back = context.new_empty(context.dtype(), context.shape());
    rotate(&mut back, Some(&context), rope_base, &saved.backwards());
    let back = back.reshape(&[rows, heads * width]);
    let mut direction = matrices(&back, &saved.wq, narrow);
    if let (Some(diagonal), Some(mix)) = (&saved.diagonal, &mix) {
        if on_cuda {
            direction.add_assign(&cuda::on_diagonal(&saved, mix));
        } else {
            dispatch_real!("cem_attention", x.dtype(), E => {
                add_scaled(direction.as_mut_slice::<E>(), diagonal.d.as_slice::<E>(), mix.as_slice::<E>());
            });
        }
    }
    let energy = sum_axes(&lse, &[2], -(width as f64).sqrt()); // -1/β
    (saved.context, saved.lse) = (Some(back), Some(lse));
    if let Some(diagonal) = &mut saved.diagonal {
        diagonal.mix = mix;
    }
    let inputs: Vec<&Var> = [x, wq, k].into_iter().chain(diagonal.iter().flat_map(|g| [g.d, g.history])).collect();
    let direction = Var::from_op(direction.reshape(&[batch, queries, d_model]), &inputs, || saved);
    CemStep { direction, energy: Some(energy) }
}

/// `β = K^-1/2`.
fn beta<E: Number>(width: usize) -> E {
    Real::from_f64((width as f64).powf(-0.5))
}

/// `out[n] += Σ_g d[g] ⊙ mix[n, g]`, rows of the width of `d`'s.
fn add_scaled<E: Number>(out: &mut [E], d: &[E], mix: &[E]) {
    let (rows, groups) = (64, mix.len() / out.len().max(1));
    let width = d.len() / groups.max(1);
    threads::parallel_chunks_mut(out, rows * width, rows * d.len(), |piece, out| {
        for (r, out) in out.chunks_exact_mut(width).enumerate() {
            let mix = &mix[(piece * rows + r) * d.len()..][..d.len()];
            for (d, mix) in d.chunks_exact(width).zip(mix.chunks_exact(width)) {
                out.iter_mut().zip(d.iter().zip(mix)).for_each(|(y, (&d, &x))| *y += d * x);
            }
        }
    });
}

/// What the tiles work on.
struct Problem<'a, E> {
    batch: usize,
    heads: usize,
    queries: usize,
    keys: usize,
    beta: E,
    /// Rotated, `[B, T_q, H, K]`.
    q: Rows<'a, E>,
    /// `[B, T_k, H, K]`.
    k: Rows<'a, E>,
    diagonal: Option<Group<'a, E>>,
    narrow: bool,
}

struct Group<'a, E> {
    groups: usize,
    /// `[G, D]`.
    d: &'a [E],
    /// `[B, T_q, 1, D]`.
    x: Rows<'a, E>,
    /// `[B, T_k, 1, D]`.
    history: Rows<'a, E>,
}

impl<E: Number> Problem<'_, E> {
    /// Keys that the last of the queries before `end` sees.
    fn visible(&self, end: usize) -> usize {
        self.keys - self.queries + end
    }

    /// Sets of heads that share their sums, and the heads of each.
    fn groups(&self) -> (usize, usize) {
        let groups = self.diagonal.as_ref().map_or(1, |diagonal| diagonal.groups);
        (groups, self.heads / groups)
    }
}

struct Diagonal {
    /// `[G, D]`.
    d: Tensor,
    /// `[B, T_k, D]`.
    history: Tensor,
    /// `[B, T_q, G, D]`.
    mix: Option<Tensor>,
}

struct CemAttentionBackward {
    /// `[B T_q, D]`.
    x: Tensor,
    /// `[HK, D]`.
    wq: Tensor,
    /// `[B, T_k, H, K]`.
    k: Tensor,
    /// Rotated, `[B, T_q, H, K]`.
    q: Tensor,
    /// In the queries' frames, `[B T_q, HK]`.
    context: Option<Tensor>,
    /// `[B, T_q, H]`.
    lse: Option<Tensor>,
    diagonal: Option<Diagonal>,
    rope_base: f64,
    per_head: bool,
    narrow: bool,
}

impl CemAttentionBackward {
    fn positions(&self) -> Vec<i64> {
        let (queries, keys) = (self.q.dim(1), self.k.dim(1));
        (keys - queries..keys).map(|t| t as i64).collect()
    }

    fn backwards(&self) -> Vec<i64> {
        self.positions().iter().map(|t| -t).collect()
    }

    fn with_problem<E: Number, R>(&self, f: impl FnOnce(&Problem<E>) -> R) -> R {
        let (q, k) = (&self.q, &self.k);
        let d_model = self.wq.dim(1);
        let x = self.x.reshape(&[q.dim(0), q.dim(1), 1, d_model]);
        let history = self.diagonal.as_ref().map(|g| g.history.reshape(&[k.dim(0), k.dim(1), 1, d_model]));
        f(&Problem {
            batch: q.dim(0),
            heads: q.dim(2),
            queries: q.dim(1),
            keys: k.dim(1),
            beta: beta(q.dim(3)),
            q: Rows::new(q),
            k: Rows::new(k),
            diagonal: self.diagonal.as_ref().zip(history.as_ref()).map(|(diagonal, history)| Group {
                groups: diagonal.d.dim(0),
                d: diagonal.d.as_slice::<E>(),
                x: Rows::new(&x),
                history: Rows::new(history),
            }),
            narrow: self.narrow,
        })
    }

    fn gradients<E: Number>(self, dm: &Tensor) -> Vec<Option<Tensor>> {
        let [batch, queries, heads, width] = [0, 1, 2, 3].map(|axis| self.q.dim(axis));
        let (rows, d_model) = (batch * queries, self.wq.dim(1));
        let dm_rows = dm.reshape(&[rows, d_model]);
        let context = self.context.as_ref().expect("of the forward");
        let mut dwq = matrices(&context.transpose(0, 1), &dm_rows, self.narrow);
        let dcontext = matrices(&dm_rows, &self.wq.transpose(0, 1), self.narrow);
        let mut dcontext = dcontext.reshape(&[batch, queries, heads, width]);
        rotate(&mut dcontext, None, self.rope_base, &self.positions());
        let dm_heads = dm.reshape(&[batch, queries, 1, d_model]);
        let backward::Gradients { mut dq, dk, diagonal } = if dm.cuda().is_some() {
            cuda::backward(&self, &dcontext, dm)
        } else {
            let up = backward::Upstream {
                dcontext: Rows::new(&dcontext),
                dm: Rows::new(&dm_heads),
                lse: self.lse.as_ref().expect("of the forward").as_slice::<E>(),
                mix: self.diagonal.as_ref().and_then(|g| g.mix.as_ref()).map(|mix| mix.as_slice::<E>()),
            };
            self.with_problem::<E, _>(|p| backward::backward(p, &up))
        };
        rotate(&mut dq, None, self.rope_base, &self.backwards());
        let dq = dq.reshape(&[rows, heads * width]);
        add_matrices(&mut dwq, &dq.transpose(0, 1), &self.x, self.narrow);
        let mut dx = matrices(&dq, &self.wq, self.narrow);
        let mut grads = vec![None, Some(dwq.reshape(&[heads, width, d_model])), Some(dk)];
        if let Some(backward::DiagonalGradients { dx: direct, dd, dhistory }) = diagonal {
            dx.add_assign(&direct.reshape(&[rows, d_model]));
            let dd = if self.per_head { dd } else { dd.reshape(&[d_model]) };
            grads.extend([Some(dd), Some(dhistory)]);
        }
        grads[0] = Some(dx.reshape(&[batch, queries, d_model]));
        grads
    }
}

impl Backward for CemAttentionBackward {
    fn name(&self) -> &'static str {
        "cem_attention"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        let mut saved = vec![("x", &self.x), ("wq", &self.wq), ("k", &self.k), ("q", &self.q)];
        saved.extend(self.context.iter().map(|x| ("context", x)).chain(self.lse.iter().map(|x| ("lse", x))));
        if let Some(Diagonal { d, history, mix }) = &self.diagonal {
            saved.extend([("d", d), ("history", history)]);
            saved.extend(mix.iter().map(|mix| ("mix", mix)));
        }
        saved
    }
    fn backward(self: Box<Self>, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        let dout = dout.contiguous();
        let grads = dispatch_real!("cem_attention", dout.dtype(), E => self.gradients::<E>(&dout));
        grads.into_iter().zip(needs).map(|(grad, &needed)| grad.filter(|_| needed)).collect()
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    let shapes: [(&str, &[usize]); 5] =
        [("x", &[2, 4, 6]), ("wq", &[2, 4, 6]), ("k", &[2, 4, 2, 4]), ("history", &[2, 4, 6]), ("d", &[6])];
    let per_head = [shapes[0], shapes[1], shapes[2], shapes[3], ("d", &[2, 6][..])];
    let last = [("x", &[2, 2, 6][..]), shapes[1], shapes[2], shapes[3], shapes[4]];
    let with = |v: &[Var]| cem_attention(&v[0], &v[1], &v[2], Some(CemDiagonal { d: &v[4], history: &v[3] }), 1e4);
    vec![
        OpCase::new("cem_attention", "no diagonal", &shapes[..3], |_, v| {
            cem_attention(&v[0], &v[1], &v[2], None, 1e4).direction
        }),
        OpCase::new("cem_attention", "shared diagonal", &shapes, move |_, v| with(v).direction),
        OpCase::new("cem_attention", "diagonal per head", &per_head, move |_, v| with(v).direction),
        OpCase::new("cem_attention", "last 2 of 4", &last, move |_, v| with(v).direction),
    ]
}

pub(crate) fn bench() -> Vec<BenchCase> {
    let (b, t, h, k, d) = (4, 512, 8, 32, 256);
    let inputs = || vec![("x", vec![b, t, d]), ("wq", vec![h, k, d]), ("k", vec![b, t, h, k])];
    let pairs = b * t * (t + 1) / 2;
    let flops = |groups: usize| 4 * b * t * h * k * d + 4 * pairs * (h * k + groups * d);
    let bytes = 4 * (2 * b * t * d + h * k * d + b * t * h * k);
    let case = |name, groups: usize, d_shape: Vec<usize>| {
        let mut inputs = inputs();
        inputs.extend([("history", vec![b, t, d]), ("d", d_shape)]);
        BenchCase {
            name,
            inputs,
            forward: Box::new(|_, v| {
                cem_attention(&v[0], &v[1], &v[2], Some(CemDiagonal { d: &v[4], history: &v[3] }), 1e4).direction
            }),
            bytes: bytes + 4 * b * t * d,
            flops: flops(groups),
        }
    };
    vec![
        BenchCase {
            name: "cem_attention",
            inputs: inputs(),
            forward: Box::new(|_, v| cem_attention(&v[0], &v[1], &v[2], None, 1e4).direction),
            bytes,
            flops: flops(0),
        },
        case("cem_attention (shared)", 1, vec![d]),
        case("cem_attention (per head)", h, vec![h, d]),
    ]
}
