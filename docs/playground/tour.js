// Eight steps through a layer. Each lights up its part of the drawing, and shows it with numbers of the chosen token.

import { decodeFloats } from "./files.js";
import { name, state } from "./main.js";
import { distribution, unpackTernary } from "./model.js";

const HIDDEN = "blocks.0.attn.q_proj"; // what the numbers below are of: the first layer
const COLUMNS = 32;
let step = 1;

// Of the token that the panels show; null before the model has read it.
function look() {
  const { reading, at } = state, integers = reading?.inner[`${HIDDEN}.hook_x_int8`]?.[at];
  if (!integers) return null;
  const values = Array.from(integers, (value) => value - 128), heads = reading.inner["blocks.0.attn.hook_pattern"][at];
  const largest = heads.map((shares) => Math.max(...shares)), share = Math.min(...largest), head = largest.indexOf(share), pattern = heads[head].slice(0, at + 1); // the tokens after it cannot be read
  const most = pattern.indexOf(share), read = most === at ? "itself" : `“${name(reading.ids[most])}”`, next = distribution(reading.logits[at], { temperature: 0 })[0].id;
  return { token: name(reading.ids[at]), at, values, head, pattern, scale: reading.inner[`${HIDDEN}.hook_x_scale`][at][0], share, read, next: name(next) };
}

const countZeros = (values) => values.filter((value) => value === 0).length;
const integers = (part) => Array.from(state.reading.inner[`blocks.0.${part}.hook_x_int8`][state.at], (value) => value - 128);

// The row of the token in the table of the embedding, which is of bfloat16.
function embeddingRow() {
  const { offset, length } = state.facts.embedding, bytes = length / state.facts.config.vocabulary, start = offset + bytes * state.reading.ids[state.at];
  return Array.from(decodeFloats("BF16", state.weights.slice(start, start + bytes)));
}

// By how much RoPE turns each pair of numbers of a query or key, in radians.
function angles() {
  const { headSize, theta } = state.facts.config;
  return Array.from({ length: headSize / 2 }, (_, i) => state.at * theta ** ((-2 * i) / headSize));
}

function firstRow() {
  const matrix = state.facts.matrices.find((each) => each.name === HIDDEN);
  return Array.from(unpackTernary(state.weights, matrix).subarray(0, matrix.columns));
}

function countWeights() {
  const first = firstRow(), total = (kind) => first.filter((value) => value === kind).length;
  return `q_proj’s first output adds ${total(1)} of the 256 numbers, subtracts ${total(-1)} and skips ${total(0)}. No number is multiplied.`;
}

const STEPS = [
  ["From a token to numbers", (it) => `Each of the 4,096 tokens has a row of 256 numbers: the embedding.${it ? ` That of “${it.token}” comes in at the top.` : ""} These numbers are the stream, which all layers read and add to.`],
  ["RMSNorm", () => "The numbers are divided by their typical size, so that no layer sees them too large or too small, and each is multiplied by a learned weight. What goes on in the stream at the left is not changed."],
  ["Eight bits", (it) => `The largest number becomes 127 or −127, the others are multiplied by the same scale and rounded.${it ? ` The scale of “${it.token}” is 127 divided by its largest number: ${it.scale.toPrecision(4)}. ${countZeros(it.values)} of its 256 numbers became 0.` : ""}`],
  ["Three ternary products", () => `Matrices of −1, 0 and +1 make a query, a key and a value. ${state.weights ? countWeights() : ""} The sum is an integer, exact in any order. Two scales turn it back into a number: the matrix’s and the token’s.`],
  ["RoPE", (it) => `Queries and keys are turned by an angle that grows with the place of the token${it ? `, here ${it.at}: of the 64 numbers of a head the first pair by ${it.at} radians, the last by ${angles().at(-1).toPrecision(2)}` : ""}. So where two tokens stand matters only by how far apart they are.`],
  ["Attention", (it) => `The query is compared with the keys of all tokens up to its own. The shares add up to 1, and the values are averaged by them.${it ? ` In head ${it.head}, which spreads its shares the most, “${it.token}” reads ${it.read} most: ${it.share.toFixed(2)}.` : ""} BitNet does this in floats.`],
  ["Back into the stream", () => "The four heads are laid side by side, normed and rounded to int8 once more, and another ternary matrix makes 256 numbers of them. They are added to the stream: what was there stays."],
  ["Feed-forward", (it) => `Each token is computed by itself: 768 numbers, where relu² makes the negative ones 0 and squares the others, times 768 more, and back to 256. After six layers the head compares the stream with all tokens.${it ? ` After “${it.token}” it finds “${it.next}” the likeliest.` : ""}`],
];

// What is drawn below a step's text: [numbers, what they are], from −1 (blue) to +1 (orange) once divided by the largest.
const PLOTS = {
  1: (it) => [embeddingRow(), `the 256 numbers of “${it.token}”`],
  2: (it) => [it.values.map((value) => value / it.scale), `the 256 numbers of “${it.token}” after the norm, to 8 bits`],
  3: (it) => [it.values, `the 256 integers of “${it.token}”`],
  4: () => [firstRow(), "the 256 weights of the first output of q_proj"],
  5: () => [angles().map(Math.cos), "the cosine of the angle of each of the 32 pairs"],
  7: (it) => [integers("attn.o_proj"), `what the four heads of “${it.token}” give to o_proj, 64 numbers each`],
  8: (it) => {
    const products = integers("mlp.down_proj");
    return [products, `the 768 products of “${it.token}”, as integers into down_proj, where ${countZeros(products)} are 0 beside the largest`];
  },
};

// The tokens that attention reads, with their shares below them: blue, as in the panel of attention.
function showShares({ token, pattern, share: largest }) {
  const elements = Array.from(pattern, (share, i) => {
    const text = name(state.reading.ids[i]), element = make("span", { textContent: text, title: `${text}: ${share.toFixed(3)}` });
    element.style.borderColor = `color-mix(in srgb, var(--s0) ${(100 * share) / largest}%, var(--line))`;
    return element;
  });
  $("tour-shares").replaceChildren(...elements);
  $("tour-detail").textContent = `What “${token}” reads: the bluer below a token, the larger its share, up to ${largest.toFixed(2)}.`;
}

function draw(it) {
  const [values, text] = (it && PLOTS[step]?.(it)) ?? [[], ""], largest = Math.max(...values.map(Math.abs));
  $("tour-plot").hidden = !values.length;
  $("tour-detail").textContent = text && `${text[0].toUpperCase()}${text.slice(1)}: ${Math.min(...values) < 0 ? `blue below 0, orange above, up to ±${Number(largest.toPrecision(3))}` : `up to ${Number(largest.toPrecision(2))}`}.`;
  $("tour-shares").replaceChildren();
  if (it && step === 6) return showShares(it);
  if (!values.length) return;
  $("tour-plot").setAttribute("aria-label", `${values.length} numbers`);
  const size = Math.min(16, $("tour-plot").clientWidth / COLUMNS), [context] = prepare($("tour-plot"), Math.ceil(values.length / COLUMNS) * size);
  values.forEach((value, i) => {
    const box = [(i % COLUMNS) * size, Math.floor(i / COLUMNS) * size, size - 1, size - 1];
    context.globalAlpha = 1;
    context.fillStyle = colour("--line");
    context.fillRect(...box);
    context.globalAlpha = Math.abs(value) / largest;
    context.fillStyle = colour(value > 0 ? "--s1" : "--s0");
    context.fillRect(...box);
  });
}

function show(next) {
  step = next;
  const [title, text] = STEPS[step - 1], it = look();
  $("tour-step").textContent = `${step} of ${STEPS.length}: ${title}`;
  $("tour-text").textContent = text(it);
  for (const part of $("layer").querySelectorAll("[data-step]")) part.classList.toggle("lit", Number(part.dataset.step) === step);
  $("tour-back").disabled = step === 1;
  $("tour-next").disabled = step === STEPS.length;
  draw(it);
}

// A step that the reader chose: the drawing and the text move onto the screen, if it has room for both.
function go(next) {
  show(next);
  const boxes = [$("layer"), $("tour-text")].map((part) => part.getBoundingClientRect());
  const top = Math.min(...boxes.map((box) => box.top)), bottom = Math.max(...boxes.map((box) => box.bottom));
  if ((top < 0 || bottom > innerHeight) && bottom - top < innerHeight) scrollBy(0, top - 8);
}

$("tour-next").onclick = () => go(step + 1);
$("tour-back").onclick = () => go(step - 1);
for (const part of $("layer").querySelectorAll("[data-step]")) part.onclick = () => go(Number(part.dataset.step));
document.addEventListener("token", () => show(step)); // another one was chosen
show(1);
