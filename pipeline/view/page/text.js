// Elements, texts and numbers. Everything that a run or a model wrote reaches the page as text: `el` and `visible`.

// Characters that hide, reorder or command: C0 and C1 controls, marks of direction, invisible and tag characters.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]|\p{Surrogate}/gu;
const FIRST_CHARS = 20_000;

/** The text with each hidden character as ⟨U+202E⟩. Line feeds and tabs stay. */
export function visible(text) {
  return text.replace(HIDDEN, (one) => `⟨U+${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** An element. `attributes`: `on` {event: listener}, `style` {property: value}, else attributes; false and null are left out. */
export function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, visible(String(value)));
  }
  for (const child of children.flat(2)) {
    if (child instanceof Node) node.append(child);
    else if (child !== null && child !== undefined && child !== false) node.append(visible(String(child)));
  }
  return node;
}

const drawn = new WeakMap();

/** Draw `node` anew with what `make(value)` returns, if the value is another than last time. */
export function redraw(node, value, make) {
  const key = JSON.stringify(value);
  if (drawn.get(node) === key) return;
  drawn.set(node, key);
  node.replaceChildren(...[make(value)].flat().filter((one) => one instanceof Node));
}

/** A table. `columns`: [title, cell of a row, "number" or nothing]. */
export function table(caption, columns, rows, empty) {
  if (!rows.length) return el("p", { class: "quiet" }, empty);
  const cell = (tag, kind, content) => el(tag, { class: kind ?? null, scope: tag === "th" ? "col" : null }, content);
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el("table", {},
      el("thead", {}, el("tr", {}, columns.map(([title, , kind]) => cell("th", kind, title)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, columns.map(([, get, kind]) => cell("td", kind, get(row))))))));
}

/** Long text, cut, with a button for more. */
export function longText(text, kind) {
  const block = el("pre", { class: kind ?? null });
  const box = el("div", {}, block);
  let shown = 0;
  const more = el("button", { type: "button", class: "more", on: { click: () => grow(10 * FIRST_CHARS) } });
  const grow = (characters) => {
    let end = Math.min(text.length, shown + characters);
    if (end < text.length && /[\udc00-\udfff]/.test(text[end])) end += 1; // not between the halves of a character
    block.append(visible(text.slice(shown, end)));
    shown = end;
    more.textContent = `Show more (${number(text.length - shown)} characters left)`;
    if (shown >= text.length) more.remove();
    else box.append(more);
  };
  grow(FIRST_CHARS);
  return box;
}

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value)) return size < 1e7 ? value.toLocaleString("en-US") : value.toExponential(3);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(3)));
}

export function rate(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  return value >= 1e4 ? `${(value / 1e3).toFixed(1)}k` : number(value >= 100 ? Math.round(value) : value);
}

export function percent(value) {
  if (value === null || value === undefined) return "–";
  if (value > 0 && value < 0.0005) return "<0.1%";
  return `${(100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0)}%`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds);
  const two = (value) => String(value).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)];
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

export function clock(unix) {
  return unix === null || unix === undefined ? "–" : new Date(unix * 1000).toLocaleTimeString("en-GB");
}

let probe = null;

/** The present value of a colour of view.css, as canvas takes it. */
export function colour(name) {
  probe ??= document.body.appendChild(el("i", { hidden: "" }));
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}
