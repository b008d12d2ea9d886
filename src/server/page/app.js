// app.js - the page: conversations, the message box, answers as they are written, settings,
// keys. Text of models and people only ever becomes text nodes.

import { askAnswer, askModel } from "./client.js";
import { button, element, messageItem } from "./messages.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);

let settings = store.readSettings();
let chat = store.newChat();
const runs = new Map(); // of conversations that are being answered: {chat, message, abort}
let items = new Map(); // of the messages on the page

function say(text) {
  $("status").textContent = text;
}

// ---- The list of conversations -------------------------------------------------------------

function titleOf(c) {
  return c.title || "New conversation";
}

function chatItem(c) {
  const open = button(titleOf(c), "chat", () => go(c.id));
  const remove = button("×", "remove", () => {
    if (remove.dataset.sure) {
      forget(c);
      return;
    }
    remove.dataset.sure = "yes";
    remove.textContent = "Delete?";
    remove.setAttribute("aria-label", `Delete ${titleOf(c)} for good`);
  }, `Delete ${titleOf(c)}`);
  remove.addEventListener("blur", () => {
    delete remove.dataset.sure;
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Delete ${titleOf(c)}`);
  });
  if (c.id === chat.id) open.setAttribute("aria-current", "page");
  const item = element("li", runs.has(c.id) ? "running" : "", open, remove);
  return item;
}

function showChats() {
  $("chats").replaceChildren(...store.readChats().map(chatItem));
  $("title").textContent = titleOf(chat);
  document.title = chat.title ? `${chat.title} - still` : "still";
}

function save(c) {
  c.changed = Date.now();
  // What the model kept lies elsewhere.
  const plain = { ...c, messages: c.messages.map(({ still, running, ...m }) => m) };
  if (!store.writeChat(plain)) say("The browser has no room to keep this conversation.");
  showChats();
}

function show(c) {
  chat = c;
  items = new Map();
  for (const m of chat.messages) items.set(m.id, messageItem(m, actions));
  $("messages").replaceChildren(...[...items.values()].map((i) => i.item));
  $("empty").hidden = chat.messages.length > 0;
  showChats();
  showRunning();
  toEnd();
}

function go(id) {
  const c = runs.get(id)?.chat ?? store.readChat(id);
  closeSide();
  if (!c) return;
  location.hash = c.id;
  show(c);
  $("prompt").focus();
}

function startNew() {
  closeSide();
  history.replaceState(null, "", location.pathname);
  show(store.newChat());
  $("prompt").focus();
}

function forget(c) {
  runs.get(c.id)?.abort.abort();
  runs.delete(c.id);
  store.removeChat(c);
  say("Deleted.");
  if (c.id === chat.id) startNew();
  else showChats();
}

function step(by) {
  const all = store.readChats();
  const at = all.findIndex((c) => c.id === chat.id);
  const to = all[at < 0 ? 0 : at + by];
  if (to) go(to.id);
}

// ---- Scrolling --------------------------------------------------------------------------------

const scroller = $("scroll");
const nearEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 80;
function toEnd() {
  scroller.scrollTop = scroller.scrollHeight;
}
scroller.addEventListener("scroll", () => { $("to-end").hidden = nearEnd(); }, { passive: true });
$("to-end").addEventListener("click", toEnd);

// ---- Answers ------------------------------------------------------------------------------------

function showRunning() {
  const running = runs.has(chat.id);
  document.body.classList.toggle("running", running);
  $("send").setAttribute("aria-label", running ? "Stop" : "Send");
  $("send").title = running ? "Stop (Esc)" : "Send (Enter)";
}

function statsOf(result, started, first, last) {
  const { usage, still } = result;
  const made = usage?.completion_tokens ?? 0;
  const seconds = still?.seconds?.decode ?? (last - first) / 1000;
  return {
    made, prompt: usage?.prompt_tokens ?? 0,
    cached: usage?.prompt_tokens_details?.cached_tokens ?? 0,
    first: first ? (first - started) / 1000 : 0,
    perSecond: made > 1 && seconds > 0 ? (made - 1) / seconds : 0,
    held: still?.held ?? 0, memory: still?.memory ?? null,
  };
}

// Fills the last message of c, which is an answer.
async function answer(c) {
  const m = c.messages.at(-1);
  const run = { chat: c, message: m, abort: new AbortController() };
  const started = performance.now();
  let first = 0, last = 0, drawn = true;
  const draw = () => {
    drawn = true;
    if (chat.id !== c.id || !m.running) return;
    const follow = nearEnd();
    items.get(m.id).show();
    if (follow) toEnd();
  };
  m.running = true;
  runs.set(c.id, run);
  if (chat.id === c.id) show(c);
  say("The model is answering.");
  try {
    const result = await askAnswer(settings, c.messages.slice(0, -1), {
      text(part) {
        last = performance.now();
        first ||= last;
        m.content += part;
        if (drawn) requestAnimationFrame(draw);
        drawn = false;
      },
    }, run.abort.signal);
    m.finish = result.finish;
    m.stats = statsOf(result, started, first, last);
    if (result.still) {
      m.still = result.still;
      store.writeKept(m.id, result.still);
    }
    say(`The answer is complete, ${m.stats.made} tokens.`);
  } catch (e) {
    if (run.abort.signal.aborted) {
      m.stopped = true;
      say("Stopped.");
    } else {
      m.error = e.status ? e.message : `The server cannot be reached, or stopped answering: ${e.message}`;
      say(m.error);
      if (e.status === 401) openSettings("This server needs its API key.");
    }
  }
  m.running = false;
  if (runs.get(c.id) !== run) return; // it was deleted
  runs.delete(c.id);
  save(c);
  if (chat.id !== c.id) return;
  const follow = nearEnd();
  items.get(m.id).finish();
  showRunning();
  if (follow) toEnd();
}

function cut(c, from) {
  for (const m of c.messages.splice(from)) store.removeKept(m.id);
}

function ask(c, text) {
  if (runs.has(c.id)) return;
  c.title ||= text.replace(/\s+/g, " ").slice(0, 60);
  c.messages.push({ id: store.newId(), role: "user", content: text });
  c.messages.push({ id: store.newId(), role: "assistant", content: "" });
  history.replaceState(null, "", `#${c.id}`);
  save(c);
  answer(c);
}

const actions = {
  edit(m, text) {
    const at = chat.messages.indexOf(m);
    if (at < 0 || runs.has(chat.id)) return;
    cut(chat, at);
    if (at === 0) chat.title = "";
    ask(chat, text);
    $("prompt").focus();
  },
  retry(m) {
    const at = chat.messages.indexOf(m);
    if (at < 0 || runs.has(chat.id)) return;
    cut(chat, at);
    chat.messages.push({ id: store.newId(), role: "assistant", content: "" });
    save(chat);
    answer(chat);
    $("prompt").focus();
  },
};

function stop() {
  runs.get(chat.id)?.abort.abort();
}

// ---- The message box --------------------------------------------------------------------------

const prompt = $("prompt");

function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, 0.4 * innerHeight)}px`;
}

function submit() {
  const text = prompt.value.trim();
  if (!text) return;
  prompt.value = "";
  fit();
  ask(chat, text);
}

prompt.addEventListener("input", fit);
$("composer").addEventListener("submit", (e) => {
  e.preventDefault();
  if (runs.has(chat.id)) stop();
  else submit();
});
prompt.addEventListener("keydown", (e) => {
  if (e.key === "Enter" && !e.shiftKey && !e.isComposing) {
    e.preventDefault();
    if (!runs.has(chat.id)) submit();
  } else if (e.key === "ArrowUp" && prompt.value === "" && !e.altKey) {
    const mine = chat.messages.filter((m) => m.role === "user").at(-1);
    if (!mine || runs.has(chat.id)) return;
    e.preventDefault();
    items.get(mine.id).begin();
  }
});
$("chips").addEventListener("click", (e) => {
  if (e.target.matches("button")) ask(chat, e.target.textContent);
});

// ---- Settings ------------------------------------------------------------------------------------

function openSettings(note) {
  const put = (id, value) => { $(id).value = value ?? ""; };
  put("set-system", settings.system);
  put("set-temperature", settings.temperature);
  put("set-top-p", settings.topP);
  put("set-max", settings.maxTokens);
  put("set-key", settings.key);
  $("set-kept").checked = settings.kept;
  if (note) $("key-note").textContent = note;
  if (!$("settings").open) $("settings").showModal();
  if (note) $("set-key").focus();
}

$("settings").addEventListener("close", () => {
  const number = (id) => {
    const input = $(id), x = input.valueAsNumber;
    return Number.isFinite(x) ? Math.min(+input.max, Math.max(+input.min, x)) : null;
  };
  settings = {
    system: $("set-system").value, temperature: number("set-temperature"),
    topP: number("set-top-p"), maxTokens: number("set-max"),
    kept: $("set-kept").checked, key: $("set-key").value.trim(),
  };
  store.writeSettings(settings);
  showModel();
});
$("settings-open").addEventListener("click", () => openSettings());

async function showModel() {
  try {
    $("model").textContent = (await askModel(settings)).id;
  } catch (e) {
    $("model").textContent = e.status === 401 ? "needs an API key" : "no server";
  }
}

// ---- The side, on narrow screens -----------------------------------------------------------------

function openSide() {
  document.body.classList.add("side");
  $("scrim").hidden = false;
  $("side-open").setAttribute("aria-expanded", "true");
  $("new").focus();
}
function closeSide() {
  document.body.classList.remove("side");
  $("scrim").hidden = true;
  $("side-open").setAttribute("aria-expanded", "false");
}
$("side-open").addEventListener("click", openSide);
$("side-close").addEventListener("click", () => {
  closeSide();
  $("side-open").focus();
});
$("scrim").addEventListener("click", closeSide);
$("new").addEventListener("click", startNew);

// ---- Keys -------------------------------------------------------------------------------------------

const typing = () => document.activeElement?.matches("input, textarea, select");

const shortcuts = {
  KeyN: startNew,
  ArrowUp: () => step(-1),
  ArrowDown: () => step(1),
  KeyS: () => openSettings(),
  KeyR() {
    const last = chat.messages.at(-1);
    if (last?.role === "assistant") actions.retry(last);
  },
  KeyK() {
    const toggle = [...document.querySelectorAll(".toggle")].at(-1);
    toggle?.click();
    toggle?.focus();
    toggle?.scrollIntoView({ block: "nearest" });
  },
};

document.addEventListener("keydown", (e) => {
  if ($("settings").open) return;
  if (e.key === "Escape") {
    if (document.body.classList.contains("side")) closeSide();
    else stop();
  } else if (e.key === "/" && !typing()) {
    e.preventDefault();
    prompt.focus();
  } else if (e.altKey && !e.ctrlKey && !e.metaKey && shortcuts[e.code]) {
    e.preventDefault();
    shortcuts[e.code]();
  }
});

// ---- Beginning ------------------------------------------------------------------------------------

store.onChange(showChats);
window.addEventListener("pagehide", () => {
  for (const run of runs.values()) save(run.chat); // as far as it got
});
window.addEventListener("hashchange", () => {
  if (location.hash.slice(1) !== chat.id) go(location.hash.slice(1));
});
showModel();
show(store.readChat(location.hash.slice(1)) ?? store.newChat());
prompt.focus();
