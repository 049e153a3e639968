"use strict";
// Draws the charts of the page from the numbers in #data, and makes its controls and tables work.
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const figures = [...document.querySelectorAll("figure")];
  const state = { x: "step", weight: 0, logX: false, peaks: false, corpus: 0, hidden: new Set(), zoom: null };
  const several = new Set(data.models.map((model) => model.run)).size > 1;
  const dashes = ["", "9 5", "2 4"];
  const colour = (model) => `var(--c${model % 7})`;
  const dash = (model) => dashes[Math.floor(model / 7) % 3];
  const units = { step: "step", tokens: "training tokens", seconds: "seconds of training" };

  // ---- pictures

  const space = byId("nothing")?.namespaceURI;
  function draw(parent, name, attributes, text) {
    const element = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }
  function make(parent, name, text, className) {
    const element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    parent.append(element);
    return element;
  }

  // ---- numbers

  // A number with so many digits that count; large ones with a unit.
  function short(y, digits = 4) {
    if (y === 0) return "0";
    const size = Math.abs(y);
    if (size < 1e-4 || size >= 1e15) return y.toExponential(Math.max(0, digits - 2)).replace("e+", "e");
    for (const [step, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (size >= step && (step > 1e3 || size >= 1e4)) return Number((y / step).toPrecision(digits)) + unit;
    }
    return String(Number(y.toPrecision(digits)));
  }

  // Ticks at multiples of 1, 2 or 5 times a power of ten.
  function linear(low, high, most) {
    const rough = (high - low) / most;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999) ?? power;
    const ticks = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high * (1 + 1e-12) + 1e-300 && ticks.length < 30; n++) ticks.push(n * step);
    // As many digits as tell neighbours apart.
    const largest = Math.max(Math.abs(low), Math.abs(high), step);
    const digits = Math.max(1, Math.floor(Math.log10(largest) + 1e-9) - Math.floor(Math.log10(step) + 1e-9) + 1);
    return ticks.map((y) => [y, short(Math.abs(y) < step / 1e6 ? 0 : y, digits)]);
  }
  function logarithmic(low, high, most) {
    const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
    const every = Math.max(1, Math.ceil((to - from) / most));
    for (const multiples of [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 1.5, 2, 3, 5, 7], [1, 2, 5], [1]]) {
      const ticks = [];
      for (let e = from; e <= to; e++) {
        if (multiples.length > 1 || e % every === 0) for (const m of multiples) ticks.push(m * 10 ** e);
      }
      const inside = ticks.filter((y) => y >= low * 0.9999 && y <= high * 1.0001);
      if (inside.length >= 3 && inside.length <= most + 1) return inside.map((y) => [y, short(y, 2)]);
    }
    return linear(low, high, most).filter(([y]) => y > 0);
  }

  // A mean with weights that fall by the same factor from point to point, to both sides: it does not lag behind a falling curve.
  // Gaps stay gaps.
  function smoothed(values, weight) {
    const sums = values.map(() => [0, 0]);
    for (const order of [values.keys(), [...values.keys()].reverse()]) {
      let [sum, count] = [0, 0];
      for (const n of order) {
        sums[n][0] += weight * sum;
        sums[n][1] += weight * count;
        if (values[n] !== null) [sum, count] = [weight * sum + values[n], weight * count + 1];
      }
    }
    return values.map((y, n) => (y === null ? null : (y + sums[n][0]) / (1 + sums[n][1])));
  }
  const cache = new Map();
  function smoothedOf(series, key) {
    const id = `${data.series.indexOf(series)} ${key}`;
    const found = cache.get(id);
    if (found?.weight === state.weight) return found.values;
    // A schedule is exact: there is nothing to smooth.
    const values = key === "lr" ? series.lr.mean : smoothed(series[key].mean, state.weight);
    cache.set(id, { weight: state.weight, values });
    return values;
  }

  // ---- what is shown

  const shown = () => data.series.filter((s) => s.corpus === state.corpus && !state.hidden.has(s.model));
  function name(series) {
    const { run, model } = data.models[series.model];
    const seeds = data.series.filter((s) => s.corpus === series.corpus && s.model === series.model).length;
    return (several ? `${run} · ` : "") + model + (seeds > 1 ? ` (seed ${series.seed})` : "");
  }
  const column = { step: 0, tokens: 1, seconds: 2 };
  const validation = (series) => series.val.map((point) => [point[column[state.x]], point[3]]);

  function extent(values, start) {
    let [low, high] = start ?? [Infinity, -Infinity];
    for (const v of values) if (v !== null && v !== undefined) (low = Math.min(low, v)), (high = Math.max(high, v));
    return [low, high];
  }

  function ranges(key, list, logY) {
    const fits = (x) => !state.logX || x > 0;
    let x = state.zoom ?? list.reduce((range, s) => extent(s[state.x].filter(fits), range), undefined) ?? [0, 1];
    if (!(x[0] < x[1])) x = Number.isFinite(x[0]) ? [x[0] * 0.9 - (state.logX ? 0 : 0.5), x[0] * 1.1 + 0.5] : [state.logX ? 1 : 0, 2];
    else if (!state.zoom && !state.logX) x = [Math.min(0, x[0]), x[1] + 0.012 * (x[1] - Math.min(0, x[0]))];
    const inside = (v) => v >= x[0] && v <= x[1];
    let all = [], vals = [];
    for (const s of list) {
      const values = state.peaks ? (s[key].high ?? s[key].mean) : smoothedOf(s, key);
      s[state.x].forEach((v, n) => inside(v) && values[n] !== null && all.push(values[n]));
      if (state.peaks) (s[key].low ?? []).forEach((y, n) => inside(s[state.x][n]) && y !== null && all.push(y));
      if (key === "loss") validation(s).forEach(([v, y]) => inside(v) && vals.push(y));
    }
    if (logY) [all, vals] = [all, vals].map((list) => list.filter((y) => y > 0));
    all.sort((a, b) => a - b);
    let [low, high] = extent(vals, extent(all));
    if (!(low <= high)) return { x, y: logY ? [0.1, 1] : [0, 1], empty: true };
    // The first drop from the untrained loss would flatten everything else.
    if (!state.peaks && all.length && !logY && key !== "lr") {
      const most = (list) => list[Math.min(list.length - 1, Math.floor(list.length * 0.95))];
      high = Math.max(most(all), vals.length < 20 ? extent(vals)[1] : most(vals.sort((a, b) => a - b)));
    }
    if (logY) {
      const room = high > low ? (high / low) ** 0.06 : 1.2;
      return { x, y: [low / room, high * room] };
    }
    if (key === "tok_s" || key === "lr") low = 0;
    const room = high > low ? 0.06 * (high - low) : Math.abs(high) * 0.1 || 1;
    return { x, y: [low === 0 ? 0 : low - room, high + room] };
  }

  // ---- a chart

  function chart(figure) {
    const { key, unit } = figure.dataset;
    const place = figure.querySelector(".plot");
    const list = shown();
    const logY = figure.querySelector("input").checked;
    const width = Math.max(280, place.clientWidth), height = width < 520 ? 260 : figure === figures[0] ? 400 : 300;
    const range = ranges(key, list, logY);
    const yTicks = (logY ? logarithmic : linear)(range.y[0], range.y[1], height / 44);
    const xTicks = (state.logX ? logarithmic : linear)(range.x[0], range.x[1], Math.min(10, width / 72));
    const left = 26 + 7.3 * Math.max(3, ...yTicks.map(([, label]) => label.length)), right = 16, top = 10, bottom = 40;
    const scale = ([low, high], log, from, to) => {
      const place = log ? (v) => Math.log10(v) : (v) => v;
      const [a, b] = [place(low), place(high)];
      return [(v) => from + ((place(v) - a) / (b - a)) * (to - from), (p) => {
        const v = a + ((p - from) / (to - from)) * (b - a);
        return log ? 10 ** v : v;
      }];
    };
    const [px, unpx] = scale(range.x, state.logX, left, width - right);
    const [py] = scale(range.y, logY, height - bottom, top);
    const can = (x, y) => y !== null && y !== undefined && (!state.logX || x > 0) && (!logY || y > 0);

    const svg = document.createElementNS(space, "svg");
    for (const [a, v] of [["viewBox", `0 0 ${width} ${height}`], ["role", "img"], ["tabindex", "0"]]) svg.setAttribute(a, v);
    const caption = figure.querySelector("figcaption span").textContent;
    svg.setAttribute("aria-label", `${caption}, against ${units[state.x]}, of ${list.map(name).join(", ") || "nothing"}`);
    for (const [y, label] of yTicks) {
      draw(svg, "line", { class: "grid", x1: left, x2: width - right, y1: py(y), y2: py(y) });
      draw(svg, "text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, label);
    }
    let free = -Infinity;
    for (const [x, label] of xTicks) {
      draw(svg, "line", { class: "grid", x1: px(x), x2: px(x), y1: height - bottom, y2: height - bottom + 4 });
      const half = 3.6 * label.length;
      const at = Math.min(px(x), width - half);
      if (at - half < free) continue;
      free = at + half + 8;
      draw(svg, "text", { x: at, y: height - bottom + 17, "text-anchor": "middle" }, label);
    }
    draw(svg, "line", { class: "grid", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom });
    draw(svg, "text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, units[state.x]);
    draw(svg, "text", { x: 0, y: 0, transform: `translate(12 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, unit);

    const clip = draw(svg, "clipPath", { id: `clip-${key}` });
    draw(clip, "rect", { x: left, y: top, width: width - left - right, height: height - top - bottom });
    const inner = draw(svg, "g", { "clip-path": `url(#clip-${key})`, fill: "none" });
    const path = (xs, ys) => {
      let text = "", pen = "M";
      xs.forEach((x, n) => {
        if (!can(x, ys[n])) { pen = "M"; return; }
        // A point between gaps is a dot: a line of no length with round ends.
        const last = `${px(x).toFixed(1)} ${py(ys[n]).toFixed(1)}`;
        text += pen === "M" ? `M${last}L${last}` : `L${last}`;
        pen = "L";
      });
      return text;
    };
    for (const s of list) {
      const xs = s[state.x], stroke = colour(s.model), values = s[key];
      if (values.low) {
        // Not over gaps.
        let from = 0;
        for (let n = 0; n <= xs.length; n++) {
          if (n < xs.length && can(xs[n], values.low[n])) continue;
          const edge = (ys) => xs.slice(from, n).map((x, i) => `${px(x).toFixed(1)} ${py(ys[from + i]).toFixed(1)}`);
          const band = [...edge(values.high), ...edge(values.low).reverse()];
          if (band.length) draw(inner, "path", { d: `M${band.join("L")}Z`, fill: stroke, opacity: 0.16 });
          from = n + 1;
        }
      } else if (key !== "lr" && state.weight > 0) {
        draw(inner, "path", { d: path(xs, values.mean), stroke, opacity: 0.28 });
      }
    }
    for (const s of list) {
      const d = path(s[state.x], smoothedOf(s, key));
      draw(inner, "path", { d, class: "curve", stroke: colour(s.model), "stroke-width": 2, "stroke-linecap": "round", "stroke-linejoin": "round", "stroke-dasharray": dash(s.model) });
    }
    if (key === "loss") {
      for (const s of list) {
        const points = validation(s).filter(([x, y]) => can(x, y) && x >= range.x[0] && x <= range.x[1]);
        const radius = points.length > 60 ? 2 : 4;
        for (const [x, y] of points) draw(inner, "circle", { cx: px(x), cy: py(y), r: radius, fill: colour(s.model), stroke: "var(--ground)", "stroke-width": radius > 2 ? 1.5 : 0.5 });
      }
    }
    if (range.empty) draw(svg, "text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, list.length ? "no finite values to show" : "nothing is chosen");

    const lost = list.filter((s) => s[key].lost > 0).map((s) => `${name(s)} ${s[key].lost}`);
    const note = figure.querySelector("p.note");
    note.hidden = lost.length === 0;
    note.textContent = lost.length ? `Steps whose value was no number: ${lost.join(", ")}.` : "";
    place.replaceChildren(svg);
    read(figure, svg, list, { key, px, unpx, py, left, right, top, bottom, width, height, can, range });
  }

  // ---- reading a chart: by pointer, finger or keys; zooming by dragging

  function nearest(xs, x) {
    let [low, high] = [0, xs.length - 1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  }

  function read(figure, svg, list, c) {
    const place = figure.querySelector(".plot");
    const layer = draw(svg, "g", {});
    const tip = make(place, "div", undefined, "tip");
    tip.setAttribute("role", "status");
    tip.hidden = true;
    let cursor = null, start = null;
    const leave = () => { layer.replaceChildren(); tip.hidden = true; cursor = null; };
    // The columns of what is read: raw and smoothed, and what else there is.
    const smooth = c.key !== "lr" && state.weight > 0;
    const columns = [["as is", (row) => row.raw]];
    if (list.some((s) => s[c.key].low)) columns.push(["lowest", (row) => row.low], ["highest", (row) => row.high]);
    if (smooth) columns.push(["smooth", (row) => row.level]);
    if (c.key === "loss" && list.some((s) => s.val.length)) columns.push(["valid.", (row) => row.val]);
    function show(x) {
      if (!list.length) return;
      layer.replaceChildren();
      tip.replaceChildren();
      tip.hidden = false;
      const rows = list.filter((s) => s[state.x].length).map((s) => {
        const n = nearest(s[state.x], x);
        const at = s[state.x][n], values = s[c.key];
        const val = s.val.filter((point) => point[column[state.x]] <= at).at(-1)?.[3];
        return { s, at, raw: values.mean[n], low: values.low?.[n], high: values.high?.[n], level: smoothedOf(s, c.key)[n], val };
      });
      // At the point that is nearest to where one points.
      const at = rows.reduce((best, row) => (Math.abs(row.at - x) < Math.abs(best - x) ? row.at : best), rows[0].at);
      cursor = at;
      draw(layer, "line", { class: "cursor", x1: c.px(at), x2: c.px(at), y1: c.top, y2: c.height - c.bottom });
      make(tip, "b", `${units[state.x]} ${state.x === "seconds" ? short(at) : at.toLocaleString("en")}`);
      rows.sort((a, b) => (b.level ?? -Infinity) - (a.level ?? -Infinity));
      tip.style.gridTemplateColumns = `10px minmax(4rem, auto) repeat(${columns.length}, auto)`;
      make(tip, "span", "");
      make(tip, "span", "");
      for (const [title] of columns) make(tip, "em", columns.length > 1 ? title : "", "head");
      for (const row of rows.slice(0, 12)) {
        make(tip, "i").style.background = colour(row.s.model);
        const here = row.at === at || Math.abs(c.px(row.at) - c.px(at)) < 12;
        make(tip, "span", name(row.s) + (here ? "" : ` at ${short(row.at)}`));
        for (const [, of] of columns) make(tip, "em", of(row) === undefined ? "" : of(row) === null ? "none" : short(of(row)));
        const { level } = row;
        if (c.can(row.at, level) && level <= c.range.y[1] && level >= c.range.y[0]) {
          draw(layer, "circle", { cx: c.px(row.at), cy: c.py(level), r: 4.5, fill: "var(--ground)", stroke: colour(row.s.model), "stroke-width": 2 });
        }
      }
      if (rows.length > 12) make(tip, "b", `and ${rows.length - 12} more`);
      const scale = place.clientWidth / c.width, px = c.px(at) * scale;
      const space = place.clientWidth - tip.offsetWidth;
      tip.style.left = `${Math.max(0, Math.min(space, px > place.clientWidth / 2 ? px - tip.offsetWidth - 14 : px + 14))}px`;
    }
    const where = (event) => {
      const box = svg.getBoundingClientRect();
      const p = ((event.clientX - box.left) / box.width) * c.width;
      return Math.max(c.left, Math.min(c.width - c.right, p));
    };
    svg.addEventListener("pointermove", (event) => {
      const p = where(event);
      show(c.unpx(p));
      if (start !== null) {
        const [a, b] = [Math.min(start, p), Math.max(start, p)];
        draw(layer, "rect", { class: "zoom", x: a, width: b - a, y: c.top, height: c.height - c.top - c.bottom });
      }
    });
    svg.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0) { start = where(event); svg.setPointerCapture(event.pointerId); }
      else show(c.unpx(where(event)));
    });
    svg.addEventListener("pointerup", (event) => {
      const [from, to] = [start, where(event)];
      start = null;
      if (from !== null && Math.abs(to - from) > 8) {
        state.zoom = [c.unpx(Math.min(from, to)), c.unpx(Math.max(from, to))];
        update();
      }
    });
    svg.addEventListener("pointerleave", () => { if (start === null) leave(); });
    svg.addEventListener("blur", leave);
    svg.addEventListener("dblclick", () => { state.zoom = null; update(); });
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { state.zoom = null; update(); return; }
      const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
      const xs = list[0]?.[state.x];
      if (move === undefined || !xs?.length) return;
      event.preventDefault();
      const n = cursor === null ? (move > 0 ? 0 : xs.length - 1) : nearest(xs, cursor) + move;
      show(xs[Math.max(0, Math.min(xs.length - 1, n))]);
    });
  }

  // ---- controls

  function update() {
    const reset = byId("unzoom");
    if (reset) reset.hidden = state.zoom === null;
    const focused = figures.findIndex((figure) => figure.querySelector("svg") === document.activeElement);
    figures.forEach(chart);
    if (focused >= 0) figures[focused].querySelector("svg").focus();
  }

  function legend() {
    const box = byId("legend");
    box.querySelectorAll("label, button").forEach((old) => old.remove());
    const models = [...new Set(data.series.filter((s) => s.corpus === state.corpus).map((s) => s.model))];
    for (const model of models) {
      const label = make(box, "label");
      const input = make(label, "input");
      input.type = "checkbox";
      input.checked = !state.hidden.has(model);
      input.addEventListener("change", () => {
        if (input.checked) state.hidden.delete(model); else state.hidden.add(model);
        update();
      });
      const sample = draw(label, "svg", { width: 26, height: 10, "aria-hidden": "true" });
      draw(sample, "line", { x1: 1, x2: 25, y1: 5, y2: 5, stroke: colour(model), "stroke-width": 3, "stroke-dasharray": dash(model) });
      const { run, model: own } = data.models[model];
      const seeds = data.series.filter((s) => s.corpus === state.corpus && s.model === model).length;
      make(label, "span", (several ? `${run} · ` : "") + own + (seeds > 1 ? ` (${seeds} seeds)` : ""));
    }
    if (models.length > 2) {
      for (const [text, hide] of [["all", false], ["none", true]]) {
        const button = make(box, "button", text);
        button.type = "button";
        button.addEventListener("click", () => {
          for (const model of models) if (hide) state.hidden.add(model); else state.hidden.delete(model);
          legend();
          update();
        });
      }
    }
  }

  if (data.series.length) {
    const on = (id, event, change) => byId(id)?.addEventListener(event, ({ target }) => { change(target); update(); });
    on("x", "change", (x) => { state.x = x.value; state.zoom = null; });
    on("corpus", "change", (corpus) => { state.corpus = Number(corpus.value); state.zoom = null; legend(); });
    on("logx", "change", (box) => { state.logX = box.checked; state.zoom = null; });
    on("peaks", "change", (box) => { state.peaks = box.checked; });
    on("unzoom", "click", () => { state.zoom = null; });
    const weight = () => { byId("weight").textContent = Number(byId("smooth").value).toFixed(2); };
    on("smooth", "input", (slider) => { state.weight = Number(slider.value); weight(); });
    figures.forEach((figure) => figure.querySelector("input").addEventListener("change", () => chart(figure)));
    // A browser may keep what was chosen before the page was loaded again.
    document.querySelector("form.controls").reset();
    // About a twentieth of a curve.
    const longest = Math.max(...data.series.map((s) => s.step.length));
    state.weight = Math.max(0, Math.min(0.95, Math.round(20 - 800 / longest) / 20));
    byId("smooth").value = state.weight;
    weight();
    legend();
    update();
    let width = window.innerWidth;
    window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; update(); } });
    window.addEventListener("beforeprint", update);
    window.addEventListener("afterprint", update);
  }

  // ---- tables

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.querySelectorAll("thead th")];
    heads.forEach((head, n) => head.firstElementChild.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const body = table.tBodies[0];
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [a.cells[n], b.cells[n]];
        const [u, v] = [x.dataset.value, y.dataset.value].map((value) => (value === undefined ? NaN : Number(value)));
        if (Number.isNaN(u) && Number.isNaN(v)) return (up ? 1 : -1) * x.textContent.localeCompare(y.textContent);
        // What was not measured stays at the end.
        if (Number.isNaN(u) || Number.isNaN(v)) return Number.isNaN(u) ? 1 : -1;
        return up ? u - v : v - u;
      });
      body.append(...rows);
    }));
  }
  for (const box of document.querySelectorAll("input.differences")) {
    box.checked = false;
    box.addEventListener("change", () => byId(box.dataset.of).classList.toggle("only", box.checked));
  }

  // ---- light and dark

  const theme = byId("theme");
  // Storage may be forbidden, for a file it often is.
  const stored = (f) => { try { return f(window.localStorage); } catch { return null; } };
  const choose = (value) => {
    if (value === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = value;
  };
  theme.value = ["light", "dark"].find((name) => name === stored((s) => s.getItem("kumiki-theme"))) ?? "auto";
  choose(theme.value);
  theme.addEventListener("change", () => { choose(theme.value); stored((s) => s.setItem("kumiki-theme", theme.value)); });
})();
