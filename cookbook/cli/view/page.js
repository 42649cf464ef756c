// The program of the page that `cookbook view` writes or serves. All texts of a run become text nodes, never HTML.
//
// Data: facts of each run (name, configuration, metrics, the list of stored steps), and one gzip block per stored step, whose
// format cookbook/run/rollout_store.py describes. A block is decompressed when its step is shown or searched.
"use strict";
const KEY_METRICS = ["eval/accuracy", "eval/reward", "reward/mean", "loss", "eval/loss", "eval/rewards/accuracy", "rollout/completion_tokens_mean",
  "kl/sampler_trainer_k1", "tokens/entropy", "optim/grad_norm", "eval/rewards/margin", "rewards/margin"];
const KEY_COUNT = 6;         // charts shown before a name is typed
const LISTED = 300;          // groups in a list, at most
const BLOCKS_KEPT = 6;       // decompressed steps in memory, per run
const POLL_MS = 2000;        // between two requests for news of a live run
const FULL_LOGPROB = -4;     // log-probability with the full color
const COLORS = { advantage: "advantage", logprobs: "log-probability", shift: "trainer minus sampler", none: "none" };
const SORTS = { order: "as trained", best: "highest reward", worst: "lowest reward", spread: "largest spread", longest: "longest", loss: "highest loss" };

const $ = id => document.getElementById(id);
const runs = [];
const state = { step: null, run: 0, group: 0, row: null, trajectory: 0, search: "", low: "", high: "", everywhere: false, sort: "order", color: "" };
const infoOfToken = new WeakMap();

function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter(child => child !== null && child !== undefined).map(child => child instanceof Node ? child : String(child)));
  return made;
}

const shown = value => value === null || value === undefined ? "-" : Number(value.toPrecision(4)).toString();
const mean = values => values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
const counted = number => `${number.toLocaleString("en")} token${number === 1 ? "" : "s"}`;
const baseName = path => path.slice(path.lastIndexOf("/") + 1);

// ---- data ------------------------------------------------------------------------------------------------------------

async function inflate(bytes) {
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function fromBase64(text) {
  const binary = atob(text.trim()), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

// Data in the page, or from the server that sent the page.
const isLive = $("facts") === null;

async function readFacts() {
  if (!isLive) return JSON.parse(await inflate(fromBase64($("facts").textContent)));
  const known = runs.map(run => run.metricsEnd ?? "").join(",");
  return (await fetch(`facts?metrics=${encodeURIComponent(known)}`)).json();
}

async function readBlock(run, step) {
  if (!isLive) return fromBase64($(`run${run.number}-step${step}`).textContent);
  const answer = await fetch(`run/${run.number}/step/${step}`);
  if (!answer.ok) throw new Error(`step ${step}: ${await answer.text()}`);
  return new Uint8Array(await answer.arrayBuffer());
}

function takeFacts(all) {
  all.forEach((facts, number) => {
    const run = runs[number] ??= { number, metrics: new Map(), blocks: new Map() };
    Object.assign(run, facts, { metrics: run.metrics });
    for (const line of facts.metrics.split("\n")) {
      // The last line may be incomplete.
      try { const row = JSON.parse(line); run.metrics.set(row.step, row); } catch { continue; }
    }
  });
}

function block(run, step) {
  if (!run.blocks.has(step)) {
    run.blocks.set(step, loadBlock(run, step));
    if (run.blocks.size > BLOCKS_KEPT) run.blocks.delete(run.blocks.keys().next().value);
  }
  return run.blocks.get(step);
}

async function loadBlock(run, step) {
  try {
    const lines = (await inflate(await readBlock(run, step))).trimEnd().split("\n");
    const head = JSON.parse(lines[0]), groups = lines.slice(1).map(line => JSON.parse(line));
    return { step, pieces: head.pieces, special: new Set(head.special), groups };
  } catch (error) {
    return { step, pieces: {}, special: new Set(), groups: [], problem: `step ${step} cannot be read: ${error.message}` };
  }
}

const tokensOf = (segment, group) => segment.tokens ?? group.prompt;
const numberAt = (values, index) => values === undefined ? undefined : values.length === 1 ? values[0] : values[index];
const wasTrained = segment => segment.author === "model" || segment.author === "data";
const segmentsOf = trajectory => trajectory.branches.flat();

function textOf(segment, group, block) {
  const own = segment.text ?? (segment.tokens ? undefined : group.prompt_text);
  if (own !== undefined) return own;
  const hidden = segment.author === "model" ? block.special : new Set();
  return tokensOf(segment, group).filter(token => !hidden.has(token)).map(token => block.pieces[token] ?? "").join("");
}

// The text of each token. Tokens that spell a character only together have U+FFFD as their text: the text of the whole segment
// tells the characters, which the last of these tokens gets.
function piecesOf(segment, group, block) {
  const pieces = tokensOf(segment, group).map(token => block.pieces[token] ?? "");
  const isPart = piece => piece.includes("\ufffd");
  if (!pieces.some(isPart)) return pieces;
  const text = textOf(segment, group, block);
  for (let i = 0, at = 0; i < pieces.length; i++) {
    if (!isPart(pieces[i])) {
      if (text.startsWith(pieces[i], at)) at += pieces[i].length;
      continue;
    }
    let last = i;
    while (last + 1 < pieces.length && isPart(pieces[last + 1])) last++;
    const next = pieces.slice(last + 1).find(piece => piece && text.includes(piece, at + 1));
    const end = next === undefined ? text.length : text.indexOf(next, at + 1);
    pieces.fill("", i, last).splice(last, 1, text.slice(at, end));
    [i, at] = [last, end];
  }
  return pieces;
}

// The prompt of a group; the first observation of an environment whose rows have no prompt.
function questionOf(group, block) {
  const first = segmentsOf(group.trajectories[0] ?? { branches: [] })[0];
  return group.question || (first ? textOf(first, group, block) : "");
}

// Summary of a trajectory: its reward, and the loss per token of a row.
function summary(trajectory) {
  const trained = segmentsOf(trajectory).filter(wasTrained);
  const logprobs = trained.flatMap(one => one.logprobs ? one.tokens.map((_, i) => numberAt(one.logprobs, i)) : []).filter(one => one !== null);
  return {
    reward: trajectory.reward,
    tokens: trained.reduce((sum, one) => sum + (one.tokens ?? []).length, 0),
    loss: logprobs.length ? -mean(logprobs) : null,
    advantage: trained.map(one => numberAt(one.advantage, 0)).find(one => one !== undefined),
  };
}

// ---- filters and lists -----------------------------------------------------------------------------------------------

function matcher() {
  const words = state.search.toLowerCase(), [low, high] = [state.low, state.high].map(text => text === "" ? null : Number(text));
  return (group, trajectory, block) => {
    const reward = trajectory.reward;
    if (low !== null && !(reward >= low)) return false;
    if (high !== null && !(reward <= high)) return false;
    if (!words || group.question.toLowerCase().includes(words) || group.row.toLowerCase().includes(words)) return true;
    return segmentsOf(trajectory).some(segment => textOf(segment, group, block).toLowerCase().includes(words));
  };
}

// What the list shows of a group. Blocks of other steps are not kept.
function entryOf(group, index, block, matches) {
  const summaries = group.trajectories.map(summary), rewards = summaries.map(one => one.reward).filter(one => one !== undefined && one !== null);
  return {
    step: block.step, index, row: group.row, question: questionOf(group, block), summaries, rewards,
    hits: group.trajectories.map(trajectory => matches(group, trajectory, block)),
    mean: mean(rewards), spread: rewards.length ? Math.max(...rewards) - Math.min(...rewards) : 0,
    longest: Math.max(...summaries.map(one => one.tokens)), loss: Math.max(...summaries.map(one => one.loss ?? -Infinity)),
  };
}

function sorted(entries) {
  const orders = {
    best: (a, b) => (b.mean ?? -Infinity) - (a.mean ?? -Infinity),
    worst: (a, b) => (a.mean ?? Infinity) - (b.mean ?? Infinity),
    spread: (a, b) => b.spread - a.spread,
    longest: (a, b) => b.longest - a.longest,
    loss: (a, b) => b.loss - a.loss,
  };
  return state.sort in orders ? [...entries].sort(orders[state.sort]) : entries;
}

function nearestStep(run) {
  const before = run.steps.filter(step => step <= state.step);
  return before.length ? before.at(-1) : run.steps[0];
}

const allSteps = () => [...new Set(runs.flatMap(run => run.steps))].sort((a, b) => a - b);

// ---- the parts of the page -------------------------------------------------------------------------------------------

function showHeader() {
  $("runs").replaceChildren(h("b", {}, "cookbook view"), ...runs.map(run => h("span", {},
    h("b", { class: `run${run.number}` }, run.name), " ",
    h("span", { class: "dim" }, [run.config["recipe.name"], baseName(run.config["model.name"] ?? ""), run.config["loss.name"] ?? "",
      `${run.status.state ?? "unknown state"} at step ${run.status.step ?? "?"}`].filter(Boolean).join(" · ")),
    run.status.error && run.status.state !== "interrupted" ? h("span", { class: "dim", title: run.status.error }, " · error") : null)));
  document.title = `${runs.map(run => run.name).join(" and ")} - cookbook view`;
}

function showSettings() {
  const keys = [...new Set(runs.flatMap(run => Object.keys(run.config)))];
  const text = (run, key) => key in run.config ? JSON.stringify(run.config[key]) : "-";
  const listed = runs.length > 1 ? keys.filter(key => text(runs[0], key) !== text(runs[1], key)) : keys;
  $("settings-count").textContent = runs.length > 1 ? `${listed.length} of ${keys.length} keys differ` : `${keys.length} keys`;
  $("config").replaceChildren(...listed.map(key => h("tr", {}, h("td", {}, key), runs.map(run => h("td", { class: `run${run.number}` }, text(run, key))))));
}

function showCharts() {
  const names = [...new Set(runs.flatMap(run => [...run.metrics.values()].flatMap(row => Object.keys(row))))].filter(name => name !== "step");
  const typed = $("metric-filter").value.trim();
  const points = name => runs.map(run => [...run.metrics.values()].filter(row => typeof row[name] === "number").map(row => [row.step, row[name]]));
  const key = KEY_METRICS.filter(name => names.includes(name) && points(name).some(some => some.length > 1)).slice(0, KEY_COUNT);
  const chosen = typed ? names.filter(name => name.includes(typed)).sort() : key;
  $("metric-count").textContent = `${chosen.length} of ${names.length}`;
  $("charts").replaceChildren(...chosen.map(name => chart(name, points(name))));
}

function svg(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function chart(name, series) {
  const points = series.flat(), xs = runs.flatMap(run => [...run.metrics.keys()]), [width, height] = [300, 96];
  const [left, right] = [Math.min(...xs), Math.max(...xs)], ys = points.map(point => point[1]);
  let [low, high] = [Math.min(...ys), Math.max(...ys)];
  const range = low === high ? shown(low) : `${shown(low)} to ${shown(high)}`;
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const x = step => (step - left) / (right - left || 1) * width, y = value => (high - value) / (high - low) * height;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none" });
  for (const level of [0, height / 2, height]) drawing.append(svg("line", { x1: 0, x2: width, y1: level, y2: level, stroke: "var(--line)", "vector-effect": "non-scaling-stroke" }));
  const place = step => ({ x1: x(step), x2: x(step), y1: 0, y2: height });
  drawing.append(svg("line", { ...place(state.step ?? left), class: "now", stroke: "var(--dim)", "stroke-dasharray": "3 3", "vector-effect": "non-scaling-stroke" }));
  series.forEach((some, number) => drawing.append(svg("polyline", { points: some.map(([step, value]) => `${x(step).toFixed(2)},${y(value).toFixed(2)}`).join(" "),
    fill: "none", stroke: `var(--run${number})`, "stroke-width": 1.5, "vector-effect": "non-scaling-stroke" })));
  const values = h("span", {}), stepAt = event => Math.round(left + (event.offsetX / drawing.clientWidth) * (right - left));
  const tell = step => values.replaceChildren(...series.map((some, number) => {
    const before = some.filter(point => point[0] <= step);
    return h("span", { class: `run${number}` }, before.length ? ` ${shown(before.at(-1)[1])}` : " -");
  }), step < right ? h("span", { class: "dim" }, ` at ${step}`) : "");
  tell(right);
  drawing.addEventListener("mousemove", event => tell(stepAt(event)));
  drawing.addEventListener("mouseleave", () => tell(right));
  drawing.addEventListener("click", event => change({ step: stepAt(event), everywhere: false }));
  return h("div", { class: "chart" }, h("div", { class: "name" }, h("span", {}, name), values), drawing,
    h("div", { class: "name dim" }, h("span", {}, range), h("span", {}, `steps ${left}–${right}`)));
}

function showTools() {
  const steps = allSteps(), at = steps.findLastIndex(step => step <= state.step);
  $("step").value = state.step ?? "";
  Object.assign($("slider"), { max: Math.max(0, steps.length - 1), value: at });
  $("earlier").disabled = at <= 0;
  $("later").disabled = at >= steps.length - 1;
  for (const name of ["search", "low", "high"]) if ($(name) !== document.activeElement) $(name).value = state[name];
  $("everywhere").checked = state.everywhere;
  $("sort").replaceChildren(...Object.entries(SORTS).map(([value, label]) => h("option", { value, selected: value === state.sort }, label)));
}

function showColors(blocks) {
  const trained = blocks.flatMap(one => one.groups).flatMap(group => group.trajectories).flatMap(segmentsOf).filter(wasTrained);
  const stored = name => name === "none" || trained.some(segment => segment[name] !== undefined);
  if (!state.color || !stored(state.color)) state.color = Object.keys(COLORS).find(stored);
  $("color").replaceChildren(...Object.entries(COLORS).map(([value, label]) =>
    h("option", { value, selected: value === state.color, disabled: !stored(value) }, stored(value) ? label : `${label} (not stored)`)));
  const numbers = trained.flatMap(segment => segment[state.color] ?? []).filter(one => one !== null).map(Math.abs);
  const largest = state.color === "logprobs" ? -FULL_LOGPROB : numbers.reduce((a, b) => Math.max(a, b), 0) || 1;
  const bar = colors => h("span", { class: "bar", style: `background: linear-gradient(to right, ${colors})` });
  const legend = {
    none: [],
    logprobs: [`${FULL_LOGPROB}`, bar("rgba(var(--rare), .85), transparent"), "0"],
    advantage: [shown(-largest), bar("rgba(var(--bad), .85), transparent, rgba(var(--good), .85)"), shown(largest)],
    shift: [shown(-largest), bar("rgba(var(--rare), .85), transparent, rgba(var(--shift), .85)"), shown(largest)],
  };
  $("legend").replaceChildren(...legend[state.color]);
  return largest;
}

function tokenColor(value, largest) {
  if (value === undefined || value === null || !value) return null;
  const strength = (Math.min(1, Math.abs(value) / largest) * 0.85).toFixed(3);
  const names = { logprobs: ["rare", "rare"], advantage: ["bad", "good"], shift: ["rare", "shift"] }[state.color];
  return `background: rgba(var(--${names[value > 0 ? 1 : 0]}), ${strength})`;
}

const rewardColor = (reward, low, high) => `background: hsl(${130 * (high > low ? (reward - low) / (high - low) : reward > 0 ? 1 : 0)} 60% 48%)`;

function groupButton(run, entry, isChosen) {
  const [low, high] = [Math.min(0, ...entry.rewards), Math.max(1, ...entry.rewards)];
  const open = trajectory => change({ step: entry.step, run: run.number, group: entry.index, row: entry.row, trajectory });
  const pips = entry.summaries.map((one, index) => h("span", {
    class: entry.hits[index] ? "pip" : "pip out", style: one.reward === undefined ? null : rewardColor(one.reward, low, high),
    title: `${index + 1}: ${one.reward === undefined ? `loss per token ${shown(one.loss)}` : `reward ${shown(one.reward)}`}`,
    onclick: event => { event.stopPropagation(); open(index); } }));
  const value = entry.mean === null ? `loss ${entry.summaries.map(one => shown(one.loss)).join(" / ")}` : `mean ${shown(entry.mean)}`;
  return h("button", { class: isChosen ? "group chosen" : "group", onclick: () => open(Math.max(0, entry.hits.indexOf(true))) },
    h("div", { class: "top" }, h("span", { class: "dim" }, `${state.everywhere ? `step ${entry.step} · ` : ""}${baseName(entry.row) || `row ${entry.index + 1}`}`), h("span", { class: "value" }, value)),
    h("div", { class: "question" }, entry.question || " "), entry.mean === null ? null : h("div", { class: "pips" }, pips));
}

function segmentView(segment, group, block, largest, isLater) {
  const tokens = tokensOf(segment, group), words = state.search.toLowerCase();
  const label = [{ data: "trained", context: "not trained" }[segment.author] ?? segment.author, counted(tokens.length),
    segment.step === undefined ? null : `weights of step ${segment.step}`, segment.stop === undefined ? null : `ended by ${segment.stop}`];
  const body = h("div", { class: "text" });
  if (!tokens.length || (segment.author === "prompt" && isLater)) {
    // The prompt of a later branch repeats the conversation, rewritten by the chat template.
    body.append(textOf(segment, group, block));
  } else {
    const pieces = piecesOf(segment, group, block), joined = pieces.join("").toLowerCase();
    const found = new Set();
    for (let at = words ? joined.indexOf(words) : -1; at >= 0; at = joined.indexOf(words, at + 1)) for (let i = at; i < at + words.length; i++) found.add(i);
    let start = 0;
    tokens.forEach((token, index) => {
      const piece = pieces[index], value = wasTrained(segment) && state.color !== "none" ? numberAt(segment[state.color], index) : undefined;
      let names = "token";
      if (block.special.has(token)) names += " special";
      for (let i = start; i < start + piece.length; i++) if (found.has(i)) { names += " found"; break; }
      start += piece.length;
      const made = h("span", { class: names, style: tokenColor(value, largest) }, piece.replace(/\n/g, "\u23ce\n"));
      infoOfToken.set(made, { token, piece, segment, index });
      body.append(made);
    });
  }
  return h("div", { class: `segment ${segment.author}` }, h("div", { class: "label" }, label.filter(Boolean).join(" · ")), body);
}

function trajectoryView(run, group, index, block, largest, isChosen, isHit) {
  const trajectory = group.trajectories[index], one = summary(trajectory), shares = trajectory.branches.length;
  const preview = textOf(segmentsOf(trajectory).findLast(wasTrained) ?? { tokens: [] }, group, block);
  const facts = [
    h("span", {}, `${trajectory.side ?? `#${index + 1}`}`),
    one.reward === undefined ? null : h("span", { class: "value" }, `reward ${shown(one.reward)}`),
    ...Object.entries(trajectory.parts ?? {}).map(([name, value]) => h("span", {}, `${name} ${shown(value)}`)),
    one.reward === undefined && one.loss !== null ? h("span", { class: "value" }, `loss per token ${shown(one.loss)}`) : null,
    one.advantage === undefined ? (one.reward === undefined ? null : h("span", { class: "dim" }, "not trained")) : h("span", {}, `advantage ${shown(one.advantage)}`),
    h("span", { class: "dim" }, counted(one.tokens)),
    trajectory.ended ? h("span", { class: "dim" }, `ended: ${trajectory.ended}`) : null,
    ...["calls", "malformed_calls", "failed_calls"].filter(name => trajectory[name]).map(name => h("span", { class: "dim" }, `${name.replace("_", " ")}: ${trajectory[name]}`)),
    h("span", { class: "preview" }, preview),
  ];
  const card = h("details", { class: `trajectory${isChosen ? " chosen" : ""}${isHit ? "" : " out"}` }, h("summary", {}, h("span", { class: "facts" }, facts)));
  // The tokens are added when the card is opened first: a group may have many long trajectories.
  card.addEventListener("toggle", () => { if (card.open && card.children.length === 1) fill(); });
  const fill = () => trajectory.branches.forEach((branch, number) => {
    if (shares > 1) card.append(h("div", { class: "dim" }, `part ${number + 1} of ${shares}: the chat template rewrote the conversation`));
    const own = branch.filter(segment => segment.tokens || segment.author !== "prompt");
    card.append(...own.map(segment => segmentView(segment, group, block, largest, number > 0)));
  });
  if (isChosen) { fill(); card.open = true; }
  return card;
}

function groupView(run, group, block, largest, hits) {
  // After a new search or filter, the first trajectory that matches is open.
  const chosen = Math.min(state.row === null ? Math.max(0, hits.indexOf(true)) : state.trajectory, group.trajectories.length - 1);
  const steps = `step ${block.step}${block.step === state.step ? "" : ", the nearest stored step"}`;
  const head = h("div", { class: "facts" }, h("h2", {}, baseName(group.row) || "row"), h("span", { class: "dim" }, steps),
    h("span", { class: "dim" }, group.row.slice(0, -baseName(group.row).length || undefined)),
    group.trajectories.length > 1 ? h("button", { onclick: event => event.target.closest(".detail").querySelectorAll(".trajectory").forEach(card => { card.open = true; }) }, "open all") : null);
  const prompt = group.prompt.length ? segmentView({ author: "prompt" }, group, block, largest, false) : "";
  return [head, prompt, group.trajectories.map((_, index) => trajectoryView(run, group, index, block, largest, index === chosen, hits[index]))];
}

// ---- drawing ---------------------------------------------------------------------------------------------------------

let drawing = 0;

async function draw() {
  const turn = ++drawing;
  $("tip").style.display = "none";
  showTools();
  const blocks = await Promise.all(runs.map(run => run.steps.length ? block(run, nearestStep(run)) : null));
  if (turn !== drawing) return;
  const largest = showColors(blocks.filter(Boolean));
  $("main").className = runs.length > 1 ? "two" : "";
  const panes = runs.map((run, number) => pane(run, blocks[number], largest));
  $("main").replaceChildren(...panes.map(one => one.element));
  document.querySelectorAll(".group.chosen").forEach(chosen => chosen.scrollIntoView({ block: "nearest" }));
  location.replace(`#${hash()}`);
  document.documentElement.dataset.drawn = turn;
  if (state.everywhere) for (const [number, run] of runs.entries()) await scan(run, panes[number], () => turn === drawing);
  document.documentElement.dataset.complete = turn;
}

function pane(run, block, largest) {
  const note = h("div", { class: "note" }), list = h("div", {}), detail = h("div", { class: "detail" });
  const element = h("section", { class: "run" }, h("div", { class: "list" }, note, list), detail);
  const made = { element, note, list };
  if (block === null) {
    note.textContent = `${run.name}: no stored rollouts or rows (rollout.store_mb=null)`;
    return made;
  }
  const matches = matcher(), entries = block.groups.map((group, index) => entryOf(group, index, block, matches));
  const isOwn = run.number === state.run;
  let index = isOwn && state.group < block.groups.length ? state.group : block.groups.findIndex(group => group.row === state.row);
  const hits = entries.filter(entry => entry.hits.includes(true));
  if (index < 0 || (state.row === null && hits.length)) index = hits.length ? hits[0].index : 0;
  if (!state.everywhere) fillList(run, made, hits, entries, index, `step ${block.step}`);
  if (block.problem) detail.append(block.problem);
  else if (block.groups.length) detail.append(...groupView(run, block.groups[index], block, largest, entries[index].hits).flat());
  return made;
}

function fillList(run, pane, hits, entries, index, where) {
  const count = hits.reduce((sum, entry) => sum + entry.hits.filter(Boolean).length, 0), all = entries.reduce((sum, entry) => sum + entry.hits.length, 0);
  const name = runs.length > 1 ? h("b", { class: `run${run.number}` }, `${run.name} `) : null;
  const rest = hits.length > LISTED ? `; the first ${LISTED} groups are listed` : "";
  pane.note.replaceChildren(...[name, `${where}: ${count.toLocaleString("en")} of ${all.toLocaleString("en")} match, in ${hits.length.toLocaleString("en")} groups${rest}`].filter(Boolean));
  pane.list.replaceChildren(...sorted(hits).slice(0, LISTED).map(entry => groupButton(run, entry, entry.index === index && entry.step === nearestStep(run))));
}

// Search all steps, one after the other; the list grows meanwhile.
async function scan(run, pane, isCurrent) {
  const matches = matcher(), entries = [];
  for (const [number, step] of run.steps.entries()) {
    const found = await loadBlock(run, step);
    if (!isCurrent()) return;
    entries.push(...found.groups.map((group, index) => entryOf(group, index, found, matches)));
    const isLast = number + 1 === run.steps.length;
    if (isLast || number % 10 === 0) fillList(run, pane, entries.filter(entry => entry.hits.includes(true)), entries, state.run === run.number ? state.group : -1, isLast ? "all steps" : `steps up to ${step}`);
  }
}

// ---- state -----------------------------------------------------------------------------------------------------------

const NUMBERS = ["step", "run", "group", "trajectory"];

function hash() {
  const kept = Object.entries(state).filter(([, value]) => value !== "" && value !== null && value !== false);
  return new URLSearchParams(kept).toString();
}

function readHash() {
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    if (name in state) state[name] = NUMBERS.includes(name) ? Number(value) : name === "everywhere" ? value === "true" : value;
  }
}

function change(values) {
  if ("step" in values && !("group" in values)) values = { ...values, group: 0, row: null, trajectory: 0 };
  Object.assign(state, values);
  if ("step" in values) showCharts();
  return draw();
}

function move(by) {
  const steps = allSteps(), at = steps.findLastIndex(step => step <= state.step) + by;
  if (steps[at] !== undefined) change({ step: steps[at] });
}

function listen() {
  $("earlier").onclick = () => move(-1);
  $("later").onclick = () => move(1);
  $("step").onchange = event => change({ step: Number(event.target.value) });
  $("slider").oninput = event => change({ step: allSteps()[event.target.value] });
  for (const name of ["search", "low", "high"]) $(name).oninput = event => change({ [name]: event.target.value, row: null });
  $("everywhere").onchange = event => change({ everywhere: event.target.checked });
  for (const name of ["sort", "color"]) $(name).onchange = event => change({ [name]: event.target.value });
  $("metric-filter").oninput = showCharts;
  addEventListener("keydown", event => {
    if (event.target.closest("input, select")) return;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") move(event.key === "ArrowLeft" ? -1 : 1);
  });
  addEventListener("mouseover", event => showTip(event));
  // The lists begin below the tools, which may take two lines.
  new ResizeObserver(() => document.documentElement.style.setProperty("--tools", `${$("tools").offsetHeight}px`)).observe($("tools"));
}

function showTip(event) {
  const info = infoOfToken.get(event.target), tip = $("tip");
  tip.style.display = info ? "block" : "none";
  if (!info) return;
  const { segment, index } = info, logprob = numberAt(segment.logprobs, index);
  const lines = [`${JSON.stringify(info.piece)}  token ${info.token}`];
  if (logprob !== undefined) lines.push(`log-probability ${shown(logprob)}  probability ${logprob === null ? "-" : (100 * Math.exp(logprob)).toFixed(2)}%`);
  if (segment.shift) lines.push(`trainer minus sampler ${shown(numberAt(segment.shift, index))}`);
  if (segment.advantage) lines.push(`advantage ${shown(numberAt(segment.advantage, index))}`);
  tip.textContent = lines.join("\n");
  const place = event.target.getBoundingClientRect();
  tip.style.left = `${Math.min(place.left, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${place.bottom + tip.offsetHeight + 8 > innerHeight ? place.top - tip.offsetHeight - 4 : place.bottom + 4}px`;
}

async function poll() {
  const atEnd = state.step === null || state.step === allSteps().at(-1), before = JSON.stringify(runs.map(run => [run.steps, run.metricsEnd, run.status]));
  takeFacts(await readFacts());
  if (before === JSON.stringify(runs.map(run => [run.steps, run.metricsEnd, run.status]))) return;
  showHeader();
  // A reader of the newest step sees the next one when it is stored; any other place stays.
  if (atEnd && !state.everywhere && allSteps().length) await change({ step: allSteps().at(-1) });
  else { showCharts(); showTools(); }
}

async function start() {
  takeFacts(await readFacts());
  readHash();
  if (state.step === null && allSteps().length) state.step = allSteps().at(-1);
  showHeader();
  showSettings();
  showCharts();
  listen();
  await draw();
  document.documentElement.dataset.openedMs = Math.round(performance.now());
  // A server that has ended is asked again: the same command may start it anew.
  if (isLive) setInterval(() => poll().catch(() => 0), POLL_MS);
}

start();
