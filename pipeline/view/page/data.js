// Where the documents come from: embedded in the page (a report), or fetched from the server with the token.

import { visible } from "./text.js";

const TOKEN = "sluice-token";
const embedded = document.getElementById("documents");
const documents = embedded ? JSON.parse(embedded.textContent) : null;

export const isReport = documents !== null;

let token = "";

/** Take the token out of the address, so that it stands neither there nor in the history. */
export function readToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  try {
    if (given) sessionStorage.setItem(TOKEN, given);
    token = given || sessionStorage.getItem(TOKEN) || "";
  } catch {
    token = given || ""; // storage is off: until the page is loaded again
  }
  if (given) history.replaceState(null, "", "#run");
}

/** One document. Raises Error with a sentence for people. */
export async function ask(name, parameters = {}) {
  if (isReport) return fromReport(name, parameters);
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null);
  const query = new URLSearchParams(given).toString();
  return answer(`api/${name}${query ? `?${query}` : ""}`, {});
}

export async function steer(command, values) {
  const body = JSON.stringify({ command, arguments: values });
  return answer("api/steer", { method: "POST", headers: { "Content-Type": "application/json" }, body });
}

async function answer(path, options) {
  let response;
  try {
    const headers = { ...options.headers, Authorization: `Bearer ${token}` };
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch {
    throw new Error("The server of this page does not answer. Start it again: python launch.py view RUN");
  }
  if (response.status === 401) throw new Error("This page has no valid token. Open the address that the command printed.");
  const text = await response.text();
  if (!response.ok) throw new Error(`The server refuses: ${visible(reasonIn(text).slice(0, 500))}`);
  return JSON.parse(text);
}

function reasonIn(text) {
  try {
    return String(JSON.parse(text).error);
  } catch {
    return text;
  }
}

function fromReport(name, parameters) {
  if (name === "rollout") {
    const found = (documents.rollout ?? {})[parameters.key];
    if (!found) throw new Error("The tokens of this rollout are not in the report. See them with: python launch.py view RUN");
    return found;
  }
  const found = documents[name];
  if (name === "rollouts" && found) {
    const rows = found.rows.filter((row) => chosen(row, parameters));
    return { ...found, rows: rows.slice(parameters.offset, parameters.offset + parameters.limit), total: rows.length };
  }
  if (name === "logs" && found) {
    return { ...found, lines: found.lines.filter((line) => holds(line.text, parameters.text)) };
  }
  return found ?? { steps: [], columns: {}, rows: [], total: 0, read: 0, lines: [], lanes: [], cut: 0 };
}

/** Do what may fail for want of the server, and tell why above the views. Returns whether it was done. */
export async function attempt(action) {
  let text = "";
  try {
    await action();
  } catch (error) {
    text = error.message;
  }
  const place = document.getElementById("trouble");
  if (place.textContent !== text) place.textContent = text;
  place.hidden = !text;
  return !text;
}

const holds = (text, part) => !part || text.toLowerCase().includes(part.toLowerCase());

function chosen(row, wanted) {
  const same = (name) => wanted[name] === "" || String(row[name]) === String(wanted[name]);
  return same("outcome") && same("step") && same("group") && within(row.reward, wanted.reward)
    && row.tokens >= Number(wanted.min_tokens || 0) && holds(`${row.prompt}\n${row.text}`, wanted.text);
}

/** Whether a reward is in a bound such as >0.5, <=0 or 1. */
function within(reward, bound) {
  const found = /^\s*(>=|<=|>|<|==?)?\s*(-?[\d.]+)\s*$/.exec(bound);
  if (!found) return true;
  if (reward === null) return false;
  const value = Number(found[2]);
  return { ">": reward > value, ">=": reward >= value, "<": reward < value, "<=": reward <= value }[found[1]]
    ?? reward === value;
}
