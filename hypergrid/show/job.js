// What is wrong with the job that the plan is of: the verdict, and what each rank does.

const { job } = data;
const stateOf = (rank) => (job ? (job.states[rank] ?? "elsewhere") : "none");

function byState() {
  const found = new Map();
  for (const rank of sequence) found.set(stateOf(rank), (found.get(stateOf(rank)) ?? 0) + 1);
  return found;
}

const points = (lines, className) =>
  make("ul", { className }, ...lines.map((line) => make("li", {}, line)));

function folded(title, ...inside) {
  return make("details", {}, make("summary", {}, title), ...inside);
}

function verdict() {
  $("job").hidden = !job;
  if (!job) return;
  $("job").append(make("p", {}, make("strong", {}, job.sentence)));
  if (job.chain.length) $("job").append(folded("Why", points(job.chain)));
  const shown = folded("The last calls of each rank, the newest on the right", lanes());
  shown.open = true;
  if (Object.keys(job.calls).length) $("job").append(shown);
  if (job.problems.length) $("job").append(folded("Not read", points(job.problems)));
  for (const rank of job.ranks) cells.get(rank)?.classList.add("cause");
}

// One lane a rank, those of the cause first.
function lanes() {
  const ranks = new Set([...job.ranks, ...Object.keys(job.calls).map(Number)]);
  const rows = [...ranks].slice(0, 16).map((rank) => {
    const calls = (job.calls[rank] ?? []).map((call) => {
      const className = call.includes(": not done") ? "waits" : "";
      return make("td", { className, title: call }, call.split(":")[0]);
    });
    return make("tr", {}, make("th", {}, `${rank}: ${stateOf(rank)}`), ...calls.reverse());
  });
  return make("table", { className: "lanes" }, ...rows);
}

// The entries of a rank's panel.
function jobOf(rank) {
  if (!job) return [];
  const parts = [make("h3", {}, `In this job: ${stateOf(rank)}`)];
  const told = job.told[rank] ?? [];
  if (told.length) parts.push(points(told, "calls"));
  const calls = job.calls[rank] ?? [];
  const title = calls.length ? "Its last calls, the newest first" : "No calls recorded";
  return [...parts, make("h3", {}, title), points(calls, "calls")];
}
