// Asks the router once a second, less often while nobody looks or nobody answers, and says so.

const EVERY = 1000, HIDDEN = 10000, SLOWEST = 15000, PATIENCE = 5000, OLD = 3500;
const KEY = "pdrt-api-key";
const FEW = 20;  // seconds that are asked for once the page has the rest
const state = { series: null, heardAt: 0, misses: 0, why: "", timer: 0, isAsking: false };

async function look() {
  if (state.isAsking) return;
  state.isAsking = true;
  const headers = {}, key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  try {
    const answer = await fetch(`overview?seconds=${FEW * 1000 > performance.now() - state.heardAt && state.series ? FEW : SPAN}`, { headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
    if (answer.status === 401) askForKey(Boolean(key));
    else if (!answer.ok) missed(`the router answered ${answer.status}`);
    else heard(await answer.json());
  } catch (error) {
    missed(error.name === "TimeoutError" ? "no answer within 5 s" : "no connection");
  } finally {
    state.isAsking = false;
    next();
  }
}

function next() {
  clearTimeout(state.timer);
  if (byId("ask").open) return;
  const wait = document.hidden ? HIDDEN : Math.min(EVERY * 2 ** Math.min(state.misses, 4), SLOWEST);
  state.timer = setTimeout(look, wait);
}

function heard(view) {
  if (view.version !== 1) {
    missed(`this page reads version 1 of /overview, the router tells version ${view.version}; load the page again`);
    return;
  }
  state.series = view.series = joined(state.series, view.series);
  Object.assign(state, { heardAt: performance.now(), misses: 0, why: "" });
  show(byId("main"), true);
  showHead(view);
  showCharts(view.series);
  showPicture(view);
  showTables(view);
  fresh();
}

// The new seconds after the old ones; a new router, or a gap, begins anew.
function joined(before, after) {
  const length = after.requests_per_s.length;
  const isWhole = length !== FEW || !before, passed = before ? Math.round(after.ends_at - before.ends_at) : 0;
  if (isWhole || passed < 0 || passed > FEW) return after;
  const join = (old, fresh) => (Array.isArray(fresh)
    ? [...old.slice(0, Math.max(old.length - (length - passed), 0)), ...fresh].slice(-SPAN)
    : typeof fresh === "object" && fresh !== null
      ? Object.fromEntries(Object.entries(fresh).map(([name, value]) => [name, join(old[name], value)])) : fresh);
  return { ...join(before, after), last_minute: after.last_minute };
}

function missed(why) {
  state.misses += 1;
  state.why = why;
  fresh();
}

function showHead({ router, models }) {
  const how = router.is_draining ? ["idle", "draining"] : router.is_ready ? ["good", "ready"] : ["bad", "not ready"];
  put(byId("ready"), { class: `pill ${how[0]}` });
  say(byId("ready"), how[1]);
  say(byId("where"), location.host);
  const named = models.length ? short(models.join(", "), 80) : "no model yet";
  say(byId("facts"), `${named} · ${number(router.in_flight)} in flight · pdrt ${router.pdrt}`);
  document.title = `${how[1]} · pdrt ${location.host}`;
  state.reason = router.is_ready || router.is_draining ? "" : router.reason;
}

function fresh() {
  const age = (performance.now() - state.heardAt) / 1000, isOld = age * 1000 > OLD && !document.hidden;
  const banner = byId("banner");
  if (!state.heardAt) {
    say(byId("fresh"), "");
    if (state.misses) tell(`The router does not answer: ${state.why}. Is \`pdrt router\` running? Trying again.`, "");
    return;
  }
  byId("main").classList.toggle("old", isOld);
  say(byId("fresh"), isOld ? `${span(age)} old` : "live");
  if (isOld) {
    put(byId("ready"), { class: "pill bad" });
    say(byId("ready"), "no answer");
    tell(`What you see is ${span(age)} old: ${state.why || "the router is slow to answer"}. Trying again every few seconds.`, "");
  } else if (state.reason) tell(`Not ready: ${state.reason}`, "warn");
  else show(banner, false);
}

function tell(words, look) {
  put(byId("banner"), { class: look });
  say(byId("banner"), words);
  show(byId("banner"), true);
}

function askForKey(wasRefused) {
  sessionStorage.removeItem(KEY);
  say(byId("ask-why"), wasRefused ? "That key was refused. Try another one." : "It is kept in this browser tab until you close it.");
  put(byId("ready"), { class: "pill idle" });
  say(byId("ready"), "API key needed");
  if (!byId("ask").open) byId("ask").showModal();
  byId("ask-key").focus();
}

byId("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = byId("ask-key");
  if (!field.value.trim()) return;
  sessionStorage.setItem(KEY, field.value.trim());
  field.value = "";
  byId("ask").close();
  look();
});
byId("ask").addEventListener("cancel", (event) => event.preventDefault());  // there is nothing behind it
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
setInterval(fresh, 500);
look();
