"use strict";
// The engine at work: its steps, the pages of its cache, its requests.

const POLL_MS = 500;
const COLOURS = 8;
const NAMES = { stop: "complete", length: "at max_tokens", filtered: "filtered", abort: "cancelled", timeout: "timed out", error: "failed" };
let steps = [], requests = [], hidden = 0, pages = null, now = 0; // as the server last described them
let speeds = []; // [time, tokens until then]
let marked = null; // the request that is opened below, and marked in both plots
let stepAt = null, pageAt = null; // the number of the step and the index of the page that are read out
let halted = false;
let replica = 0; // which of the model's engines is shown
let beginnings = new Map(); // first page of a shared beginning -> its colour

function forgetEngine() {
  steps = [];
  speeds = [];
  marked = stepAt = pageAt = null;
  halted = false;
  replica = 0;
}

async function watchEngine() {
  let hasFailed = false;
  for (; ; await sleep(POLL_MS)) {
    if (view !== "engine" || document.hidden || halted || looking || !model || $("pause").getAttribute("aria-pressed") === "true") continue;
    const id = model.id, chosen = replica;
    try {
      const facts = await getJson(`/engine?model=${encodeURIComponent(id)}&replica=${chosen}&after=${steps.at(-1)?.number ?? 0}`);
      if (id === model.id && chosen === replica) showEngine(facts);
      if (hasFailed) say("");
      hasFailed = false;
    } catch (error) {
      halted = error.status === 401;
      hasFailed = true;
      if (error.status) say(explain(error));
    }
  }
}

function showEngine(facts) {
  $("engine-live").hidden = !facts.loaded;
  $("engine-none").hidden = facts.loaded;
  $("engine-none").textContent = `${facts.model} is not loaded. Its first request loads it.`;
  if (!facts.loaded) return forgetEngine();
  if (facts.metrics.engine_steps < (steps.at(-1)?.number ?? 0)) return forgetEngine(); // it was loaded anew
  ({ requests, hidden_requests: hidden, pages, now_s: now } = facts);
  steps = [...steps, ...facts.steps].slice(-400);
  speeds = [...speeds, [now, facts.metrics.generation_tokens]].slice(-121);
  if (!requests.some((each) => each.request_id === marked)) marked = null;
  showReplicas(facts.replicas);
  showTiles(facts);
  drawAll();
  showRequests();
}

function showReplicas(unfinished) {
  const list = $("replica");
  $("replicas").hidden = unfinished.length < 2;
  while (list.options.length > unfinished.length) list.lastChild.remove();
  unfinished.forEach((number, index) => {
    if (!list.options[index]) list.append(make("option", { value: index }));
    const text = `${index + 1} of ${unfinished.length}: ${count(number, "request")}`;
    if (list.options[index].textContent !== text) list.options[index].textContent = text;
  });
  list.value = replica;
}

$("replica").onchange = () => {
  forgetEngine();
  replica = Number($("replica").value);
};

const ofRequest = (id) => `--s${id % COLOURS}`;

// -- numbers ----------------------------------------------------------------------------------------------------------

function showTiles({ metrics, limits, closed }) {
  const first = metrics.time_to_first_token_seconds, next = metrics.inter_token_latency_seconds;
  const [from, to] = [speeds.at(-5) ?? speeds[0], speeds.at(-1)];
  const speed = to[0] > from[0] ? (to[1] - from[1]) / (to[0] - from[0]) : 0;
  const waiting = `${metrics.num_requests_waiting} waiting`;
  const paused = metrics.num_requests_paused ? `, ${metrics.num_requests_paused} paused` : "";
  const ends = metrics.request_success, failed = ends.error + ends.timeout;
  const screened = metrics.screened_tokens + requests.reduce((sum, each) => sum + (each.end_s == null ? each.screened_tokens : 0), 0);
  const share = metrics.prefix_cache_queries ? metrics.prefix_cache_hits / metrics.prefix_cache_queries : 0;
  const tiles = [
    ["Running", metrics.num_requests_running, `of at most ${limits.max_batch}${closed ? "; closed" : ""}`],
    ["Queue", metrics.num_requests_waiting + metrics.num_requests_paused, waiting + paused],
    ["Tokens per second", speed.toFixed(speed && speed < 10 ? 1 : 0), `${metrics.generation_tokens.toLocaleString("en")} in all`],
    ["First token", seconds(first.p50), first.count ? `p95 ${seconds(first.p95)}` : "median; none yet"],
    ["Next token", seconds(next.p50), next.count ? `p95 ${seconds(next.p95)}` : "median; none yet"],
    ["Cache in use", percent(metrics.kv_cache_usage_perc), `${percent(share)} prefix hits`],
    ["Steps", metrics.engine_steps.toLocaleString("en"), `${seconds(metrics.engine_step_seconds.p50)} median`],
    ["Ended", Object.values(ends).reduce((a, b) => a + b).toLocaleString("en"), `${ends.abort} cancelled, ${failed} failed`],
  ];
  if (screened) tiles.push(["Screened", screened.toLocaleString("en"), "tokens without the whole head"]);
  if (metrics.num_preemptions) tiles.push(["Preempted", metrics.num_preemptions, "gave their pages back"]);
  const list = $("tiles");
  while (list.children.length > tiles.length) list.lastChild.remove();
  tiles.forEach(([name, value, note], index) => {
    if (!list.children[index]) list.append(make("div", {}, make("dt"), make("dd", {}, "", make("small"))));
    const [term, detail] = list.children[index].children;
    term.textContent = name;
    detail.firstChild.data = value;
    detail.lastChild.textContent = note;
  });
  drawSpeeds(list.children[2]);
}

function drawSpeeds(tile) {
  const values = speeds.slice(1).map(([time, total], index) => (total - speeds[index][1]) / (time - speeds[index][0]));
  const largest = Math.max(1, ...values);
  const points = values.map((value, index) => `${(120 - values.length + index) / 1.2},${25 - (24 * value) / largest}`);
  let line = tile.querySelector("polyline");
  if (!line) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    svg.setAttribute("viewBox", "0 0 100 26");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    svg.append(line);
    tile.append(svg);
  }
  line.setAttribute("points", points.join(" "));
}

// -- plots ------------------------------------------------------------------------------------------------------------

function stripes(context, name) {
  const tile = make("canvas", { width: 6, height: 6 });
  const pen = tile.getContext("2d");
  pen.strokeStyle = colour(name);
  pen.lineWidth = 2;
  for (const x of [-6, 0, 6]) {
    pen.beginPath();
    pen.moveTo(x - 1, 7);
    pen.lineTo(x + 7, -1);
    pen.stroke();
  }
  return context.createPattern(tile, "repeat");
}

const LEFT = 26, COLUMN = 9, BARS = 44;
let shownSteps = [];

function drawSteps() {
  const canvas = $("steps");
  shownSteps = steps.slice(-Math.floor((canvas.clientWidth - LEFT) / COLUMN));
  const slots = [...new Set(shownSteps.flatMap((step) => step.parts.map(([, slot]) => slot)))].sort((a, b) => a - b);
  const size = slots.length > 16 ? 7 : slots.length > 8 ? 11 : 16, top = Math.max(4, slots.length) * size;
  const [context, width] = prepare(canvas, top + 10 + BARS);
  const row = new Map(slots.map((slot, index) => [slot, index]));
  const fills = new Map();
  const fill = (id, kind) => {
    const name = ofRequest(id) + kind;
    if (!fills.has(name)) fills.set(name, kind === "prefill" ? stripes(context, ofRequest(id)) : colour(ofRequest(id)));
    return fills.get(name);
  };
  context.fillStyle = context.strokeStyle = colour("--quiet");
  context.textAlign = "right";
  slots.forEach((slot, index) => size > 10 && context.fillText(slot, LEFT - 6, (index + 0.5) * size + 0.5));
  context.textAlign = "left";
  const most = Math.max(1, ...shownSteps.map((step) => step.parts.reduce((sum, part) => sum + part[3], 0)));
  const queue = Math.max(1, ...shownSteps.map((step) => step.waiting));
  shownSteps.forEach((step, index) => {
    const x = LEFT + index * COLUMN;
    let total = 0;
    for (const [id, slot, kind, count] of step.parts) {
      const y = row.get(slot) * size;
      total += count;
      context.globalAlpha = marked === null || marked === id ? 1 : 0.25;
      context.fillStyle = fill(id, kind);
      context.fillRect(x, y + 1, COLUMN - 1, size - 2);
      if (kind === "prefill") {
        context.strokeStyle = colour(ofRequest(id));
        context.strokeRect(x + 0.5, y + 1.5, COLUMN - 2, size - 3);
      }
    }
    context.globalAlpha = 1;
    context.fillStyle = colour("--idle");
    const height = Math.max(1, ((BARS - 4) * total) / most);
    context.fillRect(x, top + 10 + BARS - height, COLUMN - 1, height);
    if (step.number === stepAt) {
      context.strokeStyle = colour("--text");
      context.lineWidth = 1.5;
      context.strokeRect(x - 1, 0.75, COLUMN + 1, top + 10 + BARS - 1.5);
      context.lineWidth = 1;
    }
  });
  context.fillStyle = colour("--quiet");
  context.textAlign = "right";
  if (shownSteps.length) context.fillText(most, LEFT - 6, top + 16);
  if (shownSteps.some((step) => step.waiting)) {
    context.strokeStyle = colour("--s6");
    context.lineWidth = 1.5;
    context.beginPath();
    shownSteps.forEach((step, index) => context.lineTo(LEFT + (index + 0.5) * COLUMN, top + 10 + BARS - 1 - ((BARS - 6) * step.waiting) / queue));
    context.stroke();
  }
  context.strokeStyle = colour("--line");
  context.strokeRect(LEFT - 2.5, -1, width, top + 5);
  const names = new Set(shownSteps.flatMap((step) => step.parts.map(([id]) => id)));
  canvas.setAttribute("aria-label", `The last ${count(shownSteps.length, "step")}: ${count(names.size, "request")} in ${count(slots.length, "slot")}, at most ${count(most, "token")} in a step. Arrow keys read the steps.`);
  const step = shownSteps.find((each) => each.number === stepAt);
  tell("steps-detail", step ? describeStep(step) : steps.length ? "Point at a step, or use the arrow keys, to read it." : "No steps yet: they appear when a request runs.");
}

function describeStep(step) {
  const parts = step.parts.map(([id, slot, kind, number]) => `#${id} ${kind === "prefill" ? `prompt, ${count(number, "token")}` : "decode"} (slot ${slot})`);
  const total = step.parts.reduce((sum, part) => sum + part[3], 0);
  return `Step ${step.number.toLocaleString("en")}: ${seconds(step.seconds)}, ${count(total, "token")}, ${step.waiting} waiting. ${parts.slice(0, 12).join("; ")}${parts.length > 12 ? `; and ${parts.length - 12} more` : ""}`;
}

function tell(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

let cell = { size: 12, columns: 1, count: 0 };

// page -> [request's number, place in its text] of each text that holds it; and the colour of each shared page
function pageOwners() {
  const owners = new Map(), shared = new Map();
  for (const { request_id, pages: texts } of requests)
    for (const text of texts)
      text.forEach((page, index) => {
        if (!owners.has(page)) owners.set(page, []);
        owners.get(page).push([request_id, index]);
        if (pages.holders[page] > 1 && !shared.has(page)) shared.set(page, text[0]);
      });
  for (const first of shared.values()) if (!beginnings.has(first)) beginnings.set(first, beginnings.size);
  if (beginnings.size > 64) beginnings = new Map([...beginnings].filter(([first]) => shared.has(first)));
  return [owners, shared];
}

function drawPages() {
  const canvas = $("pages"), total = Math.min(pages.total, 4096), width = canvas.clientWidth;
  const size = [16, 14, 12, 10, 8, 6].find((each) => Math.ceil(total / Math.floor(width / each)) * each <= 200) ?? 6;
  const columns = Math.max(1, Math.floor(width / size));
  cell = { size, columns, count: total };
  const [context] = prepare(canvas, Math.ceil(total / columns) * size);
  const [owners, shared] = pageOwners(), side = size - 2;
  const line = colour("--line"), idle = colour("--idle"), own = colour("--s0");
  for (let page = 0; page < total; page++) {
    const x = (page % columns) * size + 1, y = Math.floor(page / columns) * size + 1;
    const holders = pages.holders[page] ?? null;
    const mine = marked !== null && owners.get(page)?.some(([id]) => id === marked);
    context.globalAlpha = marked === null || mine ? 1 : 0.35;
    context.strokeStyle = line;
    if (holders === null || holders === 0) context.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
    if (holders === 0) {
      context.fillStyle = idle;
      context.beginPath();
      context.arc(x + side / 2, y + side / 2, side / 4, 0, 7);
      context.fill();
    } else if (holders > 1) {
      context.fillStyle = colour(`--s${1 + ((beginnings.get(shared.get(page)) ?? 0) % (COLOURS - 2))}`);
      context.fillRect(x, y, side, side);
    } else if (holders === 1) {
      context.globalAlpha *= 0.45;
      context.fillStyle = own;
      context.fillRect(x, y, side, side);
    }
    context.globalAlpha = 1;
    if (mine || page === pageAt) {
      context.strokeStyle = colour("--text");
      context.lineWidth = page === pageAt ? 2 : 1;
      context.strokeRect(x, y, side, side);
      context.lineWidth = 1;
    }
  }
  const kinds = [(n) => n === 1, (n) => n > 1, (n) => n === 0].map((test) => pages.holders.filter((n) => n !== null && test(n)).length);
  const used = kinds[0] + kinds[1];
  $("pages-facts").textContent = `${used.toLocaleString("en")} of ${count(pages.total, "page")} in use, ${pages.size} tokens each${total < pages.total ? `; the first ${total.toLocaleString("en")} are shown` : ""}`;
  canvas.setAttribute("aria-label", `${kinds[0]} pages held by one text, ${kinds[1]} shared, ${kinds[2]} kept to use again, ${pages.total - used - kinds[2]} empty. Arrow keys read the pages.`);
  tell("pages-detail", pageAt === null ? "Point at a page, or use the arrow keys, to read it." : describePage(pageAt, owners.get(pageAt)));
}

function describePage(page, owners = []) {
  const holders = pages.holders[page] ?? null;
  if (holders === null) return `Page ${page}: empty.`;
  if (holders === 0) return `Page ${page}: free. It keeps its tokens for texts that begin as it does.`;
  const names = [...new Set(owners.map(([id]) => `#${id}`))];
  const place = owners.length ? `, tokens ${owners[0][1] * pages.size} to ${(owners[0][1] + 1) * pages.size - 1}` : "";
  return `Page ${page}: ${holders > 1 ? `shared by ${holders} texts` : "held by one text"}${names.length ? ` of ${names.join(", ")}` : ""}${place}.`;
}

function drawAll() {
  if (view !== "engine" || !pages || $("engine-live").hidden) return;
  drawSteps();
  drawPages();
}

readable(
  $("steps"),
  (x) => (stepAt = shownSteps[Math.floor((x - LEFT) / COLUMN)]?.number ?? null),
  (key) => {
    const place = shownSteps.findIndex((step) => step.number === stepAt), last = shownSteps.length - 1;
    const next = { ArrowLeft: (place < 0 ? last + 1 : place) - 1, ArrowRight: place < 0 ? last : place + 1, Home: 0, End: last }[key];
    stepAt = next === undefined ? null : (shownSteps[clamp(next, last)]?.number ?? null);
  },
  drawAll,
);
readable(
  $("pages"),
  (x, y) => {
    const page = Math.floor(y / cell.size) * cell.columns + Math.floor(x / cell.size);
    pageAt = x < cell.columns * cell.size && page < cell.count ? page : null;
  },
  (key) => {
    const place = pageAt ?? -1, last = cell.count - 1;
    const next = { ArrowLeft: place - 1, ArrowRight: place + 1, ArrowUp: place - cell.columns, ArrowDown: place + cell.columns, Home: 0, End: last }[key];
    pageAt = next === undefined ? null : clamp(next, last);
  },
  drawAll,
);

// -- requests ---------------------------------------------------------------------------------------------------------

function showRequests() {
  const list = $("requests"), rows = new Map([...list.children].map((row) => [Number(row.dataset.id), row]));
  const longest = Math.max(0.001, ...requests.map((each) => (each.end_s ?? now) - each.arrival_s));
  for (const [id, row] of rows) if (!requests.some((each) => each.request_id === id)) row.remove();
  requests.forEach((request, index) => {
    const row = rows.get(request.request_id) ?? newRow(request.request_id);
    if (list.children[index] !== row) list.insertBefore(row, list.children[index] ?? null);
    fillRow(row, request, longest);
  });
  const alive = requests.filter((each) => each.end_s == null).length + hidden;
  $("requests-facts").textContent = requests.length ? `${alive} unfinished${hidden ? `, ${hidden} of them not shown` : ""}; then the last that ended` : "";
  if (!requests.length) list.replaceChildren(make("li", { className: "facts", textContent: "No requests yet. Complete a text, or send one from any client." }));
}

function newRow(id) {
  const bar = make("span", { className: "story-bar" }, ...["waited-part", "prompt-part", "decode-part"].map((className) => make("span", { className })));
  const button = make("button", { type: "button" }, make("span", { className: "number", textContent: `#${id}` }), make("span", { className: "state" }), bar, make("span", { className: "facts" }));
  const row = make("li", {}, button);
  row.dataset.id = id;
  button.style.setProperty("--own", `var(${ofRequest(id)})`);
  button.onclick = () => {
    marked = marked === id ? null : id;
    drawAll();
    showRequests();
  };
  return row;
}

function fillRow(row, request, longest) {
  const { arrival_s: begin, start_s: start, first_token_s: first, generated_tokens: made } = request, end = request.end_s ?? now;
  const [, state, bar, facts] = row.firstChild.children;
  row.firstChild.className = `request ${request.state}`;
  row.firstChild.setAttribute("aria-expanded", String(marked === request.request_id));
  state.textContent = NAMES[request.state] ?? request.state;
  const parts = [(start ?? end) - begin, start ? (first ?? end) - start : 0, first ? end - first : 0];
  parts.forEach((part, index) => (bar.children[index].style.width = `${(100 * part) / longest}%`));
  const speed = first && made > 1 && end > first ? (made - 1) / (end - first) : 0;
  facts.textContent = [
    count(request.prompt_tokens, "prompt token") + (request.cached_tokens ? `, ${request.cached_tokens} cached` : ""),
    first ? `first after ${seconds(first - begin)}` : `${seconds(end - begin)} until now`,
    `${made.toLocaleString("en")} new${speed ? `, ${speed.toFixed(speed < 10 ? 1 : 0)}/s` : ""}`,
  ].join(" · ");
  const story = marked === request.request_id ? tellStory(request, end) : null;
  const old = row.querySelector(".story");
  if (!story) old?.remove();
  else if (old?.textContent !== story.textContent) old ? old.replaceWith(story) : row.append(story);
}

function tellStory(request, end) {
  const { arrival_s: begin, start_s: start, first_token_s: first } = request;
  const lines = [[0, `submitted${request.priority ? `, with priority ${request.priority}` : ""}`]];
  if (start) lines.push([start - begin, start - begin < 0.001 ? "started at once" : `started, after it had waited ${seconds(start - begin)}`]);
  if (first) lines.push([first - begin, `${count(request.prompt_tokens, "prompt token")} computed${request.cached_tokens ? `, but for ${request.cached_tokens} that the cache had` : ""}; first token`]);
  const pages = new Set(request.pages.flat()).size;
  const tokens = `${count(request.generated_tokens, "token")}${request.screened_tokens ? `, ${request.screened_tokens} without the whole head` : ""}`;
  if (request.drafted_tokens) lines.push([end - begin, `${request.accepted_tokens} of ${count(request.drafted_tokens, "draft token")} accepted`]);
  lines.push([end - begin, request.end_s == null ? `${request.state}: ${tokens}, ${count(pages, "page")} held` : `${NAMES[request.state] ?? request.state}: ${tokens}`]);
  return make("ol", { className: "story" }, ...lines.map(([at, text]) => make("li", {}, make("time", { textContent: seconds(at) }), text)));
}

$("pause").onclick = () => {
  const paused = $("pause").getAttribute("aria-pressed") !== "true";
  $("pause").setAttribute("aria-pressed", String(paused));
  $("pause").textContent = paused ? "Go on" : "Pause";
};
new ResizeObserver(drawAll).observe($("engine-live"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
