// store.js - what the browser keeps: settings and conversations in localStorage, a key for
// each conversation, so that two windows do not overwrite each other's; what the model
// kept, which is large, in IndexedDB, a record for each answer.

const CHAT = "still.chat.";
const SETTINGS = "still.settings";

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (b) => b.toString(16).padStart(2, "0")).join("");
}

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null; // damaged, or storage is switched off
  }
}

// ---- Settings ---------------------------------------------------------------------

const DEFAULTS = {
  system: "", temperature: null, topP: null, maxTokens: null, kept: true, key: "",
};

export function readSettings() {
  return { ...DEFAULTS, ...read(SETTINGS) };
}

export function writeSettings(settings) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch { /* they last as long as the page */ }
}

// ---- Conversations ----------------------------------------------------------------

// {id, changed, title, messages: [{id, role, content, stats, stopped, error}]}
export function newChat() {
  return { id: newId(), changed: Date.now(), title: "", messages: [] };
}

function sound(chat) {
  return chat && typeof chat.id === "string" && Array.isArray(chat.messages) &&
    chat.messages.every((m) => m && typeof m.role === "string" && typeof m.content === "string");
}

// All of them, the last changed first.
export function readChats() {
  const chats = [];
  try {
    for (let i = 0; i < localStorage.length; i++) {
      const key = localStorage.key(i);
      if (!key.startsWith(CHAT)) continue;
      const chat = read(key);
      if (sound(chat)) chats.push(chat);
    }
  } catch { /* storage is switched off */ }
  return chats.sort((a, b) => b.changed - a.changed);
}

export function readChat(id) {
  const chat = read(CHAT + id);
  return sound(chat) ? chat : null;
}

// False: there is no room, or storage is switched off.
export function writeChat(chat) {
  try {
    localStorage.setItem(CHAT + chat.id, JSON.stringify(chat));
    return true;
  } catch {
    return false;
  }
}

export function removeChat(chat) {
  localStorage.removeItem(CHAT + chat.id);
  for (const m of chat.messages) removeKept(m.id);
}

export function onChange(call) {
  window.addEventListener("storage", (e) => {
    if (e.key === null || e.key.startsWith(CHAT)) call();
  });
}

// ---- What the model kept -----------------------------------------------------------

let database = null;

function open() {
  database ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("still", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("kept");
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return database;
}

async function withStore(mode, use) {
  try {
    const db = await open();
    return await new Promise((resolve, reject) => {
      const request = use(db.transaction("kept", mode).objectStore("kept"));
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(request.error);
    });
  } catch {
    return undefined; // it is shown while the page is open, and not after
  }
}

export const readKept = (id) => withStore("readonly", (s) => s.get(id));
export const writeKept = (id, kept) => withStore("readwrite", (s) => s.put(kept, id));
export const removeKept = (id) => withStore("readwrite", (s) => s.delete(id));
