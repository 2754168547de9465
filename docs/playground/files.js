// A model's files, dropped on the page -> {config, parts, tokenizer}. GGUF, and safetensors of Hugging Face or bitnet_ref.
// What this page cannot run as the package would is refused, with the reason; every tensor of a file must be used.

import { roundHalfToEven } from "./transformer.js";
import { BytePairTokenizer, Tokenizer, readSentencePieces } from "./tokenizer.js";

const MAX_HEADER = 64 << 20, MAX_TENSORS = 1 << 17, MAX_KEYS = 1 << 16, MAX_CONTEXT = 2048, CONVERT = "`bitnet-ref convert FILE OUT --to native` writes a file that it can";
const CUT = "goes beyond the end of the file: it is cut off, fetch it again";
const ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"], FEED_FORWARD = ["gate_proj", "up_proj", "down_proj"];
const LINEARS = [...ATTENTION.map((part) => `attn.${part}`), ...FEED_FORWARD.map((part) => `mlp.${part}`)];
const round = Math.fround;

// tell: gets a line of progress
export async function openModel(files, matrices, tell = () => {}) {
  const weights = files.filter(({ name }) => /\.(gguf|safetensors)$/.test(name)), isGguf = weights[0]?.name.endsWith(".gguf");
  const ends = new Set(weights.map(({ name }) => name.replace(/^.*?(-\d+-of-(\d+))?\.(\w+)$/, "$2.$3"))); // of a part: "00003.gguf"
  if (!weights.length) throw new Error(`${files[0].name} is not a model. Drop a .gguf or .safetensors file.`);
  const empty = weights.find(({ size }) => !size);
  if (empty) throw new Error(`${empty.name} is empty. Drop a .gguf or .safetensors file.`);
  if (weights.length > 1 && (ends.size > 1 || [...ends][0].startsWith(".")))
    throw new Error(`These are ${weights.length} models. Drop one .gguf or .safetensors file, or all parts of one model, as NAME-00001-of-00003.gguf.`);
  const reader = isGguf ? await Gguf.open(weights) : await Safetensors.open(weights, files);
  const config = reader.config, parts = {};
  const put = async (name, rows, columns) => (parts[name] = arrange(await reader.linear(name, rows, columns), matrices));
  await put("embedding", config.vocabulary, config.hidden);
  if (parts.embedding.matrix) throw reader.refuse("embedding", "is ternary with one scale; this page reads a table of floats, or with a scale for each group");
  parts.lm_head = parts.embedding;
  if (!config.tied) await put("lm_head", config.vocabulary, config.hidden);
  parts.final_norm = await reader.norm("final_norm", config.hidden);
  const query = config.heads * config.headSize, keys = config.kvHeads * config.headSize;
  const shapes = [[query, config.hidden], [keys, config.hidden], [keys, config.hidden], [config.hidden, query]];
  shapes.push([config.ffn, config.hidden], [config.ffn, config.hidden], [config.hidden, config.ffn]);
  const norms = { attn_norm: config.hidden, ffn_norm: config.hidden };
  if (config.subNorms) Object.assign(norms, { attn_sub_norm: query, ffn_sub_norm: config.ffn });
  if (config.headNorms) Object.assign(norms, { q_norm: config.headSize, k_norm: config.headSize });
  for (let i = 0; i < config.layers; i++) {
    tell(`Reading layer ${i + 1} of ${config.layers}.`);
    for (const [name, size] of Object.entries(norms)) parts[`blocks.${i}.${name}`] = await reader.norm(`blocks.${i}.${name}`, size);
    for (const [j, name] of LINEARS.entries()) await put(`blocks.${i}.${name}`, ...shapes[j]);
  }
  const rest = reader.names.filter((name) => !reader.taken.has(name));
  if (rest.length) throw reader.refuse(rest[0], `is a tensor that this page does not run (${rest.length} are left)`);
  return { config, parts, tokenizer: reader.tokenizer(), note: reader.note ?? "" };
}

// What a reader gives of a linear, in the form that it is multiplied in.
function arrange({ codes, values, rows, columns, scale, scales, group, bias }, matrices) {
  if (values) return { values, rows, columns, bias };
  if (group) return { codes, scales, group, rows, columns, bias };
  return { matrix: matrices.add(codes, rows, columns), scale, bias };
}

class Reader {
  constructor(file) {
    Object.assign(this, { file, taken: new Set(), tokenizerFiles: {} });
  }

  refuse(field, message) {
    return new Error(`${this.file.name}: ${field}: ${message}`);
  }

  // The value, which must be of one of KINDS.
  expect(field, value, kind) {
    if (!KINDS[kind](value)) throw this.refuse(field, `expected ${kind}, got ${quote(value)}`);
    return value;
  }

  // The JSON object that is in the bytes.
  parse(field, bytes) {
    let value;
    try {
      value = JSON.parse(new TextDecoder().decode(bytes));
    } catch {
      throw this.refuse(field, "is not JSON: the file is damaged");
    }
    return this.expect(field, value, "an object");
  }

  addTensor(name, tensor) {
    if (this.tensors.has(name)) throw this.refuse(name, "is there twice");
    this.tensors.set(name, tensor);
  }

  async bytes(start, size, file = this.file) {
    return new Uint8Array(await file.slice(start, start + size).arrayBuffer());
  }

  // The tensor's entry, which must have this shape.
  entry(name, shape) {
    const tensor = this.tensors.get(name);
    if (!tensor) throw this.refuse(name, "the tensor is missing");
    if (tensor.shape.join() !== shape.join()) throw this.refuse(name, `expected the shape ${shape}, got ${tensor.shape}`);
    this.taken.add(name);
    return tensor;
  }

  get names() {
    return [...this.tensors.keys()];
  }

  check({ eps, theta, ...fields }) {
    for (const [field, value] of Object.entries(fields)) this.expect(field, value, "a whole number above 0");
    this.expect("eps", eps, "a finite number of at least 0");
    if (!this.expect("theta", theta, "a finite number of at least 0")) throw this.refuse("theta", "is 0");
    if (fields.heads % fields.kvHeads || fields.headSize % 2) throw this.refuse("heads", `${fields.heads} over ${fields.kvHeads} of ${fields.headSize} numbers`);
    return { ...fields, eps, theta, context: Math.min(fields.context, MAX_CONTEXT) };
  }

  // What a tokenizer is made of, checked before it is used. -> pieces
  checkPieces(pieces, scores = [], types = [], merges = []) {
    this.expect("tokens", pieces, "a list of texts");
    if (pieces.length > this.config.vocabulary) throw this.refuse("tokens", `${pieces.length} tokens for ${this.config.vocabulary} rows`);
    const long = pieces.findIndex((piece) => piece.length > MAX_PIECE);
    if (long >= 0) throw this.refuse("tokens", `token ${long} has ${pieces[long].length} characters; this page takes up to ${MAX_PIECE}`);
    this.expect("scores", scores, "a list of numbers");
    this.expect("token_type", types, "a list of numbers");
    this.expect("merges", merges, "a list of texts");
    for (const list of [scores, types]) if (list.length && list.length !== pieces.length) throw this.refuse("tokens", `${list.length} scores or types for ${pieces.length} tokens`);
    return pieces;
  }

  checkScale(name, scale) {
    if (!(scale > 0 && scale < Infinity)) throw this.refuse(name, `expected a scale above 0, got ${scale}`);
    return scale;
  }

  checkCodes(name, codes) {
    if (codes.some((code) => code > 2)) throw this.refuse(name, "holds the invalid ternary code 3");
    return codes;
  }
}

const isFinite = Number.isFinite, isWhole = (value) => Number.isSafeInteger(value) && value >= 0, MAX_PIECE = 4096;
const listOf = (test) => (value) => Array.isArray(value) && value.every(test);
const KINDS = {
  "an object": (value) => value !== null && typeof value === "object" && !Array.isArray(value),
  "a text": (value) => typeof value === "string",
  "a list of texts": listOf((value) => typeof value === "string"),
  "a list of numbers": listOf((value) => typeof value === "number"),
  "a list of whole numbers": listOf(isWhole),
  "a whole number above 0": (value) => isWhole(value) && value > 0,
  "a finite number of at least 0": (value) => isFinite(value) && value >= 0,
  "a token's id, or none": (value) => value === undefined || value === null || isWhole(value),
};

function quote(value) {
  const text = JSON.stringify(value) ?? "nothing";
  return text.length > 80 ? `${text.slice(0, 80)} ...` : text;
}

// Floats of -s, 0 and +s -> {codes, scale}; null for others.
function splitTernary(values) {
  const scale = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  if (scale < 1e-5 || !values.every((value) => value === 0 || Math.abs(value) === scale)) return null;
  return { codes: Uint8Array.from(values, (value) => Math.sign(value) + 1), scale };
}

// Masters, by their absmean.
function quantize(values) {
  const scale = Math.max(round(values.reduce((sum, value) => sum + Math.abs(value), 0) / values.length), round(1e-5));
  const inverse = round(1 / scale);
  return { codes: Uint8Array.from(values, (value) => Math.max(-1, Math.min(1, roundHalfToEven(round(value * inverse)))) + 1), scale };
}

// -- number formats ---------------------------------------------------------------------------------------------------

const words = (bytes, Type) => new Type(bytes.buffer, bytes.byteOffset, bytes.byteLength / Type.BYTES_PER_ELEMENT);
const bits = new Uint32Array(1), bitsAsFloat = new Float32Array(bits.buffer);

function bfloat16(value) {
  bits[0] = value << 16;
  return bitsAsFloat[0];
}

function float16(value) {
  const sign = value & 0x8000 ? -1 : 1, exponent = (value >> 10) & 31, fraction = value & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24);
}

const FLOATS = {
  F32: (bytes) => words(bytes, Float32Array),
  F16: (bytes) => Float32Array.from(words(bytes, Uint16Array), float16),
  BF16: (bytes) => Float32Array.from(words(bytes, Uint16Array), bfloat16),
};

// Blocks of floats: values of a block, its bytes, and read(block, out), which writes its values. As ggml dequantises them.
const FLOAT_BLOCKS = {
  Q4_0: { values: 32, bytes: 18, read: q4_0 },
  Q8_0: { values: 32, bytes: 34, read: q8_0 },
  Q4_K: { values: 256, bytes: 144, read: q4_k },
  Q5_K: { values: 256, bytes: 176, read: (block, out) => q4_k(block, out, 48) },
  Q6_K: { values: 256, bytes: 210, read: q6_k },
};
const half = (block, at) => float16(block[at] | (block[at + 1] << 8)), signedByte = (value) => (value << 24) >> 24;

function q4_0(block, out) {
  const scale = half(block, 0);
  for (let j = 0; j < 32; j++) out[j] = scale * (((block[2 + (j & 15)] >> (4 * (j >> 4))) & 15) - 8);
}

function q8_0(block, out) {
  const scale = half(block, 0);
  for (let j = 0; j < 32; j++) out[j] = scale * signedByte(block[2 + j]);
}

// Eight groups of 32 values of 4 bits; each has a scale and a minimum of 6 bits, which lie in 12 bytes. Q5_K has 32 bytes
// more before the nibbles: bit g of byte j is worth 16 in value j of group g.
function q4_k(block, out, nibbles = 16) {
  const scale = half(block, 0), minimum = half(block, 2), six = block.subarray(4, 16);
  for (let group = 0; group < 8; group++) {
    const late = group - 4, low = late < 0 ? six[group] & 63 : (six[group + 4] & 15) | ((six[late] >> 6) << 4);
    const least = late < 0 ? six[group + 4] & 63 : (six[group + 4] >> 4) | ((six[group] >> 6) << 4);
    for (let j = 0; j < 32; j++) {
      const code = (block[nibbles + 32 * (group >> 1) + j] >> (4 * (group & 1))) & 15, fifth = nibbles > 16 ? (block[16 + j] >> group) & 1 : 0;
      out[32 * group + j] = scale * low * (code + 16 * fifth) - minimum * least;
    }
  }
}

// Two halves of 128 values: 4 low bits in 64 bytes, 2 high bits in 32; a scale of 8 bits for each 16 values.
function q6_k(block, out) {
  const scale = half(block, 208);
  for (let j = 0; j < 256; j++) {
    const part = j >> 7, quarter = (j >> 5) & 3, at = j & 31;
    const low = (block[64 * part + 32 * (quarter & 1) + at] >> (4 * (quarter >> 1))) & 15, high = (block[128 + 32 * part + at] >> (2 * quarter)) & 3;
    out[j] = scale * signedByte(block[192 + (j >> 4)]) * ((low | (high << 4)) - 32);
  }
}

export function decodeFloats(kind, bytes) {
  if (FLOATS[kind]) return FLOATS[kind](bytes);
  const { values, bytes: size, read } = FLOAT_BLOCKS[kind], out = new Float32Array((bytes.length / size) * values);
  for (let i = 0; i * size < bytes.length; i++) read(bytes.subarray(i * size, (i + 1) * size), out.subarray(i * values, (i + 1) * values));
  return out;
}

// Ternary blocks: values of a block, its bytes, where the float16 scale is, and code(block, j) of a value.
const BLOCKS = {
  TQ1_0: { values: 256, bytes: 54, scaleAt: 52, code: tq1_0 },
  TQ2_0: { values: 256, bytes: 66, scaleAt: 64, code: (block, j) => block[32 * (j >> 7) + (j & 31)] >> (2 * ((j >> 5) & 3)) },
  Q2_0: { values: 64, bytes: 18, scaleAt: 0, code: (block, j) => block[2 + (j >> 2)] >> (2 * (j & 3)) },
};
const SPANS = [[0, 32, 0], [32, 16, 160], [48, 4, 240]]; // of TQ1_0: first byte, bytes, first value

// Five trits of a byte: the fraction 0.t0 t1 t2 t3 t4 in base 3, times 256.
function tq1_0(block, j) {
  const [first, bytes, start] = SPANS[j < 160 ? 0 : j < 240 ? 1 : 2], at = j - start;
  return (((block[first + (at % bytes)] * 3 ** Math.floor(at / bytes)) & 255) * 3) >> 8;
}

function decodeBlocks(bytes, { values, bytes: size, scaleAt, code }) {
  const blocks = bytes.length / size, codes = new Uint8Array(blocks * values), scales = new Float32Array(blocks);
  for (let i = 0; i < blocks; i++) {
    const block = bytes.subarray(i * size, (i + 1) * size);
    scales[i] = float16(block[scaleAt] | (block[scaleAt + 1] << 8));
    for (let j = 0; j < values; j++) codes[i * values + j] = code(block, j) & 3;
  }
  return { codes, scales };
}

// I2_S, of bitnet.cpp: a line of 2-bit codes and one scale. The order of the codes is that of the machine that wrote the
// file, and no field says which: blocks of 128 (x86) or 64 weights (arm), or four rows in a byte (interleaved).
const I2_S_LAYOUTS = { x86: 32, arm: 16, interleaved: 0 }, I2_S_TAIL = 32;

function fitsI2S(layout, rows, columns) {
  return layout === "interleaved" ? rows % 4 === 0 : (rows * columns) % (4 * I2_S_LAYOUTS[layout]) === 0;
}

function decodeI2S(bytes, layout, columns) {
  const size = bytes.length - I2_S_TAIL, across = I2_S_LAYOUTS[layout] || columns, codes = new Uint8Array(4 * size);
  for (let at = 0; at < size; at++)
    for (let part = 0, first = 4 * at - 3 * (at % across); part < 4; part++) codes[first + part * across] = (bytes[at] >> (6 - 2 * part)) & 3;
  return codes;
}

// Squared z-score of the correlation of two vectors, after the mean of each 128 is taken off: x86 and arm differ within these.
function squaredZ(a, b) {
  const width = a.length % 128 ? a.length : 128;
  const centred = (v) => v.map((value, i) => value - v.subarray(i - (i % width), i - (i % width) + width).reduce((x, y) => x + y) / width);
  const [x, y] = [centred(Float64Array.from(a)), centred(Float64Array.from(b))], dot = (u, v) => u.reduce((total, value, i) => total + value * v[i], 0);
  const power = dot(x, x) * dot(y, y);
  return power > 0 ? (dot(x, y) ** 2 / power) * a.length : 0;
}

// -- GGUF -------------------------------------------------------------------------------------------------------------

const TYPES = { 0: ["F32", 1, 4], 1: ["F16", 1, 2], 30: ["BF16", 1, 2], 34: ["TQ1_0", 256, 54], 35: ["TQ2_0", 256, 66], 42: ["Q2_0", 64, 18], 2: ["Q4_0", 32, 18], 8: ["Q8_0", 32, 34], 12: ["Q4_K", 256, 144], 13: ["Q5_K", 256, 176], 14: ["Q6_K", 256, 210], 36: ["I2_S", 4, 1] };
const KNOWN = { 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 38: "TL1", 39: "TL2" }; // and not run
const ARCHITECTURES = {
  "bitnet-b1.58": { activation: "relu2", subNorms: true },
  "bitnet-25": { activation: "relu2", subNorms: true },
  bitnet: { activation: "silu", subNorms: true },
  llama: { activation: "silu", isPermuted: true },
  qwen3: { activation: "silu", headNorms: true },
};
const SCALARS = { 0: ["getUint8", 1], 1: ["getInt8", 1], 2: ["getUint16", 2], 3: ["getInt16", 2], 4: ["getUint32", 4], 5: ["getInt32", 4], 6: ["getFloat32", 4], 7: ["getUint8", 1], 10: ["getBigUint64", 8], 11: ["getBigInt64", 8], 12: ["getFloat64", 8] };
const READ_KEYS = [
  ...["context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "hidden_activation"],
  ...["attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"],
  ...["attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scaling.type"],
];
const GGUF_LINEARS = { q_proj: "attn_q", k_proj: "attn_k", v_proj: "attn_v", o_proj: "attn_output", gate_proj: "ffn_gate", up_proj: "ffn_up", down_proj: "ffn_down" };
const GGUF_NAMES = { embedding: "token_embd", final_norm: "output_norm", lm_head: "output", q_norm: "attn_q_norm", k_norm: "attn_k_norm", ...GGUF_LINEARS };
const FLOAT_INPUTS = /trilm|spectra|bitcpm|maple/i; // names of models that are trained with inputs in float

class Cursor {
  constructor(bytes, name) {
    Object.assign(this, { bytes, name, at: 0, view: new DataView(bytes.buffer) });
  }
  take(size) {
    if (!(size <= this.bytes.length - this.at)) throw new Error(`${this.name}: the header is damaged or cut off near byte ${this.at}: fetch the file again`);
    this.at += size;
    return this.at - size;
  }
  number(method, size) {
    return Number(this.view[method](this.take(size), true));
  }
  count = () => this.number("getBigUint64", 8);
  type = () => this.number("getUint32", 4);
  text() {
    const size = this.count(), at = this.take(size);
    return new TextDecoder().decode(this.bytes.subarray(at, at + size));
  }
  value(type) {
    if (type === 8) return this.text();
    if (type === 9) {
      const inner = this.type(), size = this.count();
      if (inner === 9) throw new Error(`${this.name}: lists in lists of metadata near byte ${this.at}`); // nobody writes them
      if (size > this.bytes.length - this.at) this.take(size);
      return Array.from({ length: size }, () => this.value(inner));
    }
    if (!SCALARS[type]) throw new Error(`${this.name}: unknown type ${type} of metadata near byte ${this.at}`);
    const value = this.number(...SCALARS[type]);
    return type === 7 ? value !== 0 : value;
  }
}

class Gguf extends Reader {
  // parts: the file, or all files that the model is split over, in any order
  static async open(parts) {
    const reader = new Gguf(parts[0]), numbers = new Set();
    reader.tensors = new Map();
    for (const file of parts) {
      const metadata = await reader.readHeader(file), number = metadata["split.no"] ?? 0, count = metadata["split.count"] ?? 1;
      if (count !== parts.length) throw reader.refuse("split.count", `is one of ${count} parts, and ${parts.length} ${parts.length > 1 ? "are" : "is"} here`);
      if (numbers.has(number)) throw reader.refuse("split.no", `another file is part ${number + 1} too`);
      numbers.add(number);
      if (number === 0) reader.metadata = metadata; // the other parts have little but tensors
    }
    await reader.checkTypes();
    reader.readConfig();
    await reader.findI2SLayout();
    return reader;
  }

  // Notes the tensors of a file. -> its metadata
  async readHeader(file) {
    this.file = file; // for what is refused
    const cursor = new Cursor(await this.bytes(0, Math.min(file.size, MAX_HEADER)), file.name), metadata = Object.create(null), own = [];
    if (cursor.type() !== 0x46554747) throw new Error(`${file.name} is not a GGUF file, whatever its name says. Drop a .gguf or .safetensors file.`);
    const version = cursor.type(), tensors = cursor.count(), keys = cursor.count();
    if (version !== 2 && version !== 3) throw this.refuse("version", `expected 2 or 3, got ${version}`);
    if (tensors > MAX_TENSORS || keys > MAX_KEYS) throw this.refuse("header", `${tensors} tensors and ${keys} keys; expected up to ${MAX_TENSORS} and ${MAX_KEYS}`);
    for (let i = 0; i < keys; i++) {
      const key = cursor.text();
      metadata[key] = cursor.value(cursor.type());
    }
    for (let i = 0; i < tensors; i++) {
      const name = cursor.text(), shape = Array.from({ length: Math.min(cursor.type(), 5) }, cursor.count).reverse();
      own.push({ file, shape, type: cursor.type(), offset: cursor.count() });
      this.addTensor(name, own.at(-1));
    }
    const alignment = this.expect("general.alignment", metadata["general.alignment"] ?? 32, "a whole number above 0"), start = Math.ceil(cursor.at / alignment) * alignment;
    for (const tensor of own) tensor.start = start + tensor.offset;
    return metadata;
  }

  async checkTypes() {
    for (const [name, tensor] of this.tensors) {
      this.file = tensor.file;
      if (!TYPES[tensor.type]) {
        throw this.refuse(name, `is ${KNOWN[tensor.type] ?? `of type ${tensor.type}`}. This page runs ${Object.values(TYPES).map(([kind]) => kind).join(", ")}; ${CONVERT}`);
      }
      const [kind, values, bytes] = TYPES[tensor.type], total = tensor.shape.reduce((a, b) => a * b, 1);
      Object.assign(tensor, { kind, size: (total / values) * bytes + (kind === "I2_S" ? I2_S_TAIL : 0) });
      if (tensor.shape.at(-1) % values) throw this.refuse(name, `rows of ${tensor.shape.at(-1)} are no whole blocks of ${kind}`);
      if (tensor.start + tensor.size > tensor.file.size) throw this.refuse(name, CUT);
    }
    const starts = [...this.tensors.values()].sort((a, b) => a.start - b.start);
    for (const [name, { kind, file, start, size }] of this.tensors) {
      const next = starts.find((other) => other.file === file && other.start > start)?.start ?? file.size;
      if (kind === "Q2_0" && (next - start < size || next - start >= size + 64)) throw this.refuse(name, "id 42 has blocks of another size here than Q2_0 of 64");
    }
  }

  readConfig() {
    const { metadata } = this, name = metadata["general.architecture"], architecture = ARCHITECTURES[name];
    if (typeof name !== "string" || !Object.hasOwn(ARCHITECTURES, name)) throw this.refuse("general.architecture", `expected one of ${Object.keys(ARCHITECTURES).join(", ")}, got ${quote(name)}; the package runs more`);
    const get = (key, other) => metadata[`${name}.${key}`] ?? other, heads = get("attention.head_count");
    const scaling = get("rope.scaling.type", "none");
    if (scaling !== "none") throw this.refuse(`${name}.rope.scaling.type`, `${quote(scaling)} is not run in this page`);
    const activation = get("hidden_activation", architecture.activation);
    if (!["relu2", "silu", "swish"].includes(activation)) throw this.refuse(`${name}.hidden_activation`, `expected relu2 or silu, got ${quote(activation)}`);
    const others = Object.keys(metadata).filter((key) => key.startsWith("prism.") || (key.startsWith(`${name}.`) && !READ_KEYS.includes(key.slice(name.length + 1))));
    for (const key of others) if (metadata[key]) throw this.refuse(key, "is not run in this page; the package does, or says why not");
    const headSize = get("attention.key_length", get("embedding_length") / heads);
    for (const key of ["attention.value_length", "rope.dimension_count"])
      if (get(key, headSize) !== headSize) throw this.refuse(`${name}.${key}`, `differs from the size of a head, ${headSize}`);
    const sizes = { layers: get("block_count"), heads, kvHeads: get("attention.head_count_kv", heads), headSize, hidden: get("embedding_length") };
    const vocabulary = this.tensors.get("token_embd.weight")?.shape[0];
    const numbers = { eps: shortest(get("attention.layer_norm_rms_epsilon")), theta: shortest(get("rope.freq_base", 10000)) };
    const fields = this.check({ ...sizes, ...numbers, ffn: get("feed_forward_length"), vocabulary, context: get("context_length") });
    this.isPermuted = architecture.isPermuted;
    const ends = ["eos", "eot", "eom"].map((key) => metadata[`tokenizer.ggml.${key}_token_id`]).filter((id) => id !== undefined);
    this.config = { ...fields, ...architecture, activation, tied: !this.tensors.has("output.weight"), ends: this.expect("eos_token_id", ends, "a list of whole numbers"), kind: `GGUF, ${name}` };
    if (!architecture.subNorms) this.findInputs();
  }

  // Where the architecture does not say it: a matrix of several scales is no BitLinear, so all inputs stay floats.
  findInputs() {
    const named = ["name", "basename", "source.url"].some((key) => FLOAT_INPUTS.test(this.metadata[`general.${key}`] ?? ""));
    this.hasFloatInputs = named || [...this.tensors.values()].some(({ kind }) => kind === "Q2_0");
  }

  // By what only the right order shows, as the package finds it: an input that a layer uses little has few weights that are
  // not 0. So these shares go with the weights of the norm before it, and those of down_proj with the rows of gate and up.
  async findI2SLayout() {
    const sums = { x86: 0, arm: 0, interleaved: 0 }, { layers, subNorms } = this.config;
    const before = { q_proj: "attn", k_proj: "attn", v_proj: "attn", gate_proj: "ffn", up_proj: "ffn", ...(subNorms && { o_proj: "attn_sub", down_proj: "ffn_sub" }) };
    const add = (columns, vectors) => Object.keys(sums).forEach((layout) => (sums[layout] += columns[layout] ? squaredZ(columns[layout], vectors[layout] ?? vectors) : -Infinity));
    let best = "x86", isDecided = false;
    if (![...this.tensors.values()].some(({ kind }) => kind === "I2_S")) return;
    for (let layer = 0; layer < layers && !isDecided; layer += Math.ceil(layers / 8)) {
      const rows = {};
      for (const part of Object.keys(GGUF_LINEARS)) {
        const theirs = `blk.${layer}.${GGUF_LINEARS[part]}.weight`, { kind, shape } = this.tensors.get(theirs) ?? {};
        if (kind !== "I2_S" || shape.length !== 2) continue; // what is wrong with it is said when it is read
        const [, bytes] = await this.raw(theirs, shape), columns = {};
        rows[part] = {};
        for (const layout of Object.keys(sums).filter((each) => fitsI2S(each, ...shape))) {
          const codes = decodeI2S(bytes, layout, shape[1]), down = (columns[layout] = new Float64Array(shape[1])), across = (rows[part][layout] = new Float64Array(shape[0]));
          codes.forEach((code, at) => {
            if (code !== 1) (down[at % shape[1]] += 1), (across[Math.floor(at / shape[1])] += 1);
          });
        }
        if (before[part]) add(columns, await this.norm(`blocks.${layer}.${before[part]}_norm`, shape[1]));
        if (part === "down_proj") for (const other of ["gate_proj", "up_proj"]) if (rows[other]) add(columns, rows[other]);
      }
      const [first, second] = Object.keys(sums).sort((a, b) => sums[b] - sums[a]);
      isDecided = sums[first] > 0 && (sums[second] === -Infinity || (sums[first] - sums[second] >= 40 && sums[first] >= 2 * sums[second]));
      best = isDecided || sums.x86 === -Infinity ? first : "x86";
    }
    this.layout = best;
    this.note = `I2_S in the order of ${best}, ${isDecided ? "as the weights show" : "assumed: the weights do not tell"}.`;
  }

  async raw(name, shape) {
    const tensor = this.entry(name, shape);
    return [tensor.kind, await this.bytes(tensor.start, tensor.size, tensor.file)];
  }

  theirs(name) {
    const [, layer, part] = name.match(/^blocks\.(\d+)\.(?:attn\.|mlp\.)?(\w+)$/) ?? [null, null, name];
    return (layer === null ? "" : `blk.${layer}.`) + (GGUF_NAMES[part] ?? part);
  }

  async norm(name, size) {
    return this.vector(`${this.theirs(name)}.weight`, size);
  }

  async vector(name, size) {
    const [kind, bytes] = await this.raw(name, [size]);
    if (!FLOATS[kind]) throw this.refuse(name, `expected floats, got ${kind}`);
    return FLOATS[kind](bytes);
  }

  async linear(name, rows, columns) {
    const theirs = this.theirs(name), [kind, bytes] = await this.raw(`${theirs}.weight`, [rows, columns]);
    const heads = !this.isPermuted ? 0 : name.endsWith("q_proj") ? this.config.heads : name.endsWith("k_proj") ? this.config.kvHeads : 0;
    const linear = { rows, columns, ...(await this.matrix(name, kind, bytes, columns)) };
    if (this.tensors.has(`${theirs}.scale`)) linear.scale = round(linear.scale * this.checkScale(`${theirs}.scale`, (await this.vector(`${theirs}.scale`, 1))[0]));
    if (this.tensors.has(`${theirs}.bias`)) linear.bias = await this.vector(`${theirs}.bias`, rows);
    for (const [key, width] of [["codes", columns], ["values", columns], ["scales", columns / linear.group], ["bias", 1]])
      if (heads && linear[key]) linear[key] = halves(linear[key], rows, width, heads);
    return linear;
  }

  async matrix(name, kind, bytes, columns) {
    const isLinear = name.startsWith("blocks."), isBitNet = this.config.subNorms;
    if (BLOCKS[kind]) {
      const { codes, scales } = decodeBlocks(bytes, BLOCKS[kind]), own = [...new Set(scales.filter((scale) => scale !== 0))];
      this.checkCodes(name, codes);
      if (!scales.every(Number.isFinite)) throw this.refuse(name, "holds a scale that is not finite");
      if (isLinear && isBitNet && (kind === "Q2_0" || own.length > 1)) throw this.refuse(name, `is ${kind} with several scales: no BitLinear has them`);
      if (isLinear && !this.hasFloatInputs && own.length > 1) throw this.refuse(name, `has several scales, so its inputs are floats; ${CONVERT}`);
      if (isLinear && !this.hasFloatInputs) return { codes, scale: own.length ? this.checkScale(name, own[0]) : round(1e-5) };
      return { codes, scales, group: Math.min(BLOCKS[kind].values, columns) };
    }
    if (kind === "I2_S") {
      if (!isLinear || !fitsI2S(this.layout, bytes.length - I2_S_TAIL, 4)) throw this.refuse(name, `is I2_S, which does not fit a matrix of rows of ${columns} in the order of ${this.layout}`);
      const scale = words(bytes.slice(-I2_S_TAIL, -I2_S_TAIL + 4), Float32Array)[0];
      return { codes: this.checkCodes(name, decodeI2S(bytes, this.layout, columns)), scale: this.checkScale(name, scale) };
    }
    const values = decodeFloats(kind, bytes);
    if (!isLinear || this.hasFloatInputs) return { values };
    return splitTernary(values) ?? (isBitNet ? quantize(values) : { values });
  }

  tokenizer() {
    const { metadata } = this, get = (key) => metadata[`tokenizer.ggml.${key}`], model = get("model"), pieces = get("tokens");
    if (!pieces) return null;
    const scores = get("scores"), bos = get("bos_token_id"), merges = get("merges"), types = get("token_type") ?? this.checkPieces(pieces).map(() => 1);
    this.checkPieces(pieces, scores, types, merges);
    this.expect("bos_token_id", bos, "a token's id, or none");
    if (model === "gpt2") return BytePairTokenizer.open(pieces, merges, types, get("pre"), get("add_bos_token"), bos);
    if (model !== "llama" || !scores || get("add_space_prefix") === false || get("remove_extra_whitespaces") || get("precompiled_charsmap")) return null;
    return new Tokenizer({ pieces, scores, types }, get("add_bos_token") === false ? null : bos);
  }
}

// The shortest decimal that is the same float32, as the number was meant: 9.99999974e-06 is 1e-05.
function shortest(value) {
  if (!isFinite(value)) return value; // is refused
  for (let digits = 1; digits < 10; digits++) if (round(Number(value.toPrecision(digits))) === value) return Number(value.toPrecision(digits));
  return value;
}

// Rows of q or k from neighbouring pairs, as llama.cpp has them under "llama", to halves.
function halves(array, rows, width, heads) {
  const size = rows / heads, out = array.slice();
  for (let row = 0; row < rows; row++) {
    const j = row % size, from = row - j + (j < size / 2 ? 2 * j : 2 * (j - size / 2) + 1);
    out.set(array.subarray(from * width, (from + 1) * width), row * width);
  }
  return out;
}

// -- safetensors ------------------------------------------------------------------------------------------------------

const SIZES = { F32: 4, F16: 2, BF16: 2, U8: 1, I64: 8 };
const HF_NORMS = { attn_norm: "input_layernorm", ffn_norm: "post_attention_layernorm", attn_sub_norm: "self_attn.attn_sub_norm", ffn_sub_norm: "mlp.ffn_sub_norm", q_norm: "self_attn.q_norm", k_norm: "self_attn.k_norm" };
const HF_NAMES = { embedding: "model.embed_tokens", final_norm: "model.norm", lm_head: "lm_head" };
const DEFAULTS = { sliding_window: null, layer_types: [], embedding_scale: 1, head_scale: 1, logit_softcap: null, pooling: "last" };

class Safetensors extends Reader {
  // parts: the files of the weights; files: all that were dropped
  static async open(parts, files) {
    const reader = parts[0].name.endsWith(".bitnet.safetensors") ? new Native(parts[0]) : new HuggingFace(parts[0]);
    reader.tensors = new Map();
    for (const file of parts) await reader.readHeader(file);
    await reader.readConfig(files);
    return reader;
  }

  async readHeader(file) {
    this.file = file; // for what is refused
    const first = new DataView(await file.slice(0, 9).arrayBuffer());
    if (first.byteLength < 9 || first.getUint8(8) !== 0x7b) throw new Error(`${file.name} is not a safetensors file, whatever its name says. Drop a .gguf or .safetensors file.`); // 0x7b: {
    const size = Number(first.getBigUint64(0, true));
    if (!size || size > Math.min(MAX_HEADER, file.size - 8)) throw this.refuse("header", `of ${size} bytes in a file of ${file.size}`);
    const { __metadata__: metadata = {}, ...tensors } = this.parse("header", await this.bytes(8, size));
    this.metadata = this.expect("__metadata__", metadata, "an object");
    for (const [name, tensor] of Object.entries(tensors)) {
      const { dtype, shape, data_offsets: place } = this.expect(name, tensor, "an object");
      const expected = this.expect(name, shape, "a list of whole numbers").reduce((a, b) => a * b, 1) * SIZES[dtype];
      if (!Object.hasOwn(SIZES, dtype)) throw this.refuse(name, `is ${quote(dtype)}, which this page does not read`);
      const [begin, end] = this.expect(name, place, "a list of whole numbers");
      if (end - begin !== expected || place.length !== 2) throw this.refuse(name, `bytes ${begin} to ${end} for ${dtype} of shape ${shape}`);
      if (8 + size + end > file.size) throw this.refuse(name, CUT);
      this.addTensor(name, { dtype, shape, data_offsets: place, file, start: 8 + size });
    }
  }

  async raw(name, shape) {
    const { dtype, data_offsets: [begin, end], file, start } = this.entry(name, shape);
    return [dtype, await this.bytes(start + begin, end - begin, file)];
  }

  async floats(name, shape) {
    const [dtype, bytes] = await this.raw(name, shape);
    if (!FLOATS[dtype]) throw this.refuse(name, `expected floats, got ${dtype}`);
    return FLOATS[dtype](bytes);
  }

  shape(name) {
    return this.tensors.get(name)?.shape ?? [];
  }

  tokenizer() {
    const files = this.tokenizerFiles, parse = (name) => (files[name] ? this.parse(name, files[name]) : {});
    const bos = this.expect("bos_token_id", parse("tokenizer_config.json").add_bos_token === false ? null : this.config.bos, "a token's id, or none");
    if (!files["tokenizer.model"]) {
      const tokenizer = BytePairTokenizer.fromJson(parse("tokenizer.json"), this.config.vocabulary);
      if (tokenizer) this.checkPieces(tokenizer.pieces), this.expect("post_processor", tokenizer.bos, "a token's id, or none");
      return tokenizer;
    }
    const vocabulary = readSentencePieces(files["tokenizer.model"], this.config.vocabulary);
    if (!vocabulary) return null;
    this.checkPieces(vocabulary.pieces, vocabulary.scores, vocabulary.types);
    return new Tokenizer(vocabulary, bos);
  }
}

// bitnet_ref's own file: config and tokenizer are in it.
class Native extends Safetensors {
  async readConfig() {
    const { format, format_version, config } = this.metadata;
    if (format !== "bitnet_ref" || Number(format_version) > 2) throw this.refuse("__metadata__", `expected a native file of version 1 or 2, got ${quote(format)} ${quote(format_version)}`);
    const own = this.parse("config", new TextEncoder().encode(config)), rope = this.expect("rope", own.rope, "an object");
    if (!["bitnet", "llama", "qwen3"].includes(own.model_type)) throw this.refuse("model_type", `expected bitnet, llama or qwen3, got ${quote(own.model_type)}; the package runs more`);
    for (const [key, value] of Object.entries(DEFAULTS))
      if (JSON.stringify(own[key] ?? value) !== JSON.stringify(value)) throw this.refuse(key, `${quote(own[key])} is not run in this page`);
    if (rope.rope_type !== "default") throw this.refuse("rope_type", `${quote(rope.rope_type)} is not run in this page`);
    if (!["relu2", "silu"].includes(own.activation)) throw this.refuse("activation", `expected relu2 or silu, got ${quote(own.activation)}`);
    if (own.quantization?.use_rms_norm) throw this.refuse("use_rms_norm", "norms of each linear are not run in this page");
    const sizes = { layers: own.num_hidden_layers, heads: own.num_attention_heads, kvHeads: own.num_key_value_heads, headSize: own.head_dim };
    const numbers = { eps: own.norm_eps, theta: rope.theta, context: own.max_position_embeddings };
    const fields = this.check({ ...sizes, ...numbers, hidden: own.hidden_size, ffn: own.intermediate_size, vocabulary: own.vocab_size });
    const flags = { activation: own.activation, subNorms: own.sub_norms, headNorms: own.model_type === "qwen3", tied: own.tie_word_embeddings };
    this.config = { ...fields, ...flags, ends: this.expect("eos_token_ids", own.eos_token_ids, "a list of whole numbers"), bos: own.bos_token_id, kind: `bitnet_ref, ${own.model_type}` };
    for (const name of this.names.filter((each) => each.startsWith("tokenizer/")))
      this.tokenizerFiles[name.slice("tokenizer/".length)] = (await this.raw(name, this.shape(name)))[1];
  }

  norm(name, size) {
    return this.floats(name, [size]);
  }

  async linear(name, rows, columns) {
    const linear = { rows, columns };
    if (this.tensors.has(`${name}.bias`)) linear.bias = await this.floats(`${name}.bias`, [rows]);
    const perByte = this.tensors.has(`${name}.trits`) ? 5 : this.tensors.has(`${name}.packed`) ? 4 : 0;
    if (!perByte) return { ...linear, values: await this.floats(name === "embedding" ? name : `${name}.weight`, [rows, columns]) };
    const across = Math.ceil(columns / perByte), [, bytes] = await this.raw(`${name}.${perByte === 5 ? "trits" : "packed"}`, [rows, across]);
    linear.codes = new Uint8Array(rows * columns);
    for (let row = 0, at = 0; row < rows; row++)
      for (let j = 0; j < columns; j++, at++) {
        const byte = bytes[row * across + Math.floor(j / perByte)], place = j % perByte;
        linear.codes[at] = perByte === 4 ? (byte >> (2 * place)) & 3 : Math.floor(byte / 3 ** place) % 3;
      }
    this.checkCodes(name, linear.codes);
    if (this.tensors.has(`${name}.scales`)) {
      const [, group] = await this.raw(`${name}.group`, []);
      linear.group = Number(words(group, BigInt64Array)[0]);
      return { ...linear, scales: await this.floats(`${name}.scales`, [rows, Math.ceil(columns / linear.group)]) };
    }
    return { ...linear, scale: this.checkScale(name, (await this.floats(`${name}.w_dequant_scale`, []))[0]) };
  }
}

// model.safetensors of a folder of the hub; config.json and the tokenizer are dropped with it.
class HuggingFace extends Safetensors {
  async readConfig(files) {
    const find = (name) => files.find((each) => each.name === name);
    if (!find("config.json")) throw new Error(`${this.file.name} comes with a config.json. Drop both together, and the tokenizer's file.`);
    const own = this.parse("config.json", await this.bytes(0, MAX_HEADER, find("config.json"))), stated = own.quantization_config, type = own.model_type;
    if (!["bitnet", "llama"].includes(type)) throw this.refuse("model_type", `expected bitnet or llama, got ${quote(type)}; the package runs more`);
    if (stated?.quant_method !== "bitnet") throw this.refuse("quantization_config", `expected the quant_method bitnet, got ${quote(stated?.quant_method)}`);
    const rope = this.expect("rope_parameters", own.rope_parameters ?? own.rope_scaling ?? {}, "an object"), ropeType = rope.rope_type ?? rope.type ?? "default";
    if (ropeType !== "default") throw this.refuse("rope_type", `${quote(ropeType)} is not run in this page`);
    for (const key of ["sliding_window", "weight_bits"]) if (own[key]) throw this.refuse(key, "is not run in this page");
    if (stated.use_rms_norm) throw this.refuse("use_rms_norm", "norms of each linear are not run in this page");
    const activation = own.hidden_act ?? (type === "bitnet" ? "relu2" : "silu"), heads = own.num_attention_heads;
    if (!["relu2", "silu"].includes(activation)) throw this.refuse("hidden_act", `expected relu2 or silu, got ${quote(activation)}`);
    const headSize = own.head_dim ?? own.hidden_size / heads, sizes = { layers: own.num_hidden_layers, heads, kvHeads: own.num_key_value_heads ?? heads, headSize };
    const numbers = { eps: own.rms_norm_eps ?? (type === "bitnet" ? 1e-5 : 1e-6), theta: rope.rope_theta ?? own.rope_theta ?? (type === "bitnet" ? 500000 : 10000) };
    const fields = this.check({ ...sizes, ...numbers, hidden: own.hidden_size, ffn: own.intermediate_size, vocabulary: own.vocab_size, context: own.max_position_embeddings ?? 2048 });
    const tied = own.tie_word_embeddings ?? false, isOnline = stated.quantization_mode === "online" && stated.linear_class === "autobitlinear";
    this.convention = (stated.linear_class ?? "bitlinear") === "bitlinear" ? "divide" : isOnline ? "absmean" : "multiply";
    const dense = this.expect("modules_to_not_convert", stated.modules_to_not_convert ?? [], "a list of texts").filter((name) => name !== "lm_head");
    if (isOnline && dense.length) throw this.refuse("modules_to_not_convert", `${dense[0]} among masters is not run in this page`);
    const ends = this.expect("eos_token_id", [own.eos_token_id ?? []].flat(), "a list of whole numbers");
    this.config = { ...fields, activation, subNorms: type === "bitnet", tied, ends, bos: own.bos_token_id, kind: `safetensors, ${type}` };
    if (tied) this.taken.add("lm_head.weight"); // a copy that some files have
    for (const name of ["tokenizer.model", "tokenizer.json", "tokenizer_config.json"])
      if (find(name)) this.tokenizerFiles[name] = await new Reader(find(name)).bytes(0, MAX_HEADER);
  }

  theirs(name) {
    const [, layer, kind, part] = name.match(/^blocks\.(\d+)\.(?:(attn|mlp)\.)?(\w+)$/) ?? [];
    if (layer === undefined) return HF_NAMES[name];
    return `model.layers.${layer}.${kind ? `${kind === "attn" ? "self_attn" : "mlp"}.${part}` : HF_NORMS[part]}`;
  }

  norm(name, size) {
    return this.floats(`${this.theirs(name)}.weight`, [size]);
  }

  async linear(name, rows, columns) {
    const theirs = this.theirs(name), weight = `${theirs}.weight`, linear = { rows, columns };
    if (this.tensors.has(`${theirs}.bias`)) linear.bias = await this.floats(`${theirs}.bias`, [rows]);
    if (this.tensors.get(weight)?.dtype !== "U8") {
      const values = await this.floats(weight, [rows, columns]), isMaster = this.convention === "absmean" && name.startsWith("blocks.");
      return { ...linear, ...(isMaster ? quantize(values) : { values }) };
    }
    const quarter = rows / 4, [, plane] = await this.raw(weight, [quarter, columns]), codes = new Uint8Array(rows * columns);
    for (let at = 0; at < codes.length; at++) codes[at] = (plane[at % plane.length] >> (2 * Math.floor(at / plane.length))) & 3;
    const stored = this.checkScale(theirs, (await this.floats(`${theirs}.weight_scale`, this.shape(`${theirs}.weight_scale`)))[0]);
    const scale = this.convention === "divide" ? round(1 / stored) : stored;
    if (linear.bias && this.convention === "multiply") linear.bias = linear.bias.map((value) => value * scale);
    return { ...linear, codes: this.checkCodes(name, codes), scale };
  }
}
