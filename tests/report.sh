#!/usr/bin/env bash
# Opens the page of a small run in headless Chromium, dark and light, as wide as a desk and a phone show it, and uses it.
#
#   tests/report.sh [RUN...]
#
# Fails on an error or a request that the page's policy had to refuse, on a chart that is missing or empty, on a page wider than
# the screen, and when a control does nothing. RUN are folders of runs; without one a small run is made. Needs Chromium
# (chromium, chromium-headless-shell or google-chrome; CHROMIUM names another). KUMIKI is the binary, if not
# target/release/kumiki. SHOTS is a folder for screenshots.
set -euo pipefail
cd "$(dirname "$0")/.."
kumiki=${KUMIKI:-target/release/kumiki}
browser=${CHROMIUM:-$(command -v chromium-headless-shell chromium chromium-browser google-chrome | head -1 || true)}
[ -n "$browser" ] || { echo "no Chromium found; on Debian: apt-get install chromium-headless-shell"; exit 2; }
[ -x "$kumiki" ] || cargo build --release --locked -p kumiki-cli

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
runs=("$@")
if [ $# -eq 0 ]; then
    runs=("$work/<b>run&")
    "$kumiki" compare tango --preset nano --models tango,gau --seeds 0,1 --eval-every 5 --out "${runs[0]}" >/dev/null 2>&1
fi
"$kumiki" report "${runs[@]}" --out "$work/report.html"

# The page with a listener before everything and a user behind it, who leaves what was found in the title.
cat >"$work/listener.html" <<'HTML'
<script>window.wrong = [];
addEventListener("error", (event) => wrong.push(event.message));
addEventListener("securitypolicyviolation", (event) => wrong.push("refused: " + event.blockedURI));
console.error = console.warn = (...text) => wrong.push(text.join(" "));</script>
HTML
cat >"$work/user.html" <<'HTML'
<script>
// After a moment: what the policy refuses is told late.
addEventListener("load", () => setTimeout(() => {
try {
  const all = (what) => [...document.querySelectorAll(what)];
  const must = (holds, what) => { if (!holds) wrong.push(what); };
  const curves = () => all("figure path.curve").filter((path) => path.getAttribute("d").length > 20).length;
  const change = (id, set) => { const at = document.getElementById(id); set(at); for (const name of ["input", "change"]) at.dispatchEvent(new Event(name)); };
  const ticks = (n = 0) => [...all("figure")[n].querySelectorAll("text")].map((text) => text.textContent).join();
  const firstCurve = () => document.querySelector("figure path.curve").getAttribute("d");
  const differs = (read, act, what) => { const before = read(); act(); must(read() !== before, what); };
  const background = () => getComputedStyle(document.body).backgroundColor;
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  must(dark === background().match(/\d+/g)[0] < 128, `dark: ${dark}, but ${background()}`);
  must(all("figure svg").length === 4, "four charts");
  const full = curves();
  must(full >= 4, "curves in all charts: " + full);
  const validated = JSON.parse(document.getElementById("data").textContent).series.some((series) => series.corpus === 0 && series.val.length);
  must(!validated || all("figure circle").length > 0, "dots of validation");
  must(document.documentElement.scrollWidth <= innerWidth, `${document.documentElement.scrollWidth} wide on ${innerWidth}`);
  must(!/NaN|Infinity|undefined/.test(document.body.innerText + all("figure svg").map((svg) => svg.outerHTML).join()), "numbers that are none");
  // What is written must lie inside of its chart, and not on other labels.
  for (const svg of all("figure svg")) {
    const outer = svg.getBoundingClientRect();
    const boxes = [...svg.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
    for (const [n, [text, box]] of boxes.entries()) {
      must(box.left >= outer.left - 1 && box.right <= outer.right + 1, `'${text}' leaves its chart`);
      for (const [other, b] of boxes.slice(0, n)) {
        must(box.right <= b.left || b.right <= box.left || box.bottom <= b.top || b.bottom <= box.top, `'${text}' on '${other}'`);
      }
    }
  }
  differs(ticks, () => change("x", (x) => { x.value = "tokens"; }), "the x axis");
  // The way up and down that the curve of throughput makes.
  const way = () => {
    const heights = all("figure")[1].querySelector("path.curve").getAttribute("d").split(/[ML]/).slice(1).map((at) => Number(at.split(" ")[1]));
    return heights.slice(1).reduce((sum, y, n) => sum + Math.abs(y - heights[n]), 0);
  };
  change("smooth", (slider) => { slider.value = 0.95; });
  const smooth = way();
  change("smooth", (slider) => { slider.value = 0; });
  must(smooth < 0.5 * way(), `smoothing: ${smooth} of ${way()}`);
  differs(ticks, () => change("logx", (box) => { box.checked = true; }), "log x");
  differs(firstCurve, () => all("figure input")[0].click(), "log y");
  change("logx", (box) => { box.checked = false; });
  differs(curves, () => all("#legend input")[0].click(), "hiding a model");
  all("#legend input")[0].click();
  must(curves() === full, "showing it again");
  const svg = document.querySelector("figure svg"), box = svg.getBoundingClientRect();
  const point = (type, share) => svg.dispatchEvent(new PointerEvent(type, { clientX: box.left + box.width * share, clientY: box.top + 50, pointerType: "mouse", pointerId: 1 }));
  point("pointermove", 0.5);
  const tip = document.querySelector("figure .tip");
  must(!tip.hidden && /training tokens [\d,]+/.test(tip.innerText) && tip.querySelectorAll("i").length >= Math.min(2, all("fieldset input").length), "the tip: " + tip.innerText);
  const inside = tip.getBoundingClientRect();
  must(inside.left >= 0 && inside.right <= innerWidth, "the tip leaves the screen");
  svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  must(!tip.hidden, "arrow keys");
  svg.setPointerCapture = () => {};
  differs(ticks, () => { point("pointerdown", 0.4); point("pointermove", 0.6); point("pointerup", 0.6); }, "zooming");
  must(!document.getElementById("unzoom").hidden, "the button that ends it");
  document.getElementById("unzoom").click();
  change("theme", (theme) => { theme.value = "light"; });
  differs(background, () => change("theme", (theme) => { theme.value = "dark"; }), "dark");
  const column = [...document.querySelectorAll("table.sortable thead button")].findIndex((button) => button.textContent === "seconds");
  const values = () => [...document.querySelector("table.sortable").tBodies[0].rows].map((row) => Number(row.cells[column].dataset.value));
  document.querySelectorAll("table.sortable thead button")[column].click();
  must(values().every((v, n, list) => n === 0 || list[n - 1] <= v), "sorting up: " + values());
  document.querySelectorAll("table.sortable thead button")[column].click();
  must(values().every((v, n, list) => n === 0 || list[n - 1] >= v), "sorting down: " + values());
} catch (error) {
  wrong.push(String(error.stack ?? error));
}
document.title = wrong.length ? "WRONG " + wrong.join(" | ").replace(/\s+/g, " ") : "RIGHT";
}, 100));
</script>
HTML
{
    # Both lie where the page has its head's style and its body's end, each once.
    head=$(grep -ob '<style>' "$work/report.html" | head -1 | cut -d: -f1)
    tail=$(grep -ob '</body>' "$work/report.html" | tail -1 | cut -d: -f1)
    head -c "$head" "$work/report.html"
    cat "$work/listener.html"
    tail -c +"$((head + 1))" "$work/report.html" | head -c "$((tail - head))"
    cat "$work/user.html"
    tail -c +"$((tail + 1))" "$work/report.html"
} >"$work/used.html"

options=(--no-sandbox --headless --disable-gpu --hide-scrollbars)
for size in 1440,900 390,844; do
    for colours in dark light; do
        # As the browser numbers them.
        chosen=(--window-size=$size --blink-settings=preferredColorScheme=$([ $colours = dark ] && echo 0 || echo 1))
        found=$("$browser" "${options[@]}" "${chosen[@]}" --user-data-dir="$work/used-$size-$colours" --virtual-time-budget=5000 \
            --dump-dom "file://$work/used.html" 2>"$work/log" | grep -o '<title>[^<]*</title>' | head -1 || true)
        echo "$size, $colours: $found"
        [ "$found" = "<title>RIGHT</title>" ] || { tail -5 "$work/log"; exit 1; }
        if [ -n "${SHOTS-}" ]; then
            mkdir -p "$SHOTS"
            "$browser" "${options[@]}" "${chosen[@]}" --user-data-dir="$work/shot" \
                --screenshot="$SHOTS/report-$size-$colours.png" "file://$work/report.html" 2>/dev/null
        fi
    done
done
