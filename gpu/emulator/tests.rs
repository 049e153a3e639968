//! Kernels on the emulated device: right ones give what plain loops give, and each sort of fault is found and named.

use crate::{Arg, Buffer, Device, Launch, Matmul, MatmulType, Operand, Source};

static TESTS: Source = Source {
    file: "tests.cu",
    text: include_str!("tests.cu"),
    headers: &[],
    kernels: &[
        "row_softmax<float>",
        "row_softmax<double>",
        "row_softmax<bf16>",
        "tile_product",
        "count",
        "round_all",
        "lanes",
        "passes_a_struct",
        "reads_beyond",
        "writes_before",
        "writes_beyond_shared",
        "writes_beyond_dynamic",
        "reads_what_nothing_wrote",
        "races",
        "overwrites_what_others_read",
        "in_its_warp",
        "increments_together",
        "in_turns_in_its_warp",
        "diverges",
        "diverges_between_two",
        "leaves_its_warp",
        "is_misaligned",
        "gives_up",
        "overflows",
        "leaves_its_array",
    ],
};

fn device() -> Device {
    Device::emulated(0).unwrap()
}

fn bytes_of<T: Copy>(values: &[T]) -> Vec<u8> {
    // SAFETY: numbers have no padding.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) }.to_vec()
}

fn upload<T: Copy>(values: &[T]) -> Buffer {
    let mut buffer = device().allocate(size_of_val(values)).unwrap();
    buffer.upload(&bytes_of(values)).unwrap();
    buffer
}

fn download<T: Copy + Default>(buffer: &Buffer, count: usize) -> Vec<T> {
    let mut bytes = vec![0; count * size_of::<T>()];
    buffer.download(0, &mut bytes).unwrap();
    // SAFETY: every pattern of bits is a number.
    bytes.chunks(size_of::<T>()).map(|bytes| unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }).collect()
}

fn launch(kernel: &str, shape: Launch, args: &[Arg]) -> Result<(), String> {
    // SAFETY: the arguments below are the kernels'.
    unsafe { device().launch(&TESTS, kernel, shape, args) }.map_err(|error| error.to_string())
}

/// Numbers between -4 and 4 in no order.
fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 2_654_435_761) % 8001) as f32 / 1000.0 - 4.0).collect()
}

fn softmax(x: &[f32], n: usize) -> Vec<f64> {
    let row = |row: &[f32]| {
        let exps: Vec<f64> = row.iter().map(|&x| f64::from(x).exp()).collect();
        let sum: f64 = exps.iter().sum();
        exps.into_iter().map(|e| e / sum).collect::<Vec<_>>()
    };
    x.chunks(n).flat_map(row).collect()
}

#[test]
fn rows_of_any_length_are_softmaxed() {
    for (rows, n, threads) in [(1, 1, 32), (3, 5, 32), (2, 31, 64), (2, 129, 128), (5, 1000, 256)] {
        let x = numbers(rows * n);
        let expected = softmax(&x, n);
        let wide: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        let (of_f32, of_f64) = (upload(&x), upload(&wide));
        let y = device().allocate(8 * rows * n).unwrap();
        let shape = Launch::of(rows as u32, threads);
        launch("row_softmax<float>", shape, &[Arg::In(&of_f32, 0), Arg::Out(&y, 0), Arg::I32(n as i32)]).unwrap();
        let single: Vec<f32> = download(&y, rows * n);
        launch("row_softmax<double>", shape, &[Arg::In(&of_f64, 0), Arg::Out(&y, 0), Arg::I32(n as i32)]).unwrap();
        let double: Vec<f64> = download(&y, rows * n);
        for ((single, double), expected) in single.iter().zip(&double).zip(&expected) {
            assert!((f64::from(*single) - expected).abs() < 1e-6 && (double - expected).abs() < 1e-14);
        }
    }
}

#[test]
fn a_tile_is_multiplied_as_the_manual_lays_it_out() {
    let half = |x: &[f32]| x.iter().map(|&x| half::bf16::from_f32(x).to_bits()).collect::<Vec<u16>>();
    let (a, b) = (half(&numbers(16 * 16)), half(&numbers(16 * 8)));
    let c = device().allocate(4 * 16 * 8).unwrap();
    let (of_a, of_b) = (upload(&a), upload(&b));
    launch("tile_product", Launch::of(1, 32), &[Arg::In(&of_a, 0), Arg::In(&of_b, 0), Arg::Out(&c, 0)]).unwrap();
    let value = |bits: u16| half::bf16::from_bits(bits).to_f32();
    for (at, c) in download::<f32>(&c, 128).into_iter().enumerate() {
        let expected: f32 = (0..16).map(|k| value(a[at / 8 * 16 + k]) * value(b[k * 8 + at % 8])).sum();
        assert!((c - expected).abs() < 1e-4, "{at}: {c} for {expected}");
    }
}

#[test]
fn rounding_to_bf16_is_that_of_the_library() {
    let mut x = numbers(1000);
    x.extend([0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE, 1e-42]);
    x.extend([1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, f32::from_bits(0x7f80_0001)]);
    let (from, to) = (upload(&x), device().allocate(2 * x.len()).unwrap());
    launch("round_all", Launch::of(3, 64), &[Arg::In(&from, 0), Arg::Out(&to, 0), Arg::I64(x.len() as i64)]).unwrap();
    let expected: Vec<u16> = x.iter().map(|&x| half::bf16::from_f32(x).to_bits()).collect();
    assert_eq!(download::<u16>(&to, x.len()), expected);
}

#[test]
fn atomics_shuffles_votes_and_structs() {
    let (counter, sum) = (upload(&[0u32, 0]), upload(&[0f32]));
    launch("count", Launch::of(7, 96), &[Arg::Out(&counter, 0), Arg::Out(&sum, 0)]).unwrap();
    assert_eq!((download::<u32>(&counter, 2), download::<f32>(&sum, 1)), (vec![7 * 96, 95], vec![336.0]));
    let out = device().allocate(4 * 64).unwrap();
    launch("lanes", Launch::of(1, 64), &[Arg::Out(&out, 0)]).unwrap();
    let lane = |i: i32| {
        let (up, down) = (if i > 0 { i - 1 } else { i }, if i < 30 { i + 2 } else { i });
        if i == 0 { 11 } else { 5 + 100 * up + 10000 * down }
    };
    assert_eq!(download::<i32>(&out, 64), (0..64).map(|i| lane(i % 32)).collect::<Vec<_>>());
    let shape = Launch { shared: 4 * 32, ..Launch::of(1, 32) };
    let pair = bytes_of(&[2f32, 3.0]);
    launch("passes_a_struct", shape, &[Arg::Struct(&pair), Arg::F64(0.5), Arg::Out(&out, 4 * 32)]).unwrap();
    assert_eq!(download::<f32>(&out, 64)[32..], [3.5; 32]);
}

/// Kernel, threads, bytes of dynamic shared memory, arguments after the output, and what the sentence must have.
type Fault = (&'static str, u32, u32, &'static [i32], &'static [&'static str]);

#[test]
fn every_sort_of_fault_is_named() {
    let faults: [Fault; 15] = [
        (
            "increments_together",
            64,
            0,
            &[],
            &["thread (1, 0, 0)", "shared sum that thread 0 writes, with no barrier between"],
        ),
        ("overflows", 1, 0, &[70_000], &["a product that overflows in line"]),
        ("leaves_its_array", 1, 0, &[4], &["an index outside of its array in line"]),
        ("writes_before", 1, 0, &[1], &["4 bytes before a buffer of 256", "tests.cu line"]),
        ("writes_beyond_shared", 32, 0, &[8], &["thread (3, 0, 0)", "byte 32 of shared first, which has 32"]),
        ("writes_beyond_dynamic", 8, 32, &[1], &["thread (7, 0, 0)", "byte 32 of shared dynamic memory, which has 32"]),
        (
            "reads_what_nothing_wrote",
            64,
            0,
            &[],
            &["thread (32, 0, 0)", "byte 128 of shared room, which nothing wrote"],
        ),
        ("races", 64, 0, &[], &["thread (1, 0, 0)", "of shared room that thread 0 writes, with no barrier between"]),
        ("overwrites_what_others_read", 64, 0, &[], &["shared room that thread", "no barrier between"]),
        ("diverges", 64, 0, &[], &["thread (0, 0, 0) waits at the barrier", "thread (40, 0, 0) has finished"]),
        (
            "diverges_between_two",
            64,
            0,
            &[],
            &["thread (0, 0, 0) waits at the barrier", "thread (40, 0, 0) waits at the barrier"],
        ),
        ("leaves_its_warp", 32, 0, &[], &["thread (0, 0, 0) waits for its warp", "thread (0, 0, 0) waits"]),
        ("is_misaligned", 1, 0, &[], &["an address that is no multiple of 16 in line"]),
        ("gives_up", 1, 0, &[], &["__trap"]),
        ("lanes", 16, 0, &[], &["lanes that the block does not have"]),
    ];
    let y = upload(&[0f32; 64]);
    for (kernel, threads, shared, more, expected) in faults {
        let args: Vec<Arg> = std::iter::once(Arg::Out(&y, 0)).chain(more.iter().map(|&x| Arg::I32(x))).collect();
        let error = launch(kernel, Launch { shared, ..Launch::of(1, threads) }, &args).expect_err(kernel);
        assert!(error.contains(kernel) && error.contains("block (0, 0, 0)"), "{kernel}: {error}");
        assert!(expected.iter().all(|part| error.contains(part)), "{kernel}: {error}");
    }
    let x = upload(&[1f32; 5]);
    for (at, place) in [(5, "4 bytes at byte 20 of a buffer of 20"), (-1, "before a buffer of 20")] {
        let error =
            launch("reads_beyond", Launch::of(1, 1), &[Arg::In(&x, 0), Arg::Out(&y, 0), Arg::I32(at)]).unwrap_err();
        assert!(error.contains(place), "{error}");
    }
    // What is right is not reported.
    launch("in_its_warp", Launch::of(1, 64), &[Arg::Out(&y, 0)]).unwrap();
    launch("in_turns_in_its_warp", Launch::of(1, 32), &[Arg::Out(&y, 0)]).unwrap();
    launch("writes_beyond_shared", Launch::of(1, 32), &[Arg::Out(&y, 0), Arg::I32(7)]).unwrap();
    // A buffer that is no more.
    let gone = y.address(0);
    drop(y);
    let error = launch("gives_up", Launch::of(1, 1), &[Arg::U64(gone)]).unwrap_err();
    assert!(error.contains("no buffer of this device lies") || error.contains("a buffer of"), "{error}");
}

#[test]
fn shapes_that_no_card_takes_are_refused() {
    let y = upload(&[0f32; 4]);
    let over = |shape: Launch| launch("gives_up", shape, &[Arg::Out(&y, 0)]).unwrap_err();
    assert!(over(Launch::of(1, 1025)).contains("1 to 1024 threads"));
    assert!(over(Launch { grid: [1, 70000, 1], ..Launch::of(1, 32) }).contains("65535"));
    assert!(over(Launch { shared: 300_000, ..Launch::of(1, 32) }).contains("dynamic shared memory"));
    assert_eq!(launch("gives_up", Launch::of(0, 32), &[Arg::Out(&y, 0)]), Ok(()));
}

#[test]
fn several_threads_launch_at_once() {
    let (x, n) = (numbers(40 * 33), 33);
    let expected = softmax(&x, n);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let (from, to) = (upload(&x), device().allocate(4 * x.len()).unwrap());
                let args = [Arg::In(&from, 0), Arg::Out(&to, 0), Arg::I32(n as i32)];
                launch("row_softmax<float>", Launch::of(40, 64), &args).unwrap();
                let y: Vec<f32> = download(&to, x.len());
                assert!(y.iter().zip(&expected).all(|(y, expected)| (f64::from(*y) - expected).abs() < 1e-6));
            });
        }
    });
}

#[test]
fn a_source_that_does_not_compile_is_a_sentence() {
    static WRONG: Source = Source {
        file: "wrong.cu",
        text: "#include \"common.cuh\"\n__global__ void k(float *y) { y[0] = missing; }\n",
        headers: &[],
        kernels: &["k"],
    };
    // SAFETY: it is never launched.
    let error = unsafe { device().launch(&WRONG, "k", Launch::of(1, 1), &[]) }.unwrap_err().to_string();
    assert!(
        error.contains("wrong.cu does not compile") && error.contains("wrong.cu:2") && error.contains("missing"),
        "{error}"
    );
}

#[test]
fn products_of_all_layouts_equal_plain_loops() {
    let (m, n, k, batch) = (3, 4, 5, 2);
    let (a, b) = (numbers(batch * m * k), numbers(batch * k * n));
    for (a_transposed, b_transposed, accumulate) in
        [(false, false, false), (true, false, true), (false, true, true), (true, true, false)]
    {
        let operand = |buffer: &Buffer, transposed: bool, [rows, columns]: [usize; 2]| Operand {
            address: buffer.address(0),
            dtype: MatmulType::F32,
            transposed,
            stride: if transposed { rows } else { columns },
            batch_stride: rows * columns,
        };
        let (of_a, of_b, c) = (upload(&a), upload(&b), upload(&vec![1f32; batch * m * n]));
        let product = Matmul {
            m,
            n,
            k,
            batch,
            a: operand(&of_a, a_transposed, [m, k]),
            b: operand(&of_b, b_transposed, [k, n]),
            c: operand(&c, false, [m, n]),
            accumulate,
            tf32: false,
        };
        // SAFETY: the operands lie in the buffers.
        unsafe { device().matmul(&product) }.unwrap();
        for (at, c) in download::<f32>(&c, batch * m * n).into_iter().enumerate() {
            let (entry, i, j) = (at / (m * n), at / n % m, at % n);
            let a = |l: usize| a[entry * m * k + if a_transposed { l * m + i } else { i * k + l }];
            let b = |l: usize| b[entry * k * n + if b_transposed { j * k + l } else { l * n + j }];
            let expected: f32 = (0..k).map(|l| a(l) * b(l)).sum::<f32>() + f32::from(u8::from(accumulate));
            assert!((c - expected).abs() < 1e-4, "{at}: {c} for {expected}");
        }
    }
}

#[test]
fn what_a_driver_refuses_is_refused() {
    assert!(Device::emulated(7).unwrap_err().to_string().contains("cuda:7: there is no such device, only 2"));
    let error = device().allocate(1 << 40).unwrap_err().to_string();
    assert!(error.contains("out of memory on cuda:0: 1099511627776 bytes asked"), "{error}");
}
