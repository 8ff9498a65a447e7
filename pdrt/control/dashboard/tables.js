// The tables. Rows are kept by their key, so that a selection or a place in them outlives a second.

class Table {
  constructor(spot, columns, keyOf) {
    this.spot = byId(spot);
    this.columns = columns;
    this.keyOf = keyOf;
    this.rows = new Map();
    this.body = html("tbody");
    const heads = columns.map((column) => html("th", { scope: "col", class: column.look || "" }, column.title));
    const table = html("table", {}, html("thead", {}, html("tr", {}, ...heads)), this.body);
    this.scroll = html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": spot }, table);
  }

  show(items, empty) {
    if (!items.length) {
      this.rows.clear();
      this.body.replaceChildren();
      this.spot.replaceChildren(nothing(empty));
      return;
    }
    if (this.scroll.parentNode !== this.spot) this.spot.replaceChildren(this.scroll);
    const before = this.rows;
    this.rows = new Map();
    let spot = this.body.firstChild;
    for (const item of items) {
      let key = this.keyOf(item);
      while (this.rows.has(key)) key += "+";  // two of one name are two
      const row = before.get(key) || this.make();
      before.delete(key);
      this.rows.set(key, row);
      this.fill(row, item);
      if (row.node === spot) spot = spot.nextSibling;
      else this.body.insertBefore(row.node, spot);
    }
    for (const row of before.values()) row.node.remove();
  }

  make() {
    const cells = this.columns.map((column, n) => html(n ? "td" : "th", { class: column.look || "", ...(n ? {} : { scope: "row" }) }));
    return { node: html("tr", {}, ...cells), cells, kept: this.columns.map(() => null) };
  }

  fill(row, item) {
    this.columns.forEach((column, n) => {
      const cell = row.cells[n];
      if (column.draw) column.draw(cell, item);
      else say(cell, column.text(item));
      const title = column.full ? column.full(item) : "";
      if (title && title !== cell.textContent) put(cell, { title });
    });
  }
}

function drawCondition(cell, each) {
  const how = conditionOf(each.condition);
  if (!cell.firstChild) cell.append(icon(how), html("span"));
  dress(cell.firstChild, how);
  put(cell.lastChild, { class: how.look });
  say(cell.lastChild, how.word);
}

function drawKv(cell, each) {
  const kv = each.kv_blocks;
  if (!kv || !kv.total) { say(cell, "–"); return; }
  if (!cell.firstElementChild) cell.replaceChildren(html("span", { "aria-hidden": "true" }, html("i")), html("span"));
  put(cell.firstChild, { class: percent(kv) >= 90 ? "kvbar full" : "kvbar" });
  cell.firstChild.firstChild.style.width = `${Math.min(percent(kv), 100).toFixed(1)}%`;
  say(cell.lastChild, `${Math.round(percent(kv))} % of ${number(kv.total)}`);
}

function drawStage(cell, request) {
  const steps = request.prefill ? ["prefill", "transfer", "decode"] : ["prefill", "decode"];
  const words = { retry: "prefill again, elsewhere", prefill: "prefill", transfer: "KV is moving", decode: "decode", move: "going on elsewhere", ended: "ending" };
  if (cell.children.length !== 2 || cell.firstChild.children.length !== steps.length) {
    cell.replaceChildren(html("span", { class: "steps", "aria-hidden": "true" }, ...steps.map(() => html("i"))), html("span"));
  }
  const isAgain = request.stage === "retry" || request.stage === "move";
  const reached = ["ended", "move"].includes(request.stage) ? steps.length - 1 : Math.max(steps.indexOf(request.stage), 0);
  steps.forEach((_step, n) => put(cell.firstChild.children[n],
    { class: n > reached ? "" : isAgain ? "again" : "on" }));
  say(cell.lastChild, words[request.stage] || request.stage);
}

const drawCode = (read) => (cell, item) => {
  if (!cell.firstChild) cell.append(html("code"));
  say(cell.firstChild, read(item));
};

function reasonOf(each) {
  const worker = each.workers && each.workers.last_problem;
  return reasonAlone(each) || (worker ? `last problem of a worker: ${worker}` : "");
}

function drawName(cell, each) {
  if (!cell.firstChild) cell.append(html("span"), html("small"));
  say(cell.firstChild, each.name);
  say(cell.lastChild, reasonOf(each));
}

const ORDER = ["down", "failing", "suspect", "unknown", "starting", "draining", "ready"];

const INSTANCES = new Table("instances", [
  { title: "Instance", look: "name", draw: drawName, full: (i) => i.name },
  { title: "State", draw: drawCondition },
  { title: "In flight", look: "num", text: (i) => number(i.legs) },
  { title: "Queued tokens", look: "num", text: (i) => number(i.queued_tokens) },
  { title: "Running", look: "num", text: (i) => number(i.running) },
  { title: "Waiting", look: "num", text: (i) => number(i.waiting) },
  { title: "KV blocks used", draw: drawKv },
  { title: "Out tok/s", look: "num", text: (i) => number(i.tokens_per_s) },
  { title: "Prompt tok/s", look: "num", text: (i) => number(i.prompt_tokens_per_s) },
  { title: "Transfers / s", look: "num", text: (i) => number(i.transfers_per_s) },
  { title: "KV sent", look: "num", text: (i) => speed(i.sent_gb_per_s) },
  { title: "Retractions", look: "num", text: (i) => number(i.retractions) },
  { title: "Workers", look: "num", text: (i) => (i.workers && i.workers.total ? `${i.workers.ready} of ${i.workers.total}` : "–") },
], (i) => i.name);

const TRUST = {
  passed: "ready", doubtful: "suspect", retrying: "suspect", trying: "starting", untried: "unknown",
};
const TRUST_WORDS = {
  passed: "passed", doubtful: "a fault since", retrying: "being tried again", trying: "being tried", untried: "not passed",
};

function drawTrust(cell, pair) {
  const how = conditionOf(TRUST[pair.trust]);
  if (!cell.firstChild) cell.append(icon(how), html("span"));
  dress(cell.firstChild, how);
  put(cell.lastChild, { class: how.look });
  say(cell.lastChild, TRUST_WORDS[pair.trust] || pair.trust);
}

const PAIRS = new Table("pairs", [
  { title: "Prefill", look: "name", text: (p) => p.prefill || "–", full: (p) => p.prefill || "" },
  { title: "Decode", look: "name", text: (p) => p.decode, full: (p) => p.decode },
  { title: "Canary", draw: drawTrust },
  { title: "Canary took", look: "num", text: (p) => milliseconds(p.canary_ms) },
  { title: "KV moves by", text: (p) => p.transport || (p.prefill ? "not told yet" : "nothing to move") },
  { title: "Tried at, GB/s", look: "num", text: (p) => number(p.gb_per_s) },
  { title: "Path", text: (p) => p.path },
  { title: "Reason", look: "wide", text: (p) => p.reason },
], (p) => `${p.prefill} ${p.decode}`);

const REQUESTS = new Table("requests", [
  { title: "Request", look: "name", draw: drawCode((r) => r.request_id), full: (r) => r.request_id },
  { title: "Stage", draw: drawStage },
  { title: "Age", look: "num", text: (r) => span(r.age_s) },
  { title: "TTFT", look: "num", text: (r) => milliseconds(r.first_ms) },
  { title: "Pieces", look: "num", text: (r) => number(r.pieces) },
  { title: "Retries", look: "num", text: (r) => number(r.tries) },
  { title: "Prefill", look: "name", text: (r) => (r.prefill ? place(r.prefill) : "–"), full: (r) => r.prefill || "" },
  { title: "Decode", look: "name", text: (r) => place(r.decode), full: (r) => r.decode },
  { title: "Path", draw: drawCode((r) => r.path) },
], (r) => r.request_id);

const ERRORS = new Table("errors", [
  { title: "Time", text: (e) => clockTime(e.at) },
  { title: "Code", draw: drawCode((e) => e.code) },
  { title: "Message", look: "wide", text: (e) => e.message },
  { title: "Status", look: "num", text: (e) => String(e.status) },
  { title: "Found by", look: "name", text: (e) => e.stage, full: (e) => e.stage },
  { title: "Request", look: "name", draw: drawCode((e) => e.request_id), full: (e) => e.request_id },
], (e) => `${e.at} ${e.request_id} ${e.code}`);

function example(model) {
  const named = model ? `"model": "${model}", ` : "";
  return `curl ${location.origin}/v1/completions -d '{${named}"prompt": "Once upon a time"}'`;
}

const ofAll = (shown, total) => (shown < total ? `${shown} shown of ${total}` : String(total));

function showTables(view) {
  const ordered = [...view.instances].sort((a, b) => ORDER.indexOf(a.condition) - ORDER.indexOf(b.condition));
  INSTANCES.show(ordered, ["None is known yet."]);
  PAIRS.show(view.pairs, ["Pairs appear with the instances: each prefill with each decode, and each hybrid alone."]);
  REQUESTS.show(view.requests, ["Nothing is running just now. Send something:", example(view.models[0])]);
  ERRORS.show(view.errors, [`No client has been told of an error in the ${span(view.router.now - view.router.started_at)} since the router started.`]);
  say(byId("n-instances"), String(view.instances.length));
  say(byId("n-pairs"), ofAll(view.pairs.length, view.pairs_total));
  say(byId("n-requests"), ofAll(view.requests.length, view.requests_total));
  say(byId("n-errors"), view.errors.length ? String(view.errors.length) : "");
}
