// The reader's own model, off the page's thread. In: {open: files}, {write: text, settings}, {stop: true}.
// Out: {step}, {opened}, {token}, {done}, {problem}.

import { openModel } from "./files.js";
import { choose, distribution, uniforms } from "./model.js";
import { TernaryMatrices } from "./ternary.js";
import { Transformer } from "./transformer.js";

const PAUSE_MS = 100; // of reading, from one look for {stop} to the next
let model = null, tokenizer = null, isStopped = false;

// At most so many characters: names in a file can be as long as the file. An error of JavaScript itself is that of a file
// that nothing above has foreseen, or of memory.
function describe({ name, message }) {
  const text = name === "Error" ? message : name === "RangeError" ? `The files need more memory than this page has (${message}).` : `The files are damaged (${message}).`;
  return text.length > 600 ? `${text.slice(0, 600)} ...` : text;
}

const pause = () => new Promise((resolve) => setTimeout(resolve));

async function open(files) {
  model = tokenizer = null; // before the next one needs memory
  const tell = (step) => postMessage({ step });
  tell("Reading the file.");
  const matrices = new TernaryMatrices(), opened = await openModel(files, matrices, tell);
  tell("Comparing each ternary product with plain JavaScript.");
  await pause();
  const ternary = Object.entries(opened.parts).filter(([, part]) => part.matrix);
  const wrong = ternary.find(([, part]) => !matrices.isExact(part.matrix));
  if (wrong) throw new Error(`${wrong[0]}: WebAssembly and plain JavaScript gave different integers. This browser cannot run the model.`);
  model = new Transformer(opened.config, opened.parts, matrices);
  tokenizer = opened.tokenizer;
  const weights = ternary.reduce((total, [, { matrix }]) => total + matrix.rows * matrix.columns, 0);
  const grouped = Object.values(opened.parts).filter((part) => part.group).length;
  postMessage({ opened: { config: opened.config, matrices: ternary.length, weights, grouped, note: opened.note, hasTokenizer: tokenizer !== null } });
}

// Without a tokenizer the text is of ids.
function readIds(text) {
  if (tokenizer) return tokenizer.encode(text);
  const ids = text.split(/[\s,]+/).filter(Boolean).map(Number);
  if (!ids.every((id) => Number.isInteger(id))) throw new Error("The file has no tokenizer that this page knows: write token ids, as in 1 15 7.");
  return ids;
}

// settings: of the page's sliders
async function write(text, { seed, max_tokens: count, ...sampling }) {
  const given = readIds(text), { context, ends } = model.config, draws = uniforms(seed), begin = performance.now();
  if (!given.length) throw new Error("Write a beginning: this model has no token that begins a text by itself.");
  if (given.length >= context) throw new Error(`The text has ${given.length} tokens; the model reads ${context}, with those that are written.`);
  model.clear();
  isStopped = false;
  let logits, pausedAt = begin;
  for (const id of given) {
    if (isStopped) break;
    logits = model.read(id);
    if (performance.now() - pausedAt < PAUSE_MS) continue;
    await pause(); // for {stop}
    pausedAt = performance.now();
  }
  const ids = [], readMs = performance.now() - begin;
  while (ids.length < count && !isStopped && given.length + ids.length < context) {
    const id = choose(distribution(logits, sampling), draws.next().value);
    if (ends.includes(id)) break;
    ids.push(id);
    postMessage({ token: { ids, text: tokenizer ? tokenizer.decode([...given, ...ids]) : [...given, ...ids].join(" ") } });
    await pause(); // for {stop}
    if (ids.length < count) logits = model.read(id);
  }
  const msPerToken = (performance.now() - begin - readMs) / Math.max(1, ids.length - 1);
  postMessage({ done: { given, ids, logits: Array.from(logits), msPerToken } });
}

onmessage = async ({ data }) => {
  if (data.stop) isStopped = true;
  else
    try {
      await (data.open ? open(data.open) : write(data.write, data.settings));
    } catch (error) {
      postMessage({ problem: describe(error) });
    }
};
