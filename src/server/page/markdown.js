// markdown.js - the Markdown that models write, as DOM nodes: fenced code, lists, headings,
// quotes, bold, italic, code. Text only ever becomes text nodes, so nothing in it can be
// HTML; links stay text.

function element(name, className, ...children) {
  const e = document.createElement(name);
  if (className) e.className = className;
  e.append(...children);
  return e;
}

// ---- Inside a line ------------------------------------------------------------------

const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|\*(?=[^\s*])([^*]*?[^\s*])\*(?!\*)/;

function inline(parent, text, depth = 0) {
  while (text) {
    const m = depth < 4 ? INLINE.exec(text) : null;
    if (!m) {
      parent.append(text);
      return;
    }
    if (m.index) parent.append(text.slice(0, m.index));
    if (m[1]) {
      parent.append(element("code", "", m[2]));
    } else {
      const e = element(m[3] !== undefined ? "strong" : "em", "");
      inline(e, m[3] ?? m[4], depth + 1);
      parent.append(e);
    }
    text = text.slice(m.index + m[0].length);
  }
}

// ---- Blocks ---------------------------------------------------------------------------

const FENCE = /^\s{0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const HEADING = /^#{1,6}\s+(.*?)\s*#*$/;

function codeBlock(lines, at, fence, out, copy) {
  const text = [];
  let end = at + 1;
  for (; end < lines.length; end++) {
    const t = lines[end].trim();
    if (t.startsWith(fence[1]) && t.replaceAll(fence[1][0], "") === "") break;
    text.push(lines[end]);
  }
  const code = element("code", "", text.join("\n"));
  const head = element("div", "code-head", element("span", "", fence[2] || "text"));
  if (copy) head.append(copy(() => code.textContent));
  out.append(element("figure", "code", head, element("pre", "", code)));
  return end + 1;
}

// Items at one depth; deeper ones are lists inside the item before.
function list(lines, at, out) {
  const first = ITEM.exec(lines[at]);
  const depth = first[1].length, ordered = /\d/.test(first[2]);
  const l = element(ordered ? "ol" : "ul", "");
  if (ordered && parseInt(first[2], 10) !== 1) l.start = parseInt(first[2], 10);
  let item = null;
  while (at < lines.length) {
    const m = ITEM.exec(lines[at]);
    if (m && m[1].length > depth + 1 && item) {
      at = list(lines, at, item);
    } else if (m && m[1].length >= depth && /\d/.test(m[2]) === ordered) {
      item = element("li", "");
      inline(item, m[3]);
      l.append(item);
      at++;
    } else if (!m && item && lines[at].trim() && /^\s{2,}/.test(lines[at])) {
      item.append(" ");
      inline(item, lines[at].trim());
      at++;
    } else if (!m && !lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) {
      at++;
    } else {
      break;
    }
  }
  out.append(l);
  return at;
}

function begins(line) {
  return FENCE.test(line) || ITEM.test(line) || HEADING.test(line) || /^\s*>/.test(line);
}

// copy: makes a button that copies what a function gives; may be null.
export function markdown(text, copy) {
  const out = document.createDocumentFragment();
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    const fence = FENCE.exec(line), heading = HEADING.exec(line);
    if (!line.trim()) {
      at++;
    } else if (fence) {
      at = codeBlock(lines, at, fence, out, copy);
    } else if (heading) {
      const h = element("p", "heading");
      inline(h, heading[1]);
      out.append(h);
      at++;
    } else if (ITEM.test(line)) {
      at = list(lines, at, out);
    } else if (/^\s*>/.test(line)) {
      const quote = [];
      for (; at < lines.length && /^\s*>/.test(lines[at]); at++)
        quote.push(lines[at].replace(/^\s*>\s?/, ""));
      const q = element("blockquote", "");
      inline(q, quote.join("\n"));
      out.append(q);
    } else {
      const p = [line];
      for (at++; at < lines.length && lines[at].trim() && !begins(lines[at]); at++)
        p.push(lines[at]);
      const e = element("p", "");
      inline(e, p.join("\n"));
      out.append(e);
    }
  }
  return out;
}
