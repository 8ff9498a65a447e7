// Small line charts of the last five minutes: one or two lines, a scale, a value under the cursor.

const SPAN = 300;
const PLOT = { width: 320, height: 110, right: 6, top: 8, bottom: 16 };

function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].find((step) => step * power >= value) * power;
}

class Chart {
  constructor(title, lines, format, nothing) {
    this.lines = lines;
    this.format = format;
    this.nothing = nothing;
    this.left = 40;  // room for the scale
    this.at = null;  // which second the cursor is on, counted back from now
    this.columns = lines.map(() => []);
    this.now = lines.map(() => null);
    this.values = html("div", { class: "values" });
    this.texts = lines.map((line, n) => {
      const strong = html("b"), small = html("small");
      const parts = lines.length > 1 ? [html("i"), strong, " ", small] : [strong, " ", small];
      this.values.append(html("span", { class: n ? "second" : "first" }, ...parts));
      return { strong, small };
    });
    this.plot = svg("svg", { class: "plot", tabindex: 0, role: "img", preserveAspectRatio: "none" });
    this.card = html("div", { class: "card" }, html("h3", {}, title), this.values, this.plot);
    this.title = title;
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.move(null));
    this.plot.addEventListener("blur", () => this.move(null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  point(event) {
    const box = this.plot.getBoundingClientRect();
    const share = (event.clientX - box.left - this.left) / (box.width - this.left - PLOT.right);
    this.move(Math.min(Math.max(Math.round((1 - share) * (SPAN - 1)), 0), SPAN - 1));
  }

  key(event) {
    const step = { ArrowLeft: 1, ArrowRight: -1, PageUp: 30, PageDown: -30 }[event.key];
    if (event.key === "Escape") this.move(null);
    if (!step) return;
    event.preventDefault();
    this.move(Math.min(Math.max((this.at ?? 0) + step, 0), SPAN - 1));
  }

  move(at) {
    this.at = at;
    this.draw();
  }

  show(columns, now) {
    this.columns = columns;
    this.now = now;
    this.draw();
  }

  valueAt(column, back) {
    const index = column.length - 1 - back;
    return index >= 0 ? column[index] : null;
  }

  draw() {
    const width = Math.max(this.plot.clientWidth || PLOT.width, 120);
    put(this.plot, { viewBox: `0 0 ${width} ${PLOT.height}` });
    const all = this.columns.flat().filter((value) => value !== null);
    const isEmpty = !all.some((value) => value > 0);
    const top = nice(Math.max(...all, 0)), tall = PLOT.height - PLOT.top - PLOT.bottom;
    const marks = (isEmpty ? [0] : [0, 0.5, 1]).map((share) => [share, this.format(top * share).replace(/\.0+(?=\D|$)/, "")]);
    this.left = 10 + 6 * Math.max(...marks.map(([, words]) => words.length));
    const inner = width - this.left - PLOT.right;
    const x = (back) => this.left + inner * (1 - back / (SPAN - 1));
    const y = (value) => PLOT.top + tall * (1 - value / top);
    const parts = [];
    for (const [share, words] of marks) {
      const level = y(top * share);
      parts.push(svg("line", { class: "grid", x1: this.left, x2: width - PLOT.right, y1: level, y2: level }));
      parts.push(svg("text", { x: this.left - 4, y: level + 3, "text-anchor": "end" }, words));
    }
    for (const minute of [4, 2, 0]) {
      const words = minute ? `−${minute} min` : "now", anchor = minute ? "middle" : "end";
      parts.push(svg("text", { x: x(minute * 60), y: PLOT.height - 3, "text-anchor": anchor }, words));
    }
    if (isEmpty) parts.push(svg("text", { class: "none", x: this.left, y: PLOT.top + tall / 2 }, this.nothing));
    this.columns.forEach((column, n) => {
      if (!isEmpty) parts.push(svg("path", { class: n ? "two" : "one", d: this.path(column, x, y) }));
    });
    if (this.at !== null) parts.push(...this.cross(x, y, tall));
    this.plot.replaceChildren(...parts);
    this.words();
  }

  path(column, x, y) {
    let text = "", isOn = false;
    column.forEach((value, index) => {
      const back = column.length - 1 - index;
      if (value === null || back >= SPAN) { isOn = false; return; }
      const next = column[index + 1] ?? null;
      text += `${isOn ? "L" : "M"}${x(back).toFixed(1)} ${y(value).toFixed(1)}`;
      if (!isOn && next === null) text += "h1.5";  // one second alone must be seen too
      isOn = true;
    });
    return text || "M0 0";
  }

  cross(x, y, tall) {
    const at = x(this.at);
    const parts = [svg("line", { class: "cross", x1: at, x2: at, y1: PLOT.top, y2: PLOT.top + tall })];
    this.columns.forEach((column, n) => {
      const value = this.valueAt(column, this.at);
      if (value !== null) parts.push(svg("circle", { class: n ? "dot b" : "dot", cx: at, cy: y(value), r: 3 }));
    });
    return parts;
  }

  words() {
    const isNow = this.at === null;
    this.lines.forEach((line, n) => {
      const value = isNow ? this.now[n] : this.valueAt(this.columns[n], this.at);
      say(this.texts[n].strong, this.format(value));
      say(this.texts[n].small, isNow || n ? line : `${line} ${this.at} s ago`.trim());
    });
    const words = this.lines.map((line, n) => `${line} ${this.texts[n].strong.textContent}`.trim());
    put(this.plot, { "aria-label": `${this.title}: ${words.join(", ")}. Arrow keys read older values.` });
  }
}

const last = (column, seconds) => {
  const few = column.slice(-seconds);
  return few.length ? sum(few) / few.length : 0;
};

const CHARTS = [
  {
    chart: new Chart("Requests", ["started / s", "errors / s"], number, "no request in 5 minutes"),
    columns: (s) => [s.requests_per_s, s.errors_per_s],
    now: (s) => [last(s.requests_per_s, 5), last(s.errors_per_s, 5)],
  },
  {
    chart: new Chart("Tokens generated", ["tokens / s"], number, "no token in 5 minutes"),
    columns: (s) => [s.tokens_per_s],
    now: (s) => [last(s.tokens_per_s, 1)],
  },
  {
    chart: new Chart("Time to first token (TTFT)", ["p50", "p99"], milliseconds, "no stream in 5 minutes"),
    columns: (s) => [s.ttft_ms.p50, s.ttft_ms.p99],
    now: (s) => [s.last_minute.ttft_ms.p50, s.last_minute.ttft_ms.p99],
  },
  {
    chart: new Chart("Time between pieces (ITL)", ["p50", "p99"], milliseconds, "no stream in 5 minutes"),
    columns: (s) => [s.itl_ms.p50, s.itl_ms.p99],
    now: (s) => [s.last_minute.itl_ms.p50, s.last_minute.itl_ms.p99],
  },
  {
    chart: new Chart("KV moved, prefill to decode", [""], speed, "no KV moved in 5 minutes"),
    columns: (s) => [s.sent_gb_per_s],
    now: (s) => [last(s.sent_gb_per_s, 1)],
  },
];
byId("charts").append(...CHARTS.map((each) => each.chart.card));

function showCharts(series) {
  for (const each of CHARTS) each.chart.show(each.columns(series), each.now(series));
}
