// The dashboard's only script. It makes no HTML: the server renders parts, and this puts each where its id is.
"use strict";
const $ = (query, within = document) => within.querySelector(query);
const $$ = (query, within = document) => [...within.querySelectorAll(query)];
const root = document.documentElement;

// -- theme
$("#theme")?.addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("leasehold-theme", root.dataset.theme); } catch { /* not kept */ }
});
const bar = $(".top"), stick = () => bar?.classList.toggle("stuck", scrollY > 4);
addEventListener("scroll", stick, { passive: true });
stick();

// -- time: the server's clock decides; what runs up or down is written here between two frames
let ahead = +document.body.dataset.now - Date.now() / 1000; // of the server's clock
const serverNow = () => Date.now() / 1000 + ahead;
const two = n => String(n).padStart(2, "0");
function duration(seconds) { // as in words.py
  seconds = Math.max(0, seconds);
  if (seconds > 0 && seconds < 0.0995) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 3599.5) { const s = Math.round(seconds); return `${Math.floor(s / 60)} min ${two(s % 60)} s`; }
  if (seconds < 86370) { const m = Math.round(seconds / 60); return `${Math.floor(m / 60)} h ${two(m % 60)} min`; }
  const h = Math.round(seconds / 3600);
  return `${Math.floor(h / 24)} d ${h % 24} h`;
}
function clock(at, form) { // in the reader's time zone
  const t = new Date(at * 1000), hm = `${two(t.getHours())}:${two(t.getMinutes())}`;
  if (form === "hm") return hm;
  if (form === "day") return t.toLocaleDateString("en-GB", { weekday: "long", day: "numeric", month: "long" });
  return `${hm}:${two(t.getSeconds())}` + (form === "ms" ? `.${Math.floor(t.getMilliseconds() / 100)}` : "");
}
function write(element, text) { if (element.textContent !== text) element.textContent = text; }
function localise(within) { for (const one of $$("[data-at]", within)) write(one, clock(+one.dataset.at, one.dataset.form)); }
function tick() {
  const now = serverNow();
  for (const one of $$("[data-began]")) write(one, duration(now - one.dataset.began));
  for (const one of $$("[data-ends]")) {
    const left = Math.max(0, one.dataset.ends - now), ttl = +one.dataset.ttl;
    if (one.localName === "svg") $(".v", one)?.setAttribute("width", Math.min(100, 100 * left / ttl).toFixed(1) + "%");
    else write(one, duration(left));
  }
  stamp();
}

// -- live: one stream per tab; the stamp is the age of the picture, not of the frame
const live = $("#live"), words = $("#live-words"), says = $("#says");
let asOf = +document.body.dataset.asOf, paused = false, source = null, fallen = false, polling = 0, lastId = "", saidAt = 0, toSay = "";
let heardAt = performance.now();
function stamp() {
  if (!live) return;
  const age = Math.max(0, serverNow() - asOf), old = age > 3;
  live.classList.toggle("paused", paused);
  live.classList.toggle("stale", !paused && (old || fallen));
  const how = fallen ? "Polling" : old ? "Stale" : "Live";
  write(words, paused ? "Paused" : old ? `${how}, stale: ${duration(Math.round(age))} old` : `${how}, ${age.toFixed(1)} s ago`);
}
function put(id, fresh) {
  const old = document.getElementById(id);
  if (!old || !fresh || old.outerHTML === fresh.outerHTML) return;
  const focused = old.contains(document.activeElement) ? document.activeElement : null;
  const href = focused?.getAttribute("href"), open = $("details[open]", old) !== null;
  const scrolled = $(".tlbox", old)?.scrollLeft;
  old.replaceWith(fresh);
  if (scrolled !== undefined && $(".tlbox", fresh)) $(".tlbox", fresh).scrollLeft = scrolled;
  if (open) $("details", fresh)?.setAttribute("open", "");
  if (focused) ((href && $$("a", fresh).find(a => a.getAttribute("href") === href)) || $("a, button", fresh) || $("#main")).focus();
  localise(fresh);
}
function say(text) { // a change of state, at most every 10 s
  if (text) toSay = text;
  if (!toSay || !says || performance.now() - saidAt < 10000) return;
  if (says.textContent !== toSay) { says.textContent = toSay; saidAt = performance.now(); }
  toSay = "";
}
function frame(event) {
  const sent = JSON.parse(event.data);
  lastId = event.lastEventId;
  fallen = false;
  heardAt = performance.now();
  ahead = sent.now - Date.now() / 1000;
  asOf = sent.as_of;
  for (const [id, html] of Object.entries(sent.parts)) {
    const box = document.createElement("template");
    box.innerHTML = html; // from our own server, escaped there
    put(id, box.content.firstElementChild);
  }
  say(sent.say);
  tick();
}
async function refresh() { // fetch the page itself, and take over what is live in it
  const answer = await fetch(location.href, { headers: { accept: "text/html" }, credentials: "same-origin" });
  if (answer.redirected && new URL(answer.url).pathname === "/login") { location.reload(); return; }
  if (!answer.ok) throw new Error(String(answer.status));
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  ahead = +fresh.body.dataset.now - Date.now() / 1000;
  asOf = +fresh.body.dataset.asOf;
  lastId = "";
  for (const one of $$("[data-live]", fresh)) if (!one.parentElement.closest("[data-live]")) put(one.id, document.adoptNode(one));
  tick();
}
async function poll() { // while there is no stream
  clearTimeout(polling);
  polling = 0;
  if (paused || document.hidden) return;
  try { await refresh(); start(); } catch { fall(5000); } // the server is away: go on trying
}
function start() {
  if (source || paused || document.hidden || !live) return;
  const from = new URLSearchParams(location.search);
  from.set("page", document.body.dataset.page);
  if (lastId) from.set("from", lastId);
  source = new EventSource("/ui/stream?" + from);
  heardAt = performance.now();
  source.addEventListener("frame", frame);
  source.addEventListener("error", () => { if (source?.readyState === EventSource.CLOSED) fall(5000); });
  source.addEventListener("resync", () => { stop(); refresh().then(start, () => fall(5000)); });
  source.addEventListener("drain", () => fall(1000));
}
function stop() {
  source?.close();
  source = null;
}
function fall(soon) { // there is no stream: poll, and say so
  stop();
  fallen = true;
  clearTimeout(polling);
  polling = setTimeout(poll, soon);
}
function pause(on) {
  paused = on;
  live.setAttribute("aria-pressed", String(on));
  if (on) stop(); else poll();
  stamp();
}
live?.addEventListener("click", () => pause(!paused));
document.addEventListener("visibilitychange", () => { if (document.hidden) stop(); else if (!paused) poll(); });
setInterval(() => {
  if (source && performance.now() - heardAt > 5000) fall(0); // no frame for so long: it is dead
  tick();
  say();
}, 250);

// -- filter: the server decides what fits; the address keeps it
const filter = $("#filter");
let typing = 0;
filter?.addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(async () => {
    const there = new URL(location.href);
    if (filter.value) there.searchParams.set("filter", filter.value); else there.searchParams.delete("filter");
    history.replaceState(null, "", there);
    stop();
    lastId = "";
    try { await refresh(); } catch { /* the stream or the next poll brings it */ }
    start();
  }, 200);
});

// -- dialogs: break needs the typed name and a reason
const dialog = $("#break");
if (dialog) {
  const name = $("#break-name"), why = $("#break-why"), go = $("#break-go");
  const ready = () => { go.disabled = name.value !== dialog.dataset.name || why.value.trim().length < 8; };
  name.addEventListener("input", ready);
  why.addEventListener("input", ready);
  document.addEventListener("click", event => {
    const opener = event.target.closest("#open-break");
    if (!opener) return;
    $("#break-token").value = opener.dataset.token; // what the reader sees now is what is broken
    write($("#break-shown"), (+opener.dataset.token).toLocaleString("en"));
    dialog.showModal();
    ready();
  });
  $("#break-no").addEventListener("click", () => dialog.close());
}
const help = $("#help");
$("#help-close")?.addEventListener("click", () => help.close());
function toast(text) {
  const one = document.createElement("div");
  one.className = "toast";
  one.setAttribute("role", "status");
  one.textContent = text;
  document.body.append(one);
  setTimeout(() => one.remove(), 2500);
}
document.addEventListener("click", async event => {
  const copied = event.target.closest("[data-copy]");
  if (!copied) return;
  try { await navigator.clipboard.writeText(copied.dataset.copy); toast("Copied"); } catch { toast("Not copied: the browser does not allow it"); }
});

// -- keys
let led = 0;
addEventListener("keydown", event => {
  if (event.target.matches("input, textarea, select") || event.metaKey || event.ctrlKey || event.altKey || $("dialog[open]")) return;
  const there = $(`.nav a[data-key="${CSS.escape(event.key)}"]`);
  if (event.key === "/") { event.preventDefault(); if (filter) filter.focus(); else location.href = $('.nav a[data-key="l"]').href; }
  else if (event.key === "p" && live) pause(!paused);
  else if (event.key === "?" && help) help.showModal();
  else if (event.key === "g") led = performance.now();
  else if (there && performance.now() - led < 1000) location.href = there.href;
});
for (const box of $$(".tlbox")) box.scrollLeft = box.scrollWidth * +box.dataset.focus - box.clientWidth / 2; // where something happened
localise(document);
tick();
start();
