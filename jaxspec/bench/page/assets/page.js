// The page: reads its data and fills its sections.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const OTHERS = ["light-dark(#0f766e, #4fd1c0)", "light-dark(#7c3aed, #c0a2ff)", "light-dark(#a16207, #e9c46a)",
  "light-dark(#be185d, #ff9ac8)", "light-dark(#4d7c0f, #b5d96a)", "light-dark(#1d4ed8, #93b4ff)"];
const names = [...new Set(data.cells.flatMap((cell) => cell.policies.map((row) => row.policy)))];
const isFixed = (name) => name === "off" || /^chain-\d+$/.test(name);
const policies = names.filter((name) => !isFixed(name));
const mine = policies.includes("adaptive") ? "adaptive" : policies[0];
const deepest = Math.max(1, data.profile.deepest, ...names.filter((n) => /^chain-\d+$/.test(n)).map((n) => Number(n.slice(6))));

const ramp = (share) => `color-mix(in oklab, var(--high) ${(100 * Math.min(1, share)).toFixed(0)}%, var(--low))`;
function colorOf(name) {
  if (name === "off") return "var(--plain)";
  if (isFixed(name)) return ramp((Number(name.slice(6)) - 1) / Math.max(1, deepest - 1));
  if (name === mine) return "var(--accent)";
  return OTHERS[policies.filter((p) => p !== mine).indexOf(name) % OTHERS.length];
}
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
const rowOf = (cell, name) => cell.policies.find((row) => row.policy === name);

function choice(box, options, chosen, onChoose) {
  box.replaceChildren(...options.map(([value, text]) => html("button", {
    type: "button", "aria-pressed": String(value === chosen), onclick: () => onChoose(value),
  }, text)));
}

// ------------------------------------------------------------ head

function head() {
  byId("badge").textContent = data.measured ? "Measured" : "Simulated: no device was timed in these runs";
  byId("where").textContent = `${data.where} ${data.when}`.trim();
  byId("device").textContent = data.profile.label;
  byId("foot").textContent = `Made by python -m jaxspec.bench report from ${data.source}. ${data.settings}`;
  if (!mine) {
    byId("tiles").remove();
    return;
  }
  const rows = data.cells.map((cell) => rowOf(cell, mine)).filter(Boolean);
  const regrets = rows.map((row) => row.regret).filter((x) => x !== null);
  const fixed = names.filter(isFixed);
  const over = (name) => {
    const ratios = data.cells.map((cell) => [rowOf(cell, name), rowOf(cell, mine)])
      .filter(([a, b]) => a && b && a.speed).map(([a, b]) => b.speed / a.speed);
    return ratios.length === data.cells.length ? Math.exp(mean(ratios.map(Math.log))) : null;
  };
  const gains = fixed.map((name) => [name, over(name)]).filter(([, gain]) => gain !== null).sort((a, b) => a[1] - b[1]);
  const tiles = [
    [percent(mean(regrets), 1), `mean regret of ${mine} against each run's best fixed tier`],
    [percent(regrets.length ? Math.max(...regrets) : null, 1), "in its worst run"],
    gains.length ? [`${number(gains[0][1], 2)}×`, `the best single fixed tier over all runs, ${gains[0][0]}`] : null,
    [number(mean(rows.map((row) => row.switches)), 1), "switches of the tier in 100 rounds"],
    [`${number(mean(rows.map((row) => row.controller_us)), 0)} µs`, "of a processor for the policy, each round"],
  ];
  byId("tiles").replaceChildren(...tiles.filter(Boolean).map(([value, text]) =>
    html("div", {}, html("b", {}, value), html("span", {}, text))));
}

// ------------------------------------------------------------ envelope

const shown = { texts: null, unit: "speedup" };
function envelope() {
  const loops = data.cells.filter((cell) => cell.closed);
  const texts = [...new Set(loops.map((cell) => cell.texts))];
  if (!loops.length) {
    byId("envelope-section").remove();
    return;
  }
  shown.texts = texts.includes(shown.texts) ? shown.texts : texts[texts.length - 1];
  const again = (change) => { Object.assign(shown, change); envelope(); };
  choice(byId("texts"), texts.map((t) => [t, t]), shown.texts, (t) => again({ texts: t }));
  choice(byId("unit"), [["speedup", "times plain decoding"], ["speed", "tokens per second"]], shown.unit,
    (unit) => again({ unit }));
  const cells = loops.filter((cell) => cell.texts === shown.texts).sort((a, b) => a.concurrency - b.concurrency);
  const series = names.map((name) => ({
    name,
    color: colorOf(name),
    width: name === mine ? 3.2 : isFixed(name) ? 1.6 : 1.8,
    dash: name === "off" ? "5 4" : isFixed(name) ? "none" : name === mine ? "none" : "2 3",
    dots: name === mine ? 4 : 0,
    points: cells.map((cell) => [cell.concurrency, (rowOf(cell, name) || {})[shown.unit]]).filter((p) => p[1] != null),
  }));
  series.sort((a, b) => (a.name === mine) - (b.name === mine));
  lines(byId("envelope"), series, {
    label: `Speed over concurrency, ${shown.texts}`,
    x: "requests at once", y: shown.unit === "speed" ? "tokens per second" : "times plain decoding", xLog: true,
    xTicks: cells.map((cell) => cell.concurrency), height: 400, level: shown.unit === "speedup" ? 1 : undefined,
    yFormat: (y) => (shown.unit === "speed" ? number(y, 0) : `${number(y, 2)}×`),
    yFrom: shown.unit === "speed" ? 0 : Math.min(0.9, ...series.flatMap((s) => s.points.map((p) => p[1]))),
  });
}

// ------------------------------------------------------------ choices

function selectCell(select, redraw) {
  select.replaceChildren(...data.cells.map((cell, i) => html("option", { value: i }, cell.name)));
  const changing = data.cells.findIndex((cell) => cell.texts.includes("/"));
  select.value = String(Math.max(0, changing));
  select.addEventListener("change", redraw);
}

function choices() {
  const cell = data.cells[Number(byId("cell").value)];
  const told = names.filter((name) => !isFixed(name) && cell.timelines[name] && cell.timelines[name].at.length);
  const rows = told.map((name) => {
    const line = cell.timelines[name];
    return {
      name, strong: name === mine, at: line.at, values: line.depth,
      color: (depth) => (depth < 0.05 ? "color-mix(in oklab, var(--plain) 25%, var(--card))" : ramp(depth / deepest)),
      text: (i) => [
        ["drafted a request", number(line.depth[i], 1), null], ["verified of them", number(line.verified[i], 1), null],
        ["requests in a round", number(line.rows[i], 1), null],
        ["of the best fixed tier's speed", line.ratio[i] === null ? "–" : percent(line.ratio[i], 0), null]],
    };
  });
  const seconds = Math.max(0, ...told.flatMap((name) => cell.timelines[name].at)) * (1 + 1 / 240);
  strips(byId("choices"), rows, { label: `Depth over time, ${cell.name}`, x: "seconds", seconds, bins: 120 });
  const steps = [...Array(deepest + 1).keys()].filter((d) => d === 0 || d === 1 || d === deepest || deepest < 9);
  byId("choices-legend").replaceChildren(...steps.map((d) => html("span", {},
    html("i", { class: "swatch", style: `height:10px;background:${d ? ramp(d / deepest) : "color-mix(in oklab, var(--plain) 25%, var(--card))"}` }),
    d ? `${d}` : "no drafts")));
}

// ------------------------------------------------------------ calibration and acceptance

function calibration() {
  const cell = data.cells[Number(byId("cell").value)];
  const found = Object.entries(cell.reliability || {});
  const diagonal = { name: "", color: "var(--soft)", width: 1, dash: "3 4", points: [[0, 0], [1, 1]], quiet: true };
  if (!found.length) {
    byId("calibration").replaceChildren();
    byId("calibration-note").textContent = "No policy of this run spends a budget by its drafts' chances.";
    return;
  }
  lines(byId("calibration"), [diagonal, ...found.map(([name, bins]) => ({
    name, color: colorOf(name), width: name === mine ? 3 : 1.8, dots: 3,
    points: bins.map((bin) => [Number(bin.predicted.toFixed(3)), bin.accepted]),
  }))], {
    label: `Calibration, ${cell.name}`, x: "predicted chance of survival", y: "share that survived", height: 300, yTo: 1,
    xTicks: [0, 0.2, 0.4, 0.6, 0.8, 1], xFormat: (x) => percent(x, 0), yFormat: (y) => percent(y, 0),
  });
  byId("calibration-note").textContent = `${cell.name}. Calibration error: ` + found
    .map(([name]) => `${name} ${percent((rowOf(cell, name) || {}).calibration_error, 1)}`).join(", ") + ".";
}

function acceptance() {
  const kinds = {};
  for (const cell of data.cells) Object.assign(kinds, cell.acceptance);
  const found = Object.entries(kinds).slice(0, 6);
  lines(byId("acceptance"), found.map(([name, shares], i) => ({
    name, color: OTHERS[i % OTHERS.length], dots: 3, points: shares.map((share, at) => [at + 1, share]),
  })), {
    label: "Acceptance by position", x: "draft position", y: "accepted up to there", height: 300, yTo: 1,
    yFormat: (y) => percent(y, 0), xTicks: [...Array(Math.max(1, ...found.map(([, s]) => s.length))).keys()].map((i) => i + 1),
  });
  const auc = data.cells[0].confidence_auc;
  byId("acceptance-note").textContent = auc ? `How well confidence tells right drafts from wrong ones (AUC): ${number(auc, 2)}.` : "";
}

// ------------------------------------------------------------ calculator

const c = data.profile;
const devices = { batch: 8, context: 1024 };
const ownCost = () => model.interpolate(c.requests, c.draft, devices.batch) / model.seconds(c, devices.batch, devices.context, 0);
const controls = {
  rate: { text: "Acceptance of a draft", least: 0, most: 0.99, step: 0.01, start: 0.7, shown: (v) => percent(v) },
  depth: { text: "Draft depth", least: 1, most: c.deepest, step: 1, start: Math.min(3, c.deepest), shown: (v) => `${v} tokens` },
  batch: { text: "Requests at once", least: 0, most: Math.log2(Math.max(2, c.requests[c.requests.length - 1])), step: 1, start: 3,
    shown: (v) => `${2 ** v}` },
  context: { text: "Context of each request", least: 5, most: 17, step: 1, start: 10, shown: (v) => `${number(2 ** v, 0)} tokens` },
  cost: { text: "Cost of a draft pass", least: 0, most: 0.6, step: 0.005, start: 0, shown: (v) => `${percent(v, 1)} of a plain step` },
};
let ownDraft = true; // whether the cost of a draft pass is the device's own

function value(name) {
  const raw = Number(byId(`slide-${name}`).value);
  return name === "batch" || name === "context" ? 2 ** raw : raw;
}

function buildControls() {
  byId("controls").replaceChildren(...Object.entries(controls).map(([name, control]) => html("label", {},
    html("span", {}, control.text, html("output", { id: `out-${name}`, for: `slide-${name}` })),
    html("input", { type: "range", id: `slide-${name}`, min: control.least, max: control.most, step: control.step,
      value: control.start, oninput: () => { if (name === "cost") ownDraft = false; calculate(); } }))),
    html("button", { type: "button", onclick: () => { ownDraft = true; calculate(); } }, "This device's draft cost"));
}

function calculate() {
  const [rate, depth, batch, context] = ["rate", "depth", "batch", "context"].map(value);
  Object.assign(devices, { batch, context });
  if (ownDraft) byId("slide-cost").value = String(Math.min(0.6, ownCost()));
  const cost = ownDraft ? null : value("cost");
  for (const [name, control] of Object.entries(controls)) {
    const raw = name === "cost" && ownDraft ? ownCost() : Number(byId(`slide-${name}`).value);
    byId(`out-${name}`).textContent = control.shown(raw);
  }
  const at = (r, d = depth, b = batch) => model.speedup(c, b, context, d, r, cost);
  const speed = at(rate);
  const best = model.bestDepth(c, batch, context, rate, cost);
  const needed = model.breakEven(c, batch, context, depth, cost);
  const better = Math.min(1, rate + 0.05);
  const bestOf = (r) => { const d = model.bestDepth(c, batch, context, r, cost); return d ? at(r, d) : 1; };
  const verdict = byId("verdict");
  verdict.className = `verdict ${speed >= 1 ? "pays" : "loses"}`;
  const word = speed >= 1.005 ? "Drafting pays" : speed > 0.995 ? "Drafting breaks even" : "Drafting does not pay";
  verdict.replaceChildren(html("b", {}, `${number(speed, 2)}×`),
    `${word} at depth ${depth}: ${number(model.length(rate, depth), 2)} tokens from a round that takes ` +
    `${number(model.seconds(c, batch, context, depth, cost) / model.seconds(c, batch, context, 0), 2)} plain steps.`);
  const limit = (() => {
    let last = null;
    for (const b of c.requests) if (bestAt(rate, b, context, cost) > 1) last = b;
    return last === null ? "nowhere" : last === c.requests[c.requests.length - 1] ? `everywhere, to ${last}` : `up to ${last} at once`;
  })();
  const ms = (s) => `${number(1e3 * s, 2)} ms`;
  const facts = [
    ["Plain step, and this round", `${ms(model.seconds(c, batch, context, 0))}, ${ms(model.seconds(c, batch, context, depth, cost))}`],
    ["Acceptance to break even", needed === null ? "out of reach" : percent(needed, 0)],
    ["Best depth", best ? `${best}: ${number(at(rate, best), 2)}×` : "none: plain decoding"],
    ["Some depth pays", limit],
    ["A head 5 points better", `${number(100 * (bestOf(better) / bestOf(rate) - 1), 1)}% faster`],
    ["Plain speed of a request", `${number(1 / model.seconds(c, batch, context, 0), 0)} tokens/s`],
  ];
  byId("facts").replaceChildren(...facts.map(([name, text]) => html("div", {}, html("dt", {}, name), html("dd", {}, text))));
  const grid = [...Array(50).keys()].map((i) => i / 50).concat([0.99]);
  const depths = [...new Set([1, Math.min(3, c.deepest), c.deepest, depth])].sort((a, b) => a - b);
  lines(byId("by-acceptance"), depths.map((d) => ({
    name: `depth ${d}`, color: d === depth ? "var(--accent)" : ramp((d - 1) / Math.max(1, deepest - 1)), width: d === depth ? 3 : 1.6,
    points: grid.map((r) => [r, at(r, d)]),
  })), {
    label: "Speed-up over acceptance", x: "acceptance of a draft", y: "times plain decoding", height: 270, level: 1,
    xTicks: [0, 0.2, 0.4, 0.6, 0.8, 1].filter((x) => x < 1), xFormat: (x) => percent(x), yFormat: (y) => `${number(y, 1)}×`,
    mark: { x: rate, y: speed, text: `${number(speed, 2)}×` },
  });
  lines(byId("by-batch"), depths.map((d) => ({
    name: `depth ${d}`, color: d === depth ? "var(--accent)" : ramp((d - 1) / Math.max(1, deepest - 1)), width: d === depth ? 3 : 1.6,
    points: c.requests.map((b) => [b, at(rate, d, b)]),
  })), {
    label: "Speed-up over requests at once", x: "requests at once", y: "times plain decoding", height: 250, level: 1, xLog: true,
    xTicks: c.requests.filter((b) => Number.isInteger(Math.log2(b))), yFormat: (y) => `${number(y, 1)}×`,
    mark: { x: batch, y: speed, text: "" },
  });
}

function bestAt(rate, batch, context, cost) {
  const d = model.bestDepth(c, batch, context, rate, cost);
  return d ? model.speedup(c, batch, context, d, rate, cost) : 1;
}

// ------------------------------------------------------------ table

function table() {
  const cell = data.cells[Number(byId("table-cell").value)];
  const ms = (x, digits) => (x === null ? "–" : number(1e3 * x, digits));
  const slo = (row, scale) => percent(row.attainment && row.attainment[scale]);
  const settled = (row) => {
    const known = row.settled.filter((x) => x !== null).sort((a, b) => a - b);
    return !row.settled.length ? "–" : known.length * 2 < row.settled.length ? "never" : String(known[(known.length - 1) >> 1]);
  };
  const gap = (x) => (x === null ? "–" : x < 0 ? "below 0" : percent(x));
  const columns = [
    ["Policy", "", (r) => r.policy],
    [cell.closed ? "Speed" : "1 / latency", cell.closed ? "tokens/s" : "1/s", (r) => number(r.speed, cell.closed ? 0 : 3)],
    ["Speed-up", "× plain", (r) => number(r.speedup, 2)], ["Regret", "", (r) => percent(r.regret, 1)],
    ["Gap", "to oracle", (r) => gap(r.gap)],
    ["Length", "tokens/round", (r) => number(r.length, 2)], ["Drafted", "a round", (r) => number(r.depth, 1)],
    ["Verified", "a round", (r) => number(r.verified, 1)],
    ["TTFT", "p50, ms", (r) => ms(r.ttft_p50, 0)], ["TPOT", "p50, ms", (r) => ms(r.tpot_p50, 1)],
    ["TPOT", "p99, ms", (r) => ms(r.tpot_p99, 1)],
    ...["0.6", "0.8", "1", "1.2", "1.4", "1.6"].map((s) => ["SLO", `× ${s}`, (r) => slo(r, s)]),
    ["Switches", "/100 rounds", (r) => number(r.switches, 1)], ["Settled", "rounds", settled],
    ["ECE", "", (r) => percent(r.calibration_error, 1)], ["Controller", "µs/round", (r) => number(r.controller_us, 0)],
  ];
  byId("table").replaceChildren(
    html("thead", {}, html("tr", {}, ...columns.map(([name, unit]) => html("th", { scope: "col" }, name, html("small", {}, unit))))),
    html("tbody", {}, ...cell.policies.map((row) => html("tr",
      { class: row.policy === mine ? "mine" : row.policy === cell.best_fixed ? "best" : null },
      ...columns.map(([, , show]) => html("td", {}, show(row)))))),
  );
}

// ------------------------------------------------------------ all of it

function theme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const say = () => { byId("theme").textContent = isDark() ? "Light" : "Dark"; };
  byId("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    say();
  });
  system.addEventListener("change", say);
  say();
}

function draw() {
  envelope();
  choices();
  calibration();
  acceptance();
  calculate();
}

theme();
head();
selectCell(byId("cell"), () => { choices(); calibration(); });
selectCell(byId("table-cell"), table);
buildControls();
table();
draw();
let waiting = 0;
addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(draw); });
document.documentElement.dataset.ready = "yes";
