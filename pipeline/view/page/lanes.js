// One lane per engine against time: requests as bars, coloured by the version of the weights that made their tokens.
//
// The canvas is as large as what is visible, and only bars in the visible lanes and seconds are drawn.

import { ask, attempt, isReport } from "./data.js";
import { clock, colour, el, number } from "./text.js";

const LABEL = 92; // pixels left of the bars
const HEAD = 20;
const SPANS = { 10: "10 s", 30: "30 s", 60: "1 min", 300: "5 min", 1800: "30 min", 7200: "2 h" };
const EVERY = 2000;
const seen = { from: 0, to: 60, lanes: [], steps: [], rowsOf: [], tops: [0], total: 0, cut: 0, chosen: null };
const ui = {};
let [lanesUntil, lanesAsked, follows, frame] = ["", 0, true, 0];

function buildLanes(root) {
  const button = (label, text, action) => el("button", { type: "button", "aria-label": label, title: label, on: { click: action } }, text);
  ui.span = el("select", { id: "lanes-span", on: { change: () => attempt(() => load(true)) } },
    Object.entries(SPANS).map(([value, text]) => el("option", { value, selected: value === "60" ? "" : null }, text)));
  ui.facts = el("p", { class: "facts-line", role: "status" }, "Point at a bar, or press N for the next one.");
  ui.canvas = el("canvas", { tabindex: 0, role: "application", "aria-label": "Requests of each engine. N and P: next and previous bar, Enter: its rollouts, "
    + "plus and minus: zoom, arrows: move, Home: all" });
  ui.spacer = el("div", { class: "spacer" });
  ui.pane = el("div", { class: "lanes-pane" }, ui.canvas, ui.spacer);
  ui.follow = button("Follow the newest", "Newest", () => { lanesUntil = ""; follows = true; attempt(() => load(true)); });
  root.append(el("div", { class: "bar" }, el("label", { for: "lanes-span" }, "Show"), ui.span,
    button("Earlier", "◀", () => later(-0.5)), button("Later", "▶", () => later(0.5)), isReport ? null : ui.follow,
    button("Zoom in", "+", () => zoom(0.5)), button("Zoom out", "−", () => zoom(2)), button("Show all that is loaded", "All", whole),
    el("span", { class: "quiet hint" }, "Ctrl + wheel: zoom. Shift + wheel or drag: move in time. Wheel: lanes.")),
  ui.facts, el("div", { class: "card" }, ui.pane),
  el("p", { class: "legend" }, ["c0", "c1", "c2", "c3", "c4", "c5"].map((name) => el("i", { class: `swatch ${name}` })),
    "a colour for each version, in turn; ", el("i", { class: "swatch band" }), "weights are updated; ", el("i", { class: "swatch gap" }),
    "a tool runs; ● reward above 0, ○ none; dotted: a step was trained."));
  ui.note = root.appendChild(el("p", { class: "quiet" }));
  ui.canvas.addEventListener("wheel", onWheel, { passive: false });
  ui.canvas.addEventListener("keydown", onKey);
  ui.canvas.addEventListener("pointerdown", onDrag);
  ui.canvas.addEventListener("pointermove", (event) => { if (!event.buttons) choose(hit(event)); });
  ui.pane.addEventListener("scroll", paintSoon);
  new ResizeObserver(paintSoon).observe(ui.pane);
}

async function load(anew) {
  const found = await ask("lanes", { seconds: ui.span.value, until: lanesUntil });
  lanesAsked = Date.now();
  const all = seen.from === seen.start && seen.to === seen.last;
  Object.assign(seen, { lanes: found.lanes, steps: found.steps, cut: found.cut, start: firstShown(found), first: found.from_s, last: found.to_s });
  if (anew || all || seen.to > seen.last || seen.from < seen.first) Object.assign(seen, { from: firstShown(found), to: found.to_s });
  place();
  const bars = found.lanes.reduce((sum, lane) => sum + lane.bars.length, 0);
  ui.note.textContent = `${number(found.lanes.length)} ${found.lanes.length === 1 ? "lane" : "lanes"}, ${number(bars)} requests, ${clock(found.from_s)} to ${clock(found.to_s)}`
    + (found.cut ? `; ${number(found.cut)} requests are left out: show less time` : "");
  paintSoon();
}

/** Where the bars begin, if older ones are left out. */
function firstShown(found) {
  const starts = found.cut ? found.lanes.flatMap((lane) => lane.bars.map((bar) => bar.start_s)) : [];
  return starts.reduce((least, one) => Math.min(least, one), starts[0] ?? found.from_s);
}

/** A row for each bar, so that none covers another; then the top of each lane. */
function place() {
  seen.tops = [0];
  seen.rowsOf = seen.lanes.map((lane) => {
    const ends = [];
    lane.bars.sort((a, b) => a.start_s - b.start_s);
    lane.rows = lane.bars.map((bar) => {
      let row = ends.findIndex((end) => end <= bar.start_s);
      if (row < 0) row = ends.length;
      ends[row] = bar.end_s;
      return row;
    });
    lane.high = ends.length > 64 ? 4 : ends.length > 24 ? 7 : ends.length > 8 ? 12 : 16;
    seen.tops.push(seen.tops.at(-1) + Math.max(20, lane.high * ends.length + 8));
    return ends.length;
  });
  seen.total = seen.tops.at(-1);
  ui.pane.style.height = `${Math.max(160, Math.min(seen.total + HEAD + 20, innerHeight - 290))}px`;
  ui.spacer.style.height = `${Math.max(0, seen.total + HEAD - ui.canvas.clientHeight)}px`;
}

function paintSoon() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    paint();
  });
}

const wide = () => ui.canvas.clientWidth - LABEL - 8;
const toX = (s) => LABEL + ((s - seen.from) / (seen.to - seen.from)) * wide();
const toS = (x) => seen.from + ((x - LABEL) / wide()) * (seen.to - seen.from);

/** The first lane whose bottom is below `y` of the content. */
function laneAt(y) {
  let [low, high] = [0, seen.lanes.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (seen.tops[middle + 1] <= y) low = middle + 1;
    else high = middle;
  }
  return low;
}

function paint() {
  const { clientWidth: width, clientHeight: height } = ui.canvas;
  if (!width) return;
  const scale = devicePixelRatio || 1;
  if (ui.canvas.width !== Math.round(width * scale) || ui.canvas.height !== Math.round(height * scale)) {
    [ui.canvas.width, ui.canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
    ui.spacer.style.height = `${Math.max(0, seen.total + HEAD - height)}px`;
  }
  const g = ui.canvas.getContext("2d");
  const ink = Object.fromEntries(["ink", "muted", "line", "panel", "band", "accent", "c0", "c1", "c2", "c3", "c4", "c5"].map((name) => [name, colour(name)]));
  g.setTransform(scale, 0, 0, scale, 0, 0);
  g.clearRect(0, 0, width, height);
  g.font = "11px system-ui, sans-serif";
  g.textBaseline = "middle";
  const shift = HEAD - ui.pane.scrollTop;
  for (let i = laneAt(ui.pane.scrollTop); i < seen.lanes.length && seen.tops[i] + shift < height; i++) paintLane(g, ink, i, shift, width);
  paintTime(g, ink, width, height);
}

function paintLane(g, ink, index, shift, width) {
  const lane = seen.lanes[index];
  const [top, high] = [seen.tops[index] + shift, seen.tops[index + 1] - seen.tops[index]];
  g.fillStyle = ink.line;
  g.fillRect(0, top + high - 1, width, 1);
  g.fillStyle = ink.band;
  for (const one of lane.updates) {
    const [from, to] = [toX(one.start_s), toX(one.end_s)];
    if (to > LABEL && from < width) g.fillRect(Math.max(LABEL, from), top, Math.max(2, to - Math.max(LABEL, from)), high - 1);
  }
  lane.bars.forEach((bar, i) => {
    if (bar.end_s < seen.from || bar.start_s > seen.to) return;
    paintBar(g, ink, bar, top + 4 + lane.rows[i] * lane.high, lane.high - 1);
  });
  g.fillStyle = ink.panel;
  g.fillRect(0, top, LABEL - 4, high - 1);
  g.fillStyle = ink.ink;
  g.fillText(lane.name.slice(0, 16), 4, Math.max(top, HEAD) + 11, LABEL - 10);
}

/** Pieces of a bar: [from, to, version], the tokens spread evenly over the time in which no tool runs. */
function pieces(bar) {
  const free = [];
  let start = bar.start_s;
  for (const [from, to] of [...bar.tools, [bar.end_s, bar.end_s]]) {
    if (from > start) free.push([start, from]);
    start = Math.max(start, to);
  }
  const time = free.reduce((sum, [from, to]) => sum + to - from, 0);
  const tokens = bar.versions.reduce((sum, [, count]) => sum + count, 0) || 1;
  const found = [];
  let done = 0; // seconds of generation before this version
  for (const [version, count] of bar.versions.length ? bar.versions : [[-1, 1]]) {
    const until = done + (time * count) / tokens;
    let before = 0;
    for (const [from, to] of free) {
      const [begin, end] = [Math.max(from, from + done - before), Math.min(to, from + until - before)];
      if (end > begin) found.push([begin, end, version]);
      before += to - from;
    }
    done = until;
  }
  return found;
}

function paintBar(g, ink, bar, y, high) {
  for (const [from, to, version] of pieces(bar)) {
    const x = Math.max(LABEL, toX(from));
    g.fillStyle = version < 0 ? ink.muted : ink[`c${version % 6}`];
    g.fillRect(x, y, Math.max(1, toX(to) - x - (to === bar.end_s ? 1 : 0)), high);
  }
  g.fillStyle = ink.muted;
  for (const [from, to] of bar.tools) g.fillRect(Math.max(LABEL, toX(from)), y + high / 2 - 0.5, Math.max(1, toX(to) - Math.max(LABEL, toX(from))), 1);
  if (bar.reward !== null && high >= 5 && toX(bar.end_s) - toX(bar.start_s) > 14) {
    g.beginPath();
    g.arc(toX(bar.end_s) - 6, y + high / 2, Math.min(3, high / 2 - 0.5), 0, 7);
    [g.fillStyle, g.strokeStyle] = [ink.panel, ink.panel];
    if (bar.reward > 0) g.fill();
    else g.stroke();
  }
  if (bar === seen.chosen) {
    [g.strokeStyle, g.lineWidth] = [ink.ink, 2];
    g.strokeRect(Math.max(LABEL, toX(bar.start_s)) - 1, y - 1, toX(bar.end_s) - Math.max(LABEL, toX(bar.start_s)) + 2, high + 2);
    g.lineWidth = 1;
  }
}

function paintTime(g, ink, width, height) {
  g.fillStyle = ink.panel;
  g.fillRect(0, 0, width, HEAD);
  const spacing = (seen.to - seen.from) / Math.max(2, wide() / 90);
  const unit = [0.001, 0.01, 0.1, 1, 10, 60, 600, 3600].findLast((one) => one <= spacing) ?? 0.001;
  const by = unit * ([1, 2, 5, 10].find((one) => unit * one >= spacing) ?? 20);
  g.fillStyle = ink.muted;
  for (let s = Math.ceil(seen.from / by) * by; s < seen.to; s += by) {
    g.fillText(by < 1 ? `${clock(Math.floor(s))}${(s % 1).toFixed(by < 0.1 ? 3 : 1).slice(1)}` : clock(s), toX(s) + 3, HEAD / 2);
    g.fillRect(toX(s), 4, 1, HEAD - 8);
  }
  g.strokeStyle = ink.accent;
  g.setLineDash([2, 4]);
  let free = -1e9;
  for (const { step, at_s: at } of seen.steps) {
    const x = toX(at);
    if (x < LABEL || x > width) continue;
    g.beginPath();
    g.moveTo(x + 0.5, HEAD);
    g.lineTo(x + 0.5, height);
    g.stroke();
    if (x < free) continue;
    g.fillStyle = ink.accent;
    g.fillText(`${step}`, x + 3, height - 7);
    free = x + 40;
  }
  g.setLineDash([]);
}

function hit(event) {
  const y = event.offsetY - HEAD + ui.pane.scrollTop;
  const index = laneAt(y);
  const lane = seen.lanes[index];
  if (!lane || event.offsetY < HEAD || event.offsetX < LABEL) return null;
  const row = Math.floor((y - seen.tops[index] - 4) / lane.high);
  const s = toS(event.offsetX);
  const slack = (3 * (seen.to - seen.from)) / wide();
  const i = lane.bars.findIndex((bar, at) => lane.rows[at] === row && bar.start_s - slack <= s && s <= bar.end_s + slack);
  return i < 0 ? null : lane.bars[i];
}

function choose(bar) {
  if (bar === seen.chosen) return;
  seen.chosen = bar;
  ui.canvas.style.cursor = bar ? "pointer" : "";
  ui.facts.textContent = bar ? inText(bar) : "Point at a bar, or press N for the next one.";
  paintSoon();
}

function inText(bar) {
  const runs = bar.versions.map(([version, tokens]) => `${number(tokens)} tokens of version ${version}`).join(", ");
  const tools = bar.tools.length ? `, tool calls: ${bar.tools.length}` : "";
  return `Group ${bar.group}: ${clock(bar.start_s)}, ${(bar.end_s - bar.start_s).toFixed(2)} s, ${runs || `${number(bar.tokens)} tokens`}${tools}`
    + `, reward ${number(bar.reward)}${bar.outcome ? `, ${bar.outcome}` : ""}`;
}

const openGroup = (bar) => { if (bar) location.hash = `#rollouts?group=${bar.group}`; };

/** The next bar by lane and time, brought into sight. */
function step(by) {
  const all = seen.lanes.flatMap((lane, i) => lane.bars.map((bar, j) => [bar, i, j]));
  if (!all.length) return;
  const here = all.findIndex(([bar]) => bar === seen.chosen);
  const [bar, lane, i] = all[here < 0 ? 0 : (here + by + all.length) % all.length];
  const y = seen.tops[lane] + seen.lanes[lane].rows[i] * seen.lanes[lane].high;
  if (y < ui.pane.scrollTop || y > ui.pane.scrollTop + ui.canvas.clientHeight - 40) ui.pane.scrollTop = y - 30;
  const middle = (bar.start_s + bar.end_s) / 2;
  if (middle < seen.from || middle > seen.to) move((middle - (seen.from + seen.to) / 2) / (seen.to - seen.from));
  choose(bar);
}

function zoom(by, x = LABEL + wide() / 2) {
  const centre = toS(x);
  if ((seen.to - seen.from) * by < 0.005) return;
  seen.from = centre - (centre - seen.from) * by;
  seen.to = centre + (seen.to - centre) * by;
  if (by > 1 && seen.from <= seen.first && seen.to >= seen.last) whole();
  paintSoon();
}

function move(share) {
  const by = share * (seen.to - seen.from);
  seen.from += by;
  seen.to += by;
  paintSoon();
}

function whole() {
  Object.assign(seen, { from: seen.start, to: seen.last });
  paintSoon();
}

function later(share) {
  if (isReport) {
    move(share);
    return;
  }
  lanesUntil = seen.last + share * (seen.last - seen.first);
  follows = false;
  attempt(() => load(true));
}

function onWheel(event) {
  if (event.ctrlKey) zoom(event.deltaY > 0 ? 1.25 : 0.8, event.offsetX);
  else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(Math.sign(event.deltaX || event.deltaY) * 0.1);
  else return;
  event.preventDefault();
}

function onKey(event) {
  const actions = {
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), Home: whole,
    ArrowUp: () => { ui.pane.scrollTop -= 40; }, ArrowDown: () => { ui.pane.scrollTop += 40; },
    n: () => step(1), p: () => step(-1), Enter: () => openGroup(seen.chosen),
  };
  const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  action();
}

function onDrag(event) {
  let [x, y, moved] = [event.clientX, event.clientY, 0];
  const bar = hit(event);
  const drag = (now) => {
    moved += Math.abs(now.clientX - x) + Math.abs(now.clientY - y);
    if (moved > 4) {
      move((x - now.clientX) / wide());
      ui.pane.scrollTop += y - now.clientY;
    }
    [x, y] = [now.clientX, now.clientY];
  };
  const end = () => {
    ui.canvas.removeEventListener("pointermove", drag);
    if (moved <= 4) openGroup(bar);
  };
  ui.canvas.setPointerCapture(event.pointerId);
  ui.canvas.addEventListener("pointermove", drag);
  ui.canvas.addEventListener("pointerup", end, { once: true });
}

export const lanes = {
  name: "lanes",
  title: "Lanes",
  build: buildLanes,
  show: () => { lanesAsked = 0; },
  async tick() {
    if (!lanesAsked || (!isReport && follows && Date.now() - lanesAsked > EVERY)) await load(!seen.lanes.length);
  },
  repaint: paintSoon,
};
