// Above and below the charts: numbers of the whole model, and the table of layers.

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

function middle(values) {
  const sorted = values.filter((v) => v !== null).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

// The number of heads may differ between types of layers.
function sizes() {
  const counts = Object.entries(TYPES).map(([type, name]) => {
    const found = layers.filter((layer) => layer.type === type);
    return found.length ? `${found.length} ${name}` : null;
  });
  const heads = [...new Set(layers.map((layer) => layer.heads.length))].join(" or ");
  const modes = fracLayers.length ? `, ${fracLayers[0].tau.length} modes` : "";
  const kinds = isMixed ? ` (${counts.filter(Boolean).join(", ")})` : "";
  return `${layers.length} layers${kinds}, ${heads} heads${modes}`;
}

function fracTiles(all) {
  const heads = all.filter((layer) => layer.type === "frac").flatMap((layer) => layer.heads);
  const wins = heads.filter((head) => head.better === "power").length / heads.length;
  const of = isMixed ? "Frac heads" : "heads";
  return [
    [`median α of all ${of}`, format(middle(heads.map((h) => h.distributions.alpha.quantiles[MEDIAN])))],
    [`${of} better fitted by a power law`, percent(wins)],
    ["median exponent of a power law", format(middle(heads.map((h) => h.power && h.power.exponent)))],
    ["decades over which the power law holds (median)", format(middle(heads.map((h) => h.power
      && (h.power.stretch ? h.power.stretch.decades : 0))))],
    [`median lag with half the weight${isMixed ? ", Frac" : ""}`, format(middle(heads.map((h) => h.horizon.half)))],
    ["modes at the decay limit (fast, slow)", `${percent(mean(heads.map((h) => h.clamped_fast)))}, `
      + `${percent(mean(heads.map((h) => h.clamped_slow)))}`],
  ];
}

function otherTiles(all) {
  const full = all.filter((layer) => layer.type === "attention");
  const sliding = all.filter((layer) => layer.type === "sliding_attention");
  const looking = (full.length ? full : sliding).map((layer) => layer.distances);
  const deltas = all.filter((layer) => layer.type === "delta");
  const tiles = [];
  if (looking.length) {
    tiles.push(["median distance of attention", format(middle(looking.map((d) => d.median)))]);
    const far = "1024" in looking[0].beyond ? "1024" : Object.keys(looking[0].beyond).pop();
    if (far) {
      tiles.push([`attention at ${Number(far).toLocaleString("en")} tokens or farther`,
        percent(mean(looking.map((d) => d.beyond[far])))]);
    }
  }
  if (deltas.length) {
    const lives = deltas.map((layer) => layer.distributions.half_life.quantiles[MEDIAN]);
    tiles.push(["median half-life of delta layers", format(middle(lives))]);
  }
  return tiles;
}

function fillOverview() {
  const rows = report.num_rows > 1 ? `${report.num_rows} rows of ` : "";
  $("name").textContent = report.name;
  $("about").textContent = `${sizes()}, ${format(report.num_parameters)} parameters, on `
    + `${rows}${report.num_tokens.toLocaleString("en")} tokens of ${report.text}`;
  const tilesOf = (all) => [...(fracLayers.length ? fracTiles(all) : []), ...otherTiles(all)];
  const earlier = before && tilesOf(before.layers);
  tilesOf(layers).forEach(([name, value], i) => {
    const tile = add($("tiles"), "div");
    add(tile, "dt", name);
    add(tile, "dd", value);
    if (earlier) add(tile, "dd", `before ${earlier[i][1]}`, { class: "was" });
  });
  for (const id of ["compared", "before-toggle", "horizon-before"]) $(id).hidden = !before;
  if (before) {
    $("before-name").textContent = before.name;
    $("after-name").textContent = report.name;
  }
  $("factor").textContent = report.factor;
  $("last-lag").textContent = lags[lags.length - 1].toLocaleString("en");
}

function fillTable() {
  const table = $("table");
  const head = add(add(table, "thead"), "tr");
  const names = ["layer", "type", "α", "Δ", "λ", "exponent", "power law holds at", "better fit", "half",
    "90%", "mean lag", "beyond half", "fast limit", "slow limit", "distance", "half-life", "β"];
  names.forEach((name) => add(head, "th", name, { scope: "col" }));
  const body = add(table, "tbody");
  layers.forEach((layer, n) => {
    const row = add(body, "tr");
    const button = add(add(row, "td"), "button", String(layer.number),
      { type: "button", "aria-label": `Layer ${layer.number}` });
    button.addEventListener("click", () => choose(n));
    const was = before ? cellsOf(before.layers[n]) : [];
    cellsOf(layer).forEach((cell, i) => {
      const place = add(row, "td", cell);
      if (before && was[i] !== cell) add(place, "small", `before ${was[i]}`, { class: "was" });
    });
  });
}

// Table cells of a layer, except its number.
function cellsOf(layer) {
  const { power, horizon, distributions, distances } = layer;
  const median = (name) => (distributions[name] ? format(distributions[name].quantiles[MEDIAN]) : "–");
  const share = (value) => (value === null ? "–" : percent(value));
  const range = power && power.first !== null ? `${format(power.first)} to ${format(power.last)}` : "–";
  return [TYPES[layer.type], median("alpha"), median("delta"), median("lambda"), power ? power.exponent.toFixed(2) : "–",
    range, { power: "power law", exponential: "exponential" }[layer.better] || "–",
    format(horizon.half), format(horizon.ninety), format(horizon.mean), percent(horizon.last_half),
    share(layer.clamped_fast), share(layer.clamped_slow), distances ? format(distances.median) : "–",
    median("half_life"), median("beta")];
}
