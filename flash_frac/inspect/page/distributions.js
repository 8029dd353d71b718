// Histograms of controls, gates and timescales; an earlier checkpoint is drawn as an outline.

function renderDistribution(name) {
  const edges = layerNow().edges[name];
  const { counts, quantiles } = now().distributions[name];
  const svg = $(name);
  const total = counts.reduce((a, b) => a + b, 0);
  const was = before && { edges: before.layers[state.layer].edges[name], ...wasNow().distributions[name] };
  const heights = densities(counts, edges);
  const [allEdges, tops] = [[...edges], [...heights]];
  if (was) {
    allEdges.push(...was.edges);
    tops.push(...densities(was.counts, was.edges));
  }
  const x = [Math.min(...allEdges), Math.max(...allEdges)];
  const view = axes(svg, { x, y: [0, Math.max(...tops) * 1.22], yLog: false, yTicks: false });
  const { X, Y, box, plot } = view;
  counts.forEach((count, i) => {
    const at = { x: X(edges[i]), width: Math.max(0.5, X(edges[i + 1]) - X(edges[i]) - 0.5) };
    const size = { y: Y(heights[i]), height: Math.max(0, box.bottom - Y(heights[i])) };
    const column = draw(plot, "rect", { class: "column", ...at, ...size });
    const share = `${format(edges[i])} to ${format(edges[i + 1])}: ${percent(count / total)}`;
    hover(column, () => share);
  });
  const [q5, q25, q50, q75, q95] = quantiles.map(X);
  const mid = box.top + 9;
  path(plot, [[q5, mid], [q25, mid], [NaN, 0], [q75, mid], [q95, mid]], "box");
  draw(plot, "rect", { class: "box", x: q25, y: mid - 6, width: Math.max(1, q75 - q25), height: 12 });
  draw(plot, "line", { class: "box", x1: q50, x2: q50, y1: mid - 6, y2: mid + 6 });
  if (was) outline(view, was);
  const label = was ? `median ${format(quantiles[2])} · before ${format(was.quantiles[2])}`
    : `5% ${format(quantiles[0])} · median ${format(quantiles[2])} · 95% ${format(quantiles[4])}`;
  const [side, bottom] = [(box.left + box.right) / 2, svg.clientHeight - 6];
  draw(svg, "text", { x: side, y: bottom, "text-anchor": "middle" }, label);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${name}: ${label}`);
}

// Share per bin width, because two models have different bins.
function densities(counts, edges) {
  const total = counts.reduce((a, b) => a + b, 0);
  return counts.map((count, i) => count / total / Math.log(edges[i + 1] / edges[i]));
}

// The histogram of the earlier checkpoint, and its median.
function outline({ X, Y, box, plot }, { counts, edges, quantiles }) {
  const steps = densities(counts, edges).flatMap((height, i) => [[X(edges[i]), Y(height)], [X(edges[i + 1]), Y(height)]]);
  path(plot, steps, "l-outline");
  const at = X(quantiles[2]);
  path(plot, [[at, box.top], [at, box.bottom]], "l-before");
}
