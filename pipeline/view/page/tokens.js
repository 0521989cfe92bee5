// The tokens of one rollout, coloured by a column, with the values of one token in words.

import { clock, el, number, visible } from "./text.js";

const FIRST_TOKENS = 4000;
const STEPS = 3; // shades on each side of the neutral value
const COLUMNS = {
  version: { title: "version of the weights" },
  trained: { title: "trained" },
  ratio: { title: "ratio", neutral: 1, get: (token) => token.ratio },
  advantage: { title: "advantage", neutral: 0, get: (token) => token.advantage },
  difference: { title: "log-prob, trainer less engine", neutral: 0, get: difference },
};

function difference(token) {
  return token.log_prob === null || token.train_log_prob === null ? null : token.train_log_prob - token.log_prob;
}

/** Choice of the column, legend, tokens, and the line that tells about one of them. */
export function tokenView(tokens, published) {
  const known = Object.keys(COLUMNS).filter((name) => !COLUMNS[name].get || tokens.some((token) => COLUMNS[name].get(token) !== null));
  const pick = el("select", { id: "tokens-column", on: { change: () => paintTokens() } },
    known.map((name) => el("option", { value: name }, COLUMNS[name].title)));
  const facts = el("p", { class: "facts-line", role: "status" }, "Point at a token, or focus the text and use ← and →.");
  const legend = el("p", { class: "legend" });
  const text = el("div", { class: "tokens", role: "group", "aria-label": "Tokens" });
  const box = el("div", {}, el("div", { class: "bar" }, el("label", { for: "tokens-column" }, "Colours:"), pick, legend), facts, text);
  const more = el("button", { type: "button", class: "more", on: { click: () => grow() } });
  const tell = (node) => { facts.textContent = node ? inWordsOf(tokens[Number(node.dataset.i)], published) : ""; };
  let shown = 0;
  const grow = () => {
    const next = tokens.slice(shown, shown + FIRST_TOKENS).map((token, i) => el("span", { "data-i": shown + i, tabindex: shown + i ? -1 : 0 }, written(token)));
    text.append(...next);
    shown += next.length;
    more.textContent = `Show more (${number(tokens.length - shown)} tokens left)`;
    if (shown < tokens.length) box.append(more);
    else more.remove();
    paintTokens();
  };
  const paintTokens = () => {
    const { classOf, parts } = scheme(pick.value, tokens, published);
    [...text.children].forEach((node, i) => { node.className = classOf(tokens[i]); });
    legend.replaceChildren(...parts.flatMap(([kind, words]) => [el("i", { class: `swatch ${kind}` }), `${words} `]));
  };
  text.addEventListener("pointerover", (event) => tell(event.target.closest("[data-i]")));
  text.addEventListener("focusin", (event) => tell(event.target.closest("[data-i]")));
  text.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    const to = by && text.children[Math.max(0, Math.min(shown - 1, Number(event.target.dataset.i) + by))];
    if (!to) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  });
  grow();
  return box;
}

const written = (token) => (token.text ? token.text.replaceAll("\n", "↵\n") : `⟨${token.id}⟩`);

/** The class of each token's colour, and the legend as [class, words]. */
function scheme(column, tokens, published) {
  const { neutral, get } = COLUMNS[column];
  if (column === "version") {
    const counts = new Map();
    for (const token of tokens) counts.set(token.version, (counts.get(token.version) ?? 0) + 1);
    const name = (version) => (version === null || version < 0 ? "vn" : `v${version % 6}`);
    const words = (version, count) => (version === null || version < 0 ? `not by the model (${count})` : `version ${version} (${count})${at(published, version)}`);
    return { classOf: (token) => name(token.version), parts: [...counts].map(([version, count]) => [name(version), words(version, count)]) };
  }
  if (column === "trained") {
    return { classOf: (token) => (token.trained ? "v0" : "vn"), parts: [["v0", "trained"], ["vn", "not trained"]] };
  }
  const most = tokens.reduce((sum, token) => Math.max(sum, Math.abs((get(token) ?? neutral) - neutral)), 0) || 1;
  const shade = (value) => {
    if (value === null) return "vn";
    const level = Math.min(STEPS, Math.round((STEPS * Math.abs(value - neutral)) / most));
    return level ? `${value > neutral ? "up" : "down"}${level}` : "mid";
  };
  const parts = [-3, -2, -1, 0, 1, 2, 3].map((level) => [shade(neutral + (level * most) / STEPS), number(neutral + (level * most) / STEPS)]);
  return { classOf: (token) => shade(get(token)), parts: [...parts, ["vn", "unknown"]] };
}

const at = (published, version) => (published?.[version] ? `, published ${clock(published[version])}` : "");

function inWordsOf(token, published) {
  const version = token.version === null || token.version < 0 ? "not made by the model" : `version ${token.version}${at(published, token.version)}`;
  const values = [["log-prob", token.log_prob], ["of the trainer", token.train_log_prob], ["ratio", token.ratio], ["advantage", token.advantage]];
  return `“${visible(token.text ?? "").replaceAll("\n", "↵")}” (id ${token.id}): ${version}, ${token.trained ? "trained" : "not trained"}`
    + values.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => `, ${name} ${number(value)}`).join("");
}
