// memory.js - the bytes of a conversation: a line of words, and a drawing of what this
// method and softmax attention take as the text gets longer.

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes, text) {
  const e = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
  if (text !== undefined) e.textContent = text;
  return e;
}

export function bytes(n) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let i = 0;
  while (n >= 1000 && i < units.length - 1) {
    n /= 1000;
    i++;
  }
  return `${i && n < 99.95 ? n.toFixed(1) : Math.round(n)} ${units[i]}`;
}

export const number = (n) => Math.round(n).toLocaleString("en");

// {bytes, used, softmax, context}, and the tokens held.
export function memoryChart(memory, held) {
  const perToken = memory.softmax / Math.max(held, 1);
  const W = 320, H = 132, left = 8, right = 312, top = 26, bottom = 108;
  const most = Math.max(8192, 2 * held);
  const high = Math.max(perToken * most, memory.bytes) * 1.02;
  const x = (tokens) => left + (right - left) * tokens / most;
  const y = (n) => bottom - (bottom - top) * n / high;
  const fixed = memory.bytes < perToken * memory.context * 0.999;
  const says = fixed
    ? `At ${number(held)} tokens this conversation fills ${bytes(memory.used)} of ` +
      `${bytes(memory.bytes)}, which never grow; softmax attention would take ` +
      `${bytes(memory.softmax)}, and ${bytes(perToken * most)} at ${number(most)} tokens.`
    : `At ${number(held)} tokens this conversation fills ${bytes(memory.used)}.`;
  const s = svg("svg", { viewBox: `0 0 ${W} ${H}`, class: "chart", role: "img" });
  s.append(svg("title", {}, says));
  s.append(svg("line", { x1: left, x2: right, y1: bottom, y2: bottom, class: "axis" }));
  s.append(svg("line", { x1: x(held), x2: x(held), y1: top - 6, y2: bottom, class: "now" }));
  s.append(svg("line", { x1: x(0), y1: y(0), x2: x(most), y2: y(perToken * most),
    class: "softmax" }));
  s.append(svg("circle", { cx: x(held), cy: y(memory.softmax), r: 3.5, class: "softmax-dot" }));
  if (fixed) {
    s.append(svg("line", { x1: x(0), y1: y(memory.bytes), x2: x(most), y2: y(memory.bytes),
      class: "own" }));
    s.append(svg("circle", { cx: x(held), cy: y(memory.used), r: 3.5, class: "own-dot" }));
    s.append(svg("text", { x: right, y: y(memory.bytes) - 5, class: "own-text",
      "text-anchor": "end" }, `this model ${bytes(memory.bytes)}`));
  }
  s.append(svg("text", { x: right, y: top - 8, class: "softmax-text", "text-anchor": "end" },
    `softmax ${bytes(perToken * most)}`));
  const middle = x(held) > right - 60 ? "end" : x(held) < left + 60 ? "start" : "middle";
  s.append(svg("text", { x: x(held), y: bottom + 15, "text-anchor": middle },
    `now, ${number(held)}`));
  if (x(held) < right - 130)
    s.append(svg("text", { x: right, y: bottom + 15, "text-anchor": "end" },
      `${number(most)} tokens`));
  return { chart: s, says };
}
