// Curves of metrics.jsonl, with one cursor over all charts.

import uPlot from "./vendor/uPlot.esm.js";
import { ask, isReport } from "./data.js";
import { colour, duration, el, number } from "./text.js";

const OVERLAP = 32; // steps that are asked for again: the row of an evaluation comes later than its step
const MOST = 2500; // points; then the server thins them anew
const EVERY_MS = 3000;
const PANELS = [
  ["Reward", ["train/reward_mean", "reward/mean"]], ["Evaluation", []], ["Response length (tokens)", ["rollout/response_len/mean", "rollout/response_len/max"]],
  ["Entropy (nats)", ["train/entropy_loss"]], ["KL (nats)", ["train/ppo_kl", "train/kl_mu_old_k3", "train/kl_loss"]],
  ["Effective sample size", ["train/ess", "train/ess_theta", "train/ess_sequence"]], ["Staleness (versions)", ["staleness/mean", "staleness/p99", "staleness/max"]],
  ["Trained tokens per second", ["tokens/s"]], ["Step time (s)", ["perf/step_time", "perf/wait_time", "perf/train_time"]],
  ["Goodput (share)", ["goodput/share", "goodput/attainable"]],
];
const held = { steps: [], columns: {} };
const plots = new Map(); // title -> {plot, names}
const group = uPlot.sync("steps");
let [chartGrid, pick, axis, asked, drawnShape] = [null, null, null, 0, ""];

function buildCurves(root) {
  axis = el("select", { id: "curves-x", on: { change: drawAll } }, el("option", { value: "step" }, "steps"), el("option", { value: "s" }, "seconds"));
  pick = el("select", { id: "curves-more", on: { change: drawAll } }, el("option", { value: "" }, "none"));
  chartGrid = el("div", { class: "charts" });
  root.append(el("div", { class: "bar" }, el("label", { for: "curves-x" }, "Against"), axis, el("label", { for: "curves-more" }, "One more column"), pick,
    el("span", { class: "quiet hint" }, "Drag: zoom. Double click: all. In a chart, ← and → move the cursor.")), chartGrid);
  new ResizeObserver(() => plots.forEach(({ plot }) => fit(plot))).observe(chartGrid);
}

const fit = (plot) => plot.setSize({ width: Math.max(200, plot.root.parentElement.clientWidth), height: 190 });

/** Replace the newest rows of what is held by those of an answer. */
function merge(answer) {
  const keep = answer.after === undefined ? 0 : held.steps.filter((step) => step <= answer.after).length;
  const old = held.steps.length;
  held.steps = [...held.steps.slice(0, keep), ...answer.steps];
  for (const name of new Set([...Object.keys(held.columns), ...Object.keys(answer.columns)])) {
    const before = held.columns[name]?.slice(0, keep) ?? Array(Math.min(keep, old)).fill(null);
    held.columns[name] = [...before, ...(answer.columns[name] ?? Array(answer.steps.length).fill(null))];
  }
}

async function fetchMetrics() {
  const last = held.steps.at(-1);
  const after = last === undefined || held.steps.length > MOST ? undefined : last - OVERLAP;
  const before = JSON.stringify([held.steps.length, last]);
  merge({ ...await ask("metrics", { after: after ?? "" }), after });
  const [tokens, time] = [held.columns["train/trained_tokens"], held.columns["perf/step_time"]];
  if (tokens && time) held.columns["tokens/s"] = tokens.map((one, i) => (one === null || !time[i] ? null : one / time[i]));
  if (JSON.stringify([held.steps.length, held.steps.at(-1)]) !== before || !plots.size) drawAll();
}

/** Seconds since the first start: `wall_s` begins anew with each resume. */
function seconds() {
  let [offset, last] = [0, 0];
  return (held.columns.wall_s ?? []).map((one) => {
    if (one !== null && one < last) offset += last;
    last = one ?? last;
    return offset + last;
  });
}

function evaluations() {
  return Object.keys(held.columns).filter((name) => name.startsWith("eval/") && held.columns[`${name}-ci_low`] && !/@/.test(name));
}

function drawAll() {
  const names = Object.keys(held.columns).sort();
  if (pick.options.length !== names.length + 1) {
    const chosen = pick.value;
    pick.replaceChildren(el("option", { value: "" }, "none"), ...names.map((name) => el("option", { value: name }, name)));
    pick.value = chosen;
  }
  const wanted = PANELS.map(([title, columns]) => [title, title === "Evaluation" ? evaluations() : columns.filter((name) => held.columns[name])]);
  if (pick.value) wanted.unshift([pick.value, [pick.value]]);
  const x = axis.value === "s" ? seconds() : held.steps;
  const shape = JSON.stringify([wanted, axis.value, document.documentElement.dataset.theme, colour("ink")]);
  if (shape === drawnShape && plots.size) return plots.forEach(({ plot, columns }) => plot.setData(dataOf(columns, x), !zoomed(plot)));
  drawnShape = shape;
  for (const { plot } of plots.values()) plot.destroy();
  plots.clear();
  chartGrid.replaceChildren(...wanted.filter(([, columns]) => columns.length).map(([title]) => chartBox(title)));
  if (!chartGrid.children.length) chartGrid.append(el("p", { class: "quiet" }, "No step was trained yet."));
  let i = 0;
  for (const [title, columns] of wanted) if (columns.length) chart(chartGrid.children[i++], title, columns, x);
}

const zoomed = ({ scales, data }) => scales.x.min > data[0][0] || scales.x.max < data[0].at(-1);

/** What a chart shows: x, then each column with the ends of its interval. */
function dataOf(columns, x) {
  const ends = (name) => ["", "-ci_high", "-ci_low"].map((end) => held.columns[name + end]).filter(Boolean);
  return [x, ...columns.flatMap(ends)];
}

function chartBox(title) {
  const move = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const plot = plots.get(title)?.plot;
    if (!by || !plot) return;
    event.preventDefault();
    const to = Math.max(0, Math.min(held.steps.length - 1, (plot.cursor.idx ?? (by < 0 ? held.steps.length : -1)) + by));
    plot.setCursor({ left: plot.valToPos(plot.data[0][to], "x"), top: 20 });
  };
  return el("figure", { class: "card chart", tabindex: 0, role: "img", on: { keydown: move } }, el("figcaption", {}, title));
}

function chart(parent, title, columns, x) {
  const [ink, line] = [colour("muted"), colour("line")];
  const series = [{ label: axis.value === "s" ? "time" : "step", value: (_, one) => (axis.value === "s" ? duration(one) : number(one)) }];
  const bands = [];
  columns.forEach((name, i) => {
    const stroke = colour(i ? `c${i % 6}` : "accent");
    const few = held.columns[name].filter((one) => one !== null).length < 40;
    series.push({ label: name.split("/").slice(title === "Evaluation" ? 1 : 0).join("/"), stroke, width: 1.5, spanGaps: true, points: { show: few, size: 4, fill: stroke },
      dash: [[], [6, 3], [2, 3]][i % 3], value: (_, one) => number(one) });
    if (!held.columns[`${name}-ci_low`]) return;
    for (const end of ["high", "low"]) {
      series.push({ label: `${end} end (95%)`, stroke, width: 0.4, spanGaps: true, points: { show: false }, value: (_, one) => number(one) });
    }
    bands.push({ series: [series.length - 2, series.length - 1], fill: stroke.replace("rgb(", "rgba(").replace(")", ", 0.16)") });
  });
  const side = { stroke: ink, font: "11px system-ui", grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  const values = (_, ticks) => ticks.map(axis.value === "s" ? duration : number);
  const plot = new uPlot({
    width: Math.max(200, parent.clientWidth - 16), height: 190, scales: { x: { time: false } }, series, bands, legend: { live: true },
    axes: [{ ...side, size: 28, values }, { ...side, size: 52, values: (_, ticks) => ticks.map(number) }],
    cursor: { sync: { key: group.key, setSeries: false }, y: false, points: { size: 6 } },
  }, dataOf(columns, x), parent.appendChild(el("div", {})));
  plot.root.setAttribute("aria-hidden", "true"); // the words for it stand at the figure
  plots.set(title, { plot, columns });
  const words = columns.map((name) => {
    const known = held.columns[name].filter((one) => one !== null);
    return `${name}: first ${number(known[0])}, last ${number(known.at(-1))}`;
  });
  parent.setAttribute("aria-label", `${title}. ${words.join(". ")}`);
}

export const curves = {
  name: "curves",
  title: "Curves",
  build: buildCurves,
  show() {
    asked = 0;
  },
  async tick() {
    if (Date.now() - asked < EVERY_MS || (isReport && plots.size)) return;
    await fetchMetrics();
    asked = Date.now();
  },
  repaint() {
    if (plots.size) drawAll();
  },
};
