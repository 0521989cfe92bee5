// The first view: what goes wrong, how far the run is, where its time goes, and what became of its groups.

import { stageGraph } from "./graph.js";
import { duration, el, number, percent, rate, redraw, table } from "./text.js";

const OUTCOMES = ["trained", "filtered", "stale", "failed", "discarded", "in_flight"];
const LOSSES = {
  tail: "tail: slots empty at the end of a wave", update: "update: weights are changed",
  starvation: "starvation: engines had no prompts", trainer: "trainer: the staleness gate was shut",
  stale: "stale: tokens too old to train", variance: "variance: groups with one reward",
};
const parts = {};

function card(name, title, attributes) {
  parts[name] = el("div", { id: `overview-${name}` });
  return el("section", { class: `card ${name}`, "aria-label": title, ...attributes }, title ? el("h2", {}, title) : null, parts[name]);
}

function buildOverview(root) {
  parts.alarms = el("div", { class: "alarms", "aria-live": "assertive", "aria-label": "Alarms", role: "region" });
  root.append(parts.alarms, card("facts", "State"), card("graph", "Stages"),
    el("div", { class: "columns" }, card("goodput", "Goodput: share of the engines' slot time that made trained tokens"),
      card("staleness", "Staleness of trained tokens"), card("engines", "Engines"), card("dropped", "Why groups were dropped"),
      card("changes", "Changed while running"), card("settings", "Settings")));
  new ResizeObserver(() => overview.last && drawGraph(overview.last)).observe(parts.graph);
}

function alarms(run) {
  const found = run.alarms.map((one) => el("div", { class: "alarm" },
    el("strong", {}, one.name), " ", one.text, el("p", {}, el("b", {}, "Cure: "), one.cure)));
  if (run.waits) found.push(el("div", { class: "alarm" }, el("strong", {}, "waits"), " ", run.waits));
  return found.length ? found : el("p", { class: "calm" }, "No alarms.");
}

function facts(run) {
  const fact = (name, value, more) => el("div", { class: "fact" }, el("span", {}, name), el("b", {}, value), more ? el("small", {}, more) : null);
  const { admitted, ...counts } = run.ledger;
  const lost = admitted - OUTCOMES.reduce((sum, name) => sum + counts[name], 0);
  const sum = OUTCOMES.filter((name) => counts[name] || name === "trained" || name === "filtered")
    .map((name) => `${number(counts[name])} ${name.replace("_", " ")}`).join(" + ");
  const rows = [
    el("div", { class: "facts" },
      fact("State", run.state, run.exit_reason === run.state ? "" : run.exit_reason), fact("Step", number(run.step), run.total_steps ? `of ${number(run.total_steps)}` : ""),
      fact("ETA", duration(run.eta_s), `${duration(run.elapsed_s)} so far`), fact("Mode", run.mode, ""),
      fact("Weights", `version ${number(run.version)}`, ""), fact("Bound", number(run.bound), "versions old at most")),
    el("p", { class: lost ? "ledger bad" : "ledger" }, `Groups: ${number(admitted)} admitted = ${sum}, ${number(lost)} lost`),
  ];
  if (run.advice) rows.push(el("p", {}, el("b", {}, "Advice: "), run.advice));
  if (run.checkpoint) rows.push(el("p", { class: "quiet" }, `Newest checkpoint: ${run.checkpoint}`));
  if (run.resume) rows.push(el("p", { class: "quiet" }, "Continue with: ", el("code", {}, run.resume)));
  return rows;
}

function drawGraph(run) {
  const width = Math.max(280, Math.floor(parts.graph.clientWidth));
  const reported = run.stages.some((one) => one.busy !== null);
  redraw(parts.graph, [width, run.stages, run.streams, run.bottleneck], () => [
    el("p", { class: "why" }, run.bottleneck.why), stageGraph(run, width),
    ...(reported ? [legend(["busy", "starved", "blocked", "stalled"]), stageTable(run)] : []),
  ]);
}

function stageTable(run) {
  return table("Stages in numbers", [
    ["stage", (one) => one.name], ["replicas", (one) => number(one.replicas), "number"], ["busy", (one) => percent(one.busy), "number"],
    ["starved", (one) => percent(one.starved), "number"], ["blocked", (one) => percent(one.blocked), "number"],
    ["stalled", (one) => percent(one.stalled), "number"], ["queue", (one) => number(one.queue), "number"],
    ["in work", (one) => number(one.in_flight), "number"], ["items/s", (one) => rate(one.items_per_s), "number"],
    ["tokens/s", (one) => rate(one.tokens_per_s), "number"], ["done", (one) => number(one.items_out), "number"],
    ["failed", (one) => number(one.failures), "number"], ["restarts", (one) => number(one.restarts), "number"],
  ], run.stages, "");
}

const legend = (names) => el("p", { class: "legend" }, names.map((name) => [el("i", { class: `swatch ${name}` }), `${name} `]));

function goodput(run) {
  const { goodput: share, attainable, lost } = run.goodput;
  if (share === null) return el("p", { class: "quiet" }, "Nothing was measured yet.");
  const pieces = [["goodput", share, "goodput: trained tokens"], ...Object.entries(lost)
    .filter(([, value]) => value).map(([name, value]) => [name, value, LOSSES[name] ?? name])];
  const rest = 1 - pieces.reduce((sum, [, value]) => sum + value, 0);
  const words = pieces.map(([, value, title]) => `${title.split(":")[0]} ${percent(value)}`).join(", ");
  const bar = el("div", { class: "stacked", role: "img", "aria-label": `Goodput: ${words}` },
    pieces.map(([name, value]) => el("i", { class: `piece ${name}`, style: { width: `${100 * value}%` } })));
  if (attainable !== null) bar.append(el("i", { class: "attainable", style: { left: `${100 * Math.min(1, attainable)}%` } }));
  const row = (kind, title, value) => el("li", {}, el("i", { class: `swatch ${kind}` }), el("span", {}, title), el("b", {}, percent(value)));
  return [bar, el("ul", { class: "pieces" }, pieces.map(([name, value, title]) => row(name, title, value)),
    rest > 0.005 ? row("rest", "not measured", rest) : null,
    attainable !== null ? row("mark", "attainable by a perfect scheduler with this bound", attainable) : null)];
}

function staleness(run) {
  const all = run.staleness.reduce((sum, [, tokens]) => sum + tokens, 0);
  if (!all) return el("p", { class: "quiet" }, "No token was trained yet.");
  const most = Math.max(...run.staleness.map(([, tokens]) => tokens));
  const bound = run.bound === null ? "There is no bound." : `The bound is ${run.bound}.`;
  const over = (lag) => run.bound !== null && lag > run.bound;
  return [el("ol", { class: "bars" }, run.staleness.map(([lag, tokens]) => el("li", { class: lag === run.bound ? "bound" : over(lag) ? "over" : null },
    el("span", {}, number(lag)), el("i", {}, el("i", { style: { width: `${(100 * tokens) / most}%` } })), el("b", {}, percent(tokens / all)),
    el("small", {}, `${rate(tokens)} tok${lag === run.bound ? ", bound" : ""}`)))),
  el("p", { class: "quiet" }, `Versions between the weights that made a token and those that trained on it. ${bound}`)];
}

function engines(run) {
  return table("Engines", [
    ["engine", (one) => one.name], ["state", (one) => one.state], ["version", (one) => number(one.version), "number"],
    ["running", (one) => number(one.running), "number"], ["waiting", (one) => number(one.waiting), "number"],
    ["limit", (one) => number(one.limit), "number"], ["idle", (one) => percent(one.idle), "number"],
  ], run.engines, "No engine reports.");
}

function dropped(run) {
  return table("Why groups were dropped",
    [["outcome", (one) => one.outcome], ["why", (one) => one.detail || "–"], ["groups", (one) => number(one.groups), "number"]], run.dropped, "None was.");
}

const changes = (run) => table("Changed while running",
  [["step", (one) => number(one.step), "number"], ["what", (one) => one.what], ["value", (one) => one.value]], run.changes, "Nothing was.");

const settings = (run) => table("Settings", [["setting", ([key]) => el("code", {}, key)],
  ["value", ([, value]) => (typeof value === "string" ? value : JSON.stringify(value))]], Object.entries(run.settings), "All are the defaults.");

export const overview = {
  name: "run",
  title: "Overview",
  last: null,
  build: buildOverview,
  show() {},
  tick(run) {
    this.last = run;
    redraw(parts.alarms, [run.alarms, run.waits], () => alarms(run));
    redraw(parts.facts, [run.state, run.exit_reason, run.step, run.total_steps, run.eta_s, run.elapsed_s, run.ledger, run.version, run.advice], () => facts(run));
    drawGraph(run);
    redraw(parts.goodput, run.goodput, () => goodput(run));
    redraw(parts.staleness, [run.staleness, run.bound], () => staleness(run));
    redraw(parts.engines, run.engines, () => engines(run));
    redraw(parts.dropped, run.dropped, () => dropped(run));
    redraw(parts.changes, run.changes, () => changes(run));
    redraw(parts.settings, run.settings, () => settings(run));
  },
};
