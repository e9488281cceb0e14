// Everything around the staircase: episode list, cursor, search, keys.

const $ = (selector) => document.querySelector(selector);
const WINDOW = 400; // tokens of text shown on either side of the cursor
const MOST_HITS = 5000;
const COLUMNS = [["id", "id"], ["reward", "reward"], ["turns", "turns"], ["edits", "edits"],
  ["tokens", "tokens"]];

const index = JSON.parse($("#index").textContent);
const sources = [...document.querySelectorAll("script.episode")];
const state = {
  order: index.episodes.map((_, i) => i), episode: -1, data: null, row: 0, at: null, edit: -1,
  hits: [], hit: -1, colours: {},
};
const stairs = new Stairs($("#stairs"), state, (place) => pick(place));

function element(tag, text = "", properties = {}) {
  return Object.assign(document.createElement(tag), { textContent: text }, properties);
}

// Scrolls a box, and only that box, until an element in it is in sight.
function bringInto(box, item) {
  const outer = box.getBoundingClientRect(), inner = item.getBoundingClientRect();
  const middle = (inner.top + inner.bottom - outer.top - outer.bottom) / 2;
  if (inner.top < outer.top || inner.bottom > outer.bottom) box.scrollTop += middle;
}

// --- episodes ---------------------------------------------------------------------------------

function load(source) {
  const data = JSON.parse(source.textContent);
  data.texts = data.tokens.map((i) => data.vocabulary[i][1]);
  data.starts = new Int32Array(data.texts.length + 1);
  // Lower case can be longer: offsets are those of the text that is searched.
  const lower = data.texts.map((text) => text.toLowerCase());
  lower.forEach((text, i) => { data.starts[i + 1] = data.starts[i] + text.length; });
  data.all = lower.join("");
  data.marks = [];
  for (const row of data.rows) {
    row.spans = [...row.view].sort((a, b) => a[0] - b[0]);
    row.outputs = data.outputs.slice(row.first, row.last + 1);
    row.end = data.outputs[row.last][1];
    row.edits = [];
  }
  data.edits.forEach((edit) => {
    data.rows[edit.row].edits.push(edit);
    for (const span of edit.inserted) {
      if (span[0] < edit.position) data.marks.push({ span, row: edit.row, summary: false });
    }
    for (const span of edit.summary) data.marks.push({ span, row: edit.row, summary: true });
  });
  data.differences = data.strips.map(
    (strip) => new Map(strip.at.map((at, i) => [at, strip.difference[i]])));
  return data;
}

function open(number) {
  state.episode = number;
  state.data = load(sources[number]);
  Object.assign(state, { row: 0, at: 0, edit: -1, hits: [], hit: -1 });
  for (const line of $("#episodes tbody").rows) {
    const mine = Number(line.dataset.episode) === number;
    line.setAttribute("aria-selected", mine);
    if (mine) bringInto($("nav"), line);
  }
  const head = index.episodes[number];
  const facts = [["task", head.task], ["reward", shown(head.reward)], ["status", head.status],
    ["turns", head.turns], ["branches", state.data.rows.length], ["edits", head.edits],
    ["tape", `${head.tokens.toLocaleString()} tokens`], ["sampled", head.sampled.toLocaleString()]];
  $("#summary").replaceChildren(...facts.map(([name, value]) => {
    const span = element("span", `${name} `);
    span.append(element("b", value));
    return span;
  }));
  $("#stairs").style.height = `${stairs.head + stairs.row * state.data.rows.length + 26}px`;
  listEdits();
  stairs.fit();
  search();
  select(0, state.data.rows[0].outputs[0][0]);
}

function shown(number) {
  return number === null ? "n/a" : Number.isInteger(number) ? String(number) : number.toFixed(3);
}

function listEpisodes() {
  $("#episodes tbody").replaceChildren(...state.order.map((i) => {
    const line = document.createElement("tr");
    line.dataset.episode = i;
    line.setAttribute("aria-selected", i === state.episode);
    for (const [key] of COLUMNS) line.append(element("td", shown(index.episodes[i][key])));
    line.title = index.episodes[i].task;
    line.onclick = () => open(i);
    return line;
  }));
}

let sorted = ["id", 1];
function sortBy(key) {
  sorted = [key, sorted[0] === key ? -sorted[1] : key === "id" ? 1 : -1];
  const value = (i) => index.episodes[i][key] ?? -Infinity;
  state.order.sort((a, b) => sorted[1] * (value(a) - value(b)) || a - b);
  listEpisodes();
}

function step(by) {
  const place = state.order.indexOf(state.episode) + by;
  if (place >= 0 && place < state.order.length) open(state.order[place]);
}

// --- the cursor -------------------------------------------------------------------------------

function select(row, at) {
  state.row = Math.max(0, Math.min(state.data.rows.length - 1, row));
  state.at = Math.max(0, Math.min(state.data.tokens.length - 1, at));
  stairs.reveal(state.row, state.at);
  showToken();
  showText();
  drawTree();
}

// A place that the pointer chose: a row's label has no position, a strip has no row.
function pick({ row, at }) {
  if (at === null) return select(row, state.at);
  select(row < 0 ? rowOf(at) : row, at);
}

// The row to show a token in: the selected one if it is live there, else the one that brought it.
function rowOf(at) {
  const { rows } = state.data;
  if (contains(rows[state.row].spans, at)) return state.row;
  const found = rows.findIndex((row) => contains(row.spans, at));
  return found < 0 ? state.row : found;
}

function move(by) {
  const { view } = state.data.rows[state.row];
  let [i, offset] = locate(view, state.at);
  while (i < view.length - 1 && offset + by >= view[i][1] - view[i][0]) {
    by -= view[i][1] - view[i][0] - offset;
    [i, offset] = [i + 1, 0];
  }
  while (i > 0 && offset + by < 0) {
    by += offset + 1;
    i -= 1;
    offset = view[i][1] - view[i][0] - 1;
  }
  const [start, stop] = view[i];
  select(state.row, Math.max(start, Math.min(stop - 1, start + offset + by)));
}

// Span and offset of a tape position in a view; of the next span where it is not live.
function locate(view, at) {
  const found = view.findIndex(([start, stop]) => at >= start && at < stop);
  if (found >= 0) return [found, at - view[found][0]];
  const after = view.findIndex(([start]) => start > at);
  return [after < 0 ? view.length - 1 : after, 0];
}

function roleAt(at) {
  return state.data.roles[firstRun(state.data.roles, at)][1];
}

function outputAt(at) {
  const turn = state.data.outputs.findIndex(([start, stop]) => at >= start && at < stop);
  return turn < 0 ? null : { turn, offset: at - state.data.outputs[turn][0] };
}

function factsOf(at) {
  const { data } = state;
  const [id, text] = data.vocabulary[data.tokens[at]];
  const output = outputAt(at);
  const by = output ? `turn ${output.turn}, token ${output.offset}` : index.roles[roleAt(at)];
  const facts = [["text", JSON.stringify(text)], ["id", id], ["tape", at], ["from", by]];
  if (output) facts.push(["rollout", `${data.logprobs[output.turn][output.offset]} nats`]);
  data.strips.forEach((strip, i) => {
    const difference = data.differences[i].get(at);
    if (difference === undefined) return;
    facts.push([`Δ ${strip.name}`, `${difference > 0 ? "+" : ""}${difference} nats`]);
  });
  return facts;
}

function showToken() {
  const live = state.data.rows.flatMap((row, i) => (contains(row.spans, state.at) ? [i] : []));
  const facts = [...factsOf(state.at), ["live in", ranges(live)]];
  $("#token").replaceChildren(
    ...facts.flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
}

function ranges(numbers) {
  const parts = [];
  numbers.forEach((n) => {
    const last = parts[parts.length - 1];
    if (last && last[1] === n - 1) last[1] = n;
    else parts.push([n, n]);
  });
  const text = parts.map(([a, b]) => (a === b ? `row ${a}` : `rows ${a}–${b}`)).join(", ");
  return text || "no row";
}

// --- search -----------------------------------------------------------------------------------

function search() {
  const { data } = state, query = $("#query").value.toLowerCase();
  state.hits = [];
  state.hit = -1;
  let at = query ? data.all.indexOf(query) : -1;
  while (at >= 0 && state.hits.length < MOST_HITS) {
    state.hits.push([tokenOf(at), tokenOf(at + query.length - 1) + 1]);
    at = data.all.indexOf(query, at + query.length);
  }
  tellHits();
  stairs.redraw();
}

function tokenOf(character) {
  return firstAtLeast(state.data.starts, character + 1) - 1;
}

function nextHit(by) {
  if (!state.hits.length) return;
  state.hit = (state.hit + by + state.hits.length) % state.hits.length;
  const [at] = state.hits[state.hit];
  select(rowOf(at), at);
  tellHits();
}

function tellHits() {
  const count = state.hits.length;
  const most = count === MOST_HITS ? "+" : "";
  const words = state.hit < 0 ? `${count}${most} found` : `${state.hit + 1} of ${count}${most}`;
  $("#hits").textContent = $("#query").value ? words : "";
}

// --- looks ------------------------------------------------------------------------------------

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  for (const name of ["panel", "ink", "faint", "accent", "select", "hole", "hatch", "gone",
    "under", "over"]) state.colours[name] = colour(name);
  state.colours.roles = index.roles.map(colour);
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  readColours();
  legend();
  if (!state.data) return;
  stairs.redraw();
  drawTree();
  showText();
}

function legend() {
  const says = {
    system: "system", user: "task", response: "sampled by the policy",
    observation: "observation", edit: "text that an edit brought", template: "chat markup",
  };
  const entries = index.roles.map((role, i) => [state.colours.roles[i], says[role]]);
  entries.push([state.colours.hole, "evicted"], [state.colours.gone, "evicted here"],
    [state.colours.roles[4], "summary (bar above)"],
    [state.colours.accent, "back or moved (bar above), edit (arrow)"],
    [state.colours.ink, "target of the branch (bar below)"]);
  if (index.scored) {
    entries.push([state.colours.under, "train below rollout log-prob"],
      [state.colours.over, "above"]);
  }
  $("#legend").replaceChildren(...entries.map(([colour, text]) => {
    const item = document.createElement("span");
    const box = document.createElement("i");
    box.style.background = colour;
    item.append(box, text);
    return item;
  }));
}

function showTip(event) {
  const place = stairs.place(event), tip = $("#tip");
  tip.hidden = !place || place.at === null;
  if (tip.hidden) return;
  const { at, row } = place, { data } = state;
  const around = data.texts.slice(Math.max(0, at - 8), at).join("") +
    `[${data.texts[at]}]` + data.texts.slice(at + 1, at + 12).join("");
  const live = row < 0 || contains(data.rows[row].spans, at);
  const where = live ? "" : at < data.rows[row].end ? "evicted in this row\n" : "not yet there\n";
  const facts = factsOf(at).slice(1).map(([name, value]) => `${name} ${value}`).join("\n");
  tip.textContent = `${around}\n\n${where}${facts}`;
  const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
  const low = event.clientY + 18 + tip.offsetHeight > window.innerHeight;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${low ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18}px`;
}

// --- keys and start ---------------------------------------------------------------------------

const KEYS = {
  j: () => step(1),
  k: () => step(-1),
  n: () => goToEdit(state.edit + 1),
  p: () => goToEdit(state.edit - 1),
  t: () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"),
  "+": () => stairs.zoom(1.6),
  "=": () => stairs.zoom(1.6),
  "-": () => stairs.zoom(1 / 1.6),
  0: () => stairs.fit(),
  "?": () => $("#keys").showModal(),
  "/": () => $("#query").focus(),
  ArrowUp: () => select(state.row - 1, state.at),
  ArrowDown: () => select(state.row + 1, state.at),
  ArrowLeft: (event) => move(event.shiftKey ? -20 : -1),
  ArrowRight: (event) => move(event.shiftKey ? 20 : 1),
};

document.addEventListener("keydown", (event) => {
  if (event.target === $("#query") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (!KEYS[event.key] || $("#keys").open) return;
  event.preventDefault();
  KEYS[event.key](event);
});
$("#query").addEventListener("input", search);
$("#query").addEventListener("keydown", (event) => {
  if (event.key === "Escape") event.target.blur();
  if (event.key === "Enter") nextHit(event.shiftKey ? -1 : 1);
});
$("#search").addEventListener("submit", (event) => event.preventDefault());
$("#text").addEventListener("click", (event) => {
  if (event.target.dataset.at) select(state.row, Number(event.target.dataset.at));
});
$("#stairs").addEventListener("pointermove", showTip);
$("#stairs").addEventListener("pointerleave", () => { $("#tip").hidden = true; });
$("#in").onclick = KEYS["+"];
$("#out").onclick = KEYS["-"];
$("#fit").onclick = KEYS[0];
$("#theme").onclick = KEYS.t;
$("#help").onclick = KEYS["?"];
$("#title").textContent = index.title;
document.title = index.title;
for (const [key, label] of COLUMNS) {
  $("#episodes thead tr").append(element("th", label, { onclick: () => sortBy(key) }));
}
listEpisodes();
setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
open(0);
