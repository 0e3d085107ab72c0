// What the page is made from: its data, its state, and the making of elements.

const COLOURS = 8; // as many as page.css defines
const AT_ONCE = 60; // entries of a long list shown before one asks for more
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const layouts = new Map(
  Object.entries(data.plan.layouts).map(([name, layout]) => [name, new Layout(layout)]),
);
const rows = data.plan.rows.map((row) => new Row(layouts, row));
const { hosts } = data; // [{ name, ranks, within }]
const span = [...layouts.values()][0];
const hostOf = new Map(hosts.flatMap((host) => host.ranks.map((rank) => [rank, host])));
const sequence = hosts.flatMap((host) => host.ranks); // as drawn, for the arrow keys
const grids = [...layouts].filter(
  ([name, layout]) =>
    data.offered.includes(name) && layout.offset === span.offset && layout.size === span.size,
);
grids.sort(([one], [other]) => data.offered.indexOf(one) - data.offered.indexOf(other));

const cells = new Map(); // rank -> element
const state = { tab: "rank", pinned: false, example: null };
let places = null; // rank -> centre of its cell, until the page is laid out anew
let near = new Set(); // ranks that share a dim's group with the one looked at
let outlined = null; // the group whose members are marked and whose ring is drawn

function make(tag, properties = {}, ...children) {
  const { role, data: dataset = {}, aria = {}, ...rest } = properties;
  const element = Object.assign(document.createElement(tag), rest);
  if (role) element.setAttribute("role", role);
  Object.assign(element.dataset, dataset);
  for (const [key, value] of Object.entries(aria)) element.setAttribute(`aria-${key}`, value);
  element.append(...children);
  return element;
}

const button = (text, onclick, properties = {}) =>
  make("button", { type: "button", onclick, ...properties }, text);
const count = (number) => number.toLocaleString("en");
const many = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
// The border that is expensive to cross: of an NVLink domain where they are known, or a host.
const boundary = hosts.some(({ within }) => within)
  ? { word: "NVLink domain", one: "an NVLink domain" }
  : { word: "host", one: "a host" };
const crossed = (across, links) =>
  `${across} of ${many(links, "link")} cross${across === 1 ? "es" : ""} ${boundary.word}s`;
const nameOf = (rank) => hostOf.get(rank)?.name ?? "a host unknown";
const placeOf = (rank) => hostOf.get(rank)?.within || nameOf(rank);
const touched = (members) => new Set(members.map(placeOf));
// The files of a recorded job may lack the names of hosts: then nobody knows how many there are.
const counted = (names, word = boundary.word) =>
  names.has("host not known") ? "hosts not known" : many(names.size, word);
const crossing = (members) => ring(members).filter(([a, b]) => placeOf(a) !== placeOf(b));
const say = (text) => {
  clearTimeout(state.said);
  $("status").textContent = text;
  state.said = setTimeout(() => ($("status").textContent = ""), 8000);
};

// Entries under one parent, a part at a time.
function listed(parent, entries, entry) {
  const more = (start) => {
    entries.slice(start, start + AT_ONCE).forEach((each) => parent.append(entry(each)));
    const left = entries.length - start - AT_ONCE;
    if (left > 0) {
      const text = `Show ${Math.min(left, AT_ONCE)} more of ${count(entries.length)}`;
      const onclick = () => (next.remove(), more(start + AT_ONCE));
      const next = button(text, onclick, { className: "more" });
      parent.append(next);
    }
  };
  more(0);
  return parent;
}

const shortly = (ranks) =>
  ranks.length > 6 ? `${ranks.slice(0, 4).join(", ")}, … ${ranks.at(-1)}` : ranks.join(", ");

// The groups along one dim, as if the plan named them.
function dimRow(layout, dim) {
  const [name] = grids.find(([, each]) => each === layout);
  const row = new Row(layouts, { label: dim, layout: name, dims: [dim] });
  return Object.assign(row, { along: true });
}

// The dims of all grids as rows, those with equal groups once: ep of one grid may be dp of another.
function dimsOfAll() {
  const kinds = new Map();
  const known = new Set();
  for (const [name, layout] of grids) {
    for (const dim of layout.wide) {
      const title = known.has(dim) ? `${name} ${dim}` : dim;
      const axis = layout.dims.indexOf(dim);
      const step = `${layout.strides[axis]} x ${layout.sizes[axis]}`; // decides all groups
      const row = dimRow(layout, dim);
      const before = kinds.get(step);
      if (!before) kinds.set(step, { dim, title, row, across: acrossHosts(row) });
      else if (before.dim !== dim) before.title += ` and ${title}`;
    }
    layout.dims.forEach((dim) => known.add(dim));
  }
  return [...kinds.values()];
}

function acrossHosts(row) {
  let across = 0;
  for (let number = 0; number < row.count; number++) across += touched(row.nth(number)).size > 1;
  return across;
}
