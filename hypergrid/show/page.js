// What is seen: the grid of ranks, the side panel, and what lights up. plan.js has the arithmetic.
"use strict";

(() => {
  const COLOURS = 8; // as many as page.css defines
  const AT_ONCE = 60; // entries of a long list shown before one asks for more
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const layouts = new Map(
    Object.entries(data.plan.layouts).map(([name, layout]) => [name, new Layout(layout)]),
  );
  const rows = data.plan.rows.map((row) => new Row(layouts, row));
  const hosts = data.hosts.map(({ name, runs }) => ({
    name,
    ranks: runs.flatMap(([first, count]) => Array.from({ length: count }, (_, i) => first + i)),
  }));
  const window_ = [...layouts.values()][0];
  const hostOf = new Map(hosts.flatMap((host) => host.ranks.map((rank) => [rank, host])));
  const sequence = hosts.flatMap((host) => host.ranks); // as drawn, for the arrow keys
  const grids = [...layouts].filter(
    ([, layout]) => layout.offset === window_.offset && layout.size === window_.size,
  );

  const cells = new Map(); // rank -> element
  const state = { tab: "rank", pinned: false };
  let places = null; // rank -> centre of its cell, until the page is laid out anew
  let lit = [];

  // ---- building blocks

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
  const many = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
  const nameOf = (rank) => hostOf.get(rank)?.name ?? "a host unknown";
  const touched = (members) => new Set(members.map(nameOf));
  const crossing = (members) => ring(members).filter(([a, b]) => nameOf(a) !== nameOf(b));
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
        const text = `Show ${Math.min(left, AT_ONCE)} more of ${entries.length.toLocaleString("en")}`;
        const next = button(text, () => (next.remove(), more(start + AT_ONCE)), { className: "more" });
        parent.append(next);
      }
    };
    more(0);
    return parent;
  }

  const shortly = (ranks) =>
    ranks.length > 8 ? `${ranks.slice(0, 4).join(", ")}, … ${ranks.at(-1)}` : ranks.join(", ");

  // ---- the grid

  function build() {
    const digits = String(window_.offset + window_.size - 1).length;
    const grid = $("grid");
    grid.dataset.density =
      sequence.length <= 128 ? "roomy" : sequence.length <= 1024 ? "normal" : "dense";
    const largest = Math.max(...hosts.map((host) => host.ranks.length));
    const columns = largest <= 4 ? largest : largest <= 8 ? 4 : 8;
    grid.style.setProperty("--digits", digits);
    grid.style.setProperty("--columns", columns);
    for (const host of hosts) {
      const box = make("div", { className: "host", role: "rowgroup", aria: { label: host.name } });
      box.append(make("div", { className: "name", title: host.name, aria: { hidden: true } }, host.name));
      for (let start = 0; start < host.ranks.length; start += columns) {
        const row = make("div", { className: "row", role: "row" });
        for (const rank of host.ranks.slice(start, start + columns)) {
          const properties = { className: "cell", role: "gridcell", tabIndex: -1, data: { rank } };
          const cell = make("div", properties, `${rank}`);
          cells.set(rank, cell);
          row.append(cell);
        }
        box.append(row);
      }
      grid.append(box);
    }
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("class", "ring");
    svg.setAttribute("aria-hidden", "true");
    for (const kind of ["halo", "inside", "halo crossing", "crossing"]) {
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("class", kind);
      svg.append(path);
    }
    grid.append(svg);
    new ResizeObserver(() => ((places = null), draw())).observe(grid);
    rove(sequence[0]);
  }

  // Colours, numbers and labels of all cells: on another grid or another dim.
  function paint() {
    const { layout, by } = state;
    for (const [rank, cell] of cells) {
      const number = by === null ? 0 : layout.number(rank, [by]);
      cell.dataset.colour = by === null ? "none" : number % COLOURS;
      cell.dataset.number = by === null ? "" : number;
      const where = layout.wide.map((dim) => `${dim} ${layout.at(rank, layout.dims.indexOf(dim))}`);
      cell.setAttribute("aria-label", [`rank ${rank}`, nameOf(rank), ...where].join(", "));
    }
    legend();
  }

  function describe() {
    const { layout } = state;
    const sizes = layout.wide.map((dim) => `${dim}=${layout.sizeOf([dim])}`).join(" ");
    const span = window_.offset ? ` from ${window_.offset}` : "";
    $("summary").replaceChildren(
      `${many(window_.size, "rank")}${span} on ${many(hosts.length, "host")}. `,
      make("span", { className: "sizes" }, sizes ? `${sizes}, order ${layout.wide.join("-")}` : ""),
    );
  }

  function legend() {
    const { layout, by } = state;
    const entry = (mark, text) => make("span", { className: "entry" }, mark, text);
    const line = (kind) => make("i", { className: `line ${kind}` });
    const parts = [];
    if (by !== null) {
      const count = layout.size / layout.sizeOf([by]);
      const marks = Array.from({ length: Math.min(count, COLOURS) }, (_, i) =>
        make("i", { className: "swatch", data: { colour: i } }, `${i}`),
      );
      const turns = count > COLOURS ? ", colours repeat" : "";
      parts.push(entry(make("span", { className: "swatches" }, ...marks), `${many(count, "group")} of ${by}${turns}`));
    }
    parts.push(
      entry(make("i", { className: "swatch member" }), "member"),
      entry(line("inside"), "link inside a host"),
      entry(line("crossing"), "link across hosts"),
    );
    $("legend").replaceChildren(...parts);
  }

  // One tab stop: the arrow keys carry it along.
  function rove(rank) {
    if (state.stop !== undefined) cells.get(state.stop).tabIndex = -1;
    cells.get(rank).tabIndex = 0;
    state.stop = rank;
  }

  function placesNow() {
    if (places === null) {
      places = new Map();
      for (const [rank, cell] of cells) {
        places.set(rank, [
          cell.offsetLeft + cell.offsetWidth / 2,
          cell.offsetTop + cell.offsetHeight / 2,
        ]);
      }
    }
    return places;
  }

  // ---- what lights up

  const chosenRow = () => state.row ?? state.dimRow;

  function strongest() {
    if (state.group) return state.group;
    return state.rank === undefined ? null : (chosenRow()?.mine(state.rank)[0] ?? null);
  }

  function light() {
    for (const cell of lit) {
      cell.classList.remove("in", "near", "current", "pinned");
      delete cell.dataset.via;
    }
    lit = [];
    const mark = (rank, name) => {
      const cell = cells.get(rank);
      if (!cell) return null;
      cell.classList.add(name);
      lit.push(cell);
      return cell;
    };
    const group = strongest();
    if (state.rank !== undefined) {
      mark(state.rank, state.pinned ? "pinned" : "current")?.classList.add("near");
      if (!state.group) {
        for (const dim of state.layout.wide) {
          for (const member of state.layout.group(state.rank, [dim])) {
            const cell = mark(member, "near");
            if (cell && member !== state.rank) cell.dataset.via = dim;
          }
        }
      }
    }
    for (const member of group?.members ?? []) mark(member, "in");
    $("grid").classList.toggle("lit", lit.length > 0);
    draw();
  }

  // The ring of the strongest group, each link bent to its left so that none hides another.
  function draw() {
    const paths = { inside: "", crossing: "" };
    const group = strongest();
    if (group) {
      const at = placesNow();
      for (const [a, b] of ring(group.members)) {
        if (!at.has(a) || !at.has(b)) continue;
        const [[ax, ay], [bx, by]] = [at.get(a), at.get(b)];
        const [dx, dy] = [bx - ax, by - ay];
        const bend = Math.min(0.18, 48 / Math.hypot(dx, dy));
        const [cx, cy] = [(ax + bx) / 2 + dy * bend, (ay + by) / 2 - dx * bend];
        const kind = nameOf(a) === nameOf(b) ? "inside" : "crossing";
        paths[kind] += `M${ax} ${ay}Q${cx.toFixed(1)} ${cy.toFixed(1)} ${bx} ${by}`;
      }
    }
    for (const path of $("grid").querySelectorAll(".ring path")) {
      path.setAttribute("d", paths[path.classList.contains("crossing") ? "crossing" : "inside"]);
    }
  }

  // ---- the panel

  function groupButton(found, tag, heading) {
    const { row, number, members } = found;
    const count = touched(members).size;
    const chosen = state.group?.row === row && state.group.number === number;
    const detail = make("span", { className: "detail" }, tag);
    const place = count === 1 ? "1 host" : `${count} hosts`;
    detail.append(make("span", { className: count > 1 ? "badge crosses" : "badge" }, place));
    const item = button("", () => choose(found), { className: "group", aria: { pressed: chosen } });
    item.append(make("span", { className: "label" }, heading), detail);
    return make("li", {}, item);
  }

  function panel() {
    chosenGroup();
    for (const tab of ["rank", "names"]) {
      const here = state.tab === tab;
      $(`tab-${tab}`).setAttribute("aria-selected", here);
      $(`tab-${tab}`).tabIndex = here ? 0 : -1;
    }
    $("tab-rank").textContent = state.rank === undefined ? "Rank" : `Rank ${state.rank}`;
    $("list").setAttribute("aria-labelledby", `tab-${state.tab}`);
    if (state.tab === "rank") $("list").replaceChildren(...rankPanel());
    else if ($("list").dataset.shows !== "names") $("list").replaceChildren(...namesPanel());
    $("list").dataset.shows = state.tab;
  }

  function rankPanel() {
    const { rank, layout } = state;
    if (rank === undefined) {
      return [make("p", { className: "hint" }, "Point at a rank, or move to it with the arrow keys, to see its groups. Click it, or press Enter, to keep it.")];
    }
    const place = make("p", { className: "where" }, make("strong", {}, `Rank ${rank}`), ` on ${nameOf(rank)}`);
    if (state.pinned) place.append(make("span", { className: "badge" }, "pinned"));
    const chips = layout.coordinate(rank).filter(([dim]) => layout.sizeOf([dim]) > 1);
    const coordinates = make("ul", { className: "chips", aria: { label: "Coordinates" } });
    for (const [dim, at] of chips) coordinates.append(make("li", {}, `${dim} `, make("b", {}, `${at}`)));
    const alongs = layout.wide.map((dim) => dimRow(layout, dim)).flatMap((row) => row.mine(rank));
    const named = rows.flatMap((row) => row.mine(rank));
    const list = (groups) => {
      const parent = make("ul", { className: "groups" });
      return listed(parent, groups, (found) =>
        groupButton(found, `${found.row.along ? shortly(found.members) : found.row.words} · ${many(found.members.length, "rank")}`, found.row.label),
      );
    };
    return [
      place,
      coordinates,
      make("h3", {}, "Along one dim"),
      list(alongs),
      make("h3", {}, `Its ${many(named.length, "named group")}`),
      list(named),
    ];
  }

  function namesPanel() {
    const list = make("ul", { className: "groups" });
    for (const row of rows) {
      const groups = Array.from({ length: row.count }, (_, number) => number);
      const across = acrossHosts(row);
      const inner = make("ul", { className: "groups inner", hidden: true });
      const item = button("", () => {
        const open = inner.hidden;
        for (const other of list.querySelectorAll(":scope > li > button[aria-expanded=true]")) {
          other.setAttribute("aria-expanded", false);
          other.nextSibling.hidden = true;
        }
        item.setAttribute("aria-expanded", open);
        inner.hidden = !open;
        if (open && !inner.children.length) {
          listed(inner, groups, (number) =>
            groupButton({ row, number, members: row.nth(number) }, many(row.nth(number).length, "rank"), shortly(row.nth(number))),
          );
        }
        state.row = open ? row : undefined;
        state.group = null;
        update();
      }, { className: "group", aria: { expanded: false } });
      const detail = make("span", { className: "detail" }, `${row.words} · ${many(row.count, "group")}`);
      const badge = across ? `${across.toLocaleString("en")} across hosts` : "inside hosts";
      detail.append(make("span", { className: across ? "badge crosses" : "badge" }, badge));
      item.append(make("span", { className: "label" }, row.label), detail);
      list.append(make("li", {}, item, inner));
    }
    return rows.length ? [list] : [make("p", { className: "hint" }, "The plan names no group.")];
  }

  const goto = (rank) => button(`${rank}`, () => focus(rank), { className: "chip" });

  function chosenGroup() {
    const section = $("chosen");
    section.hidden = !state.group;
    if (!state.group || state.shownGroup === state.group) return;
    state.shownGroup = state.group;
    const { row, number, members } = state.group;
    const [links, across, on] = [ring(members), crossing(members), touched(members)];
    const byHost = Map.groupBy
      ? Map.groupBy(members, nameOf)
      : new Map([...on].map((name) => [name, members.filter((member) => nameOf(member) === name)]));
    section.replaceChildren(
      make("div", { className: "top" }, make("h2", {}, row.label), button("×", clear, { className: "close", aria: { label: "Close the group" } })),
      make("p", { className: "detail" }, `${row.words} · group ${number} of ${row.count.toLocaleString("en")} · ${many(members.length, "rank")} on ${many(on.size, "host")}`),
      listed(make("ul", { className: "members" }), [...byHost], ([name, ranks]) =>
        make("li", {}, make("span", { className: "host-name", title: name }, name), listed(make("span", { className: "ranks" }), ranks, goto)),
      ),
      make("h3", {}, links.length ? `${across.length} of ${many(links.length, "link")} cross${across.length === 1 ? "es" : ""} hosts` : "No links"),
      listed(make("ul", { className: "links" }), across, ([a, b]) =>
        make("li", {}, goto(a), "→", goto(b), make("span", { className: "detail" }, `${nameOf(a)} → ${nameOf(b)}`)),
      ),
    );
  }

  // ---- what one does

  function dimRow(layout, dim) {
    const name = grids.find(([, each]) => each === layout)[0];
    return Object.assign(new Row(layouts, { label: dim, layout: name, dims: [dim] }), { along: true });
  }

  function acrossHosts(row) {
    let across = 0;
    for (let number = 0; number < row.count; number++) across += touched(row.nth(number)).size > 1;
    return across;
  }

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
    rove(rank);
    update();
  }

  function choose(group) {
    state.group = group;
    update();
    for (const each of $("list").querySelectorAll("[aria-pressed=true]")) each.setAttribute("aria-pressed", false);
    if (document.activeElement?.matches?.(".group")) document.activeElement.setAttribute("aria-pressed", true);
    const across = crossing(group.members).length;
    const total = ring(group.members).length;
    say(`${group.row.label}, group ${group.number}: ${many(group.members.length, "rank")} on ${many(touched(group.members).size, "host")}, ${across} of ${many(total, "link")} cross${across === 1 ? "es" : ""} hosts.`);
  }

  function clear() {
    Object.assign(state, { rank: undefined, pinned: false, group: null, shownGroup: null, row: undefined });
    if (state.tab === "names") $("list").dataset.shows = "";
    say("");
    update();
  }

  function focus(rank) {
    if (!cells.has(rank)) return say(`Rank ${rank} is not in this grid.`);
    if (state.pinned && state.rank !== rank) state.pinned = false;
    cells.get(rank).focus({ preventScroll: true });
    cells.get(rank).scrollIntoView({ block: "center", inline: "nearest" });
  }

  function search(event) {
    event.preventDefault();
    const sought = $("sought").value.trim().toLowerCase();
    const [low, high] = [window_.offset, window_.offset + window_.size - 1];
    if (!sought) return say("Type the number of a rank or the name of a host.");
    const number = /^(rank\s*)?\d+$/.test(sought) ? Number(sought.match(/\d+$/)[0]) : null;
    const names = hosts.map((host) => host.name.toLowerCase());
    const at = [(name) => name === sought, (name) => name.startsWith(sought), (name) => name.includes(sought)]
      .map((fits) => names.findIndex(fits))
      .find((index) => index >= 0);
    if (number !== null && cells.has(number)) {
      focus(number);
      say(`Rank ${number} is on ${nameOf(number)}.`);
    } else if (at !== undefined && (number === null || names[at] === sought)) {
      focus(hosts[at].ranks[0]);
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

  // ---- the controls

  function choices(fieldset, name, options, current, onchange) {
    const buttons = options.map(({ value, text, note }) => {
      const input = make("input", { type: "radio", name, value, checked: value === current });
      input.onchange = () => onchange(value);
      const label = make("label", {}, input, make("span", {}, text));
      if (note) label.title = note;
      return label;
    });
    fieldset.hidden = options.length < 1;
    fieldset.replaceChildren(fieldset.firstElementChild, make("div", { className: "segments" }, ...buttons));
  }

  function setLayout(name) {
    state.layout = layouts.get(name);
    Object.assign(state, { group: null, shownGroup: null });
    describe();
    setBy(state.layout.wide.includes(state.by) ? state.by : (state.layout.wide[0] ?? null));
    const dims = state.layout.wide.map((dim) => {
      const row = dimRow(state.layout, dim);
      const across = acrossHosts(row);
      const note = across ? `${across} of ${many(row.count, "group")} cross hosts` : "inside a host";
      return { value: dim, text: `${dim} ${row.full}`, note, across };
    });
    choices($("dims"), "dim", dims, state.by, setBy);
    const those = (kept) => dims.filter(kept).map(({ value }) => value).join(", ");
    const [inside, crosses] = [those(({ across }) => !across), those(({ across }) => across)];
    const told = [inside && `inside a host: ${inside}`, crosses && `across hosts: ${crosses}`];
    $("summary").append(make("span", { className: "reach" }, told.filter(Boolean).join(" · ")));
  }

  function setBy(dim) {
    state.by = dim;
    state.dimRow = dim === null ? null : dimRow(state.layout, dim);
    Object.assign(state, { group: null, row: undefined });
    paint();
    update();
  }

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";

  function theme(wanted) {
    if (wanted === "dark" || wanted === "light") document.documentElement.dataset.theme = wanted;
    $("theme").textContent = isDark() ? "Light" : "Dark";
    $("theme").setAttribute("aria-label", `Switch to the ${isDark() ? "light" : "dark"} theme`);
  }

  // A page from a file may be refused its storage; the theme then lasts as long as the page.
  function stored(wanted) {
    try {
      if (wanted === undefined) return localStorage.getItem("hypergrid-theme");
      localStorage.setItem("hypergrid-theme", wanted);
    } catch {
      return null;
    }
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
      if (rank !== null) pin(rank);
    });
    grid.addEventListener("keydown", keys);
    document.addEventListener("keydown", (event) => event.key === "Escape" && clear());
    $("search").addEventListener("submit", search);
    for (const tab of ["rank", "names"]) $(`tab-${tab}`).onclick = () => ((state.tab = tab), panel());
    document.querySelector(".tabs").addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      state.tab = state.tab === "rank" ? "names" : "rank";
      panel();
      $(`tab-${state.tab}`).focus();
    });
    $("theme").onclick = () => {
      const wanted = isDark() ? "light" : "dark";
      theme(wanted);
      stored(wanted);
    };
    dark.addEventListener("change", () => theme());
  }

  theme(stored());
  build();
  wire();
  choices($("layouts"), "layout", grids.map(([name]) => ({ value: name, text: name })), grids[0][0], setLayout);
  setLayout(grids[0][0]);

  // For whoever asks from the console; the tests do.
  window.hypergrid = {
    groupsOf: (rank) => rows.flatMap((row) => row.mine(rank).map(({ members }) => [row.label, members])),
    groupsNamed: (index) => Array.from({ length: rows[index].count }, (_, i) => rows[index].nth(i)),
    coordinate: (name, rank) => Object.fromEntries(layouts.get(name).coordinate(rank)),
    choose: (label, rank) => choose(rows.find((row) => row.label === label).mine(rank)[0]),
  };
})();
