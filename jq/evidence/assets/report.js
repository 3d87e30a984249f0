"use strict";
const table = document.getElementById("tensors");
const entries = [...table.tBodies];
const heads = [...table.tHead.rows[0].cells];

// What a column sorts an entry by: a number where it is one, null where there is none, which goes last.
function key(entry, column) {
  const found = entry.rows[0].cells[column].dataset.v;
  if (found === "") return null;
  return Number.isNaN(Number(found)) ? found : Number(found);
}

function sort(column) {
  const down = heads[column].getAttribute("aria-sort") === "ascending";
  heads.forEach(head => head.setAttribute("aria-sort", "none"));
  heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
  const keyed = entries.map(entry => [key(entry, column), entry]);
  keyed.sort(([a], [b]) => {
    if (a === null || b === null) return (a === null) - (b === null);
    const order = typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
    return down ? -order : order;
  });
  table.append(...keyed.map(([, entry]) => entry));
}

function filter() {
  const words = document.getElementById("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const chosen = document.getElementById("kind").value;
  let count = 0;
  for (const entry of entries) {
    const line = entry.rows[0].textContent.toLowerCase();
    const fits = !chosen || entry.dataset.kind === chosen || entry.dataset.reason === chosen;
    entry.hidden = !(fits && words.every(word => line.includes(word)));
    count += !entry.hidden;
  }
  document.getElementById("count").textContent = `${count.toLocaleString("en")} of ${entries.length.toLocaleString("en")} tensors`;
}

function open(entry, wanted) {
  const more = entry.rows[1];
  more.hidden = !wanted;
  entry.querySelector("button").setAttribute("aria-expanded", String(wanted));
}

function openTarget() {
  const entry = entries.find(e => e.id === location.hash.slice(1));
  if (!entry) return;
  entry.hidden = false;
  open(entry, true);
  entry.scrollIntoView({ block: "center" });
}

heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => sort(column)));
entries.forEach(entry => entry.querySelector("button").addEventListener("click", () => open(entry, entry.rows[1].hidden)));
document.getElementById("filter").addEventListener("input", filter);
document.getElementById("kind").addEventListener("change", filter);
document.querySelector("form").addEventListener("submit", event => event.preventDefault());
addEventListener("hashchange", openTarget);
openTarget();
