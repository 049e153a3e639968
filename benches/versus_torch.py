#!/usr/bin/env python3
"""One training step of kumiki beside one of PyTorch (torch_step.py, next to this file), same shapes, same threads; then
matrix products of both.

  cargo build --release
  python3 benches/versus_torch.py [--models tango,wango,... --products 2048x512x2048,... --dtypes f32,bf16 --pairs 5
                                   --threads 2 --json out.json]

The two run in turn, each in a process of its own, so that a busy machine slows both alike. Printed are medians over the
pairs: tokens per second of each (of products, M x N x K: GFLOP/s), their ratio (with the least and the greatest of a single
pair), and peak memory of each. `--models ""` or `--products ""` leaves a part out. Needs a Python with torch (pip install torch); kumiki needs nothing."""
import argparse, json, os, pathlib, statistics, subprocess, sys

here = pathlib.Path(__file__).resolve().parent
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--models", default="transformer,tango,wango,gau,flash,cem")
parser.add_argument("--products", default="2048x2048x2048,2048x512x2048", help="M x N x K of each")
parser.add_argument("--dtypes", default="f32,bf16")
parser.add_argument("--pairs", type=int, default=5)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--steps", type=int, default=5, help="timed steps of each run")
parser.add_argument("--kumiki", default=here.parent / "target/release/kumiki", help="the binary")
parser.add_argument("--python", default=sys.executable, help="a Python that has torch")
parser.add_argument("--json", help="write every measurement to this file")
args = parser.parse_args()

if not os.access(args.kumiki, os.X_OK):
    sys.exit(f"{args.kumiki} is not there: run `cargo build --release` first")
if args.pairs < 1:
    sys.exit(f"--pairs must be at least 1, found {args.pairs}")


def run(command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stderr.strip()}")
    return json.loads(done.stdout.strip().splitlines()[-1])


PRODUCT = """
import sys, time, json, torch
m, n, k, threads = map(int, sys.argv[1:5])
torch.set_num_threads(threads)
a, b = (torch.randn(*shape).to(torch.float32 if sys.argv[5] == "f32" else torch.bfloat16) for shape in ((m, k), (k, n)))
times = []
for _ in range(31):
    start = time.perf_counter(); a @ b; times.append(time.perf_counter() - start)
print(json.dumps({"gflop_s": 2e-9 * m * n * k / sorted(times[1:])[15]}))
"""
listed = lambda names: [name for name in names.split(",") if name]
rows, print_row = [], "{:<14} {:<5} {:>8} {:>8}  {:>5} ({:>5} to {:>5})  {:>6} {:>6}  {:>5}".format
print(print_row("model", "dtype", "kumiki", "torch", "ratio", "least", "most", "MB", "MB", "ratio"), flush=True)
for dtype in listed(args.dtypes):
    for model in listed(args.models):
        same = ["--model", model, "--dtype", dtype, "--threads", args.threads, "--steps", args.steps]
        pairs = []
        for _ in range(args.pairs):
            ours = run([args.kumiki, "bench", "step", *same])
            theirs = run([args.python, "-W", "ignore", here / "torch_step.py", *same])
            pairs.append((ours, theirs))
        rows.append({"model": model, "dtype": dtype, "pairs": pairs})
        ratios = [ours["tok_s"] / theirs["tok_s"] for ours, theirs in pairs]
        median = lambda side, key: statistics.median(pair[side][key] for pair in pairs)
        memory = [median(side, "peak_rss_mb") for side in (0, 1)]
        print(print_row(model, dtype, round(median(0, "tok_s")), round(median(1, "tok_s")),
                        f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}", f"{max(ratios):.2f}",
                        round(memory[0]), round(memory[1]), f"{memory[0] / memory[1]:.2f}"), flush=True)
for dtype in listed(args.dtypes):
    for product in listed(args.products):
        shape, pairs = product.split("x"), []
        for _ in range(args.pairs):
            ours = run([args.kumiki, "bench", "gemm", *shape, "--dtype", dtype, "--threads", args.threads])
            pairs.append((ours, run([args.python, "-W", "ignore", "-c", PRODUCT, *shape, args.threads, dtype])))
        rows.append({"product": product, "dtype": dtype, "pairs": pairs})
        ratios = [ours["gflop_s"] / theirs["gflop_s"] for ours, theirs in pairs]
        ours, theirs = (round(statistics.median(pair[side]["gflop_s"] for pair in pairs)) for side in (0, 1))
        print(print_row(product, dtype, ours, theirs, f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}",
                        f"{max(ratios):.2f}", "", "", ""), flush=True)
if args.json:
    pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
