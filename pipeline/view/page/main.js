// The frame: tabs, routes in the hash, the header, colours, and the clock that polls.
//
// A view is {name, title, build(root), show(parameters), tick(run), repaint()}. Each import is one
// line without aliases, so that a report can join the modules in one script. The id of a panel is not its
// route: else the browser would move the focus there.

import { curves } from "./charts.js";
import { ask, attempt, isReport, readToken } from "./data.js";
import { lanes } from "./lanes.js";
import { logs } from "./logs.js";
import { overview } from "./overview.js";
import { rollouts } from "./rollouts.js";
import { steering } from "./steer.js";
import { duration, el, number, visible } from "./text.js";

const VIEWS = [overview, lanes, curves, rollouts, logs, steering];
const THEMES = { auto: ["Auto", "Colours: as the system"], light: ["Light", "Colours: light"], dark: ["Dark", "Colours: dark"] };
const POLL_MS = 1000;
const at = (id) => document.getElementById(id);
let current = null;
let newest = null;

function buildTabs() {
  for (const view of VIEWS) {
    const id = `tab-${view.name}`;
    const pick = () => { location.hash = `#${view.name}`; };
    at("tabs").append(el("button",
      { role: "tab", id, type: "button", "aria-controls": `view-${view.name}`, tabindex: -1, on: { click: pick } }, view.title));
    const panel = el("section", { role: "tabpanel", id: `view-${view.name}`, "aria-labelledby": id, class: view.name, hidden: "" });
    at("views").append(panel);
    view.build(panel);
  }
  at("tab-steer").hidden = true;
  at("tabs").addEventListener("keydown", (event) => {
    const tabs = [...at("tabs").children].filter((tab) => !tab.hidden);
    const here = tabs.indexOf(document.activeElement);
    const to = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: -1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const tab = tabs.at(to % tabs.length);
    tab.focus();
    tab.click();
  });
}

function route() {
  if (location.hash.includes("token=")) readToken();
  const [name, query] = location.hash.slice(1).split("?");
  const next = VIEWS.find((view) => view.name === name && !at(`tab-${name}`).hidden) ?? overview;
  for (const view of VIEWS) {
    const open = view === next;
    at(`view-${view.name}`).hidden = !open;
    at(`tab-${view.name}`).setAttribute("aria-selected", String(open));
    at(`tab-${view.name}`).tabIndex = open ? 0 : -1;
  }
  current = next;
  attempt(() => next.show(Object.fromEntries(new URLSearchParams(query ?? ""))));
  if (newest) attempt(() => next.tick(newest));
}

function header(run) {
  at("name").textContent = document.title = visible(run.name);
  at("name").title = visible(run.run);
  at("state").textContent = run.state;
  at("state").dataset.state = run.state;
  at("progress").hidden = !run.total_steps;
  at("progress").value = run.total_steps ? run.step / run.total_steps : 0;
  const eta = run.eta_s === null ? "" : `, ETA ${duration(run.eta_s)}`;
  at("figures").textContent = `step ${number(run.step)}${run.total_steps ? ` / ${number(run.total_steps)}` : ""}, `
    + `${duration(run.elapsed_s)}${eta}`;
  at("link").textContent = isReport ? "report" : run.live ? "live" : "ended";
  at("tab-steer").hidden = isReport || !run.may_steer || !run.live;
}

async function poll() {
  if (document.hidden) return;
  const done = await attempt(async () => {
    const first = newest === null;
    newest = await ask("run");
    header(newest);
    if (first && location.hash.startsWith("#steer")) route();
    await current.tick(newest);
  });
  if (!done) at("link").textContent = "no answer";
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  at("theme").textContent = THEMES[name][0];
  at("theme").setAttribute("aria-label", THEMES[name][1]);
  try {
    localStorage.setItem("sluice-theme", name);
  } catch { /* storage is off: until the page is loaded again */ }
  for (const view of VIEWS) view.repaint?.();
}

function savedTheme() {
  try {
    return Object.keys(THEMES).find((name) => name === localStorage.getItem("sluice-theme")) ?? "auto";
  } catch {
    return "auto";
  }
}

async function start() {
  readToken();
  buildTabs();
  theme(savedTheme());
  at("theme").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    theme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => VIEWS.forEach((view) => view.repaint?.()));
  addEventListener("hashchange", route);
  route();
  await poll();
  while (!isReport) {
    await new Promise((done) => setTimeout(done, POLL_MS));
    await poll();
  }
}

start();
