// The lines of all processes in the order of their times, following the end.

import { ask, attempt, isReport } from "./data.js";
import { clock, el } from "./text.js";

const LINES = 5000; // kept in the page
const log = { cursor: "", filter: "", follow: true, done: false };
let [lineList, logFilter] = [null, null];

function buildLogs(root) {
  logFilter = el("input", { id: "logs-text", type: "search", placeholder: "text", on: { change: startOver } });
  const follow = el("input", { id: "logs-follow", type: "checkbox", checked: "", on: { change: () => { log.follow = follow.checked; toEnd(); } } });
  lineList = el("div", { class: "lines", role: "log", tabindex: 0, "aria-label": "Lines of the logs" });
  lineList.addEventListener("scroll", () => {
    log.follow = follow.checked = lineList.scrollTop + lineList.clientHeight > lineList.scrollHeight - 30;
  });
  root.append(el("div", { class: "bar" }, el("label", { for: "logs-text" }, "Lines with"), logFilter,
    el("label", { for: "logs-follow", class: "check" }, follow, "follow the end")), lineList);
}

const toEnd = () => { if (log.follow) lineList.scrollTop = lineList.scrollHeight; };

function startOver() {
  Object.assign(log, { cursor: "", done: false });
  lineList.replaceChildren();
  attempt(more);
}

async function more() {
  if (isReport && log.done) return;
  const text = logFilter.value;
  const found = await ask("logs", { after: log.cursor, text });
  if (text !== logFilter.value) return;
  Object.assign(log, { cursor: found.cursor ?? "", done: true });
  if (!found.lines.length && !lineList.children.length) lineList.append(el("p", { class: "quiet" }, "No lines."));
  else if (found.lines.length) lineList.querySelector("p")?.remove();
  lineList.append(...found.lines.map((line) => el("div", {}, el("time", {}, line.at_s === null ? "" : clock(line.at_s)), el("b", {}, line.process),
    el("span", { class: /error|traceback|fail/i.test(line.text) ? "bad" : null }, line.text))));
  while (lineList.children.length > LINES) lineList.firstChild.remove();
  toEnd();
}

export const logs = { name: "logs", title: "Logs", build: buildLogs, show() {}, tick: more };
