// Changes of the running run. Each is confirmed in a dialog that says what will happen, and its answer is shown.

import { steer } from "./data.js";
import { clock, el, redraw } from "./text.js";

const KEYS = ["lr", "max_staleness", "rollout_temperature", "rollout_top_p", "dynamic_sampling_filter"];
const desk = {};

function buildSteering(root) {
  desk.advice = el("div", {});
  desk.stage = el("select", { id: "steer-stage" });
  desk.count = el("input", { id: "steer-count", type: "number", min: 1, value: 1 });
  desk.key = el("select", { id: "steer-key" }, KEYS.map((key) => el("option", { value: key }, key)));
  desk.value = el("input", { id: "steer-value", type: "text", placeholder: "5e-6" });
  desk.replica = el("input", { id: "steer-replica", type: "text", placeholder: "reward-0" });
  desk.kill = panel("Kill a replica", row("Replica", desk.replica), action("Kill", () => confirm("kill", { replica: desk.replica.value },
    `End the process of ${desk.replica.value} at once, as kill -9 does, to see that the run goes on without losing a group.`), "danger"));
  desk.step = el("select", { id: "steer-step" });
  desk.back = panel("Go back", row("Checkpoint of step", desk.step), action("Roll back", () => confirm("rollback", { step: Number(desk.step.value) },
    `Go on with model and optimizer of the checkpoint of step ${desk.step.value}. Its weights become the next version, and nothing that was sampled before is trained any more.`), "danger"));
  desk.answers = el("ol", { class: "answers", role: "log", "aria-label": "Answers" });
  root.append(
    panel("Advice", desk.advice),
    panel("Replicas", row("Stage", desk.stage), row("Replicas", desk.count), action("Scale", () => scale({ [desk.stage.value]: Number(desk.count.value) }))),
    panel("Setting", row("Setting", desk.key), row("Value", desk.value), action("Set", () => confirm("set", { [desk.key.value]: desk.value.value },
      `Set ${desk.key.value} to ${desk.value.value}. It holds from the next step, and for a resumed run.`))),
    panel("Run", action("Pause", () => confirm("pause", {}, "Admit no new group. Groups in flight are finished.")),
      action("Resume", () => confirm("resume", {}, "Admit new groups again.")),
      action("Save", () => confirm("save", {}, "Write a checkpoint after the step in training.")),
      action("Drain", () => confirm("drain", {}, "Finish the groups in flight and end the run, as Ctrl-C does."), "danger")),
    desk.back, desk.kill, panel("Answers", desk.answers));
}

const panel = (title, ...content) => el("section", { class: "card", "aria-label": title }, el("h2", {}, title), el("div", { class: "bar" }, content));
const row = (title, input) => el("span", { class: "field" }, el("label", { for: input.id }, title), input);
const action = (title, listener, kind) => el("button", { type: "button", class: kind ?? "primary", on: { click: listener } }, title);

function scale(counts) {
  const words = Object.entries(counts).map(([name, to]) => `${name} to ${to}`).join(", ");
  confirm("scale", counts, `Bring ${words} replicas. Fewer finish what they hold first.`);
}

function confirm(command, values, words) {
  const dialog = document.getElementById("dialog");
  document.getElementById("dialog-title").textContent = `${command[0].toUpperCase()}${command.slice(1)}?`;
  redraw(document.getElementById("dialog-body"), words, () => el("p", {}, words));
  document.getElementById("dialog-yes").className = ["kill", "drain", "rollback"].includes(command) ? "danger" : "primary";
  dialog.returnValue = "no";
  dialog.onclose = () => {
    if (dialog.returnValue === "yes") send(command, values);
  };
  dialog.showModal();
}

async function send(command, values) {
  const failed = (error) => ({ ok: false, lines: [error.message] });
  const { ok, lines } = await steer(command, values).catch(failed);
  desk.answers.prepend(el("li", { class: ok ? null : "bad" }, `${clock(Date.now() / 1000)} ${command}: ${ok ? "" : "refused: "}${lines.join("; ")}`));
}

function advice(text) {
  const found = /(\w+) \d+ -> (\d+)/.exec(text);
  if (!text) return el("p", { class: "quiet" }, "None yet.");
  return [el("p", {}, text), found ? action(`Scale ${found[1]} to ${found[2]}`, () => scale({ [found[1]]: Number(found[2]) })) : el("span", {})];
}

export const steering = {
  name: "steer",
  title: "Steer",
  build: buildSteering,
  show() {},
  tick(run) {
    redraw(desk.advice, run.advice, advice);
    desk.kill.hidden = !(run.settings["debug.fault_inject"] ?? "").length; // else the run refuses it
    desk.back.hidden = !run.checkpoints.length;
    const chosen = Number(desk.step.value); // stays chosen when a newer one is written
    redraw(desk.step, run.checkpoints, () => run.checkpoints.map((step) => el("option", { value: step, selected: step === chosen ? "" : null }, step)));
    const names = [...run.stages.map((one) => one.name), ...(run.engines.length ? ["engine"] : [])];
    redraw(desk.stage, names, () => names.map((name) => el("option", { value: name }, name)));
  },
};
