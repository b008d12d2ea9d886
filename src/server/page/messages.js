// messages.js - a message on the page: its text, what can be done with it, and beneath an
// answer its figures and what the model kept.

import { keptView } from "./kept.js";
import { markdown } from "./markdown.js";
import { bytes, number } from "./memory.js";
import { readKept } from "./store.js";

export function element(name, className, ...children) {
  const e = document.createElement(name);
  if (className) e.className = className;
  e.append(...children);
  return e;
}

export function button(text, className, act, label) {
  const b = element("button", className, text);
  b.type = "button";
  if (label) b.setAttribute("aria-label", label);
  b.addEventListener("click", act);
  return b;
}

// ---- Copying ----------------------------------------------------------------------------

async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", "unseen"); // pages that did not come over TLS
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("not allowed");
  return undefined;
}

function copyButton(text, className) {
  const b = button("Copy", className, async () => {
    try {
      await copyText(text());
      b.textContent = "Copied";
    } catch {
      b.textContent = "Not allowed";
    }
    setTimeout(() => { b.textContent = "Copy"; }, 1500);
  });
  return b;
}

// ---- What is beneath an answer ------------------------------------------------------------

function memoryBar(stats) {
  const { memory } = stats;
  const most = Math.max(memory.softmax, memory.used);
  const bar = (className, n, name) => {
    const fill = element("i", className);
    fill.style.setProperty("width", `${Math.max(2, 100 * n / most)}%`);
    return element("span", "bar", element("span", "bar-name", name),
      element("span", "bar-line", fill), element("span", "bar-bytes", bytes(n)));
  };
  const bars = element("div", "bars", bar("own", memory.used, "memory now"),
    bar("softmax", memory.softmax, "softmax would take"));
  bars.setAttribute("role", "img");
  bars.setAttribute("aria-label", `Memory now ${bytes(memory.used)}; softmax would take ` +
    `${bytes(memory.softmax)} at ${number(stats.held)} tokens`);
  return bars;
}

function figures(stats) {
  const parts = [];
  if (stats.made) parts.push(`${number(stats.made)} tokens`);
  if (stats.perSecond) parts.push(`${stats.perSecond.toFixed(stats.perSecond < 10 ? 1 : 0)} tokens/s`);
  if (stats.first) parts.push(`first after ${stats.first.toFixed(2)} s`);
  if (stats.cached) parts.push(`${number(stats.cached)} of ${number(stats.prompt)} prompt tokens remembered`);
  else if (stats.prompt) parts.push(`${number(stats.prompt)} prompt tokens`);
  return element("p", "figures", parts.join(" · "));
}

let panels = 0;

function keptToggle(m, foot) {
  let panel = null;
  const toggle = button("What it kept", "action toggle", async () => {
    const open = toggle.getAttribute("aria-expanded") !== "true";
    toggle.setAttribute("aria-expanded", open);
    if (open && !panel) {
      const still = m.still ?? await readKept(m.id);
      panel = still ? keptView(still)
        : element("p", "note", "What the model kept was not stored. Ask again to see it.");
      panel.id = toggle.getAttribute("aria-controls");
      foot.append(panel);
    }
    if (panel) panel.hidden = !open;
  });
  toggle.setAttribute("aria-expanded", "false");
  toggle.setAttribute("aria-controls", `kept-${panels++}`);
  return toggle;
}

function answerFoot(m, on) {
  const foot = element("div", "foot");
  const actions = element("div", "actions", copyButton(() => m.content, "action"),
    button("Answer again", "action", () => on.retry(m)));
  foot.append(actions);
  if (m.error) foot.prepend(element("p", "error", m.error));
  else if (m.stopped) foot.prepend(element("p", "note", "Stopped."));
  else if (!m.finish) foot.prepend(element("p", "note", "It was interrupted."));
  if (m.finish === "length") foot.prepend(element("p", "note", "It reached its most tokens."));
  if (m.stats) {
    actions.append(figures(m.stats));
    if (m.stats.memory) {
      foot.append(memoryBar(m.stats));
      actions.append(keptToggle(m, foot));
    }
  }
  return foot;
}

// ---- Messages -------------------------------------------------------------------------------

function answerItem(m, on) {
  const item = element("li", "message assistant");
  const body = element("div", "body");
  item.append(element("h3", "unseen", "Answer"), body);
  const show = () => {
    body.replaceChildren(markdown(m.content, (text) => copyButton(text, "action")));
    if (m.running) {
      const end = element("span", m.content ? "caret" : "caret waiting");
      (body.lastElementChild?.matches("p") ? body.lastElementChild : body).append(end);
    }
  };
  const finish = () => {
    show();
    item.setAttribute("aria-busy", "false");
    item.querySelector(".foot")?.remove();
    item.append(answerFoot(m, on));
  };
  item.setAttribute("aria-busy", m.running ? "true" : "false");
  if (m.running) show();
  else finish();
  return { item, show, finish };
}

function userItem(m, on) {
  const item = element("li", "message user");
  const body = element("div", "body plain", m.content);
  const edit = button("Edit", "action", () => begin());
  const actions = element("div", "actions", copyButton(() => m.content, "action"), edit);
  item.append(element("h3", "unseen", "You"), body, actions);
  function begin() {
    const area = element("textarea", "edit-box");
    area.value = m.content;
    area.rows = Math.min(12, m.content.split("\n").length + 1);
    area.setAttribute("aria-label", "Edit the message");
    const end = () => {
      form.replaceWith(body);
      actions.hidden = false;
      edit.focus();
    };
    const save = () => area.value.trim() && on.edit(m, area.value.trim());
    const form = element("div", "edit", area, element("div", "actions",
      button("Send", "action strong", save), button("Cancel", "action", end)));
    area.addEventListener("keydown", (e) => {
      if (e.key === "Escape") {
        e.stopPropagation();
        end();
      } else if (e.key === "Enter" && !e.shiftKey && !e.isComposing) {
        e.preventDefault();
        save();
      }
    });
    body.replaceWith(form);
    actions.hidden = true;
    area.focus();
  }
  return { item, begin };
}

// on: {edit(message, text), retry(message)}. An answer has show() while it is written and
// finish(); a question has begin(), which edits it.
export function messageItem(m, on) {
  return m.role === "assistant" ? answerItem(m, on) : userItem(m, on);
}
