// Charts as SVG: lines with a cross-hair, strips over time. They know shapes and colours, nothing of what they show.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  for (const child of children) node.append(child);
  return node;
}

function html(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  for (const child of children) node.append(child);
  return node;
}

// Round numbers that cover a range.
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw || 1));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw) || 1;
  const out = [];
  for (let x = Math.ceil(low / step - 1e-9) * step; x <= high + step * 1e-9; x += step) out.push(Number(x.toFixed(10)));
  return out;
}

function number(value, digits) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const places = digits === undefined ? (Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2) : digits;
  return (value + 0).toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
}

const percent = (value, digits = 0) => (value === null || value === undefined ? "–" : `${number(100 * value, digits)}%`);

const short = (name) => (name.length > 22 ? `${name.slice(0, 21)}…` : name);

// Moves labels apart that would overlap.
function apart(labels, gap, low, high) {
  labels.sort((a, b) => a.y - b.y);
  for (let i = 1; i < labels.length; i += 1) labels[i].y = Math.max(labels[i].y, labels[i - 1].y + gap);
  const over = labels.length ? labels[labels.length - 1].y - high : 0;
  if (over > 0) {
    labels[labels.length - 1].y = high;
    for (let i = labels.length - 2; i >= 0; i -= 1) labels[i].y = Math.min(labels[i].y, labels[i + 1].y - gap);
  }
  return labels.map((label) => ({ ...label, y: Math.max(low, label.y) }));
}

// series: [{name, color, width, dash, points: [[x, y]], dots, quiet}]; options: {label, x, y, xLog, xTicks, yFrom, yTo,
// yFormat, xFormat, height, mark: {x, y, text}, level: y of a rule}.
function lines(box, series, options) {
  const width = Math.max(280, box.clientWidth || 600);
  const height = options.height || 320;
  const named = series.filter((s) => s.points.length && !s.quiet);
  const widest = Math.max(0, ...named.map((s) => short(s.name).length));
  const edge = { left: 52, right: Math.min(0.3 * width, 16 + 6.6 * widest), top: 26, bottom: 44 };
  const xs = series.flatMap((s) => s.points.map((p) => p[0]));
  const ys = series.flatMap((s) => s.points.map((p) => p[1])).filter((y) => Number.isFinite(y));
  box.replaceChildren();
  if (!xs.length) {
    box.append(html("p", { class: "note" }, "Nothing to draw."));
    return;
  }
  const scale = options.xLog ? Math.log2 : (x) => x;
  let [first, last] = [scale(Math.min(...xs)), scale(Math.max(...xs))];
  if (first === last) [first, last] = [first - 0.5, last + 0.5];
  const low = options.yFrom ?? 0;
  const yTicks = ticks(Math.min(low, options.level ?? low), Math.max(options.yTo ?? Math.max(...ys), options.level ?? low), 5);
  const high = options.yTo ?? Math.max(Math.max(...ys), yTicks[yTicks.length - 1]);
  const px = (x) => edge.left + ((scale(x) - first) / (last - first)) * (width - edge.left - edge.right);
  const py = (y) => height - edge.bottom - ((y - low) / (high - low || 1)) * (height - edge.top - edge.bottom);
  const yFormat = options.yFormat || ((y) => number(y));
  const xFormat = options.xFormat || ((x) => String(x));
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": options.label });
  for (const y of yTicks) {
    root.append(svg("line", { class: "grid", x1: edge.left, x2: width - edge.right, y1: py(y), y2: py(y) }));
    root.append(svg("text", { x: edge.left - 8, y: py(y) + 4, "text-anchor": "end" }, yFormat(y)));
  }
  const xTicks = options.xTicks || ticks(Math.min(...xs), Math.max(...xs), 6);
  for (const x of xTicks) {
    root.append(svg("text", { x: px(x), y: height - edge.bottom + 20, "text-anchor": "middle" }, xFormat(x)));
  }
  root.append(
    svg("text", { class: "title", x: edge.left - 44, y: 13 }, options.y),
    svg("text", { x: (edge.left + width - edge.right) / 2, y: height - 6, "text-anchor": "middle" }, options.x),
  );
  if (options.level !== undefined) {
    const y = py(options.level);
    root.append(svg("line", { class: "axis", x1: edge.left, x2: width - edge.right, y1: y, y2: y }));
  }
  for (const s of series) {
    const path = s.points.map(([x, y], i) => `${i ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
    const style = `stroke:${s.color};stroke-width:${s.width || 2};fill:none;stroke-linejoin:round`;
    root.append(svg("path", { d: path, style, "stroke-dasharray": s.dash || "none" }));
    if (s.dots || s.points.length === 1) {
      for (const [x, y] of s.points) {
        root.append(svg("circle", { cx: px(x), cy: py(y), r: s.dots || 3.5, style: `fill:${s.color}` }));
      }
    }
  }
  const ends = named.map((s) => ({ s, y: py(s.points[s.points.length - 1][1]) }));
  for (const { s, y } of apart(ends, 14, edge.top, height - edge.bottom)) {
    const weight = (s.width || 2) > 2.4 ? 650 : 400;
    const x = px(s.points[s.points.length - 1][0]) + 8;
    const style = `fill:color-mix(in oklab, ${s.color} 65%, var(--ink));font-weight:${weight}`;
    root.append(svg("text", { x, y: y + 4, style }, short(s.name)));
  }
  if (options.mark) {
    const { x, y, text } = options.mark;
    const left = px(x) > width * 0.6;
    root.append(
      svg("circle", { cx: px(x), cy: py(y), r: 6, style: "fill:var(--accent);stroke:var(--card);stroke-width:2" }),
      svg("text", { class: "title", x: px(x) + (left ? -11 : 11), y: py(y) - 10, "text-anchor": left ? "end" : "start" },
        text),
    );
  }
  const cross = svg("line", { class: "cross", y1: edge.top, y2: height - edge.bottom, visibility: "hidden" });
  root.append(cross);
  box.append(root);
  const places = [...new Set(xs)].sort((a, b) => a - b);
  hover(box, root, (at) => {
    const near = places.reduce((best, x) => (Math.abs(px(x) - at.x) < Math.abs(px(best) - at.x) ? x : best), places[0]);
    cross.setAttribute("visibility", "visible");
    for (const name of ["x1", "x2"]) cross.setAttribute(name, px(near));
    const rows = series
      .map((s) => ({ s, point: s.points.find((p) => p[0] === near) }))
      .filter((row) => row.point && row.s.name)
      .sort((a, b) => b.point[1] - a.point[1]);
    return {
      x: px(near),
      lines: [[`${options.tipX || options.x}: ${xFormat(near)}`, "", null],
        ...rows.map((row) => [row.s.name, yFormat(row.point[1]), row.s.color])],
    };
  }, () => cross.setAttribute("visibility", "hidden"));
}

// rows: [{name, color(value), at: [x], values: [y], text(i)}] as strips of colour, one below the other.
function strips(box, rows, options) {
  const width = Math.max(280, box.clientWidth || 600);
  const tall = 26;
  const edge = { left: Math.min(190, 0.3 * width), right: 12, top: 6, bottom: 40 };
  const height = edge.top + rows.length * (tall + 5) + edge.bottom;
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": options.label });
  const span = options.seconds || 1;
  const px = (x) => edge.left + (x / span) * (width - edge.left - edge.right);
  const wide = (width - edge.left - edge.right) / options.bins;
  rows.forEach((row, r) => {
    const y = edge.top + r * (tall + 5);
    const style = row.strong ? "fill:var(--accent);font-weight:650" : "";
    root.append(svg("text", { x: edge.left - 10, y: y + 17, "text-anchor": "end", style }, short(row.name)));
    root.append(svg("rect", { x: edge.left, y, width: width - edge.left - edge.right, height: tall, rx: 3,
      style: "fill:var(--rule);opacity:.35" }));
    row.at.forEach((x, i) => {
      const style = `fill:${row.color(row.values[i])}`;
      root.append(svg("rect", { x: px(x) - wide / 2, y, width: wide + 0.6, height: tall, style }));
    });
  });
  for (const x of ticks(0, span, 8)) {
    root.append(svg("text", { x: px(x), y: height - edge.bottom + 18, "text-anchor": "middle" }, number(x, x % 1 ? 1 : 0)));
  }
  root.append(svg("text", { x: (edge.left + width) / 2, y: height - 4, "text-anchor": "middle" }, options.x));
  box.replaceChildren(root);
  hover(box, root, (at) => {
    const r = Math.min(rows.length - 1, Math.max(0, Math.floor((at.y - edge.top) / (tall + 5))));
    const row = rows[r];
    if (!row || !row.at.length) return null;
    const x = ((at.x - edge.left) / (width - edge.left - edge.right)) * span;
    const i = row.at.reduce((best, place, j) => (Math.abs(place - x) < Math.abs(row.at[best] - x) ? j : best), 0);
    return { x: px(row.at[i]), lines: [[`${row.name}, ${number(row.at[i], 1)} s`, "", null], ...row.text(i)] };
  });
}

// Shows what `tell` says of a place: {x, lines: [[name, value, colour]]}.
function hover(box, root, tell, leave) {
  const tip = html("div", { class: "tip", hidden: "" });
  box.append(tip);
  root.addEventListener("pointermove", (event) => {
    const frame = root.getBoundingClientRect();
    const told = tell({ x: event.clientX - frame.left, y: event.clientY - frame.top });
    if (!told) return;
    tip.replaceChildren(...told.lines.map(([name, value, color]) => {
      const label = html("span", {}, name);
      if (color) label.prepend(html("i", { class: "swatch", style: `background:${color}` }));
      return html("div", {}, label, html("b", {}, value));
    }));
    tip.hidden = false;
    const right = told.x + 16 + tip.offsetWidth > frame.width;
    tip.style.left = `${right ? Math.max(0, told.x - tip.offsetWidth - 12) : told.x + 12}px`;
    tip.style.top = `${Math.max(0, event.clientY - frame.top - tip.offsetHeight - 10)}px`;
  });
  root.addEventListener("pointerleave", () => {
    tip.hidden = true;
    if (leave) leave();
  });
}
