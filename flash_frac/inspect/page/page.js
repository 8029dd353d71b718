// The page: the selection and its charts. The numbers are those of report.json.

const report = JSON.parse($("report").textContent);
const { layers, lags } = report;
// The report of an earlier checkpoint with the same layers, or null.
const before = report.before || null;
// A log axis has no lag 0.
const shownLags = lags.slice(1);
const MEAN = -1;
const MEDIAN = Math.floor(report.quantiles.length / 2);
const state = { layer: 0, head: MEAN, cursor: null };

const numberOf = (n) => layers[n].number;
const TYPES = {
  frac: "Frac", delta: "delta", attention: "attention", sliding_attention: "sliding attention",
};
const DISTRIBUTIONS = ["delta", "alpha", "lambda", "timescale", "half_life", "beta"];
const fracLayers = layers.filter((layer) => layer.type === "frac");
const isMixed = fracLayers.length < layers.length;
const layerNow = () => layers[state.layer];
// The selected head, or the layer itself, which has the same fields for its mean response.
const now = () => (state.head === MEAN ? layerNow() : layerNow().heads[state.head]);
const wasNow = () => {
  if (!before) return null;
  const layer = before.layers[state.layer];
  return state.head === MEAN ? layer : layer.heads[state.head];
};
const headName = () => (state.head === MEAN ? "mean of all heads" : `head ${state.head}`);
const layerName = () => `layer ${numberOf(state.layer)}`;
const place = () => `${layerName()}, ${headName()}`;
const law = (fit, n) => fit.amplitude * Math.exp(-fit.exponent * (fit.kind === "power" ? Math.log(n) : n));

function choose(layer, head = state.head) {
  state.layer = Math.min(layers.length - 1, Math.max(0, layer));
  state.head = Math.min(layerNow().heads.length - 1, Math.max(MEAN, head));
  render();
}

// ---- the response

function renderResponse() {
  const svg = $("response");
  const [one, was, all] = [now(), wasNow(), layerNow().heads];
  const shownOnes = was ? [...all, one, was] : [...all, one];
  const values = shownOnes.flatMap((each) => each.response.slice(1));
  const high = Math.max(...values);
  const shown = values.filter((v) => v > high * 1e-9);
  const low = Math.min(...shown);
  const y = high > 0 ? [low / 3, high * 1.5] : [0.1, 1];
  const x = [1, Math.max(2, lags[lags.length - 1])];
  const { X, Y, box, plot } = axes(svg, { x, y, xLabel: "lag, tokens", yLabel: "response" });
  const curve = (response) => shownLags.map((n, i) => [X(n), Y(response[i + 1])]);
  if ($("show-others").checked) {
    all.forEach((head, h) => {
      const line = path(plot, curve(head.response), "l-others");
      line.addEventListener("click", () => choose(state.layer, h));
    });
  }
  let bars = 0;
  for (const kind of ["power", "exponential"]) {
    const fit = one[kind];
    if (!fit || !$(`show-${kind}`).checked) continue;
    path(plot, shownLags.map((n) => [X(n), Y(law(fit, n))]), `l-${kind}`);
    if (fit.first === null) continue;
    const [from, to] = [X(fit.first), X(fit.last)];
    const at = { x: from, width: Math.max(3, to - from), y: box.bottom - 7 - 7 * bars++, height: 5 };
    draw(plot, "rect", { class: `b-${kind}`, rx: 2, ...at });
  }
  if (was && $("show-before").checked) path(plot, curve(was.response), "l-before");
  if ($("show-response").checked) path(plot, curve(one.response), "l-measured");
  if ($("show-horizon").checked) renderMarks(plot, X, box, one.horizon);
  svg.scales = { X, Y, box };
  renderCursor();
}

function renderMarks(plot, X, box, reach) {
  const marks = [["half", reach.half], ["mean", reach.mean], ["90%", reach.ninety]];
  marks.forEach(([name, lag], i) => {
    const at = X(Math.max(1, lag));
    draw(plot, "line", { class: "l-mark", x1: at, x2: at, y1: box.top, y2: box.bottom });
    const right = at > box.right - 60;
    draw(plot, "text", {
      class: "t-mark", x: at + (right ? -4 : 4), y: box.top + 13 + 15 * i,
      "text-anchor": right ? "end" : "start",
    }, name);
  });
}

function renderCursor() {
  const svg = $("response");
  svg.querySelectorAll(".cross, .dot").forEach((node) => node.remove());
  const one = now();
  if (state.cursor === null) {
    $("readout").textContent = "Point at the chart, or focus it and use the arrow keys, for values.";
    return;
  }
  const { X, Y, box } = svg.scales;
  const n = shownLags[state.cursor];
  const value = one.response[state.cursor + 1];
  draw(svg, "line", { class: "cross", x1: X(n), x2: X(n), y1: box.top, y2: box.bottom });
  if (value > 0 && Y(value) <= box.bottom && $("show-response").checked) {
    draw(svg, "circle", { class: "dot", cx: X(n), cy: Y(value), r: 5 });
  }
  const parts = [`lag ${n.toLocaleString("en")}: ${format(value)}`];
  if (before) parts.push(`before ${format(wasNow().response[state.cursor + 1])}`);
  if (one.power) parts.push(`power law ${format(law(one.power, n))}`);
  if (one.exponential) parts.push(`exponential ${format(law(one.exponential, n))}`);
  parts.push(`mean of ${layerNow().sources[state.cursor + 1].toLocaleString("en")} sources`);
  $("readout").textContent = parts.join("  ·  ");
}

function listenToResponse() {
  const svg = $("response");
  const go = (step) => () => {
    const from = state.cursor === null ? 0 : state.cursor + step;
    state.cursor = Math.min(shownLags.length - 1, Math.max(0, from));
    renderCursor();
  };
  svg.addEventListener("pointermove", (event) => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    const far = (n) => Math.abs(svg.scales.X(n) - at);
    state.cursor = shownLags.reduce((best, n, i) => (far(n) < far(shownLags[best]) ? i : best), 0);
    renderCursor();
  });
  svg.addEventListener("pointerleave", () => { state.cursor = null; renderCursor(); });
  onKeys(svg, {
    ArrowLeft: go(-1), ArrowRight: go(1), Home: go(-1e6), End: go(1e6),
    Escape: () => { state.cursor = null; renderCursor(); },
  });
}

function renderFacts() {
  const list = $("facts");
  const one = now();
  const range = (fit) => {
    if (fit.first === null) return "holds nowhere";
    if (fit.first === fit.last) return `holds at lag ${format(fit.first)} only`;
    return `holds from lag ${format(fit.first)} to ${format(fit.last)} (${fit.decades.toFixed(2)} decades)`;
  };
  // The same kind of law fitted to the longest range where it holds.
  const alone = ({ kind, stretch }) => {
    if (stretch === null) return [];
    const { first, last, decades, exponent } = stretch;
    const shape = kind === "power" ? `n^${(-exponent).toFixed(2)}`
      : `exp(${exponent > 0 ? "-" : ""}n / ${format(1 / Math.abs(exponent))})`;
    return [`longest range fitted separately: lags ${format(first)} to ${format(last)} `
      + `(${decades.toFixed(2)} decades), ${shape}`];
  };
  const fact = (name, lines, win = false) => {
    add(list, "dt", name + (win ? ", better fit" : ""));
    lines.forEach((line, i) => add(list, "dd", line, win && i === 0 ? { class: "win" } : {}));
  };
  clear(list);
  const { power, exponential, horizon } = one;
  if (power) {
    const formula = `${format(power.amplitude)} · n^${(-power.exponent).toFixed(3)}`;
    const off = `off by a factor of ${format(Math.exp(power.rms_log))} (rms)`;
    fact("power law", [formula, range(power), off, ...alone(power)], one.better === "power");
  }
  if (exponential) {
    const scale = exponential.timescale === null ? "does not fall"
      : `${format(exponential.amplitude)} · exp(-n / ${format(exponential.timescale)})`;
    const off = `off by a factor of ${format(Math.exp(exponential.rms_log))} (rms)`;
    const lines = [scale, range(exponential), off, ...alone(exponential)];
    fact("exponential", lines, one.better === "exponential");
  }
  if (!power) fact("laws", ["too few positive values to fit one"]);
  fact("horizon", [
    `half of the weight by lag ${format(horizon.half)}`,
    `90% of it by lag ${format(horizon.ninety)}`,
    `mean lag ${format(horizon.mean)}`,
    `${percent(horizon.last_half)} of the weight beyond half of the longest lag`,
  ]);
  if (one.clamped_fast !== null) {
    fact("modes at the decay limit", [
      `${percent(one.clamped_fast)} fast, ${percent(one.clamped_slow)} slow`,
    ]);
  }
  if (one.distances) {
    const { median, mean: middling, beyond } = one.distances;
    const far = Object.entries(beyond).map(([n, share]) => `${percent(share)} at ${Number(n).toLocaleString("en")} or more`);
    fact("distance of attention", [`median ${format(median)}, mean ${format(middling)}`, ...far]);
  }
}

// ---- distances

function renderDistances() {
  const { heads, distances: whole } = layerNow();
  $("distances-card").hidden = !whole;
  if (!whole) return;
  const { shares, median, mean: middling } = now().distances;
  $("distances-name").textContent = place();
  $("distances-about").textContent = `median ${format(median)}, mean ${format(middling)} tokens`;
  const edges = layerNow().edges.distance;
  const bin = (c) => (c < 2 ? String(c) : `${edges[c].toLocaleString("en")} to ${(edges[c + 1] - 1).toLocaleString("en")}`);
  const svg = $("distances");
  const values = heads.map((head) => head.distances.shares);
  const high = Math.max(1e-9, ...values.flat());
  heatMap($("distances-map"), {
    values, low: 0, high, log: false, xLabel: "distance from, tokens", yLabel: "head",
    columnName: (c) => tokens(edges[c]),
    describe: (r, c) => `head ${r}, distance ${bin(c)}`,
    pick: (r) => choose(state.layer, r),
    chosen: (at, rows, columns) => state.head !== MEAN
      && { ...at(state.head, 0), width: columns * at(0, 0).width },
  });
  svg.style.height = $("distances-map").style.height;
  const most = Math.max(...shares);
  const view = axes(svg, {
    x: [-0.5, shares.length - 0.5], y: [0, most * 1.1], xLog: false, yLog: false, yTicks: false,
    xName: (c) => (c in shares ? tokens(edges[c]) : ""),
    xLabel: "distance from, tokens",
  });
  shares.forEach((share, c) => {
    const [left, top] = [view.X(c - 0.45), view.Y(share)];
    const size = { width: view.X(c + 0.45) - left, height: view.box.bottom - top };
    const column = draw(view.plot, "rect", { class: "column", x: left, y: top, ...size });
    hover(column, () => `distance ${bin(c)}: ${percent(share)}`);
  });
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `Share of the weight by distance: ${$("distances-about").textContent}`);
}

// ---- maps, and what goes across layers

function renderModes() {
  const { heads, tau } = layerNow();
  $("modes-card").hidden = tau.length === 0;
  if (tau.length === 0) return;
  const ends = heads.flatMap((head) => [head.tau[0], head.tau[head.tau.length - 1]]);
  const log = $("log-colour").checked;
  for (const name of ["read", "write"]) {
    const values = heads.map((head) => head[`${name}_share`]);
    const flat = values.flat().filter((v) => v > 0);
    const high = Math.max(1e-9, ...flat);
    heatMap($(name), {
      values, high, log, low: log ? Math.max(Math.min(high, ...flat), high * 1e-5) : 0,
      xLabel: `mode, τ from ${format(Math.min(...ends))} to ${format(Math.max(...ends))} tokens`,
      yLabel: "head",
      describe: (r, c) => `head ${r}, mode ${c} (τ ${format(heads[r].tau[c])})\nmean ${name} `
        + `${format(heads[r][name][c])}, share`,
      pick: (r) => choose(state.layer, r),
      chosen: (at, rows, columns) => state.head !== MEAN
        && { ...at(state.head, 0), width: columns * at(0, 0).width },
    });
  }
}

function renderAlpha() {
  $("alpha-figure").hidden = fracLayers.length === 0;
  if (fracLayers.length === 0) return;
  const values = fracLayers.map((l) => l.heads.map((h) => h.distributions.alpha.quantiles[MEDIAN]));
  const flat = values.flat();
  const rowName = (r) => fracLayers[r].number;
  const row = fracLayers.indexOf(layerNow());
  heatMap($("alpha-map"), {
    values, low: Math.min(...flat), high: Math.max(...flat), log: false, xLabel: "head",
    yLabel: "layer", rowName, describe: (r, c) => `layer ${rowName(r)}, head ${c}\nmedian α`,
    pick: (r, c) => choose(layers.indexOf(fracLayers[r]), c),
    chosen: (at, rows, columns) => row >= 0 && (state.head === MEAN
      ? { ...at(row, 0), width: columns * at(0, 0).width } : at(row, state.head)),
  });
}

function renderHorizon() {
  const svg = $("horizon");
  // A log axis cannot show lag 0.
  const level = (v) => Math.max(v, 0.1);
  const kinds = ["half", "mean", "ninety"];
  const measured = before ? [...layers, ...before.layers] : layers;
  const reach = [...measured, ...layers.flatMap((l) => l.heads)].flatMap((l) => kinds.map((k) => l.horizon[k]));
  const y = [0.7 * level(Math.min(...reach)), 1.4 * level(Math.max(...reach))];
  const x = [numberOf(0) - 0.5, numberOf(layers.length - 1) + 0.5];
  svg.style.height = `${Math.min(440, Math.max(300, 10 * layers.length))}px`;
  const { X, Y, box, plot } = axes(svg, { x, y, xLog: false, xLabel: "layer", yLabel: "tokens" });
  const wide = X(1) - X(0);
  const at = (n) => X(numberOf(n));
  const band = (n) => ({ x: at(n) - wide / 2, y: box.top, width: wide, height: box.bottom - box.top });
  draw(plot, "rect", { class: "here", ...band(state.layer) });
  layers.forEach((layer, n) => layer.heads.forEach((head) => {
    draw(plot, "circle", { class: "head-dot", cx: at(n), cy: Y(level(head.horizon.half)), r: 2 });
  }));
  for (const kind of kinds) {
    const points = layers.map((layer, n) => [at(n), Y(level(layer.horizon[kind]))]);
    path(plot, points, `l-${kind}`);
    points.forEach(([cx, cy]) => draw(plot, "circle", { class: `d-${kind}`, cx, cy, r: 2.5 }));
  }
  if (before) path(plot, before.layers.map((l, n) => [at(n), Y(level(l.horizon.half))]), "l-before");
  const say = (n) => {
    const { half, mean: lag, ninety } = layers[n].horizon;
    return `layer ${numberOf(n)}, ${TYPES[layers[n].type]}\nhalf ${format(half)}, mean ${format(lag)}, 90% ${format(ninety)} tokens`;
  };
  layers.forEach((_, n) => {
    const target = draw(plot, "rect", { class: "clickable", "fill-opacity": 0, ...band(n) });
    hover(target, () => say(n));
    target.addEventListener("click", () => choose(n));
  });
  const go = (step) => () => {
    choose(state.layer + step);
    const around = svg.getBoundingClientRect();
    showTip(around.left + svg.scale(state.layer), around.top + box.top + 20, say(state.layer));
  };
  svg.scale = at;
  onKeys(svg, { ArrowLeft: go(-1), ArrowRight: go(1), Escape: hideTip });
}

// ---- all together

function fillHeads() {
  const list = $("head");
  if (list.options.length !== layerNow().heads.length + 1) {
    clear(list);
    add(list, "option", "mean of all", { value: MEAN });
    layerNow().heads.forEach((_, h) => add(list, "option", String(h), { value: h }));
  }
  list.value = state.head;
}

function render() {
  hideTip();
  const heads = layerNow().heads.length;
  $("layer").value = state.layer;
  $("layer-back").disabled = state.layer === 0;
  $("layer-on").disabled = state.layer === layers.length - 1;
  $("head-back").disabled = state.head === MEAN;
  $("head-on").disabled = state.head === heads - 1;
  $("response-name").textContent = isMixed ? `${place()}, ${TYPES[layerNow().type]}` : place();
  $("distribution-name").textContent = state.head === MEAN ? `${layerName()}, all heads` : place();
  $("modes-name").textContent = layerName();
  fillHeads();
  renderResponse();
  renderFacts();
  renderDistances();
  const shown = DISTRIBUTIONS.filter((name) => name in layerNow().distributions);
  $("distributions-card").hidden = shown.length === 0;
  DISTRIBUTIONS.forEach((name) => { $(name).parentElement.hidden = !shown.includes(name); });
  shown.forEach(renderDistribution);
  renderModes();
  renderHorizon();
  renderAlpha();
  [...$("table").tBodies[0].rows].forEach((row, n) => {
    row.setAttribute("aria-selected", String(n === state.layer));
  });
}

function start() {
  fillOverview();
  fillTable();
  layers.forEach((layer, n) => {
    const name = isMixed ? `${layer.number}, ${TYPES[layer.type]}` : String(layer.number);
    add($("layer"), "option", name, { value: n });
  });
  $("layer").addEventListener("change", (e) => choose(Number(e.target.value)));
  $("head").addEventListener("change", (e) => choose(state.layer, Number(e.target.value)));
  $("layer-back").addEventListener("click", () => choose(state.layer - 1));
  $("layer-on").addEventListener("click", () => choose(state.layer + 1));
  $("head-back").addEventListener("click", () => choose(state.layer, state.head - 1));
  $("head-on").addEventListener("click", () => choose(state.layer, state.head + 1));
  for (const name of ["response", "power", "exponential", "others", "horizon", "before"]) {
    $(`show-${name}`).addEventListener("change", renderResponse);
  }
  $("log-colour").addEventListener("change", renderModes);
  listenToResponse();
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) render();
    width = window.innerWidth;
  });
  render();
}

start();
