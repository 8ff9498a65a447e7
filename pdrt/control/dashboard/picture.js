// The cluster as a picture: clients, router, prefill, decode, and what goes between them.

const MANY = 6;  // more instances than this in a group become a grid
const CARD = { height: 68, gap: 8 };
const CELL = { size: 30, gap: 5 };
const HEAD = 24;  // a group's title
const PAD = 10;
const NARROW = 720;

const isBad = (each) => each.condition !== "ready";

// A group of instances of one role, measured before it is drawn.

class Group {
  constructor(title, role, members) {
    this.title = title;
    this.role = role;
    this.members = members;
    this.isGrid = members.length > MANY;
  }

  measure(width) {
    this.width = width;
    if (this.isGrid) {
      this.perRow = Math.max(1, Math.floor((width - 2 * PAD + CELL.gap) / (CELL.size + CELL.gap)));
      this.rows = Math.ceil(this.members.length / this.perRow);
      this.ill = this.members.filter(isBad).slice(0, 5);
      const lines = this.ill.length + (this.members.filter(isBad).length > 5 ? 1 : 0);
      this.height = HEAD + 34 + this.rows * (CELL.size + CELL.gap) + lines * 18 + PAD;
    } else {
      this.height = HEAD + this.members.length * (CARD.height + CARD.gap) + PAD - CARD.gap;
    }
    return this;
  }

  place(x, y) {
    this.x = x;
    this.y = y;
    this.middle = y + this.height / 2;
    return this;
  }

  cardMiddle(index) {
    return this.y + HEAD + index * (CARD.height + CARD.gap) + CARD.height / 2;
  }

  draw() {
    const ready = this.members.filter((each) => each.condition === "ready").length;
    const parts = [
      svg("rect", { class: "group", x: this.x, y: this.y, width: this.width, height: this.height, rx: 8 }),
      text(this.x + PAD, this.y + 17, this.title, "strong"),
      text(this.x + this.width - PAD, this.y + 17, `${ready} of ${this.members.length} ready`, "soft", "end"),
    ];
    return svg("g", {}, ...parts, ...(this.isGrid ? this.drawGrid() : this.drawCards()));
  }

  drawCards() {
    return this.members.map((each, n) =>
      card(each, this.x + PAD, this.y + HEAD + n * (CARD.height + CARD.gap), this.width - 2 * PAD));
  }

  drawGrid() {
    const left = this.x + PAD, top = this.y + HEAD;
    const kv = this.members.filter((each) => each.kv_blocks && each.kv_blocks.total).map((each) => percent(each.kv_blocks));
    const full = kv.length ? `KV ${Math.round(sum(kv) / kv.length)} % used, at most ${Math.round(Math.max(...kv))} %` : "KV not told";
    const parts = [
      text(left, top + 8, full, "soft"),
      text(left, top + 24, work(this.role, this.members), "soft"),
    ];
    this.members.forEach((each, n) => {
      const x = left + (n % this.perRow) * (CELL.size + CELL.gap);
      const y = top + 34 + Math.floor(n / this.perRow) * (CELL.size + CELL.gap);
      parts.push(cell(each, x, y));
    });
    let y = top + 34 + this.rows * (CELL.size + CELL.gap) + 12;
    const most = Math.floor((this.width - 2 * PAD) / 6.3);
    for (const each of this.ill) {
      const how = conditionOf(each.condition);
      parts.push(text(left, y, short(`${place(each.name)} ${how.word}`, most), how.look));
      y += 18;
    }
    const more = this.members.filter(isBad).length - this.ill.length;
    if (more > 0) parts.push(text(left, y, `and ${more} more, in the table below`, "soft"));
    return parts;
  }
}

function text(x, y, words, look = "", anchor = "start") {
  return svg("text", { x, y, class: look, "text-anchor": anchor }, words);
}

function iconAt(x, y, condition) {
  return put(icon(condition), { x, y });
}

function work(role, members) {
  const total = (name) => sum(members.map((each) => each[name]));
  const rate = total(role === "prefill" ? "prompt_tokens_per_s" : "tokens_per_s");
  return `${number(total("running"))} running · ${number(total("waiting"))} waiting · ${number(rate)} tok/s`;
}

function titleOf(each) {
  const kv = each.kv_blocks ? `KV ${number(each.kv_blocks.used)} of ${number(each.kv_blocks.total)} blocks` : "KV not told";
  const lines = [`${each.name}: ${conditionOf(each.condition).word}`, each.reason, kv, work(each.role, [each])];
  return svg("title", {}, lines.filter(Boolean).join("\n"));
}

function card(each, x, y, width) {
  const how = conditionOf(each.condition), inner = width - 20;
  const room = Math.floor(inner / 7), wide = Math.floor(inner / 5.9), isReady = each.condition === "ready";
  const box = svg("rect", { class: `box ${["bad", "warn"].includes(how.look) ? how.look : ""}`, x, y, width, height: CARD.height, rx: 6 });
  const parts = [titleOf(each), box, iconAt(x + 10, y + 8, how),
    text(x + 30, y + 19, short(place(each.name), room - (isReady ? 4 : how.word.length + 5)), "strong")];
  if (!isReady) parts.push(text(x + width - 10, y + 19, how.word, how.look, "end"));
  if (!isReady && each.reason) {
    const words = reasonAlone(each), space = words.lastIndexOf(" ", wide);
    const cut = words.length <= wide ? words.length : space > 0 ? space : wide;
    parts.push(text(x + 10, y + 39, words.slice(0, cut), "soft"));
    if (cut < words.length) parts.push(text(x + 10, y + 56, short(words.slice(cut).trim(), wide), "soft"));
    return svg("g", {}, ...parts);
  }
  parts.push(...bar(each.kv_blocks, x + 10, y + 28, inner));
  parts.push(text(x + 10, y + 58, short(work(each.role, [each]), wide), "soft"));
  return svg("g", {}, ...parts);
}

function bar(kv, x, y, width) {
  if (!kv || !kv.total) return [text(x, y + 11, "KV not told", "soft")];
  const share = percent(kv), words = `KV ${Math.round(share)} %`, wide = width - 62;
  return [
    svg("rect", { class: "kv", x, y: y + 2, width: wide, height: 10, rx: 3 }),
    svg("rect", { class: share >= 90 ? "fill full" : "fill", x, y: y + 2, width: (wide * Math.min(share, 100)) / 100, height: 10, rx: 3 }),
    text(x + width, y + 11, words, "", "end"),
  ];
}

function cell(each, x, y) {
  const how = conditionOf(each.condition), tall = (CELL.size * Math.min(percent(each.kv_blocks), 100)) / 100;
  return svg("g", {}, titleOf(each),
    svg("rect", { class: `box ${["bad", "warn"].includes(how.look) ? how.look : ""}`, x, y, width: CELL.size, height: CELL.size, rx: 5 }),
    svg("rect", { class: percent(each.kv_blocks) >= 90 ? "fill full" : "fill", x, y: y + CELL.size - tall, width: CELL.size, height: tall, rx: 4, opacity: 0.55 }),
    iconAt(x + (CELL.size - 14) / 2, y + (CELL.size - 14) / 2, how));
}

// Wires.

function wire(points, look = "") {
  const [x2, y2] = points[points.length - 1], [x1, y1] = points[points.length - 2];
  const line = svg("path", { class: `wire ${look}`, d: "M" + points.map((point) => point.join(" ")).join("L") });
  const d = Math.abs(x2 - x1) >= Math.abs(y2 - y1)
    ? `M${x2} ${y2}l${x2 > x1 ? -7 : 7} -4v8z` : `M${x2} ${y2}l-4 ${y2 > y1 ? -7 : 7}h8z`;
  return svg("g", {}, line, svg("path", { class: `tip ${look}`, d }));
}

function bend(x1, y1, x2, y2, look) {
  const half = (x1 + x2) / 2;
  return svg("g", {},
    svg("path", { class: `wire ${look}`, d: `M${x1} ${y1}C${half} ${y1} ${half} ${y2} ${x2 - 4} ${y2}` }),
    svg("path", { class: `tip ${look}`, d: `M${x2} ${y2}l-7 -4v8z` }));
}

const label = (x, y, words, anchor = "middle") => text(x, y, words, "label", anchor);

function lookOf(pair) {
  if (!pair.is_routable) return "off";
  if (pair.trust === "passed") return "kvwire";
  return pair.trust === "doubtful" || pair.trust === "retrying" ? "doubtful" : "untried";
}

function ways(pairs) {
  const names = [...new Set(pairs.map((pair) => pair.transport).filter(Boolean))];
  return names.length ? ` · ${short(names.join(", "), 18)}` : "";
}

// The whole.

function nodeBox(x, y, width, title, lines, condition = null) {
  const height = 34 + lines.length * 17;
  const parts = [svg("rect", { class: "box", x, y, width, height, rx: 8 })];
  if (condition) parts.push(iconAt(x + 10, y + 9, condition));
  parts.push(text(x + (condition ? 30 : 10), y + 20, title, "strong"));
  lines.forEach((line, n) => parts.push(text(x + 10, y + 40 + n * 17, line, "soft")));
  return { x, y, width, height, drawn: svg("g", {}, ...parts) };
}

const counted = (count, what) => `${number(count)} ${what}${count === 1 ? "" : "s"}`;

function factsOf(view) {
  const { router, instances, pairs, series } = view;
  const of = (role) => instances.filter((each) => each.role === role);
  const split = pairs.filter((pair) => pair.prefill);
  const legs = (members) => sum(members.map((each) => each.legs));
  return {
    rate: `${number(last(series.requests_per_s, 5))} requests/s`,
    routerLines: [`${number(router.in_flight)} in flight of ${number(router.max_in_flight)}`, `up ${span(router.now - router.started_at)}`],
    routerLook: router.is_draining ? CONDITIONS.draining : router.is_ready ? CONDITIONS.ready : CONDITIONS.down,
    prefill: of("prefill"), decode: of("decode"), hybrid: of("hybrid"), split,
    prompts: counted(legs(of("prefill")), "prompt"),
    answers: counted(legs([...of("decode"), ...of("hybrid")]), "answer"),
    moved: `KV ${speed(last(series.sent_gb_per_s, 1))}${ways(split)}`,
  };
}

function groupsOf(facts) {
  const groups = [];
  if (facts.prefill.length) groups.push(new Group("prefill", "prefill", facts.prefill));
  if (facts.decode.length) groups.push(new Group("decode", "decode", facts.decode));
  if (facts.hybrid.length) groups.push(new Group("hybrid (both phases)", "hybrid", facts.hybrid));
  return groups;
}

function drawWide(facts, width) {
  const groups = groupsOf(facts), prefill = groups.find((each) => each.role === "prefill");
  const rest = groups.filter((each) => each !== prefill), columns = (prefill ? 1 : 0) + (rest.length ? 1 : 0);
  const clientsWide = 84, routerWide = 152, gap = Math.min(130, Math.max(100, width * 0.1));
  const wideGap = prefill ? gap + 36 : 0;
  const each = Math.min(430, (width - clientsWide - routerWide - 2 * gap - wideGap) / Math.max(columns, 1));
  let x = clientsWide + gap + routerWide + gap, y = 4;
  if (prefill) { prefill.measure(each).place(x, 4); x += each + wideGap; }
  for (const group of rest) { group.measure(each).place(x, y); y += group.height + 14; }
  const bottom = Math.max(110, ...groups.map((group) => group.y + group.height));
  const first = prefill || rest[0], middle = Math.min(first ? first.middle : 55, 4 + bottom / 2);
  const clients = nodeBox(0, middle - 25, clientsWide, "clients", [facts.decode.length || facts.hybrid.length ? "HTTP" : ""]);
  const router = nodeBox(clientsWide + gap, middle - 34, routerWide, "router", facts.routerLines, facts.routerLook);
  const parts = [clients.drawn, router.drawn, ...groups.map((group) => group.draw())];
  const end = router.x + router.width;
  parts.push(wire([[clientsWide, middle], [router.x - 4, middle]]), label(clientsWide + gap / 2, middle - 8, facts.rate));
  let tall = bottom + 4;
  if (prefill) {
    parts.push(wire([[end, middle], [prefill.x - 4, middle]]), label(end + gap / 2, middle - 8, facts.prompts));
    if (rest.length) {
      const from = router.x + routerWide / 2, rail = rest[0].x - 18, low = bottom + 20;
      for (const group of rest) {
        const into = group.y + group.height - 12;
        parts.push(wire([[from, router.y + router.height], [from, low], [rail, low], [rail, into], [group.x - 1, into]]));
      }
      parts.push(label(end + gap / 2, low - 7, facts.answers));
      tall = low + 10;
    }
    const decode = rest.find((group) => group.role === "decode");
    if (decode) parts.push(...between(prefill, decode, facts));
  } else if (rest.length) {
    for (const group of rest) parts.push(bend(end, middle, group.x, group.middle, ""));
    parts.push(label(end + gap / 2, middle - 8, facts.answers));
  }
  return svg("svg", { viewBox: `0 0 ${width} ${tall}`, height: tall }, ...parts);
}

function between(prefill, decode, facts) {
  const x1 = prefill.x + prefill.width, x2 = decode.x, half = (x1 + x2) / 2;
  const parts = [];
  if (prefill.isGrid || decode.isGrid || facts.split.length > 16) {
    const y = (Math.max(prefill.y, decode.y) + Math.min(prefill.y + prefill.height, decode.y + decode.height)) / 2;
    parts.push(wire([[x1, y], [x2 - 4, y]], "kvwire"), label(half, y - 9, facts.moved));
    return parts;
  }
  const at = (group, name) => group.cardMiddle(group.members.findIndex((each) => each.name === name));
  for (const pair of facts.split) {
    parts.push(bend(x1 - PAD, at(prefill, pair.prefill), x2 + PAD, at(decode, pair.decode), lookOf(pair)));
  }
  const top = Math.min(prefill.cardMiddle(0), decode.cardMiddle(0));
  parts.push(label(half, top - 12, facts.moved));
  return parts;
}

function drawNarrow(facts, width) {
  const left = 18, wide = width - left, parts = [];
  const clients = nodeBox(left, 2, wide, "clients", []);
  parts.push(clients.drawn);
  let y = clients.y + clients.height;
  const down = (words, look = "") => {
    parts.push(wire([[left + 24, y], [left + 24, y + 32]], look), label(left + 36, y + 20, words, "start"));
    y += 36;
  };
  down(facts.rate);
  const router = nodeBox(left, y, wide, "router", facts.routerLines, facts.routerLook);
  parts.push(router.drawn);
  y += router.height;
  for (const group of groupsOf(facts)) {
    const hasPrefill = facts.prefill.length > 0;
    if (group.role === "prefill") down(facts.prompts);
    else if (group.role === "decode" && hasPrefill) down(facts.moved, "kvwire");
    else if (!hasPrefill) down(facts.answers);
    else y += 16;
    group.measure(wide).place(left, y);
    parts.push(group.draw());
    if (hasPrefill && group.role !== "prefill") {
      const into = group.y + 14;
      parts.push(wire([[left, router.y + 20], [6, router.y + 20], [6, into], [left - 2, into]]));
      if (group.role === "decode") parts.push(label(left + wide - 8, group.y - 14, facts.answers, "end"));
    }
    y += group.height;
  }
  return svg("svg", { viewBox: `0 0 ${width} ${y + 4}`, height: y + 4 }, ...parts);
}

const START_ONE = [
  "No instance is known to this router yet. Start a cluster on this machine:",
  "pdrt up",
  "or list instances in the router's file, as conf/router.toml does, and start them:",
  "pdrt node --role prefill --conf conf/prefill.toml",
];

function nothing(lines) {
  return html("div", { class: "empty" }, ...lines.map((line) =>
    html("p", {}, line.startsWith("pdrt ") || line.startsWith("curl ") ? html("code", {}, line) : line)));
}

let shownView = null;

function showPicture(view) {
  shownView = view;
  const spot = byId("picture");
  show(byId("key"), view.instances.length > 0);
  if (!view.instances.length) {
    spot.replaceChildren(nothing(START_ONE));
    return;
  }
  const width = Math.max(spot.clientWidth - 24, 280), facts = factsOf(view);
  const drawn = width < NARROW ? drawNarrow(facts, width) : drawWide(facts, width);
  const words = view.instances.slice(0, 20).map((each) => `${each.name} ${conditionOf(each.condition).word}`);
  put(drawn, { role: "img", "aria-label": `The cluster: ${words.join(", ")}. The tables below have all of it.` });
  spot.replaceChildren(drawn);
}

const legend = Object.values(CONDITIONS).map((how) => html("span", {}, icon(how), " " + how.word));
legend.push(html("span", {}, "orange KV bar: 90 % or more used"));
byId("key").append(...legend);
new ResizeObserver(() => { if (shownView) showPicture(shownView); }).observe(byId("picture"));
