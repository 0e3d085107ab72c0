// What one does with the page, and its start. The scripts before it draw.

const update = () => (light(), panel());

function look(rank) {
  if (state.pinned || state.rank === rank) return;
  state.rank = rank;
  update();
}

function pin(rank) {
  const again = state.pinned && state.rank === rank;
  Object.assign(state, { rank, pinned: !again, tab: "rank" });
  say(`Rank ${rank} ${again ? "is free again" : "is pinned"}.`);
  unfold(cells.get(rank).closest(".host"));
  cells.get(rank).scrollIntoView({ block: "nearest", inline: "nearest" });
  rove(rank);
  update();
}

function choose(group, item) {
  const { row, number, members } = group;
  state.group = group;
  light();
  chosenGroup();
  // The list stays as it is, so that the keyboard keeps its place in it.
  for (const each of $("list").querySelectorAll("[aria-pressed=true]")) {
    each.setAttribute("aria-pressed", false);
  }
  item?.setAttribute("aria-pressed", true);
  const where = `${many(members.length, "rank")} on ${counted(touched(members))}`;
  const links = crossed(crossing(members).length, ring(members).length);
  say(`${row.label}, group ${number}: ${where}, ${links}.`);
}

function clear() {
  const inPanel = document.querySelector("aside").contains(document.activeElement);
  const nothing = { rank: undefined, pinned: false, group: null, shownGroup: null, row: undefined };
  Object.assign(state, nothing, { example: null });
  state.unfolded?.classList.remove("open");
  if (state.tab === "names") $("list").dataset.shows = "";
  say("");
  update();
  if (inPanel) $(`tab-${state.tab}`).focus();
}

function goTo(rank) {
  if (!cells.has(rank)) return say(`Rank ${rank} is not in this grid.`);
  if (state.pinned && state.rank !== rank) state.pinned = false;
  unfold(cells.get(rank).closest(".host"));
  cells.get(rank).focus({ preventScroll: true });
  cells.get(rank).scrollIntoView({ block: "center", inline: "nearest" });
}

function search(event) {
  event.preventDefault();
  const sought = $("sought").value.trim().toLowerCase();
  const [low, high] = [span.offset, span.offset + span.size - 1];
  if (!sought) return say("Type the number of a rank or the name of a host.");
  const number = /^(rank\s*)?\d+$/.test(sought) ? Number(sought.match(/\d+$/)[0]) : null;
  const names = hosts.map((host) => host.name.toLowerCase());
  const fitting = [
    (name) => name === sought,
    (name) => name.startsWith(sought),
    (name) => name.includes(sought),
  ];
  const at = fitting.map((fits) => names.findIndex(fits)).find((index) => index >= 0);
  if (number !== null && cells.has(number)) {
    goTo(number);
    say(`Rank ${number} is on ${nameOf(number)}.`);
  } else if (at !== undefined && (number === null || names[at] === sought)) {
    goTo(hosts[at].ranks[0]);
    say(`${hosts[at].name} has ${many(hosts[at].ranks.length, "rank")}.`);
  } else if (number !== null) {
    say(`There is no rank ${number}: ranks go from ${low} to ${high}.`);
  } else {
    say(`No host is called “${$("sought").value.trim()}”.`);
  }
}

// The nearest cell in the row above or below, as drawn.
function vertical(rank, sign) {
  const [x, y] = placesNow().get(rank);
  let [best, distance] = [rank, Infinity];
  for (const [other, [ox, oy]] of placesNow()) {
    const down = (oy - y) * sign;
    const far = down * 1000 + Math.abs(ox - x);
    if (down > 4 && far < distance) [best, distance] = [other, far];
  }
  return best;
}

function keys(event) {
  const rank = Number(event.target.dataset.rank);
  const at = sequence.indexOf(rank);
  const ends = event.ctrlKey ? sequence : hostOf.get(rank).ranks;
  const moves = {
    ArrowRight: () => sequence[at + 1],
    ArrowLeft: () => sequence[at - 1],
    ArrowDown: () => vertical(rank, 1),
    ArrowUp: () => vertical(rank, -1),
    Home: () => ends[0],
    End: () => ends.at(-1),
  };
  if (event.key === "Enter" || event.key === " ") pin(rank);
  else if (moves[event.key]) {
    const next = moves[event.key]() ?? rank;
    cells.get(next).focus({ preventScroll: true });
    cells.get(next).scrollIntoView({ block: "nearest", inline: "nearest" });
  } else return;
  event.preventDefault();
}

function choices(fieldset, name, options, current, onchange) {
  const buttons = options.map(({ value, text, note }) => {
    const input = make("input", { type: "radio", name, value, checked: value === current });
    input.onchange = () => onchange(value);
    const label = make("label", {}, input, make("span", {}, text));
    if (note) label.title = note;
    return label;
  });
  fieldset.hidden = options.length < 1;
  const segments = make("div", { className: "segments" }, ...buttons);
  fieldset.replaceChildren(fieldset.firstElementChild, segments);
}

function setLayout(name) {
  state.layout = layouts.get(name);
  Object.assign(state, { group: null, shownGroup: null });
  describe();
  const dims = state.layout.wide.map((dim) => {
    const row = dimRow(state.layout, dim);
    const across = acrossHosts(row);
    return { value: dim, text: `${dim} ${row.full}`, note: reach(row, across), row, across };
  });
  const first = job ? null : (state.layout.wide[0] ?? null);
  setBy(state.layout.wide.includes(state.by) ? state.by : first);
  const states = job ? [{ value: null, text: "state", note: "what each rank does" }] : [];
  choices($("dims"), "dim", [...states, ...dims], state.by, setBy);
  const those = (kept) => dims.filter(kept).map(({ value }) => value).join(", ");
  const [inside, crosses] = [those(({ across }) => !across), those(({ across }) => across)];
  const told = [
    inside && `inside ${boundary.one}: ${inside}`,
    crosses && `across ${boundary.word}s: ${crosses}`,
  ];
  $("summary").append(make("span", { className: "reach" }, told.filter(Boolean).join(" · ")));
}

function setBy(dim) {
  state.by = dim;
  state.dimRow = dim === null ? null : dimRow(state.layout, dim);
  Object.assign(state, { group: null, row: undefined });
  paint();
  showExample(state.dimRow);
}

// While no rank is looked at, the group of the first one is outlined.
function showExample(row) {
  state.example = row?.mine(row.layout.offset)[0] ?? null;
  update();
}

function wire() {
  const grid = $("grid");
  const rankAt = (event) => {
    const cell = event.target.closest?.(".cell");
    return cell ? Number(cell.dataset.rank) : null;
  };
  let last = [];
  grid.addEventListener("pointermove", (event) => {
    // Scrolling moves ranks under a pointer that rests: that points at none of them.
    if (last[0] === event.screenX && last[1] === event.screenY) return;
    last = [event.screenX, event.screenY];
    const rank = rankAt(event);
    if (rank !== null) look(rank);
  });
  grid.addEventListener("focusin", (event) => {
    const rank = rankAt(event);
    if (rank !== null) rove(rank), look(rank);
  });
  grid.addEventListener("click", (event) => {
    const rank = rankAt(event);
    const box = event.target.closest(".host");
    if (rank !== null) pin(rank);
    else if (box) unfold(box);
  });
  grid.addEventListener("keydown", keys);
  document.addEventListener("keydown", (event) => event.key === "Escape" && clear());
  $("search").addEventListener("submit", search);
  for (const tab of ["rank", "names"]) {
    $(`tab-${tab}`).onclick = () => ((state.tab = tab), panel());
  }
  document.querySelector(".tabs").addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    state.tab = state.tab === "rank" ? "names" : "rank";
    panel();
    $(`tab-${state.tab}`).focus();
  });
}

build();
verdict();
wire();
const names = grids.map(([name]) => ({ value: name, text: name }));
choices($("layouts"), "layout", names.length > 1 ? names : [], names[0].value, setLayout);
const zooms = ["hosts", "ranks"].map((value) => ({ value, text: value }));
const opening = sequence.length > 256 && hosts.length > 1 ? "hosts" : "ranks";
choices($("zoom"), "zoom", hosts.length > 1 ? zooms : [], opening, zoom);
zoom(opening);
if (data.by !== null) state.by = data.by;
setLayout(names[0].value);
setTimeout(placesNow); // after the first paint, so that the first group lights up at once

// For whoever asks from the console; the tests do.
window.hypergrid = {
  groupsOf: (rank) =>
    rows.flatMap((row) => row.mine(rank).map(({ members }) => [row.label, members])),
  groupsNamed: (index) => Array.from({ length: rows[index].count }, (_, i) => rows[index].nth(i)),
  coordinate: (name, rank) => Object.fromEntries(layouts.get(name).coordinate(rank)),
};
