"use strict";
const table = document.getElementById("tensors");
const byId = id => document.getElementById(id);

// --- The table ---

if (table) {
  const heads = [...table.tHead.rows[0].cells];
  const layers = [...table.querySelectorAll("tbody.layer")];
  const tensors = [...table.querySelectorAll("tbody.tensor")];
  const members = new Map(layers.map(layer => [layer, tensors.filter(t => t.dataset.layer === layer.id)]));
  const alone = tensors.filter(t => !t.dataset.layer);
  const button = entry => entry.querySelector("th button");
  const isOpen = entry => button(entry)?.getAttribute("aria-expanded") === "true";

  // What a column sorts an entry by: a number where it is one, null where there is none, which goes last.
  function key(entry, column) {
    const value = entry.rows[0].cells[column].dataset.v;
    if (value === "") return null;
    return Number.isNaN(Number(value)) ? value : Number(value);
  }

  function sorted(entries, column, down) {
    const keyed = entries.map(entry => [key(entry, column), entry]);
    keyed.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      const order = typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
      return down ? -order : order;
    });
    return keyed.map(([, entry]) => entry);
  }

  function arrange() {
    const column = heads.findIndex(head => head.getAttribute("aria-sort") !== "none");
    const down = column >= 0 && heads[column].getAttribute("aria-sort") === "descending";
    const inOrder = entries => (column < 0 ? entries : sorted(entries, column, down));
    if (byId("view").value === "tensors") table.append(...layers, ...inOrder(tensors));
    else table.append(...inOrder(layers).flatMap(layer => [layer, ...inOrder(members.get(layer))]), ...inOrder(alone));
    show();
  }

  function show() {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = byId("kind").value, flat = byId("view").value === "tensors";
    const reads = entry => words.every(word => entry.rows[0].textContent.toLowerCase().includes(word));
    const ofKind = entry => !chosen || entry.dataset.kind === chosen || entry.dataset.reason === chosen;
    let count = 0;
    for (const entry of tensors) {
      const layer = byId(entry.dataset.layer);
      const fits = ofKind(entry) && (reads(entry) || (!flat && layer !== null && reads(layer)));
      entry.hidden = !fits || (!flat && layer !== null && !isOpen(layer));
      entry.dataset.fits = fits;
      count += fits;
    }
    for (const layer of layers) {
      const within = members.get(layer).some(entry => entry.dataset.fits === "true");
      layer.hidden = flat || !(within || (!chosen && reads(layer)));
    }
    const whole = tensors.length.toLocaleString("en");
    byId("count").textContent = `${count.toLocaleString("en")} of ${whole} tensors`;
  }

  function open(entry, wanted) {
    button(entry)?.setAttribute("aria-expanded", String(wanted));
    if (entry.classList.contains("layer")) show();
    else entry.rows[1].hidden = !wanted;
  }

  function openTarget() {
    const entry = byId(location.hash.slice(1));
    if (!entry || entry.tagName !== "TBODY") return;
    byId("filter").value = byId("kind").value = "";
    byId("view").value = entry.classList.contains("layer") || entry.dataset.layer ? "layers" : byId("view").value;
    if (entry.dataset.layer) open(byId(entry.dataset.layer), true);
    open(entry, true);
    arrange();
    entry.scrollIntoView({ block: "center" });
  }

  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(other => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    arrange();
  }));
  [...layers, ...tensors].forEach(entry => button(entry)?.addEventListener("click", () => open(entry, !isOpen(entry))));
  byId("filter").addEventListener("input", show);
  byId("kind").addEventListener("change", show);
  byId("view").addEventListener("change", arrange);
  addEventListener("hashchange", openTarget);
  openTarget();
}

// --- The drawing ---

const graph = byId("graph");
if (graph) {
  const own = Number(graph.getAttribute("width")), canvas = byId("canvas");
  const STEP = 1.5, MOST = 6, READABLE = 0.45;
  const whole = () => Math.min(1, canvas.clientWidth / own || 1);
  let scale = whole();

  function zoom(wanted) {
    const before = scale, middle = canvas.scrollLeft + canvas.clientWidth / 2;
    scale = Math.max(whole(), Math.min(MOST, wanted));
    graph.setAttribute("width", own * scale);
    graph.setAttribute("height", graph.viewBox.baseVal.height * scale);
    canvas.scrollLeft = middle * (scale / before) - canvas.clientWidth / 2;
  }

  function colour() {
    const mode = byId("colour").value;
    graph.dataset.colour = mode;
    document.querySelectorAll(".key").forEach(key => { key.hidden = key.dataset.mode !== mode; });
  }

  byId("closer").addEventListener("click", () => zoom(scale * STEP));
  byId("farther").addEventListener("click", () => zoom(scale / STEP));
  byId("whole").addEventListener("click", () => zoom(0));
  byId("colour").addEventListener("change", colour);
  canvas.addEventListener("wheel", event => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoom(scale * (event.deltaY < 0 ? STEP : 1 / STEP));
  }, { passive: false });
  colour();
  zoom(READABLE);
  canvas.scrollLeft = 0;
}

document.querySelectorAll("form").forEach(form => form.addEventListener("submit", event => event.preventDefault()));
