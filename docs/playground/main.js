// The page: what the reader does, and what is shown of it. The numbers come from model.js and tokenizer.js.
// $, make, choiceRow, prepare and others are those of the server's page: parts.js

import { Model, ban, choose, distribution, divergence, fetchBytes, loadRuntime, softmax, uniforms, unpackTernary } from "./model.js";
import { Tokenizer } from "./tokenizer.js";

const SHOWN = 10; // of the likeliest tokens
const ZOOM = 16; // weights across
const READ_AFTER_MS = 300; // without a key
export const VISIBLE = 0.01; // nats per token: a smaller mistake cannot be seen by reading
export const SCALE = `0 is the same, below ${VISIBLE} cannot be seen, above 2 is nonsense`;
export const state = {
  facts: null, tokenizer: null, ort: null, weights: null, graphs: {},
  model: null, // the right one
  reading: null, // of the text, by the right model
  given: 0, // tokens of the text that the reader gave
  draws: null, // random numbers of the text
  settings: "", // with which it is written
  at: 0, // the token that the panels show
  broken: null, // {bug, reading of the same text, nats: after each token, ids: its own text}
  busy: false, isStopped: false,
  playsItself: false, // the first text is being written, which nobody asked for
};
globalThis.playground = state; // for the console, and for the tests
const SLIDERS = ["temperature", "top_k", "top_p", "min_p", "max_tokens"];
export const seedProblem = () => ($("seed").checkValidity() ? "" : `The seed must be a whole number from 0 to ${2 ** 32 - 1}.`);
export const settings = () => Object.fromEntries([...SLIDERS, "seed"].map((name) => [name, Number($(name).value)]));
export const shorten = (text) => text.replace(/\n{3,}/g, (lines) => `\n⏎ × ${lines.length}\n`); // a broken model can write many
export const mean = (values) => values.reduce((a, b) => a + b) / values.length;
export const pause = () => new Promise((resolve) => setTimeout(resolve));
export const name = (id) => visible(state.tokenizer.text(id));

function say(text, isProblem = false, place = $("banner")) {
  place.textContent = text;
  place.classList.toggle("problem", isProblem);
  place.hidden = !text;
}

// One thing at a time: the buttons wait meanwhile. place: where a problem is told
export async function work(what, place) {
  if (state.busy) return;
  Object.assign(state, { busy: true, isStopped: false });
  enable();
  for (const each of [$("banner"), $("break-facts")]) say("", false, each); // what was told before
  try {
    await what();
    say("", false, place);
  } catch (error) {
    say(error.message, true, place);
  }
  state.busy = false;
  enable();
}

function enable() {
  const isReady = state.model !== null && !state.busy;
  for (const button of [$("write"), $("another"), $("one"), $("mend"), ...document.querySelectorAll("#bugs button, #game button")]) button.disabled = !isReady;
  if (state.reading) $("one").disabled ||= state.reading.ids.length >= state.facts.config.context;
}

const isEmpty = () => !$("prompt").value.trim();

// -- reading and writing ----------------------------------------------------------------------------------------------

function promptIds() {
  if (isEmpty()) throw new Error("The field is empty: write a beginning, as “Once upon a time”.");
  const ids = state.tokenizer.encode($("prompt").value), { context } = state.facts.config;
  if (ids.length >= context) throw new Error(`The text has ${ids.length} tokens; the model reads ${context}, with those that it writes.`);
  return ids;
}

// Random numbers of the seed, from the first on.
function startDraws() {
  if (seedProblem()) throw new Error(seedProblem());
  return uniforms(settings().seed);
}

// Let the right model read the given tokens, if it has not read just these.
async function readGiven(ids) {
  const draws = startDraws();
  if (state.reading?.ids.join() !== ids.join()) {
    mend();
    state.reading = await state.model.read(ids);
  }
  state.given = ids.length;
  document.body.classList.remove("unread");
  $("facts").textContent = describeLength();
  state.draws = draws;
  state.settings = JSON.stringify(settings());
  select(ids.length - 1);
  showTokens();
}

// The ids that a model writes after a reading, as they come; the reading goes on with them.
export async function* writeOn(reading, count, draws, sampling) {
  for (let i = 0; i < count && reading.ids.length < state.facts.config.context && !state.isStopped; i++) {
    const logits = ban(reading.logits.at(-1), reading.ids, state.facts.banned);
    const id = choose(distribution(logits, sampling ?? settings()), draws.next().value);
    if (state.facts.ends.includes(id)) return;
    await reading.read([id]);
    await pause(); // for the screen and the stop button
    yield id;
  }
}

// Text that was typed a moment ago is read first.
async function readTyped() {
  clearTimeout(waiting);
  if (state.given === Infinity) await readGiven(promptIds());
}

async function write(limit) {
  mend();
  $("stop").hidden = false;
  $("write").hidden = true;
  $("tokens").classList.add("busy");
  const begin = performance.now();
  let tokens = 0;
  for await (const _ of writeOn(state.reading, limit, state.draws)) {
    tokens += 1;
    addToken(state.reading.ids.length - 1);
    select(state.reading.ids.length - 1);
  }
  const each = tokens ? ` · ${seconds((performance.now() - begin) / 1000 / tokens)} per token` : "";
  const isFull = state.reading.ids.length >= state.facts.config.context;
  const end = isFull ? " · the model reads no more" : tokens < limit && !state.isStopped ? " · the text is complete" : "";
  $("facts").textContent = `${count(tokens, "new token")}${each}${end} · ${describeLength()}`;
  $("tokens").classList.remove("busy");
  const hadFocus = document.activeElement === $("stop");
  $("stop").hidden = true;
  $("write").hidden = false;
  if (hadFocus) $("write").focus();
}

function describeLength() {
  const { ids } = state.reading, byte = ids.find((id) => state.tokenizer.isByte(id) && state.tokenizer.text(id).length > 1);
  return `${count(ids.length, "token")} in all${byte ? `. ${name(byte)} is a byte of a character for which storyteller has no token` : ""}`;
}

// Go on from the token that is looked at, with another one after it.
const goOn = (id) =>
  work(async () => {
    if (state.given === Infinity) return readTyped(); // the bars are of the text before
    const ids = [...state.reading.ids.slice(0, state.at + 1), id];
    $("prompt").value = state.tokenizer.decode(ids); // so that Write goes on from it too
    await readGiven(ids);
    await write(settings().max_tokens);
  });

// -- tokens -----------------------------------------------------------------------------------------------------------

function showTokens(ids = state.reading.ids) {
  $("tokens").replaceChildren();
  ids.forEach((_, i) => addToken(i, ids));
}

function addToken(i, ids = state.reading.ids) {
  const { tokenizer, reading } = state;
  const isRead = reading?.ids[i] === ids[i] && ids === reading.ids;
  const p = isRead && i > 0 ? softmax(reading.logits[i - 1])[ids[i]] : null;
  const level = p === null || i < state.given || p >= 0.5 ? 0 : p >= 0.1 ? 1 : p >= 0.01 ? 2 : 3;
  const text = tokenizer.text(ids[i]), isByte = tokenizer.isByte(ids[i]) && text.length > 1;
  const element = make("span", { className: `token p${level}${i < state.given ? " given" : ""}${isByte ? " byte" : ""}`, role: "button", tabIndex: -1 });
  element.textContent = text;
  element.setAttribute("aria-pressed", "false");
  element.setAttribute("aria-label", `${visible(text)}${p === null ? "" : `, ${percent(p)}`}`);
  element.title = `${visible(text)} is token ${ids[i]}${p === null ? "" : `, ${percent(p)}`}`;
  element.onclick = () => isRead && select(i);
  $("tokens").append(element);
  if (i === state.at) mark();
}

function mark() {
  [...$("tokens").children].forEach((element, i) => {
    element.setAttribute("aria-pressed", String(i === state.at));
    element.tabIndex = i === state.at ? 0 : -1;
  });
}

// Show a token in the panels.
function select(i) {
  state.at = i;
  Object.assign(cell, { row: null, column: null });
  mark();
  showNext();
  drawAttention();
  drawInt8();
  drawKl();
  document.dispatchEvent(new Event("token")); // for the tour
}

$("tokens").onkeydown = (event) => {
  const last = Math.min($("tokens").children.length, state.reading?.ids.length ?? 0) - 1; // of those that are read
  const next = { ArrowRight: state.at + 1, ArrowLeft: state.at - 1, Home: 0, End: last }[event.key];
  if (next === undefined || !state.reading) return;
  event.preventDefault();
  select(clamp(next, last));
  $("tokens").children[state.at].focus();
};

// -- the next token ---------------------------------------------------------------------------------------------------

const looksBroken = () => state.broken !== null && $("look-broken").checked;
const shown = () => (looksBroken() ? state.broken.reading : state.reading);

function showNext() {
  const reading = shown();
  if (!reading?.logits[state.at]) return;
  const logits = reading.logits[state.at], own = softmax(logits);
  const choices = distribution(logits, settings()), drawn = new Map(choices.map(({ id, p }) => [id, p]));
  const likeliest = distribution(logits, { temperature: 1, top_k: SHOWN }).map(({ id }) => id);
  const largest = Math.max(...likeliest.map((id) => Math.max(own[id], drawn.get(id) ?? 0)));
  const after = state.reading.ids[state.at + 1];
  const [model, end] = looksBroken() ? ["the broken model", "Mend it to choose one yourself."] : ["the model", "Choose one yourself to go on with it."];
  const rule = choices.length > 1 ? `draws one of ${count(choices.length, "token")} by chance` : "will always choose the first of these";
  $("next-facts").textContent = `After “${name(reading.ids[state.at])}” ${model} ${rule}. ${end}`;
  const items = likeliest.map((id) => {
    const p = drawn.get(id) ?? 0;
    const item = choiceRow(name(id), p, largest, id === after, looksBroken() ? null : () => goOn(id));
    const [, track, share] = item.firstChild.children;
    const back = make("span", { className: "own" });
    back.style.width = `${(100 * own[id]) / largest}%`;
    track.prepend(back);
    if (!p) track.lastChild.hidden = true;
    if (percent(p) !== percent(own[id])) share.textContent += ` (${percent(own[id])})`;
    return item;
  });
  $("next").replaceChildren(...items);
}

function showSettings() {
  const { temperature, top_k, top_p, min_p, max_tokens } = settings();
  const texts = [temperature ? temperature.toFixed(2) : "0, the likeliest", top_k || "0, all", top_p === 1 ? "1, all" : top_p.toFixed(2), min_p ? min_p.toFixed(2) : "0, all", max_tokens];
  $("seed-problem").textContent = seedProblem();
  SLIDERS.forEach((slider, i) => (document.querySelector(`output[for=${slider}]`).textContent = texts[i]));
  for (const id of SLIDERS) $(id).setAttribute("aria-valuetext", texts[SLIDERS.indexOf(id)]);
}

// -- break it ---------------------------------------------------------------------------------------------------------

async function breakIt(bug) {
  await readTyped();
  // Both texts are written with the same settings, and with the same random numbers.
  if (state.reading.ids.length === state.given || state.settings !== JSON.stringify(settings())) {
    await readGiven(state.reading.ids.slice(0, state.given));
    await write(settings().max_tokens);
  }
  mend();
  say(`Loading the graph: ${bug.title}`, false, $("break-facts"));
  await pause();
  const { ort, graphs, weights, facts, reading } = state;
  const model = await Model.open(ort, graphs[bug.name], weights, facts.config);
  try {
    const same = await model.read(reading.ids);
    state.broken = { bug, reading: same, nats: reading.logits.map((logits, i) => divergence(logits, same.logits[i])), ids: [] };
    for (const button of document.querySelectorAll("#bugs button")) button.setAttribute("aria-pressed", String(button.dataset.name === bug.name));
    $("broken").hidden = false;
    $("bug-text").textContent = bug.text;
    $("texts-facts").textContent = "";
    $("broken-name").textContent = bug.title;
    $("broken").scrollIntoView({ block: "nearest" });
    showKl();
    const own = await model.read(reading.ids.slice(0, state.given)), draws = startDraws();
    const right = reading.ids.slice(state.given), wrong = state.broken.ids;
    showTexts(right, wrong);
    for await (const id of writeOn(own, right.length, draws)) {
      wrong.push(id);
      showTexts(right, wrong);
    }
    $("texts-facts").textContent = describeTexts(right, wrong);
  } finally {
    await model.close();
  }
  select(state.at);
}

// How many tokens of the two texts are the same, from the first on.
function countSame(right, wrong) {
  const other = right.findIndex((id, i) => id !== wrong[i]);
  return other < 0 ? right.length : other;
}

// Texts by models that are nearly the same can differ by one draw.
function describeTexts(right, wrong) {
  const same = countSame(right, wrong), isSame = same === right.length;
  if (mean(state.broken.nats) >= VISIBLE) {
    if (!isSame) return "";
    if (state.broken.bug.name !== "no_causal_mask") return "The texts are the same: each choice fell on the same token.";
    return "The texts are the same. The chart reads the whole text as a prompt, where each token sees what follows; the broken model’s own text had only your beginning as its prompt.";
  }
  if (isSame) return "This mistake is too small to see: the texts are the same.";
  const [ours, theirs] = [state.reading, state.broken.reading].map(({ logits }) => `${(100 * softmax(logits[state.given + same - 1])[right[same]]).toPrecision(3)}%`);
  return `This mistake is too small to see. One choice fell on the other side, and the text went on from there; it is not worse. “${name(right[same])}” has a probability of ${ours} by the right model, and of ${theirs} by the broken one.`;
}

// The two texts, their common beginning in grey.
function showTexts(right, wrong) {
  const same = countSame(right, wrong);
  const given = state.reading.ids.slice(0, state.given);
  for (const [id, ids] of [["right-text", right], ["broken-text", wrong]]) {
    const begin = state.tokenizer.decode([...given, ...ids.slice(0, same)]);
    const rest = state.tokenizer.decode([...given, ...ids]).slice(begin.length);
    $(id).replaceChildren(make("span", { className: "same", textContent: shorten(begin) }), shorten(rest));
  }
}

function showKl() {
  const { reading, nats } = state.broken, right = state.reading;
  const first = (logits) => distribution(logits, { temperature: 0 })[0].id;
  const others = right.logits.filter((logits, i) => first(logits) !== first(reading.logits[i])).length;
  $("kl-facts").textContent = `Its likeliest next token is another one after ${others} of ${count(nats.length, "token")}. Its probabilities are ${mean(nats).toFixed(4)} nats per token from the right ones, at most ${Math.max(...nats).toFixed(3)} (KL divergence: ${SCALE}).`;
  drawKl();
}

function mend() {
  state.broken = null;
  $("look-broken").checked = false;
  $("broken").hidden = true;
  for (const button of document.querySelectorAll("#bugs button")) button.setAttribute("aria-pressed", "false");
}

function drawKl() {
  if (!state.broken) return;
  const { nats, reading } = state.broken, largest = Math.max(...nats, 1e-9), height = 72;
  const [context, width] = prepare($("kl"), height + 14), step = width / nats.length;
  nats.forEach((value, i) => {
    context.fillStyle = colour(i === state.at ? "--text" : "--s1");
    const bar = Math.max(1, (height * value) / largest);
    context.fillRect(i * step, height - bar, Math.max(1, step - 1), bar);
  });
  context.fillStyle = colour("--quiet");
  context.fillText(`nats after each token, at most ${largest.toPrecision(2)}`, 0, height + 8);
  const [right, wrong] = [state.reading, reading].map(({ logits }) => distribution(logits[state.at], { temperature: 1 })[0]);
  $("kl").setAttribute("aria-label", "KL divergence after each token. Arrow keys read the tokens.");
  $("kl-detail").textContent = `After “${name(state.reading.ids[state.at])}”: ${nats[state.at].toPrecision(3)} nats. Right: ${name(right.id)} ${percent(right.p)}; broken: ${name(wrong.id)} ${percent(wrong.p)}.`;
}

// -- attention --------------------------------------------------------------------------------------------------------

let cell = { row: null, column: null, size: 1, left: 0 };

function drawAttention() {
  const reading = shown();
  if (!reading?.logits.length) return;
  const head = Number($("attention-head").value), patterns = reading.inner[`blocks.${$("attention-layer").value}.attn.hook_pattern`];
  const canvas = $("attention"), tokens = patterns.length, wide = canvas.clientWidth;
  const left = 70, size = Math.min(30, (wide - left) / tokens), step = Math.ceil(12 / size); // rows from label to label
  Object.assign(cell, { size, left });
  const [context] = prepare(canvas, Math.ceil(size * tokens) + 2), gap = size > 4 ? 1 : 0;
  const ink = colour("--s0"), text = colour("--text"), line = colour("--line");
  for (let row = 0; row < tokens; row++) {
    context.globalAlpha = 1;
    context.fillStyle = text;
    if (row % step === state.at % step) context.fillText(name(reading.ids[row]), 2, Math.max(6, (row + 0.5) * size), left - 6);
    const pattern = patterns[row][head];
    for (let column = 0; column < pattern.length; column++) {
      const x = left + column * size, y = row * size;
      context.globalAlpha = 1;
      if (gap && column <= row) {
        context.strokeStyle = line;
        context.lineWidth = 0.5;
        context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
      }
      context.globalAlpha = Math.min(1, pattern[column]);
      context.fillStyle = ink;
      context.fillRect(x, y, size - gap, size - gap);
    }
  }
  context.globalAlpha = 1;
  context.strokeStyle = text;
  context.lineWidth = 1.5;
  context.strokeRect(left + 0.5, state.at * size + 0.5, (patterns[state.at][head].length) * size, size);
  const row = clamp(cell.row ?? state.at, tokens - 1), pattern = patterns[row][head];
  const column = clamp(cell.column ?? pattern.indexOf(Math.max(...pattern)), pattern.length - 1);
  context.strokeRect(left + column * size, row * size, size, size);
  canvas.setAttribute("aria-label", `Attention of head ${head} over ${count(tokens, "token")}. Arrow keys read the weights.`);
  const [reader, read] = [row, column].map((i) => `${name(reading.ids[i])} (token ${i})`), isLater = column > row && !pattern[column];
  $("attention-detail").textContent = isLater ? `${reader} cannot read ${read}: it comes later.` : `${reader} reads ${read} with weight ${pattern[column].toFixed(3)}.`;
}

// -- int8 activations -------------------------------------------------------------------------------------------------

let number = null, grid = { size: 1, columns: 1, total: 0 };

function drawInt8() {
  const reading = shown();
  if (!reading?.logits.length) return;
  const part = $("int8-part").value, place = `blocks.${$("int8-layer").value}.${state.facts.linears[part]}.${part}`;
  const stored = reading.inner[`${place}.hook_x_int8`][state.at], scale = reading.inner[`${place}.hook_x_scale`][state.at][0];
  const values = Int8Array.from(stored, (value) => value - 128); // the graph has them with a zero point of 128
  const canvas = $("int8"), columns = values.length > 256 ? 48 : 32, size = Math.min(24, canvas.clientWidth / columns);
  grid = { size, columns, total: values.length };
  const [context] = prepare(canvas, Math.ceil((values.length / columns) * size));
  const plus = colour("--s1"), minus = colour("--s0"), line = colour("--line");
  values.forEach((value, i) => {
    const x = (i % columns) * size, y = Math.floor(i / columns) * size;
    context.globalAlpha = 1;
    context.fillStyle = line;
    context.fillRect(x, y, size - 1, size - 1);
    context.fillStyle = colour("--card");
    context.fillRect(x + 0.5, y + 0.5, size - 2, size - 2);
    context.globalAlpha = Math.abs(value) / 128;
    context.fillStyle = value > 0 ? plus : minus;
    context.fillRect(x, y, size - 1, size - 1);
  });
  context.globalAlpha = 1;
  const i = clamp(number ?? values.findIndex((value) => Math.abs(value) >= 127), values.length - 1);
  context.strokeStyle = colour("--text");
  context.lineWidth = 1.5;
  context.strokeRect((i % columns) * size, Math.floor(i / columns) * size, size - 1, size - 1);
  const zeros = values.filter((value) => value === 0).length;
  $("int8-facts").textContent = `“${name(reading.ids[state.at])}”, the input of ${state.facts.readBy[part]}: ${values.length} numbers, ${percent(zeros / values.length)} are 0. Each is round(x × ${scale.toPrecision(4)}).`;
  $("int8-detail").textContent = `Number ${i} is ${values[i]}: x was near ${(values[i] / scale).toPrecision(3)}.`;
  canvas.setAttribute("aria-label", `${values.length} integers. Arrow keys read them.`);
  drawHistogram(values);
}

function drawHistogram(values) {
  const bins = new Array(32).fill(0), height = 64;
  for (const value of values) bins[(value + 128) >> 3] += 1;
  const [context, width] = prepare($("histogram"), height + 16), step = width / bins.length, largest = Math.max(...bins);
  bins.forEach((total, i) => {
    context.fillStyle = colour(i < 16 ? "--s0" : "--s1");
    const bar = total ? Math.max(1, (height * total) / largest) : 0;
    context.fillRect(i * step, height - bar, step - 1, bar);
  });
  context.fillStyle = colour("--quiet");
  context.textAlign = "center";
  for (const value of [-64, 0, 64]) context.fillText(value, ((value + 128) / 256) * width, height + 9);
  $("histogram").setAttribute("aria-label", `How often each value occurs: most often ${(bins.indexOf(largest) << 3) - 128} to ${(bins.indexOf(largest) << 3) - 121}, ${largest} times.`);
}

// -- a weight matrix --------------------------------------------------------------------------------------------------

let weight = { row: 0, column: 0 }, map = { scale: 1, turned: false, rows: 1, columns: 1 };
const unpacked = new Map();

function drawWeights() {
  const part = $("weights-part").value, full = `blocks.${$("weights-layer").value}.${state.facts.linears[part]}.${part}`;
  const matrix = state.facts.matrices.find((each) => each.name === full), { rows, columns } = matrix;
  if (!unpacked.has(full)) unpacked.set(full, unpackTernary(state.weights, matrix));
  const values = unpacked.get(full), canvas = $("weights");
  const turned = rows > columns, [across, down] = turned ? [rows, columns] : [columns, rows]; // the longer side across
  const room = canvas.clientWidth / across, scale = room < 1 ? room : Math.max(1, Math.min(Math.floor(room), Math.floor(520 / down)));
  map = { scale, turned, rows, columns };
  const image = new ImageData(across, down), tile = make("canvas", { width: across, height: down });
  const pen = tile.getContext("2d");
  const colours = ["--s0", "--field", "--s1"].map((each) => {
    pen.fillStyle = colour(each);
    pen.fillRect(0, 0, 1, 1);
    return pen.getImageData(0, 0, 1, 1).data;
  });
  for (let y = 0; y < down; y++)
    for (let x = 0; x < across; x++) image.data.set(colours[values[turned ? x * columns + y : y * columns + x] + 1], 4 * (y * across + x));
  pen.putImageData(image, 0, 0);
  const [context] = prepare(canvas, Math.ceil(down * scale) + 1);
  context.imageSmoothingEnabled = scale < 1;
  context.drawImage(tile, 0, 0, across * scale, down * scale);
  context.strokeStyle = colour("--line");
  context.strokeRect(0, 0, across * scale, down * scale);
  const row = clamp(weight.row, rows - 1), column = clamp(weight.column, columns - 1);
  context.strokeStyle = colour("--text");
  const [x, y] = turned ? [row, column] : [column, row], side = Math.max(7, scale + 4);
  context.strokeRect((x + 0.5) * scale - side / 2, (y + 0.5) * scale - side / 2, side, side);
  if (canvas.clientWidth - across * scale > ZOOM * 14) {
    drawZoom(context, across * scale + 16, canvas.clientWidth - across * scale - 16, x, y, (i, j) => (i < across && j < down ? values[turned ? i * columns + j : j * columns + i] : null));
  }
  const shares = [-1, 0, 1].map((kind) => values.reduce((sum, value) => sum + (value === kind), 0) / values.length);
  $("weights-facts").textContent = `${rows} outputs × ${columns} inputs, 2 bits each: ${percent(shares[0])} are −1, ${percent(shares[1])} 0, ${percent(shares[2])} +1. The matrix is ${matrix.scale.toPrecision(4)} times this. ${turned ? "A column for each output, a row for each input." : "A row for each output, a column for each input."}`;
  const value = values[row * columns + column];
  $("weights-detail").textContent = `Output ${row}, input ${column}: ${["−1", "0", "+1"][value + 1]}.`;
  canvas.setAttribute("aria-label", `The weights of ${full}. Arrow keys read them.`);
}

// The neighbours of the chosen weight (x, y), with their signs, where there is room.
function drawZoom(context, left, width, x, y, at) {
  const size = Math.min(26, width / ZOOM), from = [x, y].map((place) => Math.max(0, place - ZOOM / 2));
  context.textAlign = "center";
  for (let j = 0; j < ZOOM; j++) {
    for (let i = 0; i < ZOOM; i++) {
      const value = at(from[0] + i, from[1] + j);
      if (value === null) continue;
      context.fillStyle = colour(["--s0", "--field", "--s1"][value + 1]);
      context.fillRect(left + i * size, j * size, size - 1, size - 1);
      context.fillStyle = colour(value ? "--card" : "--quiet");
      context.fillText(["−1", "0", "+1"][value + 1], left + (i + 0.5) * size, (j + 0.5) * size);
    }
  }
  context.strokeStyle = colour("--text");
  context.strokeRect(left + (x - from[0]) * size, (y - from[1]) * size, size - 1, size - 1);
}

// -- the reader -------------------------------------------------------------------------------------------------------

const STEP = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

function readPlots() {
  readable(
    $("attention"),
    (x, y) => Object.assign(cell, { row: Math.max(0, Math.floor(y / cell.size)), column: Math.max(0, Math.floor((x - cell.left) / cell.size)) }),
    (key) => {
      const [down, right] = STEP[key] ?? [0, 0], last = shown().ids.length - 1;
      const from = { row: cell.row ?? state.at, column: cell.column ?? 0 };
      const next = { row: clamp(from.row + down, last), column: clamp(from.column + right, last) };
      Object.assign(cell, key === "Escape" ? { row: null, column: null } : next);
    },
    drawAttention,
  );
  readable(
    $("int8"),
    (x, y) => (number = clamp(Math.floor(y / grid.size) * grid.columns + Math.floor(x / grid.size), grid.total - 1)),
    (key) => {
      const [down, right] = STEP[key] ?? [0, 0];
      number = key === "Escape" ? null : clamp((number ?? 0) + down * grid.columns + right, grid.total - 1);
    },
    drawInt8,
  );
  readable(
    $("weights"),
    (x, y) => {
      const [across, down] = [Math.max(0, Math.floor(x / map.scale)), Math.max(0, Math.floor(y / map.scale))];
      weight = map.turned ? { row: across, column: down } : { row: down, column: across };
      weight = { row: clamp(weight.row, map.rows - 1), column: clamp(weight.column, map.columns - 1) };
    },
    (key) => {
      const [down, right] = STEP[key] ?? [0, 0], step = map.turned ? { row: right, column: down } : { row: down, column: right };
      weight = { row: clamp(weight.row + step.row, map.rows - 1), column: clamp(weight.column + step.column, map.columns - 1) };
    },
    drawWeights,
  );
  readable(
    $("kl"),
    (x) => (state.at = clamp(Math.floor((x / $("kl").clientWidth) * state.broken.nats.length), state.broken.nats.length - 1)),
    (key) => (state.at = clamp(state.at + (STEP[key]?.[1] ?? 0), state.broken.nats.length - 1)),
    () => select(state.at),
  );
}

function drawAll() {
  if (state.weights) drawWeights();
  drawAttention();
  drawInt8();
  drawKl();
  document.dispatchEvent(new Event("token")); // the tour's plot
}

function fillChoices() {
  const layers = Array.from({ length: state.facts.config.layers }, (_, i) => make("option", { value: i, textContent: i }));
  for (const id of ["attention-layer", "int8-layer", "weights-layer"]) $(id).append(...layers.map((each) => each.cloneNode(true)));
  for (let i = 0; i < state.facts.config.heads; i++) $("attention-head").append(make("option", { value: i, textContent: i }));
  const fill = (id, names) => $(id).append(...names.map((each) => make("option", { value: each, textContent: each })));
  fill("int8-part", Object.keys(state.facts.readBy));
  fill("weights-part", Object.keys(state.facts.linears));
  for (const bug of state.facts.bugs) {
    const button = make("button", { className: "plain", type: "button", textContent: bug.title, title: bug.text, disabled: true });
    button.dataset.name = bug.name;
    button.setAttribute("aria-pressed", "false");
    button.onclick = () => {
      button.after($("break-facts"));
      work(() => breakIt(bug), $("break-facts"));
    };
    $("bugs").append(button);
  }
}

let waiting = 0;
function showTyped() {
  state.given = Infinity;
  document.body.classList.add("unread"); // what is shown of the text before fades
  say("", false, $("break-facts"));
  showTokens(isEmpty() ? [] : state.tokenizer.encode($("prompt").value));
}

// The tokens are shown with each key, and read after a short rest.
$("prompt").oninput = () => {
  if (!state.tokenizer) return;
  clearTimeout(waiting);
  if (!state.busy) {
    showTyped();
    if (isEmpty()) return say("");
  }
  if (state.playsItself) state.isStopped = true;
  waiting = setTimeout(() => (state.busy ? $("prompt").oninput() : state.model && work(() => readGiven(promptIds()))), READ_AFTER_MS);
};
$("write-form").onsubmit = (event) => {
  event.preventDefault();
  clearTimeout(waiting);
  if (!state.model) return;
  work(async () => {
    await readGiven(promptIds());
    await write(settings().max_tokens);
  });
};
$("prompt").onkeydown = (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("write-form").requestSubmit();
};
$("another").onclick = () => {
  $("seed").value = (settings().seed + 1) % 2 ** 32;
  showSettings();
  $("write-form").requestSubmit();
};
$("one").onclick = () =>
  work(async () => {
    await readTyped();
    await write(1);
  });
$("stop").onclick = () => (state.isStopped = true);
$("mend").onclick = () => {
  mend();
  select(state.at);
  document.querySelector("#bugs button").focus();
};
$("look-broken").onchange = () => select(state.at);
$("sampling").onsubmit = (event) => event.preventDefault();
$("sampling").oninput = () => {
  showSettings();
  showNext();
};
for (const id of ["attention-layer", "attention-head"]) $(id).onchange = drawAttention;
for (const id of ["int8-layer", "int8-part"]) $(id).onchange = drawInt8;
for (const id of ["weights-layer", "weights-part"]) $(id).onchange = drawWeights;

async function start() {
  showSettings();
  const response = await fetch(new URL("facts.json", import.meta.url));
  if (!response.ok) throw new Error(`facts.json: the site answered ${response.status}`);
  state.facts = await response.json();
  state.tokenizer = new Tokenizer(state.facts.vocabulary, state.facts.bos);
  fillChoices();
  readPlots();
  showTyped();
  state.weights = await fetchBytes("storyteller.onnx.data.gz");
  drawWeights();
  new ResizeObserver(drawAll).observe(document.querySelector("main"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  if (!state.facts.runtime) throw new Error(`This copy of the site was built without onnxruntime-web (${state.facts.missing}), so the model cannot run here. Tokens and weights are shown.`);
  state.ort = await loadRuntime();
  // All graphs are fetched now: they are small, and the page needs no network afterwards.
  const names = ["right", ...state.facts.bugs.map((bug) => bug.name)];
  const graphs = await Promise.all(names.map((each) => fetchBytes(`${each}.onnx.gz`)));
  state.graphs = Object.fromEntries(names.map((each, i) => [each, graphs[i]]));
  state.model = await Model.open(state.ort, state.graphs.right, state.weights, state.facts.config);
  say("");
  state.playsItself = true;
  await work(async () => {
    const before = $("prompt").value;
    await readGiven(promptIds());
    if ($("prompt").value === before) await write(settings().max_tokens);
  });
  state.playsItself = false;
}

start().catch((error) => say(error.message, true));
