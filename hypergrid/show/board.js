// The grid of ranks: its colours, what lights up in it, and the ring drawn over it.

function build() {
  const digits = String(span.offset + span.size - 1).length;
  const grid = $("grid");
  const size = sequence.length;
  const density = size <= 128 ? "roomy" : size <= 1024 ? "normal" : "dense";
  state.density = density;
  const largest = Math.max(...hosts.map((host) => host.ranks.length));
  const columns = largest <= 4 ? largest : largest <= 8 ? 4 : 8;
  grid.style.setProperty("--digits", digits);
  grid.style.setProperty("--columns", columns);
  let before = "";
  for (const host of hosts) {
    if (host.within !== before) {
      const heading = { className: "domain", title: host.within };
      grid.append(make("div", { ...heading, aria: { hidden: true } }, host.within));
    }
    before = host.within;
    const box = make("div", { className: "host", role: "rowgroup", aria: { label: host.name } });
    const heading = { className: "name", title: host.name, aria: { hidden: true } };
    box.append(make("div", heading, host.name));
    for (let start = 0; start < host.ranks.length; start += columns) {
      const row = make("div", { className: "row", role: "row" });
      for (const rank of host.ranks.slice(start, start + columns)) {
        const properties = { className: "cell", role: "gridcell", tabIndex: -1, data: { rank } };
        // A number of its own above the ring is too dear for thousands.
        const number = density === "dense" ? `${rank}` : make("span", {}, `${rank}`);
        const cell = make("div", properties, number);
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
    cell.dataset.colour = by === null ? stateOf(rank) : number % COLOURS;
    cell.dataset.number = by === null ? "" : number;
    const where = layout.wide.map((dim) => `${dim} ${layout.at(rank, layout.dims.indexOf(dim))}`);
    const words = [`rank ${rank}`, nameOf(rank), ...where, ...(job ? [stateOf(rank)] : [])];
    cell.setAttribute("aria-label", words.join(", "));
  }
  legend();
}

function describe() {
  const { layout } = state;
  const sizes = layout.wide.map((dim) => `${dim}=${layout.sizeOf([dim])}`).join(" ");
  const start = span.offset ? ` from ${span.offset}` : "";
  $("summary").replaceChildren(
    `${many(span.size, "rank")}${start} on ${counted(new Set(hosts.map((host) => host.name)), "host")}. `,
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
    const swatches = make("span", { className: "swatches" }, ...marks);
    parts.push(entry(swatches, `${many(count, "group")} of ${by}${turns}`));
  }
  if (by === null && job) {
    for (const [name, ranks] of byState()) {
      const swatch = make("i", { className: "swatch", data: { colour: name } });
      parts.push(entry(swatch, `${name}: ${many(ranks, "rank")}`));
    }
  }
  parts.push(
    entry(make("i", { className: "swatch member" }), "member"),
    entry(line("inside"), `link inside ${boundary.one}`),
    entry(line("crossing"), `link across ${boundary.word}s`),
  );
  $("legend").replaceChildren(...parts);
}

// All ranks, or an overview of the hosts, in which one host at a time opens.
function zoom(to) {
  $("grid").dataset.density = to === "hosts" ? "hosts" : state.density;
}

function unfold(box) {
  state.unfolded?.classList.remove("open");
  box.classList.add("open");
  state.unfolded = box;
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

const chosenRow = () => state.row ?? state.dimRow;

function strongest() {
  if (state.group) return state.group;
  if (state.rank === undefined) return state.example;
  return chosenRow()?.mine(state.rank)[0] ?? null;
}

function marked(rank, name) {
  const cell = cells.get(rank);
  cell?.classList.add(name);
  return cell;
}

function light() {
  for (const rank of near) {
    const cell = marked(rank, "near");
    cell.classList.remove("near", "current", "pinned");
    cell.removeAttribute("aria-selected");
    delete cell.dataset.via;
  }
  near = new Set();
  const { rank, layout, pinned } = state;
  if (rank !== undefined) {
    near.add(rank);
    const cell = marked(rank, pinned ? "pinned" : "current");
    if (pinned) cell.setAttribute("aria-selected", true);
    for (const dim of state.group ? [] : layout.wide) {
      for (const member of layout.group(rank, [dim])) {
        near.add(member);
        if (member !== rank) cells.get(member).dataset.via = dim;
      }
    }
  }
  for (const each of near) marked(each, "near");
  const group = strongest();
  if (group !== outlined) {
    for (const member of outlined?.members ?? []) cells.get(member)?.classList.remove("in");
    outlined = group;
    for (const member of outlined?.members ?? []) marked(member, "in");
    draw();
  }
  $("grid").classList.toggle("lit", near.size > 0 || outlined !== state.example);
}

// The ring of the strongest group, each link bent to its left so that none hides another.
function draw() {
  const paths = { inside: "", crossing: "" };
  if (outlined) {
    const at = placesNow();
    for (const [a, b] of ring(outlined.members)) {
      if (!at.has(a) || !at.has(b)) continue;
      const [[ax, ay], [bx, by]] = [at.get(a), at.get(b)];
      const [dx, dy] = [bx - ax, by - ay];
      const bend = Math.min(0.18, 48 / Math.hypot(dx, dy));
      const [cx, cy] = [(ax + bx) / 2 + dy * bend, (ay + by) / 2 - dx * bend];
      const kind = placeOf(a) === placeOf(b) ? "inside" : "crossing";
      paths[kind] += `M${ax} ${ay}Q${cx.toFixed(1)} ${cy.toFixed(1)} ${bx} ${by}`;
    }
  }
  for (const path of $("grid").querySelectorAll(".ring path")) {
    path.setAttribute("d", paths[path.classList.contains("crossing") ? "crossing" : "inside"]);
  }
}
