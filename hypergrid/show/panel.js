// The side panel: the groups of a rank, all names, the chosen group.

function groupButton(found, tag, heading) {
  const { row, number, members } = found;
  const count = touched(members).size;
  const shown = state.group ?? state.example;
  const { label, layout } = shown?.row ?? {};
  const chosen = label === row.label && layout === row.layout && shown.number === number;
  const detail = make("span", { className: "detail" }, tag);
  const place = counted(touched(members));
  detail.append(make("span", { className: count > 1 ? "badge crosses" : "badge" }, place));
  const properties = { className: "group", aria: { pressed: chosen } };
  const item = button("", () => choose(found, item), properties);
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
  $("tab-rank").textContent = state.rank === undefined ? "Overview" : `Rank ${state.rank}`;
  $("list").setAttribute("aria-labelledby", `tab-${state.tab}`);
  if (state.tab === "rank") $("list").replaceChildren(...rankPanel());
  else if ($("list").dataset.shows !== "names") $("list").replaceChildren(...namesPanel());
  $("list").dataset.shows = state.tab;
}

// What the page opens with: whether the groups of each dim cross, and one of them as an example.
function overview() {
  const list = make("ul", { className: "groups" });
  state.overview ??= dimsOfAll();
  for (const { title, row, across } of state.overview) {
    const [example] = row.mine(span.offset);
    const heading = `${title} = ${row.full}`;
    list.append(groupButton(example, `${many(row.count, "group")}, ${reach(row, across)}`, heading));
  }
  const hint =
    "Point at a rank, or move to it with the arrow keys, to see its groups. " +
    "Click it, or press Enter, to keep it and to open its host.";
  const title = `What crosses ${boundary.word}s, and the group of rank ${span.offset}`;
  return [make("h3", {}, title), list, make("p", { className: "hint" }, hint)];
}

function reach(row, across) {
  if (across === 0) return `inside ${boundary.one}`;
  const which = across === row.count ? "every group crosses" : `${count(across)} of them cross`;
  return `${which} ${boundary.word}s`;
}

function rankPanel() {
  const { rank, layout } = state;
  if (rank === undefined) return overview();
  const place = make("p", { className: "where" }, make("strong", {}, `Rank ${rank}`));
  place.append(` on ${nameOf(rank)}`);
  if (state.pinned) place.append(make("span", { className: "badge" }, "pinned"));
  const chips = layout.coordinate(rank).filter(([dim]) => layout.sizeOf([dim]) > 1);
  const coordinates = make("ul", { className: "chips", aria: { label: "Coordinates" } });
  for (const [dim, at] of chips) {
    coordinates.append(make("li", {}, `${dim} `, make("b", {}, `${at}`)));
  }
  const alongs = layout.wide.map((dim) => dimRow(layout, dim)).flatMap((row) => row.mine(rank));
  const named = rows.flatMap((row) => row.mine(rank));
  const list = (groups) => {
    const parent = make("ul", { className: "groups" });
    return listed(parent, groups, (found) => {
      const { row, members } = found;
      const which = row.along ? shortly(members) : row.words;
      return groupButton(found, `${which} · ${many(members.length, "rank")}`, row.label);
    });
  };
  return [
    place,
    coordinates,
    ...jobOf(rank),
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
      if (open && !inner.children.length) listed(inner, groups, (number) => oneOf(row, number));
      state.row = open ? row : undefined;
      state.group = null;
      update();
    }, { className: "group", aria: { expanded: false } });
    const detail = make("span", { className: "detail" });
    detail.append(`${row.words} · ${many(row.count, "group")}`);
    const badge = across ? `${count(across)} across ${boundary.word}s` : `inside ${boundary.word}s`;
    detail.append(make("span", { className: across ? "badge crosses" : "badge" }, badge));
    item.append(make("span", { className: "label" }, row.label), detail);
    list.append(make("li", {}, item, inner));
  }
  return rows.length ? [list] : [make("p", { className: "hint" }, "The plan names no group.")];
}

function oneOf(row, number) {
  const members = row.nth(number);
  return groupButton({ row, number, members }, many(members.length, "rank"), shortly(members));
}

const chip = (rank) => button(`${rank}`, () => goTo(rank), { className: "chip" });

function chosenGroup() {
  const section = $("chosen");
  section.hidden = !state.group;
  if (!state.group || state.shownGroup === state.group) return;
  state.shownGroup = state.group;
  const { row, number, members } = state.group;
  const [links, across, on] = [ring(members), crossing(members), touched(members)];
  const close = button("×", clear, { className: "close", aria: { label: "Close the group" } });
  const which = `${row.words} · group ${number} of ${count(row.count)}`;
  const where = `${many(members.length, "rank")} on ${counted(on)}`;
  const names = [...new Set(members.map(nameOf))];
  const byHost = listed(make("ul", { className: "members" }), names, (name) => {
    const here = members.filter((member) => nameOf(member) === name);
    const ranks = listed(make("span", { className: "ranks" }), here, chip);
    return make("li", {}, make("span", { className: "host-name", title: name }, name), ranks);
  });
  const crossings = listed(make("ul", { className: "links" }), across, ([a, b]) => {
    const names = make("span", { className: "detail" }, `${nameOf(a)} → ${nameOf(b)}`);
    return make("li", {}, chip(a), "→", chip(b), names);
  });
  section.replaceChildren(
    make("div", { className: "top" }, make("h2", {}, row.label), close),
    make("p", { className: "detail" }, `${which} · ${where}`),
    byHost,
    make("h3", {}, links.length ? crossed(across.length, links.length) : "No links"),
    crossings,
  );
}
