#!/usr/bin/env bash
# Reads exported event files back with TensorBoard itself and compares every number with the log.
#
#   tests/tensorboard.sh [RUN]
#
# RUN is the folder of a run; without one a small run of two seeds is made. Needs python3 with venv; TensorBoard is installed
# into a folder of its own in the cache. KUMIKI is the binary, if not target/release/kumiki.
set -euo pipefail
cd "$(dirname "$0")/.."
kumiki=${KUMIKI:-target/release/kumiki}
venv=${XDG_CACHE_HOME:-$HOME/.cache}/kumiki-tensorboard
[ -x "$kumiki" ] || cargo build --release --locked -p kumiki-cli

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$venv/bin/python" -c 'import tensorboard' 2>/dev/null || {
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q 'tensorboard>=2.18,<3'
}
run=${1:-$work/run}
if [ $# = 0 ]; then
    # Stopped and gone on with: what was written live must be what is exported.
    args=(compare tango --preset nano --models tango,gau --seeds 0,1 --tensorboard --out "$run")
    "$kumiki" "${args[@]}" --stop-after 7 >/dev/null 2>&1
    "$kumiki" "${args[@]}" --resume >/dev/null 2>&1
fi
"$kumiki" export "$run" --csv "$work/log.csv" --tensorboard "$work/events"
[ ! -d "$run/events" ] || diff -r "$run/events" "$work/events"

"$venv/bin/python" - "$run/log.jsonl" "$work/log.csv" "$work/events" <<'PY'
import csv, json, math, os, sys
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

log, table, events = sys.argv[1:]
records = [json.loads(line) for line in open(log)]
nan = lambda y: math.nan if y is None else y
same = lambda a, b: a == b or (math.isnan(a) and math.isnan(b))

with open(table, newline="") as file:
    rows = list(csv.DictReader(file))
assert len(rows) == len(records), (len(rows), len(records))
for row, record in zip(rows, records):
    for key in ["loss", "lr", "grad_norm", "tok_s"]:
        assert same(float(row[key]), nan(record[key])), (key, row, record)
    assert (row["model"], row["step"], row["tokens"]) == (record["model"], str(record["step"]), str(record["tokens"]))
    assert (row["val_loss"] == "") == ("val_loss" not in record), row

trainings = {}
for record in records:
    trainings.setdefault((record["corpus"], record["seed"], record["model"]), []).append(record)
folders = sorted(path for path, _, files in os.walk(events) if files)
assert len(folders) == len(trainings), (folders, list(trainings))
compared = 0
for (corpus, seed, model), expected in trainings.items():
    wide = len({key[:2] for key in trainings}) > 1
    # As the exporter names them, for names that folders can have.
    folder = os.path.join(events, *([os.path.basename(corpus), f"seed-{seed}"] if wide else []), model)
    found = EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()
    tags = {"train/loss": "loss", "val/loss": "val_loss", "lr": "lr", "grad_norm": "grad_norm", "tok_s": "tok_s"}
    for tag, key in tags.items():
        wanted = [(r["step"], np.float32(nan(r[key]))) for r in expected if key in r]
        got = found.Scalars(tag) if wanted else []
        assert len(got) == len(wanted), (folder, tag, len(got), len(wanted))
        for event, (step, value) in zip(got, wanted):
            assert event.step == step and same(np.float32(event.value), value), (folder, tag, event, value)
        times = [event.wall_time for event in got]
        assert times == sorted(times), (folder, tag)
        compared += len(got)
print(f"TensorBoard read {compared} numbers of {len(trainings)} trainings as the log has them")
assert compared > 0
PY
