//! Every level that this CPU has, against f64, double-double and plain loops.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Copy, Debug)]
enum Function {
    Exp,
    Ln,
    Tanh,
    Sigmoid,
}

const FUNCTIONS: [Function; 4] = [Function::Exp, Function::Ln, Function::Tanh, Function::Sigmoid];

impl<E: Real> Unary<E> for Function {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, x: L) -> L {
        match self {
            Self::Exp => x.exp(),
            Self::Ln => x.ln(),
            Self::Tanh => x.tanh(),
            Self::Sigmoid => x.sigmoid(),
        }
    }
}

fn at_every_level(f: impl Fn(Level) + Sync) {
    for level in Level::available() {
        with_level(level, || f(level));
    }
}

fn eval<E: Real>(function: Function, x: &[E]) -> Vec<E> {
    let mut out = vec![E::NAN; x.len()];
    map_unary(&function, x, &mut out);
    out
}

/// A number as the unevaluated sum of two f64: about 106 bits, enough to judge f64 results.
#[derive(Clone, Copy)]
struct Double(f64, f64);

impl Double {
    fn add(self, other: Double) -> Double {
        let sum = self.0 + other.0;
        let part = sum - self.0;
        let error = (self.0 - (sum - part)) + (other.0 - part) + self.1 + other.1;
        Double(sum + error, error - ((sum + error) - sum))
    }
    fn mul(self, other: Double) -> Double {
        let product = self.0 * other.0;
        let error = self.0.mul_add(other.0, -product) + (self.0 * other.1 + self.1 * other.0);
        Double(product + error, error - ((product + error) - product))
    }
    fn div(self, other: Double) -> Double {
        let q = Double(self.0 / other.0, 0.0);
        let rest = self.add(q.mul(Double(-other.0, -other.1)));
        q.add(Double(rest.0 / other.0, 0.0))
    }
    /// `e^x - 1 = 2^n (1 + q) - 1` as `(n, q)`, by Taylor's series.
    fn exp_parts(x: f64) -> (i32, Double) {
        const LN2: Double = Double(std::f64::consts::LN_2, 2.319_046_813_846_299_6e-17);
        let n = (x / LN2.0).round();
        let r = Double(x, 0.0).add(LN2.mul(Double(-n, 0.0)));
        let mut term = r;
        let mut sum = r;
        for i in 2..28 {
            term = term.mul(r).div(Double(f64::from(i), 0.0));
            sum = sum.add(term);
        }
        (n as i32, sum)
    }
}

/// The function in double-double as mantissa and power of two, for moderate results; ln comes from std.
fn reference(function: Function, x: f64) -> (Double, i32) {
    let one = Double(1.0, 0.0);
    match function {
        Function::Exp => {
            let (n, q) = Double::exp_parts(x);
            (one.add(q), n)
        }
        Function::Ln => (Double(x.ln(), 0.0), 0),
        Function::Tanh => {
            let (n, q) = Double::exp_parts(2.0 * x.abs());
            let power = 2f64.powi(n);
            let expm1 = Double(q.0 * power, q.1 * power).add(Double(power, 0.0).add(Double(-1.0, 0.0)));
            let t = expm1.div(expm1.add(Double(2.0, 0.0)));
            (if x < 0.0 { Double(-t.0, -t.1) } else { t }, 0)
        }
        Function::Sigmoid => {
            let (n, q) = Double::exp_parts(-x.abs());
            let e = one.add(q);
            let small = if n < -1000 { Double(0.0, 0.0) } else { Double(e.0 * 2f64.powi(n), e.1 * 2f64.powi(n)) };
            if x < 0.0 { (e.div(one.add(small)), n) } else { (one.div(one.add(small)), 0) }
        }
    }
}

/// The spacing of numbers at `|x|`, for `mantissa` bits and the least exponent of a normal number.
fn spacing(x: f64, mantissa: i32, least: i32) -> f64 {
    let exponent = if x == 0.0 { least } else { (x.abs().log2().floor() as i32).max(least) };
    2f64.powi(exponent - mantissa)
}

fn exact_f64(function: Function, x: f32) -> f64 {
    let x = f64::from(x);
    match function {
        Function::Exp => x.exp(),
        Function::Ln => x.ln(),
        Function::Tanh => x.tanh(),
        Function::Sigmoid if x < 0.0 => x.exp() / (1.0 + x.exp()),
        Function::Sigmoid => 1.0 / (1.0 + (-x).exp()),
    }
}

#[test]
fn f32_functions_are_within_two_ulp_over_all_numbers() {
    // A prime step through all 2^32 bit patterns.
    let x: Vec<f32> = (0..=u32::MAX).step_by(4099).map(f32::from_bits).filter(|x| !x.is_nan()).collect();
    at_every_level(|level| {
        for function in FUNCTIONS {
            let mut worst = (0.0, 0.0);
            for (&x, &got) in x.iter().zip(&eval(function, &x)) {
                let want = exact_f64(function, x);
                let rounded = want as f32;
                if !rounded.is_finite() || !got.is_finite() {
                    // Beyond the greatest number by less than the error is still right.
                    let near = f64::from(got.abs().min(f32::MAX)) >= f64::from(f32::MAX) * (1.0 - 2f64.powi(-23));
                    let ok = got == rounded || (got.is_nan() && rounded.is_nan()) || (near && want.abs() > 3.4e38);
                    assert!(ok, "{function:?}({x}) at {level:?}: {got}, should be {rounded}");
                    continue;
                }
                let ulps = (f64::from(got) - want).abs() / spacing(want, 23, -126);
                worst = if ulps > worst.0 { (ulps, x) } else { worst };
            }
            println!("{level:?} f32 {function:?}: {:.3} ulp at {:e}", worst.0, worst.1);
            assert!(worst.0 <= 2.0, "{function:?} at {level:?}: {worst:?}");
        }
    });
}

#[test]
fn f64_functions_are_within_two_ulp() {
    let mut x: Vec<f64> = (0..20_000).map(|i| f64::from(i - 10_000) * 0.0707 + 1e-5 * f64::from(i % 97)).collect();
    x.extend((0..20_000).map(|i| f64::from(i - 10_000) * 0.0013));
    x.extend((0..2000).map(|i| 2f64.powf(f64::from(i) * 0.03 - 60.0) * if i % 2 == 0 { 1.0 } else { -1.0 }));
    let positive: Vec<f64> = (1..60_000u64)
        .map(|i| f64::from_bits(i * 0x7fe0_0000_0000_0000u64.div_ceil(60_000)))
        .chain((0..20_000).map(|i| 0.5 + f64::from(i) * 1e-4))
        .collect();
    at_every_level(|level| {
        for function in FUNCTIONS {
            let x = if matches!(function, Function::Ln) { &positive } else { &x };
            let mut worst = (0.0, 0.0);
            for (&x, &got) in x.iter().zip(&eval(function, x)) {
                // Subnormal results and overflow are tested as edges.
                if !matches!(function, Function::Ln | Function::Tanh) && !(-708.0..709.7).contains(&x) {
                    continue;
                }
                let (want, n) = reference(function, x);
                // Two steps, for 2^n may be no number.
                let scaled = got * 2f64.powi(-n / 2) * 2f64.powi(-n - (-n / 2));
                let ulps = ((scaled - want.0) - want.1).abs() / spacing(want.0, 52, -1022);
                worst = if ulps > worst.0 { (ulps, x) } else { worst };
            }
            println!("{level:?} f64 {function:?}: {:.3} ulp at {:e}", worst.0, worst.1);
            assert!(worst.0 <= 2.0, "{function:?} at {level:?}: {worst:?}");
        }
    });
}

fn edges<E: Real>(level: Level) {
    let inf = E::INFINITY;
    let big = E::from_f64(1e30);
    let thousand = E::from_f64(1000.0);
    let zero = E::ZERO;
    let cases = [
        (Function::Exp, vec![(-inf, zero), (inf, inf), (-thousand, zero), (thousand, inf), (big, inf), (-big, zero)]),
        (Function::Exp, vec![(zero, E::ONE), (-zero, E::ONE)]),
        (Function::Ln, vec![(zero, -inf), (-zero, -inf), (inf, inf), (E::ONE, zero)]),
        (Function::Tanh, vec![(inf, E::ONE), (-inf, -E::ONE), (big, E::ONE), (-big, -E::ONE), (zero, zero)]),
        (Function::Sigmoid, vec![(inf, E::ONE), (-inf, zero), (thousand, E::ONE), (-thousand, zero)]),
        (Function::Sigmoid, vec![(zero, E::HALF), (-big, zero), (big, E::ONE)]),
    ];
    for (function, pairs) in cases {
        for (x, want) in pairs {
            for lanes in [1, 3, 16] {
                let got = eval(function, &vec![x; lanes]);
                assert!(got.iter().all(|&y| y == want), "{function:?}({x}) at {level:?}: {got:?}, should be {want}");
            }
        }
    }
    for function in FUNCTIONS {
        assert!(eval(function, &[E::NAN; 17]).iter().all(|y| y.is_nan()), "{function:?}(NaN) at {level:?}");
    }
    assert!(eval(Function::Ln, &[-E::ONE, -inf, -thousand, -big]).iter().all(|y| y.is_nan()));
    assert!(eval(Function::Tanh, &[-zero])[0].to_f64().is_sign_negative());
}

#[test]
fn edge_values() {
    at_every_level(edges::<f32>);
    at_every_level(edges::<f64>);
    at_every_level(|_| {
        // NaN of any payload and sign, and subnormal results.
        let odd = [0x7f80_0001u32, 0xff80_0001, 0x7fc0_0002, 0xffff_ffff, 0x7fbf_ffff].map(f32::from_bits);
        for function in FUNCTIONS {
            assert!(eval(function, &odd).iter().all(|y| y.is_nan()), "{function:?}");
        }
        let tiny = eval(Function::Exp, &[-708.5, -720.0, -744.0, -745.2f64]);
        for (got, x) in tiny.iter().zip([-708.5f64, -720.0, -744.0, -745.2]) {
            assert!((got - x.exp()).abs() <= 5e-324 + 2.3e-16 * x.exp(), "exp({x}) = {got:e}");
        }
        assert_eq!(eval(Function::Ln, &[5e-324f64])[0], 5e-324f64.ln());
    });
}

/// Each primitive against the scalar one; `k` chooses it.
struct Primitive(usize);

impl<E: Real> Ternary<E> for Primitive {
    #[inline(always)]
    fn apply<L: Lanes<Elem = E>>(&self, x: L, y: L, z: L) -> L {
        match self.0 {
            0 => x + y,
            1 => x - y,
            2 => x * y,
            3 => x / y,
            4 => -x,
            5 => x.abs(),
            6 => x.abs().sqrt(),
            7 => x.max(y),
            8 => x.min(y),
            9 => L::select(x.gt(y), x, z),
            10 => L::select(x.ge(y), x, z),
            11 => L::select(x.eq(y), x, z),
            12 => L::select(x.lt(y), x, z),
            13 => L::select(x.le(y), x, z),
            14 => L::select(L::mask_and(x.gt(y), y.gt(z)), x, z),
            _ => L::select(L::mask_or(x.gt(y), y.gt(z)), x, z),
        }
    }
}

fn primitive<E: Real>(k: usize, x: E, y: E, z: E) -> E {
    let choose = |mask: bool| if mask { x } else { z };
    match k {
        0 => x + y,
        1 => x - y,
        2 => x * y,
        3 => x / y,
        4 => -x,
        5 => x.abs(),
        6 => x.abs().sqrt(),
        7 => [y, x][usize::from(x > y)],
        8 => [y, x][usize::from(x < y)],
        9 => choose(x > y),
        10 => choose(x >= y),
        11 => choose(x == y),
        12 => choose(x < y),
        13 => choose(x <= y),
        14 => choose(x > y && y > z),
        _ => choose(x > y || y > z),
    }
}

fn primitives_agree<E: Real>(values: &[f64]) {
    let column = |step: usize| -> Vec<E> {
        (0..values.len() * 3).map(|i| E::from_f64(values[(i * step + step) % values.len()])).collect()
    };
    let (x, y, z) = (column(1), column(2), column(5));
    at_every_level(|level| {
        for k in 0..16 {
            let mut out = vec![E::NAN; x.len()];
            map_ternary(&Primitive(k), &x, &y, &z, &mut out);
            for i in 0..x.len() {
                let want = primitive(k, x[i], y[i], z[i]);
                let same = out[i] == want || (out[i].is_nan() && want.is_nan());
                assert!(same, "primitive {k} of {}, {}, {} at {level:?}: {}, not {want}", x[i], y[i], z[i], out[i]);
            }
            let mut inplace = x.clone();
            map_ternary_inplace(&Primitive(k), &mut inplace, &y, &z);
            assert!(inplace.iter().zip(&out).all(|(a, b)| a == b || (a.is_nan() && b.is_nan())));
        }
    });
}

#[test]
fn primitives_agree_with_scalars() {
    let values =
        [0.0, -0.0, 1.0, -1.5, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 3e-40, 7.25, 1e30, -2e-3, 0.3, -8.0];
    primitives_agree::<f32>(&values);
    primitives_agree::<f64>(&values);
}

/// All reductions of one vector, and what `any` and `all` say of `x > 0`.
struct Reduced<'a, E>(&'a [E]);

impl<E: Real> Kernel<E> for Reduced<'_, E> {
    type Output = (usize, [E; 3], bool, bool);

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) -> Self::Output {
        let x = L::load(self.0);
        let mask = x.gt(L::splat(E::ZERO));
        (L::N, [x.reduce_sum(), x.reduce_max(), x.reduce_min()], L::any(mask), L::all(mask))
    }
}

fn halves<E: Real>(x: &[E], fold: fn(E, E) -> E) -> E {
    if x.len() == 1 {
        return x[0];
    }
    let (low, high) = x.split_at(x.len() / 2);
    halves(&low.iter().zip(high).map(|(&a, &b)| fold(a, b)).collect::<Vec<_>>(), fold)
}

fn lanes_reduce_by_halves<E: Real>() {
    at_every_level(|level| {
        for shift in 0..40 {
            let x: Vec<E> = (0..16).map(|i| E::from_f64(f64::from((i * 7 + shift) % 40 - 12) * 0.37)).collect();
            let (n, [sum, max, min], any, all) = E::dispatch(Reduced(&x));
            let x = &x[..n];
            assert_eq!(sum, halves(x, |a, b| a + b), "{level:?}");
            assert_eq!(max, halves(x, E::max), "{level:?}");
            assert_eq!(min, halves(x, E::min), "{level:?}");
            assert_eq!(any, x.iter().any(|&x| x > E::ZERO), "{level:?}");
            assert_eq!(all, x.iter().all(|&x| x > E::ZERO), "{level:?}");
        }
    });
}

#[test]
fn lanes_reduce_by_halves_in_every_type() {
    lanes_reduce_by_halves::<f32>();
    lanes_reduce_by_halves::<f64>();
}

/// Square of N rows, row-major, transposed.
struct Transposed<'a, E>(&'a [E], &'a mut [E]);

impl<E: Real> Kernel<E> for Transposed<'_, E> {
    type Output = usize;

    #[inline(always)]
    fn run<L: Lanes<Elem = E>>(self) -> usize {
        let mut rows = [L::splat(E::ZERO); 16];
        for (i, row) in rows.iter_mut().enumerate().take(L::N) {
            *row = L::load(&self.0[i * L::N..]);
        }
        L::transpose(&mut rows);
        for (i, row) in rows.iter().enumerate().take(L::N) {
            row.store(&mut self.1[i * L::N..]);
        }
        L::N
    }
}

fn squares_transpose<E: Real>() {
    at_every_level(|level| {
        let x: Vec<E> = (0..256).map(|i| E::from_f64(f64::from(i))).collect();
        let mut y = vec![E::NAN; 256];
        let n = E::dispatch(Transposed(&x, &mut y));
        assert!((0..n * n).all(|i| y[i] == x[i % n * n + i / n]), "{level:?}: {y:?}");
    });
}

#[test]
fn squares_transpose_in_every_type() {
    squares_transpose::<f32>();
    squares_transpose::<f64>();
}

#[test]
fn case_05_a_mean_of_twenty_million_ones_is_one() {
    let ones = vec![1.0f32; 20_000_000];
    at_every_level(|level| {
        assert_eq!(sum(&ones) / 2e7, 1.0, "{level:?}");
        assert_eq!(sum_sq(&ones) / 2e7, 1.0, "{level:?}");
    });
}

#[test]
fn nothing_to_reduce() {
    at_every_level(|_| {
        assert_eq!(sum::<f32>(&[]), 0.0);
        assert_eq!(dot::<f64>(&[], &[]), 0.0);
        assert_eq!(max::<f32>(&[]), f32::NEG_INFINITY);
        assert_eq!(exp_shift_inplace::<f32>(&mut [], 0.0), 0.0);
    });
}

fn reductions_agree<E: Real>(values: &[f64]) {
    let x: Vec<E> = values.iter().map(|&x| E::from_f64(x)).collect();
    let y: Vec<E> = values.iter().rev().map(|&x| E::from_f64(x * 0.5)).collect();
    let wide = |f: &dyn Fn(f64, f64) -> f64| -> (f64, f64) {
        let (sum, size) = x
            .iter()
            .zip(&y)
            .map(|(x, y)| f(x.to_f64(), y.to_f64()))
            .fold((Double(0.0, 0.0), 1e-300), |(sum, size), term| (sum.add(Double(term, 0.0)), size + term.abs()));
        (sum.0, size)
    };
    at_every_level(|level| {
        let check = |name: &str, got: E, (want, size): (f64, f64)| {
            let error = (got.to_f64() - want).abs() / size;
            assert!(error <= 12.0 * E::EPSILON.to_f64(), "{name} of {} at {level:?}: {got}, not {want}", x.len());
        };
        check("sum", sum(&x), wide(&|x, _| x));
        check("dot", dot(&x, &y), wide(&|x, y| x * y));
        check("sum_sq", sum_sq(&x), wide(&|x, _| x * x));
        let shift = E::from_f64(1.25);
        let total = sum_exp_shifted(&x, shift);
        check("sum_exp_shifted", total, wide(&|x, _| (x - 1.25).exp()));
        let mut row = x.clone();
        assert_eq!(exp_shift_inplace(&mut row, shift), total);
        let greatest = x.iter().copied().fold(E::NEG_INFINITY, E::max);
        assert_eq!(max(&x), greatest);
        for (i, (&e, &x)) in row.iter().zip(&x).enumerate() {
            let want = (x.to_f64() - 1.25).exp();
            assert!((e.to_f64() - want).abs() <= 8.0 * E::EPSILON.to_f64() * want, "row[{i}] at {level:?}");
        }
        if !x.is_empty() {
            let mut poisoned = x.clone();
            let middle = poisoned.len() / 2;
            poisoned[middle] = E::NAN;
            assert!(max(&poisoned).is_nan() && sum(&poisoned).is_nan() && dot(&poisoned, &y).is_nan());
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn reductions_agree_with_plain_loops(values in prop_oneof![
        prop::collection::vec(-6.0..6.0f64, 0..70),
        prop::collection::vec(-6.0..6.0f64, 1015..1040),
        prop::collection::vec(-6.0..6.0f64, 3000..5000),
    ]) {
        reductions_agree::<f32>(&values);
        reductions_agree::<f64>(&values);
    }
}

#[test]
#[should_panic(expected = "map_binary: slices differ in length")]
fn lengths_are_checked() {
    struct Add;
    impl<E: Real> Binary<E> for Add {
        #[inline(always)]
        fn apply<L: Lanes<Elem = E>>(&self, x: L, y: L) -> L {
            x + y
        }
    }
    let mut twice = [1.0f32, 2.0];
    map_binary_inplace(&Add, &mut twice, &[1.0, 2.0]);
    assert_eq!(twice, [2.0, 4.0]);
    map_binary(&Add, &[1.0f32, 2.0], &[3.0], &mut [0.0, 0.0]);
}
