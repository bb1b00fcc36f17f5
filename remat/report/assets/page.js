// Links the figures: what is pointed at in one is shown in the others. Without it the page still reads.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const GIB = 2 ** 30;
  const size = (bytes) =>
    bytes >= GIB ? `${(bytes / GIB).toFixed(2)} GiB`
      : bytes >= 2 ** 20 ? `${(bytes / 2 ** 20).toFixed(2)} MiB`
        : bytes >= 1024 ? `${(bytes / 1024).toFixed(2)} KiB` : `${bytes} B`;
  const time = (us) => us >= 1e7 ? `${(us / 1e6).toFixed(1)} s` : us >= 1e5 ? `${(us / 1e3).toFixed(1)} ms` : `${(us / 1e3).toFixed(2)} ms`;
  const PHASES = ["forward", "recomputation", "backward", "the optimizer"];

  // The curve: a mark says its numbers, and draws its peak into the step.
  const ghost = $("ghost"), curveReadout = $("curve-readout");
  const says = curveReadout && curveReadout.textContent;
  let chosen = null;
  const showMark = (mark) => {
    for (const other of document.querySelectorAll(".mark.on")) other.classList.remove("on");
    if (!mark) { curveReadout.textContent = says; if (ghost) ghost.hidden = true; return; }
    mark.classList.add("on");
    const [name, ...rest] = mark.getAttribute("aria-label").split(": ");
    curveReadout.textContent = "";
    const strong = document.createElement("b");
    strong.textContent = `${name}: `;
    curveReadout.append(strong, rest.join(": "));
    if (ghost) {
      const peak = Number(mark.dataset.peak), share = peak / data.most_bytes;
      ghost.hidden = share > 1 || mark.classList.contains("k-plan");
      ghost.style.bottom = `${100 * share}%`;
      ghost.firstChild.textContent = `${name}: ${size(peak)}`;
    }
  };
  for (const mark of document.querySelectorAll(".mark")) {
    mark.addEventListener("pointerenter", () => showMark(mark));
    mark.addEventListener("pointerleave", () => showMark(chosen));
    mark.addEventListener("focus", () => showMark(mark));
    mark.addEventListener("blur", () => showMark(chosen));
    mark.addEventListener("click", () => { chosen = chosen === mark ? null : mark; showMark(chosen); });
  }

  if (!data.columns) return;
  const { time: begins, phase, node, kib } = data.columns;
  const names = Object.keys(kib);
  const tree = $("tree"), plot = $("step-plot"), cursor = $("cursor"), strip = $("strip");
  const rowOf = new Map([...tree.querySelectorAll("[data-n]")].map((row) => [Number(row.dataset.n), row]));
  const values = new Map([...$("step-values").querySelectorAll("[data-c]")].map((cell) => [cell.dataset.c, cell]));
  const atPeak = new Map([...values].map(([name, cell]) => [name, cell.textContent]));
  const peakSays = $("step-readout").textContent;
  const nodesIn = (row) =>
    row.dataset.n !== undefined ? [Number(row.dataset.n)]
      : [...row.parentElement.querySelectorAll("[data-n]")].map((leaf) => Number(leaf.dataset.n));

  // Spans of nodes, in the step and in the strip.
  const draw = (host, spans) => {
    host.textContent = "";
    for (const [begin, end, kind] of spans) {
      const span = document.createElement("i");
      span.style.left = `${begin / 100}%`;
      span.style.width = `${(end - begin) / 100}%`;
      span.className = ["", "again", "backward", "", "copy", "copy"][kind] || "";
      host.append(span);
    }
  };
  const joined = (spans) => {
    const found = [];
    for (const span of spans.sort((a, b) => a[2] - b[2] || a[0] - b[0])) {
      const last = found[found.length - 1];
      if (last && last[2] === span[2] && span[0] <= last[1] + 4) last[1] = Math.max(last[1], span[1]);
      else found.push([...span]);
    }
    return found;
  };
  let pinned = null;
  const mark = (rows, style) => {
    for (const row of tree.querySelectorAll(`.${style}`)) row.classList.remove(style);
    for (const row of rows) row.classList.add(style);
  };
  const showNodes = (nodes) => {
    draw($("step-spans"), joined(nodes.flatMap((n) => data.spans[n])));
    draw($("strip-spans"), joined(nodes.map((n) => [...data.strip[n], 0])));
  };
  const visible = (row) => { // the row itself, or the closed module that hides it
    let shown = row;
    for (let up = row.parentElement; up && up !== tree; up = up.parentElement)
      if (up.tagName === "DETAILS" && !up.open) shown = up.firstElementChild;
    return shown;
  };
  const lightNode = (n) => mark(rowOf.has(n) ? [visible(rowOf.get(n))] : [], "lit");
  const rest = () => { mark([], "lit"); showNodes(pinned ? nodesIn(pinned) : []); };
  const pin = (row) => {
    pinned = pinned === row ? null : row;
    mark(pinned ? [pinned] : [], "pinned");
    rest();
  };
  for (const row of tree.querySelectorAll("summary, [data-n]")) {
    const isNode = row.dataset.n !== undefined;
    if (isNode) row.tabIndex = 0;
    row.addEventListener("pointerenter", () => showNodes(nodesIn(row)));
    row.addEventListener("pointerleave", rest);
    row.addEventListener("focus", () => showNodes(nodesIn(row)));
    row.addEventListener("blur", rest);
    row.addEventListener("click", () => pin(row));
    if (isNode) row.addEventListener("keydown", (event) => { if (event.key === "Enter") pin(row); });
  }
  const goTo = (n) => { // from a figure to the row
    const row = rowOf.get(n);
    if (!row) return;
    for (let up = row.parentElement; up && up !== tree; up = up.parentElement) if (up.tagName === "DETAILS") up.open = true;
    if (pinned !== row) pin(row);
    row.scrollIntoView({ block: "center", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  };

  // The step: a cursor with what is alive and what runs.
  let at = -1;
  const showMoment = (index) => {
    at = index;
    cursor.hidden = index < 0;
    if (index < 0) {
      for (const [name, cell] of values) cell.textContent = atPeak.get(name);
      $("step-readout").textContent = peakSays;
      rest();
      return;
    }
    cursor.style.left = `${begins[index] / 100}%`;
    let total = 0;
    for (const name of names) {
      const bytes = kib[name][index] * 1024;
      total += bytes;
      values.get(name).textContent = size(bytes);
    }
    const runs = node[index] >= 0 ? ` · ${data.nodes[node[index]]}` : "";
    $("step-readout").textContent = `After ${time(begins[index] / 1e4 * data.total_us)}: ${size(total)} alive · ${PHASES[phase[index]]}${runs}`;
    if (node[index] >= 0) { lightNode(node[index]); showStrip(node[index]); }
  };
  const showStrip = (n) => draw($("strip-spans"), [[...data.strip[n], 0]]);
  const indexAt = (place) => {
    let low = 0, high = begins.length - 1;
    while (low < high) { const middle = (low + high + 1) >> 1; if (begins[middle] <= place) low = middle; else high = middle - 1; }
    return low;
  };
  const placeIn = (element, event) => {
    const box = element.getBoundingClientRect();
    return 1e4 * Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
  };
  plot.addEventListener("pointermove", (event) => showMoment(indexAt(placeIn(plot, event))));
  plot.addEventListener("pointerdown", (event) => showMoment(indexAt(placeIn(plot, event))));
  plot.addEventListener("pointerleave", () => showMoment(-1));
  plot.addEventListener("blur", () => showMoment(-1));
  plot.addEventListener("click", () => { if (at >= 0 && node[at] >= 0) goTo(node[at]); });
  plot.addEventListener("keydown", (event) => {
    const far = event.shiftKey ? 20 : 1;
    if (event.key === "ArrowRight") showMoment(Math.min(at + far, begins.length - 1));
    else if (event.key === "ArrowLeft") showMoment(Math.max(at - far, 0));
    else if (event.key === "Enter" && at >= 0) goTo(node[at]);
    else return;
    event.preventDefault();
  });

  // The strip: a node, and when it runs.
  const nodeAt = (place) => data.strip.findIndex(([begin, end]) => place >= begin && place < end);
  strip.addEventListener("pointermove", (event) => {
    const n = nodeAt(placeIn(strip, event));
    if (n >= 0) { lightNode(n); showNodes([n]); }
  });
  strip.addEventListener("pointerleave", rest);
  strip.addEventListener("click", (event) => goTo(nodeAt(placeIn(strip, event))));

  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    chosen = null;
    if (curveReadout) showMark(null);
    if (pinned) pin(pinned);
    showMoment(-1);
  });
})();
