// The model in the browser: an exported graph in onnxruntime-web, what it computed of a text, and the choice of tokens.

// Downloads a file that is stored compressed.
export async function fetchBytes(name) {
  const response = await fetch(new URL(name, import.meta.url));
  if (!response.ok) throw new Error(`${name}: the site answered ${response.status}`);
  const stream = response.body.pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// The runtime, on one thread: a site without special headers allows no more.
export async function loadRuntime() {
  const [ort, wasmBinary] = await Promise.all([import("./ort.wasm.min.mjs"), fetchBytes("ort-wasm-simd-threaded.wasm.gz")]);
  ort.env.wasm.wasmPaths = new URL("./", import.meta.url).href;
  ort.env.wasm.wasmBinary = wasmBinary;
  ort.env.wasm.numThreads = 1;
  ort.env.logLevel = "error";
  return ort;
}

export class Model {
  // graph: the bytes of an .onnx file; weights: those of the file beside it, which all graphs share
  static async open(ort, graph, weights, config) {
    const externalData = [{ path: "storyteller.onnx.data", data: weights }];
    return new Model(ort, await ort.InferenceSession.create(graph, { externalData }), config);
  }

  constructor(ort, session, config) {
    Object.assign(this, { ort, session, config });
  }

  close() {
    return this.session.release();
  }

  read(ids) {
    return new Reading(this).read(ids);
  }
}

// What a model computed of a text, position by position:
//   ids, logits[position] (vocabulary); inner[name][position]: of each trace name, for a pattern (heads x keys)
export class Reading {
  constructor(model) {
    Object.assign(this, { model, ids: [], logits: [], inner: {} });
    const { layers, kvHeads, headSize } = model.config;
    this.past = {};
    for (let i = 0; i < layers; i++)
      for (const part of ["key", "value"]) this.past[`${i}.${part}`] = new model.ort.Tensor("float32", new Float32Array(0), [1, kvHeads, 0, headSize]);
  }

  // Read more tokens; the cache holds those before.
  async read(ids) {
    const { ort, session } = this.model, before = this.ids.length, total = before + ids.length;
    const whole = (values) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), [1, values.length]);
    const feeds = { input_ids: whole(ids), attention_mask: whole(Array(total).fill(1)), position_ids: whole(ids.map((_, i) => before + i)) };
    for (const [name, tensor] of Object.entries(this.past)) feeds[`past_key_values.${name}`] = tensor;
    const outputs = await session.run(feeds);
    this.ids.push(...ids);
    for (const [name, tensor] of Object.entries(outputs)) {
      if (name.startsWith("present.")) this.past[name.slice("present.".length)] = tensor;
      else if (name === "logits") this.logits.push(...rows(tensor, ids.length));
      else (this.inner[name] ??= []).push(...(name.endsWith("hook_pattern") ? patterns(tensor, ids.length, total, this.model.config.heads) : rows(tensor, ids.length)));
    }
    return this;
  }
}

// (1, tokens, n) -> an array for each token
function rows({ data }, tokens) {
  const size = data.length / tokens;
  return Array.from({ length: tokens }, (_, i) => data.slice(i * size, (i + 1) * size));
}

// (1, heads, tokens, keys), in this order whatever the dimensions say -> for each token an array of heads x keys
function patterns({ data }, tokens, keys, heads) {
  return Array.from({ length: tokens }, (_, i) =>
    Array.from({ length: heads }, (_, head) => data.slice((head * tokens + i) * keys, (head * tokens + i + 1) * keys)),
  );
}

// -- probabilities, in float64 ----------------------------------------------------------------------------------------

export function softmax(logits) {
  const values = Float64Array.from(logits), largest = values.reduce((a, b) => Math.max(a, b));
  let sum = 0;
  for (let i = 0; i < values.length; i++) sum += values[i] = Math.exp(values[i] - largest);
  return values.map((value) => value / sum);
}

// The distribution to draw from, as the package's `distribution`: temperature, then top_k, top_p and min_p.
// -> [{id, p}], likeliest first; among equals the smaller id first
export function distribution(logits, { temperature, top_k = 0, top_p = 1, min_p = 0 }) {
  if (temperature === 0) return [{ id: logits.indexOf(logits.reduce((a, b) => Math.max(a, b))), p: 1 }];
  const order = Array.from(logits, (_, id) => id).sort((a, b) => logits[b] - logits[a] || a - b);
  const ids = top_k > 0 ? order.slice(0, top_k) : order;
  const probabilities = softmax(Float64Array.from(ids, (id) => logits[id] / temperature));
  let size = ids.length;
  if (top_p < 1) {
    let before = 0;
    size = ids.findIndex((_, i) => (i && (before += probabilities[i - 1])) >= top_p);
    size = size < 0 ? ids.length : Math.max(1, size);
  }
  while (probabilities[size - 1] < min_p * probabilities[0]) size--;
  const total = probabilities.slice(0, size).reduce((a, b) => a + b);
  return ids.slice(0, size).map((id, i) => ({ id, p: probabilities[i] / total }));
}

// Logits without the tokens that would complete one of `sequences` of ids, as transformers' bad_words_ids.
export function ban(logits, ids, sequences) {
  const ends = sequences.filter((sequence) => sequence.slice(0, -1).every((id, i) => id === ids[ids.length - sequence.length + 1 + i]));
  const allowed = Float64Array.from(logits);
  for (const sequence of ends) allowed[sequence.at(-1)] = -Infinity;
  return allowed;
}

// The token of a distribution for a number of [0, 1): a race in which each token has a random number of its own. So two
// models that are nearly the same choose the same token nearly always.
export function choose(choices, uniform) {
  const times = choices.map(({ id, p }) => -Math.log(uniforms(uniform * 2 ** 32 + id * 7919).next().value) / p);
  return choices[times.indexOf(times.reduce((a, b) => Math.min(a, b)))].id;
}

// Numbers of [0, 1) for a seed (mulberry32). They are not Python's, so a seed gives another text than in the package.
export function* uniforms(seed) {
  for (let state = seed >>> 0; ; ) {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    yield ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  }
}

// How far the second distribution is from the first, in nats: the sum of p ln(p / q).
export function divergence(logits, others) {
  const p = softmax(logits), q = softmax(others);
  let sum = 0;
  for (let i = 0; i < p.length; i++) if (p[i] > 0) sum += p[i] * Math.log(p[i] / Math.max(q[i], Number.MIN_VALUE));
  return Math.max(0, sum);
}

// -- weights ----------------------------------------------------------------------------------------------------------

// A matrix of -1, 0 and +1, row by row: four weights in a byte, the first in its lowest bits, 2 bits w + 1 each.
export function unpackTernary(weights, { rows, columns, offset }) {
  return Int8Array.from({ length: rows * columns }, (_, i) => ((weights[offset + (i >> 2)] >> (2 * (i & 3))) & 3) - 1);
}
