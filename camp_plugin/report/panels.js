// What is below the staircase: the text of the live context, the edits, the tree.

// --- text -------------------------------------------------------------------------------------

const HIGHEST_CANVAS = 16000; // pixels; browsers draw nothing on a canvas of more

function showText() {
  const { data, row: number, at } = state;
  const row = data.rows[number];
  const [cursorSpan, cursorOffset] = locate(row.view, at);
  const before = row.view.slice(0, cursorSpan).reduce((n, [a, b]) => n + b - a, 0);
  const center = before + cursorOffset;
  const parts = [];
  let offset = 0, last = 0;
  for (const [start, stop] of row.view) {
    const from = Math.max(0, center - WINDOW - offset);
    const to = Math.min(stop - start, center + WINDOW - offset);
    if (from < to && from === 0) parts.push(...between(last, start));
    for (let i = from; i < to; i++) parts.push(tokenSpan(start + i));
    offset += stop - start;
    last = stop;
  }
  const seen = Math.min(row.length, center + WINDOW) - Math.max(0, center - WINDOW);
  $("#context h2").textContent = `Row ${number}: the live context of turn ${row.last}, in the ` +
    `order that the policy saw (${seen.toLocaleString()} of ${row.length.toLocaleString()} tokens)`;
  $("#text").replaceChildren(...parts);
  const cursor = $("#text .cursor");
  if (cursor) bringInto($("#text"), cursor);
}

function between(last, start) {
  if (start === last) return [];
  if (start < last) return [element("em", "moved here")];
  const chip = element("em", `${(start - last).toLocaleString()} tokens evicted`);
  chip.onclick = () => {
    const found = state.data.rows.findIndex((row) => contains(row.spans, last));
    select(found < 0 ? state.row : found, last);
  };
  return [chip];
}

function tokenSpan(at) {
  const span = element("span", state.data.texts[at]);
  span.style.borderColor = state.colours.roles[roleAt(at)];
  span.dataset.at = at;
  if (at === state.at) span.classList.add("cursor");
  if (contains(state.hits, at)) span.classList.add("hit");
  const back = state.data.marks.some(
    ({ span: [start, stop], row }) => row <= state.row && at >= start && at < stop);
  if (back) span.classList.add("marked");
  return span;
}

// --- edits and tree ---------------------------------------------------------------------------

function listEdits() {
  $("#edits").replaceChildren(...state.data.edits.map((edit, i) => {
    const item = element("li", `${edit.kind} `);
    item.append(element("small", `by ${edit.cause}, before turn ${edit.turn}: `));
    const back = edit.inserted.filter(([start]) => start < edit.position).length;
    const words = [`${edit.left.toLocaleString()} tokens left`];
    if (edit.summary.length) words.push("summary stayed");
    if (back) words.push(`${back} ${back === 1 ? "span" : "spans"} back or moved`);
    item.append(words.join(", "));
    item.onclick = () => goToEdit(i);
    return item;
  }));
  if (!state.data.edits.length) $("#edits").append(element("li", "none: the context only grew"));
}

function goToEdit(i) {
  if (i < 0 || i >= state.data.edits.length) return;
  state.edit = i;
  [...$("#edits").children].forEach((item, j) => item.setAttribute("aria-current", i === j));
  bringInto($("#edits"), $("#edits").children[i]);
  const edit = state.data.edits[i];
  const span = edit.removed[0] || edit.inserted[0] || [edit.position];
  select(edit.row, span[0]);
}

function drawTree() {
  const { rows } = state.data, { colours } = state;
  const canvas = $("#tree canvas"), ratio = window.devicePixelRatio || 1;
  const width = $("#tree").clientWidth;
  const row = Math.min(12, HIGHEST_CANVAS / ratio / rows.length), height = rows.length * row + 8;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  const deepest = Math.max(...rows.map((r) => r.length));
  const X = (depth) => 8 + (depth / deepest) * (width - 24);
  const Y = (i) => 9 + i * row;
  rows.forEach(({ parent, fork, length }, i) => {
    pen.strokeStyle = colours.faint;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(X(fork), Y(Math.max(0, parent)));
    pen.lineTo(X(fork), Y(i));
    pen.stroke();
    pen.strokeStyle = i === state.row ? colours.select : colours.roles[2];
    pen.lineWidth = Math.min(3, row / 2);
    pen.beginPath();
    pen.moveTo(X(fork), Y(i));
    pen.lineTo(X(length), Y(i));
    pen.stroke();
  });
  canvas.onclick = (event) => {
    const y = event.clientY - canvas.getBoundingClientRect().top;
    const i = Math.max(0, Math.min(rows.length - 1, Math.round((y - 9) / row)));
    select(i, rows[i].outputs[0][0]);
  };
}
