// The stages of a run as a picture: boxes in the order of the streams, the queue before each, and the bottleneck.

import { number, percent, rate, svg } from "./text.js";

const BOX = { width: 176, height: 104 };
const GAP = { x: 66, y: 54 };
const LOW = 34; // height of a box without figures
const PAD = { left: 22, top: 16 };
const SHARES = ["busy", "starved", "blocked", "stalled"];

/** The picture, at most `width` pixels wide. */
export function stageGraph(run, width) {
  const names = stageOrder(run);
  const across = Math.max(1, Math.floor((width - 2 * PAD.left + GAP.x) / (BOX.width + GAP.x)));
  const rows = Math.ceil(names.length / across);
  BOX.height = run.stages.some((one) => one.busy !== null) ? 104 : LOW;
  const full = PAD.left * 2 + Math.min(across, names.length) * (BOX.width + GAP.x) - GAP.x;
  const height = PAD.top + rows * (BOX.height + GAP.y);
  const places = new Map(names.map((name, i) => [name, {
    i, row: Math.floor(i / across),
    x: PAD.left + (i % across) * (BOX.width + GAP.x), y: PAD.top + Math.floor(i / across) * (BOX.height + GAP.y),
  }]));
  const known = run.streams.filter((one) => places.has(one.source) && places.has(one.target));
  const stages = new Map(run.stages.map((one) => [one.name, one]));
  const first = (one, i) => known.findIndex((other) => other.name === one.name) === i;
  const waiting = known.filter(first).reduce((sum, one) => sum + one.queued, 0);
  return svg("svg", { class: "graph", role: "img", "aria-label": inWords(run), viewBox: `0 0 ${full} ${height}`, width: full, height },
    svg("defs", {}, svg("marker", { id: "tip", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
      svg("path", { d: "M0 0 8 4 0 8Z", class: "tip" }))),
    known.map((one, i) => arrow(one, places, height - 10, first(one, i) ? waiting : null)),
    names.map((name) => box(name, stages.get(name), places.get(name), run.bottleneck.stage === name)));
}

function inWords(run) {
  const waits = new Map(run.streams.map((one) => [one.target, one.queued]));
  const stages = run.stages.filter((one) => one.busy !== null).map((one) => `${one.name}: ${one.replicas} replicas, busy ${percent(one.busy)}, `
    + `${number(waits.get(one.name) ?? one.queue)} waiting`);
  return `Stages: ${stageOrder(run).join(", ")}. ${stages.join(". ")}. ${run.bottleneck.why}`;
}

/** Names of all ends of streams, each after its sources; then the stages without streams. */
function stageOrder(run) {
  const left = new Set(["prompts", ...run.streams.flatMap((one) => [one.source, one.target])]
    .filter((name) => run.streams.some((one) => one.source === name || one.target === name)));
  const order = [];
  while (left.size) {
    const free = [...left].find((name) => !run.streams.some((one) => one.target === name && left.has(one.source)));
    const next = free ?? [...left][0]; // a ring: begin where prompts enter
    order.push(next);
    left.delete(next);
  }
  return [...order, ...run.stages.map((one) => one.name).filter((name) => !order.includes(name))];
}

/** `waiting`: messages in all queues, of which the bar shows the share of this one. A stream with several sources has one
 * queue, written at the first; null elsewhere. */
function arrow(stream, places, bottom, waiting) {
  const [from, to] = [places.get(stream.source), places.get(stream.target)];
  const [out, mid] = [from.x + BOX.width, from.y + BOX.height / 2];
  let [path, x, y] = [`M${out} ${mid}H${to.x - 2}`, (out + to.x) / 2, mid];
  const back = to.i <= from.i;
  if (back) {
    const start = from.x + BOX.width / 2;
    const under = to.y + BOX.height + 38;
    const around = under < bottom - 20 ? `H8V${under}` : "";
    path = `M${start} ${from.y + BOX.height}V${bottom}${around}H${to.x + 30}V${to.y + BOX.height + 2}`;
    [x, y] = [start - 40, bottom];
  } else if (to.row !== from.row || to.i !== from.i + 1) {
    const [start, end, low] = [from.x + BOX.width / 2, to.x + BOX.width / 2, from.y + BOX.height + 20];
    path = `M${start} ${from.y + BOX.height}V${low}H${end}V${to.y - 2}`;
    [x, y] = start === end ? [start + 44, low + 4] : [(start + end) / 2, low];
  }
  const known = waiting !== null && stream.queued !== null;
  const share = waiting ? stream.queued / waiting : 0;
  return svg("g", { class: back ? "stream back" : "stream" },
    svg("title", {}, `${stream.name}: ${number(stream.queued)} wait, ${number(stream.leased)} in work`),
    svg("path", { d: path, "marker-end": "url(#tip)" }),
    known ? svg("text", { x, y: y - 8, "text-anchor": "middle" }, rate(stream.queued)) : null,
    known ? svg("rect", { x: x - 20, y: y + 6, width: 40, height: 5, class: "room" }) : null,
    known ? svg("rect", { x: x - 20, y: y + 6, width: 40 * share, height: 5, class: share > 0.5 ? "full" : "fill" }) : null);
}

function box(name, stage, place, slowest) {
  const text = (x, y, words, kind) => svg("text", { x, y, class: kind ?? null }, words);
  const right = BOX.width - 10;
  const group = svg("g", { class: slowest ? "stage slowest" : "stage", transform: `translate(${place.x} ${place.y})` },
    svg("rect", { width: BOX.width, height: BOX.height, rx: 6, class: "frame" }), text(10, 21, name, "title"));
  if (slowest) group.append(text(10, -4, "bottleneck", "mark"));
  if (!stage) return group;
  if (stage.busy === null) {
    group.append(text(right, 21, `×${stage.replicas}`, "end"));
    return group;
  }
  let x = 10;
  const shares = SHARES.map((share) => {
    const wide = Math.max(0, Math.min(stage[share], 1)) * (BOX.width - 20);
    x += wide;
    return svg("rect", { x: x - wide, y: 51, width: wide, height: 9, class: share });
  });
  const second = SHARES.slice(1).reduce((a, b) => (stage[b] > stage[a] ? b : a));
  const bad = stage.failures ? `${number(stage.failures)} failed` : stage.restarts ? `${number(stage.restarts)} restarted` : "";
  group.append(
    text(right, 21, `×${stage.replicas}`, "end"),
    text(10, 41, `${rate(stage.items_per_s)} items/s`, "small"),
    text(right, 41, stage.tokens_per_s ? `${rate(stage.tokens_per_s)} tok/s` : "", "small end"),
    svg("rect", { x: 10, y: 51, width: BOX.width - 20, height: 9, class: "room" }), ...shares,
    text(10, 77, `busy ${percent(stage.busy)}`, "small"),
    text(right, 77, stage[second] > 0.005 ? `${second} ${percent(stage[second])}` : "", "small end"),
    text(10, 95, `${stage.queue ? `${number(stage.queue)} wait, ` : ""}${number(stage.in_flight)} in work`, "small quiet"), text(right, 95, bad, "small bad end"));
  return group;
}
