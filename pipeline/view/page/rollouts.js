// The rollouts that the run wrote down: a list with filters, and one of them with its tokens and its group.

import { ask, attempt, isReport } from "./data.js";
import { clock, el, longText, number, percent } from "./text.js";
import { tokenView } from "./tokens.js";

const PAGE = 100;
const FIELDS = [
  ["outcome", "Outcome", ["", "trained", "filtered", "stale", "failed", "discarded"]], ["step", "Step", "number"], ["group", "Group", "number"],
  ["reward", "Reward", "search", ">0.5"], ["text", "Text", "search", "in prompt or answer"], ["min_tokens", "Tokens, at least", "number"],
];
const inputs = {};
const pageState = { offset: 0, key: "", wanted: 0, begun: -1, done: -1, asked: 0 };
let [rows, detail, count, split] = [null, null, null, null];

function buildRollouts(root) {
  const submit = (event) => {
    event.preventDefault();
    const given = Object.entries(inputs).map(([name, input]) => [name, input.value.trim()]).filter(([, value]) => value);
    pageState.offset = 0;
    goTo(Object.fromEntries(given));
    attempt(list);
  };
  const form = el("form", { class: "bar", role: "search", "aria-label": "Filters", on: { submit } });
  for (const [name, title, kind, placeholder] of FIELDS) {
    const id = `rollouts-${name}`;
    const attributes = { id, name, placeholder: placeholder ?? null };
    inputs[name] = Array.isArray(kind) ? el("select", attributes, kind.map((value) => el("option", { value }, value || "any")))
      : el("input", { ...attributes, type: kind, min: kind === "number" ? 0 : null });
    form.append(el("span", { class: "field" }, el("label", { for: id }, title), inputs[name]));
  }
  form.append(el("button", { type: "submit", class: "primary" }, "Filter"),
    el("button", { type: "button", on: { click: () => { goTo({}); } } }, "Clear"));
  rows = el("div", { class: "rows" });
  count = el("p", { class: "quiet", role: "status" });
  detail = el("article", { class: "detail", tabindex: -1, "aria-label": "One rollout" });
  split = el("div", { class: "split" }, el("div", {}, count, rows), detail);
  root.append(form, split);
}

const goTo = (values) => { location.hash = `#rollouts?${new URLSearchParams(values)}`; };

function linkTo(row, words) {
  const query = new URLSearchParams({ ...Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, input.value]).filter(([, v]) => v)), key: row.key });
  return el("a", { href: `#rollouts?${query}`, "aria-current": row.key === pageState.key ? "true" : null }, words);
}

async function list() {
  const wanted = Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, input.value.trim()]));
  const mine = pageState.asked += 1;
  const found = await ask("rollouts", { ...wanted, offset: pageState.offset, limit: PAGE });
  if (mine !== pageState.asked) return;
  count.textContent = found.total ? `${number(pageState.offset + 1)} to ${number(pageState.offset + found.rows.length)} of ${number(found.total)}, `
    + `newest first, of ${number(found.read)} that were written down` : `None of ${number(found.read)} that were written down.`;
  const head = ["step", "group", "outcome", "reward", "tokens", "versions", "prompt and answer"];
  const turn = (text, by, able) => el("button", { type: "button", disabled: able ? null : "", on: { click: () => { pageState.offset += by; attempt(list); } } }, text);
  rows.replaceChildren(
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Rollouts" }, el("table", {},
      el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, found.rows.map(rowOf)))),
    el("p", { class: "buttons" }, turn("Newer", -PAGE, pageState.offset > 0), turn("Older", PAGE, pageState.offset + found.rows.length < found.total)));
}

function rowOf(row) {
  return el("tr", { class: row.key === pageState.key ? "chosen" : null },
    el("td", { class: "number" }, number(row.step)), el("td", {}, linkTo(row, nameOf(row))),
    el("td", {}, el("span", { class: `chip ${row.outcome}` }, row.outcome), row.detail ? el("small", {}, ` ${row.detail}`) : null),
    el("td", { class: "number" }, number(row.reward)), el("td", { class: "number" }, number(row.tokens)), el("td", { class: "number" }, between(row.versions)),
    el("td", { class: "cut" }, el("span", { class: "quiet" }, row.prompt.slice(-80)), ` ${row.text.slice(0, 200)}`));
}

const nameOf = (row) => `${row.group}.${row.index}${row.sequence ? `/${row.sequence}` : ""}`;
const between = (versions) => (!versions ? "–" : versions[0] === versions[1] ? `${versions[0]}` : `${versions[0]}–${versions[1]}`);

async function open(key) {
  let found;
  try {
    found = await ask("rollout", { key });
  } catch (error) {
    detail.replaceChildren(el("p", { class: "bad" }, error.message));
    return;
  }
  if (key !== pageState.key) return;
  const { row } = found;
  const self = { ...row, key, tokens: row.response_tokens, text: row.turns.map((turn) => turn.text).join(" ") };
  const whole = [...found.siblings.filter((one) => one.key !== key), self].sort((a, b) => a.index - b.index || a.sequence - b.sequence);
  const copy = el("button", { type: "button", on: { click: () => copyCase(row, copied) } }, "Copy as a test case");
  const copied = el("span", { class: "quiet", role: "status" });
  detail.replaceChildren(
    el("h2", {}, `Group ${row.group}, rollout ${row.index}${row.sequence ? `, sequence ${row.sequence}` : ""} `, el("span", { class: `chip ${row.outcome}` }, row.outcome)),
    el("p", {}, reason(row)), row.error ? el("p", { class: "bad" }, row.error) : "",
    el("dl", { class: "pairs" }, pairs(row, found, whole).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    el("p", { class: "buttons" }, copy, copied), el("h3", {}, "Prompt"), longText(row.prompt, "prompt"), el("h3", {}, "Turns"),
    ...row.turns.map((turn) => el("div", { class: `turn ${turn.role}` }, el("p", { class: "quiet" },
      `${turn.role}, ${number(turn.tokens)} tokens${turn.reward === null || turn.reward === undefined ? "" : `, reward ${number(turn.reward)}`}`), longText(turn.text))),
    el("h3", {}, "Tokens"), tokenView(found.tokens, found.published), el("h3", {}, "The whole group"), siblings(whole));
  detail.focus({ preventScroll: true });
  if (matchMedia("(max-width: 1100px)").matches) detail.scrollIntoView();
}

function reason(row) {
  if (row.outcome === "trained") return `Trained in step ${row.step}.`;
  return `Not trained: ${row.outcome}${row.detail ? ` (${row.detail})` : ""}, after step ${row.step}.`;
}

function pairs(row, found, whole) {
  const versions = [...new Set((row.versions ?? []).map(([version]) => version).filter((version) => version >= 0))];
  const when = (version) => (found.published?.[version] ? ` at ${clock(found.published[version])}` : "");
  const good = whole.filter((one) => one.reward > 0).length;
  return [
    ["reward", number(row.reward)], ["status", row.status], ["label", row.label ?? "–"], ["tokens", `${number(row.prompt_tokens)} + ${number(row.response_tokens)}`],
    ["published", versions.map((version) => `version ${version}${when(version)}`).join(", ") || "–"],
    ["group", `${number(whole.length)} rollouts, ${percent(good / whole.length)} above 0`],
  ];
}

function siblings(found) {
  const one = (row) => el("li", { class: row.key === pageState.key ? "chosen" : null }, linkTo(row, nameOf(row)), el("b", {}, number(row.reward)),
    el("span", { class: "quiet" }, `${number(row.tokens)} tokens`), el("span", { class: "cut" }, row.text.slice(0, 300)));
  return el("ul", { class: "siblings" }, found.map(one));
}

async function copyCase(row, told) {
  const text = JSON.stringify({ prompt: row.prompt, label: row.label, response: row.turns.map((turn) => turn.text).join(""), turns: row.turns,
    reward: row.reward, status: row.status, ids: row.ids, prompt_tokens: row.prompt_tokens, loss_mask: row.loss_mask }, null, 1);
  try {
    await navigator.clipboard.writeText(text);
    told.textContent = "Copied.";
  } catch {
    told.textContent = "The browser refuses the clipboard; copy it from here:";
    told.after(longText(text));
  }
}

export const rollouts = {
  name: "rollouts",
  title: "Rollouts",
  build: buildRollouts,
  show(parameters) {
    const { key = "", ...filters } = parameters;
    const other = Object.entries(inputs).some(([name, input]) => input.value !== (filters[name] ?? ""));
    for (const [name, input] of Object.entries(inputs)) input.value = filters[name] ?? "";
    if (other) pageState.offset = 0;
    Object.assign(pageState, { key, wanted: pageState.wanted + 1 });
    split.classList.toggle("both", Boolean(key));
    if (!key) detail.replaceChildren(el("p", { class: "quiet" }, isReport ? "Choose a rollout; the report holds some of them whole." : "Choose a rollout."));
  },
  async tick() {
    const now = pageState.wanted; // it may be another one after the answer
    if (now === pageState.done || now === pageState.begun) return; // drawn twice, the focus would be lost
    pageState.begun = now;
    try {
      await list();
      if (pageState.key) await open(pageState.key);
      pageState.done = now;
    } finally {
      if (pageState.begun === now) pageState.begun = -1; // after an error: the next tick tries again
    }
  },
};
