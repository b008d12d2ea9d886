// kept.js - what the model kept of a conversation: its tokens, coloured and marked, for one
// head, a layer, or all of them; a map of the heads; the memory that all of it takes.
// docs/serve.md has the fields of what the server says.

import { memoryChart, number } from "./memory.js";

const LEVELS = 8; // classes l0 to l7
const PAGE = 4000; // tokens shown at once; the rest is a button away
const PLACES = ["window", "salient", "folded", "gone"];

function element(name, className, ...children) {
  const e = document.createElement(name);
  if (className) e.className = className;
  e.append(...children);
  return e;
}

const decode = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

// ---- What the server said, in a form to look things up in ----------------------------

class Kept {
  constructor(still) {
    this.still = still;
    this.held = still.held;
    this.tokens = still.tokens.map(readable);
    this.heads = still.heads.map((h) => {
      const mask = decode(h.mask), rank = decode(h.rank);
      const scores = new Int16Array(this.held).fill(-1); // -1: no score
      const salient = (i) => (mask[i >> 3] >> (i & 7)) & 1;
      const withWindow = rank.length > h.salient;
      for (let i = 0, r = 0; i < this.held && r < rank.length; i++)
        if (salient(i) || (withWindow && i >= this.held - h.window)) scores[i] = rank[r++];
      return { ...h, salient_at: salient, scores };
    });
    this.layers = [...new Set(this.heads.map((h) => h.layer))];
  }

  place(h, i) {
    if (i >= this.held - h.window) return 0;
    if (h.salient_at(i)) return 1;
    return h.gone ? 3 : 2;
  }

  chosen(layer, head) {
    return this.heads.filter((h) =>
      (layer === "" || h.layer === +layer) && (head === "" || h.head === +head));
  }

  // For token i among some heads: how many have it in each place, and its mean rank, 0..1.
  among(heads, i) {
    const count = [0, 0, 0, 0];
    let rank = 0, ranked = 0;
    for (const h of heads) {
      count[this.place(h, i)]++;
      if (h.scores[i] >= 0) {
        rank += h.scores[i] / 255;
        ranked++;
      }
    }
    return { count, exact: (count[0] + count[1]) / heads.length,
      rank: ranked ? rank / ranked : null };
  }
}

// A piece as text that can be seen; bytes that are no character come as bytes:\xe2\x80.
function readable(piece) {
  if (/^bytes:(\\x[0-9a-f]{2})+$/.test(piece))
    return { text: `⟨${piece.slice(6).replaceAll("\\x", " ").trim()}⟩`, special: true };
  return { text: piece, special: /^<\|?[^<>\s]+\|?>$/.test(piece) };
}

// ---- Marks ----------------------------------------------------------------------------

const level = (x) => Math.min(LEVELS - 1, Math.floor(x * LEVELS));

// The place that most tells about a token: of several heads, the best one.
function mark(count) {
  const all = count[0] + count[1] + count[2] + count[3];
  if (count[0] === all) return "window";
  if (count[1]) return "salient";
  if (count[0]) return "window";
  return count[2] ? "folded" : "gone";
}

function describe(kept, heads, i) {
  const { count, rank } = kept.among(heads, i);
  const name = JSON.stringify(kept.tokens[i].text);
  if (heads.length === 1) {
    const score = rank === null ? "" : `, score above ${Math.round(rank * 100)}% of this head's others`;
    return `Token ${i + 1}, ${name}: ${PLACES[count.indexOf(1)]}${score}`;
  }
  const parts = PLACES.map((p, k) => count[k] ? `${p} in ${count[k]}` : "").filter(Boolean);
  const score = rank === null ? "" : `; mean rank of its scores ${Math.round(rank * 100)}%`;
  return `Token ${i + 1}, ${name}: ${parts.join(", ")} of ${heads.length} heads${score}`;
}

// ---- The view ---------------------------------------------------------------------------

class View {
  constructor(still) {
    this.kept = new Kept(still);
    this.from = Math.max(0, this.kept.tokens.length - PAGE);
    this.at = -1; // token that is looked at
    this.root = element("div", "kept");
    this.build();
    this.paint();
  }

  build() {
    const { chart, says } = memoryChart(this.kept.still.memory, this.kept.held);
    this.layer = this.picker("Layer", [["", "all layers"],
      ...this.kept.layers.map((l) => [l, `layer ${l}`])]);
    const most = Math.max(...this.kept.heads.map((h) => h.head)) + 1;
    this.head = this.picker("Head", [["", "all heads"],
      ...Array.from({ length: most }, (_, h) => [h, `head ${h}`])]);
    this.colour = this.picker("Colour by", [["share", "share of heads"], ["rank", "score"]]);
    this.layer.select.addEventListener("change", () => this.pick());
    this.head.select.addEventListener("change", () => this.pick());
    this.colour.select.addEventListener("change", () => this.paint());
    this.legend = element("p", "legend");
    this.earlier = element("button", "link");
    this.earlier.type = "button";
    this.earlier.addEventListener("click", () => this.showEarlier());
    this.text = element("div", "tokens");
    this.text.tabIndex = 0;
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", "Tokens; the arrow keys go from one to the next");
    this.told = element("p", "told", "Point at a token, or use the arrow keys, to see which heads have it.");
    this.told.setAttribute("aria-live", "polite");
    this.buildMap();
    const figure = element("figure", "memory", element("h4", "", "Memory"), chart,
      element("figcaption", "", says));
    this.root.append(
      element("div", "overview", figure,
        element("figure", "heads", element("h4", "", "Heads"), this.map, this.mapSays)),
      element("div", "pickers", this.layer.label, this.head.label, this.colour.label),
      this.legend, this.earlier, this.text, this.told);
    this.listen();
  }

  picker(name, options) {
    const select = element("select", "");
    for (const [value, text] of options) {
      const o = element("option", "", text);
      o.value = value;
      select.append(o);
    }
    return { select, label: element("label", "", element("span", "", name), select) };
  }

  // A column a layer, a row a head; one cell each.
  buildMap() {
    this.map = element("div", "map");
    this.map.setAttribute("aria-hidden", "true"); // the pickers do the same
    this.cells = this.kept.heads.map((h, k) => {
      const cell = element("span", "cell");
      cell.style.setProperty("grid-column", this.kept.layers.indexOf(h.layer) + 1);
      cell.style.setProperty("grid-row", h.head + 1);
      cell.dataset.head = k;
      cell.title = `layer ${h.layer}, head ${h.head}: ${number(h.window + h.salient)} of ` +
        `${number(this.kept.held)} tokens exact`;
      this.map.append(cell);
      return cell;
    });
    this.mapSays = element("figcaption", "");
  }

  listen() {
    const tokenOf = (e) => e.target.dataset?.i === undefined ? -1 : +e.target.dataset.i;
    this.text.addEventListener("pointerover", (e) => this.look(tokenOf(e)));
    this.text.addEventListener("click", (e) => this.look(tokenOf(e)));
    this.text.addEventListener("pointerleave", () => this.look(-1));
    this.text.addEventListener("blur", () => this.look(-1));
    this.text.addEventListener("keydown", (e) => {
      const last = this.kept.held - 1;
      const to = { ArrowRight: this.at + 1, ArrowLeft: this.at < 0 ? last : this.at - 1,
        Home: this.from, End: last }[e.key];
      if (to === undefined || e.altKey || e.ctrlKey || e.metaKey) return;
      e.preventDefault();
      this.look(Math.min(last, Math.max(this.from, to)), true);
    });
    this.map.addEventListener("click", (e) => {
      const h = this.kept.heads[e.target.dataset.head];
      if (!h) return;
      this.layer.select.value = h.layer;
      this.head.select.value = h.head;
      this.pick();
    });
  }

  // A head is coloured by score, several by how many of them have a token.
  pick() {
    const one = this.layer.select.value !== "" && this.head.select.value !== "";
    this.colour.select.value = one ? "rank" : "share";
    this.paint();
  }

  showEarlier() {
    this.from = Math.max(0, this.from - PAGE);
    this.paint();
  }

  paint() {
    const { kept } = this;
    this.chosen = kept.chosen(this.layer.select.value, this.head.select.value);
    if (!this.chosen.length) { // a layer with fewer heads
      this.head.select.value = "";
      this.chosen = kept.chosen(this.layer.select.value, "");
    }
    const byRank = this.colour.select.value === "rank";
    const total = [0, 0, 0, 0];
    const spans = [];
    for (let i = this.from; i < kept.tokens.length; i++) {
      const t = kept.tokens[i];
      const span = element("span", t.special ? "t special" : "t", t.text);
      if (i < kept.held) {
        const { count, exact, rank } = kept.among(this.chosen, i);
        const x = byRank ? rank : exact;
        span.dataset.i = i;
        span.classList.add(mark(count));
        // Tokens of the window are exact anyway; their colour would say nothing of a choice.
        if (x !== null && (byRank || count[1])) span.classList.add(`l${level(x)}`);
      } else {
        span.classList.add("unread");
        span.title = "written, not read yet";
      }
      spans.push(span);
    }
    for (const h of this.chosen) PLACES.forEach((p, k) => { total[k] += h[p]; });
    this.text.replaceChildren(...spans);
    this.earlier.hidden = this.from === 0;
    this.earlier.textContent = `Show ${number(Math.min(PAGE, this.from))} earlier tokens`;
    this.paintLegend(total, byRank);
    this.look(-1);
  }

  paintLegend(total, byRank) {
    const words = ["window: the last tokens, exact", "salient: kept exact", "folded into the state",
      "gone"];
    const scale = element("span", "scale");
    for (let l = 0; l < LEVELS; l++) scale.append(element("i", `l${l}`));
    this.legend.replaceChildren(...words.map((w, k) => total[k] === 0 ? "" :
      element("span", "key", element("i", `t ${PLACES[k]}`, "ab"),
        ` ${w} (${number(total[k] / this.chosen.length)}${this.chosen.length > 1 ? " a head" : ""})`)),
    element("span", "key", scale, byRank ? " low to high score" : " few to all heads"));
  }

  look(i, reveal) {
    const { kept } = this;
    if (i >= kept.held) i = -1;
    this.text.querySelector(".at")?.classList.remove("at");
    this.at = i;
    const mapMost = Math.max(...kept.heads.map((h) => h.window + h.salient), 1);
    kept.heads.forEach((h, k) => {
      const x = i < 0 ? (h.window + h.salient) / mapMost : [1, 0.75, 0, 0][kept.place(h, i)];
      this.cells[k].className = `cell l${level(x)}${this.chosen.includes(h) ? " chosen" : ""}`;
    });
    this.mapSays.textContent = i < 0
      ? "Heads by how many tokens they have exact; a column is a layer."
      : "Heads that have this token exact.";
    if (i < 0) return;
    const span = this.text.querySelector(`[data-i="${i}"]`);
    span?.classList.add("at");
    if (reveal) span?.scrollIntoView({ block: "nearest" });
    this.told.textContent = describe(kept, this.chosen, i);
  }
}

export function keptView(still) {
  return new View(still).root;
}
