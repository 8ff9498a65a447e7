// Elements and words: what the other parts share. Whatever comes from data becomes a text node.

const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

function put(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    const text = String(value);
    if (node.getAttribute(name) !== text) node.setAttribute(name, text);
  }
  return node;
}

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
  return node;
}

function html(tag, attributes = {}, ...inside) {
  const node = put(document.createElement(tag), attributes);
  node.append(...inside);
  return node;
}

function svg(tag, attributes = {}, ...inside) {
  const node = put(document.createElementNS(SVG, tag), attributes);
  node.append(...inside);
  return node;
}

const show = (node, is) => { if (node.hidden === is) node.hidden = !is; };

// Numbers.

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return (value / 1e6).toFixed(size >= 1e7 ? 0 : 1) + "M";
  if (size >= 1e4) return (value / 1e3).toFixed(size >= 1e5 ? 0 : 1) + "k";
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  if (size >= 10) return value.toFixed(1);
  return value.toFixed(2);
}

function milliseconds(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms >= 10000) return (ms / 1000).toFixed(1) + " s";
  if (ms >= 1000) return (ms / 1000).toFixed(2) + " s";
  if (ms >= 100) return ms.toFixed(0) + " ms";
  return ms.toFixed(ms >= 10 ? 1 : 2) + " ms";
}

function speed(gb) {
  if (gb === null || gb === undefined) return "–";
  if (gb >= 1 || gb === 0) return number(gb) + " GB/s";
  return gb >= 0.001 ? number(gb * 1e3) + " MB/s" : number(gb * 1e6) + " kB/s";
}

function span(seconds) {
  if (seconds < 60) return seconds.toFixed(seconds < 10 ? 1 : 0) + " s";
  if (seconds < 3600) return Math.floor(seconds / 60) + " min";
  if (seconds < 172800) return (seconds / 3600).toFixed(1) + " h";
  return Math.floor(seconds / 86400) + " days";
}

const clockTime = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
const short = (text, most) => (text.length > most ? text.slice(0, Math.max(most - 1, 0)) + "…" : text);
const sum = (values) => values.reduce((total, value) => total + (value || 0), 0);
const percent = (kv) => (kv && kv.total ? (100 * kv.used) / kv.total : 0);
const place = (name) => name.slice(name.indexOf(" ") + 1);  // "decode 10.0.0.3:8100" without its role

// The reason without the instance's own name, which stands beside it.
const reasonAlone = (each) =>
  (each.reason.startsWith(each.name) ? each.reason.slice(each.name.length).replace(/^[: ]+/, "") : each.reason);

// How something is: a colour class, an icon and a word, so that no one of them is needed.

const CONDITIONS = {
  ready: { look: "good", word: "ready", mark: "M3.5 7.5 L6 10 L10.5 4.5" },
  suspect: { look: "warn", word: "not answering", mark: "M7 3.5 V8 M7 10.4 V10.5" },
  failing: { look: "warn", word: "paused after faults", mark: "M5 4 V10 M9 4 V10" },
  starting: { look: "busy", word: "starting", mark: "M7 3.5 V7 L9.6 8.6" },
  draining: { look: "idle", word: "draining", mark: "M7 3.5 V10 M4.5 7.6 L7 10 L9.5 7.6" },
  down: { look: "bad", word: "down", mark: "M4.5 4.5 L9.5 9.5 M9.5 4.5 L4.5 9.5" },
  unknown: { look: "idle", word: "not reached yet", mark: "M4.5 7 H9.5" },
};
const conditionOf = (name) => CONDITIONS[name] || CONDITIONS.unknown;

function icon(condition) {
  return dress(svg("svg", { viewBox: "0 0 14 14", width: 14, height: 14, "aria-hidden": "true" },
    svg("circle", { class: "disc", cx: 7, cy: 7, r: 7 }), svg("path", { class: "mark" })), condition);
}

function dress(drawn, condition) {
  put(drawn, { class: "icon " + condition.look });
  put(drawn.lastChild, { d: condition.mark });
  return drawn;
}
