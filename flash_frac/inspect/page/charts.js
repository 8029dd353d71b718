"use strict";
// Small charts in SVG. A chart is redrawn at each change, because it has few elements.

const $ = (id) => document.getElementById(id);
const clear = (node) => { while (node.firstChild) node.firstChild.remove(); };

function draw(parent, tag, attributes = {}, text = null) {
  // Take the namespace from an existing element, so that the page contains no URL.
  const node = document.createElementNS($("response").namespaceURI, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.append(node);
  return node;
}

function add(parent, tag, text = null, attributes = {}) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.append(node);
  return node;
}

// 1,234, 0.0123 or 1.2 × 10⁻⁵: three digits, whatever the size.
function format(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) {
    const power = Math.floor(Math.log10(size) + 1e-9);
    const front = (value / 10 ** power).toPrecision(Math.max(1, digits - 1));
    return `${front} × 10${superscript(power)}`;
  }
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

const percent = (share) => (share > 0 && share < 0.001 ? "< 0.1%" : `${(100 * share).toFixed(1)}%`);

function superscript(power) {
  return [...String(power)].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(c)])).join("");
}

function tickName(value) {
  const power = Math.log10(value);
  if (value >= 1e4 || value < 1e-2) {
    const whole = Math.floor(power + 1e-9);
    const front = Math.round(value / 10 ** whole);
    return `${front === 1 ? "" : `${front}·`}10${superscript(whole)}`;
  }
  return String(Number(value.toPrecision(3)));
}

// 512, 1K: powers of two as numbers of tokens.
const tokens = (n) => (n >= 1024 ? `${n / 1024}K` : String(n));

// Decades; on a short axis also 2 and 5 or finer steps, and on a long one fewer decades.
function logTicks(low, high, most) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  for (const fronts of [[1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 5], [1]]) {
    const ticks = [];
    for (let p = first; p <= last; p++) for (const f of fronts) ticks.push(f * 10 ** p);
    const inside = ticks.filter((t) => t >= low * 0.999 && t <= high * 1.001);
    if (inside.length <= most && inside.length > 0) return inside;
  }
  const step = Math.ceil((last - first) / most);
  const ticks = [];
  for (let p = Math.ceil(first / step) * step; p <= last; p += step) ticks.push(10 ** p);
  return ticks.filter((t) => t >= low * 0.999 && t <= high * 1.001);
}

// Ticks at integers, which is all that a linear axis needs here.
function wholeTicks(low, high, most) {
  const rough = Math.max(1, (high - low) / most);
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((f) => f * unit).find((s) => s >= rough);
  const ticks = [];
  for (let t = Math.ceil(low / step) * step; t <= high + 1e-9; t += step) ticks.push(t);
  return ticks;
}

// Draw axes with a grid. Returns the scales X and Y, a group clipped to the plot, and its box.
function axes(svg, {
  x, y, xLog = true, yLog = true, xLabel = "", yLabel = "", yTicks = true, xName = null,
}) {
  clear(svg);
  const [width, height] = [svg.clientWidth || 600, svg.clientHeight || 300];
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const box = { left: yTicks ? 58 : 20, right: width - 20, top: 10, bottom: height - 42 };
  const scale = ([low, high], from, to, log) => (v) => {
    const f = log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low || 1);
    return from + f * (to - from);
  };
  const X = scale(x, box.left, box.right, xLog);
  const Y = scale(y, box.bottom, box.top, yLog);
  for (const t of (xLog ? logTicks : wholeTicks)(...x, Math.max(2, (width - 70) / 62))) {
    draw(svg, "line", { class: "grid", x1: X(t), x2: X(t), y1: box.top, y2: box.bottom });
    const name = xName ? xName(t) : xLog ? tickName(t) : String(t);
    draw(svg, "text", { x: X(t), y: box.bottom + 17, "text-anchor": "middle" }, name);
  }
  for (const t of yTicks ? (yLog ? logTicks : wholeTicks)(...y, Math.max(2, height / 45)) : []) {
    draw(svg, "line", { class: "grid", x1: box.left, x2: box.right, y1: Y(t), y2: Y(t) });
    draw(svg, "text", { x: box.left - 6, y: Y(t) + 4, "text-anchor": "end" }, tickName(t));
  }
  const middle = (box.left + box.right) / 2;
  draw(svg, "text", { x: middle, y: height - 6, "text-anchor": "middle" }, xLabel);
  const turn = `rotate(-90 12 ${(box.top + box.bottom) / 2})`;
  draw(svg, "text", {
    x: 12, y: (box.top + box.bottom) / 2, "text-anchor": "middle", transform: turn,
  }, yLabel);
  const clip = draw(draw(svg, "defs"), "clipPath", { id: `clip-${svg.id}` });
  draw(clip, "rect", {
    x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top,
  });
  return { X, Y, box, plot: draw(svg, "g", { "clip-path": `url(#clip-${svg.id})` }) };
}

// A path through points; a point that is not finite interrupts it.
function path(parent, points, kind) {
  let d = "";
  let pen = false;
  for (const [px, py] of points) {
    const there = Number.isFinite(px) && Number.isFinite(py);
    if (there) d += `${pen ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`;
    pen = there;
  }
  return draw(parent, "path", { class: `line ${kind}`, d });
}

function showTip(x, y, text) {
  const tip = $("tip");
  tip.textContent = text;
  tip.hidden = false;
  const left = Math.min(x + 14, window.innerWidth - tip.offsetWidth - 8);
  tip.style.left = `${Math.max(4, left)}px`;
  const above = y - tip.offsetHeight - 10;
  tip.style.top = `${above > 4 ? above : y + 18}px`;
}

const hideTip = () => { $("tip").hidden = true; };

function hover(node, text) {
  node.addEventListener("pointermove", (e) => showTip(e.clientX, e.clientY, text()));
  node.addEventListener("pointerleave", hideTip);
}

// Keyboard control of a focused chart: `keys` maps key names to functions.
function onKeys(svg, keys) {
  svg.onkeydown = (event) => {
    const action = keys[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  };
  svg.onblur = hideTip;
}

// A heat map of values[row][column] from `low` to `high`; a selection calls pick(row, column).
function heatMap(svg, {
  values, low, high, log, xLabel, yLabel, rowName = String, columnName = String, describe, pick, chosen,
}) {
  const [rows, columns] = [values.length, values[0].length];
  svg.style.height = `${Math.min(620, Math.max(190, 78 + rows * 14))}px`;
  clear(svg);
  const [width, height] = [svg.clientWidth || 500, svg.clientHeight];
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const box = { left: 46, top: 26, right: width - 8, bottom: height - 40 };
  const [w, h] = [(box.right - box.left) / columns, (box.bottom - box.top) / rows];
  const place = (r, c) => ({ x: box.left + c * w, y: box.top + r * h, width: w, height: h });
  const shade = (v) => {
    if (high <= low) return 0.5;
    const f = log ? Math.log(Math.max(v, low) / low) / Math.log(high / low) : (v - low) / (high - low);
    return 0.04 + 0.96 * Math.min(1, Math.max(0, f));
  };
  draw(svg, "rect", { class: "under", x: box.left, y: box.top, width: columns * w, height: rows * h });
  const say = (r, c) => `${describe(r, c)}: ${format(values[r][c])}`;
  values.forEach((line, r) => line.forEach((v, c) => {
    const cell = draw(svg, "rect", { class: "cell", ...place(r, c), "fill-opacity": shade(v) });
    hover(cell, () => say(r, c));
    cell.addEventListener("click", () => pick(r, c));
  }));
  legend(svg, box, low, high);
  for (const r of steps(rows, h)) {
    const at = { x: box.left - 6, y: box.top + (r + 0.5) * h + 4, "text-anchor": "end" };
    draw(svg, "text", at, rowName(r));
  }
  for (const c of steps(columns, w * 0.6)) {
    const at = { x: box.left + (c + 0.5) * w, y: box.bottom + 16, "text-anchor": "middle" };
    draw(svg, "text", at, columnName(c));
  }
  const middle = { x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" };
  draw(svg, "text", middle, xLabel);
  const side = (box.top + box.bottom) / 2;
  const turned = { x: 12, y: side, "text-anchor": "middle", transform: `rotate(-90 12 ${side})` };
  draw(svg, "text", turned, yLabel);
  const mark = chosen(place, rows, columns);
  if (mark) draw(svg, "rect", { class: "chosen", ...mark });
  mapKeys(svg, rows, columns, place, say, pick);
}

function legend(svg, box, low, high) {
  for (let i = 0; i < 24; i++) {
    const at = { x: box.left + 4 * i, y: 6, width: 4.2, height: 9 };
    draw(svg, "rect", { class: "shade", "fill-opacity": 0.04 + i / 24, ...at });
  }
  draw(svg, "text", { x: box.left + 102, y: 15 }, `${format(low, 2)} to ${format(high, 2)}`);
}

// The numbers 0 ... count - 1 that have room for a label.
function steps(count, size) {
  const step = [1, 2, 4, 8, 16, 32, 64].find((s) => s * size >= 13) || 128;
  return Array.from({ length: Math.ceil(count / step) }, (_, i) => i * step);
}

function mapKeys(svg, rows, columns, place, say, pick) {
  let [r, c] = svg.cell || [0, 0];
  let mark = null;
  const go = (dr, dc) => () => {
    if (mark) [r, c] = [r + dr, c + dc];
    [r, c] = [Math.min(rows - 1, Math.max(0, r)), Math.min(columns - 1, Math.max(0, c))];
    svg.cell = [r, c];
    if (mark) mark.remove();
    const at = place(r, c);
    mark = draw(svg, "rect", { class: "cursor", ...at });
    const around = svg.getBoundingClientRect();
    showTip(around.left + at.x + at.width / 2, around.top + at.y, say(r, c));
  };
  onKeys(svg, {
    ArrowUp: go(-1, 0), ArrowDown: go(1, 0), ArrowLeft: go(0, -1), ArrowRight: go(0, 1),
    Enter: () => pick(r, c), Escape: hideTip,
  });
}
