"use strict";
// The staircase of live contexts: rows are branches, columns are the tape. A canvas the size of
// the viewport is drawn anew on every scroll, so its cost does not grow with the episode.

const GUTTER = 164, AXIS = 20, STRIP = 14;

function contains(spans, at) {
  let low = 0, high = spans.length - 1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (at < spans[middle][0]) high = middle - 1;
    else if (at >= spans[middle][1]) low = middle + 1;
    else return true;
  }
  return false;
}

// Differences span orders of magnitude: 0.001 nats is barely seen, 1 nat is full colour.
function heat(difference) {
  return Math.min(1, Math.log10(1 + Math.abs(difference) / 0.001) / 3);
}

class Stairs {
  constructor(box, state, pick) {
    this.box = box;
    this.extent = box.querySelector("#extent");
    this.canvas = box.querySelector("canvas");
    this.state = state;
    this.scale = 1;
    this.waiting = false;
    this.band = document.createElement("canvas");
    box.addEventListener("scroll", () => this.redraw());
    new ResizeObserver(() => this.resize()).observe(box);
    box.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.canvas.addEventListener("click", (event) => {
      const place = this.place(event);
      if (place) pick(place);
    });
  }

  get head() { return AXIS + STRIP * this.state.data.strips.length + 4; }
  get row() { return this.state.data.rows.length > 14 ? 16 : 24; }
  get length() { return this.state.data.tokens.length; }
  get smallest() { return (this.box.clientWidth - GUTTER - 12) / Math.max(1, this.length); }

  fit() {
    this.scale = this.smallest;
    this.size();
    this.box.scrollLeft = 0;
  }

  zoom(factor, x = this.box.clientWidth / 2) {
    const at = (x - GUTTER + this.box.scrollLeft) / this.scale;
    const least = Math.min(this.smallest, 14);
    this.scale = Math.min(14, Math.max(least, this.scale * factor));
    this.size();
    this.box.scrollLeft = at * this.scale + GUTTER - x;
  }

  wheel(event) {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const x = event.clientX - this.box.getBoundingClientRect().left;
    this.zoom(Math.exp(-event.deltaY / 300), x);
  }

  resize() {
    if (!this.state.data) return;
    if (this.scale < this.smallest) this.scale = this.smallest;
    this.size();
  }

  size() {
    const height = this.head + this.row * this.state.data.rows.length + 6;
    this.extent.style.width = `${Math.ceil(GUTTER + this.length * this.scale + 12)}px`;
    this.extent.style.height = `${height}px`;
    // The canvas is inside the extent: it may not be what makes the box higher.
    this.canvas.style.height = "0";
    const width = this.box.clientWidth;
    const seen = Math.max(1, Math.min(this.box.clientHeight, height));
    const ratio = window.devicePixelRatio || 1;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${seen}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(seen * ratio);
    this.redraw();
  }

  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  // Where a pointer is: a tape position and a row, or a strip (row -1).
  place(event) {
    if (!this.state.data) return null;
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const at = Math.floor((x - GUTTER + this.box.scrollLeft) / this.scale);
    const row = Math.floor((y - this.head + this.box.scrollTop) / this.row);
    if (y > AXIS && y < this.head) return this.inside(at, -1, Math.floor((y - AXIS) / STRIP));
    if (y < this.head || row >= this.state.data.rows.length) return null;
    return x < GUTTER ? { row, at: null } : this.inside(at, row, -1);
  }

  inside(at, row, strip) {
    return at >= 0 && at < this.length ? { at, row, strip } : null;
  }

  // Scroll so that a row and a position are in sight.
  reveal(row, at) {
    const left = at * this.scale, width = this.box.clientWidth - GUTTER;
    if (left < this.box.scrollLeft || left > this.box.scrollLeft + width - 30) {
      this.box.scrollLeft = left - width / 2;
    }
    const top = row * this.row, height = this.box.clientHeight - this.head;
    if (top < this.box.scrollTop || top + this.row > this.box.scrollTop + height) {
      this.box.scrollTop = top - height / 2;
    }
    this.redraw();
  }

  draw() {
    const { data, colours } = this.state;
    if (!data) return;
    const ratio = window.devicePixelRatio || 1;
    const pen = this.canvas.getContext("2d");
    const width = this.canvas.width / ratio, height = this.canvas.height / ratio;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const x0 = this.box.scrollLeft, y0 = this.box.scrollTop;
    const X = (at) => GUTTER + at * this.scale - x0;
    const from = Math.max(0, Math.floor(x0 / this.scale));
    const to = Math.min(this.length, Math.ceil((x0 + width - GUTTER) / this.scale) + 1);
    this.paintBand(X, width, from, to);
    const first = Math.max(0, Math.floor(y0 / this.row));
    const last = Math.min(data.rows.length - 1, Math.ceil((y0 + height - this.head) / this.row));
    for (let r = first; r <= last; r++) {
      this.drawRow(pen, r, this.head + r * this.row - y0, X, from, to, width);
    }
    pen.fillStyle = colours.panel;
    pen.fillRect(0, 0, width, this.head);
    this.drawAxis(pen, X, width, from, to);
    data.strips.forEach((strip, i) => this.drawStrip(pen, strip, AXIS + i * STRIP, X, from, to));
    if (this.state.at !== null) {
      pen.fillStyle = colours.select;
      pen.fillRect(X(this.state.at), AXIS - 6, Math.max(1.5, this.scale), 6);
      pen.globalAlpha = 0.35;
      pen.fillRect(X(this.state.at), AXIS, Math.max(1, Math.min(2, this.scale)), height);
      pen.globalAlpha = 1;
    }
  }

  // One line of pixels with the colours of the visible tape; rows copy what they still see.
  paintBand(X, width, from, to) {
    const { data, colours } = this.state;
    this.band.width = Math.max(1, Math.ceil(width));
    this.band.height = 1;
    const pen = this.band.getContext("2d");
    for (let i = firstRun(data.roles, from); i < data.roles.length; i++) {
      const [start, role] = data.roles[i];
      if (start >= to) break;
      const stop = i + 1 < data.roles.length ? data.roles[i + 1][0] : this.length;
      pen.fillStyle = colours.roles[role];
      pen.fillRect(X(start), 0, Math.max(1, X(stop) - X(start)), 1);
    }
  }

  drawRow(pen, r, y, X, from, to, width) {
    const { data, colours, row: selected } = this.state;
    const row = data.rows[r], bar = this.row - 6;
    if (r === selected) {
      pen.fillStyle = colours.hole;
      pen.fillRect(0, y - 2, width, this.row - 1);
    }
    this.fillSpans(pen, [[0, row.end]], y, bar, X, from, to, colours.hole, colours.hatch);
    for (const edit of row.edits) {
      this.fillSpans(pen, edit.removed, y, bar, X, from, to, colours.gone);
    }
    for (const [start, stop] of row.spans) {
      if (stop <= from) continue;
      if (start >= to) break;
      const left = Math.max(GUTTER, X(start)), right = Math.min(width, X(stop));
      const size = Math.max(1, right - left);
      if (right >= GUTTER) pen.drawImage(this.band, left, 0, size, 1, left, y, size, bar);
    }
    // Underlined: what is sampled in this branch, and so a target of its forward.
    this.fillSpans(pen, row.outputs, y + bar, 2.5, X, from, to, colours.ink);
    for (const mark of data.marks) {
      if (mark.row > r || !contains(row.spans, mark.span[0])) continue;
      const colour = mark.summary ? colours.roles[4] : colours.accent;
      this.fillSpans(pen, [mark.span], y - 2, 3, X, from, to, colour);
    }
    for (const edit of row.edits) {
      const at = edit.removed.length ? edit.removed[0][0] : edit.position;
      if (at >= from && at < to) triangle(pen, X(at), y - 3, colours.accent);
    }
    pen.fillStyle = colours.panel;
    pen.fillRect(0, y - 3, GUTTER - 1, this.row);
    pen.fillStyle = r === selected ? colours.select : colours.ink;
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "left";
    const turns = row.first === row.last ? `turn ${row.first}` : `turns ${row.first}–${row.last}`;
    pen.fillText(turns, 8, y + bar - 1);
    pen.fillStyle = colours.faint;
    pen.textAlign = "right";
    pen.fillText(`${row.length.toLocaleString()} t`, GUTTER - 8, y + bar - 1);
  }

  fillSpans(pen, spans, y, height, X, from, to, colour, line) {
    pen.fillStyle = colour;
    for (const [start, stop] of spans) {
      if (stop <= from || start >= to) continue;
      const left = Math.max(GUTTER, X(start)), size = X(Math.min(stop, to)) - left;
      if (size <= 0) continue;
      pen.fillRect(left, y, Math.max(1, size), height);
      if (line) {
        pen.fillStyle = line;
        pen.fillRect(left, y + height / 2, Math.max(1, size), 1);
        pen.fillStyle = colour;
      }
    }
  }

  drawAxis(pen, X, width, from, to) {
    const { colours, hits } = this.state;
    const step = niceStep(90 / this.scale);
    pen.fillStyle = colours.faint;
    pen.font = "10px system-ui, sans-serif";
    pen.textAlign = "left";
    pen.fillText("tape position", 8, 11);
    for (let at = Math.ceil(from / step) * step; at < to; at += step) {
      pen.fillRect(X(at), 13, 1, 5);
      pen.fillText(at.toLocaleString(), X(at) + 3, 11);
    }
    pen.fillStyle = colours.accent;
    for (const [start] of hits) {
      if (start >= from && start < to) pen.fillRect(X(start), AXIS - 5, Math.max(2, this.scale), 5);
    }
  }

  drawStrip(pen, strip, y, X, from, to) {
    const { colours } = this.state;
    pen.fillStyle = colours.ink;
    pen.font = "10px system-ui, sans-serif";
    pen.textAlign = "left";
    pen.fillText(strip.name, 8, y + 9);
    let pixel = -1, worst = 0;
    const flush = () => {
      if (pixel < GUTTER || !worst) return;
      pen.globalAlpha = heat(worst);
      pen.fillStyle = worst < 0 ? colours.under : colours.over;
      pen.fillRect(pixel, y, Math.max(1, this.scale), STRIP - 3);
    };
    for (let i = firstAtLeast(strip.at, from); i < strip.at.length && strip.at[i] < to; i++) {
      const x = Math.floor(X(strip.at[i]));
      if (x !== pixel) {
        flush();
        pixel = x;
        worst = 0;
      }
      if (Math.abs(strip.difference[i]) > Math.abs(worst)) worst = strip.difference[i];
    }
    flush();
    pen.globalAlpha = 1;
  }
}

function triangle(pen, x, y, colour) {
  pen.fillStyle = colour;
  pen.beginPath();
  pen.moveTo(x - 4, y - 1);
  pen.lineTo(x + 4, y - 1);
  pen.lineTo(x, y + 5);
  pen.fill();
}

// Index of the run that holds a position.
function firstRun(runs, at) {
  let low = 0, high = runs.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (runs[middle][0] <= at) low = middle;
    else high = middle - 1;
  }
  return low;
}

function firstAtLeast(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= least) || 10 * power;
}
